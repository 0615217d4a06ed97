"""LayoutRule: a rule as a function of whole layouts, registered under an operator's name."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtorchjax.errors import PlacementError
from dtorchjax.placements import Joint, Layout, Partial, mesh_sizes
from dtorchjax.redistribute import states

LAYOUT_RULES: dict[str, LayoutRule] = {}
"""op_name -> its rule. Making an instance registers it; a second one for a name is an error."""

MOST_COMBINATIONS = 20_000
"""Layouts of all operands that are tried at once; beyond, those with partial sums are left out."""


class LayoutRule:
    """How the operands' layouts give the results', for the dfunctions with this `op_name`.

    Subclass it, set `op_name` (or pass it to `__init__`) and write `infer_layout`; an instance is
    registered as it is made. The interface is that of HyperParallel's distributed operators.

    >>> class First(LayoutRule):
    ...     op_name = "doctest_first"
    ...     def infer_layout(self, x, y):
    ...         if x != y:
    ...             raise ValueError("operands of one layout, please")
    ...         return x
    >>> First()
    First('doctest_first')
    >>> "doctest_first" in LayoutRule.registered()
    True
    """

    op_name: str = ""

    def __init__(self, op_name: str | None = None):
        self.op_name = op_name or type(self).op_name
        if not self.op_name:
            raise PlacementError(f"{type(self).__name__} needs an op_name")
        if self.op_name in LAYOUT_RULES:
            other = LAYOUT_RULES[self.op_name]
            raise PlacementError(f"op_name {self.op_name!r} has a LayoutRule already: {other!r}")
        LAYOUT_RULES[self.op_name] = self

    @staticmethod
    def registered() -> list[str]:
        """The names that have a rule, in order."""
        return sorted(LAYOUT_RULES)

    def preprocess(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The call's arrays, in order, and all else by name: `fun(*arrays, **static)`.

        Where a rule does not say so, the arrays are those among the arguments, in the order of the
        function's parameters, and the function is called as the user called it.
        """
        raise NotImplementedError

    def infer_layout(self, *layouts: Layout | None, **static: Any) -> Any:
        """The Layout of the result, or a tuple of them. Raise ValueError for what does not fit."""
        raise NotImplementedError(f"{type(self).__name__} needs infer_layout(*layouts, **static)")

    def get_expand_impl(
        self, fun: Callable[..., Any], out_layouts: Any, in_layouts: Any, **static: Any
    ) -> Callable[..., Any] | None:
        """The function to run on one device's parts, or None for `fun` itself.

        It may change operands before it calls `fun`, such as a bias that every device adds in part.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op_name!r})"


def find_layout_rule(op_name: str) -> LayoutRule:
    """The registered rule; an error that lists all where there is none."""
    if op_name not in LAYOUT_RULES:
        known = ", ".join(LayoutRule.registered()) or "none"
        raise PlacementError(f"no LayoutRule for op_name {op_name!r}; registered are: {known}")
    return LAYOUT_RULES[op_name]


def accepted(fun: Callable[..., Any], static: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the static arguments that a method of a rule takes."""
    parameters = inspect.signature(fun).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(static)
    return {k: v for k, v in static.items() if k in parameters}


def infer(
    rule: LayoutRule, layouts: Sequence[Layout | None], static: Mapping[str, Any], n_out: int
) -> list[Layout]:
    """The layouts of the results, as many as there are arrays."""
    found = rule.infer_layout(*layouts, **accepted(rule.infer_layout, static))
    outs: list[Any] = [found] if isinstance(found, Layout) else list(found or ())
    if len(outs) != n_out or not all(isinstance(x, Layout) for x in outs):
        raise PlacementError(
            f"{rule!r}.infer_layout returned {found!r} for {n_out} result(s): it returns a Layout "
            "for each array"
        )
    return outs


def layouts_of(
    rule: LayoutRule, mesh: Any, static: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...] | None], out_shapes: Sequence[tuple[int, ...]],
) -> list[tuple[list[Layout], list[Layout]]]:  # fmt: skip
    """All layouts of the operands (None: absent) that the rule accepts, with those of the results.

    Whatever the rule raises for some layouts means that it does not take them. Where it takes none,
    what it raised for whole operands goes to the user.
    """
    sizes = mesh_sizes(mesh)
    given = [s for s in shapes if s is not None]
    choices = [states(s, ("sum",), sizes) for s in given]
    if math.prod(map(len, choices)) > MOST_COMBINATIONS:
        choices = [[j for j in c if not j.partial_axes()] for c in choices]
    found = []
    first_error: Exception | None = None
    for combination in itertools.product(*choices):
        rest = iter(combination)
        ins = [None if s is None else _layout(mesh, next(rest)) for s in shapes]
        try:
            outs = infer(rule, ins, static, len(out_shapes))
            outs = [x.resolve(s, "the result") for x, s in zip(outs, out_shapes, strict=True)]
        except Exception as error:
            first_error = first_error or error
            continue
        found.append(([x for x in ins if x is not None], outs))
    if not found and first_error is not None:
        raise PlacementError(f"{rule!r} takes no layouts: {first_error}") from first_error
    return sorted(found, key=lambda row: sum(map(_is_split, row[0])))


def _layout(mesh: Any, where: Joint) -> Layout:
    return Layout(mesh, where.placements, where.order)


def _is_split(layout: Layout) -> int:
    return sum(str(p) != "R" for p in layout.placements) + sum(
        isinstance(p, Partial) for p in layout.placements
    )


__all__ = ["LAYOUT_RULES", "LayoutRule", "find_layout_rule", "infer", "layouts_of"]
