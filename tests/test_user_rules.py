"""Rules that users declare, at any time, and what happens if they contradict."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

import dtorchjax as dt


def primitive(name, fun, shape=lambda x, **params: x.shape):
    new = Primitive(name)
    new.def_impl(lambda *xs, **params: fun(*xs, **params))
    new.def_abstract_eval(
        lambda x, *xs, **params: jax.core.ShapedArray(shape(x, **params), x.dtype)
    )
    mlir.register_lowering(new, mlir.lower_fun(fun, multiple_results=False))
    return new


X = np.arange(64, dtype="float32").reshape(8, 8)


def test_elementwise(mesh24):
    cube = primitive("test_cube", lambda x: x * x * x)
    step = dt.jit(lambda x: cube.bind(x), mesh=mesh24, in_placements=("S0,S1",))
    with pytest.raises(dt.PlacementError, match="no sharding rule for primitive `test_cube`"):
        step(X)
    dt.elementwise("test_cube")
    np.testing.assert_array_equal(step(X), X**3)
    assert not step.explain(X).collectives
    with pytest.raises(dt.PlacementError, match=r"has a rule already \(.*test_user_rules\.py:"):
        dt.elementwise("test_cube")


def test_a_rule_with_a_local_program(mesh24):
    """A dim that is needed whole, one that may be sharded, and a local program for its size."""
    ramp = primitive("test_ramp", lambda x, *, size: x + jnp.arange(size, dtype=x.dtype))

    @dt.rule("test_ramp", linear=None)
    def _(x, **_):
        return f"{x} -> {x}"

    @dt.local("test_ramp")
    def _(call, x):
        index, _ = call.shard(call.inputs[0], 1)
        size = x.shape[1]
        return call.bind(x, size=size) + jnp.asarray(index * size, x.dtype)

    step = dt.jit(lambda x: ramp.bind(x, size=8), mesh=mesh24, in_placements=("S1,S1",))
    np.testing.assert_array_equal(step(X), X + np.arange(8))
    assert str(dt.signature("exp", X)).splitlines()[0] == "R -> R"


def test_refusals(mesh24):
    odd = primitive("test_odd", lambda x: x)
    dt.refuse("test_odd", because="it is odd")
    with pytest.raises(dt.PlacementError, match="cannot be sharded: it is odd"):
        dt.jit(odd.bind, mesh=mesh24)(X)


def test_signature_of_a_product():
    a, b = jax.ShapeDtypeStruct((8, 512), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    sig = dt.signature("dot_general", a, b)
    rows = ["R, R -> R", "S0, R -> S0", "R, S1 -> S1", "S1, S0 -> P", "P, R -> P", "R, P -> P"]
    assert str(sig).splitlines() == rows
    dims = (((1,), (0,)), ((), ()))
    assert dt.signature("dot_general", a, b, dimension_numbers=dims) == sig
    placements = ["R", "S0", "S1", "P", "P(max)", "P(min)", "P(prod)"]
    matched = {
        f"{x}, {y} -> {out[0][0]}"
        for x in placements
        for y in placements
        if (out := sig.match([[x], [y]])) is not None
    }
    assert matched == set(rows)


@pytest.mark.parametrize(
    ("name", "shapes", "params", "rows"),
    [
        ("reduce_sum", [(4, 6)], dict(axes=(1,)), ["R -> R", "S0 -> S0", "S1 -> P", "P -> P"]),
        ("add", [(4, 6), (4, 6)], {}, ["R, R -> R", "S0, S0 -> S0", "S1, S1 -> S1", "P, P -> P"]),
        (
            "cumsum",
            [(4, 6)],
            dict(axis=1),
            ["R -> R", "S0 -> S0", "S1 -> S1 by all-gather", "P -> P"],
        ),
    ],
)
def test_signatures(name, shapes, params, rows):
    avals = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    assert str(dt.signature(name, *avals, **params)).splitlines() == rows


def test_signature_errors():
    x = jax.ShapeDtypeStruct((4, 6), "float32")
    with pytest.raises(dt.PlacementError, match="no sharding rule"):
        dt.signature("no_such_primitive", x)
    with pytest.raises(dt.PlacementError, match="cannot make a `reduce_sum`"):
        dt.signature("reduce_sum", x, wrong=3)
