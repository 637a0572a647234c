# SPDX-License-Identifier: Apache-2.0
"""The attention kernels: what each one serves and how it cuts its work, in one table.

``mpfa.supports()`` answers from it, ``plan()`` takes its tile sizes from it, and
``mpfa.jit.attention`` builds the modules that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpfa.config import COMPENSATION_SLOTS, PAGE_SIZES, KVCacheConfig

# Paper section 5.3: decode splits KV into chunks of 8 x 128 tokens.
DECODE_PARTITION_TOKENS = 1024
# KV heads are the second dimension of every launch's grid, of which CUDA allows 65535.
MAX_KV_HEADS = 65535


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts a plan's work.

    A tile has ``rows`` rows = query tokens x packed query heads of one KV head; at most
    ``max_tokens`` tokens, then as many heads as fit. ``kv_block`` is the keys of one step;
    ``workers_per_sm`` the thread blocks that share an SM. ``delta_slots``: every packed head takes
    one of the 16 compensation slots of a centred cache, beside its channels.
    """

    rows: int
    max_tokens: int
    kv_block: int
    workers_per_sm: int = 1
    delta_slots: bool = False

    def cut(self, tokens: int, group_size: int, config: KVCacheConfig | None) -> tuple[int, int]:
        """(q_tile_tokens, heads_per_group) for requests of up to ``tokens`` query tokens."""
        tile_tokens = max(1, min(tokens, self.max_tokens))
        heads = min(group_size, self.rows // tile_tokens)
        if self.delta_slots and (config is None or config.uses_mean):
            # Without a config any compensation may come.
            free = 1 if config is None else COMPENSATION_SLOTS - config.channels
            heads = min(heads, free)
        # A tile of one head can as well be full.
        return (tile_tokens, heads) if heads > 1 else (self.max_tokens, 1)


@dataclass(frozen=True)
class AttentionKernel:
    """One kernel family of one operation.

    Attributes:
        backend, operation: "sm90", "sm100" or "sm120"; "prefill" or "decode".
        module: name of the CUDA module without its head dimension.
        entry: part of the kernel's name in the module.
        major: compute capability major that it is built for.
        format: cache format that it reads.
        tilings: by head dimension; what is missing here has no kernel.
        page_sizes: of a paged cache.
        ragged: whether it also reads ragged K/V.
        refusals: why a head dimension or page size of the format is missing, by its text.
        ready: False keeps it out of supports() and of every backend.
        raw_query: it also takes the query as it is, bf16 or fp16, centres and rounds it itself, and
            adds the row term to partial rows too.
    """

    backend: str
    operation: str
    module: str
    entry: str
    major: int
    format: str
    tilings: dict[int, Tiling]
    page_sizes: tuple[int, ...]
    ragged: bool
    refusals: dict[str, str]
    ready: bool
    raw_query: bool = False


# The 99 KB of shared memory of SM120 hold 128-key stages only at head_dim 64.
_SM120_KV_BLOCK = {64: 128, 128: 64}
_SM120_NO_256 = {
    "head_dim 256": "K and V stages and the query tile exceed the 99 KB of shared memory of SM120"
}

_QK4PV8_DECODE = {d: Tiling(64, 8, 128, workers_per_sm=2) for d in (64, 128)}

KERNELS = (
    AttentionKernel(
        backend="sm120",
        operation="prefill",
        module="mpfa_sm120_prefill",
        entry="sm120_prefill",
        major=12,
        format="mxfp8",
        tilings={d: Tiling(128, 128, block) for d, block in _SM120_KV_BLOCK.items()},
        page_sizes=PAGE_SIZES["mxfp8"],
        ragged=True,
        refusals=_SM120_NO_256,
        ready=True,
    ),
    AttentionKernel(
        backend="sm120",
        operation="decode",
        module="mpfa_sm120_prefill",
        entry="sm120_prefill",
        major=12,
        format="mxfp8",
        tilings={d: Tiling(128, 8, block) for d, block in _SM120_KV_BLOCK.items()},
        page_sizes=PAGE_SIZES["mxfp8"],
        ragged=False,
        refusals=_SM120_NO_256,
        ready=True,
    ),
    AttentionKernel(
        backend="sm100",
        operation="prefill",
        module="mpfa_sm100_prefill",
        entry="sm100_prefill",
        major=10,
        format="qk4pv8",
        # Two stages of 128 rows.
        tilings={d: Tiling(256, 256, 128, delta_slots=True) for d in (64, 128)},
        page_sizes=PAGE_SIZES["qk4pv8"],
        ragged=True,
        refusals={"head_dim 256": "two query stages exceed the 512 columns of tensor memory"},
        ready=True,
    ),
    AttentionKernel(
        backend="sm100",
        operation="decode",
        module="mpfa_sm100_decode",
        entry="sm100_decode",
        major=10,
        format="qk4pv8",
        tilings=_QK4PV8_DECODE,
        page_sizes=(16, 32, 64, 128),
        ragged=False,
        refusals={
            "head_dim 256": "its accumulators exceed the tensor memory of half an SM",
            "page_size 1": "a 128-token step would need 128 page lookups",
        },
        ready=True,
    ),
    # Plans are those of sm100: a plan does not depend on which of the two runs it.
    AttentionKernel(
        backend="sm90",
        operation="decode",
        module="mpfa_sm90_decode",
        entry="sm90_decode",
        major=9,
        format="qk4pv8",
        tilings=_QK4PV8_DECODE,
        page_sizes=(16, 32, 64, 128),
        ragged=False,
        refusals={
            "head_dim 256": "its accumulators exceed the registers of two thread blocks on an SM",
            "page_size 1": "a warp copies 16 neighbouring tokens at once",
        },
        ready=True,
        raw_query=True,
    ),
)

# Tiles of plans that no kernel runs: the bf16 cache, head_dim 256. The reference walks them.
_REFERENCE = {"prefill": Tiling(128, 128, 128), "decode": Tiling(64, 8, 128)}

BACKENDS = tuple(dict.fromkeys(kernel.backend for kernel in KERNELS))
OPERATIONS = ("prefill", "decode")


def find_kernel(
    operation: str, *, backend: str | None = None, format: str | None = None
) -> AttentionKernel | None:
    """The kernel of an operation by its backend, the cache format that it reads, or both.

    With a format, backend None or "sim" means the first kernel of the table that reads it; the
    simulator plays that one.
    """
    if format is not None and backend == "sim":
        backend = None
    for kernel in KERNELS:
        if (
            kernel.operation == operation
            and format in (None, kernel.format)
            and backend in (None, kernel.backend)
        ):
            return kernel
    return None


def backend_of_major(major: int) -> str | None:
    return next((kernel.backend for kernel in KERNELS if kernel.major == major), None)


def ready_backends() -> tuple[str, ...]:
    """Backends with at least one kernel, and "sim", which runs all of them."""
    found = tuple(dict.fromkeys(kernel.backend for kernel in KERNELS if kernel.ready))
    return (*found, "sim") if found else ()


def tiling_for(operation: str, format: str, head_dim: int) -> Tiling:
    """Tile sizes of a plan. They follow from the format alone, so that the reference replays the
    tiles of the kernel and workspace_size() needs no device."""
    kernel = find_kernel(operation, format=format)
    if kernel is not None and head_dim in kernel.tilings:
        return kernel.tilings[head_dim]
    return _REFERENCE[operation]


def feature_refusals(
    kernel: AttentionKernel, head_dim: int, page_size: int | None, num_kv_heads: int
) -> list[str]:
    """Why ``kernel`` does not serve a shape that its cache format allows."""
    asked = {"head_dim": (head_dim, tuple(kernel.tilings))}
    if page_size is not None:
        asked["page_size"] = (page_size, kernel.page_sizes)
    reasons = []
    for name, (value, allowed) in asked.items():
        if value not in allowed:
            why = kernel.refusals.get(f"{name} {value}")
            reasons.append(
                f"{name} {value}: {kernel.backend} {kernel.operation} allows "
                + ", ".join(str(a) for a in allowed)
                + (f" ({why})" if why else "")
            )
    if num_kv_heads > MAX_KV_HEADS:
        reasons.append(
            f"num_kv_heads {num_kv_heads}: {kernel.backend} {kernel.operation} allows 1..{MAX_KV_HEADS} "
            "(KV heads are a grid dimension of the launch)"
        )
    return reasons
