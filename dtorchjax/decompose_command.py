"""`dtorchjax decompose NAME`: what an operator is made of."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.decompose import decompose, vjp_kind
from dtorchjax.demo import UsageError
from dtorchjax.errors import OpError
from dtorchjax.explain_command import parse_shape
from dtorchjax.op import Op
from dtorchjax.op_primitives import result_types, trace, types_of, vjp_rule
from dtorchjax.registry import OPS
from dtorchjax.signatures import signature


def list_operators() -> str:
    """All names, by how they are differentiated."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(OPS):
        by_kind.setdefault(vjp_kind(name), []).append(name)
    return "\n".join(
        textwrap.fill(f"{kind}: {' '.join(names)}", 100, subsequent_indent="    ")
        for kind, names in by_kind.items()
    )


def decompose_operator(name: str, shapes: Sequence[str], static: Sequence[str]) -> str:
    """What an operator is made of for operands of these shapes, as text.

    Raises UsageError for a name, a shape or a static argument that is none.
    """
    if name not in OPS:
        raise UsageError(f"there is no op {name!r}: `dtorchjax decompose list` prints all")
    operands = [parse_shape(s) for s in shapes or ["f32[8,16]"]]
    try:
        return described(name, operands, dict(map(static_argument, static)))
    except (OpError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


def static_argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--static {text!r}: write name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def described(name: str, operands: Sequence[Any], static: dict[str, Any]) -> str:
    """Documentation, decomposition, VJP rule and placement table of an operator, as text.

    Operands are arrays or ShapeDtypeStructs, pytrees of them or None.
    """
    op = OPS[name]
    text = [
        f"{name}: {(inspect.getdoc(op.body if isinstance(op, Op) else op) or '').splitlines()[0]}"
    ]
    call = functools.partial(op, **static)
    operands = jax.tree.map(_jax.whole_aval, list(operands))
    program = jax.make_jaxpr(decompose(call))(*operands)
    text += ["", "decomposition", *_lines(program)]
    text += ["", f"VJP: {vjp_kind(name)}", *_vjp(op, operands, static)]
    text += ["", "placements", *_indented(str(signature(name, *operands, **static)))]
    return "\n".join(text)


def _lines(closed: Any) -> list[str]:
    """One line per equation: results, primitive, operands; calls stand in place."""
    names: dict[Any, str] = {}
    lines: list[str] = []
    numbers = itertools.count()

    def label(v: Any) -> str:
        if isinstance(v, _jax.Literal):
            return str(np.asarray(v.val).item())
        if v not in names:
            names[v] = f"v{next(numbers)}"
        return names[v]

    def typed(vs: Sequence[Any]) -> str:
        return " ".join(f"{label(v)}:{_jax.short_type(v.aval)}" for v in vs)

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            inner = _jax.inner_program(eqn)
            if inner is None:
                operands = " ".join(map(label, eqn.invars))
                lines.append(f"  {typed(eqn.outvars)} = {eqn.primitive.name} {operands}")
                continue
            names.update(zip(inner[0].invars, map(label, eqn.invars), strict=True))
            walk(inner[0])
            names.update(zip(eqn.outvars, map(label, inner[0].outvars), strict=True))

    jaxpr = _jax.open_jaxpr(closed)[0]
    lines.append(f"  {typed(jaxpr.invars)}")
    walk(jaxpr)
    return [*lines, f"  -> {' '.join(map(label, jaxpr.outvars))}"]


def _vjp(op: Any, operands: Sequence[Any], static: dict[str, Any]) -> list[str]:
    if not isinstance(op, Op) or op.vjp_rule is None:
        return []
    given, pairs = op.bind(operands, static)
    leaves, tree = jax.tree.flatten(given)
    types = types_of(leaves)
    wrt = tuple(i for i, t in enumerate(types) if jnp.issubdtype(t.dtype, jnp.inexact))
    rule = vjp_rule(op, pairs, tree, types, wrt)
    results = result_types(trace(op, pairs, tree, types).program)
    names = op.value_names(tree, len(rule.results))
    saved = ", ".join(f"{names[i]} {_jax.short_type([*types, *results][i])}" for i in rule.saved)
    return [f"  saves {saved or 'nothing'}", *_indented(inspect.getsource(op.vjp_rule))]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in textwrap.dedent(text).splitlines()]
