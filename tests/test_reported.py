"""Faults that were found once, as the smallest program that showed them."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from test_programs import normal, same

import dtorchjax as dt


def test_a_slice_of_a_slice_clamps(mesh8):
    f = lambda x, o: jax.lax.dynamic_slice_in_dim(x, o, 8, 0)  # noqa: E731
    step = dt.jit(f, mesh=mesh8, in_placements="R", out_placements="S0")
    for start in (-3, 0, 5, 14, 100):
        same(step(np.arange(16.0), np.int32(start)), f(np.arange(16.0), start))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_wins_in_extremes(mesh24, dtype):
    x = np.array(normal(0, 16, 8))
    for value in (np.nan, np.inf, -np.inf, -0.0):
        x[5, 5] = value
        y = jnp.asarray(x, dtype)
        for f in (jnp.max, jnp.min, lambda a: jnp.max(a, 0), lambda a: jnp.min(a, 1)):
            got = dt.jit(f, mesh=mesh24, in_placements="S0,S1")(y)
            np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(f(y), "float32"))


def test_integer_sums_wrap_before_they_are_cast(mesh8):
    x = np.array([2**30, -(2**30) + 1, 0, 0, 0, 0, 0, 0], np.int32)
    f = lambda x: x.sum(0).astype(jnp.float32)  # noqa: E731
    assert float(dt.jit(f, mesh=mesh8, in_placements="S0")(x)) == 1.0
    v = np.full((8, 4), 2**29, np.int32)
    g = lambda v: jnp.sum(v).astype(jnp.float32) / v.size  # noqa: E731
    assert float(dt.jit(g, mesh=mesh8, in_placements="S0")(v)) == float(g(v))


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_terms_are_not_rounded_before_they_are_added(mesh8, target):
    x = np.array([1e5, -1e5, 1.0, 0, 0, 0, 0, 0], np.float32)
    f = lambda x: x.sum(0).astype(target)  # noqa: E731
    assert float(dt.jit(f, mesh=mesh8, in_placements="S0")(x)) == 1.0


def test_static_values_that_are_equal_but_of_other_types(mesh8):
    step = dt.jit(lambda x, n: x * n, mesh=mesh8, static_argnums=1)
    x = jnp.arange(8)
    assert step(x, 1).dtype == x.dtype
    assert step(x, 1.0).dtype == jnp.float32
    assert step(x, (1,)[0]).dtype == x.dtype


def test_configuration_is_part_of_the_key(mesh8):
    step = dt.jit(lambda k: jax.random.uniform(k, (8,)), mesh=mesh8, out_placements="S0")
    key = jax.random.key(0)
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            np.testing.assert_array_equal(step(key), jax.random.uniform(key, (8,)))


def test_constants_do_not_leak_out_of_an_outer_trace(mesh8):
    constant = np.arange(8, dtype=np.float32)
    step = dt.jit(lambda x: x + constant, mesh=mesh8, in_placements="S0")
    x = normal(0, 8)
    same(jax.jit(lambda x: step(x))(x), x + constant)
    same(jax.jit(lambda x: step(x) * 2)(x), (x + constant) * 2)
    total = dt.jit(lambda x: (x * constant).sum(), mesh=mesh8, in_placements="S0")
    for _ in range(2):
        same(jax.jit(jax.grad(total))(x), constant)


def test_inside_and_outside_do_not_share_traces(mesh8):
    step = dt.jit(lambda x: x * 2, mesh=mesh8, out_placements="S0")
    g = jax.jit(lambda x: step(x))
    x = normal(0, 8)
    with jax.set_mesh(mesh8):
        same(g(x), x * 2)
        same(dt.jit(lambda x: g(x) + 1)(x), x * 2 + 1)
        same(g(x), x * 2)


def test_partial_on_an_axis_of_one_device():
    mesh = dt.init_device_mesh((1, 8), ("dp", "tp"))
    x = dt.distribute_tensor(np.arange(8.0), mesh, ["P", "S0"])
    same(dt.jit(lambda x: x * 2, mesh=mesh)(x), np.arange(8.0) * 2)
    same(dt.jit(lambda x: x * 2, mesh=mesh, out_placements="P,R")(np.arange(8.0)), np.arange(8) * 2)


def test_partial_arguments_and_results_on_request(mesh8):
    x = normal(0, 8)
    same(dt.jit(lambda x: x * 2, mesh=mesh8, in_placements="P")(x), x * 2)
    with pytest.raises(dt.PlacementError, match="no operation of the program leaves"):
        dt.jit(lambda x: x * 2, mesh=mesh8, in_placements="S0", out_placements="P(max)")(x)


def test_a_loop_with_a_predicate_per_row(mesh8):
    f = jax.vmap(lambda a: jax.lax.while_loop(lambda t: t < 10, lambda t: t * 2, a))
    x = np.arange(1, 9.0)
    same(dt.jit(f, mesh=mesh8, in_placements="S0")(x), f(x))


def test_gradients_of_scalars_over_dtensors(mesh8):
    x = dt.distribute_tensor(normal(0, 8), mesh8, "S0")
    grad = jax.grad(dt.jit(lambda x: (x**2).sum()))(x)
    assert grad.layout == x.layout
    same(grad, 2 * normal(0, 8))


def test_negative_argument_numbers(mesh8):
    a, b = (dt.distribute_tensor(normal(i, 8), mesh8, "S0") for i in (0, 1))
    dt.jit(lambda x, y: x + y, donate_argnums=-1)(a, b)
    assert b.storage.is_deleted() and not a.storage.is_deleted()
    step = dt.jit(lambda *xs: xs[0] * xs[1], mesh=mesh8, static_argnums=-1)
    same(step(normal(0, 8), 3), normal(0, 8) * 3)
    with pytest.raises(ValueError, match="no arguments"):
        dt.jit(lambda x: x, static_argnames="y")


def test_arrays_from_the_host_are_the_same_program(mesh8):
    traces = []
    step = dt.jit(lambda x: (traces.append(1), x * 2)[1], mesh=mesh8, in_placements=(["S0"],))
    same(step(step(np.arange(8.0, dtype="float32"))), np.arange(8) * 4.0)
    assert len(traces) == 1


def test_arguments_that_nobody_uses_are_not_moved(mesh8):
    x = dt.distribute_tensor(normal(0, 8), mesh8, "S0")
    step = dt.jit(lambda x, y: y * 2, in_placements=(["R"], ["R"]))
    assert not step.explain(x, normal(1, 8)).collectives


def test_methods(mesh8):
    class Model:
        scale = 3.0

        @dt.jit(mesh=mesh8, in_placements=(None, ["S0"]), static_argnums=0)
        def __call__(self, x):
            return x * self.scale

    same(Model()(normal(0, 8)), normal(0, 8) * 3)


def test_printing_keys(mesh8):
    keys = dt.distribute_tensor(jax.random.split(jax.random.key(0), 8), mesh8, "S0")
    assert "dp=S0" in repr(keys)


def test_another_mesh_is_an_error(mesh8, mesh24):
    x = dt.distribute_tensor(normal(0, 8, 8), mesh24, "S0,R").to_array()
    with pytest.raises(dt.PlacementError, match="another mesh"):
        dt.jit(lambda x: x * 2, mesh=mesh8)(x)


def test_strict_names_of_arrays(mesh24):
    """Remedies name arrays, not functions, and reach into lists; results have their line."""
    x, w = normal(0, 8, 16), normal(1, 16, 16)

    def body(h, _):
        return jnp.tanh(h @ w), None

    def joined(x, y):
        return jax.lax.sort([x, y], dimension=1, is_stable=False)[1]

    with pytest.raises(dt.PlacementMismatchError) as caught:
        where = ("S0,S1", "S0,R")
        dt.jit(joined, mesh=mesh24, in_placements=where, redistribute="never")(x, x)
    assert caught.value.remedies[0].code.startswith("dt.redistribute(x, ")

    def product(x, w):
        return x @ w

    with pytest.raises(dt.PlacementMismatchError) as caught:
        where = ("S0,S1", "R,S0")
        dt.jit(product, mesh=mesh24, in_placements=where, redistribute="never")(x, w)
    error = caught.value
    assert error.axis == "tp" and "test_reported.py" in error.where
    assert error.remedies[0].code.startswith("out_placements={")

    def crossed(x, y):
        return x + y

    with pytest.raises(dt.PlacementMismatchError) as caught:
        where = ("S0,R", "R,S0")
        dt.jit(crossed, mesh=mesh24, in_placements=where, redistribute="never")(x, x)
    assert caught.value.remedies


def test_refusals_say_what_to_do(mesh8):
    def draws(x):
        return x + jax.lax.rng_uniform(0.0, 1.0, (8,))

    with pytest.raises(dt.PlacementError, match=r"use jax\.random with a key"):
        dt.jit(draws, mesh=mesh8)(normal(0, 8))
    same(dt.jit(lambda x: jax.device_put(x) + 1, mesh=mesh8)(normal(0, 8)), normal(0, 8) + 1)
    with pytest.raises(TypeError, match=r"dt\.init_device_mesh"):
        dt.jit(jnp.exp, mesh="dp")
    with pytest.raises(dt.PlacementError, match=r"for one argument write"):
        dt.jit(jnp.exp, mesh=mesh8, in_placements={"dp": "S0"})(normal(0, 8))
