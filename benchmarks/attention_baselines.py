# SPDX-License-Identifier: Apache-2.0
"""What mpfa's decode stands beside: FlashInfer over BF16, FP8 and NVFP4 KV, FlashAttention-4, SDPA.

Each builder returns a Job whose check compares with float64 attention over the values that its own cache
holds, so the limits are those of the arithmetic alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from benchmarks import inputs
from benchmarks.harness import Check, Job
from benchmarks.inputs import HEAD_DIM, PageTable, Tensors
from mpfa.reference.nvfp4 import dequantize_nvfp4

# 16-bit products and a 16-bit P: 2^-9 each, and an output of 2^-9.
LIMIT = 1e-2
# FP8 products: q and P are rounded to e4m3 as well.
LIMIT_FP8_MATH = 8e-2
KV_KINDS = ("bf16", "fp8", "nvfp4")
# Bytes of K and V per token and KV head.
KV_BYTES = {
    "bf16": 4 * HEAD_DIM,
    "fp8": 2 * HEAD_DIM,
    "nvfp4": 2 * (HEAD_DIM // 2 + HEAD_DIM // 16),
}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
WORKSPACE = 256 << 20
FA4_SPLITS = (1, 2, 4, 8, 16, 32)


def flashinfer_name(
    kind: str, backend: str = "fa2", graph: bool = True, layout: str = "HND"
) -> str:
    """ "flashinfer fp8"; what differs from the default is appended."""
    extra = [x for x, default in ((backend, "fa2"), (layout, "HND")) if x != default]
    extra += [] if graph else ["eager plan"]
    return " ".join(["flashinfer", kind, *extra])


def _nvfp4_pages(x: torch.Tensor, table: PageTable) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 codes [P, H, ps, D/2] and linear e4m3 scales [P, H, ps, D/16] of x [B, L, H, D]."""
    shape = inputs.Shape(x.shape[0], x.shape[1], x.shape[2], x.shape[2])
    small = PageTable(16, table.indptr, torch.arange(x.shape[0] * x.shape[1] // 16,
                      device=x.device, dtype=torch.int32), table.last_page_len)  # fmt: skip
    # why: K of the qk4pv8 cache is NVFP4, and with small pages its scales are stored linearly.
    cache = inputs.fill_cache(x, x, inputs.config_of(shape, 16, "none"), small, None)

    def back(t: torch.Tensor) -> torch.Tensor:
        """[B*L/16, H, 16, n] -> [B, L, H, n]"""
        return t.transpose(1, 2).reshape(x.shape[0], x.shape[1], x.shape[2], -1)

    codes, scales = (inputs.paged(back(t), table) for t in (cache.k, cache.k_scale))
    return codes, scales.view(torch.float8_e4m3fn)


@dataclass
class _Stored:
    """K and V pages of one kind and layout, and the slice of them that a check looks at."""

    tensors: Tensors
    table: PageTable
    kind: str
    layout: str
    parts: tuple[torch.Tensor, ...]  # k, v and, for nvfp4, their scales

    @staticmethod
    def of(tensors: Tensors, table: PageTable, kind: str, layout: str) -> _Stored:
        if kind == "nvfp4":
            (k, k_scale), (v, v_scale) = (_nvfp4_pages(x, table) for x in (tensors.k, tensors.v))
            parts = (k, v, k_scale, v_scale)
        else:
            parts = tuple(
                inputs.paged(x, table).to(DTYPES[kind]) for x in (tensors.k, tensors.v)
            )  # fmt: skip
        if layout == "NHD":
            parts = tuple(t.transpose(1, 2).contiguous() for t in parts)
        return _Stored(tensors, table, kind, layout, parts)

    @property
    def moved(self) -> int:
        shape = self.tensors.shape
        return shape.batch * shape.context * shape.num_kv_heads * KV_BYTES[self.kind]

    def check(self, out: torch.Tensor, q: torch.Tensor, limit: float) -> Check:
        """out [B, Hq, D] of queries ``q`` against float64 attention over the stored values."""
        shape = self.tensors.shape
        request, head = shape.batch - 1, shape.num_kv_heads - 1
        pages = self.table.pages_of(request).long()

        def rows(x: torch.Tensor) -> torch.Tensor:
            picked = x[pages]
            return (picked[:, :, head] if self.layout == "NHD" else picked[:, head]).flatten(0, 1)

        if self.kind == "nvfp4":
            k, v = (
                dequantize_nvfp4(rows(x), rows(s).view(torch.uint8))
                for x, s in zip(self.parts[:2], self.parts[2:], strict=True)
            )
        else:
            k, v = (rows(x).float() for x in self.parts)
        heads = slice(head * shape.group, (head + 1) * shape.group)
        truth = inputs.attention64(q[request, heads].double() @ k.double().T, v)
        return inputs.check_slice(out, truth, self.tensors, request, head, limit)


