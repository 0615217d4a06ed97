"""One row per equation for all mesh axes at once, so that the whole program moves the least.

Every node of the graph is a variable of a `solver.Problem`; its labels are joint rows: one row of
its signature per mesh axis. An edge of the problem is a value: its cost is the cheapest
redistribution between what the producer's row gives and what the consumer's row takes. A value
with several uses gets a variable of its own, "as produced, and one more copy", so that a
redistribution that serves several uses is paid once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dtorchjax import cost, report
from dtorchjax.errors import size_text
from dtorchjax.graph import Graph, Loop, Node, Scope, Value
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Joint, Partial, R, Replicate, Shard, divides, joint
from dtorchjax.redistribute import Move, Table, states, table
from dtorchjax.registry import find_rule
from dtorchjax.solver import Problem, solve


class JointRow(NamedTuple):
    """Placements of operands and results on all mesh axes."""

    inputs: tuple[Joint, ...]
    outputs: tuple[Joint, ...]


# ---- labels --------------------------------------------------------------------------------------

_signatures: dict[Any, PlacementSignature] = {}


def signature(node: Node) -> PlacementSignature:
    """The table of an equation; computed once per primitive, shapes and parameters."""
    ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
    rule = find_rule(node.name)
    key: Any = None
    try:
        key = (rule, *((a.shape, a.dtype) for a in (*ins, *outs)), *sorted(node.params.items()))
        if key in _signatures:
            return _signatures[key]
    except TypeError:  # a parameter that cannot be hashed or sorted
        key = None
    found = rule.signature(ins, outs, dict(node.params))
    if key is not None:
        _signatures[key] = found
    return found


def joint_rows(
    rows: Sequence[Row], in_avals: Sequence[Any], out_avals: Sequence[Any], sizes: tuple[int, ...]
) -> list[JointRow]:
    """All products of one row per mesh axis in which every dim divides, in every axis order."""
    avals = [*in_avals, *out_avals]
    n_in = len(in_avals)
    replicated = Row((R,) * n_in, (R,) * len(out_avals))
    usable = [
        row
        for row in rows
        if all(_fits(p, a) for p, a in zip(row.inputs + row.outputs, avals, strict=True))
    ]
    found: dict[JointRow, None] = {}
    for combination in itertools.product(*(usable if n > 1 else [replicated] for n in sizes)):
        columns = list(zip(*(row.inputs + row.outputs for row in combination), strict=True))
        if not all(divides(a.shape, c, sizes) for a, c in zip(avals, columns, strict=True)):
            continue
        for order in _axis_orders(combination):
            placed = [joint(c, order) for c in columns]
            found[JointRow(tuple(placed[:n_in]), tuple(placed[n_in:]))] = None
    return list(found)


def _fits(placement: Any, aval: Any) -> bool:
    return not isinstance(placement, Shard) or aval.shape[placement.dim] > 1


def _axis_orders(combination: Sequence[Row]) -> Iterable[tuple[int, ...]]:
    groups: dict[Row, list[int]] = {}
    for axis, row in enumerate(combination):
        if any(isinstance(p, Shard) for p in row.inputs + row.outputs):
            groups.setdefault(row, []).append(axis)
    shared = [group for group in groups.values() if len(group) > 1]
    plain = list(range(len(combination)))
    for choice in itertools.product(*(itertools.permutations(group) for group in shared)):
        order = list(plain)
        for group, permuted in zip(shared, choice, strict=True):
            for place, axis in zip(group, permuted, strict=True):
                order[place] = axis
        yield tuple(order)


class Labels:
    """The joint rows of every node of a graph."""

    def __init__(self, graph: Graph, sizes: tuple[int, ...]):
        self.graph, self.sizes = graph, sizes
        self.kinds: dict[Value, set[str]] = {}
        self._rows: dict[Any, list[JointRow]] = {}
        self._find_kinds()
        self.of: dict[Node, list[JointRow]] = {node: self._labels(node) for node in graph.nodes}

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
        mixed = any(isinstance(p, Shard) for p in row.inputs)
        return not partial or any(partial) or mixed

    def _labels(self, node: Node) -> list[JointRow]:
        if node.kind == "literal":
            return [JointRow((), (self.replicated,))]
        if node.kind == "input":
            assert node.fixed is not None
            return [JointRow((), (node.fixed,))]
        if node.kind == "equation":
            return self._equation(node)
        inner = node.inputs[0] if node.kind in ("leave", "output") else node.outputs[0]
        if node.fixed is not None:
            where = [node.fixed]
        else:
            kinds = self.kinds.get(inner, set()) if node.partial_allowed else set()
            where = states(inner.aval.shape, tuple(sorted(kinds)), self.sizes)
        n_in, n_out = len(node.inputs), len(node.outputs)
        if node.kind == "enter":
            return [JointRow((deeper(w),), (w,)) for w in where]
        if node.kind == "leave":
            return [JointRow((w,), (deeper(w),)) for w in where]
        return [JointRow((w,) * n_in, (w,) * n_out) for w in where]

    def _equation(self, node: Node) -> list[JointRow]:
        rows = tuple(row for row in signature(node).rows if self._natural(node, row))
        ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
        key = (rows, tuple(a.shape for a in ins), tuple(a.shape for a in outs))
        if key not in self._rows:
            self._rows[key] = joint_rows(rows, ins, outs, self.sizes)
        return self._rows[key]

    @property
    def replicated(self) -> Joint:
        return joint((R,) * len(self.sizes))

    def table(self, value: Value) -> Table:
        """Paths between all placements that the value's producer and users may have."""
        assert value.producer is not None
        kinds = set(self.kinds.get(value, ()))
        for row in self.of[value.producer]:
            kinds |= _kinds_of(row.outputs[value.output])
        for node, i in value.uses:
            for row in self.of[node]:
                kinds |= _kinds_of(row.inputs[i])
        aval = value.aval
        return table(tuple(aval.shape), aval.dtype.itemsize, tuple(sorted(kinds)), self.sizes)


