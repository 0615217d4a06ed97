"""A plan along the lines of the program: what each one makes, where it lies, what it sends."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dtorchjax import _jax
from dtorchjax.errors import size_text
from dtorchjax.graph import Loop, Node, Scope, Value

if TYPE_CHECKING:
    from dtorchjax.plan import Collective, Plan

MOST = 4
"""Arrays and collectives of one line that are named one by one."""


class Line(NamedTuple):
    """A line of the program, or the head of a loop, `depth` loops inside."""

    depth: int
    where: str
    text: str
    makes: list[str]
    sends: list[str]


def lines_of(plan: Plan) -> Iterator[Line]:
    """The plan's equations in order, those of one line of the program together."""
    needs: dict[Node, list[Collective]] = collections.defaultdict(list)
    for value in plan.moves:
        for node, sent in plan.sent_for(value):
            needs[node].append(sent)
    for node in plan.graph.nodes:
        needs[node] += plan.sent_inside(node)

    def walk(scope: Scope, depth: int) -> Iterator[Line]:
        steps = [s for s in scope.steps if isinstance(s, Loop) or _is_work(s)]
        for where, group in itertools.groupby(steps, key=_place):
            found = list(group)
            if where is None or isinstance(found[0], Loop):
                for step in found:
                    yield from of_loop(step, depth) if isinstance(step, Loop) else ()
                continue
            nodes = [n for n in found if isinstance(n, Node)]
            yield line_of(nodes, depth)

    def of_loop(loop: Loop, depth: int) -> Iterator[Line]:
        times = loop.scopes[0].times
        ports = [*loop.consts, *loop.carries, *loop.entering]
        before = [c for p in ports for c in needs[p]]
        text = f"{loop.kind} x {times:g}" if loop.kind == "scan" else loop.kind
        yield Line(depth, "", text, [], _collectives(before))
        for scope in loop.scopes:
            yield from walk(scope, depth + 1)
        made = [v for p in loop.leaving for v in p.outputs]
        after = [c for p in loop.leaving for c in needs[p]]
        if made:
            yield Line(depth, "", f"end of {loop.kind}", _arrays(plan, made), _collectives(after))

    def line_of(nodes: Sequence[Node], depth: int) -> Line:
        together = set(nodes)
        made = [
            v
            for n in nodes
            for v in n.outputs
            if not v.uses or any(user not in together for user, _ in v.uses)
        ]
        place = nodes[0].where
        text = place.text() if place else ""
        titles = list(dict.fromkeys(n.title for n in nodes))
        sent = [c for n in nodes for c in needs[n]]
        return Line(
            depth,
            str(place or ""),
            text or _some(titles),
            _arrays(plan, made),
            _collectives(sent),
        )

    yield from walk(plan.graph.top, 0)
    last = [c for n in plan.graph.outputs for c in needs[n]]
    results = [n.inputs[0] for n in plan.graph.outputs]
    wheres = [plan.rows[n].inputs[0] for n in plan.graph.outputs]
    made = [f"{_jax.short_type(v.aval)} {w}" for v, w in zip(results, wheres)]
    yield Line(0, "", "the results", _few(made), _collectives(last))


def _is_work(step: object) -> bool:
    return isinstance(step, Node) and step.kind == "equation"


def _place(step: object) -> object:
    return str(step.where) if isinstance(step, Node) else None


def _some(titles: Sequence[str]) -> str:
    return ", ".join(_few(titles))


def _few(items: Sequence[str]) -> list[str]:
    """Equal ones once, with their number; the first ones where they are many."""
    counts = collections.Counter(items)
    found = [f"{item} (x{n})" if n > 1 else item for item, n in counts.items()]
    more = len(found) - MOST
    return [*found[:MOST], f"and {more} others"] if more > 1 else found


def _arrays(plan: Plan, values: Sequence[Value]) -> list[str]:
    return _few([f"{_jax.short_type(v.aval)} {plan.produced(v)}" for v in values])


def _collectives(sent: Sequence[Collective]) -> list[str]:
    groups: dict[tuple[str, str], float] = collections.defaultdict(float)
    for c in sent:
        groups[c.kind, ",".join(c.axes)] += c.bytes * c.times
    return _few([f"{kind} {axes}: {size_text(size)}" for (kind, axes), size in groups.items()])
