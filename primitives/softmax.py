"""Softmax and its kin. A `mask` is True where an element counts; it broadcasts to x."""

from __future__ import annotations

from jax import numpy as jnp

from dtorchjax.numerics import as_float, axes_of, count_of, expanded, finite_max
from dtorchjax.op import op


def _exponentials(x, mask, axes):
    """exp(x - max) and its sum; an element that is not counted gives 0."""
    shift = x - finite_max(x, axes, mask)
    if mask is not None:
        shift = jnp.where(mask, shift, -jnp.inf)
    weights = jnp.exp(shift)
    return shift, weights, weights.sum(axes, keepdims=True)


@op
def softmax(x, mask=None, *, axis=-1):
    """exp(x) over its sum along `axis` (one or several dims; None: all).

    Where nothing along `axis` counts (the mask, or all -inf) the result is 0.
    """
    x = as_float(x)
    _, weights, total = _exponentials(x, mask, axes_of(x, axis))
    return weights / jnp.where(total == 0, 1, total)


@softmax.vjp
def _(x, out, g, *, axis):
    weighted = out * g
    return weighted - out * weighted.sum(axes_of(out, axis), keepdims=True), None


@op
def log_softmax(x, mask=None, *, axis=-1):
    """log(softmax(x)); -inf where an element does not count."""
    x = as_float(x)
    shift, _, total = _exponentials(x, mask, axes_of(x, axis))
    return shift - jnp.log(jnp.where(total == 0, 1, total))


@log_softmax.vjp
def _(mask, out, g, *, axis):
    if mask is not None:
        g = jnp.where(mask, g, 0)
    return g - jnp.exp(out) * g.sum(axes_of(out, axis), keepdims=True), None


@op(saves=("shift", "log_total"))
def logsumexp(x, mask=None, *, axis=None, keepdims=False):
    """log(sum(exp(x))) along `axis` (None: all dims); -inf where nothing counts."""
    return _log_sum(as_float(x), mask, axis, keepdims, 0)


@op(saves=("shift", "log_total"))
def log_mean_exp(x, *, axis=None, keepdims=False):
    """log(mean(exp(x))) along `axis` (None: all dims)."""
    x = as_float(x)
    return _log_sum(x, None, axis, keepdims, jnp.log(count_of(x, axes_of(x, axis))))


def _log_sum(x, mask, axis, keepdims, log_count):
    axes = axes_of(x, axis)
    shift = finite_max(x, axes, mask)
    shifted = x - shift if mask is None else jnp.where(mask, x - shift, -jnp.inf)
    log_total = jnp.log(jnp.exp(shifted).sum(axes, keepdims=True))
    found = log_total - log_count + shift
    return found if keepdims else found.squeeze(axes), shift, log_total


@logsumexp.vjp
def _(x, mask, shift, log_total, g, *, axis, keepdims):
    return _softmax_of_sum(x, mask, shift, log_total, g, axis, keepdims), None


@log_mean_exp.vjp
def _(x, shift, log_total, g, *, axis, keepdims):
    return _softmax_of_sum(x, None, shift, log_total, g, axis, keepdims)


def _softmax_of_sum(x, mask, shift, log_total, g, axis, keepdims):
    """g * softmax(x); the shift and the rest of the logarithm apart, or great ones round it off."""
    axes = axes_of(x, axis)
    infinite = jnp.isinf(log_total)
    weights = jnp.exp(jnp.where(infinite, -jnp.inf, x - shift - log_total))
    top = infinite & (x == log_total) & (x > 0)  # elements that are inf share the gradient
    weights = jnp.where(top, 1 / jnp.maximum(top.sum(axes, keepdims=True), 1), weights)
    weights = jnp.where(jnp.isnan(log_total), log_total, weights)
    return expanded(g, axes, keepdims) * (weights if mask is None else jnp.where(mask, weights, 0))
