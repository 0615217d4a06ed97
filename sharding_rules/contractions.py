"""Products that sum over shared dims."""

from __future__ import annotations

from dtorchjax.registry import rule


@rule("dot_general", linear="each")
def _(x, y, *, dimension_numbers, **_):
    """b m k, b k n -> b m n"""
    (cx, cy), (bx, by) = dimension_numbers
    y = y.shared([*by, *cy], x[[*bx, *cx]])
    return f"{x}, {y} -> {x[bx]} {x.drop(bx, cx)} {y.drop(by, cy)}"
