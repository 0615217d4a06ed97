"""Normalisations. Variances are computed in two passes, statistics in float32 at least."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.numerics import axes_of, channel_shape, count_of, moments, one_axis, sum_to
from dtorchjax.op import op


def _affine(x, scale, bias):
    if scale is not None:
        x = x * scale
    return x if bias is None else x + bias


def _pulled(centred, inverse, g, scale, axes):
    """The gradients of x and scale of `scale * centred * inverse`, centred = x - mean."""
    normal = centred * inverse
    inner = g if scale is None else g * scale
    count = count_of(centred, axes)
    mean = inner.sum(axes, keepdims=True) / count
    slope = (inner * normal).sum(axes, keepdims=True) / count
    dscale = None if scale is None else sum_to(g * normal, scale.shape)
    return inverse * (inner - mean - normal * slope), dscale


def _with_statistics(g, centred, axes):
    """(cotangent of the result, gradient of x by mean and variance) of results with statistics."""
    if not isinstance(g, tuple):
        return g, 0
    g, gmean, gvar = g
    gmean, gvar = (v.reshape(_kept(centred, axes)) for v in (gmean, gvar))
    return g, (gmean + 2 * centred * gvar) / count_of(centred, axes)


def _kept(x, axes):
    return [1 if d in axes else n for d, n in enumerate(x.shape)]


@op(saves=("centre", "offset", "inverse"))
def layer_norm(x, scale=None, bias=None, *, axis=-1, epsilon=1e-6, statistics=False):
    """(x - mean) / sqrt(variance + epsilon) along `axis`, then * scale + bias (Ba et al. 2016).

    scale and bias broadcast to x. With `statistics` the result is (normalised, mean, variance), the
    last two without the dims of `axis`, in float32 for half precision.
    """
    axes = axes_of(x, axis)
    centre, offset, var = moments(x, axes)
    inverse = lax.rsqrt(var + epsilon)
    out = _affine((x - centre - offset) * inverse, scale, bias)
    if statistics:
        out = (out, (centre + offset).squeeze(axes), var.squeeze(axes))
    return out, centre, offset, inverse


@layer_norm.vjp
def _(x, scale, bias, centre, offset, inverse, g, *, axis):
    axes, centred = axes_of(x, axis), x - centre - offset
    g, more = _with_statistics(g, centred, axes)
    dx, dscale = _pulled(centred, inverse, g, scale, axes)
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


def _grouped(x, groups, axis):
    """x with the channels' dim in two, (groups, rest), and the dims of one group's statistics."""
    axis = one_axis(x, axis)
    if x.ndim < 2:
        raise OpError(f"group_norm needs a batch dim and a channel dim, x has {x.ndim} dims")
    if x.shape[axis] % groups != 0:
        raise OpError(f"{x.shape[axis]} channels are not known to divide into {groups} groups")
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    axes = tuple(d for d in range(1, x.ndim + 1) if d != axis)
    return x.reshape(shape), axes


@op(saves=("centre", "offset", "inverse"))
def group_norm(x, scale=None, bias=None, *, groups, axis=-1, epsilon=1e-6, statistics=False):
    """Normalises groups of channels of each example (Wu and He 2018).

    x [n, ..., c] (the channels' dim is `axis`), scale and bias [c]. With `statistics` the result is
    (normalised, mean [n, groups], variance [n, groups]).
    """
    parts, axes = _grouped(x, groups, axis)
    centre, offset, var = moments(parts, axes)
    inverse = lax.rsqrt(var + epsilon)
    normal = ((parts - centre - offset) * inverse).reshape(x.shape)
    shape = channel_shape(x, axis)
    out = _affine(normal, *(v if v is None else v.reshape(shape) for v in (scale, bias)))
    if statistics:
        out = (out, (centre + offset).squeeze(axes), var.squeeze(axes))
    return out, centre, offset, inverse


@group_norm.vjp
def _(x, scale, bias, centre, offset, inverse, g, *, groups, axis):
    parts, axes = _grouped(x, groups, axis)
    centred = parts - centre - offset
    g, more = _with_statistics(g, centred, axes)
    shape = channel_shape(x, axis)
    inner = g if scale is None else g * scale.reshape(shape)
    dx, _ = _pulled(centred, inverse, inner.reshape(parts.shape), None, axes)
    normal = (centred * inverse).reshape(x.shape)
    dscale = None if scale is None else sum_to(g * normal, shape).reshape(scale.shape)
    dbias = None if bias is None else sum_to(g, shape).reshape(bias.shape)
    return (dx + more).reshape(x.shape), dscale, dbias


@op(saves=("centre", "offset", "inverse"))
def instance_norm(x, scale=None, bias=None, *, axis=-1, epsilon=1e-6):
    """Normalises each channel of each example (Ulyanov et al. 2016).

    x [n, ..., c] (the channels' dim is `axis`), scale and bias [c].
    """
    axes = _instance_axes(x, axis)
    centre, offset, var = moments(x, axes)
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
    dx, dscale = _pulled(x - centre - offset, inverse, g, wide, _instance_axes(x, axis))
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
        centre, offset, spread = moments(x, axes)
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
        dx, _ = _pulled(centred, inverse, inner, None, axes)
        return dx, dscale, dbias, momentum * gmean, momentum * gvar
    dmean = -(inner * inverse).sum(axes).reshape(mean.shape)
    dvar = (-0.5 * inner * normal * inverse * inverse).sum(axes).reshape(mean.shape)
    return inner * inverse, dscale, dbias, gmean + dmean, gvar + dvar
