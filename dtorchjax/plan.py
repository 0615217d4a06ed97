"""One row per equation for all mesh axes at once, so that the whole program moves the least.

Every node of the graph is a variable of a `solver.Problem`; its labels are joint rows: one row of
its signature per mesh axis. An edge of the problem is a value: its cost is the cheapest
redistribution between what the producer's row gives and what the consumer's row takes. A value
with several uses gets a variable of its own, "as produced, and one more copy", so that a
redistribution that serves several uses is paid once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtorchjax import cost, memory, report
from dtorchjax.chips import Speeds, seconds, speeds_of
from dtorchjax.errors import size_text
from dtorchjax.graph import Graph, Loop, Node, Scope, Value
from dtorchjax.memory import is_short_lived
from dtorchjax.merge import merged_reductions
from dtorchjax.notation import PlacementSignature
from dtorchjax.placements import Joint, Partial, R, Replicate, Shard, joint
from dtorchjax.redistribute import Move, Table
from dtorchjax.registry import SENDS, find_rule
from dtorchjax.rows import JointRow, Labels, canonical, signature, whole_row
from dtorchjax.solver import Problem, Solution, lower_bound, solve

LATER_IS_CHEAPER = 1e-6
"""By how much, of their price, moves at the end of a program are cheaper than at its start."""

MOST_ROWS = 200
"""Joint rows of one equation, more than which are not looked at all at once on three axes."""


# ---- the problem ---------------------------------------------------------------------------------


def pose(
    labels: Labels, strict: bool = False, prices: Mapping[Value, float] | None = None
) -> Problem:
    """The planning problem: a variable per class of nodes, in order; copies of values come after.

    strict: only moves without communication, unless the user asked for one.
    prices: what it costs to hold one byte of a value on one device, as produced or moved.
    """
    problem, first = Problem(), labels.first
    members = collections.Counter(first.values())
    number = {node: i for i, node in enumerate(members)}
    for node, count in members.items():
        problem.variable(_row_costs(node, labels) * count)
    for values in _alike(labels):
        value = values[0]
        assert value.producer is not None
        producer, output = first[value.producer], value.output
        paths = labels.table(value)
        # of two plans that cost the same the one that moves later: it holds less, and small
        # reductions wait for each other (see `merge`)
        late = 1 - LATER_IS_CHEAPER * number[producer] / len(number)
        price = paths.cost * (value.weight * late * len(values))
        price = np.where(paths.cost >= cost.IMPOSSIBLE / 2, cost.IMPOSSIBLE, price)
        source = np.array([paths.index[row.outputs[output]] for row in labels.of[producer]])
        if prices:
            holding = sum(prices.get(v, 0.0) for v in values) * paths.nbytes * paths.part
            unary = problem.unary[number[producer]]
            problem.unary[number[producer]] = unary + holding[source]
            if not is_short_lived(value):
                price = price + holding * ~np.eye(len(holding), dtype=bool)
        free = price
        if strict:
            price = np.where(_local_moves(paths, is_zero(value)), price, cost.IMPOSSIBLE)
        needs = [
            (number[first[user]], np.array([paths.index[r.inputs[i]] for r in labels.of[user]]))
            for user, i in value.uses
        ]
        asked = [user.asked for user, _ in value.uses]
        if len(needs) == 1:
            user, target = needs[0]
            to = free if asked[0] else price
            problem.connect(number[producer], user, to[np.ix_(source, target)])
            continue
        produced = np.unique(source)
        wanted = np.unique(np.concatenate([target for _, target in needs]))
        have, made = (a.ravel() for a in np.meshgrid(produced, wanted, indexing="ij"))
        costly = (paths.cost[have, made] > labels.speeds.latency / 2) & (
            paths.cost[have, made] < cost.IMPOSSIBLE / 2
        )
        have = np.concatenate([produced, have[costly]])
        made = np.concatenate([produced, made[costly]])
        copy = problem.variable(price[have, made])
        agree = np.where(source[:, None] == have[None, :], 0.0, cost.IMPOSSIBLE)
        problem.connect(number[producer], copy, agree)
        for (user, target), any_move in zip(needs, asked, strict=True):
            to = free if any_move else price
            problem.connect(copy, user, np.minimum(to[have][:, target], to[made][:, target]))
    return problem


def _alike(labels: Labels) -> Iterable[list[Value]]:
    """The used values of a graph, those together whose producers and users are in one class."""
    groups: dict[Any, list[Value]] = {}
    for value in labels.graph.values():
        if value.uses:
            assert value.producer is not None
            uses = [(labels.first[user], i) for user, i in value.uses]
            key = (
                labels.first[value.producer],
                value.output,
                tuple(sorted(uses, key=lambda u: (id(u[0]), u[1]))),
            )
            groups.setdefault(key, []).append(value)
    return groups.values()


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
    if have == wanted or wanted.is_local:
        return True
    for p, q in zip(have.placements, wanted.placements, strict=True):
        term = zero and q == Partial()
        if p != q and not (isinstance(p, Replicate) and (isinstance(q, Shard) or term)):
            return False
    dims = {p.dim for p in have.placements if isinstance(p, Shard)}
    return all(wanted.axes_on(d)[: len(on)] == on for d in dims for on in [have.axes_on(d)])


def _local_moves(paths: Table, zero: bool) -> np.ndarray:
    return _fitting(tuple(paths.states), zero)


@functools.lru_cache(maxsize=256)
def _fitting(states: tuple[Joint, ...], zero: bool) -> np.ndarray:
    """`fits_locally` of all pairs; most are ruled out axis by axis, all at once."""
    numbers: dict[Any, int] = {}
    codes = [[numbers.setdefault(p, len(numbers)) for p in s.placements] for s in states]
    taken = [isinstance(p, Shard) or (zero and p == Partial()) for p in numbers]
    whole = [isinstance(p, Replicate) for p in numbers]
    have, wanted = np.array(codes)[:, None], np.array(codes)[None]
    fits = ((have == wanted) | (np.array(whole)[have] & np.array(taken)[wanted])).all(-1)
    fits |= [s.is_local for s in states]
    for s, t in np.argwhere(fits):
        fits[s, t] = fits_locally(states[s], states[t], zero)
    fits.setflags(write=False)
    return fits


def _row_costs(node: Node, labels: Labels) -> np.ndarray:
    rows = labels.of[node]
    if node.kind != "equation" or labels.graph.eager:
        return np.zeros(len(rows))
    ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
    rule = find_rule(node.name)
    flops = getattr(rule, "flops", None)  # of a dfunction's body
    work = cost.work(
        node.name, ins, outs, node.params, rule.moves, labels.speeds, flops and flops(node.params)
    )
    costs = [cost.row_cost(work, outs, r, labels.sizes) for r in rows]
    for i, row in enumerate(rows):
        for sent in communication_inside(node, row, labels.sizes):
            slow = max(labels.speeds.slowness[a] for a in sent.axes)
            costs[i] += (sent.bytes * slow + labels.speeds.latency) * sent.times
    return np.array(costs) * node.scope.weight


def communication_inside(node: Node, row: JointRow, sizes: tuple[int, ...]) -> Sequence[Any]:
    """The collectives that an equation's own program makes in this row."""
    if node.kind != "equation":
        return ()
    inside = getattr(find_rule(node.name), "communication", None)
    if inside is None:
        return ()
    if node.name in SENDS and not _sends(signature(node), row):
        return ()
    ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
    return inside(node.eqn.primitive, ins, outs, node.params, *row, sizes)


