# SPDX-License-Identifier: Apache-2.0
"""workspace_size(): the planner in count-only mode."""

from __future__ import annotations

import torch

from mpfa.errors import check_int
from mpfa.planner import scratch_bytes
from mpfa.planning import decode_request, prefill_request

_DECODE_ARGUMENTS = ("kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def workspace_size(*plan_args: torch.Tensor | None, num_sm: int, **plan_options: object) -> int:
    """Bytes of workspace that plan() with the same arguments needs, on every backend.

    Args:
        plan_args, plan_options: the arguments of BatchPrefillWrapper.plan() (2 or 4 index tensors,
            starting with qo_indptr) or of BatchDecodeWrapper.plan() (3 index tensors), and the
            constructor's use_cuda_graph, max_batch_size, max_total_qo_len, max_num_pages. With
            use_cuda_graph the result holds for every batch within the limits.
        num_sm: streaming multiprocessors of the device (148 on a B200).

    Returns:
        Size in bytes, at least 1.

    Raises:
        ValueError: as plan().
    """
    check_int("num_sm", num_sm, 1)
    is_prefill = _starts_with_qo_indptr(plan_args, plan_options)
    build = prefill_request if is_prefill else decode_request
    # Without a config the plan may be cut for the kernel of either low-bit format.
    formats = ("qk4pv8", "mxfp8") if plan_options.get("config") is None else (None,)
    sizes = []
    for tile_format in formats:
        _, request = build(*plan_args, num_sm=num_sm, tile_format=tile_format, **plan_options)
        sizes.append(scratch_bytes(request))
    return max(1, *sizes)


def _starts_with_qo_indptr(args: tuple[object, ...], options: dict[str, object]) -> bool:
    """Whether these are the arguments of a prefill plan, by what is given by position and by name."""
    if "qo_indptr" in options:
        return True
    if "q_len_per_request" in options:
        return False
    for position, name in enumerate(_DECODE_ARGUMENTS):
        if options.get(name) is not None:
            return len(args) > position
    return len(args) != len(_DECODE_ARGUMENTS) or args[2] is None
