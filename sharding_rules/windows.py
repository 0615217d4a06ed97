"""Reductions over sliding windows: dims that a window spans are needed whole."""

from __future__ import annotations

from dtorchjax.registry import rule


def spanned(params) -> list[int]:
    """The dims that a window spans, or in which windows skip or add something."""
    still = zip(
        params["window_dimensions"],
        params["window_strides"],
        params.get("base_dilation") or (1,) * len(params["window_dimensions"]),
        params.get("window_dilation") or (1,) * len(params["window_dimensions"]),
        map(tuple, params["padding"]),
        strict=True,
    )
    return [d for d, window in enumerate(still) if window != (1, 1, 1, 1, (0, 0))]


def windows(name: str, kind: str) -> None:
    @rule(name)
    def _(x, **params):
        """b x! -> b y!"""
        dims = spanned(params)
        result = x.shared(dims, [f"y{d}!" for d in dims])
        return f"{x.whole(*dims)} -> {result}", [f"P({kind}) -> P({kind})"]


windows("reduce_window_sum", "sum")
windows("reduce_window_max", "max")
windows("reduce_window_min", "min")


@rule("reduce_window")
def _(*operands, out, **params):
    """b x!, - -> b y!: any function of two elements, of which nothing is known"""
    dims, first = spanned(params), operands[0]
    left = [str(first.whole(*dims))] * len(out) + ["-"] * len(out)
    result = first.shared(dims, [f"y{d}!" for d in dims])
    return f"{', '.join(left)} -> {', '.join([str(result)] * len(out))}"


@rule("select_and_gather_add", linear="0")
def _(tangents, x, **params):
    """b x!, b x! -> b y!: the tangent of a maximum over windows"""
    dims = spanned(params)
    result = x.shared(dims, [f"y{d}!" for d in dims])
    return f"{x.whole(*dims)}, {x.whole(*dims)} -> {result}"


@rule("select_and_scatter")
def _(x, source, initial, **params):
    """b x!, b y!, - -> b x!"""
    dims = spanned(params)
    source = x.shared(dims, [f"y{d}!" for d in dims])
    return f"{x.whole(*dims)}, {source}, - -> {x.whole(*dims)}"


@rule("select_and_scatter_add", linear="0")
def _(source, x, **params):
    """b y!, b x! -> b x!: the derivative of a maximum over windows"""
    dims = spanned(params)
    source = x.shared(dims, [f"y{d}!" for d in dims])
    return f"{source}, {x.whole(*dims)} -> {x.whole(*dims)}"
