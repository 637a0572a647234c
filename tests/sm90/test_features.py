# SPDX-License-Identifier: Apache-2.0
"""Exact cases, truth and features of the SM90 decode kernel, in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases
import decode_cases
import pytest
import sm90_cases
import torch
from decode_cases import COMPENSATIONS, Case
from sim_graph import SimulatedGraph

import mpfa
from mpfa.backends import kernels


def run(case: Case, modules, query="bfloat16", inputs=None, **options):
    inputs = inputs or decode_cases.build(case)
    module = modules[str(case.head_dim)]
    return inputs, sm90_cases.run(module, modules["combine"], inputs, query, **options)


# ---- exact cases -----------------------------------------------------------------------------------


def integer_inputs(case: Case) -> tuple[decode_cases.Inputs, torch.Tensor]:
    """Pages of every e2m1 code and power-of-two scales, V of integers up to 8, and a query of small
    integers: every score is exact in fp32."""
    inputs = decode_cases.build(case)
    gen = torch.Generator().manual_seed(case.seed)
    cache = inputs.pages.cache
    cache.k.random_(0, 256, generator=gen)
    scales = torch.tensor([0x30, 0x38, 0x40], dtype=torch.uint8)  # 1/2, 1, 2
    cache.k_scale.copy_(scales[torch.randint(0, 3, cache.k_scale.shape, generator=gen)])
    cache.v.copy_(torch.randint(-8, 9, cache.v.shape, generator=gen).to(torch.float8_e4m3fn))
    query = torch.randint(-4, 5, inputs.batch.query.shape, generator=gen).bfloat16()
    return inputs, query


@pytest.mark.parametrize("page_size", [128, 64, 32, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_row_sees_one_key(head_dim, page_size, modules, simulator):
    """Window 0: the LSE is the score of one key and the output its V, bit for bit. Codes, scales and
    queries all differ, so a wrong row, nibble, block or channel shows."""
    lengths = (1, 5, 33, 64, 77, 128, 129, 200, 250, 256, 300, 383)
    case = Case(lengths, 5, head_dim, page_size, num_kv_heads=2, window_left=0, seed=4)
    inputs, query = integer_inputs(case)
    _, (out, lse) = run(case, modules, query, inputs)
    want_out, want_lse = sm90_cases.replay(inputs, query)
    assert want_lse.unique().numel() > 60
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
    codes = inputs.pages.cache.v.float()
    for b, n in enumerate(lengths):
        page = int(inputs.pages.indices[inputs.pages.indptr[b] + (n - 1) // page_size])
        v = codes[page, :, (n - 1) % page_size]
        assert torch.equal(out[b], v.repeat_interleave(case.group, dim=0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_code_and_scale(head_dim, modules, simulator):
    """All 16 e2m1 codes under all 127 finite positive e4m3 scales, subnormal ones too, and scale 0:
    one channel of the query picks one code of one key."""
    case = Case((128,), 1, head_dim, 16, num_kv_heads=1, window_left=0, q_len=1)
    inputs = decode_cases.build(case)
    cache = inputs.pages.cache
    gen = torch.Generator().manual_seed(head_dim)
    page, row = int(inputs.pages.indices[7]), 15  # key 127
    channels = torch.arange(head_dim)
    codes = torch.stack([(channels + shift) % 16 for shift in range(16)]).to(torch.uint8)
    for scale in (0, 1, 2, 3, 7, 8, 9, 0x37, 0x38, 0x45, 0x7D, 0x7E):
        cache.k_scale[page, 0, row] = scale
        shift = int(torch.randint(0, 16, (1,), generator=gen))
        packed = codes[shift].view(-1, 2)
        cache.k[page, 0, row] = packed[:, 0] | packed[:, 1] << 4
        picked = int(torch.randint(0, head_dim, (1,), generator=gen))
        query = torch.zeros_like(inputs.batch.query)
        query[0, 0, picked] = 3.0
        _, (_, lse) = run(case, modules, query, inputs)
        value = mpfa.reference.e2m1_decode(codes[shift][picked]) * 3.0
        value = value * mpfa.reference.e4m3_decode(torch.tensor([scale], dtype=torch.uint8))
        want = value * torch.tensor(1 / math.sqrt(head_dim) * math.log2(math.e))
        torch.testing.assert_close(lse[0], want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_scores_average_v(head_dim, modules, simulator):
    """2^n keys of score 0: LSE n and the exact mean of V, whole, split and with a tail block."""
    for n, split in ((128, None), (64, None), (1024, 256), (2048, None), (512, 128)):
        case = Case((n,), 8, head_dim, 64, q_len=1, split_tokens=split, seed=n)
        inputs, query = integer_inputs(case)
        _, (out, lse) = run(case, modules, torch.zeros_like(query), inputs)
        assert torch.equal(lse, torch.full_like(lse, math.log2(n)))
        rows = inputs.pages.indices.long()
        v = inputs.pages.cache.v.float()[rows, 0].flatten(0, 1)[:n]
        assert torch.equal(out, v.mean(dim=0).expand_as(out))


@pytest.mark.parametrize("slot", range(0, 16, 5))
def test_compensation_slots(slot, modules, simulator):
    """K of zeros: what is left are Delta and the channels, exactly."""
    case = Case((129,), 3, 128, 128, "mean+channels", 15, window_left=0, seed=slot)
    inputs, _ = integer_inputs(case)
    cache, q = inputs.pages.cache, inputs.query
    cache.k.zero_()
    gen = torch.Generator().manual_seed(slot)
    for t in (cache.aux_delta, cache.aux_channels, q.a_comp[..., 1:]):
        t.copy_(torch.randint(-4, 5, t.shape, generator=gen).bfloat16())
    q.row_term.zero_()
    if slot < 15:
        q.a_comp[..., 1:] = 0
        q.a_comp[..., 1 + slot] = 2.0
    _, (out, lse) = run(case, modules, "codes", inputs)
    want_out, want_lse = sm90_cases.replay(inputs, "codes")
    assert torch.equal(out, want_out)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=0)


# ---- truth, features -------------------------------------------------------------------------------


@pytest.mark.parametrize(("compensation", "channels"), COMPENSATIONS)
def test_error_to_float64_attention(compensation, channels, modules, simulator):
    """A bf16 query is nearer to exact attention than its codes, which is what the FP4 product of SM100
    takes, and no farther than a bf16 rounding of query and P would be."""
    bias = 3.0 if "mean" in compensation else 0.0
    case = Case(
        (700, 90), 4, 128, 64, compensation, channels, q_len=2, k_bias=bias, q_bias=bias / 3,
        outliers=4.0 if "channels" in compensation else 0.0, seed=5,
    )  # fmt: skip
    truth = None
    errors = {}
    for query in ("bfloat16", "codes"):
        inputs, (out, lse) = run(case, modules, query)
        if truth is None:
            truth, truth_lse = attention_cases.dense_batch(inputs.batch, causal=True)
        errors[query] = attention_cases.rel_l2(out, truth)
        assert (lse.double() * math.log(2) - truth_lse).abs().max() < 0.1
    print(compensation, errors)
    assert errors["bfloat16"] < 0.2
    assert errors["bfloat16"] < errors["codes"]


def test_error_of_the_kernel_itself(modules, simulator):
    """Against float64 attention over the cache's own values the kernel's roundings are below bf16's:
    the same with the query and P in bf16 is farther away."""
    case = Case((900,), 4, 128, 64, scale=1.5, seed=7)
    inputs, (out, _) = run(case, modules)
    cache, rows = inputs.pages.cache, inputs.pages.indices.long()
    k, v, *_ = mpfa.reference.gather_qk4pv8(
        cache.k, cache.k_scale, cache.v, None, None, rows, case.kv_lens[0]
    )

    def attention(q, rounded):
        scores = torch.einsum("thd,kd->thk", q.double(), k[:, 0].double()) / math.sqrt(128)
        p = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        used = p.bfloat16().double() if rounded else p
        return (used @ v[:, 0].double()) / p.sum(dim=-1, keepdim=True)

    query = inputs.batch.query
    truth = attention(query, False)
    assert attention_cases.rel_l2(out, truth) < 3e-4
    assert attention_cases.rel_l2(out, truth) < attention_cases.rel_l2(
        attention(query, True), truth
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4])
def test_query_of_any_size(scale, modules, simulator):
    """A row's power of two keeps fp16 from overflowing or losing small queries."""
    case = Case((300,), 4, 128, 32, seed=2)
    inputs = decode_cases.build(case)
    query = (inputs.batch.query.float() * scale).bfloat16()
    inputs.options["sm_scale"] = 1.0 / (scale * math.sqrt(128))
    _, got = run(case, modules, query, inputs)
    assert decode_cases.faults(got, sm90_cases.replay(inputs, query)) == []
    spread = query.clone()
    spread[..., ::2] *= 1e-4  # small beside large channels of a row
    _, got = run(case, modules, spread, inputs)
    assert decode_cases.faults(got, sm90_cases.replay(inputs, spread)) == []


