# SPDX-License-Identifier: Apache-2.0
"""The shipped PTX of the quantise, statistics and combine kernels, executed by the simulator, against
mpfa.reference: every byte of every output. tests/gpu runs the same list on a GPU."""

import pytest
import quant_cases
import state_cases
import torch

from mpfa.backends import cuda

HOST = torch.device("cpu")
SMALL = quant_cases.small_cases()
SMALL_NAMES = {case.name for case in SMALL}
LARGE = [case for case in quant_cases.cases() if case.name not in SMALL_NAMES]
CHECKS = state_cases.checks(small=True)


def run_case(case, simulator) -> None:
    assert quant_cases.check(case, HOST, cuda) == []
    kernels = [launch["kernel"] for launch in simulator.launches()]
    name = "quant_mxfp8" if case.format == "mxfp8" else "quant_qk4pv8"
    assert len(kernels) == case.splits, kernels  # one launch does it all
    assert all(name in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_small_cases(case, target):
    run_case(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=[case.name for case in LARGE])
def test_large_cases(case, target):
    run_case(case, target)


@pytest.mark.parametrize("check", [c for _, c in CHECKS], ids=[name for name, _ in CHECKS])
def test_means_and_merges(check, target):
    assert check(HOST, cuda) == []


@pytest.mark.parametrize("seed", range(4))
def test_order_of_thread_blocks_does_not_matter(simulated, seed):
    """v_tail is read by one warp and written by one warp of the same launch."""
    case = quant_cases.Case("append", "mxfp8", 150, 128, slots="sequence", splits=3, seed=40 + seed)
    with simulated.options(device="10.0", mode="random", seed=seed):
        assert quant_cases.check(case, HOST, cuda) == []


@pytest.mark.parametrize("view", ["dense", "odd"])
@pytest.mark.parametrize("group_size", [4, 80], ids=["shared means", "global means"])
@pytest.mark.parametrize("compensation,channels", [("mean", 0), ("mean+channels", 15)])
def test_minus_zero_survives_a_mean_of_zero(target, compensation, channels, group_size, view):
    case = quant_cases.Case(
        "append", "qk4pv8", 20, 16, compensation, channels, group_size=group_size, view=view,
        with_q=group_size == 4, seed=49,
    )  # fmt: skip
    inputs = quant_cases.build(case)
    inputs.stats.k_mean[:, ::4] = 0.0
    inputs.stats.q_mean[:, ::4] = 0.0
    for x in (inputs.k, inputs.q):
        if x is not None:
            x[:, :, ::8] = -0.0
            x[1::2, :, 4::8] = 0.0
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    assert quant_cases.differences(quant_cases.run(case, inputs, HOST, cuda), want) == []
    # The case is one: some code of a channel with mean zero is -0 in the reference.
    assert ((want["k"] & 15) == 8).any()


SKIPPED = [
    quant_cases.Case("append", "qk4pv8", 6, 16, "mean", seed=50),
    quant_cases.Case("append", "qk4pv8", 6, 16, "none", with_q=True, seed=50),
    quant_cases.Case("append", "qk4pv8", 6, 16, "channels", 16, with_q=True, seed=50),
    quant_cases.Case(
        "append", "qk4pv8", 40, 16, "mean+channels", 15, per_request=True, with_q=True,
        slot_dtype=torch.int64, seed=50,
    ),
    quant_cases.Case("append", "mxfp8", 6, 32, with_q=True, slots="sequence", seed=50),
]  # fmt: skip


def poison(inputs: quant_cases.Inputs, token: int) -> None:
    """Values that a skipped token may hold."""
    inputs.k[token], inputs.v[token] = torch.nan, torch.inf
    if inputs.q is not None:
        inputs.q[token, :, ::3] = torch.nan


@pytest.mark.parametrize("case", SKIPPED, ids=[case.name for case in SKIPPED])
def test_a_slot_past_the_last_page_is_skipped(target, case):
    """Its query is written as that of a negative slot: statistics row 0, NaN as 0."""
    inputs = quant_cases.build(case)
    end = inputs.pages["v"].shape[0] * case.page_size
    valid = inputs.slots.clone()
    wide = case.slot_dtype == torch.int64
    # The tokens of an mxfp8 page must come in order, without a gap.
    first = 3 if case.format == "mxfp8" else 2
    for token, slot in ((first, end), (4, 2**31 - 1), (5, 2**32 + 3 if wide else end + 1)):
        inputs.slots[token], valid[token] = slot, -1
        poison(inputs, token)
    got = quant_cases.run(case, inputs, HOST, cuda)
    inputs.slots = valid
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    assert quant_cases.differences(got, want) == []


@pytest.mark.parametrize("tokens", [6, 40])
def test_a_batch_index_that_does_not_exist_skips_the_token(target, tokens):
    """The cache stays, and the query is written as that of a skipped token."""
    case = quant_cases.Case(
        "append", "qk4pv8", tokens, 16, "mean+channels", 15, per_request=True, with_q=True, seed=52
    )
    inputs = quant_cases.build(case)
    slots = inputs.slots.clone()
    for token, row in ((1, inputs.stats.batch_size), (3, -1), (4, 2**31 - 1), (5, -(2**31))):
        inputs.rows[token], slots[token] = row, -1
        poison(inputs, token)
    query = cuda.empty_query(tokens, case.config, inputs.stats, case.dtype, HOST)
    for t in (query.q, query.q_scale, query.a_comp, query.row_term):
        t.view(torch.uint8).fill_(0xAB)
    pages = {name: t.clone() for name, t in inputs.pages.items()}
    cache = quant_cases.PagedKVCache(config=case.config, **pages)
    args = (inputs.k, inputs.v, cache, inputs.slots, inputs.stats, inputs.rows, inputs.q)
    cuda.append(*args, query=query)
    alone = cuda.quantize_query(inputs.q, case.config, inputs.stats, inputs.rows)
    inputs.slots = slots
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    outputs = quant_cases._query_outputs(query, "query0.")
    assert quant_cases.differences({**pages, **outputs}, want) == []
    assert quant_cases.differences(quant_cases._query_outputs(alone, "query0."), outputs) == []


@pytest.mark.parametrize("compensation", ["channels", "mean+channels"])
@pytest.mark.parametrize("view", ["dense", "odd"])
def test_channels_that_repeat_or_do_not_exist_count_once_or_not(target, compensation, view):
    """Device statistics are not checked: such a slot holds 0, in the cache and in the query."""
    case = quant_cases.Case(
        "append", "qk4pv8", 20, 16, compensation, 6, num_kv_heads=2, with_q=True, view=view, seed=53
    )
    inputs = quant_cases.build(case)
    good = torch.tensor([[5, 9, 127, 20, 21, 22], [3, 0, 64, 65, 66, 67]], dtype=torch.int32)
    inputs.stats.channel_index.copy_(good)
    keep = torch.tensor([[1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1]], dtype=torch.bool)
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    bad = torch.tensor([[5, 5, 127, 128, -3, 2**31 - 1], [3, 0, 64, 0, 64, 67]], dtype=torch.int32)
    # The reference of what remains: its codes come from a run with those channels only.
    inputs.stats.channel_index.copy_(bad)
    got = quant_cases.run(case, inputs, HOST, cuda)
    for head in range(2):
        few = quant_cases.Case(
            "append", "qk4pv8", 20, 16, compensation, int(keep[head].sum()), num_kv_heads=2,
            with_q=True, view=view, seed=53,
        )  # fmt: skip
        stats = inputs.stats
        index = good[:, keep[head]].contiguous()
        only = quant_cases.SmoothingStats(stats.q_mean, stats.k_mean, index)
        part = quant_cases.Inputs(**{**vars(inputs), "stats": only})
        part.pages = dict(inputs.pages)
        part.pages["aux_channels"] = inputs.pages["aux_channels"][..., : index.shape[1]].clone()
        one = quant_cases.run(few, part, HOST, quant_cases.reference)
        assert torch.equal(got["k"][:, head], one["k"][:, head])
        assert torch.equal(got["k_scale"][:, head], one["k_scale"][:, head])
        heads = slice(4 * head, 4 * head + 4)
        assert torch.equal(got["query0.q"][:, heads], one["query0.q"][:, heads])
        first = int("mean" in compensation)
        page, offset = inputs.slots.long() // 16, inputs.slots.long() % 16
        kept = torch.nn.functional.pad(keep[head], (first, 10 - first), value=False)
        kept[0] = kept[0] or first == 1
        for found, expected, mask in (
            (got["aux_channels"], want["aux_channels"], keep[head]),
            (got["query0.a_comp"], want["query0.a_comp"], kept),
        ):
            if expected is want["aux_channels"]:
                found, expected = (t[page, head, offset] for t in (found, expected))
            else:
                found, expected = found[:, heads], expected[:, heads]
            assert torch.equal(found, expected.masked_fill(~mask, 0.0))


def test_means_that_start_off_a_vector_boundary(target):
    case = quant_cases.Case("append", "qk4pv8", 5, 16, "mean", with_q=True, seed=54)
    inputs = quant_cases.build(case)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty(t.numel() + 1)[1:].view(t.shape)
        out.copy_(t)
        return out

    stats = inputs.stats
    inputs.stats = quant_cases.SmoothingStats(shifted(stats.q_mean), shifted(stats.k_mean), None)
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    assert quant_cases.differences(quant_cases.run(case, inputs, HOST, cuda), want) == []


def test_no_tokens(target):
    for kind, fmt in (
        ("append", "qk4pv8"),
        ("append", "mxfp8"),
        ("kv", "mxfp8"),
        ("query", "mxfp8"),
    ):
        case = quant_cases.Case(kind, fmt, 0, 32, with_q=kind == "append", seed=51)
        assert quant_cases.check(case, HOST, cuda) == []
    assert target.launches() == []
