"""Normalisations. Variances are computed in two passes, statistics in float32 at least."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.numerics import (
    average_over,
    axes_of,
    channel_shape,
    count_of,
    moments,
    one_axis,
    sum_to,
)  # fmt: skip
from dtorchjax.op import op


def _affine(x, scale, bias):
    if scale is not None:
        x = x * scale
    return x if bias is None else x + bias


def _pulled(centred, inverse, g, scale, average):
    """The gradients of x and scale of `scale * centred * inverse`, centred = x - mean."""
    normal = centred * inverse
    inner = g if scale is None else g * scale
    dx = inverse * (inner - average(inner) - normal * average(inner * normal))
    return dx, None if scale is None else sum_to(g * normal, scale.shape)


def _with_statistics(g, centred, spread, count):
    """(cotangent of the result, gradient of x by mean and variance) of results with statistics.

    `spread` gives a cotangent of statistics the dims of x.
    """
    if not isinstance(g, tuple):
        return g, 0
    g, gmean, gvar = g
    return g, (spread(gmean) + 2 * centred * spread(gvar)) / count


@op(saves=("centre", "offset", "inverse"))
def layer_norm(x, scale=None, bias=None, *, axis=-1, epsilon=1e-6, statistics=False):
    """(x - mean) / sqrt(variance + epsilon) along `axis`, then * scale + bias (Ba et al. 2016).

    scale and bias broadcast to x. With `statistics` the result is (normalised, mean, variance), the
    last two without the dims of `axis`, in float32 for half precision.
    """
    axes = axes_of(x, axis)
    centre, offset, var = moments(x, average_over(x, axes))
    inverse = lax.rsqrt(var + epsilon)
    out = _affine((x - centre - offset) * inverse, scale, bias)
    if statistics:
        out = (out, (centre + offset).squeeze(axes), var.squeeze(axes))
    return out, centre, offset, inverse


@layer_norm.vjp
def _(x, scale, bias, centre, offset, inverse, g, *, axis):
    axes, centred = axes_of(x, axis), x - centre - offset
    spread = lambda value: jnp.expand_dims(value, axes)  # noqa: E731
    g, more = _with_statistics(g, centred, spread, count_of(x, axes))
    dx, dscale = _pulled(centred, inverse, g, scale, average_over(x, axes))
    return dx + more, dscale, None if bias is None else sum_to(g, bias.shape)


@op(saves=("inverse",))
def rms_norm(x, scale=None, *, axis=-1, epsilon=1e-6):
    """x / sqrt(mean(x^2) + epsilon) along `axis`, then * scale (Zhang and Sennrich 2019)."""
    axes = axes_of(x, axis)
    inverse = lax.rsqrt(jnp.square(x).sum(axes, keepdims=True) / count_of(x, axes) + epsilon)
    return _affine(x * inverse, scale, None), inverse


@rms_norm.vjp
def _(x, scale, inverse, g, *, axis):
    axes = axes_of(x, axis)
    normal = x * inverse
    inner = g if scale is None else g * scale
    slope = (inner * normal).sum(axes, keepdims=True) / count_of(x, axes)
    dscale = None if scale is None else sum_to(g * normal, scale.shape)
    return inverse * (inner - normal * slope), dscale


class _Groups:
    """The statistics of groups of channels. Sums are over each channel first, and then over the
    channels of a group: wide rows of x are added up, and a channel's dim is never cut in two."""

    def __init__(self, x, groups, axis):
        axis = one_axis(x, axis)
        if x.ndim < 2:
            raise OpError(f"group_norm needs a batch dim and a channel dim, x has {x.ndim} dims")
        if x.shape[axis] % groups != 0:
            raise OpError(f"{x.shape[axis]} channels are not known to divide into {groups} groups")
        self.within = tuple(d for d in range(1, x.ndim) if d != axis)
        self.parts = (x.shape[0], groups, x.shape[axis] // groups)
        self.wide = [n if d in (0, axis) else 1 for d, n in enumerate(x.shape)]
        self.count = count_of(x, (*self.within, axis)) / groups

    def average(self, value):
        """The mean of each group, [n, 1, ..., c]: once for each of its channels."""
        return self.spread(value.sum(self.within).reshape(self.parts).sum(2) / self.count)

    def spread(self, statistic):
        """[n, groups] as [n, 1, ..., c]."""
        return jnp.broadcast_to(statistic[..., None], self.parts).reshape(self.wide)

    def each(self, value):
        """[n, 1, ..., c] as [n, groups]."""
        return value.reshape(self.parts)[..., 0]


@op(saves=("centre", "offset", "inverse"))
def group_norm(x, scale=None, bias=None, *, groups, axis=-1, epsilon=1e-6, statistics=False):
    """Normalises groups of channels of each example (Wu and He 2018).

    x [n, ..., c] (the channels' dim is `axis`), scale and bias [c]. With `statistics` the result is
    (normalised, mean [n, groups], variance [n, groups]).
    """
    of = _Groups(x, groups, axis)
    centre, offset, var = moments(x, of.average)
    inverse = lax.rsqrt(var + epsilon)
    shape = channel_shape(x, axis)
    parameters = (v if v is None else v.reshape(shape) for v in (scale, bias))
    out = _affine((x - centre - offset) * inverse, *parameters)
    if statistics:
        out = (out, of.each(centre + offset), of.each(var))
    return out, centre, offset, inverse


@group_norm.vjp
def _(x, scale, bias, centre, offset, inverse, g, *, groups, axis):
    of, shape, centred = _Groups(x, groups, axis), channel_shape(x, axis), x - centre - offset
    g, more = _with_statistics(g, centred, of.spread, of.count)
    wide = None if scale is None else scale.reshape(shape)
    dx, dscale = _pulled(centred, inverse, g, wide, of.average)
    dscale = None if scale is None else dscale.reshape(scale.shape)
    return dx + more, dscale, None if bias is None else sum_to(g, shape).reshape(bias.shape)


@op(saves=("centre", "offset", "inverse"))
def instance_norm(x, scale=None, bias=None, *, axis=-1, epsilon=1e-6):
    """Normalises each channel of each example (Ulyanov et al. 2016).

    x [n, ..., c] (the channels' dim is `axis`), scale and bias [c].
    """
    centre, offset, var = moments(x, average_over(x, _instance_axes(x, axis)))
    inverse = lax.rsqrt(var + epsilon)
    shape = channel_shape(x, axis)
    parameters = (v if v is None else v.reshape(shape) for v in (scale, bias))
    return _affine((x - centre - offset) * inverse, *parameters), centre, offset, inverse


def _instance_axes(x, axis):
    axis = one_axis(x, axis)
    return tuple(d for d in range(1, x.ndim) if d != axis)


@instance_norm.vjp
def _(x, scale, bias, centre, offset, inverse, g, *, axis):
    shape = channel_shape(x, axis)
    wide = None if scale is None else scale.reshape(shape)
    average = average_over(x, _instance_axes(x, axis))
    dx, dscale = _pulled(x - centre - offset, inverse, g, wide, average)
    dscale = None if scale is None else dscale.reshape(scale.shape)
    return dx, dscale, None if bias is None else sum_to(g, shape).reshape(bias.shape)


@op(saves=("centre", "offset", "inverse"))
def batch_norm(x, scale, bias, mean, var, *, train=True, axis=-1, momentum=0.9, epsilon=1e-5):
    """Normalises each channel over the batch (Ioffe and Szegedy 2015).

    x [n, ..., c]; scale, bias (or None), running mean and var [c]. The result is (normalised, mean,
    var): in training the batch is normalised by its own statistics and the new running ones are
    momentum * old + (1 - momentum) * batch; else the running ones are used and returned. They carry
    no gradient in training, and are float32 where they came in half precision.
    """
    axes, shape = _batch_axes(x, axis), channel_shape(x, axis)
    if train:
        centre, offset, spread = moments(x, average_over(x, axes))
        new = [
            momentum * old + (1 - momentum) * lax.stop_gradient(now).reshape(old.shape)
            for old, now in ((mean, centre + offset), (var, spread))
        ]
    else:
        centre, spread, new = mean.reshape(shape), var.reshape(shape), [mean, var]
        offset = jnp.zeros_like(centre)
    inverse = lax.rsqrt(spread + epsilon)
    parameters = (v if v is None else v.reshape(shape) for v in (scale, bias))
    return (_affine((x - centre - offset) * inverse, *parameters), *new), centre, offset, inverse


def _batch_axes(x, axis):
    return tuple(d for d in range(x.ndim) if d != one_axis(x, axis))


@batch_norm.vjp
def _(x, scale, bias, mean, centre, offset, inverse, g, *, train, axis, momentum):
    g, gmean, gvar = g
    axes, shape = _batch_axes(x, axis), channel_shape(x, axis)
    centred = x - centre - offset
    normal = centred * inverse
    inner = g if scale is None else g * scale.reshape(shape)
    dscale = None if scale is None else sum_to(g * normal, shape).reshape(scale.shape)
    dbias = None if bias is None else sum_to(g, shape).reshape(bias.shape)
    if train:
        dx, _ = _pulled(centred, inverse, inner, None, average_over(x, axes))
        return dx, dscale, dbias, momentum * gmean, momentum * gvar
    dmean = -(inner * inverse).sum(axes).reshape(mean.shape)
    dvar = (-0.5 * inner * normal * inverse * inverse).sum(axes).reshape(mean.shape)
    return inner * inverse, dscale, dbias, gmean + dmean, gvar + dvar
