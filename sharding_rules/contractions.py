"""Products that sum over shared dims."""

from __future__ import annotations

from dtorchjax.registry import rule


def keeps_sums(in_avals, out_avals, params) -> bool:
    """Narrow integers wrap around where their terms add up; a wider product would not."""
    return all(
        a.dtype.kind not in "iu" or a.dtype.itemsize >= out_avals[0].dtype.itemsize
        for a in in_avals
    )


@rule("dot_general", linear="each", when=keeps_sums)
def _(x, y, *, dimension_numbers, **_):
    """b m k, b k n -> b m n"""
    (cx, cy), (bx, by) = dimension_numbers
    y = y.shared([*by, *cy], x[[*bx, *cx]])
    return f"{x}, {y} -> {x[bx]} {x.drop(bx, cx)} {y.drop(by, cy)}"
