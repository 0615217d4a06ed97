"""`dt.signature`: the table of a primitive for given shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.notation import PlacementSignature
from dtorchjax.registry import find_rule


def signature(name: str, *avals: Any, **params: Any) -> PlacementSignature:
    """The placement table of a primitive for operands of these shapes.

    `avals` are arrays or ShapeDtypeStructs; `params` are the primitive's parameters, or those of
    the `jax.lax` function of the same name. A `dot_general` without `dimension_numbers` is a
    matrix product. Raises PlacementError if the primitive has no rule.

    >>> x = jax.ShapeDtypeStruct((8, 512), "float32")
    >>> print(signature("exp", x))
    R -> R
    S0 -> S0
    S1 -> S1
    P(max) -> P(max)
    P(min) -> P(min)
    """
    rule = find_rule(name)
    if name == "dot_general" and not params:
        params = {
            "dimension_numbers": (((avals[0].ndim - 1,), (max(0, avals[1].ndim - 2),)), ((), ()))
        }
    structs = [_jax.whole_aval(x) for x in avals]
    ins, outs, full = _equation(name, structs, params)
    return rule.signature(ins, outs, full)


def _equation(name: str, avals: Sequence[Any], params: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Operand types, result types and all parameters of the equation that jax makes of a call."""
    problems = []
    for call in _jax.ways_to_call(name):
        try:
            closed = jax.make_jaxpr(lambda *xs, call=call: call(*xs, **params))(*avals)
        except Exception as error:  # whatever jax says about wrong parameters goes to the user
            problems.append(str(error).splitlines()[0])
            continue
        for eqn in _jax.equations(closed.jaxpr):
            if eqn.primitive.name == name:
                return [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params
    shapes = ", ".join(str(a.shape) for a in avals)
    raise PlacementError(
        f"cannot make a `{name}` of operands {shapes} with {params or 'no parameters'}"
        + "".join(f"\n  {p}" for p in problems[:2])
    )