def flashinfer_job(
    tensors: Tensors, table: PageTable, kind: str, case: str, *, backend: str = "fa2",
    graph: bool = True, layout: str = "HND",
) -> Job:  # fmt: skip
    """FlashInfer's paged decode on tensor cores.

    Args:
        kind: KV dtype, one of KV_KINDS.
        graph: plan as for serving with CUDA graphs (fixed launch grid), else for this batch alone.
        layout: HND or NHD pages.
    """
    import flashinfer

    shape, device = tensors.shape, tensors.q.device
    stored = _Stored.of(tensors, table, kind, layout)
    buffers = {}
    if graph:
        buffers = {
            "paged_kv_indptr_buffer": table.indptr.clone(),
            "paged_kv_indices_buffer": table.indices.clone(),
            "paged_kv_last_page_len_buffer": table.last_page_len.clone(),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), layout,
        use_cuda_graph=graph, use_tensor_cores=True, backend=backend, **buffers,
    )  # fmt: skip
    q = tensors.q.to(DTYPES["fp8"] if backend != "fa2" and kind == "fp8" else torch.bfloat16)
    wrapper.plan(
        table.indptr, table.indices, table.last_page_len, shape.num_qo_heads, shape.num_kv_heads,
        HEAD_DIM, table.page_size, q_data_type=q.dtype, kv_data_type=DTYPES[kind],
        o_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.full_like(tensors.q, float("nan"))

    def call(q, k, v, *scales):
        wrapper.run(q, (k, v), out=out, kv_cache_sf=scales or None)

    def check() -> Check:
        out.fill_(float("nan"))
        call(q, *stored.parts)
        return stored.check(out, q, LIMIT if q.dtype == torch.bfloat16 else LIMIT_FP8_MATH)

    name = flashinfer_name(kind, backend, graph, layout)
    return Job(case, name, call, (q, *stored.parts), stored.moved, check)


def xqa_job(tensors: Tensors, table: PageTable, kind: str, case: str) -> Job:
    """FlashInfer's XQA decode (trtllm_batch_decode_with_kv_cache on Hopper and RTX Blackwell)."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    shape, device = tensors.shape, tensors.q.device
    stored = _Stored.of(tensors, table, kind, "HND")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    block_tables = table.indices.view(shape.batch, -1)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.uint32, device=device)
    out = torch.full_like(tensors.q, float("nan"))

    def call(q, k, v, *scales):
        xqa_batch_decode_with_kv_cache(
            q, (k, v), workspace, block_tables, lengths, shape.context,
            bmm1_scale=HEAD_DIM**-0.5, bmm2_scale=1.0, out=out, kv_layout="HND",
            kv_cache_sf=scales or None,
        )  # fmt: skip

    def check() -> Check:
        out.fill_(float("nan"))
        call(tensors.q, *stored.parts)
        return stored.check(out, tensors.q, LIMIT if kind == "bf16" else LIMIT_FP8_MATH)

    return Job(case, xqa_name(kind), call, (tensors.q, *stored.parts), stored.moved, check)


def xqa_name(kind: str) -> str:
    return f"flashinfer xqa {kind}"


def _dense_check(tensors: Tensors, run) -> Check:
    """``run`` returns out [B, Hq, D] of attention over the unquantised K and V."""
    request, head = tensors.shape.batch - 1, tensors.shape.num_kv_heads - 1
    truth = inputs.exact_head(tensors, request, head)
    return inputs.check_slice(run(), truth, tensors, request, head, LIMIT)


def fa4_missing() -> str | None:
    """Why FlashAttention-4 cannot be called here, or None."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        from flash_attn.cute import flash_attn_func  # noqa: F401
    except Exception as error:  # its dependencies, by version
        return f"flash_attn.cute does not import: {type(error).__name__}: {error}"
    return None


def fa4_job(tensors: Tensors, splits: int, case: str) -> Job:
    """FlashAttention-4, BF16, contiguous K and V; one split is the unsplit kernel."""
    from flash_attn.cute import flash_attn_func

    q = tensors.q.unsqueeze(1)

    def call(q, k, v):
        out = flash_attn_func(q, k, v, causal=False, num_splits=splits)
        return out[0] if isinstance(out, tuple) else out

    def check() -> Check:
        return _dense_check(tensors, lambda: call(q, tensors.k, tensors.v).squeeze(1))

    shape = tensors.shape
    moved = shape.batch * shape.context * shape.num_kv_heads * KV_BYTES["bf16"]
    return Job(case, fa4_name(splits), call, (q, tensors.k, tensors.v), moved, check)


def fa4_name(splits: int) -> str:
    return "fa4 bf16 unsplit" if splits == 1 else f"fa4 bf16 num_splits={splits}"


def sdpa_job(tensors: Tensors, case: str) -> Job:
    """torch's scaled_dot_product_attention, BF16, K and V [B, Hkv, L, D]."""
    from torch.nn.functional import scaled_dot_product_attention

    q = tensors.q.unsqueeze(2)
    k, v = (x.transpose(1, 2).contiguous() for x in (tensors.k, tensors.v))

    def call(q, k, v):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def check() -> Check:
        return _dense_check(tensors, lambda: call(q, k, v).squeeze(2))

    shape = tensors.shape
    moved = shape.batch * shape.context * shape.num_kv_heads * KV_BYTES["bf16"]
    return Job(case, "torch sdpa bf16", call, (q, k, v), moved, check)
