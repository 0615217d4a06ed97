"""Reductions, cumulative sums and the like. A reduction over a sharded dim is reduced at once, with
its collective in the plan."""

from __future__ import annotations

import jax
from jax import numpy as jnp

from dtorchjax.numerics import as_float, axes_of, count_of, expanded, sum_to
from dtorchjax.op import elementary, op
from dtorchjax.settled import settled


@op
def sum(x, *, axis=None, keepdims=False):
    """The sum along `axis` (None: all dims); half precision adds up in float32."""
    return settled(jnp.sum(x, axes_of(x, axis), keepdims=keepdims))


@sum.vjp
def _(x, g, *, axis, keepdims):
    return jnp.broadcast_to(expanded(g, axes_of(x, axis), keepdims), x.shape)


@op
def mean(x, *, axis=None, keepdims=False):
    """The mean along `axis` (None: all dims), over the global number of elements."""
    x = as_float(x)
    axes = axes_of(x, axis)
    return settled(x.sum(axes, keepdims=keepdims)) / count_of(x, axes)


@mean.vjp
def _(x, g, *, axis, keepdims):
    axes = axes_of(x, axis)
    return jnp.broadcast_to(expanded(g, axes, keepdims) / count_of(x, axes), x.shape)


@op
def var(x, *, axis=None, ddof=0, keepdims=False):
    """The mean square of x - mean along `axis`, over the number of elements less `ddof`."""
    return _var(as_float(x), axes_of(x, axis), ddof, keepdims)


def _centred(x, axes):
    """x less its mean, which is not known well enough at once where it is great."""
    near = x - x.sum(axes, keepdims=True) / count_of(x, axes)
    return near - near.sum(axes, keepdims=True) / count_of(x, axes)


def _var(x, axes, ddof, keepdims):
    centred = x - x.sum(axes, keepdims=True) / count_of(x, axes)
    total = jnp.square(jnp.abs(centred)).sum(axes, keepdims=keepdims)
    return settled(total) / (count_of(x, axes) - ddof)


@var.vjp
def _(x, g, *, axis, ddof, keepdims):
    axes = axes_of(x, axis)
    centred = _centred(x, axes)
    return expanded(g, axes, keepdims) * 2 * centred / (count_of(x, axes) - ddof)


@op
def std(x, *, axis=None, ddof=0, keepdims=False):
    """The square root of `var`; its gradient is 0 where it is 0."""
    return jnp.sqrt(_var(as_float(x), axes_of(x, axis), ddof, keepdims))


@std.vjp
def _(x, out, g, *, axis, ddof, keepdims):
    axes = axes_of(x, axis)
    out, g = expanded(out, axes, keepdims), expanded(g, axes, keepdims)
    centred = _centred(x, axes)
    slope = centred / jnp.where(out == 0, 1, out) / (count_of(x, axes) - ddof)
    return g * jnp.where(out == 0, 0, slope)


@op(upcast=False)
def any(x, *, axis=None, keepdims=False):
    """Whether an element along `axis` is not 0 (nan is not); a sum would let 1 and -1 cancel."""
    return settled(jnp.any(x != 0, axes_of(x, axis), keepdims=keepdims))


@op(upcast=False)
def all(x, *, axis=None, keepdims=False):
    """Whether no element along `axis` is 0."""
    return settled(jnp.all(x != 0, axes_of(x, axis), keepdims=keepdims))


@op(upcast=False)
def amax(x, *, axis=None, keepdims=False):
    """The greatest element along `axis`; ties share the gradient, nan wins."""
    return settled(jnp.max(x, axes_of(x, axis), keepdims=keepdims))


@op(upcast=False)
def amin(x, *, axis=None, keepdims=False):
    """The least element along `axis`; ties share the gradient, nan wins."""
    return settled(jnp.min(x, axes_of(x, axis), keepdims=keepdims))


@amax.vjp
def _(x, out, g, *, axis, keepdims):
    return _to_extremes(x, out, g, axis, keepdims)


