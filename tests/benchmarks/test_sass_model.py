# SPDX-License-Identifier: Apache-2.0
"""Weights, pipe bounds, the in-order replay and the figures of a kernel."""

import json
from pathlib import Path

import pytest
from listing import SASS, function, listing, snippet

from benchmarks import sass_model
from benchmarks.sass import kernels, model, parse, replay, weights
from benchmarks.sass.weights import ALU, FMA, ISSUE, LSU, MUFU, SM100, SM103, SM120, TENSOR, TMEM

ROOT = Path(__file__).resolve().parents[2]
QMMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R2, R4, R0, R0, URZ"


def one(text: str):
    return function(text).instructions[0]


@pytest.mark.parametrize(
    ("arch", "text", "pipe", "cycles"),
    [
        (SM120, QMMA, TENSOR, 16),
        (SM120, "QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4", TENSOR, 32),
        (SM120, "QMMA.16832.F16.E4M3.E4M3 R4, R8, R2, R4", TENSOR, 16),
        (SM120, "HMMA.16816.F32.BF16 R4, R8, R2, R4", TENSOR, 32),
        (SM120, "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R2, R4, R0, R0, URZ", TENSOR, 16),
        (SM120, "MUFU.EX2 R4, R5", MUFU, 8),
        (SM100, "MUFU.EX2 R4, R5", MUFU, 8),
        (SM103, "MUFU.EX2 R4, R5", MUFU, 4),
        (SM100, "FFMA R1, R2, R3, R4", FMA, 1),
        (SM100, "FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", FMA, 2),
        (SM100, "IMAD.MOV.U32 R1, RZ, RZ, R2", FMA, 2),
        (SM100, "FMNMX3 R1, R2, R3, R4, !PT", ALU, 2),
        (SM100, "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R1, R2, R3, RZ", ALU, 4),
        (SM100, "F2FP.BF16.F32.PACK_AB R1, R2, R3", ALU, 2),
        (SM100, "MOV R1, R2", ALU, 1),
        (SM120, "LDS.128 R4, [R1]", LSU, 16),
        (SM120, "LDS R4, [R1]", LSU, 4),
        (SM120, "LDS.U16 R4, [R1]", LSU, 4),
        (SM120, "LDSM.16.M88.4 R4, [R1]", LSU, 16),
        (SM120, "LDSM.16.M88.2 R4, [R1]", LSU, 8),
        (SM120, "LDSM.8.MT1616.2 R4, [R1]", LSU, 16),
        (SM120, "SHFL.BFLY PT, R4, R5, 0x1, 0x1f", LSU, 4),
        (SM100, "LDTM.x32 R4, tmem[UR4]", TMEM, 32),
        (SM100, "STTM.x8 tmem[UR4], R4", TMEM, 8),
    ],
)
def test_weight(arch, text, pipe, cycles):
    assert arch.cost(one(text)) == weights.Cost(pipe, cycles)


@pytest.mark.parametrize(
    "text", ["NOP ", "BRA `(.L_x)", "UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8]"]
)
def test_no_pipe(text):
    assert SM120.cost(one(text)) is None


def test_umma_ladder():
    assert SM100.umma_cycles(128) == 80
    assert SM100.umma_cycles(16) == SM100.umma_cycles(32) == 55.5
    assert SM100.umma_cycles(40) == SM100.umma_cycles(64) == 62
    assert SM100.umma_cycles(128, tmem_a=True) == pytest.approx(72)
    with pytest.raises(ValueError, match="n: 264"):
        SM100.umma_cycles(264)


def test_mma_operations():
    assert weights.mma_flop(one(QMMA)) == 2 * 16 * 8 * 32
    assert weights.mma_flop(one("HMMA.16816.F32 R4, R8, R2, R4")) == 2 * 16 * 8 * 16
    assert weights.mma_flop(one("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8")) == 2 * 16 * 8 * 64
    assert weights.mma_flop(one("FFMA R1, R2, R3, R4")) == 0


def test_unknown_target():
    assert weights.arch_of("sm_121a") is SM120
    with pytest.raises(ValueError, match="sm_90a"):
        weights.arch_of("sm_90a")


