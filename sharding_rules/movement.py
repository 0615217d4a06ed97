"""Primitives that move data: every kind of partial passes through them."""

from __future__ import annotations

import math

from jax import lax
from jax import numpy as jnp

from dtorchjax.exchange import Span, by_permute, movable, shifted
from dtorchjax.notation import Dims
from dtorchjax.parts import is_even
from dtorchjax.registry import local, rule

moves = {"linear": "0", "moves": True}


def renamed(x: Dims, dims, prefix: str) -> Dims:
    """Dims whose size changes get a factor of their own, needed whole."""
    return x.shared(list(dims), [f"{prefix}{d}!" for d in dims])


@rule("transpose", **moves)
def _(x, *, permutation, **_):
    return f"{x} -> {x[permutation]}"


@rule("squeeze", **moves)
def _(x, *, dimensions, **_):
    """b 1 n -> b n"""
    return f"{x.shared(dimensions, ['1'] * len(dimensions))} -> {x.drop(dimensions)}"


@rule("rev", **moves)
def _(x, *, dimensions, **_):
    """b n! -> b n!, or rows go to the device that mirrors"""
    x = x.whole(*dimensions)
    return f"{x} -> {x}", by_permute(x, dimensions)


@local("rev", uneven=True, sends=True)
def _(call, x):
    shape = call.in_avals[0].shape
    for d in call.params["dimensions"]:
        if call.inputs[0].axes_on(d):
            spans, part = call.spans(call.inputs[0], shape, d), x.shape[d]
            x = call.window(x, 0, d, [shape[d] - s.first - part for s in spans], part)
    return call.bind(x)


@rule("broadcast_in_dim", **moves)
def _(x, *, broadcast_dimensions, out, **_):
    """n -> b n; a dim of size 1 may become one of any size"""
    result = out[0]
    same = [x.shape[d] == result.shape[b] for d, b in enumerate(broadcast_dimensions)]
    factors = [
        result.factors[b] if s else "1" for s, b in zip(same, broadcast_dimensions, strict=True)
    ]
    return f"{' '.join(factors) or '-'} -> {result}"


@local("broadcast_in_dim", uneven=True, blocks=True)
def _(call, x):
    return call.bind(x, shape=call.out_shape())


@rule("empty empty2 iota")
def _(*, out, **_):
    return f"-> {out[0]}"


@rule("dim_as_value")
def _(**_):
    """-> - : the number that a symbolic dim of jax.export stands for, the global one"""
    return "-> -"


@local("empty", uneven=True, blocks=True)
def _(call):
    return call.bind(shape=call.out_shape())


@local("iota", uneven=True, blocks=True)
def _(call):
    dim, shape = call.params["dimension"], call.out_shape()
    where, full = call.outputs[0], call.out_avals[0].shape
    if not where.axes_on(dim):
        return call.bind(shape=shape)
    # counted in integers: a small type would round its counts and the offset, one after the other
    rows, _ = call.rows(where, full, dim)
    return lax.broadcast_in_dim(rows, shape, [dim]).astype(call.out_avals[0].dtype)


@rule("reshape", **moves)
def _(x, *, new_sizes, dimensions=None, **_):
    """b s d -> b t: the leading dims of two groups of equal size share a factor

    Equal parts of the leading dims are then the same stretch of elements on both sides. With
    `dimensions` the operand's dims are taken in that order (jnp.median, jnp.quantile).
    """
    if 0 in x.shape:
        return f"{x.whole(*range(len(x)))} -> {' '.join(f'b{d}!' for d in range(len(new_sizes)))}"
    order = range(len(x)) if dimensions is None else dimensions
    sizes = [x.shape[d] for d in order]
    left, right, rows = [], [], []
    for number, (source, target) in enumerate(reshape_groups(sizes, new_sizes)):
        if dimensions is None:
            rows += block_rows(source, target, sizes, new_sizes)
            rows += regrouped_rows(x, source, target, sizes, new_sizes)
        for side, names, shape in ((source, left, sizes), (target, right, new_sizes)):
            leads = leading(side, shape)
            tag = "ab"[names is right]
            names += [
                f"g{number}" if d == leads else f"{tag}{d}!" if shape[d] > 1 else "1" for d in side
            ]
    left = [left[list(order).index(d)] for d in range(len(x))]
    return f"{' '.join(left) or '-'} -> {' '.join(right) or '-'}", rows


def block_rows(source, target, sizes, new_sizes):
    """A dim of size 3*h as dims 3 and h, or these as one: to cut h is to cut three blocks."""
    source, target = [d for d in source if sizes[d] > 1], [d for d in target if new_sizes[d] > 1]
    rows = []
    for one, many, shape in ((source, target, new_sizes), (target, source, sizes)):
        if len(one) == 1 and len(many) > 1 and all(isinstance(shape[d], int) for d in many):
            for i in range(1, len(many)):
                blocks = math.prod(shape[d] for d in many[:i])
                sides = [f"S{one[0]}/{blocks}", f"S{many[i]}"]
                rows.append(" -> ".join(sides if one is source else sides[::-1]))
    return rows


