"""Pooling and resizing: x [n, spatial..., c], as flax and `jax.lax` order dims by default."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.op import op
from dtorchjax.padding import extremes


def _windows(x, window, strides, padding):
    """(window, strides, padding) for every dim of x."""
    rank = x.ndim - 2
    window = (window,) * rank if isinstance(window, int) else tuple(window)
    strides = window if strides is None else strides
    strides = (strides,) * rank if isinstance(strides, int) else tuple(strides)
    if rank < 1 or len(window) != rank or len(strides) != rank:
        raise OpError(f"a window of {window} with strides {strides} does not fit x {x.shape}")
    if isinstance(padding, int):
        padding = ((padding, padding),) * rank
    if not isinstance(padding, str):
        padding = ((0, 0), *(tuple(p) for p in padding), (0, 0))
    return (1, *window, 1), (1, *strides, 1), padding


@op(upcast=False)
def max_pool(x, *, window, strides=None, padding="VALID"):
    """The greatest element of each window; among ties, the gradient goes to the first.

    `window` and `strides` (default: the window) are numbers or one per spatial dim; `padding` is
    "VALID", "SAME", a number, or (before, after) per spatial dim, and counts as -inf.
    """
    window, strides, padding = _windows(x, window, strides, padding)
    return lax.reduce_window(x, extremes(x.dtype)[0], lax.max, window, strides, padding)


@op
def avg_pool(x, *, window, strides=None, padding="VALID", count_padding=False):
    """The mean of each window; padding is counted only with `count_padding`. See `max_pool`."""
    window, strides, padding = _windows(x, window, strides, padding)
    total = lax.reduce_window(x, np.array(0, x.dtype), lax.add, window, strides, padding)
    if count_padding or padding == "VALID":
        return total / int(np.prod(window))
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    return total / lax.reduce_window(ones, np.array(0, x.dtype), lax.add, window, strides, padding)


@op
def lp_pool(x, *, p=2, window, strides=None, padding="VALID"):
    """(sum of |x|^p over each window)^(1/p); its gradient is 0 where it is 0. See `max_pool`."""
    window, strides, padding = _windows(x, window, strides, padding)
    size = jnp.abs(x)
    powers = size**p if p == 1 else jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** p)
    total = lax.reduce_window(powers, np.array(0, x.dtype), lax.add, window, strides, padding)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / p))


@op
def adaptive_avg_pool(x, *, size):
    """The mean over windows that cut each spatial dim into `size` parts, as equal as can be."""
    return _adaptive(x, size, lambda v, dim: v.mean(dim, keepdims=True))


@op(upcast=False)
def adaptive_max_pool(x, *, size):
    """The greatest element of windows that cut each spatial dim into `size` parts."""
    return _adaptive(x, size, lambda v, dim: v.max(dim, keepdims=True))


def _adaptive(x, size, reduce):
    size = (size,) * (x.ndim - 2) if isinstance(size, int) else tuple(size)
    for dim, parts in enumerate(size, 1):
        n = x.shape[dim]
        if not isinstance(n, int):
            raise OpError("adaptive pooling needs spatial dims of known size: windows depend on it")
        edges = [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
        pieces = [reduce(lax.slice_in_dim(x, a, b, axis=dim), dim) for a, b in edges]
        x = jnp.concatenate(pieces, dim)
    return x


@op
def interpolate(x, *, size, method="linear", antialias=False):
    """x resized to spatial `size`, as `jax.image.resize`: "nearest", "linear", "cubic", ..."""
    size = (size,) * (x.ndim - 2) if isinstance(size, int) else tuple(size)
    if len(size) != x.ndim - 2:
        raise OpError(f"size {size} does not fit the {x.ndim - 2} spatial dims of x {x.shape}")
    return jax.image.resize(x, (x.shape[0], *size, x.shape[-1]), method, antialias=antialias)


@op(upcast=False)
def pixel_shuffle(x, *, factor):
    """[n, h, w, c f f] -> [n, h f, w f, c] (Shi et al. 2016)."""
    n, h, w, c = x.shape
    x = x.reshape(n, h, w, c // factor**2, factor, factor)
    return x.transpose(0, 1, 4, 2, 5, 3).reshape(n, h * factor, w * factor, -1)


@op(upcast=False)
def pixel_unshuffle(x, *, factor):
    """[n, h f, w f, c] -> [n, h, w, c f f]: the reverse of `pixel_shuffle`."""
    n, h, w, c = x.shape
    x = x.reshape(n, h // factor, factor, w // factor, factor, c)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(n, h // factor, w // factor, c * factor**2)


@op(upcast=False)
def channel_shuffle(x, *, groups):
    """Channels [..., (g c)] in the order [..., (c g)] (Zhang et al. 2017)."""
    c = x.shape[-1]
    return jnp.swapaxes(x.reshape(*x.shape[:-1], groups, c // groups), -1, -2).reshape(x.shape)
