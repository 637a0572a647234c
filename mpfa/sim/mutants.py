# SPDX-License-Identifier: Apache-2.0
"""Mutation test of the synchronisation in a PTX module.

Each mutant leaves out, or weakens, one synchronising instruction. A check (any command or callable)
runs the mutant; a mutant that the check rejects is caught, one that it accepts survived. A survivor
is either harmless, because another edge orders the same accesses, or a hole in the check, so known
harmless ones are listed in a file with the reason and any other survivor makes the run fail.

    python -m mpfa.sim.mutants kernel.ptx [--known FILE] [--jobs N] -- ./check {ptx}

Kinds of mutants:
    drop       the instruction is gone; a test or try_wait is replaced by "true"
    phase      the parity operand of a wait is inverted
    no-expect  arrive.expect_tx arrives, but expects no bytes
    arrive     tcgen05.commit becomes a plain mbarrier.arrive of the issuing thread
    trap       (coverage only) the instruction traps; a run that passes never executed it
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Opcodes (up to the first modifier that does not matter) whose removal is a mutant.
SYNC = re.compile(
    r"""(?:fence|membar)\b
    | bar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)\b
    | bar\.warp\.sync\b
    | barrier\.cluster\.(?:arrive|wait)\b
    | mbarrier\.(?:arrive|arrive_drop|expect_tx|complete_tx|test_wait|try_wait)\b
    | cp\.async\.(?:commit_group|wait_group|wait_all|mbarrier\.arrive)\b
    | cp\.async\.bulk\.(?:commit_group|wait_group)\b
    | tcgen05\.(?:commit|wait::ld|wait::st|fence::\w+)
    | wgmma\.(?:fence|commit_group|wait_group)\b
    | griddepcontrol\.wait\b""",
    re.X,
)
GUARD = re.compile(r"@\s*!?\s*%?[\w$]+\s+")
# An opcode with its guard, at the beginning of a word.
WORD = re.compile(r"(?<![\w.%$])((?:@\s*!?\s*%?[\w$]+\s+)?)([a-z][\w.:]*)")
KINDS = ("drop", "phase", "no-expect", "arrive")


@dataclass(frozen=True)
class Statement:
    """One PTX instruction: text[begin:end] of the module, `;` included."""

    begin: int
    end: int
    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    key is "<kind> <n>", n counting the synchronising instructions of the module from 0: it does not
    depend on line numbers, so a list of known survivors stays valid when debug lines move.
    """

    key: str
    kind: str
    line: int
    original: str
    text: str

    @property
    def opcode(self) -> str:
        return GUARD.sub("", self.original).split()[0].rstrip(";")


@dataclass(frozen=True)
class Result:
    """verdict: caught, harmless (listed), not executed, or survived."""

    mutant: Mutant
    verdict: str
    reason: str
    seconds: float


@dataclass(frozen=True)
class Harmless:
    """A mutant that the check accepts, and the edge that makes it harmless."""

    key: str
    opcode: str
    reason: str


Check = Callable[[Path], tuple[bool, str]]
VERDICTS = ("caught", "harmless", "not executed", "survived")


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at the commas outside brackets and braces."""
    parts, depth, current = [], 0, ""
    for c in text:
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        if c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += c
    if current.strip():
        parts.append(current.strip())
    return tuple(parts)


def blank_comments(ptx: str) -> str:
    """The module with comments and strings turned into spaces: same offsets, same lines."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), ptx)


def statements(ptx: str) -> Iterator[Statement]:
    """The synchronising instructions of a PTX module in text order."""
    code = blank_comments(ptx)
    after = 0
    while (end := code.find(";", after)) >= 0:
        # A piece between two semicolons may begin with labels, scope braces or directives (.loc has
        # no semicolon); the instruction is on its last lines.
        start, after = after, end + 1
        for word in WORD.finditer(code, start, end):
            if SYNC.match(word.group(2)):
                begin = word.start(1)
                operands = split_operands(code[word.end(2) : end])
                line = ptx.count("\n", 0, begin) + 1
                yield Statement(begin, after, line, word.group(1), word.group(2), operands)
                break


