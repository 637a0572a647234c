# SPDX-License-Identifier: Apache-2.0
"""workspace_size(), shared workspaces, and what use_cuda_graph fixes."""

from __future__ import annotations

import re

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_same_bits,
    config_for,
    make_batch,
    offsets,
    paged,
    static_stats,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import mpfa


def fresh(size: int) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


def setup(kind: str, format="qk4pv8", compensation="mean", channels=0, with_config=True):
    """(wrapper class, plan args, options, q, kv, stats)."""
    q_lens, kv_lens = (
        ([2, 2, 2], [300, 0, 1400]) if kind == "decode" else ([40, 3, 0], [300, 0, 1400])
    )
    batch = make_batch(q_lens, kv_lens, 6, 2, 64, seed=41, k_bias=1.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 64)
    options: dict[str, object] = dict(batch.heads)
    if with_config:
        options["config"] = config
    if kind == "ragged":
        args = (offsets(q_lens), offsets(kv_lens))
        return mpfa.BatchPrefillWrapper, args, options, batch.query, batch.kv, stats
    pages = paged(batch, config, stats=stats)
    options["page_size"] = 64
    if kind == "decode":
        options["q_len_per_request"] = 2
        return mpfa.BatchDecodeWrapper, pages.table, options, batch.query, pages.cache, None
    options["fixed_split_pages"] = 8
    return (
        mpfa.BatchPrefillWrapper,
        (offsets(q_lens), *pages.table),
        options,
        batch.query,
        pages.cache,
        None,
    )


KINDS = ["prefill", "ragged", "decode"]


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_workspace_size_works_and_one_byte_less_does_not(
    kind, format, compensation, channels
) -> None:
    cls, args, options, q, kv, stats = setup(kind, format, compensation, channels)
    size = mpfa.workspace_size(*args, num_sm=148, **options)
    assert isinstance(size, int) and size > 0
    # The byte behind the end must not be touched either.
    backing = fresh(size + 64)
    wrapper = cls(backing[:size])
    wrapper.plan(*args, **options)
    wrapper.run(q, kv, stats=stats)
    assert (backing[size:] == 255).all()
    if size == 1:
        return  # nothing is needed, and workspace_size() never says 0
    short = cls(fresh(size - 1))
    match = rf"workspace: needs {size} bytes for this plan, got {size - 1}"
    with pytest.raises(ValueError, match=match):
        short.plan(*args, **options)
    with pytest.raises(RuntimeError, match="call plan"):
        short.run(q, kv, stats=stats)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_in_the_message_is_the_size_that_works(kind: str) -> None:
    cls, args, options, q, kv, stats = setup(kind)
    with pytest.raises(ValueError, match="workspace: needs") as caught:
        cls(fresh(0)).plan(*args, **options)
    size = int(re.search(r"needs (\d+) bytes", str(caught.value)).group(1))
    wrapper = cls(fresh(size))
    wrapper.plan(*args, **options)
    wrapper.run(q, kv, stats=stats)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_without_a_config_the_size_serves_every_format(
    kind, format, compensation, channels
) -> None:
    cls, args, options, q, kv, stats = setup(
        kind, format, compensation, channels, with_config=False
    )
    wrapper = cls(fresh(mpfa.workspace_size(*args, num_sm=148, **options)))
    wrapper.plan(*args, **options)
    wrapper.run(q, kv)


