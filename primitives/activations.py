"""Activation functions: of each element alone.

At a kink the derivative is that of `jax.nn`: 0 at the bounds of relu, relu6, hard_sigmoid, and at
-3 of hard_silu, 1 at the bounds of hard_tanh, and that of the right side at 0 for leaky_relu and
prelu. Limits hold at infinities (silu(-inf) is 0); NaN stays NaN.
"""

from __future__ import annotations

import math

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax.numerics import as_float, one_axis, safe_product, sum_to
from dtorchjax.op import elementary, op

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@op(upcast=False)
def relu(x):
    """max(x, 0)."""
    return jnp.maximum(x, 0)


@relu.vjp
def _(out, g):
    return jnp.where(out > 0, g, 0)


@op(upcast=False)
def relu6(x):
    """x clipped to [0, 6]."""
    return jnp.minimum(jnp.maximum(x, 0), 6)


@relu6.vjp
def _(out, g):
    return jnp.where((out > 0) & (out < 6), g, 0)


@op(upcast=False)
def leaky_relu(x, *, slope=0.01):
    """x, or slope * x where x is negative; any slope."""
    return jnp.where(x >= 0, x, slope * x)


@leaky_relu.vjp
def _(x, g, *, slope):
    return jnp.where(x >= 0, g, slope * g)


@op(upcast=False)
def prelu(x, weight):
    """x, or weight * x where x is negative; `weight` broadcasts to x."""
    return jnp.where(x >= 0, x, weight * x)


@prelu.vjp
def _(x, weight, g):
    positive = x >= 0
    return (
        jnp.where(positive, g, weight * g),
        sum_to(jnp.where(positive, 0, g * x), weight.shape),
    )


@op
def elu(x, *, alpha=1.0):
    """x, or alpha * (exp(x) - 1) where x is not positive (Clevert et al. 2015)."""
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0)))


@elu.vjp
def _(x, g, *, alpha):
    return jnp.where(x > 0, g, g * alpha * jnp.exp(jnp.minimum(x, 0)))


@op
def celu(x, *, alpha=1.0):
    """x, or alpha * (exp(x / alpha) - 1) where x is not positive (Barron 2017)."""
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0) / alpha))


@celu.vjp
def _(x, g, *, alpha):
    return jnp.where(x > 0, g, g * jnp.exp(jnp.minimum(x, 0) / alpha))


@op
def selu(x):
    """Scaled elu (Klambauer et al. 2017)."""
    return SELU_SCALE * jnp.where(x > 0, x, SELU_ALPHA * jnp.expm1(jnp.minimum(x, 0)))


@selu.vjp
def _(x, g):
    return SELU_SCALE * jnp.where(x > 0, g, g * SELU_ALPHA * jnp.exp(jnp.minimum(x, 0)))


