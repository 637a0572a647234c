# SPDX-License-Identifier: Apache-2.0
"""What both wrappers share: the workspace, plan(), run() and the backend behind them."""

from __future__ import annotations

import math

import torch

from mpfa.backends.kernels import find_kernel
from mpfa.errors import check_choice, check_is_tensor
from mpfa.merge import LSE_BASES
from mpfa.operands import RunChecks
from mpfa.planner import Plan, PlanRequest, make_plan
from mpfa.planning import DEFAULT_FORMAT, AttentionSpec, check_graph_limits
from mpfa.quantized import QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.support import require_plan, require_run, resolve_backend

# why: plans for CPU tensors need some machine size; results do not depend on it. 148 = B200.
REFERENCE_NUM_SM = 148
# why few: every thread block of a simulated launch costs time, and a worker that walks several
# items is the case worth testing.
SIM_NUM_SM = 4


class AttentionWrapper:
    """Base of BatchPrefillWrapper and BatchDecodeWrapper; not part of the public API.

    plan() metadata lives in a buffer of the wrapper's own and the workspace holds only what one run()
    needs, so wrappers may share a workspace as long as their runs do not overlap in time.
    """

    _operation = ""

    def __init__(
        self,
        workspace: torch.Tensor,
        *,
        backend: str = "auto",
        use_cuda_graph: bool = False,
        max_batch_size: int | None = None,
        max_total_qo_len: int | None = None,
        max_num_pages: int | None = None,
    ) -> None:
        workspace = check_is_tensor("workspace", workspace)
        if not workspace.is_contiguous():
            raise ValueError(
                f"workspace: must be contiguous, got strides {tuple(workspace.stride())}"
            )
        if workspace.numel() and workspace.data_ptr() % 16 != 0:
            raise ValueError("workspace: its address must be a multiple of 16 bytes")
        limits = {
            "max_batch_size": max_batch_size,
            "max_total_qo_len": max_total_qo_len,
            "max_num_pages": max_num_pages,
        }
        check_graph_limits(use_cuda_graph, limits)
        self._workspace = workspace.reshape(-1).view(torch.uint8)
        self._backend = resolve_backend(backend, workspace.device, self._operation)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._limits = limits
        self._num_sm = num_sm_for(self._backend, workspace.device)
        kernel = find_kernel(self._operation, backend=self._backend)
        self._tile_format = None if kernel is None else kernel.format
        self._plan: Plan | None = None
        self._checks: RunChecks | None = None
        self._metadata: torch.Tensor | None = None
        self._launcher = None
        self._captured: _Captured | None = None

    @property
    def device(self) -> torch.device:
        """Device of the workspace; q, K/V, out and lse of run() have to be there."""
        return self._workspace.device

    @property
    def backend(self) -> str:
        """The backend that run() uses."""
        return self._backend

    @property
    def work_list(self) -> torch.Tensor:
        """The plan's work items, int32 [n, 8] on the host, in worker order (docs/planner.md).

        Columns: request, q_begin, q_len, head_group, kv_begin, kv_end, partial_row, partial_stride.
        """
        return self._require_plan().items

    def plan_summary(self) -> str:
        """The current plan as text.

        Raises:
            RuntimeError: plan() has not been called.
        """
        return self._require_plan().summary()

    def _require_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                f"{type(self).__name__}: call plan() before run(), work_list or plan_summary()"
            )
        return self._plan

    def _plan_options(self) -> dict[str, object]:
        """What the wrapper itself adds to the arguments of plan()."""
        return {
            "num_sm": self._num_sm,
            "use_cuda_graph": self._use_cuda_graph,
            "tile_format": self._tile_format,
            **self._limits,
        }

    def _set_plan(self, spec: AttentionSpec, request: PlanRequest) -> None:
        require_plan(self._backend, self._operation, spec)
        plan = make_plan(request)
        workspace = self._room_for(plan.scratch_bytes)
        if self._captured is not None:
            self._captured.check(spec, plan)
        self._workspace = workspace
        # why: a graph holds the address of the metadata; its capacity does not change over replans.
        if self._metadata is None or self._metadata.numel() < plan.metadata_bytes:
            # why: a buffer made in inference mode could not be written by a plan() outside of it.
            with torch.inference_mode(False):
                self._metadata = torch.empty(
                    plan.metadata_bytes, dtype=torch.uint8, device=self._workspace.device
                )
        plan.upload(self._metadata)
        self._plan = plan
        name = "cache" if self._operation == "decode" else "kv"
        self._checks = RunChecks(plan, spec, self.device, name)
        self._launcher = None
        if self._tile_format is not None:
            # why now: loading a module, and its compilation, must not meet a stream capture.
            self._launcher = self._make_launcher(self._tile_format)

    def _room_for(self, nbytes: int) -> torch.Tensor:
        """The workspace of a plan that needs ``nbytes``; a subclass may bring a larger one."""
        if nbytes > self._workspace.numel():
            raise ValueError(
                f"workspace: needs {nbytes} bytes for this plan, got {self._workspace.numel()} "
                "(mpfa.workspace_size() tells before planning)"
            )
        return self._workspace

    def _make_launcher(self, format: str):
        from mpfa.backends import launch

        return launch.launcher(
            self._backend, format, self._checks.spec, self._plan, self._metadata, self._workspace
        )

    @torch.no_grad()
    def _run(
        self,
        q: torch.Tensor | QuantizedQuery,
        kv: object,
        stats: SmoothingStats | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan = self._require_plan()
        spec = self._checks.spec
        check_choice("lse_base", lse_base, LSE_BASES)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not self._use_cuda_graph:
            raise RuntimeError(
                f"{type(self).__name__}: run() is being captured into a CUDA graph; construct the "
                "wrapper with use_cuda_graph=True and its max_* limits"
            )
        inputs = self._checks.inputs(q, kv, stats, sinks, out, lse)
        if self._backend == "reference":
            from mpfa.backends import reference

            reference.run(spec, plan, self._metadata, self._workspace, inputs)
        else:
            planned = self._tile_format or DEFAULT_FORMAT
            require_run(self._backend, self._operation, spec, inputs.config, planned)
            if self._launcher is None:
                self._launcher = self._make_launcher(inputs.config.format)
            self._launcher.run(inputs)
        if capturing:
            self._captured = _Captured.of(spec, inputs, self._captured)
        if lse_base == "ln":
            inputs.lse.mul_(math.log(2.0))
        return (inputs.out, inputs.lse) if return_lse else inputs.out


def num_sm_for(backend: str, device: torch.device) -> int:
    """SMs that plans of a wrapper are made for."""
    if backend == "sim":
        return SIM_NUM_SM
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return REFERENCE_NUM_SM


class _Captured:
    """What captured launches hold for good: a later plan() has to fit it, or replay is wrong."""

    def __init__(self, spec: AttentionSpec, tokens: int, pages: int | None, kv_tokens: int | None):
        self.spec, self.tokens, self.pages, self.kv_tokens = spec, tokens, pages, kv_tokens

    @staticmethod
    def of(spec: AttentionSpec, inputs, before: _Captured | None) -> _Captured:
        def least(new: int | None, old: int | None) -> int | None:
            return new if old is None else old if new is None else min(new, old)

        pages = getattr(inputs.kv, "num_pages", None)
        kv_tokens = inputs.kv[0].shape[0] if isinstance(inputs.kv, tuple) else None
        if kv_tokens is None and pages is None:
            kv_tokens = inputs.kv.num_tokens
        captured = _Captured(spec, inputs.out.shape[0], pages, kv_tokens)
        if before is not None:
            captured.tokens = least(captured.tokens, before.tokens)
            captured.pages = least(captured.pages, before.pages)
            captured.kv_tokens = least(captured.kv_tokens, before.kv_tokens)
        return captured

    def check(self, spec: AttentionSpec, plan: Plan) -> None:
        """Raises ValueError when a replay after this plan would not do what the plan says."""
        for field in AttentionSpec.__dataclass_fields__:
            now, was = getattr(spec, field), getattr(self.spec, field)
            if now != was:
                raise ValueError(f"{field}: run() was captured with {was}, this plan says {now}")
        for name, needed, held in (
            ("qo_indptr: query tokens", plan.nnz_qo, self.tokens),
            ("paged_kv_indices: pages up to id", plan.max_page_id + 1, self.pages),
            ("kv_indptr: KV tokens", plan.nnz_kv, self.kv_tokens),
        ):
            if held is not None and needed > held:
                raise ValueError(
                    f"{name}: this plan needs {needed}, run() was captured with tensors of {held}; "
                    "capture with tensors as large as the largest plan"
                )