def test_the_config_shrinks_the_workspace() -> None:
    sizes = {}
    for format, compensation, channels in FORMATS:
        _, args, options, *_ = setup("prefill", format, compensation, channels)
        sizes[format, compensation] = mpfa.workspace_size(*args, num_sm=148, **options)
    assert sizes["bf16", "none"] < sizes["qk4pv8", "none"] < sizes["qk4pv8", "mean"]
    assert sizes["qk4pv8", "none"] < sizes["mxfp8", "none"]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_by_name_or_by_position(kind: str) -> None:
    _, args, options, *_ = setup(kind)
    names = {
        "prefill": ("qo_indptr", "kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        "ragged": ("qo_indptr", "kv_indptr"),
        "decode": ("kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    }[kind]
    options.pop("q_len_per_request", None)
    want = mpfa.workspace_size(*args, num_sm=148, **options)
    for cut in range(len(args) + 1):
        by_name = dict(zip(names[cut:], args[cut:], strict=True))
        assert mpfa.workspace_size(*args[:cut], num_sm=148, **by_name, **options) == want
    if kind == "ragged":
        assert mpfa.workspace_size(*args, None, num_sm=148, **options) == want
        assert mpfa.workspace_size(*args, None, None, num_sm=148, **options) == want


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"num_sm": 0}, ValueError, "num_sm: must be >= 1, got 0"),
        ({"num_sm": 1.5}, TypeError, "num_sm: expected an int"),
        ({"use_cuda_graph": True}, ValueError, "max_batch_size"),
        (
            {"use_cuda_graph": True, "max_batch_size": 4},
            ValueError,
            "max_total_qo_len|max_num_pages",
        ),
        (
            {
                "use_cuda_graph": True,
                "max_batch_size": -1,
                "max_num_pages": 99,
                "max_total_qo_len": 99,
            },
            ValueError,
            "max_batch_size: must be >= 1, got -1",
        ),
        (
            {
                "use_cuda_graph": True,
                "max_batch_size": 4,
                "max_num_pages": 99.5,
                "max_total_qo_len": 99,
            },
            TypeError,
            "max_num_pages: expected an int",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments(kind, change, error, match) -> None:
    _, args, options, *_ = setup(kind)
    with pytest.raises(error, match=match):
        mpfa.workspace_size(*args, **{"num_sm": 148, **options, **change})


def test_unknown_option_is_refused() -> None:
    _, args, options, *_ = setup("prefill")
    with pytest.raises(TypeError, match="windw_left"):
        mpfa.workspace_size(*args, num_sm=148, windw_left=3, **options)


@pytest.mark.parametrize(
    "workspace,error,match",
    [
        (None, TypeError, "workspace: expected a torch.Tensor, got NoneType"),
        (1 << 20, TypeError, "workspace: expected a torch.Tensor"),
        (torch.zeros(64, 64).t()[::2], ValueError, "workspace: must be contiguous"),
        (
            torch.zeros(65, dtype=torch.uint8)[1:],
            ValueError,
            "workspace: its address must be a multiple",
        ),
    ],
)
def test_bad_workspace(workspace, error, match) -> None:
    for cls in (mpfa.BatchPrefillWrapper, mpfa.BatchDecodeWrapper):
        with pytest.raises(error, match=match):
            cls(workspace)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.int64]
)
def test_a_workspace_of_any_dtype_counts_bytes(dtype) -> None:
    cls, args, options, q, kv, stats = setup("decode")
    size = mpfa.workspace_size(*args, num_sm=148, **options)
    workspace = torch.zeros(-(-size // dtype.itemsize), dtype=dtype)
    wrapper = cls(workspace)
    wrapper.plan(*args, **options)
    want = wrapper.run(q, kv)
    other = cls(torch.zeros((4, size), dtype=torch.uint8))
    other.plan(*args, **options)
    assert_same_bits(other.run(q, kv), want)


def test_two_wrappers_share_one_workspace() -> None:
    """Prefill and decode, interleaved layer by layer over the same scratch bytes."""
    p_cls, p_args, p_options, p_q, p_kv, _ = setup("prefill")
    d_cls, d_args, d_options, d_q, d_kv, _ = setup("decode")
    p_size = mpfa.workspace_size(*p_args, num_sm=148, **p_options)
    d_size = mpfa.workspace_size(*d_args, num_sm=148, **d_options)
    results = {}
    for name, cls, args, options, q, kv, size in (
        ("p", p_cls, p_args, p_options, p_q, p_kv, p_size),
        ("d", d_cls, d_args, d_options, d_q, d_kv, d_size),
    ):
        alone = cls(fresh(size))
        alone.plan(*args, **options)
        results[name] = alone.run(q, kv, return_lse=True)
    shared = fresh(max(p_size, d_size))
    prefill, decode = p_cls(shared), d_cls(shared)
    prefill.plan(*p_args, **p_options)
    decode.plan(*d_args, **d_options)
    for _ in range(3):
        for wrapper, q, kv, name in ((prefill, p_q, p_kv, "p"), (decode, d_q, d_kv, "d")):
            out, lse = wrapper.run(q, kv, return_lse=True)
            assert_same_bits(out, results[name][0])
            assert_same_bits(lse, results[name][1])
            shared.fill_(255)


# ---- use_cuda_graph -------------------------------------------------------------------------

LIMITS = {"max_batch_size": 4, "max_total_qo_len": 64, "max_num_pages": 40}


@pytest.mark.parametrize("missing", sorted(LIMITS))
def test_graph_mode_needs_its_limits(missing: str) -> None:
    limits = {**LIMITS, missing: None}
    for cls in (mpfa.BatchPrefillWrapper, mpfa.BatchDecodeWrapper):
        if cls is mpfa.BatchDecodeWrapper and missing == "max_total_qo_len":
            cls(fresh(16), use_cuda_graph=True, **limits)  # defaults to max_batch_size
            continue
        with pytest.raises(ValueError, match=f"{missing}: required when use_cuda_graph=True"):
            cls(fresh(16), use_cuda_graph=True, **limits)


@pytest.mark.parametrize("name", sorted(LIMITS))
@pytest.mark.parametrize(
    "value,error", [(-1, ValueError), (0, ValueError), (2.5, TypeError), (True, TypeError)]
)
def test_bad_limits(name, value, error) -> None:
    for cls in (mpfa.BatchPrefillWrapper, mpfa.BatchDecodeWrapper):
        with pytest.raises(error, match=f"{name}: "):
            cls(fresh(16), use_cuda_graph=True, **{**LIMITS, name: value})


def graph_plan(
    kind: str, q_lens, kv_lens, limits, *, page_size=16, seed=0, wrapper=None, config=None
):
    """Plan (and run) one batch in graph mode; the result is compared with a plain wrapper's."""
    batch = make_batch(q_lens, kv_lens, 4, 2, 64, seed=seed)
    config = config or config_for(batch, "qk4pv8", page_size=page_size)
    pages = paged(batch, config, seed=seed)
    options = {**batch.heads, "page_size": page_size, "config": config}
    cls, args = mpfa.BatchDecodeWrapper, pages.table
    if kind == "prefill":
        cls, args = mpfa.BatchPrefillWrapper, (offsets(q_lens), *pages.table)
        options["fixed_split_pages"] = 128 // page_size
    if kind == "decode" and q_lens:
        options["q_len_per_request"] = q_lens[0]
    graph = {"use_cuda_graph": True, **limits}
    size = mpfa.workspace_size(*args, num_sm=148, **options, **graph)
    if wrapper is None:
        wrapper = cls(fresh(size), **graph)
    wrapper.plan(*args, **options)
    out, lse = wrapper.run(batch.query, pages.cache, return_lse=True)
    plain = cls(fresh(mpfa.workspace_size(*args, num_sm=148, **options)))
    plain.plan(*args, **options)
    want, want_lse = plain.run(batch.query, pages.cache, return_lse=True)
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)
    return wrapper, size


@pytest.mark.parametrize(
    "kind,q_lens,kv_lens,match",
    [
        ("prefill", [1] * 5, [1] * 5, r"max_batch_size.*5|5.*max_batch_size"),
        ("prefill", [40, 25], [64, 64], r"max_total_qo_len.*65|65.*max_total_qo_len"),
        ("prefill", [1, 1], [320, 325], r"max_num_pages.*41|41.*max_num_pages"),
        ("decode", [1] * 5, [1] * 5, r"max_batch_size.*5|5.*max_batch_size"),
        ("decode", [17] * 4, [40] * 4, r"max_total_qo_len.*68|q_len|68.*max_total_qo_len"),
        ("decode", [1, 1], [320, 325], r"max_num_pages.*41|41.*max_num_pages"),
    ],
)
def test_a_batch_beyond_the_limits_is_refused(kind, q_lens, kv_lens, match) -> None:
    with pytest.raises(ValueError, match=match):
        graph_plan(kind, q_lens, kv_lens, LIMITS)


@given(
    kind=st.sampled_from(["prefill", "decode"]),
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 16), st.integers(0, 200)), max_size=4),
        min_size=1,
        max_size=3,
    ),
    q_len=st.integers(1, 16),
)
@settings(max_examples=40)
def test_one_graph_workspace_serves_every_batch_within_the_limits(kind, batches, q_len) -> None:
    """Size and metadata address are fixed by the limits alone; results equal a plain wrapper's."""
    wrapper, size, address = None, None, None
    for seed, batch in enumerate(batches):
        kv_lens = [min(k, 160) for _, k in batch]
        q_lens = [q_len] * len(batch) if kind == "decode" else [q for q, _ in batch]
        wrapper, now = graph_plan(kind, q_lens, kv_lens, LIMITS, seed=seed, wrapper=wrapper)
        if size is not None:
            assert now == size and wrapper._metadata.data_ptr() == address
        size, address = now, wrapper._metadata.data_ptr()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_limits_can_be_met_exactly(kind: str) -> None:
    limits = {"max_batch_size": 4, "max_total_qo_len": 32, "max_num_pages": 40}
    wrapper, size = graph_plan(kind, [8] * 4, [160] * 4, limits)
    for q_lens, kv_lens in (
        ([8] * 4, [160] * 4),
        ([8], [640]),
        ([], []),
        ([1] * 4, [0, 0, 1, 600]),
    ):
        _, again = graph_plan(kind, q_lens, kv_lens, limits, wrapper=wrapper)
        assert again == size


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_graph_padding_rows_stay_finite(kind: str) -> None:
    """Padding requests of a captured batch have no keys: zeros and -inf, never NaN."""
    batch = make_batch([2] * 4, [50, 0, 0, 0], 4, 2, 64)
    config = config_for(batch, "qk4pv8", page_size=16)
    pages = paged(batch, config)
    options = {**batch.heads, "page_size": 16, "config": config}
    cls, args = mpfa.BatchDecodeWrapper, pages.table
    if kind == "prefill":
        cls, args = mpfa.BatchPrefillWrapper, (offsets([2] * 4), *pages.table)
    else:
        options["q_len_per_request"] = 2
    graph = {"use_cuda_graph": True, **LIMITS}
    wrapper = cls(fresh(mpfa.workspace_size(*args, num_sm=148, **options, **graph)), **graph)
    wrapper.plan(*args, **options)
    out, lse = wrapper.run(batch.query, pages.cache, return_lse=True)
    assert (out[2:] == 0).all() and (lse[2:] == -torch.inf).all() and (lse[:2] > -100).all()


