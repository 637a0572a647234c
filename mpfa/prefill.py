# SPDX-License-Identifier: Apache-2.0
"""BatchPrefillWrapper and single_prefill."""

from __future__ import annotations

import torch

from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.errors import HALF_DTYPES, check_tensor
from mpfa.planning import prefill_request
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.workspace import workspace_size
from mpfa.wrapper import REFERENCE_NUM_SM, AttentionWrapper


class BatchPrefillWrapper(AttentionWrapper):
    """Attention of a batch of query chunks over a paged cache or ragged K/V.

    plan() turns the index tensors into a work list; run() may then be called for every layer with
    the same lengths. The names and meanings follow FlashInfer's wrappers (docs/index.md lists the
    differences).

    Args:
        workspace: contiguous tensor on the device of q and K/V, at least workspace_size() bytes; its
            contents are scratch and need no initialisation. Wrappers whose runs do not overlap in time
            may share one.
        backend: "auto": the kernels of the GPU that holds the workspace, or "reference" for CPU
            tensors. "sm100" (compute capability 10.x, qk4pv8) and "sm120" (12.x, mxfp8) name the
            kernels; "sim" runs them on CPU tensors through the PTX simulator, slowly. supports()
            tells what each one serves in this version.
        use_cuda_graph: fix addresses and sizes by the max_* limits, so that run() can be captured and
            replayed after a new plan(). run() then takes tensors with more tokens than the plan,
            which stay untouched in out and lse (docs/planner.md).
        max_batch_size, max_total_qo_len, max_num_pages: limits of every plan() with use_cuda_graph;
            required then. max_num_pages bounds kv_indptr[-1].

    Raises:
        GPUArchitectureError: no backend, or not the named one, serves the device.
        ValueError: unknown backend or one without kernels in this version, missing limits, workspace
            not contiguous.
    """

    _operation = "prefill"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor | None = None,
        paged_kv_last_page_len: torch.Tensor | None = None,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = 0.0,
        config: KVCacheConfig | None = None,
        fixed_split_pages: int | None = None,
    ) -> None:
        """Plan a batch. Index tensors may be on any device; this may synchronise.

        Args:
            qo_indptr: int32 [B+1], query token offsets.
            kv_indptr: int32 [B+1], page offsets when paged_kv_indices is given, else token offsets.
            paged_kv_indices: int32 [>= kv_indptr[-1]], page ids; None = ragged K/V.
            paged_kv_last_page_len: int32 [B], tokens in each request's last page, 1..page_size (for a
                request without pages it is not used and may also be 0).
            num_qo_heads, num_kv_heads, head_dim, page_size: as in KVCacheConfig.
            causal: query i sees key j iff j <= i + kv_len - qo_len (bottom-right).
            sm_scale: multiplies Q K^T; default 1/sqrt(head_dim). sm_scale log2(e) must be a normal
                float32: 8.15e-39..2.36e38. On sm100 without a soft cap run() refuses more than its
                kernel takes (docs/kernels/sm100_prefill.md).
            window_left: keys to the left of the query's position that it still sees; -1 = all.
            logits_soft_cap: cap*tanh(logit/cap) after sm_scale; 0 = off. Otherwise 1.18e-38..1.7e38,
                and 2 log2(e) sm_scale / cap must be a float32 other than 0.
            config: format that run() will get; checked there. Without it the workspace has to be
                large enough for any format, raw (k, v) are quantised as qk4pv8 without
                compensation, and the plan fits one format only: on a GPU that of its kernels, with
                "sim" qk4pv8. An mxfp8 cache on "sim" therefore needs config.
            fixed_split_pages: split KV into partitions of this many pages from token 0 (a multiple of
                128 tokens; ragged plans count 128-token pages); default: no split. Fixed partitions
                make a request's result independent of the batch it is in.

        Raises:
            ValueError: an inconsistent argument, naming it, the request, the value and what is
                allowed; a workspace that is too small, with the size needed.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._set_plan(*prefill_request(**arguments, **self._plan_options()))

    def run(
        self,
        q: torch.Tensor | QuantizedQuery,
        kv: PagedKVCache | QuantizedKV | tuple[torch.Tensor, torch.Tensor],
        *,
        stats: SmoothingStats | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: bf16/fp16 [nnz_qo, Hq, D], any strides with a contiguous last dimension, or a
                QuantizedQuery made for the same config and stats.
            kv: PagedKVCache (paged plan); (k, v) bf16/fp16 [nnz_kv, Hkv, D] or QuantizedKV (ragged).
                Kernels load rows of k and v as 16 bytes, v_scale and a quantised q as 4 (sm100: q as
                16), scales as D/32 (sm100: 4, or 16 in pages of 128): addresses and strides must be
                multiples of that (docs/formats.md, "Alignment").
            stats: SmoothingStats of a compensated format (refused without compensation), unless
                bound to the cache. For (k, v) with "mean", None means per-request means of this call.
            sinks: fp32 [Hq], natural-log logits after sm_scale that join the softmax denominator.
            out: result buffer [nnz_qo, Hq, D], bf16/fp16 (or fp32, for tests); default q's dtype.
                Rows aligned to 2 elements (sm120) or 16 bytes (sm100).
            lse: buffer for the log-sum-exp, fp32 [nnz_qo, Hq].
            return_lse: also return the LSE, sinks included.
            lse_base: "log2" (default, as FlashInfer) or "ln".

        Returns:
            out, or (out, lse). A row without a visible key is 0 with LSE = its sink, else -inf.

        Raises:
            RuntimeError: plan() was not called, capture without use_cuda_graph, or (as SimulationError)
                a launch that the simulator ended.
            ValueError, TypeError: arguments that disagree with the plan.
        """
        return self._run(q, kv, stats, sinks, out, lse, return_lse, lse_base)


