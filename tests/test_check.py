"""check_dfunction catches what can be wrong in a dfunction, and says where."""

import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from test_dfunction import table

import dtorchjax as dt

RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 12)).astype("float32")
W = RNG.normal(size=(12, 12)).astype("float32")
B = RNG.normal(size=(12,)).astype("float32")


def wrong_output_dim():
    @dt.dfunction(rule="b i, i o -> o b")
    def fun(x, w):
        return x @ w

    return fun, (X, W), "R, S1 -> S0.*result 0 has local shape"


def missing_psum():
    @dt.dfunction(rule="b i, i o -> b o", extra=("i: S1, S0 -> R",))
    def fun(x, w):
        return x @ w

    return fun, (X, W), "S1, S0 -> R.*result 0 is said to be the same.*shard"


def doubled_bias():
    @dt.dfunction(rule="b i, i o, o -> b o", extra=("i: S1, S0, R -> P",))
    def fun(x, w, b):
        return x @ w + b

    return fun, (X, W, B), "S1, S0, R -> P.*result 0.*is wrong"


def unreduced_gradient():
    @dt.dfunction(rule="b i, i o -> b o", cotangents={"w": "R"})
    def fun(x, w):
        return x @ w

    fun.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    return fun, (X, W), r"S0, R -> S0.*gradient of operand 1 \(`w`\) is said to be the same.*shard"


def local_instead_of_global_mean():
    @dt.dfunction(rule="a b -> a b")
    def fun(x):
        return x - x.mean(1, keepdims=True)

    return fun, (X,), r"S1 -> S1.*result 0 \(S1\) is wrong on shard"


def wrong_causal_offset():
    @dt.dfunction(rule="s d!, t! d! -> s d!")
    def fun(q, k):
        axes = dt.axes_of("s")
        first = (dt.axis_index(axes) + 1) * q.shape[0]  # a shard too far
        sees = first + jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])
        if not axes:
            sees = jnp.tril(jnp.ones((q.shape[0], k.shape[0]), bool))
        return jax.nn.softmax(jnp.where(sees, q @ k.T, -1e30)) @ k

    return fun, (W, W[::-1].copy()), r"S0, R -> S0.*result 0 \(S0\) is wrong on shard \(0,\)"


def swapped_residuals():
    @dt.dfunction(rule="a b, a b -> a b")
    def fun(x, y):
        return x * y

    fun.defvjp(lambda x, y: (x * y, (y, x)), lambda kept, g: (g * kept[1], g * kept[0]))
    return fun, (X, X + 1), r"gradient of operand 0 \(`x`\).*not the derivative"


def stale_static():
    local = {}

    class Scaled(dt.LayoutRule):
        def infer_layout(self, x):
            return x

        def get_expand_impl(self, fun, out_layouts, in_layouts, scale):
            return local.setdefault("impl", lambda x, scale: fun(x, first))  # keeps the first scale

    first = 2.0
    name = "a stale static"
    rule = dt.layout_rule.LAYOUT_RULES.get(name) or Scaled(name)

    @dt.dfunction(rule=rule)
    def fun(x, scale):
        return x * scale

    dt.check_dfunction(fun, X, first)
    return fun, (X, 3.0), r"result 0 .*is wrong"


def wrong_axis():
    @dt.dfunction(rule="b i, i o -> b o", extra=("i: S1, S0 -> R",))
    def fun(x, w):
        return dt.psum(x @ w, "dp")

    return fun, (X, W), "result 0.*names the mesh axes 'dp'"


def argmax_per_shard():
    @dt.dfunction(rule="b v -> b", extra=("v: S1 -> R",))
    def fun(x):
        return jnp.argmax(x, 1)

    return fun, (X,), "S1 -> R.*result 0 is said to be the same"


FAULTS = [
    wrong_output_dim, missing_psum, doubled_bias, unreduced_gradient, local_instead_of_global_mean,
    wrong_causal_offset, swapped_residuals, stale_static, wrong_axis, argmax_per_shard,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_caught_and_named(fault):
    fun, args, says = fault()
    with pytest.raises(dt.CheckError) as caught:
        dt.check_dfunction(fun, *args)
    assert re.search(says, str(caught.value)), caught.value
    assert "dfunction `fun`" in str(caught.value)


def right():
    @dt.dfunction(rule="b i, i o, [o] -> b o", extra=("i: S1, S0, R -> P", "i: S1, S0, - -> P"))
    def with_bias(x, w, b=None):
        return x @ w + (0 if b is None else b / dt.axis_size(dt.axes_of("i")))

    @dt.dfunction(rule="b v -> b, b", extra=("v: S1 -> R, R",))
    def argmax(x):
        axes = dt.axes_of("v")
        values, places = x.max(1), jnp.argmax(x, 1) + dt.axis_index(axes) * x.shape[1]
        best = dt.pmax(values, axes)
        return best, dt.pmin(jnp.where(values == best, places, 2**30), axes)

    @dt.dfunction(rule="a b -> a b")
    def centred(x):
        axes = dt.axes_of("b")
        mean = dt.psum(x.sum(1, keepdims=True), axes) / (x.shape[1] * dt.axis_size(axes))
        return x - mean

    @dt.dfunction(rule=table("S0, S0 -> S0", "P, P -> P", "P(max), R -> P(max)"))
    def first(x, y):
        del y
        return x

    return [
        (with_bias, (X, W, B)), (with_bias, (X, W)), (argmax, (X,)), (centred, (X,)),
        (first, (X, X)),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(5))
def test_what_is_right_passes(case):
    fun, args = right()[case]
    report = dt.check_dfunction(fun, *args)
    assert len(report.checked) >= 4 and report.name in str(report)


def test_rows_that_no_shards_fit_are_reported():
    @dt.dfunction(rule="a b -> a b")
    def fun(x):
        return x

    report = dt.check_dfunction(fun, jnp.ones((5, 4)))
    assert report.skipped == ["S0 -> S0"] and "skipped  S0 -> S0" in str(report)
    shapes = dt.check_dfunction(fun, jax.ShapeDtypeStruct((4, 4), "bfloat16"))
    assert len(shapes.checked) == 6
    with pytest.raises(TypeError, match="takes a dfunction"):
        dt.check_dfunction(lambda x: x, X)
