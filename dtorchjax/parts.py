"""Which rows of a dim each device holds: dims that do not divide, dims of several blocks.

A dim of n rows is cut by one mesh axis after the other, major first. Cut into k parts, device i
holds rows [i*c, (i+1)*c) with c = ceil(n/k); where they end sooner the rest of its part is padding,
and so is all of it on devices behind the last row. The next axis cuts a part, with its padding, in
the same way: going from one axis to two is a local slice. With blocks, each block is cut by itself
and a device holds its part of every one.

`spread` lays the parts one after the other, as they are stored and sent; `join` is its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Cut(NamedTuple):
    """One mesh axis that cuts a dim: into `count` parts, of each of `blocks` equal blocks."""

    count: int
    blocks: int = 1


def ceil_div(n: Any, parts: int) -> Any:
    """The size of a part; a symbolic size that is a multiple stays a plain quotient."""
    return n // parts if not isinstance(n, int) and n % parts == 0 else -(-n // parts)


def lengths(n: Any, cuts: Sequence[Cut]) -> list[Any]:
    """n, the length of a part by the first cut, by the first two, ...

    >>> lengths(10, [Cut(2), Cut(4)])
    [10, 5, 2]
    """
    found = [n]
    for count, blocks in cuts:
        if blocks > 1 and found[-1] % blocks:
            raise ValueError(f"{found[-1]} rows are not {blocks} equal blocks")
        found.append(blocks * ceil_div(found[-1] // blocks, count))
    return found


def is_even(n: Any, cuts: Sequence[Cut]) -> bool:
    """True if every part is full."""
    return all(
        not isinstance(m, int) or m % (count * blocks) == 0
        for m, (count, blocks) in zip(lengths(n, cuts)[:-1], cuts, strict=True)
    )


def stored_length(n: Any, cuts: Sequence[Cut]) -> Any:
    """The length of all parts together, padding included."""
    return lengths(n, cuts)[-1] * math.prod(cut.count for cut in cuts)


def _reshaped(x: Any, dim: int, *sizes: Any) -> Any:
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def spread(x: Any, dim: int, cuts: Sequence[Cut], numpy: Any) -> Any:
    """All rows -> the parts of all devices, one after the other, with zeros as padding.

    `numpy` is the module of x: numpy or jax.numpy.

    >>> import numpy as np
    >>> spread(np.arange(1, 6), 0, [Cut(4)], np)
    array([1, 2, 3, 4, 5, 0, 0, 0])
    >>> spread(np.arange(8), 0, [Cut(2, blocks=2)], np)
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    levels, lead = lengths(x.shape[dim], cuts), 1
    for (count, blocks), m, part in zip(cuts, levels[:-1], levels[1:], strict=True):
        block, c = m // blocks, part // blocks
        if blocks > 1 or (isinstance(m, int) and block != count * c):
            x = _reshaped(x, dim, lead, blocks, block)
            widths = [(0, 0)] * x.ndim
            widths[dim + 2] = (0, count * c - block)
            x = numpy.pad(x, widths)
            shape = x.shape
            x = x.reshape((*shape[: dim + 2], count, c, *shape[dim + 3 :]))
            x = numpy.moveaxis(x, dim + 1, dim + 2)
            x = x.reshape((*shape[:dim], lead * count * blocks * c, *shape[dim + 3 :]))
        lead *= count
    return x


def join(x: Any, dim: int, n: Any, cuts: Sequence[Cut], numpy: Any) -> Any:
    """The inverse of `spread`, of a dim that has n rows; what padding holds is of no account."""
    levels, lead = lengths(n, cuts), math.prod(cut.count for cut in cuts)
    for (count, blocks), m, part in zip(cuts[::-1], levels[-2::-1], levels[:0:-1], strict=True):
        lead //= count
        block, c = m // blocks, part // blocks
        if blocks > 1 or (isinstance(m, int) and block != count * c):
            x = _reshaped(x, dim, lead, count, blocks, c)
            x = numpy.moveaxis(x, dim + 1, dim + 2)
            shape = x.shape
            x = x.reshape((*shape[: dim + 2], count * c, *shape[dim + 4 :]))
            x = x[(slice(None),) * (dim + 2) + (slice(0, block),)]
            x = x.reshape((*shape[:dim], lead * m, *shape[dim + 4 :]))
    return x


def rows_of(n: int, cuts: Sequence[Cut], place: Sequence[Any], numpy: Any) -> tuple[Any, Any]:
    """(the row of the whole dim, whether there is one) for each row of a device's part.

    `place` is the device's coordinate along the mesh axis of each cut.
    """
    levels = lengths(n, cuts)
    index = numpy.arange(levels[-1])
    real = numpy.ones(levels[-1], bool)
    for (_, blocks), i, m, part in reversed(
        list(zip(cuts, place, levels[:-1], levels[1:], strict=True))
    ):
        block, c = m // blocks, max(part // blocks, 1)
        inside = i * c + index % c
        real, index = real & (inside < block), index // c * block + inside
    return index, real