def single_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    format: str = "qk4pv8",
    compensation: str = "none",
    channels: int = 0,
    four_over_six: bool = False,
    stats: SmoothingStats | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: str = "log2",
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request, quantised on the fly; a wrapper for a quick start.

    Args:
        q: bf16/fp16 [Lq, Hq, D].
        k, v: bf16/fp16 [Lk, Hkv, D].
        format: "qk4pv8", "mxfp8" or "bf16".
        compensation, channels, four_over_six: as in KVCacheConfig.
        stats: SmoothingStats; with "mean" None means the means of this request (paper equation 7).
        causal, sm_scale, window_left, logits_soft_cap, sinks, return_lse, lse_base, backend: as in
            BatchPrefillWrapper.

    Returns:
        out [Lq, Hq, D] in q's dtype, or (out, lse fp32 [Lq, Hq]).

    Raises:
        ValueError, TypeError, GPUArchitectureError: as BatchPrefillWrapper.
    """
    check_tensor("q", q, shape=("Lq", "Hq", "D"), dtype=HALF_DTYPES)
    check_tensor("k", k, shape=("Lk", "Hkv", q.shape[2]), dtype=HALF_DTYPES, device=q.device)
    check_tensor("v", v, shape=tuple(k.shape), dtype=HALF_DTYPES, device=q.device)
    config = KVCacheConfig(
        format=format,
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        page_size=128,
        num_qo_heads=q.shape[1],
        compensation=compensation,
        channels=channels,
        four_over_six=four_over_six,
    )
    options = {
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "causal": causal,
        "sm_scale": sm_scale,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "config": config,
    }
    qo_indptr = torch.tensor([0, q.shape[0]], dtype=torch.int32, device="cpu")
    kv_indptr = torch.tensor([0, k.shape[0]], dtype=torch.int32, device="cpu")
    size = workspace_size(qo_indptr, kv_indptr, num_sm=REFERENCE_NUM_SM, **options)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWrapper(workspace, backend=backend)
    wrapper.plan(qo_indptr, kv_indptr, **options)
    return wrapper.run(
        q, (k, v), stats=stats, sinks=sinks, return_lse=return_lse, lse_base=lse_base
    )
