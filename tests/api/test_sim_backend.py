# SPDX-License-Identifier: Apache-2.0
"""backend="sim": the wrappers over the shipped PTX, held to the reference on the same plan.

The kernels' own matrices are in tests/sm100 and tests/sm120; here it is the path to them: every kind
of plan and operand, split and combine, statistics, graphs, and what happens when a launch fails.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_cases import (
    POISON_BYTE,
    assert_lse_close,
    assert_same_bits,
    head_rel_l2,
    int32,
    make_batch,
    offsets,
    paged,
    rel_l2,
    static_stats,
)
from sim_graph import SimulatedGraph

import mpfa
from mpfa.backends import cuda, kernels, launch

DIM = 64
READY = sorted({k.format for k in kernels.KERNELS if k.ready})
COMPENSATIONS = {
    "mxfp8": [("none", 0)],
    "qk4pv8": [("none", 0), ("mean", 0), ("channels", 16), ("mean+channels", 15)],
}
FORMATS = [(f, c, n) for f in READY for c, n in COMPENSATIONS[f]]
IDS = [f"{f}-{c}" for f, c, _ in FORMATS]
GRAPH = {"use_cuda_graph": True, "max_batch_size": 3, "max_num_pages": 40}
PLAIN = [f for f in FORMATS if f[1] in ("none", "mean")]
PLAIN_IDS = [f"{f}-{c}" for f, c, _ in PLAIN]


@pytest.fixture(scope="session")
def loaded():
    from mpfa import sim
    from mpfa.jit import toolkit

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    try:
        return sim.simulator()
    except RuntimeError as error:
        pytest.skip(f"the simulator cannot run in this process: {error}")


@pytest.fixture
def simulator(loaded):
    """All watchers, asynchronous copies as late as allowed."""
    with loaded.options(mode="lazy", watch="all", seed=5, timeout=120):
        loaded.clear()
        yield loaded
        loaded.clear()


@pytest.fixture
def device_path(monkeypatch, simulator):
    """Everything as on a GPU, the quantise and statistics kernels included."""
    from mpfa.jit import attention

    class DevicePath(launch.Launcher):
        load_module = launch.SimulatedLauncher.load_module

        def run(self, inputs) -> None:
            with simulator.options(device=attention.SIM_DEVICES[self.kernel.major]):
                super().run(inputs)

    monkeypatch.setattr(launch, "SimulatedLauncher", DevicePath)
    return simulator


def entries(simulator) -> list[str]:
    simulator.check()
    return [record["kernel"] for record in simulator.launches()]


def entry_of(format: str, operation: str) -> str:
    return kernels.find_kernel(operation, format=format).entry


class Setup:
    """A batch, its plan arguments and what run() takes, for one kind of plan."""

    def __init__(
        self, kind: str, format: str, compensation: str = "none", channels: int = 0, *,
        q_lens=(5, 0, 40), kv_lens=(70, 9, 133), heads=(6, 2), page_size=64, seed=1, raw=False,
        bind=True, **options: object,
    ) -> None:  # fmt: skip
        self.kind, self.operation = kind, "decode" if kind == "decode" else "prefill"
        self.batch = make_batch(q_lens, kv_lens, *heads, DIM, seed=seed, k_bias=3.0, outliers=4.0)
        self.stats = static_stats(self.batch, compensation, channels)
        hq, hkv = heads
        self.config = mpfa.KVCacheConfig(format, hkv, DIM, page_size, hq, compensation, channels)
        self.options = {**self.batch.heads, "config": self.config, **options}
        self.q, self.run = self.batch.query, {}
        if kind == "ragged":
            self.args = (offsets(q_lens), offsets(kv_lens))
            self.kv = self.batch.kv
            if not raw:
                self.kv = mpfa.quantize_kv(*self.kv, self.config, self.args[1], self.stats)
                self.q = mpfa.quantize_query(self.q, self.config, self.stats)
            elif compensation != "mean":  # "mean" without stats: per-request means of the call
                self.run["stats"] = self.stats
            return
        pages = paged(self.batch, self.config, stats=self.stats, seed=9, bind=bind)
        self.kv = pages.cache
        self.args = pages.table if kind == "decode" else (offsets(q_lens), *pages.table)
        if kind == "decode":
            self.options["q_len_per_request"] = q_lens[0]

    def wrapper(self, backend: str, **graph: object):
        cls = mpfa.BatchDecodeWrapper if self.kind == "decode" else mpfa.BatchPrefillWrapper
        size = mpfa.workspace_size(*self.args, num_sm=148, **self.options, **graph)
        workspace = torch.full((size,), POISON_BYTE, dtype=torch.uint8)
        return cls(workspace, backend=backend, **graph)

    def result(self, backend: str, *, dtype=torch.float32, **run: object):
        wrapper = self.wrapper(backend)
        wrapper.plan(*self.args, **self.options)
        out = torch.full((self.batch.query.shape), torch.nan, dtype=dtype)
        return wrapper.run(self.q, self.kv, out=out, return_lse=True, **self.run, **run)


def assert_matches(got, want) -> None:
    assert not got[0].isnan().any()
    assert head_rel_l2(got[0], want[0]) <= 2e-3
    assert_lse_close(got[1], want[1], 2e-4)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=IDS)
@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_prefill(simulator, kind, format, compensation, channels) -> None:
    setup = Setup(kind, format, compensation, channels, causal=True)
    got = setup.result("sim")
    names = entries(simulator)
    assert len(names) == 1 and entry_of(format, "prefill") in names[0], names
    assert_matches(got, setup.result("reference"))
    assert len(entries(simulator)) == 1, "the reference launches nothing"


@pytest.mark.parametrize("format", READY)
def test_masks_soft_cap_and_sinks(simulator, format) -> None:
    compensation = "none" if format == "mxfp8" else "mean"
    setup = Setup("paged", format, compensation, causal=True, window_left=37, logits_soft_cap=20.0)
    sinks = torch.linspace(-3.0, 4.0, 6)
    assert_matches(setup.result("sim", sinks=sinks), setup.result("reference", sinks=sinks))


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=IDS)
def test_split_decode(simulator, format, compensation, channels) -> None:
    setup = Setup(
        "decode", format, compensation, channels, q_lens=(2, 2, 2), kv_lens=(300, 0, 1400)
    )
    sinks = torch.linspace(-3.0, 4.0, 6)
    got = setup.result("sim", sinks=sinks)
    names = entries(simulator)
    assert len(names) == 2, names
    assert entry_of(format, "decode") in names[0] and "combine_states" in names[1]
    assert_matches(got, setup.result("reference", sinks=sinks))


@pytest.mark.parametrize("format", READY)
def test_split_prefill(simulator, format) -> None:
    setup = Setup("ragged", format, causal=True, fixed_split_pages=1)
    got = setup.result("sim")
    assert "combine_states" in entries(simulator)[-1]
    assert_matches(got, setup.result("reference"))


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=IDS)
def test_raw_ragged_operands(simulator, format, compensation, channels) -> None:
    """q, k and v as bf16: quantised into the workspace, "mean" with the means of this call."""
    setup = Setup("ragged", format, compensation, channels, raw=True, causal=True)
    got = setup.result("sim", dtype=torch.bfloat16)
    want = setup.result("reference", dtype=torch.bfloat16)
    assert head_rel_l2(got[0].float(), want[0].float()) <= 3e-3
    assert_lse_close(got[1], want[1], 2e-4)


@pytest.mark.parametrize("format", READY)
def test_single_prefill(simulator, format) -> None:
    batch = make_batch([33], [50], 4, 2, DIM, dtype=torch.float16, seed=3)
    args = (batch.query, *batch.kv)
    options = {"format": format, "causal": True, "return_lse": True, "lse_base": "ln"}
    out, lse = mpfa.single_prefill(*args, **options, backend="sim")
    assert entry_of(format, "prefill") in entries(simulator)[0] and out.dtype == torch.float16
    want, want_lse = mpfa.single_prefill(*args, **options, backend="reference")
    assert rel_l2(out.float(), want.float()) <= 3e-3
    assert_lse_close(lse, want_lse, 2e-4)


@pytest.mark.parametrize("format", READY)
def test_one_plan_many_layers(simulator, format) -> None:
    """run() again with other tensors of the same lengths, as the layers of a model do."""
    setup = Setup("paged", format)
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    first = wrapper.run(setup.q, setup.kv, **setup.run)
    other = Setup("paged", format, seed=2)
    second = wrapper.run(other.q, other.kv)
    assert_same_bits(second, other.result("sim", dtype=torch.bfloat16)[0])
    assert_same_bits(wrapper.run(setup.q, setup.kv), first)
    assert not torch.equal(first, second)


def test_an_empty_batch_launches_nothing(simulator) -> None:
    setup = Setup("ragged", READY[0], q_lens=(), kv_lens=())
    out, lse = setup.result("sim")
    assert out.shape == (0, 6, DIM) and lse.shape == (0, 6) and entries(simulator) == []


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=IDS)
@pytest.mark.parametrize("kind", ["raw", "quantised", "no page"])
def test_no_keys_at_all(simulator, kind, format, compensation, channels) -> None:
    """0 and the LSE of the sinks, from tensors of no token and a cache of no page."""
    data = make_batch([7], [40], 6, 2, DIM, seed=4)
    stats = static_stats(data, compensation, channels)
    config = mpfa.KVCacheConfig(format, 2, DIM, 64, 6, compensation, channels)
    k, v = data.k[0][:0], data.v[0][:0]
    sinks = torch.linspace(-3.0, 4.0, 6)
    if kind == "raw":
        out, lse = mpfa.single_prefill(
            data.q[0], k, v, format=format, compensation=compensation, channels=channels,
            stats=None if compensation == "mean" else stats, sinks=sinks, return_lse=True,
            backend="sim",
        )  # fmt: skip
    else:
        args, bound = (offsets([7]), offsets([0])), stats
        if kind == "quantised":
            kv = mpfa.quantize_kv(k, v, config, args[1], stats)
        else:
            kv, bound = mpfa.PagedKVCache.allocate(config, 0, "cpu", stats), None
            args = (*args, int32([]), int32([0]))
        options = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": DIM, "config": config}
        size = mpfa.workspace_size(*args, num_sm=148, **options)
        wrapper = mpfa.BatchPrefillWrapper(torch.empty(size, dtype=torch.uint8), backend="sim")
        wrapper.plan(*args, **options)
        out, lse = wrapper.run(data.q[0], kv, stats=bound, sinks=sinks, return_lse=True)
    assert len(entries(simulator)) == 1
    assert out.shape == (7, 6, DIM) and (out == 0).all()
    assert_lse_close(lse, (sinks / math.log(2.0)).expand(7, 6), 1e-5)


@pytest.mark.parametrize("pdl", ["off", "start"])
@pytest.mark.parametrize("format", READY)
def test_a_failed_launch_raises_with_its_report(simulator, format, pdl) -> None:
    """Metadata damaged after plan(), which run() does not look at: rows far outside q and out.

    With pdl="start" the simulator runs a launch after the call that made it has returned.
    """
    from mpfa.sim import SimulationError

    setup = Setup("paged", format)
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    wrapper._plan.metadata_view(wrapper._metadata, "qo_indptr").add_(1 << 24)
    with (
        simulator.options(pdl=pdl),
        pytest.raises(SimulationError, match="(?s)" + entry_of(format, "prefill")),
    ):
        wrapper.run(setup.q, setup.kv)


@pytest.mark.parametrize("format", READY)
def test_a_later_error_is_not_told_with_an_earlier_report(simulator, format) -> None:
    """A RuntimeError without a launch stays what it is, whatever the simulator said before."""
    from mpfa.sim import SimulationError

    class NoMemory:
        def run(self, *args) -> None:
            raise RuntimeError("cannot get shared memory")

    setup = Setup("paged", format)
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    wrapper._plan.metadata_view(wrapper._metadata, "qo_indptr").add_(1 << 24)
    with pytest.raises(SimulationError):
        wrapper.run(setup.q, setup.kv)
    assert simulator.last_message()
    wrapper.plan(*setup.args, **setup.options)
    launcher = wrapper._make_launcher(format)
    launcher.module, wrapper._launcher = NoMemory(), launcher
    with pytest.raises(RuntimeError, match="^cannot get shared memory$") as caught:
        wrapper.run(setup.q, setup.kv)
    assert not isinstance(caught.value, SimulationError)


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A copy whose address is ``by`` bytes past a multiple of 16."""
    bytes_ = tensor.contiguous().view(torch.uint8)
    raw = torch.zeros(bytes_.numel() + 32, dtype=torch.uint8)
    begin = -raw.data_ptr() % 16 + by
    copy = raw[begin : begin + bytes_.numel()].view(bytes_.shape)
    copy.copy_(bytes_)
    return copy.view(tensor.dtype)