def leading(side, shape):
    """The first dim of a group that is more than one row."""
    return next((d for d in side if shape[d] > 1), None)


def regrouped_rows(x, source, target, sizes, new_sizes):
    """Leading dims of other sizes, cut so that a device has other elements of one and the other."""
    d, to = leading(source, sizes), leading(target, new_sizes)
    if d is None or to is None or sizes[d] == new_sizes[to] or not movable(x):
        return []
    return [f"S{d} -> S{to} by permute"]


def reshape_groups(source, target):
    """Consecutive dims of both shapes with equal products, as pairs of lists of dims."""
    i = j = 0
    while i < len(source) or j < len(target):
        first = i, j
        left = right = 1
        while left != right or (i, j) == first:
            if i < len(source) and (left <= right or j == len(target)):
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        yield list(range(first[0], i)), list(range(first[1], j))


@local("reshape", uneven=True, blocks=True, sends=True)
def _(call, x):
    shape, result = call.in_avals[0].shape, call.out_avals[0].shape
    plain = movable(x) and 0 not in shape and call.params.get("dimensions") is None
    groups = [*reshape_groups(shape, result)] if plain else []
    for source, target in reversed(groups):  # so that the dims before have their places
        d, to = leading(source, shape), leading(target, result)
        if d is None or to is None or not call.inputs[0].axes_on(d):
            continue
        ways = [w.cuts_on(i, call.sizes) for w, i in ((call.inputs[0], d), (call.outputs[0], to))]
        if any(cut.blocks > 1 for cuts in ways for cut in cuts) or not ways[1]:
            continue
        within, of = (  # elements of a row
            math.prod(s[i] for i in side if i > lead)
            for side, lead, s in ((source, d, shape), (target, to, result))
        )
        held, wanted = (
            [Span(s.first * n, s.count * n) for s in call.spans(where, full, dim)]
            for n, where, full, dim in (
                (within, call.inputs[0], shape, d), (of, call.outputs[0], result, to)
            )
        )  # fmt: skip
        if held != wanted:
            x = x.reshape((*x.shape[:d], x.shape[d] * within, *x.shape[source[-1] + 1 :]))
            starts, length = [span.first for span in wanted], call.out_shape()[to] * of
            x = call.exchanged(x, d, held, starts, length, 0, call.inputs[0].axes_on(d))
    return call.bind(x, new_sizes=call.out_shape())


@rule("tile", **moves)
def _(x, *, reps, **_):
    repeated = [d for d, count in enumerate(reps) if count != 1]
    return f"{x.whole(*repeated)} -> {renamed(x, repeated, 'tiled')}"


def every_part(start, step, full, result) -> bool:
    """A slice that takes the same elements of every part: all, or each `step`-th one."""
    return start < step and result * step == full


@rule("slice", **moves)
def _(x, *, start_indices, strides, out, **_):
    """b n -> b cut!, but b n -> b n for x[:, ::2], and one of several equal blocks may be cut"""
    steps = strides or (1,) * len(x)
    parts = zip(start_indices, steps, x.shape, out[0].shape, strict=True)
    cut = [
        d for d, (start, step, *sizes) in enumerate(parts) if not every_part(start, step, *sizes)
    ]
    blocks = [
        f"S{d}/{x.shape[d] // n} -> S{d}"
        for d in cut
        if is_block(start_indices[d], steps[d], x.shape[d], n := out[0].shape[d])
    ]
    blocks += by_permute(x, [d for d, step in enumerate(steps) if d in cut or step > 1])
    return f"{x.whole(*cut)} -> {renamed(x, cut, 'cut')}", blocks


def is_block(start, step, full, result) -> bool:
    """A slice that takes one of several equal blocks."""
    return step == 1 and 0 < result < full and full % result == 0 and start % result == 0


@local("slice", uneven=True, blocks=True, sends=True)
def _(call, x):
    steps = call.params["strides"] or (1,) * x.ndim
    starts, limits = [*call.params["start_indices"]], [*call.params["limit_indices"]]
    full, result, held = call.in_avals[0].shape, call.out_avals[0].shape, call.out_shape()
    for d in range(x.ndim):
        cuts = call.inputs[0].cuts_on(d, call.sizes)
        if every_part(starts[d], steps[d], full[d], result[d]) and is_even(result[d], cuts):
            limits[d] = x.shape[d]
        elif cuts and cuts[0].blocks > 1:  # a block, of which a part lies here
            starts[d] = starts[d] // result[d] * held[d]
            limits[d] = starts[d] + held[d]
        elif cuts:
            spans = call.spans(call.outputs[0], result, d)
            begins = [starts[d] + s.first * steps[d] for s in spans]
            x = call.window(x, 0, d, begins, (held[d] - 1) * steps[d] + 1)
            starts[d], limits[d] = 0, x.shape[d]
    return call.bind(x, start_indices=tuple(starts), limit_indices=tuple(limits))


