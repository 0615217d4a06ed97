"""The examples in the documents and in docstrings run."""

import doctest
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

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


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_document(name):
    result = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(f"dtorchjax.{name}")
    names = dict(jax=jax, jnp=jnp, np=np, **{n: getattr(dt, n) for n in dt.__all__})
    result = doctest.testmod(module, extraglobs={**names, "jit": dt.jit})
    assert result.attempted and not result.failed
