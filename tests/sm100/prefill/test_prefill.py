# SPDX-License-Identifier: Apache-2.0
"""The SM100 prefill kernel's PTX in the simulator against the replay of the same plan.

Unused pages, page tails, rows around ragged operands and around the outputs hold NaN; scales differ
in every row, K block and group of 16 channels; all watchers are on and asynchronous operations land
as late as they may.
"""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases as cases
import prefill_cases as pc
import prefill_exact
import pytest
import torch
from prefill_cases import Case
from prefill_list import all_cases, fast_cases, slow_cases
from prefill_modules import build
from sim_modules import open_modules

import mpfa
from mpfa.quantized import QuantizedQuery


def expected_mmas(o: pc.Operands) -> int:
    """Per KV head, item, query stage and block: the bf16 product, D/64 NVFP4 and four FP8 ones."""
    case = o.case
    group = case.heads[0] // case.heads[1]
    per_block = (o.query.a_comp is not None) + case.head_dim // 64 + 4
    total = 0
    for _, _, q_len, head_group, kv_begin, kv_end, _, _ in o.plan.items.tolist():
        heads = min(case.heads_per_group, group - head_group * case.heads_per_group)
        stages = 2 if q_len * heads > 128 else 1
        total += stages * math.ceil((kv_end - kv_begin) / 128) * per_block
    return total * case.heads[1]


def run(o: pc.Operands, modules, simulator):
    simulator.clear()
    out, lse = pc.launch(modules[o.case.head_dim], o)
    simulator.check()
    launches = simulator.launches()
    assert ["mpfa_sm100_prefill" in x["kernel"] for x in launches] == [True]
    assert launches[0]["tcgen05_mma"] == expected_mmas(o)
    return out, lse


def check(case: Case, modules, simulator) -> None:
    o = pc.operands(case)
    pc.assert_as_replayed(o, *run(o, modules, simulator))


def test_the_list_is_mostly_fast() -> None:
    print(f"{len(fast_cases())} of {len(all_cases())} cases run in make test")
    assert 2 * len(fast_cases()) >= len(all_cases())


@pytest.mark.parametrize("case", fast_cases(), ids=lambda c: c.name)
def test_matrix(case, modules, simulator) -> None:
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_cases(), ids=lambda c: c.name)
def test_large_matrix(case, modules, simulator) -> None:
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "accumulate"), [("eager", "sequential"), ("random", "truncating"), ("lazy", "exact")]
)
@pytest.mark.parametrize("case", fast_cases(), ids=lambda c: c.name)
def test_on_10_3_and_in_other_orders(case, mode, accumulate, modules, simulator) -> None:
    """The PTX for sm_103a, other completion orders, other ways in which an MMA may sum."""
    with simulator.options(device="10.3", mode=mode, accumulate=accumulate, seed=11):
        check(case, modules, simulator)


@pytest.mark.parametrize("cap", [300.0, 1e4, 1e6])
def test_large_soft_caps(cap, modules, simulator) -> None:
    """Scores far below the cap are made of tanh's low bits."""
    check(Case("cap", (9,), (200,), head_dim=64, page_size=0, soft_cap=cap), modules, simulator)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(256, 100), (5, 3)], ids=str)
def test_the_widest_window_is_no_window(lens, causal, modules, simulator) -> None:
    """Rows before the first key: position - window_left is below the smallest int32."""
    case = Case("wide", lens[:1], lens[1:], head_dim=64, page_size=0, causal=causal)
    check(replace(case, window_left=2**31 - 1), modules, simulator)


@pytest.mark.parametrize("seed", range(3))
def test_schedules_do_not_change_a_bit(seed, modules, simulator) -> None:
    o = pc.operands(
        Case("schedules", (200, 30), (300, 200), (4, 2), causal=True, compensation="mean+channels",
             num_sm=2)
    )  # fmt: skip
    want = run(o, modules, simulator)
    with simulator.options(mode="random", seed=seed + 20):
        got = run(o, modules, simulator)
    cases.assert_same_bits(got[0], want[0])
    cases.assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("case", pc.ONE_BLOCK_TILES[:2], ids=lambda c: c.name)
def test_no_queued_unit_is_lost(case, modules, simulator) -> None:
    """Completion orders in which a load warp reaches the next tile's Q with units of this one queued:
    each must be announced, or the launch never ends."""
    o = pc.operands(case)
    want = run(o, modules, simulator)
    for seed in range(16):
        with simulator.options(mode="random", seed=seed):
            got = run(o, modules, simulator)
        cases.assert_same_bits(got[0], want[0])
        cases.assert_same_bits(got[1], want[1])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["10.0", "10.3"])