def _sends(table: PlacementSignature, row: JointRow) -> bool:
    """True if on some axis it is a row that names a collective."""
    named = {(r.inputs, r.outputs) for r in table.rows if r.by}
    return any(
        (tuple(j.placements[a] for j in row.inputs), tuple(j.placements[a] for j in row.outputs))
        in named
        for a in range(len((*row.inputs, *row.outputs)[0].placements))
    )


# ---- the plan ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    `bytes` is what one device sends in one execution, `times` how often it runs, `axes` the mesh
    axes by name, `seconds` the estimated time of one execution, `dtype` the type of what is sent;
    `primitive` and `where` name the equation that needs it, `why` its row.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    primitive: str
    where: str
    why: str
    seconds: float
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Plan:
    """What every equation does on every mesh axis and every redistribution between them."""

    def __init__(
        self, graph: Graph, mesh: Any, rows: dict[Node, JointRow], tables: dict[Value, Table],
        total: float, bound: float | Callable[[], float],
    ):  # fmt: skip
        self.graph, self.mesh, self.rows = graph, mesh, rows
        self.sizes = tuple(mesh.shape[n] for n in mesh.axis_names)
        self.speeds = speeds_of(mesh)
        self.tables = tables
        self.cost, self._bound = total, bound
        self.moves: dict[Value, list[tuple[Move, Node, int]]] = {}
        for value in graph.values():
            if value.uses:
                self.moves[value] = self._moves(value)
        self.merged = merged_reductions(self)

    @property
    def bound(self) -> float:
        """A cost below which there is no plan: `cost` itself for most programs.

        For a program of more than a thousand equations it is found when it is first asked for,
        which takes longer than planning; 0 on meshes of more than two axes.
        """
        if callable(self._bound):
            self._bound = self._bound()
        return self._bound

    @property
    def known_bound(self) -> float | None:
        """`bound`, or None if it would have to be found first."""
        return None if callable(self._bound) else self._bound

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
            found += (c for _, c in self.sent_for(value))
        for step in scope.steps:
            if isinstance(step, Node):
                found += self.sent_inside(step)
            if isinstance(step, Loop):
                inner = [self._collectives(s) for s in step.scopes]
                if step.kind == "cond":
                    found += max(inner, key=lambda cs: sum(c.bytes * c.times for c in cs))
                else:
                    found += itertools.chain(*inner)
        return found

    def sent_inside(self, node: Node) -> Iterable[Collective]:
        """The collectives of an equation's own program."""
        body = node.params.get("body")
        for sent in communication_inside(node, self.rows[node], self.sizes):
            yield Collective(
                kind=sent.kind,
                axes=tuple(self.mesh.axis_names[a] for a in sent.axes),
                bytes=sent.bytes,
                times=int(node.scope.times) * sent.times,
                primitive=node.title,
                where=str(node.where or ""),
                why=f"inside `{body.name}`" if body else self._own_way(node),
                seconds=seconds(sent.bytes, sent.axes, self.mesh),
                dtype=sent.dtype,
            )

    def _own_way(self, node: Node) -> str:
        """What an equation's own program is for."""
        if node.name == "settled":
            return "a reduction that is settled here"
        ins, outs = (", ".join(map(str, side)) for side in self.rows[node])
        return f"inside {node.title} for {ins} -> {outs}"

    def _values_of(self, scope: Scope) -> Iterable[Value]:
        return (v for v in self.moves if v.scope is scope)

    def sent_for(self, value: Value) -> Iterable[tuple[Node, Collective]]:
        """The collectives that move a value, each with the first node that needs what it makes."""
        names = self.mesh.axis_names
        for move, node, operand in self.moves[value]:
            group = self.merged.get((value, move), [(value, move)])
            if not move.is_collective or group[0] != (value, move):
                continue
            row = self.rows[node]
            place = node.where or (value.producer.where if value.producer else None)
            what = node.title
            if node.kind == "equation":
                why = (
                    f"operand {operand} of {what} is {move.source}, needed as {row.inputs[operand]}"
                )
            else:
                why = f"{what} takes {row.inputs[operand]}, not {move.source}"
            if len(group) > 1:
                why += f"; and {len(group) - 1} other small reductions"
            size = sum(self.tables[v].sent(m, self.sizes) for v, m in group)
            yield (
                node,
                Collective(
                    kind=move.kind,
                    axes=tuple(names[a] for a in move.axes),
                    bytes=size,
                    times=int(value.scope.times),
                    primitive=what,
                    where=str(place) if place else "",
                    why=why,
                    seconds=seconds(size, move.axes, self.mesh),
                    dtype=move.sums_in or str(value.aval.dtype),
                ),
            )

    def table(self) -> str:
        """The plan as text: every collective, who needs it where, totals."""
        return report.table_text(self)

    def verify(self, compiled: jax.stages.Compiled) -> str:
        """Compare with a compiled program, `step.lower(*args).compile()`.

        Returns a line for each group of mesh axes with the planned and the compiled bytes, and how
        many collectives XLA merged or split. Raises PlacementError with these lines where the bytes
        differ by more than 2 % (and 64 bytes). On the CPU XLA sends 16-bit floats as 32-bit ones.
        """
        return report.verify(self, compiled.as_text() or "")

    def diff(self, other: Plan) -> str:
        """What `other` sends that this plan does not, and the other way round, as a table."""
        return report.difference(self, other)

    def to_json(self) -> str:
        """The collectives and totals as JSON text."""
        return report.to_json(self)

    def _repr_html_(self) -> str:
        return report.to_html(self)

    def __repr__(self) -> str:
        sent = size_text(self.bytes_per_device)
        return f"Plan({len(self.collectives)} collectives, {sent} per device)"

    @functools.cached_property
    def peak(self) -> memory.Peak:
        """The fullest moment of a call on one device, and what it holds then."""
        return memory.peak(self)

    @property
    def memory_per_device(self) -> int:
        """Bytes that one device holds at the fullest moment: arguments, results, what is between.

        An estimate: which results of elementwise operations XLA never writes is guessed.
        """
        return int(self.peak.bytes)

    @property
    def bytes_per_device(self) -> float:
        """What one device sends in one call."""
        return sum(c.bytes * c.times for c in self.collectives)

    @property
    def seconds(self) -> float:
        """The estimated time of all collectives of one call, one after the other."""
        return sum(c.seconds * c.times for c in self.collectives)


