"""From one joint placement to another: the cheapest path of moves, and the moves as collectives.

States are joint placements of one array on all mesh axes; a move is one local operation or one
collective, over one axis or several at once. All pairs of states are solved together (Floyd and
Warshall's algorithm), once per shape, so that the planner can look up any pair.

Bytes are what one device sends with ring algorithms (see `Move.sent`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from dtorchjax.chips import Speeds, simulated
from dtorchjax.cost import IMPOSSIBLE, LOCAL_COPY
from dtorchjax.placements import (
    Joint,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    divides,
    elements,
    joint,
    kinds_of,
)


class Move(NamedTuple):
    """One step: `kind` over mesh `axes` (major first), on `dim` (and `to_dim` for an all-to-all).

    kinds: "slice", "mask" (R -> P: all but the first device hold zeros), "all-gather",
    "all-to-all", "all-reduce", "reduce-scatter", "permute"; `op` is the reduction.
    """

    kind: str
    axes: tuple[int, ...]
    source: Joint
    target: Joint
    dim: int = -1
    to_dim: int = -1
    op: str = "sum"

    def sent(self, sizes: Sequence[int]) -> float:
        """Bytes that one device sends, as a multiple of the bytes of its part before the move."""
        n = math.prod(sizes[a] for a in self.axes)
        if self.kind == "all-reduce" and self.op == "prod":  # no such collective: gather, multiply
            return n - 1
        return {
            "slice": 0.0,
            "mask": 0.0,
            "empty": 0.0,
            "all-gather": n - 1,
            "all-to-all": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": (n - 1) / n,
            "permute": 1.0,
        }[self.kind]

    @property
    def is_collective(self) -> bool:
        return self.kind not in ("slice", "mask", "empty")


def states(shape: Sequence[int], kinds: Sequence[str], sizes: Sequence[int]) -> list[Joint]:
    """All joint placements of an array: R, S of dims that divide, P of `kinds`; all axis orders.

    Mesh axes of size 1 are always R.
    """
    choices: list[Placement] = [R, *(Shard(d) for d in range(len(shape)))]
    choices += [Partial(kind) for kind in kinds]
    per_axis = [choices if size > 1 else [R] for size in sizes]
    return [
        where
        for placements in itertools.product(*per_axis)
        if divides(shape, placements, sizes) and len(kinds_of(placements)) < 2
        for where in orders(placements)
    ]


def orders(placements: Sequence[Placement]) -> list[Joint]:
    """The joint placements that differ only in the order of axes sharing a dim."""
    found = [joint(placements)]
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        axes = found[0].axes_on(dim)
        if len(axes) > 1:
            others = [a for a in range(len(placements)) if a not in axes]
            found = [
                joint(placements, _merge(base.order, group, others))
                for base in found
                for group in itertools.permutations(axes)
            ]
    return found


def _merge(order: Sequence[int], group: Sequence[int], others: Sequence[int]) -> list[int]:
    rest = iter(group)
    return [a if a in others else next(rest) for a in order]


def moves_from(source: Joint, rank: int, sizes: Sequence[int]) -> Iterator[Move]:
    """Every move out of a state but permutes, to states that need not exist."""
    found = source.placements

    def change(axes: Sequence[int], to: Placement) -> list[Placement]:
        return [to if a in axes else p for a, p in enumerate(found)]

    def append(axes: Sequence[int], dim: int) -> Joint:
        """`axes` become the minor axes of `dim`."""
        order = [a for a in source.order if a not in axes]
        return joint(change(axes, Shard(dim)), [*order, *axes])

    for axis, p in enumerate(found):
        if isinstance(p, Replicate) and sizes[axis] > 1:
            for dim in range(rank):
                yield Move("slice", (axis,), source, append((axis,), dim), dim)
            yield Move("mask", (axis,), source, joint(change((axis,), Partial()), source.order))
    for dim in range(rank):
        on = source.axes_on(dim)
        for first in range(len(on)):
            minor = on[first:]
            yield Move("all-gather", minor, source, joint(change(minor, R), source.order), dim)
            for to in range(rank):
                if to != dim:
                    yield Move("all-to-all", minor, source, append(minor, to), dim, to)
    by_op: dict[str, list[int]] = {}
    for axis in source.partial_axes():
        by_op.setdefault(found[axis].op, []).append(axis)  # type: ignore[attr-defined]
    for op, axes in by_op.items():
        for count in range(1, len(axes) + 1):
            for group in itertools.combinations(axes, count):
                target = joint(change(group, R), source.order)
                yield Move("all-reduce", group, source, target, op=op)
                if op == "sum":
                    for major_first in itertools.permutations(group):
                        for dim in range(rank):
                            yield Move(
                                "reduce-scatter", major_first, source, append(major_first, dim), dim
                            )


@dataclasses.dataclass(eq=False)
class _Moves:
    """The states of one kind of array and the moves between them, without sizes in bytes."""

    states: list[Joint]
    index: dict[Joint, int]
    moves: dict[tuple[int, int], Move]
    part: np.ndarray  # part of the array that a device holds, by state
    sent: np.ndarray  # bytes sent (on the fastest axis) by the direct move, as a part of the array
    steps: np.ndarray  # 1 for a collective, else 0


@functools.lru_cache(maxsize=512)
def _moves(
    rank: int, legal: tuple[Joint, ...], sizes: tuple[int, ...], slowness: tuple[float, ...]
) -> _Moves:
    index = {s: i for i, s in enumerate(legal)}
    n = len(legal)
    part = np.array(
        [
            1.0 / math.prod(sizes[a] for a, p in enumerate(s.placements) if isinstance(p, Shard))
            for s in legal
        ]
    )
    sent, steps = np.full((n, n), np.inf), np.zeros((n, n))
    moves: dict[tuple[int, int], Move] = {}

    def offer(i: int, j: int, move: Move) -> None:
        # a collective over several axes is as slow as the slowest of them
        fraction = move.sent(sizes) * part[i] * max((slowness[a] for a in move.axes), default=1.0)
        if (fraction, move.is_collective) < (sent[i, j], steps[i, j] if (i, j) in moves else 1):
            sent[i, j], steps[i, j], moves[i, j] = fraction, move.is_collective, move

    blocks: dict[Any, list[int]] = {}
    for i, s in enumerate(legal):
        for move in moves_from(s, rank, sizes):
            j = index.get(move.target)
            if j is not None:
                offer(i, j, move)
        parts = tuple(math.prod(sizes[a] for a in s.axes_on(d)) for d in range(rank))
        partial = tuple(p if isinstance(p, Partial) else None for p in s.placements)
        blocks.setdefault((parts, partial), []).append(i)
    for (_, partial), group in blocks.items():
        axes = tuple(a for a, n in enumerate(sizes) if n > 1 and partial[a] is None)
        for i, j in itertools.permutations(group, 2):
            offer(i, j, Move("permute", axes, legal[i], legal[j]))
    return _Moves(list(legal), index, moves, part, sent, steps)


@dataclasses.dataclass(eq=False)
class Table:
    """Cheapest paths between all states of one array.

    `cost[i, j]` is in bytes: what is sent on the fastest axis, what starting a
    collective is worth, a little for local copies.
    """

    states: list[Joint]
    index: dict[Joint, int]
    cost: np.ndarray
    following: np.ndarray
    moves: dict[tuple[int, int], Move]
    nbytes: int
    part: np.ndarray

    def path(self, source: Joint, target: Joint) -> list[Move]:
        """The moves from one state to another; empty if they are equal."""
        i, j = self.index[source], self.index[target]
        if self.cost[i, j] >= IMPOSSIBLE:
            raise ValueError(f"no way from {source} to {target}")
        found = []
        while i != j:
            k = int(self.following[i, j])
            found.append(self.moves[i, k])
            i = k
        return found

    def sent(self, move: Move, sizes: Sequence[int]) -> float:
        """Bytes that one device sends in this move."""
        return float(move.sent(sizes) * self.part[self.index[move.source]] * self.nbytes)


@functools.lru_cache(maxsize=4096)
def table(
    shape: tuple[int, ...], itemsize: int, kinds: tuple[str, ...], sizes: tuple[int, ...],
    speeds: Speeds | None = None,
) -> Table:  # fmt: skip
    """The table of cheapest paths for arrays of this shape, with partial states of `kinds`.

    Without `speeds`, for the simulated CPU.
    """
    speeds = speeds or simulated(len(sizes))
    plain = _moves(len(shape), tuple(states(shape, kinds, sizes)), sizes, speeds.slowness)
    nbytes = elements(shape) * itemsize
    copied = LOCAL_COPY * nbytes * np.minimum(plain.part[:, None], plain.part[None, :])
    direct = np.isfinite(plain.sent)
    sent = np.where(direct, plain.sent, 0.0) * nbytes
    cost = np.where(direct, sent + plain.steps * speeds.latency + copied + 1e-3, IMPOSSIBLE)
    n = len(plain.states)
    following = np.tile(np.arange(n), (n, 1))
    np.fill_diagonal(cost, 0.0)
    for k in range(n):
        through = cost[:, k : k + 1] + cost[k : k + 1, :]
        better = through < cost - 1e-9
        cost = np.where(better, through, cost)
        following = np.where(better, following[:, k : k + 1], following)
    return Table(plain.states, plain.index, cost, following, plain.moves, nbytes, plain.part)


def local_table(legal: tuple[Joint, ...], aval: Any) -> Table:
    """The table of what a dfunction keeps: it cannot be moved.

    Zeros of a branch that does not run the dfunction can stand for it (see `lower.Local`), so there
    is a move "empty" from any other placement.
    """
    n = len(legal)
    local = np.array([j.is_local for j in legal])
    cost = np.where(~local[:, None] & local[None, :], 0.0, IMPOSSIBLE)
    np.fill_diagonal(cost, 0.0)
    moves = {
        (i, j): Move("empty", (), legal[i], legal[j])
        for i in range(n)
        for j in range(n)
        if local[j] and not local[i]
    }
    nbytes = elements(aval.shape) * aval.dtype.itemsize
    index = {s: i for i, s in enumerate(legal)}
    following = np.tile(np.arange(n), (n, 1))
    return Table(list(legal), index, cost, following, moves, nbytes, np.ones(n))


# ---- moves as local programs ---------------------------------------------------------------------


def position(axes: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> Any:
    """This device's coordinate along several mesh axes, major first."""
    index: Any = 0
    for axis in axes:
        index = index * sizes[axis] + lax.axis_index(names[axis])
    return index