def test_paranoid_build_gives_the_same_bits(device, modules, paranoid_modules, simulator) -> None:
    """Nothing in flight between groups of tcgen05 operations: the order of the tensor pipe, on which
    the shipped build relies, changes no bit."""
    for case in fast_cases():
        o = pc.operands(case)
        with simulator.options(device=device):
            want, got = run(o, modules, simulator), run(o, paranoid_modules, simulator)
        cases.assert_same_bits(got[0], want[0])
        cases.assert_same_bits(got[1], want[1])


@pytest.fixture(scope="session")
def elementwise_module():
    return open_modules(
        build("_elementwise", "-DMPFA_SM100_ELEMENTWISE_DELTA=1", head_dims=(128,))
    )[128]


@pytest.mark.slow
def test_elementwise_delta_build(elementwise_module, modules, simulator) -> None:
    """The placement that the paper compares with: no bf16 product, the same results up to the order
    of one fp32 addition."""
    for packed in (1, 4):
        case = Case("elementwise", (150, 30), (300, 200), (4, 1), causal=True, compensation="mean",
                    heads_per_group=packed, out=torch.float32)  # fmt: skip
        o = pc.operands(case)
        want, want_lse = run(o, modules, simulator)
        with_mma = simulator.launches()[0]["tcgen05_mma"]
        simulator.clear()
        out, lse = pc.launch(elementwise_module, o)
        simulator.check()
        assert simulator.launches()[0]["tcgen05_mma"] == with_mma * 6 // 7
        assert pc.worst_head(o, out, want) <= 1e-3
        cases.assert_lse_close(lse, want_lse, 1e-4)


# ---- exact --------------------------------------------------------------------------------------


def check_exact(exact: prefill_exact.ExactCase, modules, simulator) -> None:
    o = prefill_exact.operands(exact)
    prefill_exact.assert_exact(exact, o, *run(o, modules, simulator))


