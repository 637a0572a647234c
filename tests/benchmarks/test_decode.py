# SPDX-License-Identifier: Apache-2.0
"""Jobs of decode.py, prefill.py and combine.py on the reference backend, and their own checks."""

import pytest
import torch

from benchmarks import attention_baselines as others
from benchmarks import (
    combine,
    decode,
    decode_cases,
    harness,
    inputs,
    prefill,
    prefill_baselines,
    rows,
)
from benchmarks.harness import WrongResultError, relative_l2

CPU = torch.device("cpu")
SHAPE = inputs.Shape(2, 256, 8, 2)
COMMON = {"gpu": "NVIDIA H200", "driver": "1", "commit": "abc", "date": "2026-01-02",
          "kind": "measured"}  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    return inputs.make_tensors(SHAPE, CPU)


@pytest.mark.parametrize(
    ("mode", "page_size"),
    [(m, 128) for m in (*inputs.MODES, inputs.MXFP8)] + [("mean+channels", 16)],
)
def test_own_job_passes_its_check(tensors, mode, page_size):
    table = inputs.make_table(SHAPE, page_size, CPU)
    job = decode.mpfa_job(tensors, table, mode, "case", "reference")
    found = job.check()
    assert found.ok
    # The check sees what the cache holds: the distance to it is that of P alone, far below K's.
    assert found.error < 0.04 < found.original
    assert job.moved == 2 * 256 * inputs.config_of(SHAPE, page_size, mode).bytes_per_token


def test_a_lost_page_is_noticed(tensors, monkeypatch):
    """The limit is tight enough for one page of sixteen tokens in 256."""
    table = inputs.make_table(SHAPE, 16, CPU)
    job = decode.mpfa_job(tensors, table, "none", "case", "reference")
    assert job.check().ok
    real = decode.BatchDecodeWrapper.run

    def without_a_page(wrapper, query, cache, out):
        cache.v.view(torch.uint8)[table.pages_of(1)[3]] = 0
        return real(wrapper, query, cache, out=out)

    kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in job.args[1:]]
    monkeypatch.setattr(
        decode.BatchDecodeWrapper,
        "run",
        lambda wrapper, query, cache, out: without_a_page(
            wrapper, query, decode.PagedKVCache(cache.config, *kept), out
        ),
    )
    assert not job.check().ok


@pytest.mark.parametrize("kind", others.KV_KINDS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_baseline_pages_hold_the_tensors(tensors, kind, layout):
    table = inputs.make_table(SHAPE, 32, CPU)
    stored = others._Stored.of(tensors, table, kind, layout)
    assert stored.moved == 2 * 256 * 2 * others.KV_BYTES[kind]
    truth = torch.stack([inputs.exact_head(tensors, 1, h) for h in range(2)]).flatten(0, 1)
    out = torch.zeros_like(tensors.q)
    out[1] = truth.to(out.dtype)
    # float64 attention over the unquantised values is as far away as the format's rounding.
    limits = {"bf16": 0.005, "fp8": 0.12, "nvfp4": 0.7}
    found = stored.check(out, tensors.q, 1.0)
    assert 0.0 < found.error < limits[kind]
    assert found.original < 0.005
    assert stored.check(torch.zeros_like(out), tensors.q, 0.5).ok is False


def test_sdpa_job(tensors):
    assert others.sdpa_job(tensors, "case").check().ok


def test_wrong_output_is_not_timed(tensors, monkeypatch):
    table = inputs.make_table(SHAPE, 128, CPU)
    job = decode.mpfa_job(tensors, table, "none", "case", "reference")
    real = inputs.cached_head
    monkeypatch.setattr(inputs, "cached_head", lambda *a: 1.1 * real(*a))
    with pytest.raises(WrongResultError):
        harness.measure([job], lambda j: pytest.fail("timed"))


def test_pages_and_slots_agree(tensors):
    table = inputs.make_table(SHAPE, 16, CPU)
    pages = inputs.paged(tensors.k, table)
    flat = pages.transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[table.slots().long()], tensors.k.flatten(0, 1))
    with pytest.raises(ValueError, match="multiple of page_size=128, got 200"):
        inputs.make_table(inputs.Shape(1, 200, 8, 2), 128, CPU)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (decode, prefill, combine):
        assert script.main([]) == 0
        assert "skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        decode.main(["--modes", "median"])