def _kinds_of(where: Joint) -> set[str]:
    return {p.op for p in where.placements if isinstance(p, Partial)}


def deeper(where: Joint) -> Joint:
    """The placement of a stack of arrays that are placed so."""
    return Joint(
        tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in where.placements),
        where.order,
    )


def canonical(where: Joint, sizes: Sequence[int]) -> Joint:
    """Axes of size 1 hold everything: R."""
    found = [p if n > 1 else R for p, n in zip(where.placements, sizes, strict=True)]
    return joint(found, where.order)


# ---- the problem ---------------------------------------------------------------------------------


def pose(labels: Labels, strict: bool = False) -> Problem:
    """The planning problem; variable i is node i of the graph, copies of values come after.

    strict: only moves without communication, unless the user asked for one.
    """
    problem, sizes = Problem(), labels.sizes
    for node in labels.graph.nodes:
        problem.variable(_row_costs(node, labels.of[node], sizes))
    number = {node: i for i, node in enumerate(labels.graph.nodes)}
    for node in labels.graph.nodes:
        for output, value in enumerate(node.outputs):
            if not value.uses:
                continue
            paths = labels.table(value)
            price = paths.cost * value.weight
            price = np.where(paths.cost >= cost.IMPOSSIBLE / 2, cost.IMPOSSIBLE, price)
            free = price
            if strict:
                price = np.where(_local_moves(paths, is_zero(value)), price, cost.IMPOSSIBLE)
            source = np.array([paths.index[row.outputs[output]] for row in labels.of[node]])
            needs = [
                (number[user], np.array([paths.index[row.inputs[i]] for row in labels.of[user]]))
                for user, i in value.uses
            ]
            asked = [user.asked for user, _ in value.uses]
            if len(needs) == 1:
                user, target = needs[0]
                to = free if asked[0] else price
                problem.connect(number[node], user, to[np.ix_(source, target)])
                continue
            produced = np.unique(source)
            wanted = np.unique(np.concatenate([target for _, target in needs]))
            first, second = (a.ravel() for a in np.meshgrid(produced, wanted, indexing="ij"))
            costly = (paths.cost[first, second] > cost.LATENCY / 2) & (
                paths.cost[first, second] < cost.IMPOSSIBLE / 2
            )
            first = np.concatenate([produced, first[costly]])
            second = np.concatenate([produced, second[costly]])
            copy = problem.variable(price[first, second])
            agree = np.where(source[:, None] == first[None, :], 0.0, cost.IMPOSSIBLE)
            problem.connect(number[node], copy, agree)
            for (user, target), any_move in zip(needs, asked, strict=True):
                to = free if any_move else price
                problem.connect(copy, user, np.minimum(to[first][:, target], to[second][:, target]))
    return problem


def is_zero(value: Value) -> bool:
    """True for zeros that stand in the program: each device may hold them as a term of a sum."""
    maker = value.producer
    if maker is None or maker.kind == "input":
        return False
    if maker.kind == "literal":
        return bool(np.all(np.asarray(maker.literal) == 0))
    kept = ("broadcast_in_dim", "convert_element_type", "reshape")
    return maker.kind == "equation" and maker.name in kept and is_zero(maker.inputs[0])


def fits_locally(have: Joint, wanted: Joint, zero: bool = False) -> bool:
    """True if a device makes its `wanted` part out of its own `have` part (R -> S, zeros -> P)."""
    if have == wanted:
        return True
    for p, q in zip(have.placements, wanted.placements, strict=True):
        if p != q and not (isinstance(p, Replicate) and (isinstance(q, Shard) or zero)):
            return False
    dims = {p.dim for p in have.placements if isinstance(p, Shard)}
    return all(wanted.axes_on(d)[: len(on)] == on for d in dims for on in [have.axes_on(d)])


def _local_moves(paths: Table, zero: bool) -> np.ndarray:
    return np.array([[fits_locally(s, t, zero) for t in paths.states] for s in paths.states])


def _row_costs(node: Node, rows: Sequence[JointRow], sizes: tuple[int, ...]) -> list[float]:
    if node.kind != "equation":
        return [0.0] * len(rows)
    ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
    work = cost.flops(node.name, ins, outs, node.params)
    return [cost.row_cost(work, outs, row, sizes) * node.scope.weight for row in rows]


