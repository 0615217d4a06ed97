"""Reductions over sliding windows: dims that a window spans are needed whole."""

from __future__ import annotations

from dtorchjax.exchange import movable
from dtorchjax.padding import neutral
from dtorchjax.registry import local, rule


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


def halos(x, params, operands=1, others=0, results=1) -> list[str]:
    """Rows of spanned dims that stay cut: devices send each other what lies beside their parts."""
    base = params.get("base_dilation") or (1,) * len(x)
    dims = [d for d in spanned(params) if base[d] == 1] if movable(x) else []
    return [
        f"{', '.join([f'S{d}'] * operands + ['R'] * others)} -> {', '.join([f'S{d}'] * results)}"
        " by permute"
        for d in dims
    ]


def with_halos(call, operands, fills):
    """The operands with all that this device's windows see, and the padding that is left."""
    params, where, held = call.params, call.outputs[0], call.out_shape()
    padding = [tuple(p) for p in params["padding"]]
    base = params.get("window_dilation") or (1,) * len(padding)
    for d in spanned(params):
        if not where.axes_on(d):
            continue
        stride, low = params["window_strides"][d], padding[d][0]
        reach = (params["window_dimensions"][d] - 1) * base[d] + 1
        starts = [s.first * stride - low for s in call.spans(where, call.out_avals[0].shape, d)]
        length = (held[d] - 1) * stride + reach
        operands = [
            call.window(x, i, d, starts, length, fill)
            for i, (x, fill) in enumerate(zip(operands, fills, strict=True))
        ]
        padding[d] = (0, 0)
    return operands, tuple(padding)


def windows(name: str, kind: str) -> None:
    @rule(name)
    def _(x, **params):
        """b x! -> b y!"""
        dims = spanned(params)
        result = x.shared(dims, [f"y{d}!" for d in dims])
        rows = [f"P({kind}) -> P({kind})", *halos(x, params)]
        return f"{x.whole(*dims)} -> {result}", rows

    @local(name, uneven=True, blocks=True, sends=True)
    def _(call, x):
        (x,), padding = with_halos(call, [x], [neutral(kind, x.dtype)])
        return call.bind(x, padding=padding)


windows("reduce_window_sum", "sum")
windows("reduce_window_max", "max")
windows("reduce_window_min", "min")


@rule("reduce_window")
def _(*operands, out, **params):
    """b x!, - -> b y!: any function of two elements, of which nothing is known"""
    dims, first = spanned(params), operands[0]
    left = [str(first.whole(*dims))] * len(out) + ["-"] * len(out)
    result = first.shared(dims, [f"y{d}!" for d in dims])
    rows = halos(first, params, len(out), len(out), len(out))
    return f"{', '.join(left)} -> {', '.join([str(result)] * len(out))}", rows


@local("reduce_window", uneven=True, blocks=True, sends=True)
def _(call, *operands):
    n = len(call.outputs)
    parts, padding = with_halos(call, list(operands[:n]), operands[n:])
    return call.bind(*parts, *operands[n:], padding=padding)


@rule("select_and_gather_add", linear="0")
def _(tangents, x, **params):
    """b x!, b x! -> b y!: the tangent of a maximum over windows"""
    dims = spanned(params)
    result = x.shared(dims, [f"y{d}!" for d in dims])
    return f"{x.whole(*dims)}, {x.whole(*dims)} -> {result}", halos(x, params, operands=2)


@local("select_and_gather_add", uneven=True, blocks=True, sends=True)
def _(call, tangents, x):
    greatest = str(call.params["select_prim"]) == "ge"
    outside = neutral("max" if greatest else "min", x.dtype)
    (tangents, x), padding = with_halos(call, [tangents, x], [0, outside])
    return call.bind(tangents, x, padding=padding)


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
