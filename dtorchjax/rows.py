"""What each node of a graph may do on all mesh axes at once: its joint rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.chips import Speeds, simulated
from dtorchjax.classes import LARGE, representatives
from dtorchjax.graph import Graph, Node, Value
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.parts import is_even
from dtorchjax.placements import (
    EVEN,
    Allowed,
    Joint,
    Local,
    Partial,
    R,
    Replicate,
    Shard,
    allowed_by,
    divides,
    is_plain,
    joint,
    kinds_of,
)
from dtorchjax.redistribute import Table, local_table, states, table
from dtorchjax.registry import find_rule


class JointRow(NamedTuple):
    """Placements of operands and results on all mesh axes."""

    inputs: tuple[Joint, ...]
    outputs: tuple[Joint, ...]


_signatures: dict[Any, PlacementSignature] = {}


def signature(node: Node) -> PlacementSignature:
    """The table of an equation; computed once per primitive, shapes and parameters."""
    ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
    rule = find_rule(node.name)
    key: Any = None
    try:
        key = (
            rule,
            _jax.settings(),
            *((a.shape, a.dtype) for a in (*ins, *outs)),
            *sorted(node.params.items()),
        )
        if key in _signatures:
            return _signatures[key]
    except TypeError:  # a parameter that cannot be hashed or sorted
        key = None
    found = rule.signature(ins, outs, dict(node.params))
    if key is not None:
        _signatures[key] = found
    return found


def joint_rows(
    rows: Sequence[Sequence[Row]],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    sizes: tuple[int, ...],
    allowed: Allowed = EVEN,
) -> list[JointRow]:
    """All products of one row per mesh axis in which every dim divides, in every axis order.

    `rows` has a list of rows for each mesh axis. A dim that is `allowed` to may have parts that are
    not equal, or blocks, if all dims that the row cuts with it have its size: then the same rows of
    each lie together.
    """
    avals = [*in_avals, *out_avals]
    n_in = len(in_avals)
    usable = [
        [
            row
            for row in [*on_axis, *_in_blocks(on_axis, avals, allowed)]
            if all(
                _fits(p, a, allowed) for p, a in zip(row.inputs + row.outputs, avals, strict=True)
            )
        ]
        if size > 1
        else [whole_row(on_axis, n_in, len(out_avals))]
        for on_axis, size in zip(rows, sizes, strict=True)
    ]
    found: dict[JointRow, None] = {}
    for combination in itertools.product(*usable):
        columns = list(zip(*(row.inputs + row.outputs for row in combination), strict=True))
        if any(len(kinds_of(column)) > 1 for column in columns):
            continue
        sends = any(row.by for row in combination)
        if sends and _cut_twice(combination):
            continue
        if not all(row.groups % devices == 0 for row, devices in _devices(combination, sizes)):
            continue
        even = all(divides(a.shape, c, sizes) for a, c in zip(avals, columns, strict=True))
        if not even and allowed == EVEN:
            continue
        for order in _axis_orders(combination):
            placed = [joint(c, order) for c in columns]
            if not (even or lie_together(placed, avals, sizes, allowed, sends)):
                continue
            found[JointRow(tuple(placed[:n_in]), tuple(placed[n_in:]))] = None
    return list(found)


def _devices(combination: Sequence[Row], sizes: Sequence[int]) -> Iterator[tuple[Row, int]]:
    """The rows of a combination and the number of devices along all axes that have them."""
    for row in set(combination):
        yield row, math.prod(n for r, n in zip(combination, sizes, strict=True) if r == row)


def whole_row(rows: Iterable[Row], n_in: int, n_out: int) -> Row:
    """The row in which every device does all."""
    plain = (
        row for row in rows if all(isinstance(p, Replicate | Local) for p in (*row[0], *row[1]))
    )
    return next(plain, Row((R,) * n_in, (R,) * n_out))


def _fits(placement: Any, aval: Any, allowed: Allowed = EVEN) -> bool:
    if not isinstance(placement, Shard):
        return True
    n = aval.shape[placement.dim]
    return not isinstance(n, int) or n > 1 or n in allowed.uneven


def _cut_twice(combination: Sequence[Row]) -> bool:
    """True if one dim is cut by two rows, of which one sends: each has a program of its own."""
    return any(
        one != other
        and (one.by or other.by)
        and any(
            isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim
            for p, q in zip(
                (*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True
            )
        )
        for one, other in itertools.combinations(combination, 2)
    )


def _in_blocks(rows: Sequence[Row], avals: Sequence[Any], allowed: Allowed) -> list[Row]:
    """The same rows with dims cut in blocks, where all that a row cuts have one size."""
    found = []
    for row in rows if allowed.blocks else ():
        cut = [(p, a) for p, a in zip((*row.inputs, *row.outputs), avals) if isinstance(p, Shard)]
        sizes = {a.shape[p.dim] for p, a in cut}
        for n, blocks in allowed.blocks if len(sizes) == 1 else ():
            if n in sizes and not (row.by or row.groups) and all(p.blocks == 1 for p, _ in cut):
                ins, outs = (
                    tuple(Shard(p.dim, blocks) if isinstance(p, Shard) else p for p in side)
                    for side in (row.inputs, row.outputs)
                )
                found.append(Row(ins, outs))
    return found


def lie_together(
    placed: Sequence[Joint], avals: Sequence[Any], sizes: Sequence[int], allowed: Allowed,
    sends: bool = False,
) -> bool:  # fmt: skip
    """True if each device has the same rows of all that is cut along one axis, or is sent them.

    A row that cuts one dim in blocks, and another of the size of a block, speaks of each block.
    """
    pairs = [(a.shape, where) for a, where in zip(avals, placed, strict=True)]
    if not all(allowed.admits(shape, where, sizes) for shape, where in pairs):
        return False
    if sends:
        return True
    for axis in range(len(sizes)):
        cut = [
            (shape, where, p.dim)
            for shape, where in pairs
            if isinstance(p := where.placements[axis], Shard)
        ]
        ways = [(shape[d], where.cuts_on(d, sizes)) for shape, where, d in cut]
        of_block = {
            (n // on[0].blocks, *(c.count for c in on), len({c.blocks for c in on}))
            for n, on in ways
        }
        if len(of_block) > 1 and not all(is_even(n, on) for n, on in ways):
            return False
    return True


def _axis_orders(combination: Sequence[Row]) -> Iterable[tuple[int, ...]]:
    groups: dict[Row, list[int]] = {}
    for axis, row in enumerate(combination):
        if any(isinstance(p, Shard) for p in row.inputs + row.outputs):
            groups.setdefault(row, []).append(axis)
    shared = [group for group in groups.values() if len(group) > 1]
    plain, finest = list(range(len(combination))), _finest(combination)
    for choice in itertools.product(*(itertools.permutations(group) for group in shared)):
        order = list(plain)
        for group, permuted in zip(shared, choice, strict=True):
            for place, axis in zip(group, permuted, strict=True):
                order[place] = axis
        yield tuple(sorted(order, key=lambda axis: -finest[axis]))


def _finest(combination: Sequence[Row]) -> list[int]:
    """By axis the most blocks in which its row cuts a dim, if another dim of it has fewer.

    Such a row speaks of the blocks of a whole dim (6, 4 -> 24 by S1 -> S0/6): in another's part
    there are fewer, so it cuts first. A row of dims alike may cut first or last.
    """
    found = []
    for row in combination:
        blocks = {p.blocks for p in (*row.inputs, *row.outputs) if isinstance(p, Shard)}
        found.append(max(blocks) if len(blocks) > 1 else 1)
    return found


class Labels:
    """The joint rows of every node of a graph; those of a class are the same list.

    `first[node]` is the first node of the node's class.

    With `current` rows and `free` axes, only those that are the current ones on all other axes.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: tuple[int, ...],
        current: dict[Node, JointRow] | None = None,
        free: Sequence[int] = (),
        by_class: bool = True,
        speeds: Speeds | None = None,
    ):
        self.graph, self.sizes = graph, sizes
        self.allowed = _with_made(graph, allowed_by(_said(graph), sizes), sizes)
        self.current, self.free = current, free
        self.speeds = speeds or simulated(len(sizes))
        self.kinds: dict[Value, set[str]] = {}
        self._rows: dict[Any, list[JointRow]] = {}
        self._find_kinds()
        self.by_class = by_class and len(graph.nodes) >= LARGE
        self.first = {node: node for node in graph.nodes}
        if self.by_class:
            self.first = representatives(graph, lambda v: frozenset(self.kinds.get(v, ())))
        self.local: dict[Value, dict[Joint, None]] = {}  # what dfunctions keep, and where
        self.of: dict[Node, list[JointRow]] = {}
        for node in graph.nodes:
            first = self.first[node]
            self.of[node] = self._labels(node) if first is node else self.of[first]
            self._find_local(node)

    def _kept(self, node: Node, axis: int) -> Row | None:
        """The row that the node must keep on this axis."""
        if self.current is None or axis in self.free:
            return None
        return _on_axis(self.current[node], axis)

    def _find_kinds(self) -> None:
        """Which kinds of partial each value can be by itself, not counting R made partial."""
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes:
                made: list[set[str]] = [set() for _ in node.outputs]
                if node.kind == "equation":
                    for row in signature(node).rows:
                        if self._natural(node, row):
                            for kinds, p in zip(made, row.outputs, strict=True):
                                if isinstance(p, Partial):
                                    kinds.add(p.op)
                elif node.kind == "input":
                    assert node.fixed is not None
                    made[0] = {p.op for p in node.fixed.placements if isinstance(p, Partial)}
                elif node.kind in ("port", "enter", "leave"):
                    kinds = set().union(*(self.kinds.get(v, set()) for v in node.inputs))
                    if node.fixed is not None:
                        kinds = {p.op for p in node.fixed.placements if isinstance(p, Partial)}
                    made = [kinds for _ in node.outputs]
                for value, kinds in zip(node.outputs, made, strict=True):
                    if not kinds <= self.kinds.setdefault(value, set()):
                        self.kinds[value] |= kinds
                        changed = True

    def _natural(self, node: Node, row: Row) -> bool:
        """Some partial operand of the row really occurs (or the row has none)."""
        partial = [
            p.op in self.kinds.get(v, ())
            for p, v in zip(row.inputs, node.inputs, strict=True)
            if isinstance(p, Partial) and _fits(p, v.aval)
        ]
        # beside a sharded operand a partial one may be zeros: scatter-add into a table
        mixed = any(isinstance(p, Shard | Local) for p in row.inputs)
        return not partial or any(partial) or mixed

    def _find_local(self, node: Node) -> None:
        for i, value in enumerate(node.outputs):
            found = {row.outputs[i]: None for row in self.of[node] if row.outputs[i].is_local}
            if found:
                self.local[value] = found

    def _labels(self, node: Node) -> list[JointRow]:
        if node.kind == "literal":
            return [JointRow((), (self.replicated,))]
        if node.kind == "input":
            assert node.fixed is not None
            return [JointRow((), (node.fixed,))]
        if node.kind == "equation":
            return self._equation(node)
        inner = node.inputs[0] if node.kind in ("leave", "output") else node.outputs[0]
        local = {j: None for v in node.inputs for j in self.local.get(v, ())}
        if node.fixed is not None:
            where = [node.fixed]
        elif local:
            where = self._narrowed(node, list(local))
        else:
            kinds = self.kinds.get(inner, set()) if node.partial_allowed else set()
            where = states(inner.aval.shape, tuple(sorted(kinds)), self.sizes, self.allowed)
            if node.as_array:
                where = [w for w in where if is_plain(inner.aval.shape, w, self.sizes)]
            where = self._narrowed(node, where)
        n_in, n_out = len(node.inputs), len(node.outputs)
        if node.kind == "enter":
            return [JointRow((deeper(w),), (w,)) for w in where]
        if node.kind == "leave":
            return [JointRow((w,), (deeper(w),)) for w in where]
        return [JointRow((w,) * n_in, (w,) * n_out) for w in where]

    def _narrowed(self, node: Node, where: list[Joint]) -> list[Joint]:
        for axis in range(len(self.sizes)):
            row = self._kept(node, axis)
            if row is not None:
                p = row.outputs[0] if node.kind == "enter" else row.inputs[0]
                where = [w for w in where if w.placements[axis] == p]
        return where

    def _equation(self, node: Node) -> list[JointRow]:
        natural = tuple(row for row in signature(node).rows if self._natural(node, row))
        kept = [self._kept(node, axis) for axis in range(len(self.sizes))]
        rows = tuple(natural if row is None else _the_row(natural, row) for row in kept)
        ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
        joint_of = getattr(find_rule(node.name), "joint_rows", None)
        found = joint_of(ins, outs, node.params) if joint_of is not None else None
        if found is not None:  # a rule on whole layouts
            whole = [JointRow(*row) for row in found]
            whole = [row for row in whole if self._is_partial_by_itself(node, row)]
            return [row for row in whole if _agrees(row, kept)] or whole
        allowed = getattr(find_rule(node.name), "allowed", lambda found: EVEN)(self.allowed)
        key = (rows, tuple(a.shape for a in ins), tuple(a.shape for a in outs), allowed)
        if key not in self._rows:
            self._rows[key] = joint_rows(rows, ins, outs, self.sizes, allowed)
        return self._rows[key]

    def _is_partial_by_itself(self, node: Node, row: JointRow) -> bool:
        """Every partial operand of the row really occurs."""
        return all(
            kinds_of(where.placements) <= self.kinds.get(value, set())
            for where, value in zip(row.inputs, node.inputs, strict=True)
        )

    @property
    def replicated(self) -> Joint:
        return joint((R,) * len(self.sizes))

    def table(self, value: Value) -> Table:
        """Paths between all placements that the value's producer and users may have."""
        assert value.producer is not None
        kinds = set(self.kinds.get(value, ()))
        for row in self.of[value.producer]:
            kinds |= kinds_of(row.outputs[value.output].placements)
        for node, i in value.uses:
            for row in self.of[node]:
                kinds |= kinds_of(row.inputs[i].placements)
        aval = value.aval
        local: dict[Any, None] = dict(self.local.get(value, {}))
        for node, i in value.uses:
            local.update((j, None) for row in self.of[node] if (j := row.inputs[i]).is_local)
        if local:
            given = (row.outputs[value.output] for row in self.of[value.producer])
            return local_table(tuple(dict.fromkeys([*local, *given])), aval)
        size, wide = aval.dtype.itemsize, self.graph.reduce_dtype
        widening = 1.0
        if wide is not None and jnp.issubdtype(aval.dtype, jnp.floating):
            widening = max(1.0, wide.itemsize / size)
        return table(
            tuple(aval.shape), size, tuple(sorted(kinds)), self.sizes, self.speeds, self.allowed,
            str(wide) if widening > 1 else "", widening,
        )  # fmt: skip


