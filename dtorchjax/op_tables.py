"""The placement table of a program: which placements of its operands need no communication.

An operator shards through its decomposition, so its table follows from the tables of the
primitives: on one mesh axis, operands are given placements one after the other, and the rows of
every equation are narrowed to those that fit. Nothing that depends on an operand is moved or
sliced; constants are what each row needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from jax.sharding import AbstractMesh

from dtorchjax.graph import Graph, Node, Value, build
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Joint, Partial, Placement, R, Shard, divides, joint
from dtorchjax.plan import communication_inside, fits_locally, is_zero
from dtorchjax.registry import SENDS, summable
from dtorchjax.rows import JointRow, Labels

KINDS = ("sum", "max", "min")
MOST_ROWS = 1000
"""A table that would be longer is cut off there."""


def program_table(closed: Any, sizes: Sequence[int] | None = None) -> PlacementSignature:
    """The table of a closed jaxpr, for its operands and results.

    `sizes` are those of mesh axes; by default, all prime factors of the operands' dims. A row may
    hold for some sizes only, where dims do not divide.

    Raises PlacementError for a primitive without a rule.
    """
    shapes = [tuple(v.aval.shape) for v in closed.jaxpr.invars]
    sizes = (
        sizes or sorted({p for shape in shapes for n in shape for p in _prime_factors(n)}) or [2]
    )
    found: dict[Row, None] = {}
    ways = (True, False) if _Search(closed, 2, "sum", True).graph.has_own_tables() else (True,)
    for own_tables, size, kind in itertools.product(ways, sizes, KINDS):
        for row in _Search(closed, size, kind, own_tables).rows():
            found[row] = None
            if len(found) >= MOST_ROWS:
                return PlacementSignature(tuple(found))
    return PlacementSignature(tuple(found))


def _prime_factors(n: Any) -> set[int]:
    if not isinstance(n, int):
        return set()
    return {p for p in range(2, min(n, 64) + 1) if n % p == 0 and all(p % q for q in range(2, p))}


Rows = dict[Node, list[JointRow]]


class _Search:
    """The rows of one program for one size of the mesh axis and one kind of partial."""

    def __init__(self, closed: Any, size: int, kind: str, own_tables: bool):
        jaxpr = closed.jaxpr
        mesh = AbstractMesh((size,), ("axis",))
        given = [joint((Partial(kind) if summable(Partial(kind), v.aval) else R,))
                 for v in jaxpr.invars]  # fmt: skip
        results = [
            SimpleNamespace(layout=None, partial=True, asked=False, label="", array=False)
            for _ in jaxpr.outvars
        ]
        self.graph: Graph = build(
            closed, mesh, given, given, results, lambda _: joint((R,)), {},
            [""] * len(given), strict=True, own_tables=own_tables,
        )  # fmt: skip
        self.labels = Labels(self.graph, (size,), by_class=False)
        self.start: Rows = dict(self.labels.of)
        for node, v in zip(self.graph.inputs, jaxpr.invars, strict=True):
            self.start[node] = [
                JointRow((), (joint((p,)),))
                for p in _placements(v.aval, kind)
                if divides(v.aval.shape, (p,), (size,))
            ]
        self.free = self._free_of_operands()

    def _free_of_operands(self) -> set[Value]:
        """Values that depend on no operand."""
        depend = set(self.graph.inputs)
        changed = True
        while changed:
            before = len(depend)
            for node in self.graph.nodes:
                if any(v.producer in depend for v in node.inputs):
                    depend.add(node)
            changed = len(depend) > before
        return {v for v in self.graph.values() if v.producer not in depend}

    def rows(self) -> Iterator[Row]:
        rows = self._narrowed(dict(self.start), self.graph.nodes)
        if rows is not None:
            yield from self._choose(rows, 0)

    def _choose(self, rows: Rows, operand: int) -> Iterator[Row]:
        if operand == len(self.graph.inputs):
            yield self._row(self._quiet(rows))
            return
        node = self.graph.inputs[operand]
        for option in rows[node]:
            narrowed = self._narrowed({**rows, node: [option]}, self._users(node))
            if narrowed is not None:
                yield from self._choose(narrowed, operand + 1)

    def _row(self, rows: Rows) -> Row:
        def placed(where: Joint) -> Placement:
            return where.placements[0]

        ins = tuple(placed(rows[n][0].outputs[0]) for n in self.graph.inputs)
        outs = tuple(
            min((placed(r.inputs[0]) for r in rows[n]), key=lambda p: (p != R, str(p)))
            for n in self.graph.outputs
        )
        kinds = {kind for n in self.graph.nodes for kind in self._sent(n, rows[n])}
        return Row(ins, outs, " and ".join(sorted(kinds)))

    def _quiet(self, rows: Rows) -> Rows:
        """Without the rows that send something, where others do."""
        for node in (n for n in self.graph.nodes if n.name in SENDS):
            sizes = self.labels.sizes
            quiet = [r for r in rows[node] if not communication_inside(node, r, sizes)]
            if 0 < len(quiet) < len(rows[node]):
                rows = self._narrowed({**rows, node: quiet}, self._users(node)) or rows
        return rows

    def _sent(self, node: Node, rows: Sequence[JointRow]) -> set[str]:
        """The kinds of collectives that an equation has in all the rows that are left to it."""
        if node.name not in SENDS:
            return set()
        found = [communication_inside(node, row, self.labels.sizes) for row in rows]
        return {sent.kind for several in found for sent in several} if all(found) else set()

    def _users(self, node: Node) -> list[Node]:
        return [user for v in node.outputs for user, _ in v.uses]

    def _narrowed(self, rows: Rows, changed: Sequence[Node]) -> Rows | None:
        """Every node's rows that fit those of its neighbours; None if a node is left without."""
        waiting = dict.fromkeys(changed)
        while waiting:
            node = next(iter(waiting))
            del waiting[node]
            fitting = [row for row in rows[node] if self._fits(node, row, rows)]
            if not fitting:
                return None
            if len(fitting) < len(rows[node]):
                rows[node] = fitting
                waiting.update(dict.fromkeys(self._users(node)))
                waiting.update((v.producer, None) for v in node.inputs if v.producer)
        return rows

    def _fits(self, node: Node, row: JointRow, rows: Rows) -> bool:
        for i, value in enumerate(node.inputs):
            assert value.producer is not None
            there = {r.outputs[value.output] for r in rows[value.producer]}
            if not any(self._same(value, have, row.inputs[i]) for have in there):
                return False
        for i, value in enumerate(node.outputs):
            for user, k in value.uses:
                wanted = {r.inputs[k] for r in rows[user]}
                if not any(self._same(value, row.outputs[i], want) for want in wanted):
                    return False
        return True

    def _same(self, value: Value, have: Joint, want: Joint) -> bool:
        return have == want or (value in self.free and fits_locally(have, want, is_zero(value)))


def _placements(aval: Any, kind: str) -> list[Placement]:
    found: list[Placement] = [R, *(Shard(d) for d, n in enumerate(aval.shape) if n > 1)]
    if summable(Partial(kind), aval):
        found.append(Partial(kind))
    return found