def test_graph_mode_with_per_request_stats_and_ragged_kv() -> None:
    batch = make_batch([4, 6], [20, 30], 4, 2, 64, seed=3, k_bias=2.0)
    config = config_for(batch, "qk4pv8", "mean")
    args = (offsets([4, 6]), offsets([20, 30]))
    options = {**batch.heads, "config": config}
    graph = {
        "use_cuda_graph": True,
        "max_batch_size": 3,
        "max_total_qo_len": 16,
        "max_num_pages": 64,
    }
    size = mpfa.workspace_size(*args, num_sm=148, **options, **graph)
    wrapper = mpfa.BatchPrefillWrapper(fresh(size), **graph)
    wrapper.plan(*args, **options)
    out = wrapper.run(batch.query, batch.kv)
    plain = mpfa.BatchPrefillWrapper(fresh(mpfa.workspace_size(*args, num_sm=148, **options)))
    plain.plan(*args, **options)
    assert_same_bits(out, plain.run(batch.query, batch.kv))
    with pytest.raises(ValueError, match="max_num_pages"):
        wrapper.plan(offsets([4, 6]), offsets([20, 45]), **options)


@pytest.mark.parametrize(
    "format,compensation", [("bf16", "none"), ("qk4pv8", "mean"), ("mxfp8", "none")]
)
def test_graph_tensors_may_hold_more_tokens_than_the_plan(format, compensation) -> None:
    """Captured tensors have the size of the largest plan; the rows of this plan come first."""
    batch = make_batch([4, 6], [20, 30], 4, 2, 64, seed=3)
    config = config_for(batch, format, compensation)
    args = (offsets([4, 6]), offsets([20, 30]))
    options = {**batch.heads, "config": config}
    graph = {
        "use_cuda_graph": True,
        "max_batch_size": 3,
        "max_total_qo_len": 16,
        "max_num_pages": 64,
    }
    plain = mpfa.BatchPrefillWrapper(fresh(mpfa.workspace_size(*args, num_sm=148, **options)))
    plain.plan(*args, **options)
    want, want_lse = plain.run(batch.query, batch.kv, return_lse=True)

    def padded(t: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([t, t.new_full((rows - t.shape[0], *t.shape[1:]), torch.nan)])

    size = mpfa.workspace_size(*args, num_sm=148, **options, **graph)
    wrapper = mpfa.BatchPrefillWrapper(fresh(size), **graph)
    wrapper.plan(*args, **options)
    q, kv = padded(batch.query, 16), tuple(padded(t, 64) for t in batch.kv)
    out = torch.full(q.shape, 3.0, dtype=torch.bfloat16)
    lse = torch.full(q.shape[:2], 3.0)
    wrapper.run(q, kv, out=out, lse=lse)
    assert_same_bits(out[:10], want)
    assert_same_bits(lse[:10], want_lse)
    assert (out[10:] == 3.0).all() and (lse[10:] == 3.0).all()
    with pytest.raises(ValueError, match=r"q: shape must be \[16, 4, 64\], got \[17, 4, 64\]"):
        wrapper.run(padded(batch.query, 17), kv)
    with pytest.raises(ValueError, match=r"q: shape must be \[10, 4, 64\], got \[16, 4, 64\]"):
        plain.run(q, batch.kv)
    with pytest.raises(ValueError, match=r"k: shape must be \[64, 2, 64\], got \[65, 2, 64\]"):
        wrapper.run(q, tuple(padded(t, 65) for t in batch.kv))


def test_plan_summary_and_work_list() -> None:
    cls, args, options, *_ = setup("prefill")
    wrapper = cls(fresh(mpfa.workspace_size(*args, num_sm=148, **options)))
    wrapper.plan(*args, **options)
    items = wrapper.work_list
    assert items.dtype == torch.int32 and items.dim() == 2 and items.shape[1] == 8
    assert items.device.type == "cpu"
    text = wrapper.plan_summary()
    assert "prefill" in text and "3 requests" in text and "scratch" in text
    assert wrapper.backend == "reference" and wrapper.device.type == "cpu"
