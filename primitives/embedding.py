"""Looking things up: tables, rows, masks."""

from __future__ import annotations

import jax
from jax import numpy as jnp

from dtorchjax.numerics import one_axis
from dtorchjax.op import elementary, op


@op(upcast=False)
def embedding(ids, table, *, padding_idx=None):
    """table[ids]: ids [...] integers, table [n, ...].

    Row `padding_idx` counts as zeros and gets no gradient. An id outside of the table gives nan
    (the greatest integer in an integer table); a negative one counts from the end.
    """
    rows = jnp.take(table, ids, axis=0)
    if padding_idx is None:
        return rows
    padding = padding_idx % table.shape[0]
    is_padding = (ids == padding) | (ids == padding - table.shape[0])
    return jnp.where(jnp.expand_dims(is_padding, range(ids.ndim, rows.ndim)), 0, rows)


@op(upcast=False)
def one_hot(ids, *, num_classes, dtype="float32", axis=-1):
    """1 where the class is the id, else 0; all 0 for an id that is no class."""
    dim = axis % (ids.ndim + 1)
    classes = jnp.arange(num_classes, dtype=ids.dtype)
    classes = classes.reshape([-1 if d == dim else 1 for d in range(ids.ndim + 1)])
    return (jnp.expand_dims(ids, dim) == classes).astype(dtype)


@op(upcast=False)
def index_select(x, index, *, axis=0):
    """The slices of x at `index` [k] along `axis`."""
    return jnp.take(x, index, axis=one_axis(x, axis))


@op(upcast=False)
def index_sample(x, index):
    """From each row of x [n, m] the elements at index [n, k]."""
    return jnp.take_along_axis(x, index, axis=1)


@op(upcast=False)
def put_along_axis(x, indices, values, *, axis, mode=None):
    """x with `values` written at `indices` along `axis`; of two at one place either may stay.

    All have as many dims as x; indices and values broadcast to x but for `axis`. A batch for each
    element of the other dims, so that these may be sharded. `mode` is that of `x.at[...].set`.
    """
    dim = one_axis(x, axis)
    others = [n for d, n in enumerate(x.shape) if d != dim]
    ahead = [jnp.moveaxis(part, dim, -1) for part in (x, indices, values)]
    count = max(ahead[1].shape[-1], ahead[2].shape[-1])
    index, value = (jnp.broadcast_to(part, (*others, count)) for part in ahead[1:])
    put = lambda row, i, v: row.at[i].set(v.astype(row.dtype), mode=mode)  # noqa: E731
    for _ in others:
        put = jax.vmap(put)
    return jnp.moveaxis(put(ahead[0], index, value), -1, dim)


@op(upcast=False)
def masked_fill(x, mask, value):
    """x, or `value` where the mask is True; a mask broadcasts."""
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@op(upcast=False)
def masked_select(x, mask, *, size, fill_value=0):
    """The first `size` elements of x where the mask is True, in order; `fill_value` after the last.

    The size is static, as results of programs have one shape.
    """
    x, mask = jnp.broadcast_arrays(x, mask)
    # positions are integers: a cumulative sum in the dtype of x would miscount
    mask = mask.ravel()
    position = jnp.where(mask, jnp.cumsum(mask.astype(jnp.int32)) - 1, size)
    return jnp.full(size, fill_value, x.dtype).at[position].set(x.ravel(), mode="drop")


@op(upcast=False)
def rotary_embedding(x, positions, *, base=10000.0, interleaved=False):
    """Rotates pairs of features by their position (Su et al. 2021, RoFormer).

    x [..., s, h, d] with d even, positions [..., s]; a pair is (i, i + d/2), or (2i, 2i + 1) if
    `interleaved`. Angles are computed in float32 at least.
    """
    size = x.shape[-1]
    if size % 2 != 0:
        raise ValueError(f"rotary_embedding needs an even number of features, not {size}")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(size // 2, dtype=wide) * 2 / size)
    angle = positions.astype(wide)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if interleaved:
        a, b = x[..., 0::2].astype(wide), x[..., 1::2].astype(wide)
    else:
        a, b = (half.astype(wide) for half in jnp.split(x, 2, -1))
    turned = a * cos - b * sin, a * sin + b * cos
    out = jnp.stack(turned, -1).reshape(x.shape) if interleaved else jnp.concatenate(turned, -1)
    return out.astype(x.dtype)


take = elementary("take", jnp.take)
take_along_axis = elementary("take_along_axis", jnp.take_along_axis)
where = elementary("where", jnp.where)
nonzero = elementary("nonzero", jnp.nonzero)
top_k = elementary("top_k", jax.lax.top_k)