def test_bound_adds_up_each_pipe():
    code = function(QMMA, QMMA, "MUFU.EX2 R1, R2", "FADD R1, R1, R2", "FMNMX R1, R1, R2, !PT",
                    "LDS.128 R4, [R1]", "NOP ").instructions  # fmt: skip
    bound = model.bound(code, SM120)
    assert bound.cycles == {ISSUE: 7, FMA: 1, ALU: 2, MUFU: 8, LSU: 16, TENSOR: 32, TMEM: 0}
    assert bound.limit == (TENSOR, 32) and not bound.unknown


def test_bound_names_what_it_does_not_know():
    assert model.bound(function("FROBNICATE R1, R2").instructions, SM120).unknown == {
        "FROBNICATE": 1
    }


def test_no_unknown_instruction_in_compiled_loops():
    for name, arch in (("tiny_sm120", SM120), ("tiny_sm100", SM100)):
        for body in model.bodies(snippet(name)[0]):
            assert not model.bound(body.code, arch).unknown


# --- replay: small loops whose timing follows from the rules -------------------------------------


def test_one_pipe_limits():
    """Independent exponentials: 8 cycles each, whoever issues them."""
    code = function(*["MUFU.EX2 R1, R2"] * 10).instructions
    for warps in (1, 2, 4):
        got = replay.replay(code, SM120, warps)
        assert got.cycles == pytest.approx(80 * warps, rel=0.02)
        assert got.busy[MUFU] == pytest.approx(1, abs=0.02)


def test_stall_counts_are_obeyed():
    code = function(
        ("FADD R1, R1, R2", {"stall": 4}), ("FADD R1, R1, R2", {"stall": 4})
    ).instructions
    assert replay.alone(code, SM120) == pytest.approx(8, rel=0.02)
    # Four warps fill the four cycles of each stall; a fifth has to wait.
    assert replay.replay(code, SM120, 4).cycles == pytest.approx(8, rel=0.02)
    assert replay.replay(code, SM120, 5).cycles == pytest.approx(10, rel=0.03)


def test_one_issue_slot():
    code = function(*["NOP "] * 20).instructions
    assert replay.replay(code, SM120, 3).cycles == pytest.approx(60, rel=0.02)


def test_scoreboard_makes_the_reader_wait():
    load, use = ("LDS R1, [R2]", {"write": 2}), ("FADD R3, R1, R1", {"wait": 0b100})
    got = replay.alone(function(load, use).instructions, SM120)
    # FADD issues at 0 + latency; the next trip's load right behind it.
    assert got == pytest.approx(SM120.latency["LDS"] + 1, rel=0.05)
    code = function(load, ("FADD R3, R1, R1", {})).instructions
    free = replay.replay(code, SM120, 1, trips=400, warm=100).cycles
    assert free == pytest.approx(weights.warp_bytes(one(load[0])) / SM120.shared_bytes, rel=0.02)


def test_two_warps_hide_each_others_softmax():
    """160 cycles of tensor work, then 160 of waiting: one warp keeps the pipe half busy, two fill it."""
    mma = [(QMMA, {"stall": 15})] * 10
    wait = [("NOP ", {"stall": 15})] * 10 + [("NOP ", {"stall": 10})]
    code = function(*mma, *wait).instructions
    assert replay.replay(code, SM120, 1).busy[TENSOR] == pytest.approx(0.5, abs=0.02)
    assert replay.replay(code, SM120, 2).busy[TENSOR] > 0.95


def test_replay_is_never_below_the_bound():
    for name, arch in (("tiny_sm120", SM120), ("tiny_sm100", SM100)):
        for body in model.bodies(snippet(name)[0]):
            least = model.bound(body.code, arch).limit[1]
            for warps in (1, 2, 3):
                assert replay.replay(body.code, arch, warps).cycles >= 0.98 * least * warps


def test_replay_arguments():
    with pytest.raises(ValueError, match="no instruction"):
        replay.replay((), SM120, 1)
    code = function("NOP ").instructions
    with pytest.raises(ValueError, match="trips, warps: 8 and 1"):
        replay.replay(code, SM120, 1, trips=8, warm=8)
    with pytest.raises(ValueError, match="0"):
        replay.replay(code, SM120, 0)


