# SPDX-License-Identifier: Apache-2.0
"""The report from fixed rows, and the paper's figures beside a B200 only."""

import json

import pytest

from benchmarks import decode_cases, paper, prefill, report, rows


def common(gpu="NVIDIA B200", kind="measured", **other):
    shared = {"gpu": gpu, "driver": "1", "commit": "abc", "date": "2026-01-02", "kind": kind}
    return shared | other


def timed(bench, case, times, gpu="NVIDIA B200", **other):
    made = []
    shared = common(gpu, **other)
    for impl, time in times.items():
        base = (bench, case, impl)
        made.append(rows.make_row(*base, "time", time, "us", shared))
        made.append(rows.make_row(*base, "time, spread", 2.5, "%", shared))
        made.append(rows.make_row(*base, "rate", 100.0 / time, "TFLOP/s", shared))
        made.append(rows.make_row(*base, "bandwidth", 9.0, "GB/s", shared, {"copy": 0.75}))
    return made


def decode_rows(gpu="NVIDIA B200"):
    made = []
    for length in (4, 8, 16, 32, 64, 128):
        shape = decode_cases.Shape(1, length << 10, 32)
        times = {"copy": 1.0, "mpfa none": 9.0, "mpfa mean": 10.0, "flashinfer bf16": 30.0,
                 "flashinfer fp8": 20.0, "flashinfer fp8 trtllm-gen": 15.0, "flashinfer nvfp4": 14.0,
                 "fa4 bf16 unsplit": 90.0, "fa4 bf16 num_splits=16": 25.0,
                 "fa4 bf16 num_splits=32": 40.0}  # fmt: skip
        made += timed("decode", f"decode {shape.name}, page 128", times, gpu)
    return made