@pytest.mark.parametrize("format", READY)
def test_misaligned_pages_are_refused(simulator, format) -> None:
    """The kernels copy 16 bytes at a time; a view of other alignment cannot be read."""
    setup = Setup("paged", format)
    cache = setup.kv
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    tensors = {**cache.tensors, "v": shifted(cache.v, 3)}
    odd = mpfa.PagedKVCache(config=cache.config, stats=cache.stats, **tensors)
    strides = ", ".join(str(s) for s in odd.v.stride())
    text = (
        rf"^v: must be aligned to 16 bytes in every row, got an address of 3 modulo 16 and strides "
        rf"of \[{strides}\] bytes for shape \[{odd.num_pages}, 2, 64, 64\]$"
    )
    with pytest.raises(ValueError, match=text):
        wrapper.run(setup.q, odd)
    # Rows 72 bytes apart.
    pages, heads, rows, width = cache.v.shape
    wide = torch.zeros(pages, heads, rows, width + 8, dtype=torch.uint8).view(cache.v.dtype)
    tensors = {**cache.tensors, "v": wide[..., :width]}
    odd = mpfa.PagedKVCache(config=cache.config, stats=cache.stats, **tensors)
    with pytest.raises(ValueError, match=r"v: .*16 bytes.* strides of \[9216, 4608, 72, 1\] bytes"):
        wrapper.run(setup.q, odd)
    assert entries(simulator) == []


