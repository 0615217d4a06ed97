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
from dtorchjax.exchange import permuted, sent_as_bits
from dtorchjax.parts import join, lengths, spread
from dtorchjax.placements import (
    EVEN,
    Allowed,
    Joint,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    elements,
    is_plain,
    joint,
    kinds_of,
    local_shape,
)
from dtorchjax.registry import linear_position


class Move(NamedTuple):
    """One step: `kind` over mesh `axes` (major first), on `dim` (and `to_dim` for an all-to-all).

    kinds: "slice", "mask" (R -> P: all but the first device hold zeros), "all-gather",
    "all-to-all", "all-reduce", "reduce-scatter", "permute"; `op` is the reduction. `padding` is how
    much longer the buffer is than the part before the move, where a dim must be padded to be cut.
    `sums_in` is the type in which terms are added up, where it is wider than theirs by `widening`.
    """

    kind: str
    axes: tuple[int, ...]
    source: Joint
    target: Joint
    dim: int = -1
    to_dim: int = -1
    op: str = "sum"
    padding: float = 1.0
    sums_in: str = ""
    widening: float = 1.0

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
            "all-to-all": (n - 1) / n * self.padding,
            "all-reduce": 2 * (n - 1) / n * self.widening,
            "reduce-scatter": (n - 1) / n * self.padding * self.widening,
            "permute": 1.0,
        }[self.kind]

    @property
    def is_collective(self) -> bool:
        return self.kind not in ("slice", "mask", "empty")


def states(
    shape: Sequence[int], kinds: Sequence[str], sizes: Sequence[int], allowed: Allowed = EVEN
) -> list[Joint]:
    """All joint placements of an array: R, S of dims that divide (or are `allowed` not to), P of
    `kinds`; all axis orders.

    Mesh axes of size 1 are always R.
    """
    choices: list[Placement] = [R]
    for dim, n in enumerate(shape):
        choices += allowed.shards(dim, n)
    choices += [Partial(kind) for kind in kinds]
    per_axis = [choices if size > 1 else [R] for size in sizes]
    return [
        where
        for placements in itertools.product(*per_axis)
        if len(kinds_of(placements)) < 2
        for where in orders(placements)
        if allowed.admits(shape, where, sizes)
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


def moves_from(
    source: Joint, shards: Sequence[Sequence[Shard]], sizes: Sequence[int]
) -> Iterator[Move]:
    """Every move out of a state but permutes, to states that need not exist.

    `shards` has the ways to cut each dim.
    """
    found, rank = source.placements, len(shards)

    def change(axes: Sequence[int], to: Placement) -> list[Placement]:
        return [to if a in axes else p for a, p in enumerate(found)]

    def append(axes: Sequence[int], to: Shard) -> Joint:
        """`axes` become the minor axes of a dim."""
        order = [a for a in source.order if a not in axes]
        return joint(change(axes, to), [*order, *axes])

    for axis, p in enumerate(found):
        if isinstance(p, Replicate) and sizes[axis] > 1:
            for dim in range(rank):
                for to in shards[dim]:
                    yield Move("slice", (axis,), source, append((axis,), to), dim)
            yield Move("mask", (axis,), source, joint(change((axis,), Partial()), source.order))
    for dim in range(rank):
        on = source.axes_on(dim)
        for first in range(len(on)):
            minor = on[first:]
            yield Move("all-gather", minor, source, joint(change(minor, R), source.order), dim)
            for to in itertools.chain(*shards):
                if to.dim != dim:
                    yield Move("all-to-all", minor, source, append(minor, to), dim, to.dim)
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
                        for to in itertools.chain(*shards):
                            target = append(major_first, to)
                            yield Move("reduce-scatter", major_first, source, target, to.dim)


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
    rank: int, legal: tuple[Joint, ...], sizes: tuple[int, ...], slowness: tuple[float, ...],
    shape: tuple[int, ...] | None = None, sums_in: str = "", widening: float = 1.0,
) -> _Moves:  # fmt: skip
    """`shape` where some states have padding or blocks: sizes then do not divide out.

    `sums_in` and `widening` are those of the moves that sum.
    """
    index = {s: i for i, s in enumerate(legal)}
    n = len(legal)
    if shape is None:
        parts = [
            1.0 / math.prod(sizes[a] for a, p in enumerate(s.placements) if isinstance(p, Shard))
            for s in legal
        ]
    else:
        whole = max(elements(shape), 1)
        parts = [elements(local_shape(shape, s, sizes)) / whole for s in legal]
    part = np.array(parts)
    sent, steps = np.full((n, n), np.inf), np.zeros((n, n))
    moves: dict[tuple[int, int], Move] = {}

    def offer(i: int, j: int, move: Move) -> None:
        # a collective over several axes is as slow as the slowest of them
        fraction = move.sent(sizes) * part[i] * max((slowness[a] for a in move.axes), default=1.0)
        if (fraction, move.is_collective) < (sent[i, j], steps[i, j] if (i, j) in moves else 1):
            sent[i, j], steps[i, j], moves[i, j] = fraction, move.is_collective, move

    shards: list[dict[Shard, None]] = [{} for _ in range(rank)]
    for p in (p for s in legal for p in s.placements if isinstance(p, Shard)):
        shards[p.dim][p] = None
    blocks: dict[Any, list[int]] = {}
    for i, s in enumerate(legal):
        for move in moves_from(s, [list(on) for on in shards], sizes):
            j = index.get(move.target)
            if j is not None:
                if move.kind in ("all-reduce", "reduce-scatter") and move.op == "sum":
                    move = move._replace(sums_in=sums_in, widening=widening)
                offer(i, j, move if shape is None else _padded(move, shape, sizes))
        if shape is not None and not is_plain(shape, s, sizes):
            continue  # axes in another order make other parts
        held = tuple(math.prod(sizes[a] for a in s.axes_on(d)) for d in range(rank))
        partial = tuple(p if isinstance(p, Partial) else None for p in s.placements)
        blocks.setdefault((held, partial), []).append(i)
    for (_, partial), group in blocks.items():
        axes = tuple(a for a, n in enumerate(sizes) if n > 1 and partial[a] is None)
        for i, j in itertools.permutations(group, 2):
            offer(i, j, Move("permute", axes, legal[i], legal[j]))
    return _Moves(list(legal), index, moves, part, sent, steps)