def test_peaks_that_rise(modules, simulator):
    """Scores that grow along the keys: every stream moves its maximum again and again."""
    case = Case((640,), 4, 128, 64, seed=1)
    inputs, query = integer_inputs(case)
    cache = inputs.pages.cache
    cache.k.fill_(0x22)  # 1.0
    keys = torch.arange(640)
    for i, page in enumerate(inputs.pages.indices.tolist()):
        step = keys[64 * i : 64 * i + 64] // 16
        cache.k_scale[page, 0] = (step + 0x28).to(torch.uint8)[:, None]
    query = query.abs() + 1
    _, got = run(case, modules, query, inputs)
    assert decode_cases.faults(got, sm90_cases.replay(inputs, query)) == []


@pytest.mark.parametrize("soft_cap", [30.0, 1e4, 1e6])
def test_large_soft_caps(soft_cap, modules, simulator):
    case = Case(
        (257, 90), 4, 128, 64, "mean", q_len=2, soft_cap=soft_cap, scale=2.0, k_bias=2.0, seed=21
    )
    inputs, got = run(case, modules)
    assert decode_cases.faults(got, sm90_cases.replay(inputs), lse_tolerance=1e-6) == []


def test_large_row_terms(modules, simulator):
    """k_mean of rms 10 with sinks, split: what centring dropped comes back in every partial row."""
    case = Case(
        (1500, 700), 4, 128, 64, "mean", sinks=True, split_tokens=256, k_bias=10.0, q_bias=2.0
    )
    inputs, (out, lse) = run(case, modules)
    assert decode_cases.faults((out, lse), sm90_cases.replay(inputs)) == []


