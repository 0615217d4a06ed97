"""`redistribute="never"`: which rows fit without communication, and what to say where none does.

Feasible placements are propagated forward: an operand fits a row as it is, or as a slice of what
every device holds whole (R -> S, no communication), or as zeros that count as terms of a sum. The
first equation that is left without a row is where the program fails.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from dtorchjax import _jax
from dtorchjax.cost import IMPOSSIBLE
from dtorchjax.errors import PlacementMismatchError, Remedy, size_text
from dtorchjax.graph import Node, Value
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Joint, Layout, Partial, Placement, R, Replicate, Shard
from dtorchjax.plan import fits_locally, is_zero
from dtorchjax.rows import JointRow, Labels, signature


def explain_mismatch(labels: Labels, mesh: object) -> PlacementMismatchError:
    """The error for a program that no choice of rows makes free of communication."""
    found = _Feasible(labels)
    node = found.first_failure()
    assert node is not None, "the program fits after all"
    return _Report(found, node, mesh).error()


class _Feasible:
    """The rows of each node that its operands' feasible placements allow."""

    def __init__(self, labels: Labels):
        self.labels = labels
        self.rows: dict[Node, list[JointRow]] = {}

    def placements(self, value: Value) -> list[Joint]:
        assert value.producer is not None
        rows = self.rows[value.producer]
        return list(dict.fromkeys(row.outputs[value.output] for row in rows))

    def allowed(self, node: Node, known: dict[Value, list[Joint]] | None = None) -> list[JointRow]:
        """The node's rows that fit; inputs that are not known yet (carries) allow everything."""
        rows = self.rows.get(node, self.labels.of[node])
        for i, value in enumerate(node.inputs):
            if node.asked:
                continue
            if known is not None and value in known:
                there = known[value]
            elif value.producer in self.rows:
                there = self.placements(value)
            else:
                continue
            zero = is_zero(value)
            rows = [r for r in rows if any(fits_locally(s, r.inputs[i], zero) for s in there)]
        return rows

    def first_failure(self) -> Node | None:
        changed = True
        while changed:  # again for what carries bring back
            changed = False
            for node in self.labels.graph.nodes:
                rows = self.allowed(node)
                if not rows:
                    return node
                if len(rows) != len(self.rows.get(node, ())):
                    self.rows[node] = rows
                    changed = True
        return None