def changes(s: Statement) -> Iterator[tuple[str, str]]:
    """(kind, replacement) pairs for one instruction."""
    waits = re.match(r"mbarrier\.(?:test|try)_wait\b", s.opcode)
    if waits:
        yield "drop", f"{s.guard}setp.eq.u32 {s.operands[0].split('|')[0]}, 0, 0;"
        if ".parity" in s.opcode:
            rest = ", ".join(("", *s.operands[3:]))
            parity = s.operands[2]
            yield (
                "phase",
                f"{{ .reg .b32 mutant_parity; xor.b32 mutant_parity, {parity}, 1; "
                f"{s.guard}{s.opcode} {s.operands[0]}, {s.operands[1]}, mutant_parity{rest}; }}",
            )
        return
    if s.opcode.startswith("mbarrier.arrive") and not s.operands[0].startswith(("_", "[")):
        # Later code may test the returned state, so its register needs some value.
        yield "drop", f"{s.guard}mov.b64 {s.operands[0]}, 0;"
    else:
        yield "drop", ""
    if ".expect_tx" in s.opcode and "arrive" in s.opcode:
        plain = s.opcode.replace(".expect_tx", "")
        yield "no-expect", f"{s.guard}{plain} {', '.join(s.operands[:-1])};"
    if s.opcode.startswith("tcgen05.commit") and ".multicast" not in s.opcode:
        space = ".shared::cluster" if ".shared" in s.opcode else ""
        yield "arrive", f"{s.guard}mbarrier.arrive{space}.b64 _, {s.operands[0]};"


def mutants(ptx: str, kinds: Sequence[str] = KINDS) -> Iterator[Mutant]:
    """All mutants of a PTX module, one change each. Raises ValueError for an unknown kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds: {kind!r} is unknown; allowed are {', '.join(KINDS)}")
    for n, s in enumerate(statements(ptx)):
        original = " ".join(ptx[s.begin : s.end].split())
        for kind, replacement in changes(s):
            if kind in kinds:
                text = ptx[: s.begin] + replacement + ptx[s.end :]
                yield Mutant(f"{kind} {n}", kind, s.line, original, text)


def trapped(ptx: str, mutant: Mutant) -> str:
    """The original module with a trap in place of the mutant's instruction (same guard)."""
    n = int(mutant.key.split()[1])
    s = list(statements(ptx))[n]
    return ptx[: s.begin] + f"{s.guard}trap;" + ptx[s.end :]


def failing_peeks(ptx: str, numbers: Collection[int]) -> str:
    """The module with these test_wait or try_wait replaced by "false": where a blocking wait follows a
    peek that failed, it makes the blocking wait run."""
    for n, s in reversed(list(enumerate(statements(ptx)))):
        if n in numbers:
            if not re.match(r"mbarrier\.(?:test|try)_wait\b", s.opcode):
                raise ValueError(f"numbers: instruction {n} is {s.opcode}, not a wait")
            false = f"{s.guard}setp.ne.u32 {s.operands[0].split('|')[0]}, 0, 0;"
            ptx = ptx[: s.begin] + false + ptx[s.end :]
    return ptx


