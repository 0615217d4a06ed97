"""Primitives that move data: every kind of partial passes through them."""

from __future__ import annotations

from jax import numpy as jnp

from dtorchjax.notation import Dims
from dtorchjax.registry import local, rule

moves = {"linear": "0", "moves": True}


def renamed(x: Dims, dims, prefix: str) -> Dims:
    """Dims whose size changes get a factor of their own, needed whole."""
    return x.shared(list(dims), [f"{prefix}{d}!" for d in dims])


@rule("transpose", **moves)
def _(x, *, permutation, **_):
    return f"{x} -> {x[permutation]}"


@rule("squeeze", **moves)
def _(x, *, dimensions, **_):
    """b 1 n -> b n"""
    return f"{x.shared(dimensions, ['1'] * len(dimensions))} -> {x.drop(dimensions)}"


@rule("rev", **moves)
def _(x, *, dimensions, **_):
    x = x.whole(*dimensions)
    return f"{x} -> {x}"


@rule("broadcast_in_dim", **moves)
def _(x, *, broadcast_dimensions, out, **_):
    """n -> b n; a dim of size 1 may become one of any size"""
    result = out[0]
    same = [x.shape[d] == result.shape[b] for d, b in enumerate(broadcast_dimensions)]
    factors = [
        result.factors[b] if s else "1" for s, b in zip(same, broadcast_dimensions, strict=True)
    ]
    return f"{' '.join(factors) or '-'} -> {result}"


@local("broadcast_in_dim")
def _(call, x):
    return call.bind(x, shape=call.out_shape())


@rule("empty2 iota")
def _(*, out, **_):
    return f"-> {out[0]}"


@rule("dim_as_value")
def _(**_):
    """-> - : the number that a symbolic dim of jax.export stands for, the global one"""
    return "-> -"


@local("iota")
def _(call):
    dim, shape = call.params["dimension"], call.out_shape()
    index, parts = call.shard(call.outputs[0], dim)
    if parts == 1:
        return call.bind(shape=shape)
    # counted in integers: a small type would round its counts and the offset, one after the other
    count = call.bind(shape=shape, dtype=jnp.dtype(jnp.int32)) + index * shape[dim]
    return count.astype(call.out_avals[0].dtype)


@rule("reshape", **moves)
def _(x, *, new_sizes, dimensions=None, **_):
    """b s d -> b t: the leading dims of two groups of equal size share a factor

    Equal parts of the leading dims are then the same stretch of elements on both sides. With
    `dimensions` the operand's dims are taken in that order (jnp.median, jnp.quantile).
    """
    if 0 in x.shape:
        return f"{x.whole(*range(len(x)))} -> {' '.join(f'b{d}!' for d in range(len(new_sizes)))}"
    order = range(len(x)) if dimensions is None else dimensions
    sizes = [x.shape[d] for d in order]
    left, right = [], []
    for number, (source, target) in enumerate(reshape_groups(sizes, new_sizes)):
        for side, names, shape in ((source, left, sizes), (target, right, new_sizes)):
            leads = next((d for d in side if shape[d] > 1), None)
            tag = "ab"[names is right]
            names += [
                f"g{number}" if d == leads else f"{tag}{d}!" if shape[d] > 1 else "1" for d in side
            ]
    left = [left[list(order).index(d)] for d in range(len(x))]
    return f"{' '.join(left) or '-'} -> {' '.join(right) or '-'}"


def reshape_groups(source, target):
    """Consecutive dims of both shapes with equal products, as pairs of lists of dims."""
    i = j = 0
    while i < len(source) or j < len(target):
        first = i, j
        left = right = 1
        while left != right or (i, j) == first:
            if i < len(source) and (left <= right or j == len(target)):
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        yield list(range(first[0], i)), list(range(first[1], j))


@local("reshape")
def _(call, x):
    return call.bind(x, new_sizes=call.out_shape())


