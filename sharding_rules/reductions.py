"""Reductions, scans along a dim, and their indices."""

from __future__ import annotations

from dtorchjax.registry import rule


def reduction(name: str, **kinds) -> None:
    @rule(name, **kinds)
    def _(x, *, axes, **_):
        """b n -> b"""
        return f"{x} -> {x.drop(axes)}"


def along(names: str, **kinds) -> None:
    """The scanned dim is needed whole."""

    @rule(names, **kinds)
    def _(x, *, axis, **_):
        x = x.whole(axis)
        return f"{x} -> {x}"


reduction("reduce_sum", partial="sum", linear="0")
reduction("reduce_max", partial="max", monotone=True)
reduction("reduce_min", partial="min", monotone=True)
reduction("reduce_prod", partial="prod")
along("cumsum", linear="0")
along("cumlogsumexp cummax cummin cumprod")


def logical(in_avals, out_avals, params) -> bool:
    return in_avals[0].dtype.name == "bool"


def logical_reduction(name: str, partial: str) -> None:
    """On truth values `or` is max and `and` is min; on integers they work on bits."""

    @rule(name, partial=partial, monotone=True, when=logical)
    def _(x, *, axes, out, **_):
        return f"{x} -> {x.drop(axes)}"


@rule("argmax argmin")
def _(x, *, axes, **_):
    """b k! -> b"""
    return f"{x.whole(*axes)} -> {x.drop(axes)}"
