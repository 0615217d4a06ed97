"""What one device holds while a plan runs: bytes at the peak, and of which values.

XLA fuses elementwise computations and data movement into their users, so that their results are
never written; this is estimated here equation by equation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dtorchjax.graph import Barrier, Node, Scope, Value, entered
from dtorchjax.placements import Joint, elements, local_shape

if TYPE_CHECKING:
    from dtorchjax.plan import Plan

WRITTEN = (
    "dot_general", "conv_general", "ragged_dot", "scatter", "gather", "sort", "top_k", "cum", "fft",
    "reduce", "argm", "select_and", "random_", "threefry", "cholesky", "triangular", "eigh", "svd",
    "lu", "qr", "householder", "dynamic_update", "concatenate",
)  # fmt: skip
"""Primitives (by how their names begin) whose results are written even if used only once."""
EXPENSIVE = ("exp", "log", "tan", "sin", "cos", "div", "sqrt", "rsqrt", "pow", "erf", "logistic")
"""Elementwise primitives that are not computed again for every user."""
READ = ("dot_general", "conv_general", "ragged_dot", "scatter", "sort", "top_k", "cum", "fft")
"""Primitives whose operands are written before."""


class Peak(NamedTuple):
    """Bytes at the fullest moment, and what is live then: the copies of a value, by placement."""

    bytes: float
    live: frozenset[tuple[Value, Joint]]


def peak(plan: Plan) -> Peak:
    """The fullest moment of one call.

    Arguments and results have buffers of their own throughout; a donated argument's serves for
    results.
    """
    graph, rows = plan.graph, plan.rows
    arguments = [_size(plan, n.outputs[0], rows[n].outputs[0]) for n in graph.inputs]
    constants = sum(_size(plan, n.outputs[0], rows[n].outputs[0]) for n in graph.constants)
    results = sum(_size(plan, n.inputs[0], rows[n].inputs[0]) for n in graph.outputs)
    donated = sum(arguments[i] for i in graph.donated)
    inner = _peak(plan, graph.top)
    held = sum(arguments) + constants + max(0.0, results - donated)
    return Peak(held + inner.bytes, inner.live)


def _size(plan: Plan, value: Value, where: Joint) -> float:
    shape = local_shape(value.aval.shape, where, plan.sizes)
    return elements(shape) * value.aval.dtype.itemsize


def is_fused(value: Value) -> bool:
    """True if XLA most likely computes the value inside its users."""
    maker = value.producer
    if maker is None or maker.kind == "literal":
        return True
    if maker.kind != "equation" or maker.name.startswith(WRITTEN):
        return False
    if len(value.uses) > 1 and maker.name.startswith(EXPENSIVE):
        return False
    return all(
        user.kind == "equation" and user.scope is value.scope and not user.name.startswith(READ)
        for user, _ in value.uses
    )


AGAIN = "again"
"""The name of a port through which an array's late uses get it (see `remat`)."""


def is_short_lived(value: Value) -> bool:
    """True if copies of the value serve near uses only: far ones take it through a port.

    A copy that enters a loop stays while the loop runs.
    """
    ports = [value.producer, *(user for user, _ in value.uses)]
    if any(user.kind == "enter" or user.name in ("scan", "while") for user, _ in value.uses):
        return False
    return any(port is not None and port.name == AGAIN for port in ports)


class _Moment(NamedTuple):
    reads: Sequence[tuple[Node, int]]
    makes: Sequence[Value]
    scopes: Sequence[Scope]


def moments(scope: Scope) -> Iterator[_Moment]:
    """What each step of a scope reads and makes in this scope, and its inner scopes."""
    for step in scope.steps:
        if isinstance(step, Node):
            yield _Moment([(step, i) for i in range(len(step.inputs))], step.outputs, [])
        elif isinstance(step, Barrier):
            yield _Moment([(p, 0) for p in step.ports], [p.outputs[0] for p in step.ports], [])
        else:
            first = [(p, 0) for p in entered(step)]
            last = [p.outputs[-1] for p in (*step.carries, *step.leaving)]
            yield _Moment(first, last, step.scopes)


def _peak(plan: Plan, scope: Scope) -> Peak:
    """The fullest moment of a scope; copies live from their first to their last use."""
    steps = list(moments(scope))
    span: dict[tuple[Value, Joint], list[int]] = {}
    for i, (reads, makes, _) in enumerate(steps):
        for value in makes:
            if not is_fused(value):
                span[value, plan.produced(value)] = [i, i]
        for node, operand in reads:
            value, where = node.inputs[operand], plan.rows[node].inputs[operand]
            if (value, where) in span:
                span[value, where][1] = i
            elif value in plan.moves and where != plan.produced(value):
                span[value, where] = [i, i]
                if (value, plan.produced(value)) in span:
                    span[value, plan.produced(value)][1] = i
    for node in plan.graph.outputs:
        span.pop((node.inputs[0], plan.rows[node].inputs[0]), None)
    change = [0.0] * (len(steps) + 2)
    for (value, where), (start, end) in span.items():
        change[start] += _size(plan, value, where)
        change[end + 1] -= _size(plan, value, where)
    best, now = Peak(0.0, frozenset()), 0.0
    at, inside = 0, Peak(0.0, frozenset())
    for i, (_, _, scopes) in enumerate(steps):
        now += change[i]
        inner = max(
            (_peak(plan, s) for s in scopes), key=lambda p: p.bytes, default=Peak(0.0, frozenset())
        )
        if now + inner.bytes > best.bytes:
            best, at, inside = Peak(now + inner.bytes, frozenset()), i, inner
    live = {key for key, (start, end) in span.items() if start <= at <= end}
    return Peak(best.bytes, inside.live | live)