@rule("pad", linear="jointly", moves=True)
def _(x, value, *, padding_config, **_):
    """b n, - -> b padded!, but with so many rows that the operand is one of several blocks"""
    padded = [d for d, config in enumerate(padding_config) if tuple(config) != (0, 0, 0)]
    blocks = [
        f"S{d}, R -> S{d}/{(low + high) // x.shape[d] + 1}"
        for d in padded
        if pads_blocks(*padding_config[d], x.shape[d])
        for low, high, _ in [padding_config[d]]
    ]
    blocks += by_permute(x, padded, others=1)
    return f"{x.whole(*padded)}, - -> {renamed(x, padded, 'padded')}", blocks


def pads_blocks(low, high, interior, size) -> bool:
    """True if what is added are whole blocks of the operand's size: the derivative of a slice."""
    return size > 0 and interior == 0 and min(low, high) >= 0 and low % size == high % size == 0


@local("pad", uneven=True, blocks=True, sends=True)
def _(call, x, value):
    configs = [tuple(c) for c in call.params["padding_config"]]
    full, where = call.in_avals[0].shape, call.outputs[0]
    for d, (low, high, interior) in enumerate(configs):
        cuts = where.cuts_on(d, call.sizes)
        if not cuts or (low, high, interior) == (0, 0, 0):
            continue
        if cuts[0].blocks > 1:
            configs[d] = (low // full[d] * x.shape[d], high // full[d] * x.shape[d], 0)
        else:
            spans = call.spans(where, call.out_avals[0].shape, d)
            starts = [s.first - low for s in spans]
            x = call.dilated(x, 0, d, starts, call.out_shape()[d], interior + 1, value)
            configs[d] = (0, 0, 0)
    return call.bind(x, value, padding_config=tuple(configs))


@rule("concatenate", linear="jointly", moves=True)
def _(*operands, dimension, **_):
    """b part0!, b part1! -> b joined!, but parts of one size that are cut alike are blocks"""
    first, count = operands[0], len(operands)
    parts = [first.shared([dimension], [f"part{i}!"]) for i in range(count)]
    equal = count > 1 and len({x.shape[dimension] for x in operands}) == 1
    blocks = [", ".join([f"S{dimension}"] * count) + f" -> S{dimension}/{count}"]
    text = f"{', '.join(map(str, parts))} -> {first.shared([dimension], ['joined!'])}"
    moved = by_permute(first, [dimension], operands=count)
    return text, (blocks if equal else []) + (moved if count > 1 else [])


@local("concatenate", uneven=True, blocks=True, sends=True)
def _(call, *parts):
    dim, where = call.params["dimension"], call.outputs[0]
    cuts = where.cuts_on(dim, call.sizes)
    if not cuts or cuts[0].blocks > 1:
        return call.bind(*parts)
    spans, length = call.spans(where, call.out_avals[0].shape, dim), call.out_shape()[dim]
    rows, _ = call.rows(where, call.out_avals[0].shape, dim)
    result, begin = None, 0
    for i, (x, aval) in enumerate(zip(parts, call.in_avals, strict=True)):
        found = call.window(x, i, dim, [s.first - begin for s in spans], length)
        later = jnp.expand_dims(rows >= begin, [d for d in range(x.ndim) if d != dim])
        result = found if result is None else jnp.where(later, found, result)
        begin += aval.shape[dim]
    return result


@rule("split", **moves)
def _(x, *, axis, sizes, **_):
    """b joined! -> b part0!, b part1!, but blocks of one size are parts that are cut alike"""
    count = len(sizes)
    parts = [x.shared([axis], [f"part{i}!"]) for i in range(count)]
    blocks = [f"S{axis}/{count} -> " + ", ".join([f"S{axis}"] * count)]
    equal = count > 1 and len(set(sizes)) == 1
    moved = by_permute(x, [axis], results=count) if count > 1 else []
    return f"{x.whole(axis)} -> {', '.join(map(str, parts))}", (blocks if equal else []) + moved


@local("split", uneven=True, blocks=True, sends=True)
def _(call, x):
    axis, begin, found = call.params["axis"], 0, []
    cuts = call.inputs[0].cuts_on(axis, call.sizes)
    if cuts and cuts[0].blocks == 1 and len(call.outputs) > 1:
        for i, (where, aval) in enumerate(zip(call.outputs, call.out_avals, strict=True)):
            starts = [begin + s.first for s in call.spans(where, aval.shape, axis)]
            found.append(call.window(x, 0, axis, starts, call.out_shape(i)[axis]))
            begin += aval.shape[axis]
        return found
    return call.bind(x, sizes=tuple(call.out_shape(i)[axis] for i in range(len(call.outputs))))


@rule("stack", linear="jointly", moves=True)
def _(*operands, axis, **_):
    first = operands[0]
    result = [*first[:axis], "stacked!", *first[axis:]]
    return f"{', '.join([str(first)] * len(operands))} -> {' '.join(result)}"


@rule("unstack", **moves)
def _(x, *, axis, out, **_):
    return f"{x.whole(axis)} -> {', '.join([str(x.drop([axis]))] * len(out))}"


@rule("dynamic_slice", **moves)
def _(x, *starts, slice_sizes, **_):
    """b n!, - -> b cut!: where n is cut, all but the owners of the slice have zeros of it"""
    cut = [d for d, size in enumerate(slice_sizes) if size != x.shape[d]]
    scalars = ", -" * len(starts)
    kind = "P(max)" if x.dtype.name == "bool" else "P"
    whole = ", R" * len(starts)
    rows = [f"S{d}{whole} -> {kind}" for d in cut] if movable(x) else []
    return f"{x.whole(*cut)}{scalars} -> {renamed(x, cut, 'cut')}", rows


def clamped(starts, full, sizes):
    """Starts inside the array, said twice: XLA on the CPU (jaxlib 0.10) merges this slice with one
    that a redistribution makes of its result, and then forgets to clamp.
    """
    return [
        jnp.clip(start.astype(jnp.result_type(start, jnp.int32)), 0, n - size)
        for start, n, size in zip(starts, full, sizes, strict=True)
    ]


def owned(call, x, starts, sizes):
    """Where in this device's part of operand 0 the rows lie that start at `starts`, as far as they
    do: by cut dim (begin here, number, row of the slice at which they begin, rows that are here).
    """
    where, full, found = call.inputs[0], call.in_avals[0].shape, {}
    for d, size in enumerate(sizes):
        if size != full[d] and where.axes_on(d):
            first, count = call.span(where, full, d)
            number = min(size, x.shape[d])
            begin = jnp.clip(starts[d] - first, 0, x.shape[d] - number)
            found[d] = begin, number, first + begin - starts[d], count
    return found


@local("dynamic_slice", uneven=True, blocks=True)
def _(call, x, *starts):
    sizes = call.params["slice_sizes"]
    starts = clamped(starts, call.in_avals[0].shape, sizes)
    mine = owned(call, x, starts, sizes)
    if not mine:
        return call.bind(x, *starts, slice_sizes=call.out_shape())
    begins, lengths = list(starts), list(call.out_shape())
    for d, (begin, number, _, _) in mine.items():
        begins[d], lengths[d] = begin, number
    found = lax.dynamic_slice(x, begins, lengths)
    for d, (begin, number, row, count) in mine.items():
        here = jnp.expand_dims(begin + jnp.arange(number) < count, others_of(x, d))
        found = jnp.where(here, found, jnp.zeros_like(found))
        found = shifted(found, d, row, sizes[d])
    return found


def others_of(x, dim):
    return [d for d in range(x.ndim) if d != dim]


@rule("dynamic_update_slice", linear="0 1", moves=True)
def _(x, update, *starts, **_):
    """b n!, b cut!, - -> b n!: where n is cut, the owners of the rows write them"""
    cut = [d for d, size in enumerate(update.shape) if size != x.shape[d]]
    rows = [f"S{d}, R{', R' * len(starts)} -> S{d}" for d in cut] if movable(x) else []
    x = x.whole(*cut)
    return f"{x}, {renamed(x, cut, 'cut')}{', -' * len(starts)} -> {x}", rows


@local("dynamic_update_slice", uneven=True, blocks=True)
def _(call, x, update, *starts):
    sizes = call.in_avals[1].shape
    starts = clamped(starts, call.in_avals[0].shape, sizes)
    mine = owned(call, x, starts, sizes)
    if not mine:
        return call.bind(x, update, *starts)
    begins, lengths, written = list(starts), list(update.shape), True
    for d, (begin, number, row, _) in mine.items():
        begins[d], lengths[d] = begin, number
        update = shifted(update, d, -row, number)
        rows = row + jnp.arange(number)
        written &= jnp.expand_dims((rows >= 0) & (rows < sizes[d]), others_of(x, d))
    known = lax.dynamic_slice(x, begins, lengths)
    return lax.dynamic_update_slice(x, jnp.where(written, update, known), begins)
