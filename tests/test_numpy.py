"""dt.numpy and dt.nn: every function equals one device's, whatever has to move."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from numpy_calls import LOOSE, arrays, call_of, called, functions, ours, placed
from rotation import today

import dtorchjax as dt

NAMES = [name for name in functions() if call_of(name) is not None]


@pytest.fixture(scope="module")
def mesh4():
    return dt.init_device_mesh((4,), ("tp",))


def compare(name, found, wanted):
    is_leaf = lambda x: isinstance(x, dt.DTensor)  # noqa: E731
    found, wanted = jax.tree.leaves(found, is_leaf=is_leaf), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        a = a.full_tensor() if isinstance(a, dt.DTensor) else a
        assert jnp.shape(a) == jnp.shape(b) and jnp.result_type(a) == jnp.result_type(b)
        a, b = np.asarray(a), np.asarray(b)
        if name in LOOSE:
            a, b = np.sort_complex(a), np.sort_complex(b)
        np.testing.assert_allclose(a, b, 2e-5, 2e-5)


@pytest.mark.parametrize("name", today(NAMES, 16))
def test_equals_one_device(name, mesh4):
    call = call_of(name)
    assert call, f"{name} is new: give tests/numpy_calls.py a call or a reason"
    wanted = called(functions()[name], call, arrays())
    with dt.redistribution("auto"):
        compare(name, called(ours(name), call, placed(arrays(), mesh4)), wanted)


def test_the_page_has_every_name():
    page = (Path(__file__).parent.parent / "docs/numpy.md").read_text()
    assert [name for name in functions() if f"| `{name}` |" not in page] == []
    assert set(dir(jnp)) - {n for n in dir(jnp) if n.startswith("_")} <= set(dir(dt.numpy))


@pytest.mark.smoke
def test_strict_moves_nothing_and_says_what_would(mesh4):
    x = dt.distribute_tensor(jnp.ones((8, 4)), mesh4, "S0")
    with pytest.raises(dt.PlacementMismatchError, match="`add` cannot combine S0 and S1"):
        dt.numpy.add(x, dt.distribute_tensor(jnp.ones((8, 4)), mesh4, "S1"))
    assert dt.numpy.sum(x).placements == (dt.Partial(),)
    assert dt.numpy.matmul(x.T, x).placements == (dt.Partial(),)
    assert dt.numpy.full_like(x, 2.0).placements == x.placements
    assert dt.numpy.zeros_like(x.sum(0)).placements == (dt.Replicate(),)


def test_without_dtensors_and_in_programs_it_is_jax_numpy(mesh4):
    assert isinstance(dt.numpy.exp(jnp.ones(3)), jax.Array)
    assert dt.numpy.float32 is jnp.float32 and dt.numpy.pi == jnp.pi
    x = dt.distribute_tensor(jnp.arange(8.0), mesh4, "S0")
    y = dt.jit(lambda x: dt.nn.softmax(dt.numpy.sin(x)))(x)
    np.testing.assert_allclose(y, jax.nn.softmax(jnp.sin(jnp.arange(8.0))), 1e-6)
    with pytest.raises(AttributeError, match="no_such_name"):
        dt.numpy.no_such_name  # noqa: B018


@pytest.mark.smoke
def test_gradients_lie_as_their_primals(mesh4):
    x = dt.distribute_tensor(jnp.arange(32.0).reshape(8, 4), mesh4, "S0")
    g = jax.grad(lambda x: dt.numpy.mean(dt.nn.gelu(x) ** 2))(x)
    wanted = jax.grad(lambda x: jnp.mean(jax.nn.gelu(x) ** 2))(jnp.arange(32.0).reshape(8, 4))
    assert g.layout == x.layout
    np.testing.assert_allclose(g, wanted, 1e-5)


def test_numbers_are_operands_and_not_programs(mesh4):
    from dtorchjax.operators import _operations

    x = dt.distribute_tensor(jnp.arange(8.0), mesh4, "S0")
    dt.numpy.multiply(x, 0.5)
    before = len(_operations)
    for rate in (0.25, 0.125, 3.0):
        np.testing.assert_array_equal(dt.numpy.multiply(x, rate), rate * jnp.arange(8.0))
    assert len(_operations) == before


def test_queries_look_at_nothing(mesh4):
    terms = dt.distribute_tensor(jnp.ones((8, 4)), mesh4, "S0").sum(0)  # a partial sum
    assert dt.numpy.shape(terms) == (4,) and dt.numpy.ndim(terms) == 1
    assert dt.numpy.result_type(terms, jnp.float16) == jnp.float32
    assert not dt.numpy.iscomplexobj(terms)


def test_ufuncs_keep_their_methods(mesh4):
    x = dt.distribute_tensor(jnp.arange(8.0), mesh4, "S0")
    assert dt.numpy.add.reduce(x).placements == (dt.Partial(),)
    outer = dt.numpy.multiply.outer(x, jnp.arange(8.0)).full_tensor()
    np.testing.assert_array_equal(outer, jnp.outer(jnp.arange(8.0), jnp.arange(8.0)))