def command_check(command: Sequence[str], timeout: float) -> Check:
    """A check that runs a command, `{ptx}` replaced by the module's path: exit status 0 passes.

    The reason is the first line of its output that names a simulator message, else the last line.
    """

    def check(path: Path) -> tuple[bool, str]:
        args = [word.replace("{ptx}", str(path)) for word in command]
        try:
            out = subprocess.run(args, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return False, f"no end within {timeout:g} s"
        if out.returncode == 0:
            return True, ""
        lines = [x for x in (out.stderr + "\n" + out.stdout).splitlines() if x.strip()]
        named = [x for x in lines if "ptxsim" in x]
        return False, (named or lines[-1:] or [f"exit status {out.returncode}"])[0].strip()

    return check


def read_harmless(path: Path) -> list[Harmless]:
    """A list of harmless mutants: a line each,

        <kind> <n> <opcode>: <edge that orders the accesses anyway>

    The opcode may be left out; # begins a comment.

    Raises:
        ValueError: a line of another form, or a mutant listed twice; the message names the line.
    """
    found: list[Harmless] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        head, colon, reason = line.partition(": ")
        words = head.split()
        if not colon or not reason.strip() or len(words) not in (2, 3):
            raise ValueError(
                f"{path}:{number}: expected '<kind> <n> <opcode>: <reason>', found {line!r}"
            )
        entry = Harmless(" ".join(words[:2]), "".join(words[2:]), reason.strip())
        if entry.key in {x.key for x in found}:
            raise ValueError(f"{path}:{number}: {entry.key} is listed twice")
        found.append(entry)
    return found


def read_known(path: Path) -> dict[str, str]:
    """The reasons in a list of harmless mutants by key; errors as :func:`read_harmless`."""
    return {x.key: x.reason for x in read_harmless(path)}


def harmless_markdown(files: Sequence[Path]) -> str:
    """The lists of harmless mutants as tables, one per file; the comments in a file head its table.
    Files without entries are named in one sentence."""
    tables, empty = [], []
    for path in files:
        listed = read_harmless(path)
        if not listed:
            empty.append(f"`{path.stem}`")
            continue
        comments = [x[1:].strip() for x in path.read_text().splitlines() if x.startswith("#")]
        rows = [f"| {x.key} | `{x.opcode}` | {x.reason} |" for x in listed]
        head = "| mutant | instruction | edge |\n|---|---|---|"
        tables.append("\n".join((f"### {path.stem}", "", *comments, "", head, *rows, "")))
    if empty:
        tables.append(f"No mutant of {', '.join(empty)} is harmless.\n")
    return "\n".join(tables)


def stale(listed: Sequence[Harmless], results: Sequence[Result]) -> list[str]:
    """What a list of harmless mutants says that a run does not bear out: one sentence each."""
    by_key = {r.mutant.key: r for r in results}
    wrong = []
    for x in listed:
        r = by_key.get(x.key)
        if r is None:
            wrong.append(f"{x.key}: no such mutant")
        elif x.opcode and x.opcode != r.mutant.opcode:
            wrong.append(f"{x.key}: listed for {x.opcode}, but it is {r.mutant.opcode}")
        elif r.verdict != "harmless":
            wrong.append(f"{x.key}: listed as harmless, but {r.verdict}")
    return wrong


def run(
    ptx: str,
    check: Check,
    *,
    known: dict[str, str] | None = None,
    kinds: Sequence[str] = KINDS,
    jobs: int = 1,
    coverage: bool = True,
    keys: Collection[str] | None = None,
    work: Path | None = None,
) -> list[Result]:
    """Runs every mutant of `ptx`, or those named by `keys`, through `check`, in text order.

    check(path) returns (passed, reason). ValueError: the unchanged module fails the check.
    """
    known = known or {}
    with tempfile.TemporaryDirectory(dir=work) as folder:

        def attempt(name: str, text: str) -> tuple[bool, str, float]:
            path = Path(folder) / f"{name.replace(' ', '_')}.ptx"
            path.write_text(text)
            start = time.monotonic()
            passed, reason = check(path)
            path.unlink()
            return passed, reason, time.monotonic() - start

        passed, reason, _ = attempt("original", ptx)
        if not passed:
            raise ValueError(f"ptx: the unchanged module fails the check: {reason}")

        def judge(m: Mutant) -> Result:
            passed, reason, seconds = attempt(m.key, m.text)
            if not passed:
                return Result(m, "caught", reason, seconds)
            if m.key in known:
                return Result(m, "harmless", known[m.key], seconds)
            if coverage and attempt(m.key + " trap", trapped(ptx, m))[0]:
                return Result(m, "not executed", "", seconds)
            return Result(m, "survived", "", seconds)

        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            chosen = [m for m in mutants(ptx, kinds) if keys is None or m.key in keys]
            return list(pool.map(judge, chosen))


def table(results: Sequence[Result]) -> str:
    """A row per opcode and kind with the counts, then each mutant that was not caught."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for r in results:
        short = ".".join(r.mutant.opcode.split(".")[:3])
        row = rows.setdefault((short, r.mutant.kind), dict.fromkeys(VERDICTS, 0))
        row[r.verdict] += 1
    width = max([len(k[0]) for k in rows] + [11])
    head = f"{'instruction':{width}}  {'kind':9}  caught  harmless  not executed  survived  total"
    lines = [head]
    rows[("total", "")] = {v: sum(c[v] for c in rows.values()) for v in VERDICTS}
    for (opcode, kind), c in rows.items():
        lines.append(
            f"{opcode:{width}}  {kind:9}  {c['caught']:6}  {c['harmless']:8}  "
            f"{c['not executed']:12}  {c['survived']:8}  {sum(c.values()):5}"
        )
    for r in results:
        if r.verdict in ("harmless", "survived"):
            m = r.mutant
            lines.append(f"{r.verdict}: {m.key}, line {m.line}: {m.original}  {r.reason}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a mutant survived that is not listed as harmless."""
    parser = argparse.ArgumentParser(prog="python -m mpfa.sim.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("ptx", type=Path)
    parser.add_argument("--known", type=Path, help="file that lists the harmless mutants")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one run")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--verbose", action="store_true", help="print why each mutant was caught")
    parser.epilog = "-- command ...: the check to run, with {ptx} for the module"
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    command = words[split + 1 :]
    ptx = args.ptx.read_text()
    kinds = [k for k in args.kinds.split(",") if k]
    if args.list:
        for m in mutants(ptx, kinds):
            print(f"{m.key:14} line {m.line}: {m.original}")
        return 0
    if not any("{ptx}" in word for word in command):
        parser.error("a command with {ptx} in it is needed after --")
    listed = read_harmless(args.known) if args.known else []
    known = {x.key: x.reason for x in listed}
    check = command_check(command, args.timeout)
    try:
        results = run(ptx, check, known=known, kinds=kinds, jobs=args.jobs)
    except ValueError as error:
        print(f"{shlex.join(command)}: {error}", file=sys.stderr)
        return 2
    if args.verbose:
        for r in results:
            if r.verdict == "caught":
                print(f"caught {r.mutant.key}, line {r.mutant.line}: {r.reason}")
    print(table(results))
    wrong = stale([x for x in listed if x.key.split()[0] in kinds], results)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong or any(r.verdict == "survived" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
