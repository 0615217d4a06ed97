"""Placed arrays without a mesh: what every simulated device holds, by its coordinate.

`R`: the whole array. `S(d)`: the i-th part of dim d, whose padding holds garbage. `P(op)`: a term;
the value is the terms' reduction. Whatever is wrong raises `Misplaced`; nothing returns a verdict
that a caller could forget to look at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax.parts import Cut, spread
from dtorchjax.placements import Joint, Partial, R, Shard, joint, local_shape

Coordinate = tuple[int, ...]


class Misplaced(AssertionError):
    """Parts are not those of the whole array; the message names device and index."""


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def on_host(x: Any) -> Any:
    """NumPy arrays but for keys, which NumPy does not know."""
    return x if is_key(x) else np.asarray(x)


def devices(sizes: Sequence[int]) -> Iterator[Coordinate]:
    return itertools.product(*(range(n) for n in sizes))


# ---- whole to parts ------------------------------------------------------------------------------


def shards(
    x: Any, where: Joint, sizes: Sequence[int], rng: np.random.Generator
) -> dict[Coordinate, Any]:
    """The parts of `x`; terms are drawn at random."""
    parts: dict[tuple[tuple[int, int], ...], Any] = {(): x}
    for axis in where.order:  # major first
        placement, n = where.placements[axis], sizes[axis]
        split: dict[tuple[tuple[int, int], ...], Any] = {}
        for place, part in parts.items():
            if isinstance(placement, Shard):
                pieces = slices(part, placement.dim, Cut(n, placement.blocks))
            elif isinstance(placement, Partial):
                pieces = terms(part, placement.op, n, rng)
            else:
                pieces = [part] * n
            split.update({(*place, (axis, i)): piece for i, piece in enumerate(pieces)})
        parts = split
    return {tuple(i for _, i in sorted(place)): part for place, part in parts.items()}


def slices(x: Any, dim: int, cut: Cut) -> list[Any]:
    places = spread(np.arange(1, x.shape[dim] + 1), 0, [cut], np)
    before = (slice(None),) * dim
    found = []
    for rows in np.split(places, cut.count):
        part = x[(*before, np.maximum(rows - 1, 0))]
        if not is_key(x):
            part[(*before, rows == 0)] = garbage(x.dtype)
        found.append(part)
    return found


def garbage(dtype: Any) -> Any:
    """What padding may hold at its worst."""
    if is_inexact(dtype):
        return np.nan
    return True if dtype == np.bool_ else np.iinfo(dtype).max - 2


def real(shape: Sequence[int], where: Joint, sizes: Sequence[int]) -> dict[Coordinate, np.ndarray]:
    """Which elements of the parts are not padding."""
    numbers = np.ones(shape, np.int32)
    dense = joint([R if isinstance(p, Partial) else p for p in where.placements], where.order)
    parts = shards(numbers, dense, sizes, np.random.default_rng(0))
    return {place: part == 1 for place, part in parts.items()}


def terms(x: np.ndarray, op: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """`n` terms of both signs, not alike and some of them tied, whose reduction is exactly `x`.

    Floats are taken to be small multiples of a power of two, so that no term is rounded.
    """
    with np.errstate(all="ignore"):
        if x.dtype == np.bool_:
            found = _logical_terms(x, op, n, rng)
        elif op == "sum":
            found = [_noise(x, -40, 40, rng) for _ in range(n - 1)]
            found.append(functools.reduce(np.subtract, found, x))
            found = [found[i] for i in rng.permutation(n)]
        elif op == "prod":
            found = [_factors(x, i, rng) for i in range(n - 1)]
            divide = np.floor_divide if _is_integer(x) else np.divide
            found.append(functools.reduce(divide, found, x))
            found = [found[i] for i in rng.permutation(n)]
        else:
            found = _bounded_terms(x, op, n, rng)
    return [np.asarray(f, x.dtype) for f in found]


def _is_integer(x: np.ndarray) -> bool:
    return bool(np.issubdtype(x.dtype, np.integer))


def _noise(x: np.ndarray, low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    steps = rng.integers(low, high + 1, x.shape)
    if _is_integer(x):
        return steps.astype(x.dtype)
    if x.dtype.kind == "c":
        return (steps / 8 + 1j * rng.integers(low, high + 1, x.shape) / 8).astype(x.dtype)
    return (steps / 8).astype(x.dtype)


def _factors(x: np.ndarray, which: int, rng: np.random.Generator) -> np.ndarray:
    if not _is_integer(x):
        return rng.choice([-2, -1, -0.5, 0.5, 1, 2], x.shape).astype(x.dtype)
    signs = [-1, 1] if np.issubdtype(x.dtype, np.signedinteger) else [1]
    twice = (x % 2 == 0) & (which == 0) & (rng.random(x.shape) < 0.5)
    return np.where(twice, 2, 1).astype(x.dtype) * rng.choice(signs, x.shape).astype(x.dtype)


def _bounded_terms(x: np.ndarray, op: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    room: Any = 30
    if _is_integer(x):  # terms must not wrap around
        bounds, wide = np.iinfo(x.dtype), x.astype(np.int64)
        room = np.minimum(30, bounds.max - wide if op == "min" else wide - bounds.min)
    decides = rng.integers(0, n, x.shape)
    found = []
    for i in range(n):
        apart = rng.integers(0, np.asarray(room) + 1, x.shape)
        apart = apart.astype(x.dtype) if _is_integer(x) else (apart / 8).astype(x.dtype)
        term = x + apart if op == "min" else x - apart
        if not _is_integer(x):  # beside an infinite term others may be finite
            term = np.where(x == (-np.inf if op == "min" else np.inf), apart, term)
        found.append(np.where(decides == i, x, term))
    return found


def _logical_terms(x: np.ndarray, op: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    decides = rng.integers(0, n, x.shape)
    others = [rng.random(x.shape) < 0.5 for _ in range(n)]
    if op == "max":
        return [np.where(x, (decides == i) | others[i], False) for i in range(n)]
    return [np.where(x, True, (decides != i) & others[i]) for i in range(n)]


# ---- parts to whole ------------------------------------------------------------------------------


def reduce_terms(parts: Sequence[np.ndarray], op: str) -> np.ndarray:
    """The value of a partial array."""
    if parts[0].dtype == np.bool_:
        return functools.reduce({"max": np.logical_or, "min": np.logical_and}[op], parts)
    reduction = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    with np.errstate(all="ignore"):
        return functools.reduce(reduction, parts)


def check_placed(
    parts: dict[Coordinate, Any],
    where: Joint,
    sizes: Sequence[int],
    whole: Any,
    tolerance: float = 0.0,
    only_finite: bool = False,
) -> None:
    """Raises Misplaced unless `parts` are those of `whole` placed so.

    `tolerance` is relative to the largest number around; without one, parts must be equal.
    `only_finite`: where `whole` is infinite or nan, anything goes.
    """
    shape = local_shape(whole.shape, where, sizes)
    for place, part in parts.items():
        if (tuple(part.shape), part.dtype) != (shape, whole.dtype):
            got, wanted = f"{part.dtype}{list(part.shape)}", f"{whole.dtype}{list(shape)}"
            raise Misplaced(f"device {place} holds {got}, not {wanted}")
    found, whole = {k: _data(v) for k, v in parts.items()}, _data(whole)
    if tolerance:
        numbers = [whole, *(found.values() if where.partial_axes() else ())]
        tolerance *= max(map(_largest, numbers))
    for axis in reversed(where.partial_axes()):
        grouped: dict[Coordinate, list[Any]] = {}
        for place in sorted(found):
            grouped.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(found[place])
        found = {k: reduce_terms(v, where.placements[axis].op) for k, v in grouped.items()}
    dense = joint([R if isinstance(p, Partial) else p for p in where.placements], where.order)
    expected = shards(whole, dense, sizes, np.random.default_rng(0))
    counts = real(whole.shape, where, sizes)
    for place, part in sorted(found.items()):
        wanted = np.where(counts[place], expected[place], part)
        _compare(part, wanted, tolerance, only_finite, f"device {place}")


def _data(x: Any) -> np.ndarray:
    """Numbers that NumPy can compare: bfloat16 becomes float32, a key its words."""
    x = np.asarray(jax.random.key_data(x)) if is_key(x) else np.asarray(x)
    return x if x.dtype.kind in "iubfc" else x.astype(np.float32)


def _largest(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.abs(x).max(initial=0, where=np.isfinite(x)))


def _compare(
    got: np.ndarray, wanted: np.ndarray, tolerance: float, only_finite: bool, what: str
) -> None:
    with np.errstate(all="ignore"):
        equal = (got == wanted) | ((got != got) & (wanted != wanted))
        if tolerance:
            equal |= np.abs(got - wanted) <= tolerance
        if only_finite:
            equal |= ~np.isfinite(wanted)
    if not equal.all():
        at = tuple(int(i) for i in np.argwhere(~equal)[0])
        raise Misplaced(f"{what}, index {at}: {got[at]} instead of {wanted[at]}")
