"""The program as a graph: equations as nodes, arrays as values, loops as nodes with inner scopes.

Calls run in place. What crosses the border of a loop or a branch passes through a *port*: a node
whose placement is chosen like an equation's, so that moving a value before a loop and moving it
inside are both choices. A carry is one port with two inputs (first value, next value) and several
outputs (inside, after the loop): whatever it chooses, the loop is a fixed point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.op_primitives import decomposition, is_op_equation
from dtorchjax.placements import Joint, Layout
from dtorchjax.registry import RULES, missing_rule

WHILE_TRIPS = 8
"""How often a while loop is thought to run."""


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """One array of the program."""

    aval: Any
    scope: Scope
    producer: Node | None = None
    output: int = 0
    uses: list[tuple[Node, int]] = dataclasses.field(default_factory=list)

    @property
    def weight(self) -> float:
        return self.scope.weight


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """One equation, port, input, output, constant or literal.

    `kind`: "equation", "port" (one placement for everything), "enter" and "leave" (the scanned
    inputs and outputs of a loop: placements without the leading dim), "input", "output", "literal".
    `fixed` is a placement that is given, not chosen. `partial_allowed` is False for results,
    `as_array` True for those that must lie as a jax.Array can.
    """

    kind: str
    inputs: list[Value]
    outputs: list[Value]
    scope: Scope
    name: str = ""
    eqn: Any = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Joint | None = None
    partial_allowed: bool = True
    as_array: bool = False
    asked: bool = False
    literal: Any = None
    where: _jax.Where | None = None
    label: str = ""
    inside: str = ""  # the operator of `dt.ops` whose decomposition it is of

    @property
    def title(self) -> str:
        """What a user calls it: of a dfunction's equation the function's name."""
        body = self.params.get("body")
        if body is None:
            return self.name or self.label or self.kind
        return f"backward of {body.name}" if self.name == "dfunction_backward" else body.name


@dataclasses.dataclass(eq=False, repr=False)
class Scope:
    """A straight line of steps that runs `times` times; `weight` says how much that counts."""

    weight: float = 1.0
    times: float = 1.0
    steps: list[Node | Loop | Barrier] = dataclasses.field(default_factory=list)
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """scan, while or cond: ports in, inner scopes, ports out.

    scan: one scope; `consts`, `carries`, `entering`, `leaving` ports.
    while: scopes (test, body); `test` is the verdict, `test_consts` of the consts are the test's.
    cond: one scope per branch; `consts` are the operands, `leaving` the results, `test` the index.
    """

    kind: str
    scopes: list[Scope]
    consts: list[Node]
    carries: list[Node]
    entering: list[Node]
    leaving: list[Node]
    test: Node | None = None
    test_consts: int = 0
    scan: _jax.ScanParts | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Barrier:
    """The values of these ports pass an optimization barrier together (jax.checkpoint)."""

    ports: list[Node]


@dataclasses.dataclass(eq=False, repr=False)
class Graph:
    """A whole program; `donated` are the inputs whose memory the results may take.

    `eager`: one operation on DTensors. It takes them as they lie, so work done twice is free.
    `reduce_dtype`: the type in which narrower floats are summed up over devices.
    """

    top: Scope
    nodes: list[Node]
    inputs: list[Node]
    constants: list[Node]
    outputs: list[Node]
    constant_values: list[Any]
    donated: Sequence[int] = ()
    eager: bool = False
    reduce_dtype: Any = None

    def has_own_tables(self) -> bool:
        """True if an operator stands in it by a rule of its own."""
        return any(n.eqn is not None and is_op_equation(n.eqn) for n in self.nodes)

    def values(self) -> Iterator[Value]:
        for node in self.nodes:
            yield from node.outputs


class _Builder:
    def __init__(
        self, mesh: Any, annotations: dict[str, Callable[[dict, Sequence[int], int], Layout | None]]
    ):
        self.mesh, self.annotations = mesh, annotations
        self.nodes: list[Node] = []
        self.constants: list[Node] = []
        self.constant_values: list[Any] = []
        self.top = Scope()
        self.constant_of: dict[int, Value] = {}
        self.place: _jax.Where | None = None  # the user's line, inside a library's function
        self.strict, self.own_tables = False, True
        self.inside = ""
        self.called: _jax.Where | None = None  # the line of equations that have none of their own

    def node(self, kind: str, inputs: Sequence[Value], outputs: Sequence[Value], **kw: Any) -> Node:
        scope = outputs[0].scope if outputs else inputs[0].scope
        node = Node(kind, list(inputs), list(outputs), scope, **kw)
        self.nodes.append(node)
        for i, value in enumerate(inputs):
            value.uses.append((node, i))
        for i, value in enumerate(outputs):
            value.producer, value.output = node, i
        return node

    def feed(self, node: Node, value: Value) -> None:
        """One more input for a node that exists (the next value of a carry)."""
        value.uses.append((node, len(node.inputs)))
        node.inputs.append(value)

    def constant(self, x: Any, aval: Any) -> Value:
        """A closed-over array: an input of the whole program, wherever it is used."""
        if id(x) not in self.constant_of:
            value = Value(aval, self.top)
            self.constants.append(self.node("input", [], [value], label="a closed-over array"))
            self.constant_values.append(x)
            self.constant_of[id(x)] = value
        return self.constant_of[id(x)]

    def run(
        self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value], scope: Scope
    ) -> list[Value]:
        env: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            if isinstance(atom, _jax.Literal):
                return self.literal(atom.aval, atom.val, scope)
            return env[atom]

        env.update(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, operands, scope), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def where(self, eqn: Any) -> _jax.Where | None:
        return self.place or _jax.where(eqn) or self.called

    def equation(self, eqn: Any, operands: list[Value], scope: Scope) -> list[Value]:
        name = eqn.primitive.name
        inner = _jax.inner_program(eqn)
        if is_op_equation(eqn) and not (self.own_tables and self.has_own_table(eqn)):
            inner = _jax.open_jaxpr(decomposition([v.aval for v in eqn.invars], eqn.params))
        if name == "custom_linear_solve":
            inner, taken = _jax.linear_solve(eqn)
            operands = [operands[i] for i in taken]
        if inner is not None:
            if _jax.recomputes(eqn):
                operands = self.barrier(operands, scope)
            jaxpr, constants = inner
            outer = self.place
            if outer is None and (is_op_equation(eqn) or _jax.is_library_program(jaxpr)):
                # its own lines are of no use, and those of its first caller if jax has cached it
                self.place = self.where(eqn)
            outer_op = self.inside
            if is_op_equation(eqn):
                self.inside = outer_op or eqn.params["op"].name
            results = self.run(jaxpr, self.close(constants, jaxpr, scope), operands, scope)
            self.place, self.inside = outer, outer_op
            return results
        if name == "scan":
            return self.scan(eqn, operands, scope)
        if name == "while":
            return self.while_loop(eqn, operands, scope)
        if name == "cond":
            taken = _jax.platform_branch(eqn, self.mesh)
            if taken is None:
                return self.cond(eqn, operands, scope)
            jaxpr, constants = _jax.open_jaxpr(eqn.params["branches"][taken])
            return self.run(jaxpr, self.close(constants, jaxpr, scope), operands[1:], scope)
        if name == "platform_index":
            return [self.literal(eqn.outvars[0].aval, _jax.platform_branch(eqn, self.mesh), scope)]
        if name in self.annotations:
            return [self.annotated(eqn, i, operand, scope) for i, operand in enumerate(operands)]
        if name == "settled" and not self.strict:
            return operands
        if name == "optimization_barrier":
            return self.barrier(operands, scope)
        if all(_is_empty(var.aval) for var in eqn.outvars) and not eqn.effects:
            return [self.empty(var.aval, scope) for var in eqn.outvars]
        if name not in RULES:
            raise located(missing_rule(name), self.where(eqn))
        refuses = getattr(RULES[name], "refuses", lambda params: None)(eqn.params)
        if refuses:
            error = PlacementError(f"`{name}` cannot be sharded: {refuses}")
            raise located(error, self.where(eqn))
        results = [Value(var.aval, scope) for var in eqn.outvars]
        params = _jax.clean_params(eqn)
        if getattr(RULES[name], "needs_mesh", False):
            params["mesh"] = self.mesh
        node = self.node(
            "equation", operands, results, name=name, eqn=eqn, params=params, where=self.where(eqn),
            inside=self.inside,
        )  # fmt: skip
        scope.steps.append(node)
        return results

    def empty(self, aval: Any, scope: Scope) -> Value:
        """An array without elements, for which nothing is computed."""
        return self.literal(aval, np.zeros(aval.shape, aval.dtype), scope)

    def literal(self, aval: Any, x: Any, scope: Scope) -> Value:
        value = Value(aval, scope)
        scope.steps.append(self.node("literal", [], [value], literal=x))
        return value

    def annotated(self, eqn: Any, i: int, operand: Value, scope: Scope) -> Value:
        """An operand where an annotation wants it."""
        name = eqn.primitive.name
        asked = self.annotations[name](eqn.params, operand.aval.shape, i)
        if asked is None:
            return operand
        result = Value(eqn.outvars[i].aval, scope)
        port = self.node(
            "port", [operand], [result], fixed=asked.joint, name=name, where=self.where(eqn),
            asked=True,
        )  # fmt: skip
        scope.steps.append(port)
        return result

    def has_own_table(self, eqn: Any) -> bool:
        """True for an operator with a rule of its own (which does not speak of vmap's dims)."""
        return eqn.primitive.name in RULES and not eqn.params["batch"]

    def barrier(self, operands: list[Value], scope: Scope) -> list[Value]:
        ports = [
            self.node("port", [v], [Value(v.aval, scope)], name="checkpoint") for v in operands
        ]
        scope.steps.append(Barrier(ports))
        return [port.outputs[0] for port in ports]

    def close(self, constants: Sequence[Any], jaxpr: Any, scope: Scope) -> list[Value]:
        """The constants of an inner program, as values of `scope`."""
        found = []
        for x, var in zip(constants, jaxpr.constvars, strict=True):
            value = self.constant(x, var.aval)
            if scope is not self.top:  # a closed-over array inside a loop
                inside = Value(var.aval, scope)
                scope.steps.append(self.node("port", [value], [inside], name="constant"))
                value = inside
            found.append(value)
        return found

    def scan(self, eqn: Any, operands: list[Value], scope: Scope) -> list[Value]:
        parts = _jax.scan_parts(eqn)
        place = self.where(eqn)
        body = Scope(scope.weight * parts.length, scope.times * parts.length)
        closed = self.close(parts.constants, parts.body, scope)
        nc, nk = parts.n_consts, parts.n_carries
        inner = [Value(v.aval, body) for v in (*parts.body.constvars, *parts.body.invars)]
        inputs = [*closed, *operands]
        nc += len(closed)
        consts = [self.node("port", [o], [i], name="scan") for o, i in zip(inputs[:nc], inner[:nc])]
        after = [Value(v.aval, scope) for v in eqn.outvars]
        carries = [
            self.node("port", [o], [i, a], name="scan", where=place)
            for o, i, a in zip(inputs[nc : nc + nk], inner[nc : nc + nk], after[:nk])
        ]
        entering = [
            self.node("enter", [o], [i], name="scan", where=place)
            for o, i in zip(inputs[nc + nk :], inner[nc + nk :])
        ]
        n = len(closed)
        results = self.run(parts.body, inner[:n], inner[n:], body)
        for port, result in zip(carries, results[:nk]):
            self.feed(port, result)
        leaving = [
            self.node("leave", [r], [a], name="scan", where=place)
            for r, a in zip(results[nk:], after[nk:])
        ]
        scope.steps.append(Loop("scan", [body], consts, carries, entering, leaving, scan=parts))
        return after

    def while_loop(self, eqn: Any, operands: list[Value], scope: Scope) -> list[Value]:
        p, place = eqn.params, self.where(eqn)
        test, test_constants = _jax.open_jaxpr(p["cond_jaxpr"])
        body, body_constants = _jax.open_jaxpr(p["body_jaxpr"])
        nt, nb = p["cond_nconsts"], p["body_nconsts"]
        each = bool(test.outvars[0].aval.shape)  # a predicate per row, of a vmap
        scopes = [Scope(scope.weight * WHILE_TRIPS, scope.times) for _ in range(2)]
        after = [Value(v.aval, scope) for v in eqn.outvars]
        given = [
            [*self.close(test_constants, test, scope), *operands[:nt]],
            [*self.close(body_constants, body, scope), *operands[nt : nt + nb]],
        ]
        if each:  # the body asks again which rows go on
            given[1] += given[0]
        consts = [
            self.node("port", [v], [Value(v.aval, inner)], name="while")
            for values, inner in zip(given, scopes, strict=True)
            for v in values
        ]
        carries = [
            self.node(
                "port", [v], [Value(a.aval, scopes[0]), Value(a.aval, scopes[1]), a], name="while",
                where=place,
            )
            for v, a in zip(operands[nt + nb :], after, strict=True)
        ]  # fmt: skip
        split = len(given[0])
        insides = [port.outputs[0] for port in consts]

        def run(jaxpr: Any, values: list[Value], which: int) -> list[Value]:
            n = len(jaxpr.constvars)
            carried = [c.outputs[which] for c in carries]
            return self.run(jaxpr, values[:n], [*values[n:], *carried], scopes[which])

        done = run(test, insides[:split], 0)
        inner = insides[split:]
        results = run(body, inner[: len(inner) - split] if each else inner, 1)
        if each:
            done = self.small(lambda rows: rows.any(), done, scopes[0])
            rows = run(test, inner[len(inner) - split :], 1)
            before = [c.outputs[1] for c in carries]
            results = [
                self.small(_where_rows, [rows[0], old, new], scopes[1])[0]
                for old, new in zip(before, results, strict=True)
            ]
        for port, result in zip(carries, results, strict=True):
            self.feed(port, result)
        verdict = self.node(
            "output", [done[0]], [], name="while", fixed=self.replicated(), where=place
        )
        scope.steps.append(Loop("while", scopes, consts, carries, [], [], verdict, split))
        return after

    def small(
        self, fun: Callable[..., Any], operands: Sequence[Value], scope: Scope
    ) -> list[Value]:
        """A function of ours as part of the program."""
        closed = jax.make_jaxpr(fun)(*(_jax.struct(v.aval) for v in operands))
        return self.run(closed.jaxpr, (), list(operands), scope)

    def cond(self, eqn: Any, operands: list[Value], scope: Scope) -> list[Value]:
        place = self.where(eqn)
        branches = [_jax.open_jaxpr(b) for b in eqn.params["branches"]]
        scopes = [Scope(scope.weight / len(branches), scope.times) for _ in branches]
        index = self.node(
            "output", [operands[0]], [], name="cond", fixed=self.replicated(), where=place
        )
        consts = [
            self.node("port", [v], [Value(v.aval, s) for s in scopes], name="cond")
            for v in operands[1:]
        ]
        results = [
            self.run(j, self.close(c, j, inner), [port.outputs[b] for port in consts], inner)
            for b, ((j, c), inner) in enumerate(zip(branches, scopes, strict=True))
        ]
        after = [Value(v.aval, scope) for v in eqn.outvars]
        leaving = [
            self.node("port", list(column), [a], name="cond", where=place)
            for column, a in zip(zip(*results, strict=True), after, strict=True)
        ]
        scope.steps.append(Loop("cond", scopes, consts, [], [], leaving, index))
        return after

    def replicated(self) -> Joint:
        n = len(self.mesh.axis_names)
        return Layout(self.mesh, ("R",) * n).joint  # type: ignore[arg-type]


def _where_rows(rows: Any, old: Any, new: Any) -> Any:
    """The new carry in the rows that go on."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - rows.ndim)), new, old)


def _is_empty(aval: Any) -> bool:
    return 0 in aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def located(error: PlacementError, where: _jax.Where | None) -> PlacementError:
    """The same error with the user's line."""
    if where is None:
        return error
    return type(error)(f"{error}\n  at {where}   {where.text()}")


def build(
    closed: Any,
    mesh: Any,
    in_layouts: Sequence[Joint],
    wanted: Sequence[Joint],
    results: Sequence[Any],
    constant_layout: Callable[[Any], Joint],
    annotations: dict[str, Callable[[dict, Sequence[int], int], Layout | None]],
    in_labels: Sequence[str],
    called: _jax.Where | None = None,
    strict: bool = False,
    own_tables: bool = True,
) -> Graph:
    """The graph of a closed jaxpr.

    Arguments arrive in `in_layouts` and are redistributed to `wanted` where that differs. Each of
    `results` has a `layout` (None: to be chosen, but only partial if `partial`), `asked` (the user
    said so) and a `label`. Equations without a line of the user's have the line `called`. In
    `strict` mode a value that is `settled` is reduced by that equation. With `own_tables`,
    operators that have a rule are one equation each; the others are their decompositions.

    Raises PlacementError for a primitive without a rule.
    """
    builder = _Builder(mesh, annotations)
    builder.called, builder.strict, builder.own_tables = called, strict, own_tables
    jaxpr = closed.jaxpr
    inputs = [
        builder.node("input", [], [Value(v.aval, builder.top)], fixed=where, label=label)
        for v, where, label in zip(jaxpr.invars, in_layouts, in_labels, strict=True)
    ]
    constants = builder.close(closed.consts, jaxpr, builder.top)
    values = []
    used = {id(v) for e in jaxpr.eqns for v in e.invars} | {id(v) for v in jaxpr.outvars}
    for var, node, where, asked in zip(jaxpr.invars, inputs, in_layouts, wanted, strict=True):
        value = node.outputs[0]
        if asked != where and id(var) in used:
            placed = Value(value.aval, builder.top)
            port = builder.node(
                "port", [value], [placed], fixed=asked, label=node.label, asked=True
            )
            builder.top.steps.append(port)
            value = placed
        values.append(value)
    made = builder.run(jaxpr, constants, values, builder.top)
    outputs = [
        builder.node(
            "output", [value], [], fixed=wanted.layout and wanted.layout.joint,
            partial_allowed=wanted.partial, label=wanted.label, asked=wanted.asked,
            as_array=wanted.array,
        )
        for value, wanted in zip(made, results, strict=True)
    ]  # fmt: skip
    for node, x in zip(builder.constants, builder.constant_values, strict=True):
        node.fixed = constant_layout(x)
    return Graph(
        builder.top, builder.nodes, inputs, builder.constants, outputs, builder.constant_values
    )


def scopes(scope: Scope) -> Iterator[Scope]:
    """A scope and all that are inside it."""
    yield scope
    for step in scope.steps:
        if isinstance(step, Loop):
            for inner in step.scopes:
                yield from scopes(inner)


def entered(step: Node | Loop | Barrier) -> list[Node]:
    """The nodes that take their inputs when a scope comes to this step."""
    if isinstance(step, Node):
        return [step]
    if isinstance(step, Barrier):
        return step.ports
    first = [*step.consts, *step.carries, *step.entering]
    return [*first, step.test] if step.kind == "cond" and step.test is not None else first


def in_order(graph: Graph) -> list[Node]:
    """All nodes of a graph that may have been changed, each after those that it takes from."""

    def inside(scope: Scope) -> Iterator[Node]:
        for step in scope.steps:
            if isinstance(step, Node):
                yield step
            elif isinstance(step, Barrier):
                yield from step.ports
            else:
                if step.kind == "cond" and step.test is not None:
                    yield step.test
                yield from (*step.consts, *step.carries, *step.entering)
                for inner in step.scopes:
                    yield from inside(inner)
                if step.kind == "while" and step.test is not None:
                    yield step.test
                yield from step.leaving

    return [*graph.inputs, *graph.constants, *inside(graph.top), *graph.outputs]