def _said(graph: Graph) -> Iterable[tuple[Sequence[int], Joint]]:
    """(shape, placement) of everything whose placement is given."""
    for node in graph.nodes:
        if node.fixed is not None:
            (value,) = node.outputs[:1] or node.inputs[:1]
            yield value.aval.shape, node.fixed


def _with_made(graph: Graph, found: Allowed, sizes: tuple[int, ...]) -> Allowed:
    """Also the blocks of dims to which equal parts are joined, and the sizes that programs make
    which send rows: of a dim that divides, x[1:] does not.
    """
    uneven, blocks = set(found.uneven), set(found.blocks)
    parts_of = [size for size in sizes if size > 1]

    def divides(n: Any) -> bool:
        return isinstance(n, int) and any(n % k == 0 for k in parts_of)

    for node in graph.nodes:
        for row in signature(node).rows if node.kind == "equation" else ():
            if not row.by:
                continue
            pairs = zip((*row.inputs, *row.outputs), (*node.inputs, *node.outputs), strict=True)
            cut = [v.aval.shape[p.dim] for p, v in pairs if isinstance(p, Shard)]
            if any(divides(n) or n in uneven for n in cut):
                uneven |= {n for n in cut if n > 1 and any(n % k for k in parts_of)}
        if node.name == "concatenate" and len(node.inputs) > 1:
            dim, count = node.params["dimension"], len(node.inputs)
            parts = {v.aval.shape[dim] for v in node.inputs}
            n = node.outputs[0].aval.shape[dim]
            if len(parts) == 1 and isinstance(n, int):
                blocks.add((n, count))
                if not uneven.isdisjoint(parts):
                    uneven.add(n)
    return Allowed(frozenset(uneven), frozenset(blocks))


def _agrees(row: JointRow, kept: Sequence[Row | None]) -> bool:
    """True if it is the kept row on every axis that has one."""
    return all(
        axis_row is None or _on_axis(row, axis) == axis_row for axis, axis_row in enumerate(kept)
    )


def _the_row(rows: Sequence[Row], kept: Row) -> tuple[Row, ...]:
    """The row of a table with these placements, which knows by what; one in blocks is in none."""
    found = tuple(r for r in rows if (r.inputs, r.outputs) == (kept.inputs, kept.outputs))
    return found or (kept,)


def _on_axis(row: JointRow, axis: int) -> Row:
    return Row(
        tuple(j.placements[axis] for j in row.inputs),
        tuple(j.placements[axis] for j in row.outputs),
    )


def deeper(where: Joint) -> Joint:
    """The placement of a stack of arrays that are placed so."""
    return Joint(
        tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in where.placements),
        where.order,
    )


def canonical(where: Joint, sizes: Sequence[int]) -> Joint:
    """Axes of size 1 hold everything: R."""
    found = [
        p if n > 1 or isinstance(p, Local) else R
        for p, n in zip(where.placements, sizes, strict=True)
    ]
    return joint(found, where.order)
