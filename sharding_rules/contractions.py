"""Products that sum over shared dims."""

from __future__ import annotations

import math

from dtorchjax.exchange import movable
from dtorchjax.registry import local, rule


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


@rule("ragged_dot_general", linear="0; 1", when=keeps_sums)
def _(x, y, sizes, *, ragged_dot_dimension_numbers, **_):
    """b m! k, g! k n, b g! -> b m! n: rows of x by groups, each with a matrix of its own"""
    n = ragged_dot_dimension_numbers
    (cx, cy), (bx, by) = n.dot_dimension_numbers
    ragged, groups = n.lhs_ragged_dimensions, n.rhs_group_dimensions
    x = x.whole(*ragged)
    y = y.shared([*by, *cy], x[[*bx, *cx]]).whole(*groups)
    kept = f"{x[bx]} {x.drop(bx, cx)} {y.drop(by, cy, groups)}"
    if set(ragged) & set(cx):  # each group sums a stretch of its own
        kept = f"group! {kept}"
    result = " ".join(word for word in kept.split() if word != "-")
    free = [d for d in range(len(x)) if d not in (*bx, *cx)]
    order = [*bx, *(cx if set(ragged) & set(cx) else free)]  # groups may differ with those before
    before = order[: order.index(ragged[0])] if len(sizes) > 1 else []
    sizes = sizes.shared([*range(len(before))], x[before]).whole(len(sizes) - 1)
    return f"{x}, {y}, {sizes} -> {result or '-'}"


@rule("conv_general_dilated", linear="each", when=keeps_sums)
def _(
    x, kernel, *, dimension_numbers, feature_group_count, batch_group_count, **_
):  # fmt: skip
    """b c x!, o c k! -> b o y!: channels contract; a window needs what lies beside it

    In groups of one channel (depthwise), b g x!, g c! k! -> b g y!.
    """
    n, sides = dimension_numbers, []
    # a dim that comes in groups has another size, or another order, on the other side
    grouped = {"c", "o"} if feature_group_count > 1 else {"b", "o"} if batch_group_count > 1 else ()
    lead = "xc" if feature_group_count > 1 else "xb"
    of_groups = x.shape[n.lhs_spec["bc".index(lead[1])]], kernel.shape[n.rhs_spec[0]]
    # where a dim has as many elements as there are groups, equal parts of the others are groups too
    groups = max(feature_group_count, batch_group_count)
    together = groups in of_groups
    g = {lead, "ko", "yo"} if grouped and together else ()
    for name, spec, leading in (
        ("x", n.lhs_spec, "bc"),
        ("k", n.rhs_spec, "oc"),
        ("y", n.out_spec, "bo"),
    ):
        words = ["g" if name + f in g else f"{name}{f}!" if f in grouped else f for f in leading]
        words += [f"{name}{d}!" for d in range(len(spec) - 2)]
        sides.append(" ".join(words[spec.index(d)] for d in range(len(spec))))
    spatial = zip(n.lhs_spec[2:], n.rhs_spec[2:], n.out_spec[2:], strict=True)
    rows = [
        row
        for a, b, c in spatial
        if movable(x)
        for row in (
            f"S{a}, R -> S{c} by permute",
            f"S{a}, S{b} -> P by permute",
            f"R, R -> S{c} by slice",
            f"R, S{b} -> P by slice",
        )
    ]
    if grouped and not together:  # some numbers of devices divide the dims but not the groups
        split = n.lhs_spec["bc".index(lead[1])], n.rhs_spec[0], n.out_spec[1]
        rows.append("S{}, S{} -> S{} in {} groups".format(*split, groups))
    return f"{sides[0]}, {sides[1]} -> {sides[2]}", rows


@local("conv_general_dilated", uneven=True, blocks=True, sends=True)
def _(call, x, kernel):
    """A part of a dim of the result needs a window of x: what lies beside a part of it; where the
    kernel's dim is cut, as in its derivative, each device sums its part of every window.
    """
    params, n = call.params, call.params["dimension_numbers"]
    counts = {}  # groups of this device
    for kind, dim in (("feature_group_count", n.lhs_spec[1]), ("batch_group_count", n.lhs_spec[0])):
        if params[kind] > 1:
            counts[kind] = params[kind] * x.shape[dim] // call.in_avals[0].shape[dim]
    padding, dilations = [tuple(p) for p in params["padding"]], list(params["lhs_dilation"])
    full, result = call.in_avals[1].shape, call.out_avals[0].shape
    for i, (a, b, c) in enumerate(zip(n.lhs_spec[2:], n.rhs_spec[2:], n.out_spec[2:], strict=True)):
        stride, dilation, low = (
            params["window_strides"][i],
            params["rhs_dilation"][i],
            padding[i][0],
        )
        reads = ((call.outputs[0], result, c, stride), (call.inputs[1], full, b, dilation))
        over = {axis for where, _, dim, _ in reads for axis in where.axes_on(dim)}
        over |= set(call.inputs[0].axes_on(a))
        if not over:
            continue
        axes, starts = sorted(over), [-low] * math.prod(call.sizes[axis] for axis in over)
        for where, shape, dim, step in reads:
            spans = call.along(axes, where, call.spans(where, shape, dim), dim)
            starts = [start + span.first * step for start, span in zip(starts, spans, strict=True)]
        length = (call.out_shape()[c] - 1) * stride + (kernel.shape[b] - 1) * dilation + 1
        between = params["lhs_dilation"][i]
        begin, offset = zip(*(divmod(start, between) for start in starts), strict=True)
        if len({*offset}) == 1:
            rows = (offset[0] + length - 1) // between + 1
            x = call.window(x, 0, a, begin, rows, axes=axes)
            padding[i] = (-offset[0], offset[0] + length - (rows - 1) * between - 1)
        else:  # the devices' windows do not begin alike: what lies between rows is stored
            x = call.dilated(x, 0, a, starts, length, between, axes=axes)
            padding[i], dilations[i] = (0, 0), 1
    return call.bind(x, kernel, padding=tuple(padding), lhs_dilation=tuple(dilations), **counts)