def permutation(source: Joint, target: Joint, axes: Sequence[int], sizes: Sequence[int]) -> list:
    """Pairs (from, to) of linear device numbers over `axes`, so that each gets the block it needs.

    Replicas of a block are paired in order, so every device sends one block and receives one.
    """
    holders: dict[Any, list[int]] = {}
    places = list(itertools.product(*(range(sizes[a]) for a in axes)))

    def block(where: Joint, place: Sequence[int]) -> tuple:
        at = dict(zip(axes, place, strict=True))
        dims = sorted({p.dim for p in where.placements if isinstance(p, Shard)})
        result = []
        for dim in dims:
            index = 0
            for axis in where.axes_on(dim):
                index = index * sizes[axis] + at[axis]
            result.append((dim, index))
        return tuple(result)

    for number, place in enumerate(places):
        holders.setdefault(block(source, place), []).append(number)
    takers = {key: iter(numbers) for key, numbers in holders.items()}
    return [(next(takers[block(target, place)]), number) for number, place in enumerate(places)]


def reduce_extreme(x: Any, over: tuple[str, ...], op: str) -> Any:
    """The max or min over mesh axes; nan wins, which XLA's all-reduce on the CPU forgets.

    Floats are compared as integers of the same order, in which nan is the most extreme.
    """
    reduction = {"max": lax.pmax, "min": lax.pmin}[op]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduction(x, over)
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bounds = jnp.iinfo(integer)

    def flip(i: Any) -> Any:  # negative floats are ordered the other way round
        return jnp.where(i < 0, i ^ bounds.max, i)

    ordered = flip(lax.bitcast_convert_type(x, integer))
    extreme = bounds.max if op == "max" else bounds.min
    ordered = jnp.where(jnp.isnan(x), jnp.asarray(extreme, integer), ordered)
    return lax.bitcast_convert_type(flip(reduction(ordered, over)), x.dtype)