@op
def gelu(x, *, approximate=True):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    As `jax.nn.gelu`, `approximate` takes the form with tanh.
    """
    return safe_product(x, _normal_cdf(x, approximate))


@gelu.vjp
def _(x, g, *, approximate):
    cdf = _normal_cdf(x, approximate)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        slope = 2 * cdf * (1 - cdf)
        return g * (cdf + safe_product(inner, safe_product(x, slope)))
    pdf = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return g * (cdf + safe_product(x, pdf))


def _normal_cdf(x, approximate):
    if approximate:
        # 0.5 * (1 + tanh(y)) is logistic(2 y), which does not cancel for negative y
        return lax.logistic(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))
    return 0.5 * lax.erfc(-x * math.sqrt(0.5))


@op
def silu(x):
    """x * sigmoid(x)."""
    return safe_product(x, lax.logistic(x))


@silu.vjp
def _(x, g):
    s = lax.logistic(x)
    return g * (s + safe_product(x, s * lax.logistic(-x)))


@op
def swish(x, *, beta=1.0):
    """x * sigmoid(beta * x) (Ramachandran et al. 2017)."""
    return safe_product(x, lax.logistic(beta * x))


@swish.vjp
def _(x, g, *, beta):
    s = lax.logistic(beta * x)
    return g * (s + beta * safe_product(x, s * lax.logistic(-beta * x)))


@op
def mish(x):
    """x * tanh(softplus(x)) (Misra 2019)."""
    return safe_product(x, jnp.tanh(_softplus(x)))


@mish.vjp
def _(x, g):
    t = jnp.tanh(_softplus(x))
    return g * (t + safe_product(x, (1 - t) * (1 + t) * lax.logistic(x)))


def _softplus(x):
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@op
def softplus(x):
    """log(1 + exp(x))."""
    return _softplus(x)


@softplus.vjp
def _(x, g):
    return g * lax.logistic(x)


@op
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return lax.logistic(x)


@sigmoid.vjp
def _(out, g):
    return g * out * (1 - out)


@op
def log_sigmoid(x):
    """log(sigmoid(x))."""
    return -_softplus(-x)


@log_sigmoid.vjp
def _(x, g):
    return g * lax.logistic(-x)


@op
def softsign(x):
    """x / (1 + |x|)."""
    return jnp.where(jnp.isinf(x), jnp.sign(x), x / (1 + jnp.abs(x)))


@softsign.vjp
def _(x, g):
    root = 1 / (1 + jnp.abs(x))
    return g * root * root


@op(upcast=False)
def hard_sigmoid(x, *, slope=1 / 6, offset=0.5):
    """slope * x + offset, clipped to [0, 1]."""
    return jnp.clip(slope * x + offset, 0, 1)


@hard_sigmoid.vjp
def _(out, g, *, slope):
    return jnp.where((out > 0) & (out < 1), slope * g, 0)


@op
def hard_silu(x):
    """x * relu6(x + 3) / 6 (Howard et al. 2019), also known as hard swish."""
    return safe_product(x, jnp.clip(x + 3, 0, 6) / 6)


@hard_silu.vjp
def _(x, g):
    return g * jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, (2 * x + 3) / 6))


@op(upcast=False)
def hard_tanh(x):
    """x clipped to [-1, 1]."""
    return jnp.where(x > 1, 1, jnp.where(x < -1, -1, x))


@hard_tanh.vjp
def _(x, g):
    return jnp.where((x >= -1) & (x <= 1), g, 0)


TANH_SERIES = (
    -929569 / 638512875, 21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3,
)  # fmt: skip


@op
def tanh_shrink(x):
    """x - tanh(x), by its series near 0, where the difference cancels."""
    y = x * x
    series = jnp.zeros_like(x)
    for c in TANH_SERIES:
        series = (series - c) * y
    return jnp.where(jnp.abs(x) < 0.15, x * series, x - jnp.tanh(x))


@tanh_shrink.vjp
def _(x, g):
    return g * jnp.tanh(x) ** 2


@op(upcast=False)
def soft_shrink(x, *, threshold=0.5):
    """x moved towards 0 by `threshold`, at most to 0; the derivative at the threshold is 0."""
    return x - jnp.clip(x, -threshold, threshold)


@soft_shrink.vjp
def _(x, g, *, threshold):
    return jnp.where(jnp.abs(x) > threshold, g, 0)


@op(upcast=False)
def hard_shrink(x, *, threshold=0.5):
    """x, or 0 where |x| is at most `threshold`."""
    return jnp.where(jnp.abs(x) <= threshold, 0, x)


@hard_shrink.vjp
def _(x, g, *, threshold):
    return jnp.where(jnp.abs(x) <= threshold, 0, g)


@op(upcast=False)
def threshold(x, *, threshold=0.0, value=0.0):
    """x, or `value` where x is at most `threshold`."""
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


@threshold.vjp
def _(x, g, *, threshold):
    return jnp.where(x <= threshold, 0, g)


@op
def squareplus(x, *, b=4.0):
    """(x + sqrt(x^2 + b)) / 2 (Barron 2021)."""
    root = jnp.hypot(x, math.sqrt(b))
    away = root + jnp.abs(x)
    return jnp.where(x >= 0, 0.5 * away, 0.5 * b / away)


@squareplus.vjp
def _(x, g, *, b):
    root = jnp.hypot(x, math.sqrt(b))
    small = 0.5 * (b / root) / (root + jnp.abs(x))
    return g * jnp.where(x >= 0, 1 - small, small)


@op
def logit(x, *, epsilon=None):
    """log(x / (1 - x)), of x clipped to [epsilon, 1 - epsilon] if it is given."""
    if epsilon is not None:
        x = jnp.where(x < epsilon, epsilon, jnp.where(x > 1 - epsilon, 1 - epsilon, x))
    return jnp.log(x) - jnp.log1p(-x)


@op
def glu(x, *, axis=-1):
    """The first half of `axis` times the sigmoid of the second (Dauphin et al. 2016)."""
    a, b = _halves(x, axis)
    return a * lax.logistic(b)


@op
def swiglu(x, y=None):
    """silu(x) * y; without y, of the halves of the last dim (Shazeer 2020)."""
    x, y = _halves(x, -1) if y is None else (x, y)
    return safe_product(x, lax.logistic(x)) * y


@op
def geglu(x, y=None, *, approximate=True):
    """gelu(x) * y; without y, of the halves of the last dim (Shazeer 2020)."""
    x, y = _halves(x, -1) if y is None else (x, y)
    return safe_product(x, _normal_cdf(x, approximate)) * y


@op(upcast=False)
def reglu(x, y=None):
    """relu(x) * y; without y, of the halves of the last dim (Shazeer 2020)."""
    x, y = _halves(x, -1) if y is None else (x, y)
    return jnp.where(x > 0, x, jnp.where(jnp.isnan(x), x, 0)) * y


def _halves(x, axis):
    axis = one_axis(x, axis)
    if x.shape[axis] % 2 != 0:
        raise ValueError(
            f"axis {axis} has size {x.shape[axis]}, which is not known to be even: it has no halves"
        )
    return jnp.split(x, 2, axis)


@op
def entropy(p):
    """-p * log(p), 0 at 0 and nan below it."""
    p = as_float(p)
    return jnp.where(p == 0, 0, -p * jnp.log(jnp.where(p == 0, 1, p)))


@op
def sparse_plus(x):
    """0 below -1, x above 1, (x + 1)^2 / 4 between (as `jax.nn.sparse_plus`)."""
    return jnp.where(x <= -1, 0, jnp.where(x >= 1, x, (x + 1) ** 2 / 4))


@sparse_plus.vjp
def _(x, g):
    return g * jnp.where(x <= -1, 0, jnp.where(x >= 1, 1, (x + 1) / 2))


tanh = elementary("tanh", jnp.tanh)
exp = elementary("exp", jnp.exp)
log = elementary("log", jnp.log)
heaviside = elementary("heaviside", jnp.heaviside)
log1p = elementary("log1p", jnp.log1p)
expm1 = elementary("expm1", jnp.expm1)
erf = elementary("erf", jax.scipy.special.erf)