def test_empty_requests(modules, simulator):
    case = Case((0, 130, 0, 1), 4, 128, 32, "mean", sinks=True)
    inputs, (out, lse) = run(case, modules)
    for request in (0, 2):
        assert (out[request] == 0).all()
        torch.testing.assert_close(lse[request], inputs.sinks * math.log2(math.e))
    assert decode_cases.faults((out, lse), sm90_cases.replay(inputs)) == []
    _, (out, lse) = run(replace(case, kv_lens=(0, 0), sinks=False), modules)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_column_tiles_agree(rows, modules, simulator):
    """Any launch variant may run any plan: more rows than its columns are walked in passes."""
    case = Case((500, 33), 5, 128, 32, "mean+channels", 15, 4, sinks=True, k_bias=2.0)
    inputs, got = run(case, modules, rows=rows)
    assert decode_cases.faults(got, sm90_cases.replay(inputs)) == []


def test_alone_and_in_a_batch_the_same_bits(modules, simulator):
    """A request's result depends neither on its neighbours nor on its pages."""
    case = Case((1300, 129, 2100, 5), 5, 128, 32, "mean+channels", 15, sinks=True, seed=8)
    inputs, (out, lse) = run(case, modules)
    for b, n in enumerate(case.kv_lens):
        alone = inputs.batch.select([b])
        pages = attention_cases.paged(alone, inputs.config, stats=inputs.stats, seed=50 + b)
        single = replace(inputs, case=replace(case, kv_lens=(n,)), batch=alone, pages=pages)
        _, (one, one_lse) = run(single.case, modules, inputs=single)
        assert torch.equal(one, out[b : b + 1])
        assert torch.equal(one_lse, lse[b : b + 1])


