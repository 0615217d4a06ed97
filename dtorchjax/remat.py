"""Holding less: residuals of loops are computed again, far uses get arrays fetched again.

A scan that was differentiated saves residuals of every step for the backward scan. Those that
follow from what the step began with (its carry and its slices) can be computed again there, as
`jax.checkpoint` does, without asking the user. Outside loops, the late uses of an array are cut off
from the early ones by a barrier, so that a gathered copy need not be held in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jax.core import ShapedArray

from dtorchjax import cost
from dtorchjax.graph import Barrier, Graph, Loop, Node, Scope, Value, entered, in_order, scopes
from dtorchjax.memory import AGAIN

FAR = 16
"""Steps between two uses of an array, from which on it may be fetched again for the second; in a
long program one step in twenty of all."""


# ---- residuals of loops --------------------------------------------------------------------------


def recompute_residuals(graph: Graph, contractions: bool) -> bool:
    """Let backward scans compute residuals again, in place; False if there are none.

    Unless `contractions`, the results of contractions are saved and only what follows from them by
    elementwise work and data movement is computed again. Results of inner loops are always saved.
    """
    changed = False
    for forward, backward in list(_linked_scans(graph)):
        changed |= _Recomputation(graph, forward, backward, contractions).run()
    if changed:
        without_dead_nodes(graph)
    return changed


def _linked_scans(graph: Graph) -> Iterator[tuple[Loop, Loop]]:
    """Scans of which the second takes, step by step, what the first one leaves."""
    for scope in scopes(graph.top):
        loops = [step for step in scope.steps if isinstance(step, Loop) and step.kind == "scan"]
        maker = {port: loop for loop in loops for port in loop.leaving}
        for backward in loops:
            for forward in dict.fromkeys(maker.get(_maker(port)) for port in backward.entering):
                if forward and forward.scan.length == backward.scan.length:  # type: ignore[union-attr]
                    yield forward, backward


def _maker(port: Node) -> Any:
    return port.inputs[0].producer


class _Recomputation:
    """Moves the computation of residuals from the forward scan into the backward scan."""

    def __init__(self, graph: Graph, forward: Loop, backward: Loop, contractions: bool):
        self.graph, self.forward, self.backward = graph, forward, backward
        self.contractions = contractions
        self.body, self.inner = forward.scopes[0], backward.scopes[0]
        self.outer = forward.leaving[0].scope
        loops = [step for step in self.body.steps if isinstance(step, Loop)]
        self.of_inner_loops = {p for loop in loops for p in (*loop.carries, *loop.leaving)}
        self.there: dict[Value, Value] = {}  # values of the forward body, in the backward body

    def run(self) -> bool:
        wanted = {
            port: _maker(port).inputs[0]
            for port in self.backward.entering
            if _maker(port) in self.forward.leaving
        }
        replaced = [port for port, value in wanted.items() if not self._saved(value)]
        if not replaced:
            return False
        computed = self._slice(wanted[port] for port in replaced)
        steps = [self._clone(step, computed) for step in self.body.steps]
        self.inner.steps[:0] = [step for step in steps if step is not None]
        for port in replaced:
            _redirect(port.outputs[0], self._fetch(wanted[port]))
            port.inputs[0].uses.remove((port, 0))
            self.backward.entering.remove(port)
        return True

    def _saved(self, value: Value) -> bool:
        """True for what the forward scan must hand over; what it gets itself is there anyway."""
        node = value.producer
        assert node is not None
        if node in self.forward.carries or node in self.of_inner_loops:
            return True
        if node.kind != "equation":
            return False
        avals = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
        return not self.contractions and bool(cost.flops(node.name, *avals, node.params))

    def _slice(self, wanted: Iterable[Value]) -> set[Node]:
        """The nodes of the forward body that make the wanted values from what is saved."""
        given = {*self.forward.consts, *self.forward.entering}
        found: set[Node] = set()
        todo = list(wanted)
        while todo:
            value = todo.pop()
            node = value.producer
            if (
                value.scope is self.body
                and node not in found
                and node not in given
                and not self._saved(value)
            ):
                assert node is not None
                found.add(node)
                todo += node.inputs
        return found

    def _clone(self, step: Any, computed: set[Node]) -> Any:
        if isinstance(step, Barrier):
            ports = [self._clone_node(p) for p in step.ports if p in computed]
            return Barrier(ports) if ports else None
        return self._clone_node(step) if isinstance(step, Node) and step in computed else None

    def _clone_node(self, node: Node) -> Node:
        inputs = [self._fetch(value) for value in node.inputs]
        outputs = [Value(v.aval, self.inner) for v in node.outputs]
        self.there.update(zip(node.outputs, outputs, strict=True))
        clone = dataclasses.replace(node, inputs=[], outputs=[], scope=self.inner)
        _connect(clone, inputs, outputs)
        return clone

    def _fetch(self, value: Value) -> Value:
        """A value of the forward body in the backward body."""
        if value.scope is not self.body:
            return value
        if value not in self.there:
            node = value.producer
            assert node is not None
            if node in self.forward.consts:
                self.there[value] = self._port(self.backward.consts, "port", node.inputs[0], value)
            elif node in self.forward.entering:
                self.there[value] = self._port(
                    self.backward.entering, "enter", node.inputs[0], value
                )
            else:
                self.there[value] = self._port(
                    self.backward.entering, "enter", self._stack(value), value
                )
        return self.there[value]

    def _port(self, ports: list[Node], kind: str, outside: Value, like: Value) -> Value:
        """The inner value of the backward scan's port for an outer value; made if there is none."""
        for port in ports:
            if port.inputs[0] is outside:
                return port.outputs[0]
        inside = Value(like.aval, self.inner)
        port = Node(kind, [], [], self.inner, name="scan", where=self.backward.entering[0].where)
        _connect(port, [outside], [inside])
        ports.append(port)
        return inside

    def _stack(self, value: Value) -> Value:
        """All steps' values of a forward value, as the forward scan's result."""
        for port in self.forward.leaving:
            if port.inputs[0] is value:
                return port.outputs[0]
        length = self.forward.scan.length  # type: ignore[union-attr]
        aval = ShapedArray((length, *value.aval.shape), value.aval.dtype)
        stack = Value(aval, self.outer)
        port = Node("leave", [], [], self.outer, name="scan", where=self.forward.leaving[0].where)
        _connect(port, [value], [stack])
        self.forward.leaving.append(port)
        return stack


