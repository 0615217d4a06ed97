"""The examples in the documents and in docstrings run."""

import doctest
import importlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from rotation import today

import dtorchjax as dt

ROOT = Path(__file__).parent.parent
MODULES = [
    "placements",
    "notation",
    "errors",
    "registry",
    "dtensor",
    "operators",
    "numpy",
    "nn",
    "place",
    "checkpoint",
    "visualize",
    "op",
    "switches",
    "decompose",
    "api",
    "signatures",
    "parallel.linear",
    "parallel.cross_entropy",
    "parallel.attention",
    "parallel.experts",
]


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md"))),
]


@pytest.mark.smoke  # there all of them run
@pytest.mark.parametrize("name", [*PAGES[:2], *today(PAGES[2:], 3)])
def test_document(name):
    result = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert not result.failed
    assert result.attempted or "```python" not in (ROOT / name).read_text()


def test_short_programs_are_short():
    text = (ROOT / "docs/three_programs.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    lines = [len(re.findall(r"^(?:>>>|\.\.\.) .", program, re.MULTILINE)) for program in programs]
    assert len(lines) == 3 and max(lines) < 25, lines


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(f"dtorchjax.{name}")
    names = dict(jax=jax, jnp=jnp, np=np, **{n: getattr(dt, n) for n in dt.__all__})
    result = doctest.testmod(module, extraglobs={**names, "jit": dt.jit})
    assert result.attempted and not result.failed