class Infeasible(Exception):
    """No choice of rows fits: without communication, or at all (a partial result nobody makes)."""

    def __init__(self, labels: Labels):
        super().__init__("no plan")
        self.labels = labels


def make_plan(
    graph: Graph, mesh: Any, strict: bool = False, prices: Mapping[Value, float] | None = None
) -> Plan:
    """Choose a row for every node of the graph.

    prices: bytes sent that it is worth not to hold one byte of a value; the plan's cost and bound
    are without them.
    """
    sizes, speeds = tuple(mesh.shape[n] for n in mesh.axis_names), speeds_of(mesh)
    for node in graph.nodes:
        if node.fixed is not None:
            node.fixed = canonical(node.fixed, sizes)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if len(axes) <= 2 or graph.eager or _most_rows(graph, len(axes)) <= MOST_ROWS:
        labels = Labels(graph, sizes, speeds=speeds)
        solution, total = _solved(labels, strict, prices)
        if total >= cost.IMPOSSIBLE / 2:
            raise Infeasible(labels)
        rows = _chosen(labels, solution)
        bound = 0.0 if prices else solution.bound
        if labels.by_class:
            bound = functools.partial(_bound, graph, sizes, strict, total, speeds)
    else:
        labels, total, rows = _by_pairs_of_axes(graph, sizes, speeds, axes, strict, prices)
        bound = 0.0
    tables = {value: labels.table(value) for value in graph.values() if value.uses}
    return Plan(graph, mesh, rows, tables, total, bound)


