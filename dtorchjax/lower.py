"""From a plan to one local program under one shard_map. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from dtorchjax import _jax
from dtorchjax.graph import Barrier, Loop, Node, Scope, Value
from dtorchjax.memory import AGAIN
from dtorchjax.padding import filled, summed_up
from dtorchjax.placements import Joint
from dtorchjax.plan import Plan
from dtorchjax.redistribute import Move, apply_move
from dtorchjax.registry import LOCALS, LocalCall, linear_position
from dtorchjax.rows import JointRow


def spec(where: Joint, rank: int, names: Sequence[str]) -> PartitionSpec:
    """The PartitionSpec of a placement without partial axes."""
    dims = [tuple(names[a] for a in where.axes_on(d)) for d in range(rank)]
    return PartitionSpec(*(d if len(d) > 1 else d[0] if d else None for d in dims))


class Local:
    """Runs a plan's scopes on one device's parts."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.names, self.sizes = plan.mesh.axis_names, plan.sizes
        self.on_cpu = plan.mesh.devices.flat[0].platform == "cpu"
        self.arrays: dict[Value, dict[Joint, Any]] = {}

    def give(self, value: Value, x: Any) -> None:
        self.arrays[value] = {self.plan.produced(value): x}

    def fetch(self, node: Node, operand: int, outer: bool = False) -> Any:
        """A node's operand in the placement that its row takes; every copy is made once."""
        value, target = node.inputs[operand], self.plan.rows[node].inputs[operand]
        have = self.arrays[value]
        if outer:  # a copy made inside a loop must not be seen outside
            have = dict(have)
        if target not in have:
            self._make(value, target, have, together=not outer)
        return have[target]

    def _make(self, value: Value, target: Joint, have: dict[Joint, Any], together: bool) -> None:
        """Make one copy of a value by the plan's move to it, and those that it is made of."""
        move = next(m for m, _, _ in self.plan.moves[value] if m.target == target)
        if move.source not in have:
            self._make(value, move.source, have, together)
        if together and (value, move) in self.plan.merged:
            self._reduce_together(self.plan.merged[value, move])
        elif move.kind == "empty":
            have[target] = NOTHING
        else:
            have[target] = apply_move(
                have[move.source], move, self.names, self.sizes, value.aval.shape
            )

    def _reduce_together(self, group: Sequence[tuple[Value, Move]]) -> None:
        """One collective for several small arrays of the same dtype."""
        parts = [self.arrays[v][m.source] for v, m in group]
        vector = jnp.concatenate([part.reshape(-1) for part in parts])
        vector = apply_move(vector, group[0][1], self.names, self.sizes, vector.shape)
        start = 0
        for (value, move), part in zip(group, parts, strict=True):
            self.arrays[value][move.target] = vector[start : start + part.size].reshape(part.shape)
            start += part.size

    def run(self, scope: Scope) -> None:
        for step in scope.steps:
            if isinstance(step, Barrier):
                parts = _jax.optimization_barrier([self.fetch(p, 0) for p in step.ports])
                if step.ports[0].name == AGAIN and self.on_cpu:
                    parts = [*(_apart(x, parts[-1]) for x in parts[:-1]), parts[-1]]
                for port, x in zip(step.ports, parts, strict=True):
                    self.give(port.outputs[0], x)
            elif isinstance(step, Loop):
                getattr(self, "_" + step.kind)(step)
            elif step.kind == "literal":
                aval = step.outputs[0].aval
                self.give(step.outputs[0], jnp.asarray(step.literal, aval.dtype))
            elif step.kind == "port":
                outer = step.inputs[0].scope is not scope
                self.give(step.outputs[0], self.fetch(step, 0, outer))
            else:
                self._equation(step)

    def _equation(self, node: Node) -> None:
        row = self.plan.rows[node]
        operands = [self._operand(node, row, i) for i in range(len(node.inputs))]
        call = LocalCall(
            primitive=node.eqn.primitive,
            params=node.params,
            in_avals=[v.aval for v in node.inputs],
            out_avals=[v.aval for v in node.outputs],
            inputs=row.inputs,
            outputs=row.outputs,
            sizes=self.sizes,
            position=self.position,
            names=self.names,
        )
        program = LOCALS.get(node.name)
        results = program(call, *operands) if program else call.bind(*operands)
        if not isinstance(results, list | tuple):
            results = [results]
        for value, x in zip(node.outputs, results, strict=True):
            self.give(value, x)

    def position(self, axes: tuple[int, ...]) -> Any:
        return linear_position(axes, self.names, self.sizes)

    def _operand(self, node: Node, row: JointRow, i: int) -> Any:
        """An operand, with neutral padding where the equation sums it up."""
        x, shape, where = self.fetch(node, i), node.inputs[i].aval.shape, row.inputs[i]
        if not any(j.partial_axes() for j in row.outputs) or where.is_local:
            return x
        ops = summed_up(where, row.outputs, len(shape))
        return filled(x, shape, where, self.sizes, self.position, ops)

    def result(self, node: Node) -> Any:
        """A result of the program: its padding is zero."""
        x, shape, where = self.fetch(node, 0), node.inputs[0].aval.shape, self.plan.rows[node]
        if where.inputs[0].is_local:
            return x
        x = _strong_result(x, node)
        return filled(x, shape, where.inputs[0], self.sizes, self.position, ["sum"] * len(shape))

    def _scan(self, loop: Loop) -> None:
        parts = loop.scan
        assert parts is not None
        (body,) = loop.scopes
        consts = [self.fetch(port, 0) for port in loop.consts]
        first = [_strong(self.fetch(port, 0), port) for port in loop.carries]
        stacked = [self.fetch(port, 0) for port in loop.entering]

        def step(carry: Sequence[Any], entering: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            for ports, xs in (
                (loop.consts, consts),
                (loop.carries, carry),
                (loop.entering, entering),
            ):
                for port, x in zip(ports, xs, strict=True):
                    self.give(port.outputs[0], x)
            self.run(body)
            after = [_strong(self.fetch(port, 1), port) for port in loop.carries]
            return after, [self.fetch(port, 0) for port in loop.leaving]

        last, results = lax.scan(
            step, first, stacked, length=parts.length, reverse=parts.reverse, unroll=parts.unroll
        )
        for port, x in zip([*loop.carries, *loop.leaving], [*last, *results], strict=True):
            self.give(port.outputs[-1], x)

    def _while(self, loop: Loop) -> None:
        test, body = loop.scopes
        split = loop.test_consts
        consts = [self.fetch(port, 0) for port in loop.consts]
        first = [_strong(self.fetch(port, 0), port) for port in loop.carries]

        def enter(which: int, carry: Sequence[Any]) -> None:
            ports = loop.consts[:split] if which == 0 else loop.consts[split:]
            for port, x in zip(
                ports, consts[:split] if which == 0 else consts[split:], strict=True
            ):
                self.give(port.outputs[0], x)
            for port, x in zip(loop.carries, carry, strict=True):
                self.give(port.outputs[which], x)

        def go_on(carry: Sequence[Any]) -> Any:
            enter(0, carry)
            self.run(test)
            assert loop.test is not None
            return self.fetch(loop.test, 0)

        def step(carry: Sequence[Any]) -> list[Any]:
            enter(1, carry)
            self.run(body)
            return [_strong(self.fetch(port, 1), port) for port in loop.carries]

        for port, x in zip(loop.carries, lax.while_loop(go_on, step, first), strict=True):
            self.give(port.outputs[-1], x)

    def _cond(self, loop: Loop) -> None:
        assert loop.test is not None
        index = self.fetch(loop.test, 0)
        operands = [self.fetch(port, 0) for port in loop.consts]

        def branch(which: int) -> Callable[..., list[Any]]:
            def run(*parts: Any) -> list[Any]:
                for port, x in zip(loop.consts, parts, strict=True):
                    self.give(port.outputs[which], x)
                self.run(loop.scopes[which])
                results = [_strong(self.fetch(port, which), port) for port in loop.leaving]
                for port, x in zip(loop.leaving, results, strict=True):
                    if x is not NOTHING and not _is_array(x):
                        kept[port] = jax.tree.structure(x)
                return [x if _is_array(x) else jax.tree.leaves(x) for x in results]

            return run

        kept: dict[Node, Any] = {}  # for backward passes of dfunctions: one branch's, or another's
        branches = [branch(b) for b in range(len(loop.scopes))]
        if any(self.plan.produced(port.outputs[0]).is_local for port in loop.leaving):
            branches = _with_zeros(branches, operands)
        results = lax.switch(index, branches, *operands)
        for port, x in zip(loop.leaving, results, strict=True):
            self.give(port.outputs[0], jax.tree.unflatten(kept[port], x) if port in kept else x)


class _Nothing:
    """What a branch of a cond keeps for the backward pass of a dfunction that another one runs."""


NOTHING = _Nothing()
jax.tree_util.register_pytree_node(_Nothing, lambda _: ((), None), lambda _, __: NOTHING)


def _with_zeros(branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> list[Any]:
    """Branches that return zeros where they keep nothing and another branch keeps arrays."""
    columns = zip(*(jax.eval_shape(branch, *operands) for branch in branches), strict=True)
    shapes = [max(column, key=lambda x: len(jax.tree.leaves(x))) for column in columns]

    def filled(x: Any, like: Any) -> Any:
        if jax.tree.leaves(x):
            return x
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

    def complete(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: [filled(x, s) for x, s in zip(branch(*xs), shapes, strict=True)]

    return [complete(branch) for branch in branches]


def _is_array(x: Any) -> bool:
    """False for what a dfunction keeps, a tree of arrays."""
    return hasattr(x, "dtype")


def _apart(x: Any, last: Any) -> Any:
    """`x` as the result of a computation that XLA cannot see through.

    XLA on the CPU drops optimization barriers before it merges equal collectives.
    """
    if not (_is_array(x) and _is_array(last)):
        return x
    if last.size == 0 or not (
        jnp.issubdtype(x.dtype, jnp.number) and jnp.issubdtype(last.dtype, jnp.number)
    ):
        return x
    some = last.ravel()[0].real.astype(jnp.float32)
    never = (some != some) & (some > 0)
    return jnp.where(never, jnp.zeros_like(x), x)


def _strong(x: Any, port: Node) -> Any:
    """A carry's type must not change; weak types of literals would."""
    return lax.convert_element_type(x, port.outputs[0].aval.dtype) if _is_array(x) else x


def lower(plan: Plan) -> Callable[..., list[Any]]:
    """`plan` as a function of whole arrays: the arguments, then the closed-over arrays.

    It is one shard_map; results come in the placements of the plan's outputs.
    """
    graph, names = plan.graph, plan.mesh.axis_names
    inputs = [*graph.inputs, *graph.constants]

    def local(*parts: Any) -> list[Any]:
        run = Local(plan)
        for node, x in zip(inputs, parts, strict=True):
            run.give(node.outputs[0], drop_terms(x, plan.rows[node].outputs[0]))
        run.run(graph.top)
        return [add_terms(run.result(node), plan.rows[node].inputs[0]) for node in graph.outputs]

    run = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=tuple(
            storage_spec(plan.rows[n].outputs[0], n.outputs[0].aval.ndim, names) for n in inputs
        ),
        out_specs=[
            storage_spec(plan.rows[n].inputs[0], n.inputs[0].aval.ndim, names)
            for n in graph.outputs
        ],
        check_vma=False,
    )
    weak = [bool(getattr(n.inputs[0].aval, "weak_type", False)) for n in graph.outputs]

    def typed(*storages: Any) -> list[Any]:
        """A shard_map forgets weak types, a jax.jit does not."""
        return [_jax.with_weak_type(x) if w else x for x, w in zip(run(*storages), weak)]

    return typed if any(weak) else run


def _strong_result(x: Any, node: Node) -> Any:
    return jnp.asarray(x, node.inputs[0].aval.dtype)


def storage_spec(where: Joint, rank: int, names: Sequence[str]) -> PartitionSpec:
    """How an array is stored: one leading dim per partial axis, sharded on that axis.

    What a dfunction keeps has one for every mesh axis, in all its arrays.
    """
    if where.is_local:
        return PartitionSpec(*names)
    return PartitionSpec(*(names[a] for a in where.partial_axes()), *spec(where, rank, names))


def drop_terms(x: Any, where: Joint) -> Any:
    """Storage -> a device's own term."""
    if where.is_local:
        return jax.tree.map(lambda y: y.reshape(y.shape[len(where.placements) :]), x)
    n = len(where.partial_axes())
    return x.reshape(x.shape[n:]) if n else x


def add_terms(x: Any, where: Joint) -> Any:
    """A device's own term -> storage."""
    if where.is_local:
        return jax.tree.map(lambda y: y.reshape((1,) * len(where.placements) + y.shape), x)
    return x.reshape((1,) * len(where.partial_axes()) + x.shape) if where.partial_axes() else x
