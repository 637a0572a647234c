# SPDX-License-Identifier: Apache-2.0
"""The mutation runner itself, without a simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpfa.sim import mutants

PTX = """
.version 9.0
// bar.sync 0; in a comment
.visible .entry k() {
  .reg .pred %p<3>; .reg .b32 %r<9>;
  .loc 1 2 3
  $L1: bar.sync 0;
  @%p1 bar.sync 1, 64;
  {
  .reg .pred done;
  retry: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1+8], %r2, 100;
  @!done bra retry;
  }
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r3;
  mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
  @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
  tcgen05.wait::ld.sync.aligned;
  cp.async.bulk.wait_group.read 1;
  ld.shared.b32 %r5, [%r6];
  ret;
}
"""


def test_statements() -> None:
    found = [(s.line, s.guard.strip(), s.opcode) for s in mutants.statements(PTX)]
    assert found == [
        (7, "", "bar.sync"),
        (8, "@%p1", "bar.sync"),
        (11, "", "mbarrier.try_wait.parity.shared::cta.b64"),
        (14, "", "mbarrier.arrive.expect_tx.shared::cta.b64"),
        (15, "", "mbarrier.arrive.shared::cta.b64"),
        (16, "@%p2", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"),
        (17, "", "tcgen05.wait::ld.sync.aligned"),
        (18, "", "cp.async.bulk.wait_group.read"),
    ]


def changed_line(mutant: mutants.Mutant) -> str:
    before, after = PTX.splitlines(), mutant.text.splitlines()
    assert len(before) == len(after)
    different = [b.strip() for a, b in zip(before, after, strict=True) if a != b]
    assert len(different) == 1
    return different[0]


def test_mutants_change_one_instruction() -> None:
    lines = {m.key: changed_line(m) for m in mutants.mutants(PTX)}
    assert lines == {
        "drop 0": "$L1:",
        "drop 1": "",
        "drop 2": "retry: setp.eq.u32 done, 0, 0;",
        "phase 2": "retry: { .reg .b32 mutant_parity; xor.b32 mutant_parity, %r2, 1; "
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%r1+8], mutant_parity, 100; }",
        "drop 3": "",
        "no-expect 3": "mbarrier.arrive.shared::cta.b64 _, [%r1];",
        "drop 4": "mov.b64 %rd1, 0;",
        "drop 5": "",
        "arrive 5": "@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r4];",
        "drop 6": "",
        "drop 7": "",
    }


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'swap'"):
        list(mutants.mutants(PTX, ["swap"]))


def test_verdicts_and_table() -> None:
    original = PTX

    def check(path: Path) -> tuple[bool, str]:
        text = path.read_text()
        if "trap;" in text:  # the second bar.sync is never reached
            return "@%p1 trap;" in text, "trapped"
        gone = "tcgen05.wait" not in text
        return not gone, "race" if gone else ""

    results = mutants.run(original, check, known={"drop 0": "one warp only"})
    verdicts = {r.mutant.key: r.verdict for r in results}
    assert verdicts["drop 6"] == "caught"
    assert verdicts["drop 0"] == "harmless"
    assert verdicts["drop 1"] == "not executed"
    assert verdicts["drop 7"] == "survived"
    text = mutants.table(results)
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert total.split()[1:] == ["1", "1", "1", "8", "11"]
    assert "harmless: drop 0, line 7: bar.sync 0;  one warp only" in text


def test_original_must_pass() -> None:
    with pytest.raises(ValueError, match="unchanged module fails the check: no"):
        mutants.run(PTX, lambda path: (False, "no"))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx = tmp_path / "k.ptx"
    ptx.write_text(PTX)
    script = (
        "import sys; text = open(sys.argv[1]).read()\n"
        "sys.exit('trap;' in text or 'tcgen05.wait' not in text)"
    )
    known = tmp_path / "known"
    known.write_text("# reasons\ndrop 0: one warp\n")
    args = [str(ptx), "--known", str(known), "--kinds", "drop", "--"]
    assert mutants.main([*args, sys.executable, "-c", script, "{ptx}"]) == 1
    assert "survived: drop 7" in capsys.readouterr().out
    assert mutants.main([str(ptx), "--list"]) == 0
    assert "phase 2" in capsys.readouterr().out


def test_timeout_counts_as_caught(tmp_path: Path) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(PTX)
    check = mutants.command_check([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert check(path) == (False, "no end within 0.2 s")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("drop 0\n", "known:1: expected"),
        ("# a\ndrop: why\n", "known:2: expected"),
        ("drop 0 bar.sync 1: why\n", "known:1: expected"),
        ("drop 0: a\nphase 1: b\ndrop 0 bar.sync: c\n", "known:3: drop 0 is listed twice"),
    ],
)
def test_known_file_errors(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "known"
    path.write_text(text)
    with pytest.raises(ValueError, match=fault):
        mutants.read_known(path)


def test_known_file_that_no_longer_fits(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(
        "drop 0 bar.sync: right\n"
        "drop 1 fence.sc.cta: another instruction\n"
        "drop 4: caught now\n"
        "phase 9 mbarrier.try_wait.parity.shared::cta.b64: gone\n"
    )
    listed = mutants.read_harmless(path)
    known = {x.key: x.reason for x in listed}
    results = mutants.run(PTX, lambda p: ("%rd1, 0" not in p.read_text(), ""), known=known)
    assert mutants.stale(listed, results) == [
        "drop 1: listed for fence.sc.cta, but it is bar.sync",
        "drop 4: listed as harmless, but caught",
        "phase 9: no such mutant",
    ]