@rule("tile", **moves)
def _(x, *, reps, **_):
    repeated = [d for d, count in enumerate(reps) if count != 1]
    return f"{x.whole(*repeated)} -> {renamed(x, repeated, 'tiled')}"


def every_part(start, step, full, result) -> bool:
    """A slice that takes the same elements of every part: all, or each `step`-th one."""
    return start < step and result * step == full


@rule("slice", **moves)
def _(x, *, start_indices, strides, out, **_):
    """b n -> b cut!, but b n -> b n for x[:, ::2]"""
    steps = strides or (1,) * len(x)
    parts = zip(start_indices, steps, x.shape, out[0].shape, strict=True)
    cut = [
        d for d, (start, step, *sizes) in enumerate(parts) if not every_part(start, step, *sizes)
    ]
    return f"{x.whole(*cut)} -> {renamed(x, cut, 'cut')}"


@local("slice")
def _(call, x):
    steps = call.params["strides"] or (1,) * x.ndim
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    parts = zip(starts, steps, call.in_avals[0].shape, call.out_avals[0].shape, strict=True)
    limits = [
        x.shape[d] if every_part(start, step, *sizes) else limits[d]
        for d, (start, step, *sizes) in enumerate(parts)
    ]
    return call.bind(x, limit_indices=tuple(limits))


@rule("pad", linear="jointly", moves=True)
def _(x, value, *, padding_config, **_):
    padded = [d for d, config in enumerate(padding_config) if tuple(config) != (0, 0, 0)]
    return f"{x.whole(*padded)}, - -> {renamed(x, padded, 'padded')}"


@rule("concatenate", linear="jointly", moves=True)
def _(*operands, dimension, **_):
    first = operands[0]
    parts = [first.shared([dimension], [f"part{i}!"]) for i in range(len(operands))]
    return f"{', '.join(map(str, parts))} -> {first.shared([dimension], ['joined!'])}"


@rule("split", **moves)
def _(x, *, axis, sizes, **_):
    parts = [x.shared([axis], [f"part{i}!"]) for i in range(len(sizes))]
    return f"{x.whole(axis)} -> {', '.join(map(str, parts))}"


@rule("stack", linear="jointly", moves=True)
def _(*operands, axis, **_):
    first = operands[0]
    result = [*first[:axis], "stacked!", *first[axis:]]
    return f"{', '.join([str(first)] * len(operands))} -> {' '.join(result)}"


@rule("unstack", **moves)
def _(x, *, axis, out, **_):
    return f"{x.whole(axis)} -> {', '.join([str(x.drop([axis]))] * len(out))}"


@rule("dynamic_slice", **moves)
def _(x, *starts, slice_sizes, **_):
    cut = [d for d, size in enumerate(slice_sizes) if size != x.shape[d]]
    scalars = ", -" * len(starts)
    return f"{x.whole(*cut)}{scalars} -> {renamed(x, cut, 'cut')}"


def clamped(starts, full, sizes):
    """Starts inside the array, said twice: XLA on the CPU (jaxlib 0.10) merges this slice with one
    that a redistribution makes of its result, and then forgets to clamp.
    """
    return [
        jnp.clip(start.astype(jnp.result_type(start, jnp.int32)), 0, n - size)
        for start, n, size in zip(starts, full, sizes, strict=True)
    ]


@local("dynamic_slice")
def _(call, x, *starts):
    starts = clamped(starts, call.in_avals[0].shape, call.params["slice_sizes"])
    return call.bind(x, *starts, slice_sizes=call.out_shape())


@local("dynamic_update_slice")
def _(call, x, update, *starts):
    return call.bind(x, update, *clamped(starts, call.in_avals[0].shape, call.in_avals[1].shape))


@rule("dynamic_update_slice", linear="0 1", moves=True)
def _(x, update, *starts, **_):
    cut = [d for d, size in enumerate(update.shape) if size != x.shape[d]]
    x = x.whole(*cut)
    return f"{x}, {renamed(x, cut, 'cut')}{', -' * len(starts)} -> {x}"
