"""Local programs that send only the rows that move: windows of a sharded dim, stacked totals."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from dtorchjax.parts import Cut, lengths

_counted: contextvars.ContextVar[bool] = contextvars.ContextVar("counted", default=False)


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Inside, programs are traced for their collectives only, whatever they compute."""
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)


class Span(NamedTuple):
    """Rows [first, first + count) of a dim."""

    first: int
    count: int


def spans(n: int, cuts: Sequence[Cut]) -> list[Span]:
    """The rows of every device (major first) of a dim that is cut without blocks."""
    found, parts = [], lengths(n, cuts)[1:]
    for place in itertools.product(*(range(cut.count) for cut in cuts)):
        first, count = 0, n
        for i, part in zip(place, parts, strict=True):
            first, count = first + i * part, min(max(count - i * part, 0), part)
        found.append(Span(first, count))
    return found


def window(
    x: Any, dim: int, held: Sequence[Span], starts: Sequence[int], length: int, fill: Any,
    names: Sequence[str], me: Any, numbers: Sequence[int],
) -> Any:  # fmt: skip
    """Rows [starts[i], starts[i] + length) of a dim for device i, `fill` where there are none.

    `x` is this device's part, `held` the rows of each, `me` this device's number along mesh axes,
    major first: those that cut the dim, and any by which the starts differ. `names` are these axes
    in the mesh's order, and `numbers` what the devices are called in that order, which is the one
    that permutes know. Each device sends those of its rows that others want, in as few permutes as
    there are devices that it sends to or hears from.
    """
    if _counted.get():  # only what is sent is asked for
        for messages in _rounds(held, starts, length):
            size = max(span.count for span in messages.values())
            pairs = [(numbers[o], numbers[i]) for o, i in messages]
            permuted(lax.slice_in_dim(x, 0, size, axis=dim), names, pairs)
        return lax.full((*x.shape[:dim], length, *x.shape[dim + 1 :]), 0, x.dtype)
    lo = entry(starts, me)
    rows = lo + jnp.arange(length)
    spread = [d for d in range(x.ndim) if d != dim]

    def among(first: Any, count: Any) -> Any:
        return jnp.expand_dims((rows >= first) & (rows < first + count), spread)

    first, count = entry([s.first for s in held], me), entry([s.count for s in held], me)
    own = shifted(x, dim, first - lo, length)
    result = jnp.where(among(first, count), own, jnp.asarray(fill, x.dtype))
    for messages in _rounds(held, starts, length):
        size = max(span.count for span in messages.values())
        at, came = [0] * len(held), [Span(0, 0)] * len(held)
        for (sender, receiver), span in messages.items():
            at[sender] = min(span.first - held[sender].first, x.shape[dim] - size)
            # what lies before the span in its message is not wanted, or comes by another one
            came[receiver] = span
        begins = [0] * len(held)
        for sender, receiver in messages:
            begins[receiver] = held[sender].first + at[sender]
        message = lax.dynamic_slice_in_dim(x, entry(at, me), size, dim)
        message = permuted(message, names, [(numbers[o], numbers[i]) for o, i in messages])
        message = shifted(message, dim, entry(begins, me) - lo, length)
        wanted = entry([s.first for s in came], me), entry([s.count for s in came], me)
        result = jnp.where(among(*wanted), message, result)
    return result


def entry(table: Sequence[int], me: Any) -> Any:
    """This device's entry."""
    if len(set(table)) == 1:
        return table[0]
    return jnp.asarray(np.asarray(table, np.int32))[me]


def shifted(x: Any, dim: int, by: Any, length: int) -> Any:
    """Row i of x as row i + by of `length` rows; the others are zero."""
    widths = [(length, length, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), widths)
    start = jnp.clip(length - by, 0, x.shape[dim] + length)
    return lax.dynamic_slice_in_dim(padded, start, length, dim)


def _rounds(
    held: Sequence[Span], starts: Sequence[int], length: int
) -> list[dict[tuple[int, int], Span]]:
    """What is sent, {(from, to): rows}; in one round a device sends and hears once at most.

    Of several devices that hold the same rows the nearest sends them.
    """
    edges = []
    for i, lo in enumerate(starts):
        known = {held[i]}
        for o in sorted(range(len(held)), key=lambda o: abs(i - o)):
            span = held[o]
            first, end = max(lo, span.first), min(lo + length, span.first + span.count)
            if span not in known and first < end:
                known.add(span)
                edges.append((abs(i - o), i - o, o, i, Span(first, end - first)))
    rounds: list[dict[tuple[int, int], Span]] = []
    for _, _, o, i, span in sorted(edges):
        for known in rounds:
            if all(o != a and i != b for a, b in known):
                known[o, i] = span
                break
        else:
            rounds.append({(o, i): span})
    return rounds


def permuted(x: Any, names: Sequence[str], pairs: list[tuple[int, int]]) -> Any:
    return sent_as_bits(lambda x: lax.ppermute(x, tuple(names), pairs), x)


def gathered(x: Any, names: Sequence[str]) -> Any:
    """The values of all devices along mesh axes, stacked in front."""
    return sent_as_bits(lambda x: lax.all_gather(x, tuple(names), axis=0, tiled=False), x)


def sent_as_bits(move: Callable[[Any], Any], x: Any) -> Any:
    """`move(x)`, which changes no element, with elements as XLA sends them as they are.

    On the CPU it sends floats of 16 bits as 32, and has no truth values to send.
    """
    if x.dtype == jnp.bool_:
        return move(x.astype(jnp.uint8)).astype(jnp.bool_)
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 0
    if bits in (8, 16):
        as_integer = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
        return lax.bitcast_convert_type(move(as_integer), x.dtype)
    return move(x)


def movable(aval: Any) -> bool:
    """Keys and symbolic dims are moved whole."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and all(
        isinstance(n, int) for n in aval.shape
    )


def by_permute(
    x: Any, dims: Sequence[int], operands: int = 1, results: int = 1, others: int = 0
) -> list[str]:
    """Rows, as text, of dims that stay cut, where devices send each other what moves."""
    if not movable(x):
        return []
    return [
        f"{', '.join([f'S{d}'] * operands + ['R'] * others)} -> {', '.join([f'S{d}'] * results)}"
        " by permute"
        for d in dims
    ]
