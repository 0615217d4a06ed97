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


@rule("select_and_scatter_add", linear="0")
def _(source, x, **params):
    """b y!, b x! -> b x!: the derivative of a maximum over windows"""
    dims = spanned(params)
    source = x.shared(dims, [f"y{d}!" for d in dims])
    return f"{source}, {x.whole(*dims)} -> {x.whole(*dims)}"
