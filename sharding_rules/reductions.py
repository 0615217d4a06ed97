"""Reductions, scans along a dim, and their indices."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax.exchange import gathered, sent_as_bits
from dtorchjax.padding import neutral as without
from dtorchjax.registry import local, rule


def reduction(name: str, kind: str, **kinds) -> None:
    """Sharding a reduced dim leaves a partial result; terms of the same kind pass."""

    @rule(name, partial=kind, **kinds)
    def _(x, *, axes, **_):
        """b n -> b"""
        return f"{x} -> {x.drop(axes)}", [f"P({kind}) -> P({kind})"]


def along(name: str, neutral: str, combine, total, **kinds) -> None:
    """Devices scan their own parts, and combine them with the totals of those before.

    `neutral` names the reduction in which padding must not count, `total` is that of dim 0.
    """

    @rule(name, **kinds)
    def _(x, *, axis, **_):
        return f"{x.whole(axis)} -> {x.whole(axis)}", [f"S{axis} -> S{axis} by all-gather"]

    @local(name, uneven=True, sends=True)
    def _(call, x):
        axis, back = call.params["axis"], call.params["reverse"]
        axes = call.inputs[0].axes_on(axis)
        if not axes:
            return call.bind(x)
        scanned = call.bind(call.real(x, 0, axis, neutral))
        mine = lax.index_in_dim(scanned, 0 if back else scanned.shape[axis] - 1, axis, False)
        totals = gathered(mine, call.axis_names(axes))
        numbers, me = jnp.arange(len(totals)), call.position(axes)
        counts = jnp.expand_dims(numbers > me if back else numbers < me, range(1, totals.ndim))
        totals = jnp.where(counts, totals, without(neutral, totals.dtype))
        return combine(scanned, jnp.expand_dims(total(totals, 0), axis))


reduction("reduce_sum", "sum")
reduction("reduce_max", "max")
reduction("reduce_min", "min")
reduction("reduce_prod", "prod")
along("cumsum", "sum", lax.add, lambda t, d: jnp.sum(t, d, dtype=t.dtype), linear="0")
along("cumprod", "prod", lax.mul, lambda t, d: jnp.prod(t, d, dtype=t.dtype))
along("cummax", "max", lax.max, jnp.max)
along("cummin", "min", lax.min, jnp.min)
along("cumlogsumexp", "max", jnp.logaddexp, jax.nn.logsumexp)


def logical_reduction(name: str, kind: str) -> None:
    """On truth values `or` is max and `and` is min; on integers they work on bits."""

    @rule(name, partial=kind)
    def _(x, *, axes, **_):
        if x.dtype.name == "bool":
            return f"{x} -> {x.drop(axes)}", [f"P({kind}) -> P({kind})"]
        return f"{x.whole(*axes)} -> {x.drop(axes)}"


logical_reduction("reduce_or", "max")
logical_reduction("reduce_and", "min")


@rule("reduce_xor")
def _(x, *, axes, **_):
    """b k! -> b"""
    return f"{x.whole(*axes)} -> {x.drop(axes)}"


@rule("argmax argmin")
def _(x, *, axes, **_):
    """b k! -> b, or the best of each device's best"""
    return f"{x.whole(*axes)} -> {x.drop(axes)}", [f"S{d} -> R by all-gather" for d in axes]


def best(call, x, op: str):
    """Ties go to the lowest index of all, nan wins, as on one device."""
    (dim,) = call.params["axes"]
    axes = call.inputs[0].axes_on(dim)
    if not axes:
        return call.bind(x)
    x = call.real(x, 0, dim, op)
    index = call.bind(x)
    values = jnp.take_along_axis(x, jnp.expand_dims(index, dim), dim).squeeze(dim)
    first, _ = call.span(call.inputs[0], call.in_avals[0].shape, dim)
    names = call.axis_names(axes)
    values, places = gathered(values, names), gathered((index + first).astype(index.dtype), names)
    winner = call.bind(values, axes=(0,))
    return jnp.take_along_axis(places, winner[None], 0)[0]


local("argmax", uneven=True, sends=True)(functools.partial(best, op="max"))
local("argmin", uneven=True, sends=True)(functools.partial(best, op="min"))


@rule("reduce")
def _(*operands, dimensions, out, **_):
    """b n!, - -> b: any function of two elements, of which nothing is known"""
    first = operands[0]
    left = [str(first.whole(*dimensions))] * len(out) + ["-"] * len(out)
    return f"{', '.join(left)} -> {', '.join([str(first.drop(dimensions))] * len(out))}"


@rule("approx_top_k")
def _(x, *, reduction_dimension, **_):
    """b n! -> b k!, b k!"""
    dim = reduction_dimension % len(x)
    best = x.shared([dim], ["k!"])
    return f"{x.whole(dim)} -> {best}, {best}"


@rule("top_k")
def _(x, *, axis, **_):
    """b n! -> b k!, b k!, or the best k of each device's best k"""
    best = x.shared([axis], ["k!"])
    return f"{x.whole(axis)} -> {best}, {best}", [f"S{axis} -> R, R by all-gather"]


@local("top_k", uneven=True, sends=True)
def _(call, x):
    axis, k = call.params["axis"], call.params["k"]
    axes = call.inputs[0].axes_on(axis)
    if not axes:
        return call.bind(x)
    x = call.real(x, 0, axis, "last")
    values, index = call.bind(x, k=min(k, x.shape[axis]))
    first, count = call.span(call.inputs[0], call.in_avals[0].shape, axis)
    names = tuple(call.axis_names(axes))
    gather = functools.partial(lax.all_gather, axis_name=names, axis=axis, tiled=True)
    values = sent_as_bits(gather, values)
    index = gather(jnp.where(index < count, index + first, -1))
    # in the order of their indices, padding last, so that ties go to the lowest
    order = jnp.argsort(index < 0, axis, stable=True)
    values, index = (jnp.take_along_axis(y, order, axis) for y in (values, index))
    values, winner = call.bind(values)
    return values, jnp.take_along_axis(index, winner, axis)
