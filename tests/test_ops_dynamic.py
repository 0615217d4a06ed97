"""Operators and their VJPs under `jax.export` with symbolic dims, each size in turn."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from rotation import today
from test_ops import BY_OP, Call, close, finite

import dtorchjax as dt


def sizes(call):
    """The different sizes of the dims of all operands."""
    return sorted({n for x in call.leaves for n in x.shape if n > 1})


CASES = [(name, n) for name in sorted(BY_OP) for n in sizes(Call(BY_OP[name], "float32"))]

# what depends on a size by more than a shape says so
NEEDS_A_SIZE = {
    ("adaptive_avg_pool", 6): "adaptive pooling needs spatial dims of known size",
    ("adaptive_max_pool", 6): "adaptive pooling needs spatial dims of known size",
    ("cross", 3): "cross needs vectors of size 3",
    ("unbind", 3): "unbind needs axis 1 of known size",
}
# sizes that must be multiples, which the caller states
MULTIPLES = {("glu", 8): 2, ("swiglu", 8): 2, ("group_norm", 8): 4, ("rotary_embedding", 8): 2}


@pytest.mark.parametrize("case", today(CASES, 40))
def test_symbolic_dims(case):
    name, n = case
    s = BY_OP[name]
    call = Call(s, "float32")
    constraints = ["n >= 2", *(f"mod(n, {k}) == 0" for k in [MULTIPLES.get(case)] if k)]
    (symbol,) = jax.export.symbolic_shape("n", constraints=constraints)
    with_gradient = call.differentiable and finite(s)

    def run(*leaves):
        given = list(leaves)
        xs = [given[i] for i in call.wrt]
        full = lambda *xs: call.op(  # noqa: E731
            *jax.tree.unflatten(
                call.tree,
                [xs[call.wrt.index(i)] if i in call.wrt else x for i, x in enumerate(given)],
            ),
            **call.static,
        )
        loss = lambda *xs: sum(  # noqa: E731
            (y * y).sum()
            for y in jax.tree.leaves(full(*xs))
            if jnp.issubdtype(y.dtype, jnp.floating)
        )
        gradients = jax.grad(loss, tuple(range(len(xs))))(*xs) if with_gradient else ()
        return full(*xs), gradients

    shapes = [
        jax.ShapeDtypeStruct(tuple(symbol if d == n else d for d in x.shape), x.dtype)
        for x in call.leaves
    ]
    if case in NEEDS_A_SIZE:
        with pytest.raises(ValueError, match=NEEDS_A_SIZE[case]):
            jax.export.export(jax.jit(run))(*shapes)
        return
    exported = jax.export.export(jax.jit(run))(*shapes)
    close(exported.call(*call.leaves), run(*call.leaves), 1e-5)


@pytest.mark.parametrize(
    ("fun", "size", "says"),
    [
        (dt.ops.glu, 8, "not known to be even"),
        (lambda x: dt.ops.group_norm(x, groups=4), 8, "not known to divide into 4 groups"),
    ],
)
def test_a_multiple_that_is_not_stated(fun, size, says):
    (symbol,) = jax.export.symbolic_shape("n")
    with pytest.raises(ValueError, match=says):
        jax.export.export(jax.jit(fun))(jax.ShapeDtypeStruct((2, symbol), jnp.float32))


# ---- sharded programs ----------------------------------------------------------------------------


def loss(w, x):
    return dt.ops.mean(dt.ops.softmax(jnp.tanh(dt.ops.linear(x, w))) ** 2)


def test_a_sharded_program_exports_with_a_symbolic_batch(mesh24):
    (batch,) = jax.export.symbolic_shape("8*n")
    step = dt.jit(jax.grad(loss), mesh=mesh24, in_placements=("R,S1", "S0,R"))
    w = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(24, 16)), jnp.float32)
    plan = step.explain(w, jax.ShapeDtypeStruct((batch, 16), jnp.float32))
    assert plan.collectives and plan.bytes_per_device > 0
    exported = jax.export.export(jax.jit(step))(
        jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    )
    assert exported.nr_devices == 8 and "all_reduce" in exported.mlir_module()
    assert "?x16xf32" in exported.mlir_module()
    assert exported.in_avals[1].shape == (batch, 16)
    # a batch of known size is planned and compiled for that size
    close(step(w, x), jax.grad(loss)(w, x), 1e-5)


@pytest.mark.parametrize("constraints", [[], ["mod(n, 2) == 0"]])
def test_a_symbolic_batch_must_be_known_to_divide(constraints, mesh24):
    (batch,) = jax.export.symbolic_shape("n", constraints=constraints)
    step = dt.jit(loss, mesh=mesh24, in_placements=("R,S1", "S0,R"))
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    with pytest.raises(dt.PlacementError, match=r"write it as a multiple .* '2\*n'"):
        step.explain(jnp.ones((16, 32)), x)