class _Report:
    """The error text of one node whose operands fit no row."""

    def __init__(self, found: _Feasible, node: Node, mesh: object):
        self.found, self.node, self.labels = found, node, found.labels
        self.names = mesh.axis_names  # type: ignore[attr-defined]
        self.mesh = mesh
        self.have = [found.placements(v)[0] for v in node.inputs if v.producer in found.rows]
        self.axes = self._failing_axes()
        self.axis = self.axes[0] if self.axes else None
        maker = node.inputs[0].producer if node.kind == "output" else None
        self.where = node.where or (maker.where if maker else None)

    def _failing_axes(self) -> list[int]:
        if self.node.kind == "output" and self.node.fixed is None:
            return list(self.have[0].partial_axes())
        if self.node.kind != "equation":
            wanted = self.labels.of[self.node][0].inputs
            return [
                axis
                for axis in range(len(self.names))
                if not all(
                    _fits(h.placements[axis], w.placements[axis]) for h, w in zip(self.have, wanted)
                )
            ]
        rows = signature(self.node).rows
        zeros = [is_zero(v) for v in self.node.inputs]
        failing = []
        for axis in range(len(self.names)):
            given = [j.placements[axis] for j in self.have]
            if not any(all(map(_fits, given, row.inputs, zeros)) for row in rows):
                failing.append(axis)
        return failing

    def error(self) -> PlacementMismatchError:
        node, where = self.node, self.where
        if node.kind == "equation":
            table = PlacementSignature(signature(node).rows)
        else:
            wanted = self.labels.of[node][0]
            axis = self.axis or 0
            table = PlacementSignature((Row(tuple(j.placements[axis] for j in wanted.inputs), ()),))
        return PlacementMismatchError(
            self._summary(),
            primitive=self._what(),
            operands=[self._operand(v, h) for v, h in zip(node.inputs, self.have)],
            axis=None if self.axis is None else self.names[self.axis],
            rows=str(table).splitlines(),
            remedies=self._remedies(),
            where=None if where is None else str(where),
            line=None if where is None else where.text(),
        )

    def _what(self) -> str:
        return self.node.title

    def _summary(self) -> str:
        inside = f" in `{self.node.inside}`" if self.node.inside else ""
        what = f"`{self._what()}`{inside}"
        if self.axis is None:
            shapes = ", ".join(str(tuple(v.aval.shape)) for v in self.node.inputs)
            return f"{what} of {shapes} cannot be done in parts that fit all mesh axes at once"
        given = [j.placements[self.axis] for j in self.have]
        on = f"on mesh axis {self.names[self.axis]!r}"
        if self.node.kind == "output" and self.node.fixed is None:
            return f"a result may not be {_words(given[0])} {on}: say where it goes"
        if self.node.kind != "equation":
            wanted = self.labels.of[self.node][0].inputs[0].placements[self.axis]
            return f"{what} is {_words(given[0])} {on}, but {_words(wanted)} is needed"
        if len(given) == 1:
            return f"{what} cannot take {_words(given[0])} {on}"
        return f"{what} cannot combine {' and '.join(map(_words, given))} {on}"

    def _operand(self, value: Value, have: Joint) -> str:
        aval = value.aval
        text = f"{_jax.short_type(aval)}  {Layout(self.mesh, have.placements, have.order)}"
        maker = value.producer
        if maker is not None and maker.kind == "equation" and maker.where is not None:
            text += f"   (made at {maker.where} by {maker.title})"
        elif maker is not None and maker.kind == "input":
            text += f"   ({maker.label})"
        elif maker is not None and maker.kind == "literal":
            text += f"   (the constant {maker.literal})"
        return text

    # ---- remedies: redistribute one value that enters the user's expression, and try

    def _remedies(self) -> list[Remedy]:
        axes = self.axes or range(len(self.names))
        region = self._region()
        inside = {v for n in region for v in n.outputs}
        entering = list(
            dict.fromkeys(
                v
                for n in region
                for v in n.inputs
                if v not in inside
                and v.producer in self.found.rows  # not beyond the failure
                and v.producer.kind != "literal"
            )
        )
        names = self._names(entering)
        found: list[Remedy] = []
        order: list[tuple[float, bool, str]] = []  # by bytes, then away from dims in use
        for value, name in zip(entering, names):
            paths = self.labels.table(value)
            have = self.found.placements(value)[0]
            for target in paths.states:
                changed = [
                    a for a, (p, q) in enumerate(zip(target.placements, have.placements)) if p != q
                ]
                if (
                    not changed
                    or not set(changed) <= set(axes)
                    or any(isinstance(target.placements[a], Partial) for a in changed)
                    or target.order != tuple(range(len(self.names)))  # a dict cannot say it
                ):
                    continue
                result = self._try(region, {value: [target]})
                if (
                    result is None
                    or paths.cost[paths.index[have], paths.index[target]] >= IMPOSSIBLE / 2
                ):
                    continue
                moves = paths.path(have, target)
                sent = sum(paths.sent(m, self.labels.sizes) for m in moves)
                kinds = " + ".join(m.kind for m in moves if m.is_collective) or "no communication"
                layout = Layout(self.mesh, target.placements, target.order)
                where = ", ".join(f'"{n}": "{p}"' for n, p in layout.named().items())
                cost = f"{kinds}, {size_text(sent)} per device"
                if not isinstance(result, Replicate):
                    cost += f", result {result}"
                code = (
                    f"dt.redistribute({name}, {{{where}}})"
                    if name
                    else f"out_placements={{{where}}}"
                )
                found.append(Remedy(code, cost, float(sent)))
                crowded = any(target.placements[a] in have.placements for a in changed)
                order.append((float(sent), crowded, kinds))
        best = sorted(range(len(found)), key=order.__getitem__)
        second = [
            i
            for i in best[1:]
            if found[i].code.split(",")[0] != found[best[0]].code.split(",")[0]
            or order[i][2] != order[best[0]][2]
        ]
        return [found[i] for i in best[:1] + second[:1]]

    def _names(self, entering: Sequence[Value]) -> list[str]:
        """What the user calls the arrays that enter; "" for a result: dt.jit says where it goes."""
        if self.node.kind == "output":
            return [""] * len(entering)
        names = _argument_texts(self.where, len(entering))
        if not names:  # a number that is written there has no name
            arrays = [v for v in entering if v.aval.shape]
            known = dict(zip(arrays, _argument_texts(self.where, len(arrays))))
            names = [known.get(v, f"operand_{i}") for i, v in enumerate(entering)]
        return names

    def _region(self) -> list[Node]:
        """The equations that the same expression of the user's made."""
        if self.node.where is None or self.node.kind != "equation":
            return [self.node]
        return [n for n in self.labels.graph.nodes if n.where == self.node.where]

    def _try(self, region: Iterable[Node], known: dict[Value, list[Joint]]) -> Placement | None:
        """What the failing axis has after the region if these placements enter it; None: no row."""
        known = dict(known)
        result: Placement = R
        for node in region:
            rows = [
                row
                for row in self.labels.of[node]
                if all(
                    any(fits_locally(s, w, is_zero(v)) for s in self._there(v, known))
                    for v, w in zip(node.inputs, row.inputs)
                )
            ]
            if not rows:
                return None
            for i, value in enumerate(node.outputs):
                known[value] = list(dict.fromkeys(row.outputs[i] for row in rows))
                result = known[value][0].placements[self.axis or 0]
        return result

    def _there(self, value: Value, known: dict[Value, list[Joint]]) -> Sequence[Joint]:
        if value in known:
            return known[value]
        if value.producer in self.found.rows:
            return self.found.placements(value)
        return [row.outputs[value.output] for row in self.labels.of[value.producer]]  # type: ignore[index]


