# SPDX-License-Identifier: Apache-2.0
"""The README's and the guide's programs run and print what they say; names and commands in every
page exist."""

from __future__ import annotations

import ast
import re
import warnings

import pytest
import torch
from doc_pages import ROOT, anchors, blocks, pages, python_blocks, run_page

import mpfa
import mpfa.__main__
import mpfa.sim
import mpfa.sim.__main__
from mpfa.reference import exact_attention

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide.md"
PAGES = [p for p in pages() if p.name != "SUPPORT.md"]
NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]


def test_readme_example_runs_and_is_right():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert len(python_blocks(README)) == 1
    torch.manual_seed(0)
    names = run_page(README)
    q, k, v = names["q"], names["k"], names["v"]
    exact, _ = exact_attention(q[400:], k, v, causal=True)
    last = names["prefill"].run(q[400:], names["cache"])[-1]
    decoded = names["out"][0]
    assert torch.linalg.norm(last.double() - exact[-1]) < 0.2 * torch.linalg.norm(exact[-1])
    assert torch.linalg.norm(decoded.double() - exact[-1]) < 0.2 * torch.linalg.norm(exact[-1])


def test_guide_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves statistics
    found = python_blocks(GUIDE)
    assert len(found) >= 10 and sum(b.output is not None for b in found) >= 8
    names = run_page(GUIDE)
    assert (tmp_path / "stats.safetensors").exists()
    # The engine of the guide: what a step computes is attention over all its tokens.
    request, cache = names["Request"](), names["caches"][0]
    names["step"]([request], [150])
    q, k, v = names["activations"](0, 40)
    slots = names["grow"](request, 40)
    mpfa.append_paged_kv_cache(k, v, cache, slots)
    table = names["table"]([names["Request"](request.pages[2:], request.length - 128)])
    wrapper = names["prefill"]
    options = dict(causal=True, window_left=39, config=names["config"], **names["heads"])
    wrapper.plan(names["int32"]([0, 1]), *table, **options)
    out = wrapper.run(q[-1:], cache)
    exact, _ = exact_attention(q[-1:], k, v)
    assert torch.linalg.norm(out[0].double() - exact[0]) < 0.2 * torch.linalg.norm(exact[0])


def test_transformers_page_runs(tmp_path, monkeypatch):
    """With a small random model in place of the user's, and four new tokens."""
    transformers = pytest.importorskip("transformers")
    generate = transformers.GenerationMixin.generate
    monkeypatch.setattr(
        transformers.GenerationMixin,
        "generate",
        lambda self, **options: generate(self, **{**options, "max_new_tokens": 4}),
    )
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.randint(3, 97, (1, 24))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    page = ROOT / "docs" / "integrations" / "transformers.md"
    names = run_page(page, {"name": str(tmp_path), "inputs": inputs, "sample_ids": ids})
    assert names["model"].config._attn_implementation == "mpfa"
    assert names["tokens"].shape[0] == 1 and names["tokens"].shape[1] > 24
    # The page leaves its second cache, with static statistics, unused.
    assert len(names["stats"]) == 2 and names["cache"].config.compensation == "channels"
    names["model"].generate(**inputs, past_key_values=names["cache"])


def test_a_guide_that_lies_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```text\n2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="page.md:2"):
        run_page(page)
    page.write_text("```python\nx = 1\n```\nText.\n```python\n\nraise ValueError(x)\n```\n")
    with pytest.raises(ValueError) as caught:
        run_page(page)
    assert caught.tb.tb_lineno and caught.traceback[-1].lineno + 1 == 7


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_name_things_that_exist(page) -> None:
    """They parse, and every mpfa.a.b in them is there, keyword arguments included."""
    for block in python_blocks(page):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = ast.parse(block.code, filename=f"{page.name}:{block.line}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("mpfa."):
                resolve(ast.unparse(node))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpfa"):
                module = __import__(node.module, fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names), block.line


def resolve(path: str) -> object:
    found: object = mpfa
    for part in re.match(r"mpfa((?:\.\w+)*)", path).group(1).split(".")[1:]:
        if not hasattr(found, part):
            raise AssertionError(f"{path}: {found} has no {part}")
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_anchors_exist(page) -> None:
    """tests/lint_structure.py looks at the files that links name, this at the headings."""
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text("utf-8")):
        linked = page.parent / target if target else page
        assert anchor in anchors(linked), f"{target}#{anchor}"


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+):", text, re.M))


def commands(main) -> set[str]:
    (action,) = (a for a in main.parser()._actions if getattr(a, "choices", None))
    return set(action.choices)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join([b.code for b in blocks(page)] + re.findall(r"`([^`\n]+)`", text))
    for target in re.findall(r"^(?:\S+=\S+ )*make ((?:[a-z][\w-]*)?)\b", code, re.M):
        assert target in make_targets(), f"make {target}"
    for command in re.findall(r"python -m mpfa ([a-z]+)", code):
        assert command in commands(mpfa.__main__), f"python -m mpfa {command}"
    for command in re.findall(r"python -m mpfa\.sim ([a-z]+)", code):
        assert command in commands(mpfa.sim.__main__), f"python -m mpfa.sim {command}"
    for script in re.findall(r"python ((?:[\w.-]+/)+[\w.-]+\.py)", code):
        assert (ROOT / script).exists(), script
    for folder in re.findall(r"pytest (?:-m \S+ )?((?:tests/)[\w./-]+)", code):
        assert (ROOT / folder).exists(), folder


def test_environment_variables_of_the_guide_exist() -> None:
    sources = [p for folder in ("mpfa", "csrc") for p in (ROOT / folder).rglob("*.*")]
    code = "".join(
        p.read_text(encoding="utf-8") for p in sources if p.suffix in {".py", ".cpp", ".h", ".def"}
    )
    table = GUIDE.read_text(encoding="utf-8").split("| environment |")[1].split("\n\n")[0]
    names = re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", table)
    assert len(names) >= 7
    for name in names:
        option = name.removeprefix("PTXSIM_").lower()
        own = f'"{name}"' in code or (name.startswith("PTXSIM_") and f'"{option}"' in code)
        assert own or name.startswith("FLASHINFER_WORKSPACE") or name == "PATH", name


def test_no_page_is_left_out_of_the_index() -> None:
    """Everything under docs/ can be reached from docs/index.md."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        relative = page.relative_to(ROOT).as_posix()
        if relative.startswith("docs/") and page.name != "index.md":
            assert f"({relative.removeprefix('docs/')}" in index, relative