# ---- the plan ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    `bytes` is what one device sends in one execution, `times` how often it runs, `axes` the mesh
    axes by name; `primitive` and `where` name the equation that needs it, `why` its row.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    primitive: str
    where: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Plan:
    """What every equation does on every mesh axis and every redistribution between them."""

    def __init__(
        self, graph: Graph, mesh: Any, rows: dict[Node, JointRow], tables: dict[Value, Table],
        total: float, bound: float,
    ):  # fmt: skip
        self.graph, self.mesh, self.rows = graph, mesh, rows
        self.sizes = tuple(mesh.shape[n] for n in mesh.axis_names)
        self.tables = tables
        self.cost, self.bound = total, bound
        self.moves: dict[Value, list[tuple[Move, Node, int]]] = {}
        for value in graph.values():
            if value.uses:
                self.moves[value] = self._moves(value)

    def produced(self, value: Value) -> Joint:
        assert value.producer is not None
        return self.rows[value.producer].outputs[value.output]

    def _moves(self, value: Value) -> list[tuple[Move, Node, int]]:
        """Moves that make every placement its users take, each from the cheapest copy there is."""
        paths, have = self.tables[value], [self.produced(value)]
        wanted: dict[Joint, tuple[Node, int]] = {}
        for node, i in value.uses:
            wanted.setdefault(self.rows[node].inputs[i], (node, i))
        found = []
        for target in sorted(
            wanted, key=lambda t: paths.cost[paths.index[have[0]], paths.index[t]]
        ):
            if target in have:
                continue
            source = min(have, key=lambda s: paths.cost[paths.index[s], paths.index[target]])
            for move in paths.path(source, target):
                if move.target not in have:
                    found.append((move, *wanted[target]))
                    have.append(move.target)
        return found

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """All collectives in program order; of a cond, those of the costliest branch."""
        return self._collectives(self.graph.top)

    def _collectives(self, scope: Scope) -> list[Collective]:
        found: list[Collective] = []
        for value in self._values_of(scope):
            found += self._of_value(value)
        for step in scope.steps:
            if isinstance(step, Loop):
                inner = [self._collectives(s) for s in step.scopes]
                if step.kind == "cond":
                    found += max(inner, key=lambda cs: sum(c.bytes * c.times for c in cs))
                else:
                    found += itertools.chain(*inner)
        return found

    def _values_of(self, scope: Scope) -> Iterable[Value]:
        return (v for v in self.moves if v.scope is scope)

    def _of_value(self, value: Value) -> Iterable[Collective]:
        names = self.mesh.axis_names
        for move, node, operand in self.moves[value]:
            if not move.is_collective:
                continue
            row = self.rows[node]
            place = node.where or (value.producer.where if value.producer else None)
            what = node.name or node.label or node.kind
            if node.kind == "equation":
                why = (
                    f"operand {operand} of {what} is {move.source}, needed as {row.inputs[operand]}"
                )
            else:
                why = f"{what} takes {row.inputs[operand]}, not {move.source}"
            yield Collective(
                kind=move.kind,
                axes=tuple(names[a] for a in move.axes),
                bytes=self.tables[value].sent(move, self.sizes),
                times=int(value.scope.times),
                primitive=what,
                where=str(place) if place else "",
                why=why,
            )

    def table(self) -> str:
        """The plan as text: every collective, who needs it where, totals."""
        return report.table_text(self)

    def to_json(self) -> str:
        """The collectives and totals as JSON text."""
        return report.to_json(self)

    def _repr_html_(self) -> str:
        return report.to_html(self)

    def __repr__(self) -> str:
        sent = size_text(self.bytes_per_device)
        return f"Plan({len(self.collectives)} collectives, {sent} per device)"

    @functools.cached_property
    def memory_per_device(self) -> int:
        """Bytes of arrays live at once on one device, before XLA fuses anything."""
        return report.peak_memory(self)

    @property
    def bytes_per_device(self) -> float:
        """What one device sends in one call."""
        return sum(c.bytes * c.times for c in self.collectives)


class Infeasible(Exception):
    """Without communication no choice of rows fits."""

    def __init__(self, labels: Labels):
        super().__init__("no plan without communication")
        self.labels = labels


def make_plan(graph: Graph, mesh: Any, strict: bool = False) -> Plan:
    """Choose a row for every node of the graph."""
    sizes = tuple(mesh.shape[n] for n in mesh.axis_names)
    for node in graph.nodes:
        if node.fixed is not None:
            node.fixed = canonical(node.fixed, sizes)
    labels = Labels(graph, sizes)
    solution = solve(pose(labels, strict))
    if strict and solution.cost >= cost.IMPOSSIBLE / 2:
        raise Infeasible(labels)
    rows = {node: labels.of[node][solution.labels[i]] for i, node in enumerate(graph.nodes)}
    tables = {value: labels.table(value) for value in graph.values() if value.uses}
    return Plan(graph, mesh, rows, tables, solution.cost, solution.bound)


__all__ = ["Collective", "JointRow", "Labels", "Plan", "make_plan", "pose", "signature"]
