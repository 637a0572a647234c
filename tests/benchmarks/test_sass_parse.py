# SPDX-License-Identifier: Apache-2.0
"""Listings as instructions, blocks, loops and hot paths."""

import pytest
from listing import SASS, function, listing, snippet

from benchmarks.sass import flow, model, parse

MMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R2, R4, R0, R0, URZ"


def hot(code, key=flow.key_weight):
    graph = flow.Flow(code)
    loops = [loop for loop in graph.loops if not graph.is_spin(loop)]
    return [[str(i).split(" ", 1)[1] for i in graph.instructions(graph.hot_path(loop, key))]
            for loop in loops]  # fmt: skip


def test_fields_of_an_instruction():
    (i,) = function(
        ("@!UP1 LDS.128 R4, [R2+UR5+0x10], c[0x0][0x37c]",
         {"stall": 9, "write": 3, "read": 1, "wait": 0b100101}),
    ).instructions  # fmt: skip
    assert (i.opcode, i.base, i.modifiers, i.guard) == ("LDS.128", "LDS", ("128",), "!UP1")
    assert i.operands == ("R4", "[R2+UR5+0x10]", "c[0x0][0x37c]")
    control = i.control
    assert (control.stall, control.write_barrier, control.read_barrier) == (9, 3, 1)
    assert control.wait == 0b100101


def test_control_words_that_ptxas_wrote():
    """The first instructions of the listing: barrier 0 is set by S2R, and its reader waits for it."""
    code = snippet("tiny_sm120")[0].instructions
    setter = next(i for i in code if i.base == "S2R")
    barrier = setter.control.write_barrier
    target = setter.operands[0]
    reader = next(
        i for i in code if i.address > setter.address and target in " ".join(i.operands[1:])
    )
    assert barrier is not None and reader.control.wait >> barrier & 1
    assert all(
        1 <= i.control.stall <= 15 or i.base in ("BRA", "NOP") for i in code if i.control.stall
    )
    # 16 cycles between two block-scaled MMAs: 15 and a NOP.
    gaps = [
        (a.control.stall, b.control.stall)
        for a, b in zip(code, code[1:], strict=False)
        if a.base == "QMMA" and b.base == "NOP"
    ]
    assert (15, 1) in gaps


def test_no_encoding_is_an_error():
    plain = listing(MMA).replace(f"/* 0x{0:016x} */", "")
    with pytest.raises(ValueError, match="-hex"):
        parse.parse(plain)


def test_second_word_missing_is_an_error():
    lines = listing(MMA, "EXIT ").splitlines()
    del lines[3]
    with pytest.raises(ValueError, match="second word"):
        parse.parse("\n".join(lines))


def test_two_functions_and_other_sections():
    text = (
        listing("EXIT ", name="a") + '\t.section\t.nv.info,""\n' + listing(MMA, "EXIT ", name="b")
    )
    assert [(f.name, len(f.instructions)) for f in parse.parse(text)] == [("a", 1), ("b", 2)]


def test_code_only_keeps_the_code():
    text = (SASS / "tiny_sm100.sass").read_text()
    assert parse.parse(parse.code_only(text)) == parse.parse(text)


def test_indirect_branch_reaches_its_targets():
    code = function(
        'BRX R2 -0x10 (*"BRANCH_TARGETS .L_a,.L_b"*)',
        ".L_a:", MMA, "@P0 BRA `(.L_a)", "EXIT ",
        ".L_b:", "FADD R1, R1, R2", "@P0 BRA `(.L_b)", "EXIT ",
    )  # fmt: skip
    graph = flow.Flow(code)
    assert len(graph.loops) == 2
    assert set(graph.blocks[0].successors) == {1, 3}


def test_hot_path_leaves_out_what_a_steady_state_skips():
    code = function(
        ".L_top:",
        "FADD R1, R1, R2",
        "@P1 BRA `(.L_skip)",
        "FMUL R1, R1, R3",  # a rescale
        ".L_skip:",
        MMA,
        "@P0 BRA `(.L_top)",
        "EXIT ",
    )
    (path,) = hot(code)
    assert len(path) == 4 and not any("FMUL" in line for line in path)


def test_hot_path_takes_the_branch_with_the_matrix_work():
    code = function(
        ".L_top:",
        "@P1 BRA `(.L_next)",  # skips the tile
        MMA,
        "FADD R1, R1, R2",
        ".L_next:",
        "@P0 BRA `(.L_top)",
        "EXIT ",
    )
    assert sum("QMMA" in line for line in hot(code)[0]) == 1


def test_hot_path_passes_a_spinning_wait_once():
    code = function(
        ".L_top:",
        ".L_wait:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
        "@!P0 BRA `(.L_wait)",
        MMA,
        "@P1 BRA `(.L_top)",
        "EXIT ",
    )
    assert len(hot(code)) >= 1
    longest = max(hot(code), key=len)
    assert [line.split(" ")[-1] for line in longest].count("`(.L_wait)") == 1
    assert sum("SYNCS" in line for line in longest) == 1


def test_inner_loop_is_part_of_the_outer_path():
    code = function(
        ".L_top:",
        "FADD R1, R1, R2",
        ".L_in:",
        MMA,
        "@P1 BRA `(.L_in)",
        "FMUL R1, R1, R2",
        "@P0 BRA `(.L_top)",
        "EXIT ",
    )
    inner, outer = hot(code)
    assert len(inner) == 2 and len(outer) == 5


def test_branches_that_always_go():
    code = function("BRA.U UP0, `(.L_a)", "BRA `(.L_a)", "NOP ", ".L_a:", "EXIT ")
    blocks = flow.Flow(code).blocks
    assert [b.successors for b in blocks] == [(3, 1), (3,), (3,), ()]


def test_loops_of_compiled_code():
    """The committed listings: their source says what a trip does."""
    body = model.warp_mma_loop(model.bodies(snippet("tiny_sm120")[0]))
    assert body.count("QMMA") == 8 and body.count("MUFU") == 16 and body.count("LDS") == 8
    assert body.count("FMUL") == 0 and body.whole >= len(body.code) + 16  # the rescale is cold
    found = model.bodies(snippet("tiny_sm100")[0])
    soft, issue = model.softmax_loop(found), model.umma_loop(found)
    assert soft.count("MUFU") == 32 and soft.score_columns == 32 and soft.count("STTM") == 1
    assert issue.mma == {"UTCHMMA": 2, "UTCOMMA.4X": 2, "UTCQMMA": 2}
