"""Nodes of a large program that look alike: unrolled layers, parameters of one shape.

Two nodes are in one class if they do the same on the same line of the user's program, with operands
and users that do the same, up to `DEPTH` steps away (colour refinement). The planner gives all of a
class one row: a program of 24 layers is planned like one of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dtorchjax.graph import Graph, Node, Value

DEPTH = 2
LARGE = 1000
"""Nodes, from which on a program is planned by classes."""


def representatives(graph: Graph, facts: Callable[[Value], Hashable]) -> dict[Node, Node]:
    """The first node of each node's class.

    `facts` of a value are what else must agree.
    """
    colours = _numbered([_looks(node, facts) for node in graph.nodes])
    number = {node: i for i, node in enumerate(graph.nodes)}
    for _ in range(DEPTH):
        colours = _numbered(
            [
                (
                    colours[i],
                    tuple(
                        (colours[number[v.producer]], v.output) for v in node.inputs if v.producer
                    ),
                    tuple(
                        tuple(sorted((colours[number[user]], operand) for user, operand in v.uses))
                        for v in node.outputs
                    ),
                )
                for i, node in enumerate(graph.nodes)
            ]
        )
    first: dict[int, Node] = {}
    return {n: first.setdefault(c, n) for n, c in zip(graph.nodes, colours, strict=True)}


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _looks(node: Node, facts: Callable[[Value], Hashable]) -> Hashable:
    """What a node does and where, without its neighbours."""
    params: Hashable = tuple(sorted(node.params.items()))
    try:
        hash(params)
    except TypeError:
        params = id(node)
    values = [
        (v.aval.shape, v.aval.dtype, v.weight, facts(v)) for v in (*node.inputs, *node.outputs)
    ]
    return (
        node.kind, node.name, params, node.where, node.fixed, node.asked, node.partial_allowed,
        node.as_array, len(node.inputs), *values,
    )  # fmt: skip