def test_garbage_outside_the_window(modules, simulator):
    """Pages that the window has left may hold anything, also keys and values of NaN."""
    case = Case((900, 1500), 4, 128, 32, "mean+channels", 15, window_left=200, q_len=2, seed=12)
    inputs = decode_cases.build(case)
    want = sm90_cases.replay(inputs)
    decode_cases.poison_left_pages(inputs)
    _, got = run(case, modules, inputs=inputs)
    assert decode_cases.faults(got, want) == []


def test_strided_operands(modules, simulator):
    """Token-major pages, a query inside a larger tensor off every boundary, and outputs of odd strides
    give the same bits."""
    case = Case((300, 60), 4, 128, 64, "mean", num_kv_heads=2, k_bias=2.0, seed=3)
    inputs, want = run(case, modules)
    cache = inputs.pages.cache

    def token_major(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    inputs.pages.cache = replace(
        cache, k=token_major(cache.k), v=token_major(cache.v), k_scale=token_major(cache.k_scale)
    )
    wide = torch.full((2, 8, 131), math.nan, dtype=torch.bfloat16)
    query = wide[..., 3:]
    query.copy_(inputs.batch.query)
    spec, plan = inputs.plan()
    launcher = sm90_cases.Launcher(
        modules["128"], modules["combine"], inputs, spec, plan, query=query
    )
    place = torch.full((8, 2, 200), math.nan).transpose(0, 1)
    launcher.out, launcher.lse = place[..., 3:131], torch.full((8, 2), math.nan).t()
    launcher.launch()
    assert torch.equal(launcher.out, want[0])
    assert torch.equal(launcher.lse, want[1])


def test_per_request_statistics(modules, simulator):
    """Row b of the means centres request b."""
    case = Case((300, 260, 40), 4, 128, 64, "mean", q_len=2, k_bias=3.0, q_bias=1.0, seed=9)
    inputs = decode_cases.build(case)
    gen = torch.Generator().manual_seed(3)
    stats = mpfa.SmoothingStats(
        torch.randn(3, 4, 128, generator=gen), torch.randn(3, 1, 128, generator=gen), None
    )
    pages = attention_cases.paged(inputs.batch, inputs.config, stats=stats, seed=1)
    inputs = replace(inputs, stats=stats, pages=pages)
    _, got = run(case, modules, inputs=inputs)
    assert decode_cases.faults(got, sm90_cases.replay(inputs)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_dtypes(dtype, modules, simulator):
    case = Case((1100, 60), 4, 128, 64, "mean", k_bias=2.0)
    inputs, (exact, _) = run(case, modules)
    _, (out, _) = run(case, modules, inputs=inputs, dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact.to(dtype).float(), rtol=0, atol=0)


# ---- graphs ----------------------------------------------------------------------------------------

PAGE_SIZE, MAX_BATCH = 32, 3


def with_lengths(pool: decode_cases.Inputs, lengths: tuple[int, ...], seed: int):
    """Other requests over the filled pages of ``pool``, and the first queries."""
    filled = pool.pages.indices.long()
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    picks = filled[torch.randint(0, len(filled), (sum(counts),), generator=gen)]
    last = [(n - 1) % PAGE_SIZE + 1 if n else 0 for n in lengths]
    pages = attention_cases.Paged(
        pool.pages.cache, attention_cases.offsets(counts), picks.to(torch.int32),
        attention_cases.int32(last),
    )  # fmt: skip
    batch = pool.batch.select(range(len(lengths)))
    return replace(pool, case=replace(pool.case, kv_lens=lengths), pages=pages, batch=batch)


def test_replay_after_replan(modules, simulator):
    """A captured step follows the uploaded plan: equal to an eager run of the same plan, bit for bit."""
    full = (32 * PAGE_SIZE, 20 * PAGE_SIZE, 12 * PAGE_SIZE)  # every page of the pool is full
    case = Case(full, 5, 128, PAGE_SIZE, "mean+channels", 15, 2, sinks=True, k_bias=2.0)
    pool = decode_cases.build(case)
    limits = {
        "use_cuda_graph": True, "max_batch_size": MAX_BATCH, "max_total_qo_len": 2 * MAX_BATCH,
        "max_num_pages": 128,
    }  # fmt: skip
    sets = [(1500, 700, 300), (2, 128, 1025), (0, 5, 640), (2047,)]
    first = with_lengths(pool, sets[0], 0)
    spec, plan = first.plan(**limits)
    query = pool.batch.query
    launcher = sm90_cases.Launcher(
        modules["128"], modules["combine"], first, spec, plan, query=query
    )
    graph = SimulatedGraph(simulator, launcher.launch)
    simulator.check()
    assert simulator.launches() == []  # captured, not run
    for seed, lengths in enumerate(sets):
        inputs = with_lengths(pool, lengths, seed)
        launcher.bind(inputs.plan(**limits)[1])
        launcher.out.fill_(math.nan), launcher.lse.fill_(math.nan)
        graph.replay()
        simulator.check()
        rows = 2 * len(lengths)
        got = launcher.out[:rows], launcher.lse[:rows]
        _, eager = run(inputs.case, modules, inputs=inputs)
        assert torch.equal(got[0], eager[0])
        assert torch.equal(got[1], eager[1])
        assert decode_cases.faults(got, sm90_cases.replay(inputs)) == []
        assert launcher.out[rows:].isnan().all()  # rows of no request are left alone
    graph.close()


# ---- refusals --------------------------------------------------------------------------------------


def test_refusals(modules):
    case = Case((40,), 4, 128, 16, "mean+channels", 15)
    inputs = decode_cases.build(case)
    spec, plan = inputs.plan()

    def launch(**changes):
        launcher = sm90_cases.Launcher(modules["128"], modules["combine"], inputs, spec, plan)
        arguments = dict(launcher.calls()[0].arguments) | changes
        modules["128"].run(*arguments.values())

    cache, stats = inputs.pages.cache, inputs.stats
    bad = torch.empty(cache.k.numel() + 8, dtype=torch.uint8)[8:].view(cache.k.shape)
    with pytest.raises(ValueError, match="k: must be aligned to 16 bytes"):
        launch(k=bad)
    with pytest.raises(ValueError, match="q_mean, k_mean: must be given exactly when aux_delta"):
        launch(q_mean=None)
    with pytest.raises(ValueError, match="channel_index: must be given exactly"):
        launch(channel_index=None)
    with pytest.raises(ValueError, match="q: must be bfloat16 or float16"):
        launch(q=inputs.batch.query.float())
    with pytest.raises(ValueError, match="q_mean: must be a row for each request"):
        launch(q_mean=stats.q_mean.new_zeros(0, *stats.q_mean.shape))
    with pytest.raises(ValueError, match="channel_index"):
        launch(channel_index=stats.channel_index[:, :3].contiguous())


def test_table_entry():
    """The kernel reads what sm100's decode reads, from the same plans."""
    own = kernels.find_kernel("decode", backend="sm90")
    other = kernels.find_kernel("decode", backend="sm100")
    assert own.format == other.format == "qk4pv8"
    assert own.tilings == other.tilings and own.page_sizes == other.page_sizes
    assert kernels.find_kernel("decode", format="qk4pv8") is other
    assert kernels.find_kernel("decode", backend="sim", format="qk4pv8") is other
    assert kernels.find_kernel("decode", backend="sm90", format="qk4pv8") is own
