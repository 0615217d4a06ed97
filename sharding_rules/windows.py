"""Reductions over sliding windows: dims that a window spans are needed whole."""

from __future__ import annotations

from dtorchjax.exchange import by_permute, entry, shifted
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
    return by_permute(x, spanned(params), operands, results, others)


def with_halos(call, operands, fills):
    """The operands with all that this device's windows see, and the parameters for these."""
    params, where, held = call.params, call.outputs[0], call.out_shape()
    padding = [tuple(p) for p in params["padding"]]
    base, dilation = (
        [*(params.get(f"{of}_dilation") or (1,) * len(padding))] for of in ("base", "window")
    )
    for d in spanned(params):
        if not where.axes_on(d):
            continue
        stride, low = params["window_strides"][d], padding[d][0]
        reach = (params["window_dimensions"][d] - 1) * dilation[d] + 1
        starts = [s.first * stride - low for s in call.spans(where, call.out_avals[0].shape, d)]
        length = (held[d] - 1) * stride + reach
        operands = [
            call.dilated(x, i, d, starts, length, base[d], fill)
            for i, (x, fill) in enumerate(zip(operands, fills, strict=True))
        ]
        padding[d], base[d] = (0, 0), 1
    return operands, {"padding": tuple(padding), "base_dilation": tuple(base)}


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
        (x,), changed = with_halos(call, [x], [neutral(kind, x.dtype)])
        return call.bind(x, **changed)


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
    parts, changed = with_halos(call, list(operands[:n]), operands[n:])
    return call.bind(*parts, *operands[n:], **changed)


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
    (tangents, x), changed = with_halos(call, [tangents, x], [0, outside])
    return call.bind(tangents, x, **changed)


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
    return f"{source}, {x.whole(*dims)} -> {x.whole(*dims)}", halos(x, params, operands=2)


@local("select_and_scatter_add", uneven=True, blocks=True, sends=True)
def _(call, source, x):
    """The windows that see this device's rows, with all rows that they see; those of others go."""
    params, full, held = call.params, call.in_avals[1].shape, x.shape
    padding, mine = [tuple(p) for p in params["padding"]], {}
    outside = neutral("max" if str(params["select_prim"]) == "ge" else "min", x.dtype)
    for d in spanned(params):
        if not call.inputs[1].axes_on(d):
            continue
        stride, low = params["window_strides"][d], padding[d][0]
        reach = params["window_dimensions"][d]
        spans = call.spans(call.inputs[1], full, d)
        firsts = [-(-(s.first + low - reach + 1) // stride) for s in spans]
        lasts = [(s.first + s.count - 1 + low) // stride for s in spans]
        count = max(1, *(last - first + 1 for first, last in zip(firsts, lasts, strict=True)))
        begins, length = [first * stride - low for first in firsts], (count - 1) * stride + reach
        source = call.window(source, 0, d, firsts, count)
        x = call.window(x, 1, d, begins, length, outside)
        padding[d], mine[d] = (0, 0), [b - s.first for b, s in zip(begins, spans, strict=True)]
    result = call.bind(source, x, padding=tuple(padding))
    for d, rows in mine.items():
        by = entry(rows, call.position(call.inputs[1].axes_on(d)))
        result = shifted(result, d, by, held[d])
    return result
