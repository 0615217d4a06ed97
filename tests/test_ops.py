"""Every operator: values, derivatives, dtypes and special values."""

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from op_samples import SAMPLES
from rotation import today

import dtorchjax as dt
from dtorchjax import primitives as ops
from dtorchjax.op import Op
from dtorchjax.registry import OPS

TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}
BY_OP = {s.op: s for s in reversed(SAMPLES)}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def cast(tree, dtype):
    """Floats in `dtype`, integers as int32."""

    def one(x):
        x = np.asarray(x)
        if x.dtype == bool:
            return jnp.asarray(x)
        return jnp.asarray(x, dtype if x.dtype == np.float64 else jnp.int32)

    return jax.tree.map(one, tree)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def close(found, wanted, tolerance, what=""):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted), what
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, what
        if a.dtype != bool:
            a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)


class Call:
    """A sample's call as a function of its flat float operands."""

    def __init__(self, s, dtype="float64"):
        self.op, self.static = OPS[s.op], s.static
        self.leaves, self.tree = jax.tree.flatten(cast(s.operands, dtype))
        self.wrt = [i for i, x in enumerate(self.leaves) if is_float(x)]
        self.xs = tuple(self.leaves[i] for i in self.wrt)

    def __call__(self, *xs):
        leaves = list(self.leaves)
        for i, x in zip(self.wrt, xs, strict=True):
            leaves[i] = x
        return self.op(*jax.tree.unflatten(self.tree, leaves), **self.static)

    def floats(self, *xs):
        return [y for y in jax.tree.leaves(self(*xs)) if is_float(y)]

    def scalar(self, *xs):
        """A number that depends on every result in its own way."""
        total = 0.0
        for k, y in enumerate(self.floats(*xs)):
            weights, y = np.random.default_rng(k).normal(size=y.shape), y.astype("float64")
            total = total + (y * weights).sum() + (y * y).sum() / 7
        return total

    @property
    def differentiable(self):
        shapes = jax.eval_shape(self.floats, *self.xs)
        return bool(self.wrt) and bool(shapes)

    @property
    def gradient(self):
        return jax.grad(self.scalar, tuple(range(len(self.xs))))

    def tangents(self):
        """A direction; numbers such as labels, which are whole, stay."""
        random = np.random.default_rng(1)
        return tuple(
            jnp.where(x == jnp.round(x), 0, random.normal(size=x.shape)).astype(x.dtype)
            for x in self.xs
        )


def along(direction, gradients):
    return sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))


def moved(xs, direction, step):
    return tuple(x + step * d for x, d in zip(xs, direction, strict=True))


def without_rules(fun):
    """`fun` with derivatives of decompositions only."""

    def run(*args):
        with dt.custom_vjps(deny=list(OPS)):
            return fun(*args)

    return run


def finite(s):
    """The sample's results are finite (a masked logsumexp has -inf)."""
    return all(np.isfinite(np.asarray(y, np.float64)).all() for y in jax.tree.leaves(reference(s)))


def reference(s):
    return s.reference(*s.operands)


each_sample = pytest.mark.parametrize("s", today(SAMPLES, 24))
each_op = pytest.mark.parametrize("name", today(sorted(BY_OP), 24))


def test_every_op_has_a_sample():
    declared = {n for n, o in OPS.items() if isinstance(o, Op) and n in ops.__all__}
    assert declared - set(BY_OP) == set()
    assert len(declared) >= 90


@each_sample
def test_values_and_gradients(s):
    """In float64: the reference; the VJP of the decomposition; finite differences."""
    call = Call(s)
    if not call.differentiable or not finite(s):
        close(call(*call.xs), reference(s), 1e-12)
        return
    step, direction = 1e-6, call.tangents()

    @jax.jit
    def run(*xs):
        ends = [call.scalar(*moved(xs, direction, sign * step)) for sign in (1, -1)]
        return call(*xs), call.gradient(*xs), without_rules(call.gradient)(*xs), ends

    found, gradients, automatic, ends = run(*call.xs)
    close(found, reference(s), 1e-12)
    close(gradients, automatic, 1e-11 if s.big else 1e-12)
    if s.smooth:
        close(along(direction, gradients), (ends[0] - ends[1]) / (2 * step), 2e-6)