def _padded(move: Move, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Move:
    dim = {"all-to-all": move.to_dim, "reduce-scatter": move.dim}.get(move.kind)
    if dim is None:
        return move
    before, after = (local_shape(shape, s, sizes)[dim] for s in (move.source, move.target))
    count = math.prod(sizes[a] for a in move.axes)
    return move._replace(padding=after * count / max(before, 1))


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
    speeds: Speeds | None = None, allowed: Allowed = EVEN, sums_in: str = "", widening: float = 1.0,
) -> Table:  # fmt: skip
    """The table of cheapest paths for arrays of this shape, with partial states of `kinds`.

    Without `speeds`, for the simulated CPU. `allowed` are placements with padding or blocks. Terms
    are added up in the type `sums_in`, where it is `widening` times as wide as theirs.
    """
    speeds = speeds or simulated(len(sizes))
    legal = tuple(states(shape, kinds, sizes, allowed))
    even = all(is_plain(shape, where, sizes) for where in legal)
    plain = _moves(
        len(shape), legal, sizes, speeds.slowness, None if even else shape, sums_in, widening
    )
    nbytes = elements(shape) * itemsize
    copied = LOCAL_COPY * nbytes * np.minimum(plain.part[:, None], plain.part[None, :])
    for (i, j), move in plain.moves.items():
        if move.sums_in:  # to the wider type and back
            copied[i, j] += 2 * LOCAL_COPY * nbytes * widening * plain.part[i]
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


def apply_move(
    x: Any, move: Move, names: Sequence[str], sizes: Sequence[int], shape: Sequence[int]
) -> Any:
    """Run one move on a device's part `x` of an array of (global) `shape`, inside shard_map."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = apply_move(jax.random.key_data(x), move, names, sizes, shape)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_ and move.kind in ("all-reduce", "mask", "reduce-scatter"):
        return apply_move(x.astype(jnp.uint8), move, names, sizes, shape).astype(jnp.bool_)
    if x.size == 0 and move.is_collective:  # which XLA does not take
        return jnp.zeros(local_shape(shape, move.target, sizes), x.dtype)
    if move.sums_in:
        wide = x.astype(move.sums_in)
        return apply_move(wide, move._replace(sums_in=""), names, sizes, shape).astype(x.dtype)
    over = tuple(names[a] for a in move.axes)

    def cut(dim: int) -> Any:
        """`dim` in one part after the other for the devices of these axes, its minor ones."""
        return spread(x, dim, move.target.cuts_on(dim, sizes)[-len(move.axes) :], jnp)

    def joined(x: Any) -> Any:
        """The parts along `move.dim` that came from the devices of these axes, as one."""
        cuts = move.source.cuts_on(move.dim, sizes)
        before = lengths(shape[move.dim], cuts)[-len(move.axes) - 1]
        return join(x, move.dim, before, cuts[-len(move.axes) :], jnp)

    if move.kind == "slice":
        x = cut(move.dim)
        size = x.shape[move.dim] // math.prod(sizes[a] for a in move.axes)
        start = linear_position(move.axes, names, sizes) * size
        return lax.dynamic_slice_in_dim(x, start, size, move.dim)
    if move.kind == "mask":
        first = linear_position(move.axes, names, sizes) == 0
        return jnp.where(first, x, jnp.zeros_like(x))
    if move.kind == "all-gather":
        gather = functools.partial(lax.all_gather, axis_name=over, axis=move.dim, tiled=True)
        return joined(sent_as_bits(gather, x))
    if move.kind == "all-to-all":
        swap = functools.partial(
            lax.all_to_all, axis_name=over, split_axis=move.to_dim, concat_axis=move.dim, tiled=True
        )
        return joined(sent_as_bits(swap, cut(move.to_dim)))
    if move.kind == "reduce-scatter":
        return lax.psum_scatter(cut(move.dim), over, scatter_dimension=move.dim, tiled=True)
    if move.kind == "permute":
        pairs = permutation(move.source, move.target, move.axes, sizes)
        return permuted(x, over, pairs)
    if move.op == "prod":
        return jnp.prod(lax.all_gather(x, over, axis=0, tiled=False), axis=0, dtype=x.dtype)
    return lax.psum(x, over) if move.op == "sum" else reduce_extreme(x, over, move.op)