# --- figures --------------------------------------------------------------------------------------


def values(figures):
    return {f.metric.strip(): f.value for f in figures}


def test_figures_of_a_warp_mma_kernel():
    """8 MMAs of 16 x 8 x 32 at head dimension 32: 512 scores a trip, 16 per lane."""
    got = values(kernels.warp_mma_kernel(snippet("tiny_sm120"), SM120, 32, 2))
    body = model.warp_mma_loop(model.bodies(snippet("tiny_sm120")[0]))
    assert got["loop instructions"] == len(body.code)
    assert got["instructions per score"] == len(body.code) / 16
    assert got["of which MMA"] == 0.5 and got["of which MUFU"] == 1
    assert got["tensor cycles"] == 8 * 16 / 512 * 16
    assert got["local memory accesses"] == 0
    assert 0 < got["one warp alone, share of peak"] < got["without rescale"] <= 1
    assert got["without rescale"] <= got["pipe bound, share of QMMA.SF peak"] + 1e-9


def test_the_rescale_branch_is_weighed():
    """The listing's cold branch has 16 multiplications; its trips are longer."""
    figures = {f.metric.strip(): f for f in kernels.warp_mma_kernel(
        snippet("tiny_sm120"), SM120, 32, 2)}  # fmt: skip
    more = figures["with a rescale in each trip"]
    assert int(more.note.split()[0]) >= 16
    without, weighted = figures["without rescale"], figures["replay, share of QMMA.SF peak"]
    assert more.value < weighted.value < without.value
    taken = figures["trips with a rescale"].value
    assert 1 / weighted.value == pytest.approx(taken / more.value + (1 - taken) / without.value)


def test_share_of_rescales():
    assert kernels.rescale_share(1) == kernels.rescale_share(16) == 1
    assert kernels.rescale_share(2, rows=1) == 0.75
    assert kernels.rescale_share(128) == pytest.approx(0.38, abs=0.005)
    assert kernels.rescale_share(64) == pytest.approx(0.58, abs=0.02)


def test_a_throttled_mma_has_half_the_share():
    """Plain QMMA with FP32 accumulation takes 32 cycles for the same work."""
    loop = [".L_a:", *["QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4"] * 8, "@P0 BRA `(.L_a)", "EXIT "]
    got = values(kernels.warp_mma_kernel([function(*loop)], SM120, 32, 2))
    assert got["pipe bound, share of QMMA.SF peak"] == 0.5
    assert got["replay, tensor pipe busy"] > 0.98


def test_figures_of_a_tensor_memory_kernel():
    got = values(kernels.umma_prefill_kernel(snippet("tiny_sm100"), SM100, 64, keys=32))
    assert got["MUFU cycles"] == 32 * 8
    # One NVFP4, one BF16 and one FP8 product a tile; P of the last comes from Tensor Memory.
    assert got["tensor cycles"] == pytest.approx(55.5 + 55.5 + 0.9 * 62)
    assert got["compensation, share of tensor cycles"] == pytest.approx(55.5 / (111 + 55.8))
    assert got["bound"] == 256 and got["bound without compensation"] == 256
    assert got["issue cycles"] > got["softmax instructions"]  # the correction warp adds to it
    assert got["correction instructions, rescale skipped"] < 20  # 16 multiplications are skipped
    assert got["chain bound"] >= got["bound"]
    assert got["chain of one stage"] - got["without compensation"] == pytest.approx(55.5)


def test_compensation_shows_where_the_tensor_pipe_limits():
    """The same code on a chip with fast exponentials: the K = 16 product is in the bound."""
    from dataclasses import replace

    fast = replace(SM100, mufu=0.5, f2fp_e4m3=0.1, alu=0.1, packed_fma=0.1, scalar_fma=0.1,
                   umma={256: 200.0})  # fmt: skip
    got = values(kernels.umma_prefill_kernel(snippet("tiny_sm100"), fast, 64, keys=32))
    assert got["bound"] == pytest.approx(580) and got["bound without compensation"] == 380