# ---- far uses ------------------------------------------------------------------------------------


def separate_far_uses(graph: Graph, values: Collection[Value]) -> bool:
    """Give late uses of these arrays a port of their own, behind a barrier; False if none has any.

    What enters loops is left out (it can be gathered inside them), and so is what is inside the
    loops of a forward and a backward pass, where nothing is held for long. The barrier waits for
    the last value that is made before the late user, so that XLA neither merges the two copies nor
    makes the second one early.
    """
    changed = False
    layers = {s for pair in _linked_scans(graph) for loop in pair for s in loop.scopes}
    for scope in scopes(graph.top):
        if scope in layers:
            continue
        at = {node: i for i, step in enumerate(scope.steps) for node in entered(step)}
        late: dict[int, list[tuple[Value, list[tuple[Node, int]]]]] = {}
        for value, uses in _uses_by_step(at, scope):
            if value not in values or any(user.kind == "enter" for user, _ in uses):
                continue
            for i in range(1, len(uses)):
                first = at[uses[i][0]]
                far = max(FAR, len(scope.steps) // 20)
                if first - at[uses[i - 1][0]] >= far:
                    group = [u for u in uses[i:] if at[u[0]] - first < far]
                    late.setdefault(first, []).append((value, group))
        barriers, split = {}, {value for groups in late.values() for value, _ in groups}
        for step, groups in late.items():
            last = _last_made(scope, at, step, split)
            if last is not None:
                ports = [_pass(value, uses, scope) for value, uses in (*groups, last)]
                barriers[step] = Barrier(ports)
        scope.steps[:] = [
            new
            for i, step in enumerate(scope.steps)
            for new in ([barriers[i], step] if i in barriers else [step])
        ]
        changed |= bool(barriers)
    if changed:
        graph.nodes[:] = in_order(graph)
    return changed


def _uses_by_step(
    at: dict[Node, int], scope: Scope
) -> Iterator[tuple[Value, list[tuple[Node, int]]]]:
    """The values of a scope, and their uses in it in order."""
    for value in dict.fromkeys(v for node in at for v in node.inputs if v.scope is scope):
        yield value, sorted((u for u in value.uses if u[0] in at), key=lambda u: at[u[0]])


def _last_made(
    scope: Scope, at: dict[Node, int], step: int, others: set[Value]
) -> tuple[Value, list[tuple[Node, int]]] | None:
    """The value made last before a step that is used from there on, and those uses."""
    for before in reversed(scope.steps[:step]):
        if isinstance(before, Node):
            for value in before.outputs:
                uses = [u for u in value.uses if at.get(u[0], -1) >= step]
                if uses and value not in others:
                    return value, uses
    return None


def _pass(value: Value, uses: list[tuple[Node, int]], scope: Scope) -> Node:
    """A port through which these uses get the value."""
    port, passed = Node("port", [], [], scope, name=AGAIN), Value(value.aval, scope)
    for node, operand in uses:
        value.uses.remove((node, operand))
        node.inputs[operand] = passed
        passed.uses.append((node, operand))
    _connect(port, [value], [passed])
    return port


# ---- changing a graph ----------------------------------------------------------------------------


def _connect(node: Node, inputs: list[Value], outputs: list[Value]) -> None:
    for value in inputs:
        value.uses.append((node, len(node.inputs)))
        node.inputs.append(value)
    for value in outputs:
        value.producer, value.output = node, len(node.outputs)
        node.outputs.append(value)


def _redirect(old: Value, new: Value) -> None:
    for node, operand in old.uses:
        node.inputs[operand] = new
        new.uses.append((node, operand))
    old.uses.clear()


def without_dead_nodes(graph: Graph) -> None:
    """Drop nodes whose results nobody uses; arguments, constants and carries stay."""
    loops = {
        port: ports
        for scope in scopes(graph.top)
        for step in scope.steps
        if isinstance(step, Loop) and step.kind == "scan"
        for ports in (step.consts, step.entering, step.leaving)
        for port in ports
    }
    order = in_order(graph)
    removable = {n for n in order if n.kind in ("equation", "literal") or n in loops}
    removable |= {
        p for s in scopes(graph.top) for b in s.steps if isinstance(b, Barrier) for p in b.ports
    }
    dead: set[Node] = set()
    for node in reversed(order):
        if node in removable and not any(v.uses for v in node.outputs):
            dead.add(node)
            for operand, value in enumerate(node.inputs):
                value.uses.remove((node, operand))
            if node in loops:
                loops[node].remove(node)
    for scope in scopes(graph.top):
        for step in scope.steps:
            if isinstance(step, Barrier):
                step.ports[:] = [p for p in step.ports if p not in dead]
        scope.steps[:] = [
            s for s in scope.steps
            if s not in dead and not (isinstance(s, Barrier) and not s.ports)
        ]  # fmt: skip
    graph.nodes[:] = in_order(graph)