def _fits(have: Placement, wanted: Placement, zero: bool = False) -> bool:
    return (
        have == wanted
        or (isinstance(have, Replicate) and isinstance(wanted, Shard))
        or (zero and isinstance(have, Replicate) and wanted == Partial())
    )


def _words(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f"a partial {placement.op}"
    return str(placement)


def _is_module(name: str, file: str) -> bool:
    """True if the name is an import of the file, or of another cell of a notebook."""
    in_session = getattr(sys.modules.get("__main__"), name, None)
    return name in _jax.imported_names(file) or isinstance(in_session, ModuleType)


def _argument_texts(where: _jax.Where | None, count: int) -> list[str]:
    """How the user wrote the `count` arrays that enter an expression, in order; [] if unknown."""
    try:
        tree = ast.parse(where.expression().strip(), mode="eval").body if where else None
    except SyntaxError:
        return []
    if isinstance(tree, ast.Call):
        parts = [*tree.args, *(k.value for k in tree.keywords)]
        root = tree.func
        while isinstance(root, ast.Attribute):
            root = root.value
        assert where is not None
        module = isinstance(root, ast.Name) and _is_module(root.id, where.file)
        if isinstance(tree.func, ast.Attribute) and not module:
            parts = [tree.func.value, *parts]  # a method
    elif isinstance(tree, ast.BinOp):
        parts = [tree.left, tree.right]
    elif isinstance(tree, ast.Compare):
        parts = [tree.left, *tree.comparators]
    elif isinstance(tree, ast.UnaryOp):
        parts = [tree.operand]
    elif isinstance(tree, ast.Subscript | ast.Attribute):
        parts = [tree.value]
    else:
        return []
    assert where is not None
    functions = _jax.function_names(where.file)
    arrays = [p for part in parts for p in _arrays(part, functions)]
    texts = list(dict.fromkeys(map(ast.unparse, arrays)))
    return texts[:count] if len(texts) >= count else []


def _arrays(part: ast.expr, functions: frozenset[str]) -> list[ast.expr]:
    """The parts of an argument that may be arrays: neither constants nor functions."""
    if isinstance(part, ast.List | ast.Tuple):
        return [p for item in part.elts for p in _arrays(item, functions)]
    is_function = isinstance(part, ast.Lambda) or (
        isinstance(part, ast.Name) and (part.id in functions or hasattr(builtins, part.id))
    )
    return [] if is_function or isinstance(part, ast.Constant) else [part]