@pytest.mark.parametrize("pv", ["UTCQMMA", "UTCHMMA", "UTCOMMA.4X"])
def test_products_are_told_apart_by_their_operands(pv):
    """P of e4m3, bf16 and NVFP4 comes from Tensor Memory, whatever the product in front is."""
    from dataclasses import replace

    both = "gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11]"
    code = function(f"UTCHMMA {both}", f"UTCOMMA.4X {both}", f"UTCOMMA.4X {both}",
                    *[f"{pv} tmem[UR4], gdesc[UR6], tmem[UR8], idesc[UR11]"] * 4, "EXIT ")  # fmt: skip
    body = replace(model.bodies(snippet("tiny_sm100")[0])[0], code=tuple(code.instructions))
    assert kernels.classify_umma(body) == kernels.Umma(2, 1, 4)


def test_wrong_tile_width_is_an_error():
    with pytest.raises(ValueError, match="loads 32 score columns, not 128"):
        kernels.umma_prefill_kernel(snippet("tiny_sm100"), SM100, 64)


def test_figures_of_a_decode_kernel():
    shape = kernels.DecodeShape(16, 16, False, kernels.qk4pv8_block_bytes(128, 4))
    assert shape.bytes == 26624
    got = values(kernels.umma_decode_kernel(snippet("tiny_sm100"), SM100, 128, shape))
    assert got["HBM cycles"] == pytest.approx(911.2, abs=0.1)
    assert got["tensor cycles"] == pytest.approx(6 * 55.5)
    assert got["slack"] == pytest.approx(got["HBM cycles"] / got["bound"])


def test_kernel_without_matrix_instructions():
    with pytest.raises(ValueError, match="no function with matrix instructions"):
        kernels.warp_mma_kernel([function("EXIT ")], SM120, 128, 2)


def test_head_dimension_picks_the_function():
    both = [parse.parse(listing(QMMA, "EXIT ", name=f"k<ILi{d}E>"))[0] for d in (64, 128)]
    for d in (64, 128):
        assert kernels.main_function(both, d).name == f"k<ILi{d}E>"
    assert kernels.main_function(both, 256) in both


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no baselines
    monkeypatch.delenv("MPFA_CACHE_DIR", raising=False)
    out = tmp_path / "rows.json"

    def run(kernel, listing):
        words = ["--kernel", kernel, "--cubin", str(SASS / listing), "--json", str(out)]
        return sass_model.main(words)

    with pytest.raises(ValueError, match="too few"):  # 8 MMAs: less than 512 scores of 128 channels
        run("sm120", "tiny_sm120.sass")
    assert not out.exists()
    assert run("sm100_decode", "tiny_sm100.sass") == 0
    printed = capsys.readouterr().out
    assert "SASS model" in printed and "aim >= 1.5" in printed
    rows = json.loads(out.read_text())
    assert {r["metric"] for r in rows} >= {"bound", "slack", "HBM cycles"}
    check_rows(rows)
    assert sass_model.main(["--loops", str(SASS / "tiny_sm100.sass")]) == 0
    assert "2 UTCOMMA" in capsys.readouterr().out
    for words in ([], ["--all", "--kernel", "sm120"], ["--kernel", "sm120", "--group", "0"]):
        with pytest.raises(SystemExit):
            sass_model.main(words)


def check_rows(rows):
    keys = {"bench", "case", "impl", "metric", "value", "unit", "ratio_to", "gpu", "driver", "commit",
            "date", "kind"}  # fmt: skip
    for row in rows:
        assert keys <= set(row)
        assert row["kind"] == "sass_model" and row["gpu"].startswith("none")


def test_committed_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "sass_model.json").read_text())
    check_rows(rows)
    assert len({(r["case"], r["impl"], r["metric"]) for r in rows}) == len(rows)
    assert {r["case"].split(" ")[0] for r in rows} == {"sm120", "sm100_prefill", "sm100_decode"}
    for arch in ("100a", "103a"):
        impls = {r["impl"] for r in rows if r["case"] == f"sm100_prefill d=128 sm_{arch}"}
        assert impls >= {"mpfa", *sass_model.PV_VARIANTS.values()}
