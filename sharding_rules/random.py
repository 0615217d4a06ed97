"""Keys and random bits: a device draws the numbers of its own part, by their global place."""

from __future__ import annotations

from dtorchjax import _jax
from dtorchjax.registry import elementwise, elementwise_sentence, local, rule


def drawn(keys, factors) -> str:
    """The factors of what is drawn from keys.

    Other generators than threefry may draw for a batch of keys what no single key would give, so
    everything about them is needed whole.
    """
    names = [*keys, *factors]
    return " ".join(names if _jax.is_threefry(keys.dtype) else (f"{f}!" for f in names))


@rule("random_bits")
def _(keys, *, out, **_):
    """k -> k n: counters come from global indices, so n may be sharded"""
    return f"{drawn(keys, ()) or '-'} -> {drawn(keys, out[0].factors[len(keys) :]) or '-'}"


@local("random_bits", uneven=True)
def _(call, keys):
    where, full = call.outputs[0], call.out_avals[0].shape
    shape = call.out_shape()
    first = len(call.in_avals[0].shape)
    if shape[first:] == full[first:]:
        return call.bind(keys)
    starts = [call.span(where, full, d)[0] for d in range(first, len(full))]
    return _jax.threefry_bits(keys, call.params["bit_width"], shape[first:], full[first:], starts)


@rule("random_split")
def _(keys, *, shape, **_):
    """k -> k n!"""
    every = " ".join(f"n{i}!" for i in range(len(shape)))
    return f"{drawn(keys, ()) or '-'} -> {drawn(keys, ())} {every}"


@rule("random_fold_in")
def _(keys, data, *, out, **_):
    """k, k -> k"""
    if _jax.is_threefry(keys.dtype):
        return elementwise_sentence([keys, data], out)
    keys, data = keys.whole(*range(len(keys))), data.whole(*range(len(data)))
    return f"{keys}, {data} -> {' '.join(f'{f}!' for f in out[0]) or '-'}"


elementwise("random_seed")


@rule("random_gamma")
def _(keys, a, **_):
    """k, k a! -> k a!: a sample's key is made of k and of its place among all of k's samples"""
    batch = [*range(len(keys))]
    a = a.shared(batch, keys[batch]).whole(*range(len(keys), len(a)))
    return f"{keys}, {a} -> {a}"


@rule("rng_bit_generator")
def _(key, *, out, **_):
    """k! -> k!, n!: a generator that only makes all of its bits"""
    key = key.whole(*range(len(key)))
    return f"{key} -> {key}, {' '.join(f'n{d}!' for d in range(len(out[1]))) or '-'}"


@rule("random_wrap")
def _(data, **_):
    """k 2! -> k"""
    return f"{data.whole(len(data) - 1)} -> {data[:-1]}"


@rule("random_unwrap")
def _(keys, *, out, **_):
    """k -> k 2!"""
    words = [f"{f}!" for f in out[0].factors[len(keys) :]]
    return f"{keys} -> {' '.join([*keys, *words])}"