@amin.vjp
def _(x, out, g, *, axis, keepdims):
    return _to_extremes(x, out, g, axis, keepdims)


def _to_extremes(x, out, g, axis, keepdims):
    axes = axes_of(x, axis)
    out, g = expanded(out, axes, keepdims), expanded(g, axes, keepdims)
    ties = (x == out) | (jnp.isnan(x) & jnp.isnan(out))
    return jnp.where(ties, g / jnp.maximum(ties.sum(axes, keepdims=True), 1).astype(g.dtype), 0)


@op
def prod(x, *, axis=None, keepdims=False):
    """The product along `axis` (None: all dims); its gradient does not divide by elements."""
    return settled(jnp.prod(x, axes_of(x, axis), keepdims=keepdims))


@prod.vjp
def _(x, g, *, axis, keepdims):
    # the product of all others: of those before times that of those after
    axes = axes_of(x, axis)
    kept = tuple(d for d in range(x.ndim) if d not in axes)
    rows = x.transpose(*kept, *axes).reshape(*(x.shape[d] for d in kept), -1)
    ones = jnp.ones((*rows.shape[:-1], 1), x.dtype)
    before = jnp.cumprod(jnp.concatenate([ones, rows], -1), -1)[..., :-1]
    after = jnp.cumprod(jnp.concatenate([ones, jnp.flip(rows, -1)], -1), -1)[..., :-1]
    others = (before * jnp.flip(after, -1)).reshape([x.shape[d] for d in (*kept, *axes)])
    back = [(*kept, *axes).index(d) for d in range(x.ndim)]
    return expanded(g, axes, keepdims) * others.transpose(back)


@op
def median(x, *, axis=None, keepdims=False):
    """The middle element along `axis`, the mean of the two middle ones of an even number."""
    return jnp.median(as_float(x), axes_of(x, axis), keepdims=keepdims)


@op(upcast=False)
def count_nonzero(x, *, axis=None, keepdims=False):
    """The number of elements along `axis` that are not 0, an integer."""
    return settled(jnp.sum((x != 0).astype(jnp.int32), axes_of(x, axis), keepdims=keepdims))


@op(upcast=False)
def clip(x, min=None, max=None):
    """x, at least `min` and at most `max` (the maximum if they cross); nan stays nan.

    At a bound the gradient is x's alone.
    """
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


@clip.vjp
def _(x, min, max, g):
    raised = x if min is None else jnp.where(x < min, min, x)
    above = False if max is None else raised > max
    below = False if min is None else (x < min) & ~jnp.asarray(above)
    inside = ~(jnp.asarray(above) | jnp.asarray(below))
    return (
        sum_to(jnp.where(inside, g, 0), x.shape),
        None if min is None else sum_to(jnp.where(below, g, 0), min.shape),
        None if max is None else sum_to(jnp.where(above, g, 0), max.shape),
    )


@op
def lerp(x, y, weight):
    """x + weight * (y - x), exact at both ends."""
    near = x + weight * (y - x)
    return jnp.where(weight < 0.5, near, y - (y - x) * (1 - weight))


@op
def add_n(xs):
    """The sum of a list of arrays of one shape, in float32 for half precision."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@op
def moving_average(old, new, *, decay=0.9):
    """decay * old + (1 - decay) * new."""
    return decay * old + (1 - decay) * new


max, min = amax, amin
cumsum = elementary("cumsum", jnp.cumsum)
cumprod = elementary("cumprod", jnp.cumprod)
cummax = elementary("cummax", jax.lax.cummax)
cummin = elementary("cummin", jax.lax.cummin)
cumlogsumexp = elementary("cumlogsumexp", jax.lax.cumlogsumexp)
argmax = elementary("argmax", jnp.argmax)
argmin = elementary("argmin", jnp.argmin)
sort = elementary("sort", jnp.sort)
argsort = elementary("argsort", jnp.argsort)
