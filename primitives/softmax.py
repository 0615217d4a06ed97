"""Softmax and its kin. A `mask` is True where an element counts; it broadcasts to x."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax.numerics import as_float, axes_of, count_of, expanded, finite_max
from dtorchjax.op import op


def _shifted(x, mask, axes):
    """x less its greatest element that counts; -inf where an element does not count."""
    if mask is None:  # nothing to guard: a select here would run for every element
        return x - lax.stop_gradient(jnp.max(x, axes, keepdims=True, initial=-jnp.inf))
    return jnp.where(mask, x - finite_max(x, axes, mask), -jnp.inf)


def _safe_total(weights, mask, axes):
    total = weights.sum(axes, keepdims=True)
    return total if mask is None else jnp.where(total == 0, 1, total)


@op
def softmax(x, mask=None, *, axis=-1):
    """exp(x) over its sum along `axis` (one or several dims; None: all).

    0 where the mask leaves nothing along `axis`. Without a mask, a row that is all -inf or holds
    inf gives nan, as in `jax.nn.softmax`.
    """
    axes = axes_of(x, axis)
    weights = jnp.exp(_shifted(as_float(x), mask, axes))
    return weights / _safe_total(weights, mask, axes)


@softmax.vjp
def _(out, g, *, axis):
    weighted = out * g
    return weighted - out * weighted.sum(axes_of(out, axis), keepdims=True), None


@op
def log_softmax(x, mask=None, *, axis=-1):
    """log(softmax(x)); -inf where an element does not count."""
    axes = axes_of(x, axis)
    shifted = _shifted(as_float(x), mask, axes)
    return shifted - jnp.log(_safe_total(jnp.exp(shifted), mask, axes))


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
    """g * softmax(x); the shift and the rest of the logarithm apart, or great ones round it off.

    0 where the sum is 0; nan at elements that are inf, as JAX has it.
    """
    log_total = jnp.where(log_total == -jnp.inf, jnp.inf, log_total)
    weights = jnp.exp(x - shift - log_total)
    weights = weights if mask is None else jnp.where(mask, weights, 0)
    return expanded(g, axes_of(x, axis), keepdims) * weights
