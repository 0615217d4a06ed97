"""Reductions, scans along a dim, and their indices."""

from __future__ import annotations

from dtorchjax.registry import rule


def reduction(name: str, kind: str, **kinds) -> None:
    """Sharding a reduced dim leaves a partial result; terms of the same kind pass."""

    @rule(name, partial=kind, **kinds)
    def _(x, *, axes, **_):
        """b n -> b"""
        return f"{x} -> {x.drop(axes)}", [f"P({kind}) -> P({kind})"]


def along(names: str, **kinds) -> None:
    """The scanned dim is needed whole."""

    @rule(names, **kinds)
    def _(x, *, axis, **_):
        x = x.whole(axis)
        return f"{x} -> {x}"


reduction("reduce_sum", "sum")
reduction("reduce_max", "max")
reduction("reduce_min", "min")
reduction("reduce_prod", "prod")
along("cumsum", linear="0")
along("cumlogsumexp cummax cummin cumprod")


def logical_reduction(name: str, kind: str) -> None:
    """On truth values `or` is max and `and` is min; on integers they work on bits."""

    @rule(name, partial=kind)
    def _(x, *, axes, **_):
        if x.dtype.name == "bool":
            return f"{x} -> {x.drop(axes)}", [f"P({kind}) -> P({kind})"]
        return f"{x.whole(*axes)} -> {x.drop(axes)}"


logical_reduction("reduce_or", "max")
logical_reduction("reduce_and", "min")


@rule("argmax argmin reduce_xor")
def _(x, *, axes, **_):
    """b k! -> b"""
    return f"{x.whole(*axes)} -> {x.drop(axes)}"


@rule("sort")
def _(*operands, dimension, **_):
    """b k!, b k! -> b k!, b k!: what is sorted and what is carried along share their dims"""
    text = ", ".join([str(operands[0].whole(dimension))] * len(operands))
    return f"{text} -> {text}"


@rule("top_k")
def _(x, *, axis, **_):
    """b n! -> b k!, b k!"""
    best = x.shared([axis], ["k!"])
    return f"{x.whole(axis)} -> {best}, {best}"
