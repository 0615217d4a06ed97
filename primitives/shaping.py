"""Joining, splitting and rearranging arrays."""

from __future__ import annotations

from jax import numpy as jnp

from dtorchjax.numerics import one_axis
from dtorchjax.op import elementary, op


@op(upcast=False)
def concat(xs, *, axis=0):
    """A list of arrays joined along `axis`."""
    return jnp.concatenate(xs, axis)


@op(upcast=False)
def unbind(x, *, axis=0):
    """The slices of x along `axis`, without it, as a list."""
    axis = one_axis(x, axis)
    if not isinstance(x.shape[axis], int):
        raise ValueError(f"unbind needs axis {axis} of known size: it is the number of results")
    return [jnp.take(x, i, axis) for i in range(x.shape[axis])]


@op(upcast=False)
def flatten(x, *, start=0, stop=-1):
    """The dims from `start` to `stop`, both included, as one; [1] of a value without dims."""
    if x.ndim == 0:
        return x.reshape(1)
    start, stop = one_axis(x, start), one_axis(x, stop)
    if stop < start:
        raise ValueError(f"flatten: stop {stop} lies before start {start}")
    if stop == start:
        return x
    size = 1
    for n in x.shape[start : stop + 1]:
        size = size * n
    return x.reshape(*x.shape[:start], size, *x.shape[stop + 1 :])


@op(upcast=False)
def repeat_interleave(x, *, repeats, axis):
    """Every slice of x along `axis`, `repeats` times in a row."""
    return jnp.repeat(x, repeats, one_axis(x, axis))


@op(upcast=False)
def meshgrid(xs):
    """Vectors (or numbers) as arrays over all their combinations, first index first."""
    return jnp.meshgrid(*(x.reshape(-1) for x in xs), indexing="ij")


stack = elementary("stack", jnp.stack)
reshape = elementary("reshape", jnp.reshape)
transpose = elementary("transpose", jnp.transpose)
squeeze = elementary("squeeze", jnp.squeeze)
expand_dims = elementary("expand_dims", jnp.expand_dims)
broadcast_to = elementary("broadcast_to", jnp.broadcast_to)
split = elementary("split", jnp.split)
tile = elementary("tile", jnp.tile)
roll = elementary("roll", jnp.roll)
flip = elementary("flip", jnp.flip)
pad = elementary("pad", jnp.pad)
full_like = elementary("full_like", jnp.full_like)
