"""Small reductions over the same axes become one collective.

A gradient step reduces many small arrays (biases, scales, norms, losses); each all-reduce alone
costs a latency. Those that can run at one moment, after all of them are made and before the first
is needed, are reduced as one vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtorchjax.graph import Loop, Node, Scope, Value, entered, scopes
from dtorchjax.redistribute import Move

if TYPE_CHECKING:
    from dtorchjax.plan import Plan

SMALL = 2
"""Up to how many times what starting a collective is worth an array is copied into a vector."""


def merged_reductions(plan: Plan) -> dict[tuple[Value, Move], list[tuple[Value, Move]]]:
    """Members of a merged reduction -> all members, in order."""
    found: dict[tuple[Value, Move], list[tuple[Value, Move]]] = {}
    for scope in scopes(plan.graph.top):
        made, needed = _times(plan, scope)
        waiting = [
            (needed[value, move], made[value], order, value, move)
            for order, value in enumerate(made)
            for move, _, _ in plan.moves.get(value, ())
            if _mergeable(plan, value, move)
        ]
        waiting.sort(key=lambda w: w[:3])
        while waiting:
            deadline, _, _, first, move = waiting[0]
            kind = _kind(first, move)
            group = [
                (v, m) for _, at, _, v, m in waiting if at < deadline and _kind(v, m) == kind
            ] or [(first, move)]
            waiting = [w for w in waiting if (w[3], w[4]) not in group]
            if len(group) > 1:
                found.update(dict.fromkeys(group, group))
    return found


def _kind(value: Value, move: Move) -> tuple:
    return move.axes, move.op, value.aval.dtype


def _mergeable(plan: Plan, value: Value, move: Move) -> bool:
    return (
        move.kind == "all-reduce"
        and move.op != "prod"
        and move.source == plan.produced(value)
        and value.aval.dtype.kind in "iufV"
        and plan.tables[value].sent(move, plan.sizes) <= SMALL * plan.speeds.latency
    )


def _times(plan: Plan, scope: Scope) -> tuple[dict[Value, int], dict[tuple[Value, Move], int]]:
    """At which step each value of a scope is made, and each of its moves is first needed."""
    at: dict[Node, int] = {}
    made: dict[Value, int] = {}
    for i, step in enumerate(scope.steps):
        for node in entered(step):
            at[node] = i
    for node in plan.graph.nodes:
        for value in node.outputs:
            if value.scope is scope and value in plan.moves:
                made[value] = at.get(node, -1)
    for i, step in enumerate(scope.steps):
        if isinstance(step, Loop):
            for port in [*step.carries, *step.leaving]:
                made.update((v, i) for v in port.outputs if v in made and v.scope is scope)
    needed: dict[tuple[Value, Move], int] = {}
    end = len(scope.steps)
    for value in made:
        before = {m.target: m for m, _, _ in plan.moves[value]}
        for node, operand in value.uses:
            when = at.get(node, end)
            if operand > 0 and node.kind == "port":
                when = end  # what a loop or branch gives back
            move = before.get(plan.rows[node].inputs[operand])
            while move is not None:
                needed[value, move] = min(needed.get((value, move), end), when)
                move = before.get(move.source)
    return made, needed