def fake_rows(speed: float) -> list:
    """Rows of every core shape; "mpfa mean" ``speed`` times as fast as FP8, twice that of BF16."""
    made = []
    for shape in decode_cases.CORE:
        case = f"decode {shape.name}, page 16"
        for impl, time in (("mpfa mean", 10.0), ("flashinfer fp8", 10.0 * speed),
                           ("flashinfer bf16", 20.0 * speed)):  # fmt: skip
            made.append(rows.make_row("decode", case, impl, "time", time, "us", COMMON))
        share = {"copy": 0.8}
        made.append(
            rows.make_row("decode", case, "mpfa mean", "bandwidth", 1.0, "GB/s", COMMON, share)
        )
    return made


def test_verdicts():
    good = decode_cases.verdicts(fake_rows(1.7))
    assert good and not any("MISSED" in line for line in good)
    assert sum("bar 1.6" in line for line in good) == 2
    slow = decode_cases.verdicts(fake_rows(0.9))
    assert any("speed over flashinfer fp8 0.900, bar 1.6: MISSED" in line for line in slow)
    assert sum("best of FlashInfer's 0.900" in line for line in slow) == len(decode_cases.CORE)


def test_summary_needs_every_length():
    made = []
    for shape in decode_cases.MATRIX:
        case = f"decode {shape.name}, page 128"
        ratio = {8: 1.0, 16: 2.0, 32: 2.0, 64: 2.0, 128: 4.0}.get(shape.context >> 10, 100.0)
        made.append(rows.make_row("decode", case, "mpfa none", "time", 1.0, "us", COMMON))
        made.append(rows.make_row("decode", case, "flashinfer fp8", "time", ratio, "us", COMMON))
    lines = decode_cases.summary(made)
    assert len(lines) == 6 and all("2.00 x flashinfer fp8" in line for line in lines)
    assert decode_cases.summary(made[2:4]) == []


def test_baselines_by_gpu(tensors):
    table = inputs.make_table(SHAPE, 16, CPU)

    def names(major, **options):
        chosen = {"variants": False, "xqa": (), **options}
        return [n for n, _ in decode.baseline_builders(tensors, table, "c", major, **chosen)]

    assert names(9) == ["flashinfer bf16", "flashinfer fp8", "flashinfer nvfp4"]
    assert "flashinfer fp8 trtllm-gen" in names(10)
    assert "flashinfer nvfp4 trtllm-gen" not in names(10)
    assert "flashinfer fp8 NHD" in names(9, variants=True)
    assert "flashinfer xqa fp8" in names(9, xqa=("fp8",))
    assert "flashinfer fa3 fp8" in prefill_baselines.builders(9)
    assert "flashinfer cute-dsl nvfp4 qk, fp8 pv" in prefill_baselines.builders(10)
    assert set(decode_cases.CORE) <= set(decode_cases.SETS["all"])


@pytest.mark.parametrize(
    ("format", "mode"), [("qk4pv8", "none"), ("qk4pv8", "mean+channels"), ("mxfp8", "none")]
)
def test_prefill_jobs(format, mode):
    case = prefill.make_case(128, 8, CPU)
    found = prefill.kernel_job(case, mode, format, "reference").check()
    assert found.ok and found.error < 0.03
    layer = prefill.layer_job(case, mode, format, "reference").check()
    assert layer.ok and layer.error == pytest.approx(layer.original)


def test_prefill_baseline_and_flops():
    case = prefill.make_case(256, 16, CPU)
    assert prefill_baselines.sdpa_job(case).check().ok
    # 256 * 257 / 2 visible pairs, two products of 128 multiply-adds, 16 heads.
    assert case.flops == 256 * 257 / 2 * 2 * 2 * 128 * 16


def test_combine_truth():
    o, lse = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    from mpfa import merge_states

    merged, _ = merge_states(o.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous())
    assert relative_l2(merged, combine.exact(o, lse)) < 1e-6
