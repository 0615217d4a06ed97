"""Sorting along a dim that is cut: devices merge their sorted parts in pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax import lax
from jax import numpy as jnp

from dtorchjax import exchange
from dtorchjax.exchange import Span, by_permute, entry
from dtorchjax.padding import neutral
from dtorchjax.parts import is_even
from dtorchjax.registry import in_mesh_order, local, rule


@rule("sort")
def _(*operands, dimension, is_stable, num_keys, **_):
    """b k!, b k! -> b k!, b k!: what is sorted and what is carried along share their dims

    Where k is cut, pairs of devices merge their parts in rounds, if the order of ties is known.
    """
    first, count = operands[0], len(operands)
    text = ", ".join([str(first.whole(dimension))] * count)
    known = is_stable or count == num_keys
    return f"{text} -> {text}", by_permute(first, [dimension], count, count) if known else []


def network(n: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs that compare, by rounds, of Batcher's sorting network (1968) for any number.

    As Knuth has it (volume 3, 5.2.2, algorithm M): t(t + 1)/2 rounds, t = log2 n rounded up.

    >>> [*network(4)]
    [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(1, 2)]]
    """
    top = 1 << max(n - 1, 0).bit_length() >> 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs = [(i, i + d) for i in range(n - d) if i & p == r]
            if pairs:
                yield pairs
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


@local("sort", uneven=True, blocks=True, sends=True)
def _(call, *operands):
    """A network that sorts elements sorts parts, if merging takes the place of comparing."""
    dim, keys, where = call.params["dimension"], call.params["num_keys"], call.inputs[0]
    axes, shape = where.axes_on(dim), call.in_avals[0].shape
    if not axes:
        return call.bind(*operands)
    mine, place = list(operands), keys
    even = is_even(shape[dim], where.cuts_on(dim, call.sizes))
    if not even or len(mine) > keys:  # equal keys stay in their order, padding comes last
        rows, real = call.rows(where, shape, dim)
        spread = [d for d in range(mine[0].ndim) if d != dim]
        rows, real = (jnp.expand_dims(x, spread) for x in (jnp.where(real, rows, shape[dim]), real))
        if not even:
            mine[:keys] = [jnp.where(real, x, greatest(x.dtype)) for x in mine[:keys]]
        mine.insert(keys, jnp.broadcast_to(rows, mine[0].shape))
        place += 1
    mine = call.bind(*mine, num_keys=place)
    part, me, names = mine[0].shape[dim], call.position(axes), call.axis_names(sorted(axes))
    numbers = in_mesh_order(axes, call.sizes)
    for pairs in network(len(numbers)):
        both = [(numbers[a], numbers[b]) for pair in pairs for a, b in (pair, pair[::-1])]
        others = [exchange.permuted(x, names, both) for x in mine]
        merged = call.bind(
            *(lax.concatenate(xs, dim) for xs in zip(mine, others, strict=True)), num_keys=place
        )
        half = {**{low: 0 for low, _ in pairs}, **{high: part for _, high in pairs}}
        begin = entry([half.get(i, 0) for i in range(len(numbers))], me)
        merges = entry([i in half for i in range(len(numbers))], me)
        mine = [
            jnp.where(merges, lax.dynamic_slice_in_dim(x, begin, part, dim), own)
            for x, own in zip(merged, mine, strict=True)
        ]
    if place > keys:
        del mine[keys]
    starts = [span.first for span in call.spans(where, shape, dim)]
    held = [Span(i * part, part) for i in range(len(numbers))]
    if starts == [span.first for span in held]:
        return mine
    return [call.exchanged(x, dim, held, starts, part, 0, axes) for x in mine]


def greatest(dtype):
    """The last in the order of lax.sort."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.asarray(math.nan, dtype) if inexact else neutral("min", dtype)