@pytest.mark.parametrize("shift", prefill_exact.SHIFTS)
@pytest.mark.parametrize(("compensation", "page_size", "heads_per_group"), prefill_exact.OPERANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_row_sees_one_key(
    head_dim, compensation, page_size, heads_per_group, shift, modules, simulator
) -> None:
    """Window 0: row i sees only key i + shift, so out = V[i + shift] to the bit and the base-2 LSE is
    S[i, i + shift], a multiple of 1/16: no replay, and a wrong lane, byte, scale or slot shows."""
    operands = (compensation, page_size, heads_per_group)
    check_exact(prefill_exact.one_key_case(head_dim, *operands, shift), modules, simulator)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_scores_give_the_mean(head_dim, modules, simulator) -> None:
    """Q = 0: every visible key weighs the same."""
    for count in prefill_exact.COUNTS:
        check_exact(prefill_exact.equal_scores_case(head_dim, count), modules, simulator)


# ---- the whole chain against float64 ------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_against_float64(head_dim, modules, simulator) -> None:
    """Channel-biased data: each compensation must repair what 4-bit keys lose, as the reference does.
    The table is printed (pytest -s)."""
    errors = {}
    for compensation in ("none", "mean", "channels", "mean+channels"):
        case = Case(
            compensation, (130, 40), (300, 200), (4, 2), head_dim, compensation=compensation,
            causal=True, sinks=True, k_bias=4.0, q_bias=1.0,
        )  # fmt: skip
        hq, hkv = case.heads
        batch = cases.make_batch(
            case.qo_lens, case.kv_lens, hq, hkv, head_dim, seed=3, k_bias=4.0, q_bias=1.0,
            outliers=6.0, scale=0.5,
        )  # fmt: skip
        o = pc.operands(case, batch)
        out, _ = run(o, modules, simulator)
        truth, _ = cases.dense_batch(batch, causal=True, sinks=o.sinks)
        replayed, _ = pc.replay(o)
        errors[compensation] = cases.rel_l2(out, truth)
        cosine = torch.nn.functional.cosine_similarity(
            out.double().flatten(), truth.double().flatten(), dim=0
        )
        print(f"{compensation:14} rel L2 {errors[compensation]:.4f} cosine {cosine:.6f}")
        assert errors[compensation] <= cases.rel_l2(replayed, truth) + 3e-3
    assert errors["mean"] < errors["none"]
    assert errors["channels"] < errors["none"]
    assert errors["mean+channels"] < errors["mean"]


def test_a_request_does_not_depend_on_its_neighbours(modules, simulator) -> None:
    case = Case("batch", (150, 33, 7), (300, 150, 129), (4, 2), causal=True, compensation="mean",
                page_size=64)  # fmt: skip
    o = pc.operands(case)
    out, lse = run(o, modules, simulator)
    bounds = cases.offsets(case.qo_lens).tolist()
    for b in range(3):
        single = replace(case, qo_lens=(case.qo_lens[b],), kv_lens=(case.kv_lens[b],))
        rows = slice(bounds[b], bounds[b + 1])
        q = o.query
        pages = slice(int(o.table[0][b]), int(o.table[0][b + 1]))
        table = (
            cases.offsets([pages.stop - pages.start]),
            o.table[1][pages],
            o.table[2][b : b + 1],
        )
        plan = pc.plan_case(single, table)
        metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
        plan.upload(metadata)
        part = QuantizedQuery(
            q.q[rows], q.q_scale[rows], q.a_comp[rows], q.row_term[rows], q.config, q.stats, q.dtype
        )
        alone = replace(o, case=single, query=part, plan=plan, metadata=metadata, table=table)
        got = run(alone, modules, simulator)
        cases.assert_same_bits(got[0], out[rows])
        cases.assert_same_bits(got[1], lse[rows])


def test_strided_operands(modules, simulator) -> None:
    """Token-major pages and padded query rows: only the last dimension is contiguous."""
    case = Case("strided", (60,), (300,), (4, 2), page_size=64, causal=True, compensation="mean")
    o = pc.operands(case)
    want = run(o, modules, simulator)

    def token_major(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.transpose(1, 2).contiguous().transpose(1, 2)

    def padded(t: torch.Tensor) -> torch.Tensor:
        pad = 16 // t.element_size()
        big = torch.empty(*t.shape[:-1], t.shape[-1] + pad, dtype=t.dtype)
        big.view(torch.uint8).fill_(cases.POISON_BYTE)
        view = big[..., : t.shape[-1]]
        view.copy_(t)
        return view

    kv = o.kv
    moved = mpfa.PagedKVCache.__new__(mpfa.PagedKVCache)
    moved.__dict__.update(kv.__dict__)
    for name in ("k", "k_scale", "v"):
        object.__setattr__(moved, name, token_major(getattr(kv, name)))
    q = o.query
    query = QuantizedQuery(
        padded(q.q), padded(q.q_scale), padded(q.a_comp), padded(q.row_term), q.config, q.stats,
        q.dtype,
    )  # fmt: skip
    got = run(replace(o, kv=moved, query=query), modules, simulator)
    cases.assert_same_bits(got[0], want[0])
    cases.assert_same_bits(got[1], want[1])


# ---- bad input ----------------------------------------------------------------------------------


def shifted(t: torch.Tensor, by: int) -> torch.Tensor:
    """A copy whose storage begins `by` bytes after a 64-byte boundary."""
    raw = torch.empty(t.numel() * t.element_size() + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + by
    flat = raw[start : start + t.numel() * t.element_size()]
    flat.copy_(t.contiguous().view(torch.uint8).flatten())
    return flat.view(t.dtype).view(t.shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": 8}, r"^q: must be aligned to 16 bytes"),
        ({"q_scale": 2}, r"^q_scale: must be aligned to 4 bytes"),
        ({"k": 4}, r"^k: must be aligned to 16 bytes"),
        ({"k_scale": 8}, r"^k_scale: must be aligned to 16 bytes"),
        ({"v": 8}, r"^v: must be aligned to 16 bytes"),
    ],
)
def test_unaligned_operands_are_refused(change, message, modules, simulator) -> None:
    o = pc.operands(Case("bad", (5,), (40,)))
    (name, by), = change.items()  # fmt: skip
    source = o.query if name.startswith("q") else o.kv
    moved = source.__class__.__new__(source.__class__)
    moved.__dict__.update(source.__dict__)
    object.__setattr__(moved, name, shifted(getattr(source, name), by))
    changed = replace(o, **{"query" if name.startswith("q") else "kv": moved})
    with pytest.raises(ValueError, match=message):
        pc.launch(modules[128], changed)


def test_a_module_serves_its_own_head_dim(modules, simulator) -> None:
    o = pc.operands(Case("bad", (5,), (40,), head_dim=64))
    with pytest.raises(ValueError, match=r"^v: must be of head_dim 128"):
        pc.launch(modules[128], o)