def _solved(
    labels: Labels, strict: bool, prices: Mapping[Value, float] | None
) -> tuple[Solution, float]:
    """The solution with prices for memory, and its cost without."""
    solution = solve(pose(labels, strict, prices))
    if not prices:
        return solution, solution.cost
    problem = pose(labels, strict)
    return solution, problem.cost(solution.labels, range(len(problem.unary)))


def _bound(
    graph: Graph, sizes: tuple[int, ...], strict: bool, upper: float, speeds: Speeds
) -> float:
    """The lower bound without classes, to 1 %."""
    labels = Labels(graph, sizes, by_class=False, speeds=speeds)
    slack = 1 + 2 * LATER_IS_CHEAPER  # prices depend a little on the place in the program
    return min(upper, lower_bound(pose(labels, strict), upper * slack, 0.01))


def _most_rows(graph: Graph, axes: int) -> int:
    """The most joint rows that an equation has, roughly."""
    counts = (len(signature(n).rows) ** axes for n in graph.nodes if n.kind == "equation")
    return max(counts, default=0)


def _chosen(labels: Labels, solution: Solution) -> dict[Node, JointRow]:
    number = {node: i for i, node in enumerate(dict.fromkeys(labels.first.values()))}
    return {n: labels.of[n][solution.labels[number[f]]] for n, f in labels.first.items()}


def _all_replicated(graph: Graph, sizes: tuple[int, ...]) -> dict[Node, JointRow]:
    whole = joint((R,) * len(sizes))
    rows: dict[Node, JointRow] = {}
    kept: dict[Value, Joint] = {}  # what dfunctions keep for their backward pass
    for node in graph.nodes:
        n_in, n_out = len(node.inputs), len(node.outputs)
        if node.kind == "equation":
            row = whole_row(signature(node).rows, n_in, n_out)
            sides = [tuple(joint((p,) * len(sizes)) for p in side) for side in row[:2]]
        else:
            where = next((kept[v] for v in node.inputs if v in kept), whole)
            sides = [(where,) * n_in, (where,) * n_out]
        rows[node] = JointRow(*sides)
        kept.update((v, j) for v, j in zip(node.outputs, sides[1], strict=True) if j.is_local)
    return rows


def _by_pairs_of_axes(
    graph: Graph, sizes: tuple[int, ...], speeds: Speeds, axes: Sequence[int], strict: bool,
    prices: Mapping[Value, float] | None,
) -> tuple[Labels, float, dict[Node, JointRow]]:  # fmt: skip
    """Three axes and more have too many joint rows: two axes at a time, the others as they are.

    From everything replicated, until a round over all pairs of axes brings nothing. There is no
    lower bound.
    """
    rows, best, total = _all_replicated(graph, sizes), np.inf, np.inf
    while True:
        before = best
        for pair in itertools.combinations(axes, 2):
            labels = Labels(graph, sizes, rows, pair, speeds=speeds)
            solution, without_prices = _solved(labels, strict, prices)
            if solution.cost < best - 1e-6:
                rows, best, total = _chosen(labels, solution), solution.cost, without_prices
        if best >= before * 0.999:
            break
    if total >= cost.IMPOSSIBLE / 2:
        raise Infeasible(Labels(graph, sizes))
    return Labels(graph, sizes, rows, (), speeds=speeds), total, rows


__all__ = ["Collective", "JointRow", "Labels", "Plan", "make_plan", "pose", "signature"]
