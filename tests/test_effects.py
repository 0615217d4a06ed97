"""User code with effects of its own, and shard_map, inside whole-array programs."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import dtorchjax as dt

X = np.arange(32.0, dtype=np.float32).reshape(4, 8)


@pytest.fixture
def placed(mesh24):
    return dt.distribute_tensor(X, mesh24, "S0,S1")


def verified(step, *args):
    plan = step.explain(*args)
    plan.verify(step.lower(*args).compile())
    return plan


def test_a_print_is_once_and_of_the_whole(placed, capfd):
    def fun(x):
        jax.debug.print("total {}", (2 * x).sum())
        return x + 1

    step = dt.jit(fun)
    np.testing.assert_array_equal(np.asarray(step(placed)), X + 1)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n") == ["total 992.0", ""]
    assert "debug_print" in {c.primitive for c in verified(step, placed).collectives}


def test_callbacks_are_called_once(placed):
    seen = []

    def fun(x):
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), 2 * x)
        y = jax.pure_callback(
            lambda v: (seen.append(v), np.sin(v))[1], jax.ShapeDtypeStruct((4, 8), "float32"), x
        )
        many = io_callback(lambda v: v.sum() > 9, jax.ShapeDtypeStruct((), bool), x)
        count = io_callback(lambda v: np.int32(v.size), jax.ShapeDtypeStruct((), np.int32), x)
        return y + 1, many, count

    step = dt.jit(fun)
    y, many, count = step(placed)
    jax.effects_barrier()
    np.testing.assert_allclose(np.asarray(y), np.sin(X) + 1, rtol=1e-6)
    assert bool(many) and int(count) == 32
    assert sorted(v.sum() for v in map(np.asarray, seen)) == [X.sum(), 2 * X.sum()]
    verified(step, placed)


def test_uneven_values_reach_callbacks_whole(mesh24):
    seen, x = [], X[:3, :7]
    placed = dt.distribute_tensor(x, mesh24, "S0,S1")
    dt.jit(lambda x: (jax.debug.callback(lambda v: seen.append(np.asarray(v)), x), x * 2)[1])(
        placed
    )
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], x)


def test_prints_in_loops_and_branches(placed, capfd):
    def fun(x):
        def body(total, row):
            jax.debug.print("total {}", total.sum())
            return total + row, None

        total, _ = lax.scan(body, x[0] * 0, x)
        return lax.cond(total.sum() > 0, lambda t: t + 1, lambda t: t, total)

    np.testing.assert_array_equal(np.asarray(dt.jit(fun)(placed)), X.sum(0) + 1)
    jax.effects_barrier()
    lines = capfd.readouterr().out.split()
    assert [float(v) for v in lines[1::2]] == [0.0, 28.0, 120.0, 276.0]


def test_ordered_effects_are_refused(placed):
    with pytest.raises(dt.PlacementError, match=r"ordered effects .*\n  at test_effects"):
        dt.jit(lambda x: (jax.debug.print("{}", x, ordered=True), x)[1])(placed)


def test_a_shard_map_runs_in_place(mesh24, placed):
    local = jax.shard_map(
        lambda v: lax.psum(2 * v, "dp") + lax.axis_index("tp"),
        mesh=mesh24, in_specs=PartitionSpec("dp", "tp"), out_specs=PartitionSpec(None, "tp"),
    )  # fmt: skip

    def fun(x):
        return jnp.tanh(local(x + 1) / 50).sum(1)

    step = dt.jit(fun)
    np.testing.assert_allclose(np.asarray(step(placed)), jax.jit(fun)(X), rtol=1e-5)
    plan = verified(step, placed)
    inside = [c for c in plan.collectives if c.primitive == "shard_map"]
    assert [(c.kind, c.axes, c.bytes) for c in inside] == [("all-reduce", ("dp",), 16.0)]

    gradient = dt.jit(jax.grad(lambda x: fun(x).sum()))
    expected = jax.grad(lambda x: fun(x).sum())(jnp.asarray(X))
    np.testing.assert_allclose(np.asarray(gradient(placed)), expected, rtol=1e-4, atol=1e-6)
    other = dt.distribute_tensor(X, mesh24, "R,S0")  # its specs are obeyed, whatever it takes
    np.testing.assert_allclose(np.asarray(step(other)), jax.jit(fun)(X), rtol=1e-5)
    with pytest.raises(dt.PlacementMismatchError, match="shard_map"):
        dt.jit(fun, redistribute="never")(other)


@pytest.mark.parametrize("check", [True, False])
def test_loops_and_calls_in_a_shard_map(mesh24, placed, check):
    def local(v):
        step = lambda c, y: (c + jax.jit(lambda z: lax.pmean(z, "tp"))(y), c * 2)  # noqa: E731
        start = lax.pcast(jnp.zeros(v.shape[1:]), ("dp",), to="varying") if check else jnp.zeros(2)
        return lax.scan(step, start, v)[1]

    spec = PartitionSpec("dp", "tp")
    out = PartitionSpec("dp") if check else spec
    mapped = jax.shard_map(local, mesh=mesh24, in_specs=spec, out_specs=out, check_vma=check)
    ours = dt.jit(lambda x: mapped(x) + 1)(placed)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(jax.jit(mapped)(X)) + 1, rtol=1e-5)


def test_a_shard_map_on_another_mesh(mesh24, mesh8, placed):
    mapped = jax.shard_map(
        lambda v: v * 2, mesh=mesh8, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec("dp")
    )
    with pytest.raises(ValueError, match="mesh"):
        dt.jit(lambda x: mapped(x.reshape(8, 4)))(placed)