def apply_move(x: Any, move: Move, names: Sequence[str], sizes: Sequence[int]) -> Any:
    """Run one move on a device's part `x`, inside shard_map."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = apply_move(jax.random.key_data(x), move, names, sizes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_ and move.kind in ("all-reduce", "mask", "reduce-scatter"):
        return apply_move(x.astype(jnp.uint8), move, names, sizes).astype(jnp.bool_)
    over = tuple(names[a] for a in move.axes)
    if move.kind == "slice":
        size = x.shape[move.dim] // math.prod(sizes[a] for a in move.axes)
        start = position(move.axes, names, sizes) * size
        return lax.dynamic_slice_in_dim(x, start, size, move.dim)
    if move.kind == "mask":
        first = position(move.axes, names, sizes) == 0
        return jnp.where(first, x, jnp.zeros_like(x))
    if move.kind == "all-gather":
        return lax.all_gather(x, over, axis=move.dim, tiled=True)
    if move.kind == "all-to-all":
        return lax.all_to_all(x, over, split_axis=move.to_dim, concat_axis=move.dim, tiled=True)
    if move.kind == "reduce-scatter":
        return lax.psum_scatter(x, over, scatter_dimension=move.dim, tiled=True)
    if move.kind == "permute":
        return lax.ppermute(x, over, permutation(move.source, move.target, move.axes, sizes))
    if move.op == "prod":
        return jnp.prod(lax.all_gather(x, over, axis=0, tiled=False), axis=0, dtype=x.dtype)
    return lax.psum(x, over) if move.op == "sum" else reduce_extreme(x, over, move.op)
