# SPDX-License-Identifier: Apache-2.0
"""docs/api.md: signatures and docstrings of the public names, in Markdown."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

_WRITING = "append_paged_kv_cache quantize_query quantize_kv QuantizedQuery QuantizedKV"
_ATTENTION = "BatchPrefillWrapper BatchDecodeWrapper single_prefill merge_states"
# Headings in reading order: module, and its names ("": functions and classes of __all__).
SECTIONS = {
    "Formats and the cache": ("mpfa", "KVCacheConfig PagedKVCache"),
    "Statistics": ("mpfa", "SmoothingStats calibrate save_stats load_stats"),
    "Writing": ("mpfa", _WRITING),
    "Attention": ("mpfa", _ATTENTION),
    "Planning and support": ("mpfa", "workspace_size supports GPUArchitectureError"),
    "Hugging Face transformers": ("mpfa.integrations.transformers", ""),
    "The simulator": ("mpfa.sim", ""),
    "Truth to compare with": ("mpfa.reference", "exact_attention"),
}
HEADER = """\
# API reference

Written by `python docs/generate.py` from the docstrings; a test compares. Letters in shapes:
B requests, T or nnz tokens of all requests together, Hq and Hkv query and KV heads, G = Hq / Hkv,
D head_dim, P pages, ps page size, c outlier channels. "Paper" is the MpFA paper, "RFC" the MXFP8 RFC
for SM120. The [guide](guide.md) shows the calls in order, [errors.md](errors.md) the rules of
exceptions, [formats.md](formats.md) the bytes behind each tensor.
"""
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields)(?: \((.*)\))?:$")
ITEM = re.compile(r"^([\w.]+(?:, [\w.]+)*): ")
WIDTH = 100


def render() -> str:
    toc, body, anchors = [], [], []
    for title, (module_name, names) in SECTIONS.items():
        module = importlib.import_module(module_name)
        body.append(f"## {title}\n\n`from {module_name} import ...`\n")
        listed = []
        for name in names.split() or [n for n in module.__all__ if callable(getattr(module, n))]:
            body.extend(_entry(module_name, name, getattr(module, name)))
            anchor = f"{module_name}.{name}".lower().replace(".", "")
            # GitHub numbers the second of two headings that differ in case only.
            anchors.append(anchor)
            number = anchors.count(anchor) - 1
            listed.append(f"[{name}](#{anchor}{f'-{number}' if number else ''})")
        toc.append(f"- {title}: {', '.join(listed)}")
    return "\n".join([HEADER, *toc, "", *body]).rstrip() + "\n"


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Public properties and methods, those of base classes first.

    Of a class that implements another library's interface, its properties only.
    """
    seen: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("mpfa"):
            seen.update(vars(base))
    foreign = not all(b.__module__.startswith(("mpfa", "builtins")) for b in cls.__mro__)
    for name, value in seen.items():
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        listed = isinstance(value, property) or (inspect.isfunction(function) and not foreign)
        if not name.startswith("_") and listed:
            yield name, function


def _entry(module: str, name: str, found: object) -> Iterator[str]:
    source = inspect.getmodule(found).__name__.replace(".", "/")
    suffix = "/__init__" if hasattr(inspect.getmodule(found), "__path__") else ""
    yield f"### {module}.{name}\n\nDefined in `{source}{suffix}.py`.\n"
    if not (inspect.isclass(found) and issubclass(found, Exception)):
        yield _signature(name, found)
    yield markdown(inspect.getdoc(found))
    if not inspect.isclass(found):
        return
    for member, value in members(found):
        text = inspect.getdoc(value)
        if not text:
            continue
        if isinstance(value, property):
            kind = value.fget.__annotations__.get("return", "")
            yield f"#### {name}.{member}\n\nProperty, `{kind}`.\n"
        else:
            yield f"#### {name}.{member}\n"
            yield _signature(f"{name}.{member}", value)
        yield markdown(text)


def _signature(name: str, found: object) -> str:
    signature = inspect.signature(found)
    parts, keyword_only = [], False
    for p in signature.parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any("*" in part for part in parts):
                parts.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        text = f"{stars}{p.name}: {p.annotation}"
        default = f'"{p.default}"' if isinstance(p.default, str) else repr(p.default)
        parts.append(text if p.default is p.empty else f"{text} = {default}")
    result = "" if inspect.isclass(found) else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return f"```text\n{line}\n```\n"


def markdown(text: str) -> str:
    """A Google-style docstring as Markdown: its sections become lists."""
    text = re.sub(r":(?:func|meth|class):(`[^`]+`)", r"\1", text)
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n".join(_paragraph(part.splitlines()) for part in paragraphs)


def _paragraph(lines: list[str]) -> str:
    heading = SECTION.match(lines[0])
    if heading is None:
        return _escape(" ".join(line.strip() for line in lines)) + "\n"
    title, note = heading.groups()
    intro = f"**{title}**" + (f" ({_escape(note)})" if note else "")
    items = _items(lines[1:])
    if not items:
        return f"{intro}: " + _escape(" ".join(line.strip() for line in lines[1:])) + "\n"
    rows = [f"- {', '.join(f'`{n}`' for n in names)}: {_escape(text)}" for names, text in items]
    return f"{intro}\n\n" + "\n".join(rows) + "\n"


def _items(lines: list[str]) -> list[tuple[list[str], str]]:
    """(names, text) of each entry of a section; [] when it is free text."""
    entries: list[str] = []
    for line in lines:
        # A list of names may fill more than one line before its colon.
        if line.startswith("     ") or (entries and not ITEM.match(entries[-1])):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    matches = [ITEM.match(entry) for entry in entries]
    if not all(matches):
        return []
    return [
        (m.group(1).split(", "), entry[m.end() :])
        for m, entry in zip(matches, entries, strict=True)
    ]


def _escape(text: str) -> str:
    """Markdown's own characters, outside of code."""
    parts = re.split(r"(``?[^`]+``?)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<>|])", r"\\\1", part) for part in parts
    )
