# SPDX-License-Identifier: Apache-2.0
"""The README's example is run as it is printed, and gives the right attention."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import mpfa
from mpfa.reference import exact_attention

README = Path(__file__).resolve().parent.parent / "README.md"


def test_example_runs_and_is_right():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    torch.manual_seed(0)
    names: dict = {"__name__": "readme"}
    exec(code, names)  # noqa: S102
    q, k, v = names["q"], names["k"], names["v"]
    exact, _ = exact_attention(q[400:], k, v, causal=True)
    last = names["prefill"].run(q[400:], names["cache"])[-1]
    decoded = names["out"][0]
    assert torch.linalg.norm(last.double() - exact[-1]) < 0.2 * torch.linalg.norm(exact[-1])
    assert torch.linalg.norm(decoded.double() - exact[-1]) < 0.2 * torch.linalg.norm(exact[-1])


def test_the_public_names_are_the_ones_that_are_documented():
    for name in mpfa.__all__:
        assert getattr(mpfa, name).__doc__, name