def test_page_from_fixed_rows():
    model = [rows.make_row("sass_model", "sm100_prefill d=128 sm_100a", "mpfa", "bound", 657, "cycles",
                           common("none (model of sm_100a)", "sass_model"))]  # fmt: skip
    text = report.build({"h200": decode_rows("NVIDIA H200"), "sass_model": model}, None)
    lines = text.splitlines()
    assert "## NVIDIA H200" in lines and "### Decode" in lines
    head = next(x for x in lines if x.startswith("| case | mpfa none"))
    line = next(x for x in lines if x.startswith("| decode 1 x 8K"))
    cells = dict(zip(head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert cells["mpfa mean"] == "10.0" and cells["fa4 bf16 best split"] == "25.0"
    assert cells["mpfa mean over flashinfer fp8"] == "2.00 x"
    assert cells["mpfa mean over fa4 bf16 best split"] == "2.50 x"
    assert cells["mpfa mean, of copy"] == "75%" and cells["largest spread"] == "2.5 %"
    order = [x.split(",")[0] for x in lines if x.startswith("| decode 1 x")]
    assert order == [f"| decode 1 x {n}K" for n in (4, 8, 16, 32, 64, 128)]
    assert "| sm100_prefill d=128 sm_100a | mpfa | bound 657 cycles |" in lines
    assert "section ran on a GPU" in text
    # An H200 is no B200: the paper's figures stay out.
    assert "No B200 measured these kernels yet" in text
    assert "Figure 6b" not in text


def test_paper_beside_a_b200():
    found = {what: (theirs, ours) for what, theirs, ours, _, _ in paper.beside(decode_rows())}
    name = "decode, batch 1, GQA 32:8, 8K-128K: mpfa over BF16 FA4 at its best num_splits"
    assert found[name] == ("2.08", "2.5")
    assert found["decode, batch 1, GQA 32:8, 8K-128K: mpfa over FP8 FlashInfer, geometric mean"] == (
        "1.06", "1.5",
    )  # fmt: skip
    assert found["decode, batch 1, GQA 32:8, 4K: mpfa over unsplit BF16 FA4"] == ("2.63", "9")
    # No prefill rows and no GQA 40:8: nothing is said about them.
    assert not any("prefill" in what or "40:8" in what for what in found)
    assert paper.beside(decode_rows("NVIDIA H200")) == []
    assert paper.beside([{**r, "kind": "simulator"} for r in decode_rows()]) == []


def test_paper_prefill():
    made = []
    for length in prefill.LENGTHS:
        case = f"prefill {length >> 10}K causal, GQA 32:8"
        times = {"mpfa none": 1.0, "mpfa mean": 1.02, "fa4 bf16": 1.3 * 1.02}
        made += timed("prefill", case, times)
    found = {what: ours for what, _, ours, _, _ in paper.beside(made)}
    assert found["prefill, GQA 32:8, 16K-128K: mpfa over BF16 FA4, geometric mean"] == "1.3"
    assert found["prefill, GQA 32:8, 16K-64K: time of mpfa over direct, geometric mean"] == "1.02"
    assert found["prefill, GQA 32:8, 16K-128K: rate of mpfa"] == "98.04-98.04"


def test_every_paper_figure_is_complete():
    for figure in paper.figures():
        assert set(figure) == {"where", "what", "value", "unit", "measure"}
        assert "igure" in figure["where"] or "section" in figure["where"]
        how = figure["measure"]
        if how is None:
            continue
        assert how["bench"] in ("decode", "prefill") and how["heads"] in (32, 40)
        assert set(how) - {"bench", "impl", "heads", "lengths"} in ({"over"}, {"metric"})
        wanted = decode_cases.MATRIX if how["bench"] == "decode" else ()
        for length in how["lengths"]:
            assert length in prefill.LENGTHS
            if wanted:
                assert decode_cases.Shape(1, length, how["heads"]) in wanted


def test_case_names_are_those_of_the_benchmarks():
    assert (
        paper.case_of("decode", 40, 8192)
        == f"decode {decode_cases.Shape(1, 8192, 40).name}, page 128"
    )
    case = prefill.Case(8192, 40, None, None, None, {})
    assert paper.case_of("prefill", 40, 8192) == case.name


def test_written_with_plots(tmp_path):
    pytest.importorskip("matplotlib")
    rows.save(tmp_path / "b200.json", decode_rows())
    assert report.main(["--results", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "(plots/b200_decode_b1.png)" in text and "b200_prefill" not in text
    picture = tmp_path / "plots" / "b200_decode_b1.png"
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 10_000
    assert report.main(["--results", str(tmp_path)]) == 0
    assert picture.read_bytes() == first
    assert "Figure 6b" in text


def test_merge_takes_in_rows_of_another_machine(tmp_path, capsys):
    rows.save(tmp_path / "results" / "h200.json", decode_rows("NVIDIA H200")[:4])
    rows.save(tmp_path / "one.json", decode_rows("NVIDIA H200"))
    rows.save(tmp_path / "other.json", decode_rows())
    arguments = ["--results", str(tmp_path / "results"), "--no-plots", "--merge"]
    files = (str(tmp_path / "one.json"), "--merge", str(tmp_path / "other.json"))
    assert report.main([*arguments, *files]) == 0
    kept = {p.stem: len(rows.load(p)) for p in (tmp_path / "results").glob("*.json")}
    assert kept == {"h200": len(decode_rows()), "b200": len(decode_rows())}
    rows.save(tmp_path / "cpu.json", [rows.make_row("plan_cpu", "c", "mpfa", "median", 1.0, "us",
                                                    common("none (2-core x86_64 CPU)"))])  # fmt: skip
    model = rows.make_row("sass_model", "c", "mpfa", "bound", 657, "cycles",
                          common("NVIDIA B200", "sass_model"))  # fmt: skip
    rows.save(tmp_path / "model.json", [model])
    (tmp_path / "mixed.json").write_text(json.dumps(decode_rows("NVIDIA H200") + decode_rows()))
    before = {p.name: p.read_text() for p in (tmp_path / "results").iterdir()}
    for file, message in (
        ("cpu.json", "only rows that a GPU measured, got kind 'measured', gpu 'none (2-core"),
        ("model.json", "only rows that a GPU measured, got kind 'sass_model'"),
        ("mixed.json", "mixed.json: holds rows measured on NVIDIA H200 and NVIDIA B200"),
        ("none.json", "no such file"),
    ):
        with pytest.raises(SystemExit) as stop:
            report.main([*arguments, str(tmp_path / file)])
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert before == {p.name: p.read_text() for p in (tmp_path / "results").iterdir()}


def test_folders_that_do_not_exist(tmp_path, capsys):
    for arguments, message in (
        (["--results", str(tmp_path / "no")], "--results: no such folder"),
        (["--results", str(tmp_path), "--out", str(tmp_path / "no" / "x.md")], "--out: in no"),
    ):
        with pytest.raises(SystemExit):
            report.main(arguments)
        assert message in capsys.readouterr().err


CASE = "decode 1 x 128K, GQA 32:8, page 128"


@pytest.mark.parametrize("key", ["driver", "commit", "date"])
def test_rows_of_two_runs_are_not_compared(key):
    """Neither ratios nor verdicts: another driver, commit or day is not another kernel."""
    other = {key: "2026-01-03" if key == "date" else "other"}
    for gpu in ("NVIDIA H200", "NVIDIA B200"):
        baseline = timed("decode", CASE, {"flashinfer fp8": 40.0, "fa4 bf16 unsplit": 50.0}, gpu)
        ours = timed("decode", CASE, {"mpfa mean": 20.0}, gpu)
        apart = timed("decode", CASE, {"mpfa mean": 20.0}, gpu, **other)
        together = report.build({"x": baseline + ours}, None)
        assert "2.00 x" in together and ("speed over" in together) == (gpu == "NVIDIA H200")
        text = report.build({"x": baseline + apart}, None)
        assert " x |" not in text and "speed over" not in text and "20.0" in text and "40.0" in text
        lines = decode_cases.verdicts(baseline + apart)
        assert lines and not any("speed over" in line for line in lines)
    assert decode_cases.verdicts(baseline + ours)[0].endswith("bar 1.6: met")


def test_geometric_means_and_the_paper_need_one_run():
    made = decode_rows()
    assert decode_cases.summary(made) and paper.beside(made)
    foreign = [r | {"driver": "2"} if r["impl"].startswith("mpfa") else r for r in made]
    assert decode_cases.summary(foreign) == [] and paper.beside(foreign) == []
    # Of two whole runs the newest counts.
    slow = [r | {"date": "2026-02-03", "value": 2 * r["value"]} if r["impl"] == "mpfa mean" else
            r | {"date": "2026-02-03"} for r in made]  # fmt: skip
    found = [ours for _, _, ours, _, _ in paper.beside([*slow, *made])]
    assert found == [ours for _, _, ours, _, _ in paper.beside(slow)]
    assert found != [ours for _, _, ours, _, _ in paper.beside(made)]


@pytest.mark.parametrize(
    "name", ["NVIDIA B200 MIG 1g.23gb", "NVIDIA GB200", "NVIDIA B300 SXM6", "NVIDIA B200-180GB"]
)
def test_another_gpu_is_no_b200(name):
    assert paper.beside(decode_rows()) and paper.beside(decode_rows(name)) == []
    text = report.build({"x": decode_rows("NVIDIA H200 MIG 1g.18gb")}, None)
    assert "Held to on an H200" not in text
    assert "Held to on an H200" in report.build({"x": decode_rows("NVIDIA H200")}, None)


def test_a_page_of_two_gpus_in_one_file_is_refused():
    with pytest.raises(
        ValueError, match="mixed.json: holds rows measured on NVIDIA H200 and NVIDIA"
    ):
        report.build({"mixed": decode_rows("NVIDIA H200") + decode_rows()}, None)