# What docs/formats.md says that each kernel asks for, in bytes; operands of D = 64, pages of 64.
ALIGNMENTS = {
    "mxfp8": {"q": 4, "q_scale": 2, "k": 16, "k_scale": 2, "v": 16, "v_scale": 4},
    "qk4pv8": {"q": 16, "q_scale": 4, "k": 16, "k_scale": 4, "v": 16},
}


@pytest.mark.parametrize("format,name", [(f, n) for f in READY for n in ALIGNMENTS[f]])
def test_alignment_rules(simulator, format, name) -> None:
    """An operand at the least allowed alignment is served; at half of it, refused by name."""
    least = ALIGNMENTS[format][name]
    setup = Setup("ragged", format, q_lens=(3,), kv_lens=(40,))
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    want = wrapper.run(setup.q, setup.kv)
    owner = setup.q if name.startswith("q") else setup.kv

    def run(by: int) -> torch.Tensor:
        moved = dataclasses.replace(owner, **{name: shifted(getattr(owner, name), by)})
        q, kv = (moved, setup.kv) if owner is setup.q else (setup.q, moved)
        return wrapper.run(q, kv)

    assert_same_bits(run(least), want)
    with pytest.raises(ValueError, match=f"^{name}: must be aligned to {least} bytes"):
        run(least // 2)


@pytest.mark.parametrize("format", READY)
def test_alignment_of_out(simulator, format) -> None:
    """Two elements in mxfp8, 16 bytes in qk4pv8."""
    setup = Setup("ragged", format, q_lens=(3,), kv_lens=(40,))
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    want = wrapper.run(setup.q, setup.kv)
    least = 4 if format == "mxfp8" else 16
    out = shifted(torch.zeros_like(want), least)
    assert_same_bits(wrapper.run(setup.q, setup.kv, out=out), want)
    with pytest.raises(ValueError, match=f"^out: must be aligned to {least} bytes"):
        wrapper.run(setup.q, setup.kv, out=shifted(want, least // 2))


# ---- as on a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("format,compensation,channels", PLAIN, ids=PLAIN_IDS)
def test_the_quantise_kernels_give_what_the_reference_gives(
    simulator, request, format, compensation, channels
) -> None:
    """The GPU's sequence of launches, on the simulator, bit for bit with backend "sim"."""
    setup = Setup("ragged", format, compensation, channels, raw=True, causal=True)
    want = setup.result("sim")
    request.getfixturevalue("device_path")
    simulator.clear()
    got = setup.result("sim")
    names = entries(simulator)
    assert sum(f"quant_{format}" in name for name in names) == 2
    assert entry_of(format, "prefill") in names[-1]
    # Means of q and of k: two kernels each.
    assert len(names) == (7 if compensation == "mean" else 3), names
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("format", [f for f in READY if f == "qk4pv8"])
@pytest.mark.parametrize("graph", [{}, {**GRAPH, "max_total_qo_len": 8}])
def test_per_request_statistics(device_path, format, graph) -> None:
    """Row b of the statistics serves request b; a graph copies them to their fixed place."""
    setup = Setup("decode", format, "mean", q_lens=(2, 2, 2), kv_lens=(300, 0, 200), bind=False)
    batch = setup.batch
    kv_indptr = offsets(batch.kv_lens)
    stats = mpfa.SmoothingStats.from_tensors(
        batch.query, batch.kv[0], offsets(batch.qo_lens), kv_indptr=kv_indptr
    )
    results = []
    for backend, limits in (("sim", graph), ("reference", {})):
        wrapper = setup.wrapper(backend, **limits)
        wrapper.plan(*setup.args, **setup.options)
        out = torch.empty(batch.query.shape)
        results.append(wrapper.run(batch.query, setup.kv, stats=stats, out=out, return_lse=True))
    assert_matches(*results)


@pytest.mark.parametrize("format,compensation,channels", PLAIN, ids=PLAIN_IDS)
@pytest.mark.parametrize("kind", ["decode", "paged"])
def test_capture_once_and_plan_again(device_path, kind, format, compensation, channels) -> None:
    """Replays after new plans (other lengths, pages, batch sizes) equal fresh runs."""

    def at(seed: int, q_lens, kv_lens) -> Setup:
        extra = {} if kind == "decode" else {"fixed_split_pages": 4}
        return Setup(
            kind, format, compensation, channels, seed=seed, q_lens=q_lens, kv_lens=kv_lens, **extra
        )

    q_lens = [(2, 2, 2), (2, 2), (2, 2, 2)] if kind == "decode" else [(3, 1, 5), (1,), (0, 9)]
    kv_lens = [(300, 64, 700), (1100, 129), (0, 1500, 1)]
    if kind == "paged":
        kv_lens = [(300, 64, 200), (700,), (129, 500)]
    setups = [
        at(seed, q, kv[: len(q)]) for seed, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True))
    ]
    # One cache and one query buffer, as large as the largest plan, hold every batch in turn.
    largest = max((s.kv for s in setups), key=lambda cache: cache.num_pages)
    tokens = 9
    stats = setups[0].stats
    cache = mpfa.PagedKVCache.allocate(largest.config, largest.num_pages, "cpu", stats)
    q = torch.zeros(tokens, 6, DIM, dtype=torch.bfloat16)
    out, lse = torch.empty(tokens, 6, DIM), torch.empty(tokens, 6)
    wrapper = setups[0].wrapper("sim", max_total_qo_len=tokens, **GRAPH)
    graph = None
    for setup in setups:
        wrapper.plan(*setup.args, **setup.options)
        for name, tensor in setup.kv.tensors.items():
            cache.tensors[name][: tensor.shape[0]].view(torch.uint8).copy_(tensor.view(torch.uint8))
        n = setup.q.shape[0]
        q.fill_(torch.nan)  # rows that the plan does not have
        q[:n] = setup.q
        out.fill_(-7.0)
        lse.fill_(-7.0)
        if graph is None:
            graph = SimulatedGraph(
                device_path, lambda: wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
            )
            assert (out == -7.0).all(), "a captured run does not execute"
        graph.replay()
        device_path.check()
        want = setup.result("sim") if stats is None else _with_stats(setup, stats)
        assert_same_bits(out[:n], want[0])
        assert_same_bits(lse[:n], want[1])
        assert (out[n:] == -7.0).all() and (lse[n:] == -7.0).all()
    graph.close()


def _with_stats(setup: Setup, stats):
    """The result with the statistics that the captured cache is bound to."""
    cache = mpfa.PagedKVCache(config=setup.config, stats=stats, **setup.kv.tensors)
    wrapper = setup.wrapper("sim")
    wrapper.plan(*setup.args, **setup.options)
    out = torch.empty(setup.q.shape)
    return wrapper.run(setup.q, cache, out=out, return_lse=True)


def test_cuda_ops_have_a_fake_for_compile() -> None:
    """torch.compile sees the combine as one opaque op that writes its outputs."""
    schema = torch.ops.mpfa.combine_plan.default._schema
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ["out", "lse"] and cuda.combine_plan.__name__ == "combine_plan"


@pytest.mark.parametrize("format", READY)
@pytest.mark.parametrize("kind", ["paged", "decode"])
def test_a_cache_without_pages(simulator, kind, format) -> None:
    """Empty requests need no page; the tensors of such a cache have no address."""
    config = mpfa.KVCacheConfig(format, 2, DIM, 64, 4)
    cache = mpfa.PagedKVCache.allocate(config, 0, "cpu")
    table = (offsets([0, 0]), torch.zeros(0, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    options = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": DIM, "config": config}
    decode = kind == "decode"
    args = table if decode else (offsets([1, 1]), *table)
    size = mpfa.workspace_size(*args, num_sm=148, **options)
    cls = mpfa.BatchDecodeWrapper if decode else mpfa.BatchPrefillWrapper
    wrapper = cls(torch.empty(size, dtype=torch.uint8), backend="sim")
    wrapper.plan(*args, **options)
    out, lse = wrapper.run(torch.ones(2, 4, DIM, dtype=torch.bfloat16), cache, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert len(entries(simulator)) == 1
