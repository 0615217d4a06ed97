"""Keys and random bits: a device draws the numbers of its own part, by their global place."""

from __future__ import annotations

from dtorchjax import _jax
from dtorchjax.registry import local, rule


@rule("random_bits")
def _(keys, *, shape, out, **_):
    """k -> k n: counters come from global indices, so n may be sharded"""
    result = out[0]
    drawn = [f if _jax.is_threefry(keys.dtype) else f + "!" for f in result.factors[len(keys) :]]
    return f"{keys} -> {keys if len(keys) else ''} {' '.join(drawn)}"


@local("random_bits")
def _(call, keys):
    where, full = call.outputs[0], call.out_avals[0].shape
    shape = call.out_shape()
    first = len(call.in_avals[0].shape)
    if all(s == f for s, f in zip(shape[first:], full[first:], strict=True)):
        return call.bind(keys)
    starts = [call.shard(where, d)[0] * shape[d] for d in range(first, len(full))]
    return _jax.threefry_bits(keys, call.params["bit_width"], shape[first:], full[first:], starts)


@rule("random_split")
def _(keys, *, shape, **_):
    return f"{keys} -> {keys if len(keys) else ''} {' '.join(f'n{i}!' for i in range(len(shape)))}"


@rule("random_wrap")
def _(data, **_):
    """k 2! -> k"""
    return f"{data.whole(len(data) - 1)} -> {data[:-1]}"


@rule("random_unwrap")
def _(keys, **_):
    """k -> k 2!"""
    return f"{keys} -> {keys if len(keys) else ''} word!"
