# SPDX-License-Identifier: Apache-2.0
"""docs/api.md and docs/support.md are what the code says, and the API page leaves nothing out."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest
from doc_pages import ROOT, anchors, generator

import mpfa
import mpfa.sim

pytest.importorskip("transformers")
from mpfa.integrations import transformers as integration  # noqa: E402

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
# Parameters that come from another library, which says what they are.
FOREIGN = {
    "mpfa.integrations.transformers.attention_forward",
    "mpfa.integrations.transformers.MpfaLayer",
}


def own_members(cls: type) -> dict[str, object]:
    """Public members that mpfa defines; of a class with another library's interface none."""
    if not all(base.__module__.startswith(("mpfa", "builtins")) for base in cls.__mro__):
        return {}
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("mpfa")]
    found = {name: value for base in bases for name, value in vars(base).items()}
    return {n: v for n, v in found.items() if not n.startswith("_") and n not in fields}


# A dtype as the docstrings write it, or words that stand for one.
DTYPE = re.compile(r"\b(bf16|fp16|fp32|bfloat16|int32|int64|uint8|e4m3|ue8m0|bool)\b")
SHAPE = re.compile(r"\[[^\]]+\]")
REFERS = re.compile(r"\bas (in |BatchPrefillWrapper)")


@pytest.mark.parametrize("name", ["api.md", "support.md"])
def test_page_is_up_to_date(name: str) -> None:
    difference = generator().difference(name)
    assert not difference, f"run python docs/generate.py\n{difference}"


def public() -> dict[str, object]:
    """Every public name with its object: mpfa, mpfa.sim, and what integrations define."""
    found = {f"mpfa.{n}": getattr(mpfa, n) for n in mpfa.__all__}
    found |= {f"mpfa.sim.{n}": getattr(mpfa.sim, n) for n in mpfa.sim.__all__}
    for name in integration.__all__:
        if callable(getattr(integration, name)):
            found[f"{integration.__name__}.{name}"] = getattr(integration, name)
    return found


PUBLIC = public()


def entry(name: str) -> str:
    """The part of the page about one name."""
    parts = re.split(r"^### (\S+)$", API, flags=re.M)
    entries = dict(zip(parts[1::2], parts[2::2], strict=True))
    return entries[name].split("\n## ")[0]


def test_every_public_name_has_an_entry_and_no_other() -> None:
    headings = re.findall(r"^### (\S+)$", API, re.M)
    assert sorted(headings) == sorted([*PUBLIC, "mpfa.reference.exact_attention"])


def test_integrations_are_all_known() -> None:
    """A new module in mpfa/integrations needs its entries; transformers_* are parts of transformers."""
    modules = {p.stem for p in (ROOT / "mpfa" / "integrations").glob("*.py")} - {"__init__"}
    assert {m for m in modules if not m.startswith("transformers_")} == {"transformers"}


def test_links_of_the_contents_meet_headings() -> None:
    links = re.findall(r"\]\(#([^)]+)\)", API)
    assert len(links) == len(PUBLIC) + 1 and set(links) <= anchors(ROOT / "docs" / "api.md")


def callables() -> dict[str, object]:
    """Functions, constructors and public methods of the attention API, by the name on the page."""
    found = {}
    for name, value in PUBLIC.items():
        if name.startswith("mpfa.sim."):
            continue
        if inspect.isclass(value):
            if issubclass(value, Exception):
                continue
            if not dataclasses.is_dataclass(value) or "Attributes" not in value.__doc__:
                found[name] = value
            for member, function in own_members(value).items():
                function = getattr(function, "__func__", function)  # of a static method
                if inspect.isfunction(function):
                    found[f"{name}.{member}"] = function
        else:
            found[name] = value
    return found


CALLABLES = callables()
# BatchDecodeWrapper refers to BatchPrefillWrapper for its constructor.
REFERRING = "mpfa.BatchDecodeWrapper"
RAISES_NOTHING = {
    REFERRING,
    "mpfa.SmoothingStats.to",
    "mpfa.SmoothingStats.means_for",
}


def items(text: str, section: str) -> dict[str, str]:
    """Entries of one section of a docstring, by name."""
    api_page = importlib.import_module("api_page")
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    found: dict[str, str] = {}
    for part in paragraphs:
        lines = part.splitlines()
        heading = api_page.SECTION.match(lines[0])
        if heading and heading.group(1) == section:
            for names, entry_text in api_page._items(lines[1:]):
                found |= dict.fromkeys(names, entry_text)
    return found


@pytest.fixture(scope="module", autouse=True)
def _generator_on_path():
    import sys

    generator()
    assert "api_page" in sys.modules


@pytest.mark.parametrize("name", [n for n in CALLABLES if n not in FOREIGN])
def test_parameters_are_described(name: str) -> None:
    function = CALLABLES[name]
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n != "self"}
    if not parameters:
        return
    described = items(function.__doc__, "Args")
    if name == REFERRING:
        assert "Constructor arguments as BatchPrefillWrapper" in function.__doc__
        return
    assert set(described) == set(parameters), set(described) ^ set(parameters)
    for n, p in parameters.items():
        annotation = str(p.annotation)
        if "torch.Tensor" in annotation and "tuple" not in annotation:
            text = described[n]
            known = SHAPE.search(text) and DTYPE.search(text)
            assert known or REFERS.search(text) or n in ("workspace", "plan_args"), (n, text)


@pytest.mark.parametrize("name", [n for n in CALLABLES if n not in FOREIGN])
def test_results_and_errors_are_described(name: str) -> None:
    function = CALLABLES[name]
    sections = set(re.findall(r"^ *(Returns|Raises):$", function.__doc__, re.M))
    result = inspect.signature(function).return_annotation
    if not inspect.isclass(function) and result not in ("None", "str"):
        assert "Returns" in sections, f"{name} -> {result}"
    if name not in RAISES_NOTHING:
        assert "Raises" in sections, name


DATACLASSES = [v for v in PUBLIC.values() if dataclasses.is_dataclass(v)]


@pytest.mark.parametrize("cls", DATACLASSES, ids=lambda c: c.__name__)
def test_attributes_are_described(cls: type) -> None:
    described = items(cls.__doc__, "Attributes") or items(cls.__doc__, "Args")
    fields = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    missing = set(fields) - set(described) - {"config"}
    assert not missing
    for name, annotation in fields.items():
        if "Tensor" in annotation:
            text = described[name]
            assert SHAPE.search(text) and DTYPE.search(text), (name, text)


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isclass(v)])
def test_public_members_are_in_the_page(name: str) -> None:
    cls = PUBLIC[name]
    if name.startswith("mpfa.sim."):
        return
    text = entry(name)
    for member, value in own_members(cls).items():
        assert inspect.getdoc(value), f"{name}.{member} has no docstring"
        assert f"#### {cls.__name__}.{member}\n" in text, member


def test_sources_are_named() -> None:
    """The formulas say where they come from."""
    for name, source in (
        ("mpfa.SmoothingStats", "paper equation 7"),
        ("mpfa.PagedKVCache", "paper equation 9"),
        ("mpfa.quantize_query", "paper equations 1, 7, 8"),
        ("mpfa.append_paged_kv_cache", "paper section 6"),
        ("mpfa.BatchDecodeWrapper", "paper section 5.3"),
        ("mpfa.KVCacheConfig", "paper equations 7-11"),
    ):
        assert source in entry(name), name
