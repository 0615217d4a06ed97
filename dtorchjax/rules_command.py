"""`dtorchjax rules`: what is known of every primitive, and the table of one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.extend.core.primitives

from dtorchjax import _jax
from dtorchjax.decompose_command import static_argument
from dtorchjax.demo import UsageError
from dtorchjax.errors import PlacementError
from dtorchjax.explain_command import parse_shape
from dtorchjax.op import Op
from dtorchjax.registry import LOCALS, OPS, REFUSALS, RULES, SENDS, Rule
from dtorchjax.signatures import signature

IN_THE_GRAPH = {
    "scan": "a loop: its body is planned with the rest, carries are a fixed point",
    "while": "a loop: its body is planned with the rest, carries are a fixed point",
    "cond": "branches: planned with the rest, results lie alike",
    "custom_linear_solve": "its solve runs in place",
    "platform_index": "the branch for the mesh's devices alone",
    "optimization_barrier": "a barrier for one device's parts",
    "device_put": "an annotation, where it names a mesh; else nothing",
    "redistribute": "an annotation that the plan obeys",
    "sharding_constraint": "an annotation that the plan obeys",
    "reshard": "an annotation that the plan obeys, on Explicit axes",
}
"""Primitives that `graph.build` knows by name, and as what."""


class Known(NamedTuple):
    """What is known of a primitive: a rule, in place, in the graph, refused or missing; and how."""

    name: str
    kind: str
    how: str


def coverage() -> list[Known]:
    """Every primitive that JAX names, and those that have a rule besides, in order of their names.

    >>> {known.kind for known in coverage()} <= {"rule", "in place", "graph", "refused"}
    True
    """
    public = vars(jax.extend.core.primitives)
    names = {p.name for key, p in public.items() if key.endswith("_p")}
    ops = {op.name for op in OPS.values() if isinstance(op, Op)}
    return [_known(n) for n in sorted(names | set(IN_THE_GRAPH) | set(REFUSALS) | set(RULES) - ops)]


def _known(name: str) -> Known:
    if name in IN_THE_GRAPH:
        return Known(name, "graph", IN_THE_GRAPH[name])
    if name in _jax.IN_PLACE:
        return Known(name, "in place", "its program is part of the whole")
    if name in RULES:
        return Known(name, "rule", _rule_words(name, RULES[name]))
    if name in REFUSALS:
        return Known(name, "refused", REFUSALS[name])
    return Known(name, "missing", "no rule and no reason")


def _rule_words(name: str, rule: Any) -> str:
    if not isinstance(rule, Rule):
        return "the rows of its function"
    words = [Path(rule.place.rpartition(":")[0]).stem]
    sentence = inspect.getdoc(rule.sentence)
    if sentence:
        words.append(sentence.splitlines()[0])
    if name in LOCALS:
        words.append("a local program that sends" if name in SENDS else "a local program")
    return "; ".join(words)


def all_rules() -> str:
    """The coverage as text, with totals in the last line."""
    found = coverage()
    width = max(len(known.name) for known in found)
    lines = [f"{k.name:{width}}  {k.kind:9} {k.how}" for k in found]
    counts = {
        kind: sum(k.kind == kind for k in found) for kind in dict.fromkeys(k[1] for k in found)
    }
    total = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    return "\n".join([*lines, f"{len(found)} primitives: {total}"])


def table_of(name: str, shapes: Sequence[str], static: Sequence[str]) -> str:
    """The placement table of a primitive or an operator for these shapes.

    Raises UsageError for what is no primitive, no shape, or does not fit.
    """
    if name not in RULES and name not in OPS:
        known = _known(name)
        if known.kind != "missing":
            return f"{name}: {known.kind}, {known.how}"
        raise UsageError(
            f"{name!r} is no primitive with a rule; `dtorchjax rules --all` lists them"
        )
    try:
        return str(signature(name, *map(parse_shape, shapes), **dict(map(static_argument, static))))
    except (PlacementError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


__all__ = ["Known", "all_rules", "coverage", "table_of"]
