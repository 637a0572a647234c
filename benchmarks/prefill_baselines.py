# SPDX-License-Identifier: Apache-2.0
"""Causal prefill of other libraries: FlashInfer's backends by GPU, FlashAttention-4, torch SDPA.

FP8 here is e4m3 with one scale of 1 for Q, K and V. Each check compares with float64 attention over the
operands as the library gets them; the block-scaled NVFP4 kernel's with that over the original ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import prefill
from benchmarks.attention_baselines import DTYPES, LIMIT, WORKSPACE
from benchmarks.harness import Check, Job
from benchmarks.inputs import HEAD_DIM, KV_HEADS
from benchmarks.prefill import Case

# e4m3 products and an e4m3 P.
LIMIT_FP8 = 1e-1


def builders(major: int) -> dict[str, Callable[[Case], Job]]:
    """What FlashInfer may have for a GPU of this compute capability major."""
    found: dict[str, Callable[[Case], Job]] = {}

    def ragged(backend: str, kind: str) -> None:
        found[f"flashinfer {backend} {kind}"] = lambda case: ragged_job(case, backend, kind)

    ragged("fa2", "bf16")
    if major == 9:
        ragged("fa3", "bf16")
        ragged("fa3", "fp8")
    elif major == 10:
        for kind in ("bf16", "fp8"):
            ragged("cutlass", kind)
            found[f"flashinfer trtllm-gen {kind}"] = lambda case, kind=kind: trtllm_job(case, kind)
            found[f"flashinfer cute-dsl {kind}"] = lambda case, kind=kind: cute_dsl_job(case, kind)
        found["flashinfer cute-dsl nvfp4 qk, fp8 pv"] = blockscaled_job
    elif major == 12:
        ragged("cute-dsl-prims", "fp8")
    return found


def _operands(case: Case, kind: str) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(DTYPES[kind]) for x in (case.q, case.k, case.v))


def _job(
    case: Case, name: str, operands: tuple[torch.Tensor, ...], call: Callable, out: torch.Tensor
) -> Job:
    """A job whose ``call`` takes q, k, v and writes ``out`` [L, Hq, D]."""
    q, k, v = operands

    def check() -> Check:
        out.fill_(float("nan"))
        call(*operands)
        picked = q[case.rows(), -case.group :].float()
        truth = prefill.truth(case, picked, k[:, -1].float(), v[:, -1].float())
        return prefill.compare(case, out, truth, LIMIT if q.element_size() == 2 else LIMIT_FP8)

    return Job(case.name, name, call, operands, 0, check)


def ragged_job(case: Case, backend: str, kind: str) -> Job:
    import flashinfer

    operands = _operands(case, kind)
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=case.q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend=backend)
    wrapper.plan(
        case.indptr, case.indptr, case.heads, KV_HEADS, HEAD_DIM, causal=True,
        q_data_type=DTYPES[kind], kv_data_type=DTYPES[kind], o_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.empty_like(case.q)
    scales = ()
    if backend == "fa3" and kind == "fp8":
        ones = torch.ones(case.heads, dtype=torch.float32, device=case.q.device)
        scales = (ones, ones[:KV_HEADS].clone(), ones[:KV_HEADS].clone())

    def call(q, k, v):
        wrapper.run(q, k, v, *scales, out=out)

    return _job(case, f"flashinfer {backend} {kind}", operands, call, out)


def trtllm_job(case: Case, kind: str) -> Job:
    """trtllm-gen reads pages; these are in order, 64 tokens each."""
    import flashinfer

    size = 64
    q, k, v = _operands(case, kind)
    device = q.device
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend="trtllm-gen")
    pages = case.length // size
    table = (
        torch.tensor([0, pages], dtype=torch.int32, device=device),
        torch.arange(pages, dtype=torch.int32, device=device),
        torch.full((1,), size, dtype=torch.int32, device=device),
    )
    wrapper.plan(
        case.indptr, *table, case.heads, KV_HEADS, HEAD_DIM, size, causal=True,
        q_data_type=DTYPES[kind], kv_data_type=DTYPES[kind], o_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.empty_like(case.q)

    def paged(x: torch.Tensor) -> torch.Tensor:
        return x.view(pages, size, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()

    def call(q, k, v):
        wrapper.run(q, (k, v), out=out)

    stored = (q, paged(k), paged(v))
    job = _job(case, f"flashinfer trtllm-gen {kind}", (q, k, v), lambda *_: call(*stored), out)
    job.call, job.args = call, stored
    return job


def cute_dsl_job(case: Case, kind: str) -> Job:
    from flashinfer.attention.cute_dsl.fmha import cute_dsl_fmha_ragged_prefill

    operands = _operands(case, kind)
    out = torch.empty_like(case.q)
    indptr = case.indptr

    def call(q, k, v):
        cute_dsl_fmha_ragged_prefill(
            q, k, v, out, indptr, indptr, is_causal=True, max_qo_len=case.length,
            max_kv_len=case.length,
        )  # fmt: skip

    return _job(case, f"flashinfer cute-dsl {kind}", operands, call, out)


def blockscaled_job(case: Case) -> Job:
    """The closest relative of the qk4pv8 kernel: NVFP4 Q and K, FP8 V, no compensation, no pages."""
    from flashinfer.attention.cute_dsl.fmha_blockscaled import cute_dsl_fmha_blockscaled_prefill
    from flashinfer.cute_dsl.attention.fmha.quantize import quantize_blockscaled_qk

    q, k, q_sf, k_sf, q_scale, k_scale = quantize_blockscaled_qk(
        case.q[None], case.k[None], "nvfp4"
    )
    v = case.v[None].to(DTYPES["fp8"])
    out = torch.empty_like(case.q)

    def call(q, k, q_sf, k_sf, v):
        cute_dsl_fmha_blockscaled_prefill(
            q, k, q_sf, k_sf, v, out[None], qk_mode="nvfp4", is_causal=True,
            scale_q=q_scale, scale_k=k_scale,
        )  # fmt: skip

    operands = (q, k, q_sf, k_sf, v)

    def check() -> Check:
        out.fill_(float("nan"))
        call(*operands)
        return prefill.compare(
            case, out, prefill.original(case), prefill.LIMIT_LOW_BIT, "float64 of Q, K and V"
        )

    return Job(case.name, "flashinfer cute-dsl nvfp4 qk, fp8 pv", call, operands, 0, check)


def sdpa_job(case: Case) -> Job:
    from torch.nn.functional import scaled_dot_product_attention

    out = torch.empty_like(case.q)

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None]

    def attend(q, k, v):
        return scaled_dot_product_attention(
            heads_first(q), heads_first(k), heads_first(v), is_causal=True, enable_gqa=True
        )

    def call(q, k, v):
        out.copy_(attend(q, k, v)[0].transpose(0, 1))

    job = _job(case, "torch sdpa bf16", (case.q, case.k, case.v), call, out)
    # why: the copy above is the check's, not the library's.
    job.call = attend
    return job


def fa4_job(case: Case) -> Job:
    from flash_attn.cute import flash_attn_func

    out = torch.empty_like(case.q)

    def attend(q, k, v):
        found = flash_attn_func(q[None], k[None], v[None], causal=True)
        return found[0] if isinstance(found, tuple) else found

    def call(q, k, v):
        out.copy_(attend(q, k, v)[0])

    job = _job(case, "fa4 bf16", (case.q, case.k, case.v), call, out)
    job.call = attend
    return job
