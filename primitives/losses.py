"""Losses of distances and margins.

`reduction` is "mean" (over the elements), "sum" or "none". At a kink the derivative is that of the
flat side (0), and of |x| at 0 it is 0.
"""

from __future__ import annotations

import math

from jax import numpy as jnp

from dtorchjax.numerics import reduced
from dtorchjax.op import op


def _positive(x):
    """max(x, 0) with derivative 0 at 0."""
    return jnp.where(x > 0, x, jnp.where(jnp.isnan(x), x, 0))


@op
def mse_loss(x, target, *, reduction="mean"):
    """(x - target)^2."""
    return reduced(jnp.square(x - target), reduction)


@op
def l1_loss(x, target, *, reduction="mean"):
    """|x - target|."""
    return reduced(jnp.abs(x - target), reduction)


@op
def huber_loss(x, target, *, delta=1.0, reduction="mean"):
    """d^2 / 2 of the difference d, linear from `delta` on (Huber 1964)."""
    return reduced(_huber(x - target, delta), reduction)


@op
def smooth_l1_loss(x, target, *, beta=1.0, reduction="mean"):
    """The Huber loss over beta; |x - target| if beta is 0 (Girshick 2015)."""
    d = x - target
    return reduced(jnp.abs(d) if beta == 0 else _huber(d, beta) / beta, reduction)


def _huber(d, delta):
    size = jnp.abs(d)
    near = jnp.minimum(size, delta)
    return near * (size - 0.5 * near)


@op
def log_cosh_loss(x, target, *, reduction="mean"):
    """log(cosh(x - target)), finite for every finite difference."""
    return reduced(log_cosh(x - target), reduction)


@op
def log_cosh(x):
    """log(cosh(x))."""
    size = jnp.abs(x)
    series = jnp.square(x) * (0.5 - jnp.square(x) * (1 / 12 - jnp.square(x) / 45))
    return jnp.where(size < 1e-2, series, size + jnp.log1p(jnp.exp(-2 * size)) - math.log(2))


@log_cosh.vjp
def _(x, g):
    return g * jnp.tanh(x)


@op
def poisson_nll_loss(x, target, *, log_input=True, full=False, epsilon=1e-8, reduction="mean"):
    """exp(x) - target * x, or x - target * log(x + epsilon) for rates.

    `full` adds Stirling's approximation of log(target!) where target > 1.
    """
    loss = jnp.exp(x) - target * x if log_input else x - target * jnp.log(x + epsilon)
    if full:
        safe = jnp.where(target > 1, target, 1)
        stirling = safe * jnp.log(safe) - safe + 0.5 * jnp.log(2 * math.pi * safe)
        loss = loss + jnp.where(target > 1, stirling, 0)
    return reduced(loss, reduction)


@op
def gaussian_nll_loss(mean, target, variance, *, full=False, epsilon=1e-6, reduction="mean"):
    """(log(variance) + (mean - target)^2 / variance) / 2, variance `epsilon` at least."""
    variance = jnp.where(variance < epsilon, epsilon, variance)
    loss = 0.5 * (jnp.log(variance) + jnp.square(mean - target) / variance)
    return reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@op
def hinge_loss(x, target, *, reduction="mean"):
    """max(0, 1 - x * target), targets of -1 and 1."""
    return reduced(_positive(1 - x * target), reduction)


@op
def soft_margin_loss(x, target, *, reduction="mean"):
    """log(1 + exp(-x * target)), targets of -1 and 1."""
    y = -x * target
    return reduced(_positive(y) + jnp.log1p(jnp.exp(-jnp.abs(y))), reduction)


@op
def margin_ranking_loss(x, y, target, *, margin=0.0, reduction="mean"):
    """max(0, -target * (x - y) + margin), targets of -1 and 1."""
    return reduced(_positive(-target * (x - y) + margin), reduction)


@op
def hinge_embedding_loss(x, target, *, margin=1.0, reduction="mean"):
    """x where the target is 1, max(0, margin - x) where it is -1."""
    return reduced(jnp.where(target == 1, x, _positive(margin - x)), reduction)


@op
def multi_margin_loss(x, labels, *, margin=1.0, p=1, reduction="mean"):
    """The mean over other classes of max(0, margin - x[label] + x)^p: x [n, v], labels [n]."""
    chosen = jnp.arange(x.shape[1]) == labels[:, None]
    of_label = jnp.where(chosen, x, 0).sum(1, keepdims=True)
    each = jnp.where(chosen, 0, _positive(margin - of_label + x) ** p)
    return reduced(each.sum(1) / x.shape[1], reduction)
