# SPDX-License-Identifier: Apache-2.0
"""The public names, their docstrings, and the signatures that design section 3 fixes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import mpfa

REQUIRED = inspect.Parameter.empty

GRAPH = {
    "backend": "auto",
    "use_cuda_graph": False,
    "max_batch_size": None,
    "max_total_qo_len": None,
    "max_num_pages": None,
}
PLAN = {
    "num_qo_heads": REQUIRED,
    "num_kv_heads": REQUIRED,
    "head_dim": REQUIRED,
    "page_size": None,
    "sm_scale": None,
    "window_left": -1,
    "logits_soft_cap": 0.0,
    "config": None,
    "fixed_split_pages": None,
}
RUN = {
    "stats": None,
    "sinks": None,
    "out": None,
    "lse": None,
    "return_lse": False,
    "lse_base": "log2",
}
# name -> (positional parameters in order with defaults, keyword-only parameters with defaults)
SIGNATURES = {
    "BatchPrefillWrapper": ({"workspace": REQUIRED}, GRAPH),
    "BatchDecodeWrapper": ({"workspace": REQUIRED}, GRAPH),
    "BatchPrefillWrapper.plan": (
        {
            "qo_indptr": REQUIRED,
            "kv_indptr": REQUIRED,
            "paged_kv_indices": None,
            "paged_kv_last_page_len": None,
        },
        {**PLAN, "causal": False},
    ),
    "BatchDecodeWrapper.plan": (
        {"kv_indptr": REQUIRED, "paged_kv_indices": REQUIRED, "paged_kv_last_page_len": REQUIRED},
        {**PLAN, "q_len_per_request": 1},
    ),
    "BatchPrefillWrapper.run": ({"q": REQUIRED, "kv": REQUIRED}, RUN),
    "BatchDecodeWrapper.run": ({"q": REQUIRED, "cache": REQUIRED}, RUN),
    "single_prefill": (
        {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED},
        {
            "format": "qk4pv8",
            "compensation": "none",
            "channels": 0,
            "stats": None,
            "causal": False,
            "sm_scale": None,
            "window_left": -1,
            "logits_soft_cap": 0.0,
            "sinks": None,
            "return_lse": False,
            "lse_base": "log2",
            "backend": "auto",
        },
    ),
    "append_paged_kv_cache": (
        {"k": REQUIRED, "v": REQUIRED, "cache": REQUIRED, "slot_mapping": REQUIRED},
        {"stats": None, "batch_indices": None, "q": None},
    ),
    "merge_states": ({"v": REQUIRED, "lse": REQUIRED, "lse_base": "log2"}, {}),
    "PagedKVCache.allocate": (
        {"config": REQUIRED, "num_pages": REQUIRED, "device": ..., "stats": None},
        {},
    ),
    "SmoothingStats": ({"q_mean": ..., "k_mean": ..., "channel_index": ...}, {}),
    "SmoothingStats.from_tensors": ({"q": REQUIRED, "k": REQUIRED, "indptr": REQUIRED}, {}),
    "KVCacheConfig": (
        {
            "format": REQUIRED,
            "num_kv_heads": REQUIRED,
            "head_dim": REQUIRED,
            "page_size": REQUIRED,
            "num_qo_heads": REQUIRED,
            "compensation": "none",
            "channels": 0,
            "four_over_six": False,
        },
        {},
    ),
}
# Keyword-only additions to the design's list, all optional.
ADDED = {
    "BatchDecodeWrapper.plan": {"causal"},
    "single_prefill": {"four_over_six"},
    "SmoothingStats.from_tensors": {"kv_indptr", "channel_index"},
}


def lookup(path: str) -> object:
    found: object = mpfa
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    """Names, order, keyword-only and defaults; ... = any default."""
    positional, keyword = SIGNATURES[path]
    parameters = dict(inspect.signature(lookup(path)).parameters)
    parameters.pop("self", None)
    kinds = inspect.Parameter
    got_positional = [p for p in parameters.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    got_keyword = {n: p for n, p in parameters.items() if p.kind is kinds.KEYWORD_ONLY}
    assert len(got_positional) + len(got_keyword) == len(parameters)
    assert [p.name for p in got_positional] == list(positional)
    for p in got_positional:
        assert positional[p.name] is ... or p.default == positional[p.name], p
    assert set(got_keyword) - ADDED.get(path, set()) == set(keyword)
    for name, default in keyword.items():
        assert got_keyword[name].default == default, name
    for name in ADDED.get(path, set()):
        assert got_keyword[name].default is not REQUIRED


def test_workspace_size_takes_plan_arguments_and_num_sm_by_name() -> None:
    parameter = inspect.signature(mpfa.workspace_size).parameters["num_sm"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is REQUIRED


def test_supports_takes_a_backend_or_device_then_features_by_name() -> None:
    first, *rest = inspect.signature(mpfa.supports).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and first.default is REQUIRED
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is not REQUIRED for p in rest)


def test_every_public_name_is_exported_and_documented() -> None:
    names = set(mpfa.__all__)
    assert {
        "KVCacheConfig",
        "PagedKVCache",
        "SmoothingStats",
        "calibrate",
        "append_paged_kv_cache",
        "BatchPrefillWrapper",
        "BatchDecodeWrapper",
        "single_prefill",
        "merge_states",
        "workspace_size",
        "supports",
        "GPUArchitectureError",
    } <= names
    assert len(names) == len(mpfa.__all__)
    for name in names:
        text = inspect.getdoc(getattr(mpfa, name))
        assert text and len(text) > 40, name
    assert mpfa.__version__


def public_members() -> list[str]:
    members = []
    for name in mpfa.__all__:
        found = getattr(mpfa, name)
        if inspect.isclass(found) and not issubclass(found, Exception):
            fields = (
                {f.name for f in dataclasses.fields(found)}
                if dataclasses.is_dataclass(found)
                else set()
            )
            for member, value in vars(found).items():
                callable_member = inspect.isfunction(value) or isinstance(value, staticmethod)
                if callable_member and not member.startswith("_") and member not in fields:
                    members.append(f"{name}.{member}")
    return members


def test_public_methods_are_documented() -> None:
    members = public_members()
    assert {"BatchPrefillWrapper.plan", "BatchDecodeWrapper.run", "PagedKVCache.allocate"} <= set(
        members
    )
    missing = [m for m in members if not inspect.getdoc(lookup(m))]
    assert not missing


@pytest.mark.parametrize("path", [p for p in SIGNATURES if "Wrapper" not in p or "." in p])
def test_docstrings_name_every_parameter(path: str) -> None:
    owner = lookup(path)
    text = inspect.getdoc(owner)
    parameters = [p for p in inspect.signature(owner).parameters if p != "self"]
    missing = [p for p in parameters if p not in text]
    assert not missing, missing
    if not inspect.isclass(owner):
        assert "Raises" in text or "ValueError" in text or path == "SmoothingStats.from_tensors"


@pytest.mark.parametrize("cls", [mpfa.KVCacheConfig, mpfa.SmoothingStats, mpfa.PagedKVCache])
def test_dataclasses_are_frozen(cls) -> None:
    assert cls.__dataclass_params__.frozen


def test_everything_has_type_hints() -> None:
    for name in mpfa.__all__:
        found = getattr(mpfa, name)
        if inspect.isfunction(found):
            signature = inspect.signature(found)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for p in signature.parameters.values():
                assert p.annotation is not REQUIRED, (name, p.name)
