# SPDX-License-Identifier: Apache-2.0
"""The figures of one attention kernel: which loops count, per what, and what bounds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import flow, model, replay, weights
from .model import Body
from .parse import Function, Instruction
from .weights import Arch

# Handshake through an mbarrier: arrival, visibility to the waiting warp, its next test. No public
# measurement; see docs/sass_model.md.
HOP = 40.0
# Cycles between the starts of two warps that are tried.
OFFSETS = (0.0, 37.0, 300.0, 700.0)
# Keys of the sequence for which rare branches are weighed.
CONTEXT = 8192
# HBM bandwidth and clock of a B200 for one SM: 8 TB/s, 148 SMs, 1.85 GHz.
HBM_BYTES_PER_CYCLE = 8e12 / 148 / 1.85e9


@dataclass(frozen=True)
class Figure:
    """One line of a table; ``note`` says per what."""

    metric: str
    value: float
    unit: str
    note: str = ""


def spills(functions: Sequence[Function]) -> int:
    """Local-memory accesses in all of the code: spilled registers and indexed arrays."""
    return sum(i.base in ("LDL", "STL") for f in functions for i in f.instructions)


def main_function(functions: Sequence[Function], head_dim: int) -> Function:
    """The attention kernel of a cubin: the function with the most matrix instructions, among those with
    ``head_dim`` as a template argument if there are any.

    Raises:
        ValueError: no function has matrix instructions.
    """
    count = {f.name: sum(flow.key_weight(i) >= 1000 for i in f.instructions) for f in functions}
    found = [f for f in functions if count[f.name]]
    if not found:
        raise ValueError("cubin: no function with matrix instructions")
    named = [f for f in found if f"Li{head_dim}E" in f.name] or found
    return max(named, key=lambda f: count[f.name])


def path_of(function: Function, address: int, key: flow.KeyWeight) -> list[Instruction]:
    """The path of one trip of the loop at ``address`` that ``key`` prefers.

    Raises:
        ValueError: no such loop.
    """
    graph = flow.Flow(function)
    for loop in graph.loops:
        if function.instructions[graph.blocks[loop.header].begin].address == address:
            return graph.instructions(graph.hot_path(loop, key))
    raise ValueError(f"address: no loop at {address:#x} in {function.name}")


def rescale_weight(instruction: Instruction) -> float:
    """Prefers the path that multiplies the outputs, without the exponentials of a soft cap."""
    if instruction.base in ("FMUL", "FMUL2"):
        return 1.0
    return -5.0 if instruction.base == "MUFU" else flow.key_weight(instruction)


def rescale_share(blocks: int, rows: int = 16) -> float:
    """Share of a warp's KV blocks in which one of its rows meets a new maximum, for scores that are
    independent and equally distributed: block j has a row's maximum so far with probability 1/j.

    Summed over the rows, which is an upper bound, and at most 1.
    """
    return sum(min(1.0, rows / j) for j in range(1, blocks + 1)) / blocks


# --- kernels of warp MMAs -----------------------------------------------------------------------


def warp_mma_kernel(
    functions: Sequence[Function], arch: Arch, head_dim: int, warps: int
) -> list[Figure]:
    """The unmasked main loop of a kernel whose warps hold scores and outputs in registers.

    Args:
        warps: MMA warps in one sub-partition.
    """
    function = main_function(functions, head_dim)
    body = model.warp_mma_loop(model.bodies(function))
    if body is None:
        raise ValueError(f"{function.name}: no loop with warp MMAs")
    # 4 * head_dim operations per score: 2 * head_dim in Q K^T, as many in P V. Whole steps of 16 rows
    # x 32 keys: some kernels sum the rows with an MMA as well.
    elements = body.flop // (4 * head_dim) // 512 * 512
    if elements == 0:
        raise ValueError(f"{function.name}: {body.flop} operations a trip, too few for {head_dim}")
    useful = elements * 4 * head_dim
    per_element = 32 / elements
    bound = model.bound(body.code, arch)
    runs = [replay.replay(body.code, arch, warps, offset=o) for o in OFFSETS]
    together = max(runs, key=lambda r: r.cycles)
    alone = replay.replay(body.code, arch, 1)
    longer = path_of(function, body.address, rescale_weight)
    rescaled = max(replay.replay(longer, arch, warps, offset=o).cycles for o in OFFSETS)
    taken = rescale_share(CONTEXT // (elements // 16))
    weighted = taken * rescaled + (1 - taken) * together.cycles
    # 512 operations a clock and sub-partition: the QMMA.SF rate, 1024 multiply-adds for the SM.
    peak = 512.0
    figures = [
        Figure("loop instructions", len(body.code), "instr", f"per trip, {elements:.0f} scores"),
        Figure("instructions per score", len(body.code) * per_element, "instr", "32 lanes' share"),
    ]
    for name, bases in (
        ("MMA", ("QMMA", "OMMA", "HMMA")),
        ("MUFU", ("MUFU",)),
        ("FFMA+FMUL+FADD", ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")),
        ("FMNMX", ("FMNMX", "FMNMX3")),
        ("F2FP", ("F2FP",)),
        ("LDSM+LDS", ("LDSM", "LDS")),
        ("SHFL", ("SHFL",)),
        ("PRMT", ("PRMT",)),
        ("MOV", ("MOV",)),
        ("NOP", ("NOP",)),
    ):
        figures.append(Figure(f"  of which {name}", body.count(*bases) * per_element, "instr"))
    for pipe in (
        weights.TENSOR,
        weights.LSU,
        weights.ISSUE,
        weights.MUFU,
        weights.ALU,
        weights.FMA,
    ):
        cycles = bound.cycles[pipe] / elements * 16
        figures.append(
            Figure(f"{pipe} cycles", cycles, "cycles", "per 16 scores and sub-partition")
        )
    limit, most = bound.limit
    figures += [
        Figure("pipe bound, share of QMMA.SF peak", useful / most / peak, "", f"limit: {limit}"),
        Figure(
            "replay, share of QMMA.SF peak",
            useful * warps / weighted / peak,
            "",
            f"{warps} warps, rescale weighted",
        ),
        Figure("  without rescale", useful * warps / together.cycles / peak, ""),
        Figure(
            "  with a rescale in each trip",
            useful * warps / rescaled / peak,
            "",
            f"{len(longer) - len(body.code)} instructions more",
        ),
        Figure("  trips with a rescale", taken, "", f"random scores, {CONTEXT} keys"),
        Figure("replay, tensor pipe busy", together.busy[weights.TENSOR], "", f"{warps} warps"),
        Figure("one warp alone, share of peak", useful / alone.cycles / peak, "", "no overlap"),
        Figure(
            "replay, cycles per trip", together.cycles, "cycles", f"{warps} warps, one trip each"
        ),
        Figure("local memory accesses", spills(functions), "instr", "whole cubin"),
    ]
    kinds = sorted(body.mma)
    figures.append(Figure("MMA kinds in the loop", len(kinds), "", ", ".join(kinds)))
    return figures


# --- kernels of tcgen05 --------------------------------------------------------------------------


@dataclass(frozen=True)
class Umma:
    """Asynchronous MMAs of one trip of the issuing warp, by what they compute."""

    scores: int
    correction: int  # the BF16 K=16 product in front of the NVFP4 one
    output: int


def classify_umma(body: Body) -> Umma:
    """Sorts them by operands: A from Tensor Memory is P V; BF16 beside NVFP4 is the compensation.

    The first operand of a UTC*MMA is A: "tmem[..]" or "gdesc[..]".
    """
    found = [i for i in body.code if i.base.startswith("UTC") and i.base.endswith("MMA")]
    from_tmem = [i for i in found if i.operands[0].startswith("tmem")]
    rest = [i for i in found if not i.operands[0].startswith("tmem")]
    fp4 = [i for i in rest if i.base == "UTCOMMA"]
    if fp4:
        correction = [i for i in rest if i.base == "UTCHMMA"]
        output = len(from_tmem) + len(rest) - len(fp4) - len(correction)
        return Umma(len(fp4), len(correction), output)
    return Umma(len(rest), 0, len(from_tmem))


def _correction_loop(found: Sequence[Body]) -> Body | None:
    """The loop that rescales outputs in Tensor Memory: loads and stores it, no exponentials for
    scores."""
    both = [b for b in found if b.score_columns and b.count("STTM") and b.count("MUFU") < 8]
    return min(both, key=lambda b: b.whole, default=None)


def umma_prefill_kernel(
    functions: Sequence[Function], arch: Arch, head_dim: int, keys: int = 128
) -> list[Figure]:
    """Softmax, correction and MMA loops of a kernel with two query stages of 128 rows x ``keys``.

    One trip of a softmax warp is a quarter of one 128 x 128 tile; its sub-partition also hosts the
    other stage's softmax warp and a correction warp, so cycles per tile and sub-partition are those of
    one softmax trip plus one correction trip.
    """
    function = main_function(functions, head_dim)
    found = model.bodies(function)
    soft, issue = model.softmax_loop(found), model.umma_loop(found)
    if soft is None or issue is None:
        raise ValueError(f"{function.name}: no softmax or no MMA loop")
    if soft.score_columns != keys:
        raise ValueError(
            f"{function.name}: a softmax trip loads {soft.score_columns} score columns, not {keys}"
        )
    bound = model.bound(soft.code, arch)
    correction = _correction_loop(found)
    skipped = len(path_of(function, correction.address, lambda i: 0.0)) if correction else 0
    umma = classify_umma(issue)
    tiles = 2
    score_cycles = umma.scores / tiles * arch.umma_cycles(keys)
    extra_cycles = umma.correction / tiles * arch.umma_cycles(keys)
    output_cycles = umma.output / tiles * arch.umma_cycles(head_dim, tmem_a=True)
    tensor = score_cycles + extra_cycles + output_cycles
    cycles = {
        "MUFU": bound.cycles[weights.MUFU],
        "FMA": bound.cycles[weights.FMA],
        "ALU": bound.cycles[weights.ALU],
        "issue": bound.cycles[weights.ISSUE] + skipped,
        "tensor": tensor,
    }
    limit, most = max(cycles.items(), key=lambda item: item[1])
    without = max(most if limit != "tensor" else 0, *(v for k, v in cycles.items() if k != "tensor"),
                  tensor - extra_cycles)  # fmt: skip
    alone = replay.alone(soft.code, arch)
    both = max(replay.replay(soft.code, arch, 2, offset=o).cycles for o in OFFSETS) / tiles
    chain = alone + tensor + 4 * HOP
    figures = [
        Figure("softmax instructions", len(soft.code), "instr", "per 128x128 tile and warp"),
        Figure("  of which MUFU", soft.count("MUFU"), "instr"),
        Figure("  of which FFMA2+FADD2+FMUL2", soft.count("FFMA2", "FADD2", "FMUL2"), "instr"),
        Figure("  of which F2FP", soft.count("F2FP"), "instr"),
        Figure("  of which FMNMX+FMNMX3", soft.count("FMNMX", "FMNMX3"), "instr"),
        Figure("correction instructions, rescale skipped", skipped, "instr", "per tile and warp"),
        Figure("MMA warp instructions", len(issue.code) / tiles, "instr", "per tile"),
        *(Figure(f"{name} cycles", v, "cycles", "per tile") for name, v in cycles.items()),
        Figure("bound", most, "cycles", f"per tile, limit: {limit}"),
        Figure("bound without compensation", without, "cycles", "per tile"),
        Figure("compensation, share of tensor cycles", extra_cycles / tensor, "", "the K=16 product"),
        Figure("softmax replay, one warp", alone, "cycles", "per tile, alone"),
        Figure("softmax replay, both stages", both, "cycles", "per tile, two warps interleaved"),
        Figure("chain of one stage", chain, "cycles", "softmax + MMAs + 4 handshakes"),
        Figure("  without compensation", chain - extra_cycles, "cycles"),
        Figure("chain bound", max(chain / tiles, both, most), "cycles", "per tile, two stages"),
        Figure("chain bound without compensation", max((chain - extra_cycles) / tiles, both, without),
               "cycles", "per tile"),
        Figure("local memory accesses", spills(functions), "instr", "whole cubin"),
    ]  # fmt: skip
    return figures


# --- decode --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeShape:
    """What one trip of a decode kernel's main loops covers, for 128 tokens of one KV head.

    Attributes:
        score_n, output_n: N of the two products as issued.
        output_tmem: A of the second product comes from Tensor Memory.
        warps: role -> warps per sub-partition that run this role's loop.
        bytes: read from HBM per 128 tokens.
    """

    score_n: int
    output_n: int
    output_tmem: bool
    bytes: float
    softmax_warps: int = 1


def qk4pv8_block_bytes(head_dim: int, group: int, mean: bool = True, channels: int = 0) -> float:
    """Cache bytes of 128 tokens of one KV head (docs/formats.md)."""
    return 128 * (head_dim / 2 + head_dim / 16 + head_dim + 2 * group * mean + 2 * channels)


def umma_decode_kernel(
    functions: Sequence[Function], arch: Arch, head_dim: int, shape: DecodeShape
) -> list[Figure]:
    """Cycles per 128 tokens in one SM, beside the time in which HBM brings the same bytes."""
    function = main_function(functions, head_dim)
    found = model.bodies(function)
    soft, issue = model.softmax_loop(found), model.umma_loop(found)
    if soft is None or issue is None:
        raise ValueError(f"{function.name}: no softmax or no MMA loop")
    # why SYNCS: ptxas wraps a copy whose issuing lane it cannot prove unique in a loop of its own.
    loads = [b for b in found if b.count("UTMALDG", "UBLKCP") and b.count("SYNCS")]
    load = min(loads, key=lambda b: b.whole, default=None)
    bound = model.bound(soft.code, arch)
    umma = classify_umma(issue)
    tensor = (umma.scores + umma.correction) * arch.umma_cycles(shape.score_n)
    tensor += umma.output * arch.umma_cycles(shape.output_n, tmem_a=shape.output_tmem)
    # Both kernels put the load and the MMA warp on different sub-partitions, beside a softmax warp each.
    others = max(len(issue.code), len(load.code) if load else 0)
    cycles = {
        "MUFU": bound.cycles[weights.MUFU] * shape.softmax_warps,
        "FMA": bound.cycles[weights.FMA] * shape.softmax_warps,
        "ALU": bound.cycles[weights.ALU] * shape.softmax_warps,
        "shared memory": bound.cycles[weights.LSU] * shape.softmax_warps,
        "issue": bound.cycles[weights.ISSUE] * shape.softmax_warps + others,
        "tensor": tensor,
    }
    limit, most = max(cycles.items(), key=lambda item: item[1])
    hbm = shape.bytes / HBM_BYTES_PER_CYCLE
    alone = replay.alone(soft.code, arch)
    chain = alone + tensor + 4 * HOP
    return [
        Figure("softmax instructions", len(soft.code), "instr", "per 128 tokens and warp"),
        Figure("  of which MUFU", soft.count("MUFU"), "instr"),
        Figure("  of which SHFL", soft.count("SHFL"), "instr"),
        Figure("  of which LDS+STS", soft.count("LDS", "STS"), "instr"),
        Figure("MMA warp instructions", len(issue.code), "instr", "per 128 tokens"),
        Figure("load warp instructions", len(load.code) if load else 0, "instr", "per 128 tokens"),
        *(Figure(f"{name} cycles", v, "cycles", "per 128 tokens") for name, v in cycles.items()),
        Figure("bound", most, "cycles", f"per 128 tokens, limit: {limit}"),
        Figure(
            "HBM cycles", hbm, "cycles", f"{shape.bytes:.0f} bytes at 8 TB/s / 148 SMs / 1.85 GHz"
        ),
        Figure("slack", hbm / most, "x", "HBM cycles over the bound"),
        Figure("chain of one block", chain, "cycles", "softmax + MMAs + 4 handshakes, one CTA"),
        Figure("blocks in flight to hide the chain", chain / hbm, "", "CTAs or stages in an SM"),
        Figure("local memory accesses", spills(functions), "instr", "whole cubin"),
    ]


def target_of(name: str, listing: str) -> str:
    """ "sm_120a" from the listing's directive or the image's name.

    Raises:
        ValueError: neither says it.
    """
    found = re.search(r"\.target\s+(sm_\w+)", listing) or re.search(r"(sm_\d+[af]?)", name)
    if not found:
        raise ValueError(f"{name}: the listing does not say its target")
    return found.group(1)