@each_sample
def test_dtypes(s):
    """float32, and half precision: float64 of the rounded operands, rounded; its gradients have the
    operands' dtype and are those of float64."""
    calls = [Call(s, dtype) for dtype in ("float32", "float16", "bfloat16")]
    with_gradient = calls[0].differentiable and finite(s)

    @jax.jit
    def run():
        return [(c(*c.xs), c.gradient(*c.xs) if with_gradient else ()) for c in calls]

    exact = Call(s)
    for call, (found, gradients), dtype in zip(
        calls, run(), ("float32", "float16", "bfloat16"), strict=True
    ):
        rounded = [np.asarray(x, np.float64) if is_float(x) else np.asarray(x) for x in call.leaves]
        wanted = s.reference(*jax.tree.unflatten(call.tree, rounded))
        wide = 1 if dtype != "float32" else 10 if s.big else 1
        close(found, wanted, TOLERANCE[dtype] * wide, dtype)
        first = jax.tree.leaves(found)[0]
        assert not is_float(first) or first.dtype == dtype or not call.wrt
        for g, x in zip(gradients, call.xs if with_gradient else (), strict=True):
            assert g.dtype == x.dtype and g.shape == x.shape
        if with_gradient and dtype != "float32":
            xs = tuple(jnp.asarray(x, "float64") for x in call.xs)
            wanted = exact.gradient(*xs)
            scale = max(1.0, *(float(jnp.abs(g).max(initial=0)) for g in wanted))
            if scale > jnp.finfo(dtype).max:
                continue  # there is no such number
            wanted = [g / scale for g in wanted]
            close(
                [g / scale for g in gradients], wanted, TOLERANCE[dtype] * 10, f"{dtype} gradient"
            )


@each_op
def test_transformations(name):
    """Forward mode, jit, remat, vmap(grad) and second derivatives: those of the decomposition."""
    s = BY_OP[name]
    call = Call(s)
    if not call.differentiable or not finite(s):
        pytest.skip("no float operand, no float result, or an infinite one (an empty mask)")
    numbers = tuple(range(len(call.xs)))
    direction = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in call.xs)
    stacked = tuple(jnp.stack([x, x * 1.25]) for x in call.xs)

    def first(*xs):
        return (
            jax.jvp(call.floats, xs, direction)[1],
            jax.grad(jax.checkpoint(call.scalar), numbers)(*xs),
            jax.vmap(call.gradient)(*stacked),
        )

    def second(*xs):  # forward over reverse, and reverse over reverse
        forward = jax.jvp(call.gradient, xs, direction)[1]
        return forward, jax.grad(lambda *ys: along(direction, call.gradient(*ys)), numbers)(*xs)

    run = jax.jit(lambda *xs: (first(*xs), second(*xs) if s.second else ()))
    found, wanted = run(*call.xs), jax.jit(without_rules(run.__wrapped__))(*call.xs)
    close(found[0], wanted[0], 1e-11)
    scale = max(1.0, *(float(jnp.abs(w).max(initial=0)) for w in jax.tree.leaves(wanted[1])), 1.0)
    close(*(jax.tree.map(lambda x: x / scale, tree[1]) for tree in (found, wanted)), 1e-10)
    one_by_one = [call.gradient(*(x[i] for x in stacked)) for i in range(2)]
    close(found[0][2], jax.tree.map(lambda *x: jnp.stack(x), *one_by_one), 1e-11, "vmap(grad)")


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1e-3, -1e-3, 20.0, -20.0, 1e3, -1e3, 1e4, -1e4, 3e18, -3e18]


@pytest.mark.parametrize("s", today([s for s in SAMPLES if s.elementwise], 4))
def test_special_values(s):
    """Finite values as float64 says, gradients finite; a limit at infinities; nan stays nan."""
    fun = functools.partial(OPS[s.op], **s.static)
    x = np.float32(SPECIAL if s.limits else [1e-30, 1e-3, 0.5, 1 - 1e-6]).astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = np.asarray(s.reference(x), np.float64)
    found = fun(jnp.asarray(x, jnp.float32))
    known = np.isfinite(wanted)
    close(np.asarray(found)[known], wanted[known], 1e-6)
    assert np.isfinite(found).all()
    gradient = jax.vmap(jax.grad(fun))(jnp.asarray(x, jnp.float32))
    assert np.isfinite(gradient).all(), gradient
    close(gradient, jax.vmap(jax.grad(fun))(jnp.asarray(x, jnp.float64)), 1e-6)
    assert np.isnan(fun(jnp.float32(np.nan)))
    if s.limits:
        ends = jnp.asarray([np.inf, -np.inf], jnp.float32)
        assert not np.isnan(fun(ends)).any()
        assert not np.isnan(jax.vmap(jax.grad(fun))(ends)).any()
    assert fun(jnp.zeros((0, 3))).shape == (0, 3)
    assert fun(jnp.float32(0.5)).shape == ()
