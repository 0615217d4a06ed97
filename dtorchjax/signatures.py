"""`dt.signature`: the table of a primitive for given shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.notation import PlacementSignature
from dtorchjax.op import Op
from dtorchjax.op_tables import program_table
from dtorchjax.program import whole_aval
from dtorchjax.registry import OPS, RULES, find_rule


def signature(name: str, *avals: Any, **params: Any) -> PlacementSignature:
    """The placement table of a primitive or an operator for operands of these shapes.

    `avals` are arrays or ShapeDtypeStructs (pytrees of them, or None, where an operator takes
    that); `params` are the primitive's parameters, those of the `jax.lax` function of the same
    name, or the operator's static arguments. A `dot_general` without `dimension_numbers` is a
    matrix product. The table of an operator is that of its rule, or follows from its
    decomposition. Raises PlacementError if the primitive has no rule.

    >>> x = jax.ShapeDtypeStruct((8, 512), "float32")
    >>> print(signature("exp", x))
    R -> R
    S0 -> S0
    S1 -> S1
    P(max) -> P(max)
    P(min) -> P(min)
    """
    if isinstance(OPS.get(name), Op) or (name in OPS and name not in RULES):
        return _of_op(name, avals, params)
    rule = find_rule(name)
    if name == "dot_general" and not params:
        params = {
            "dimension_numbers": (((avals[0].ndim - 1,), (max(0, avals[1].ndim - 2),)), ((), ()))
        }
    structs = [whole_aval(x) for x in avals]
    if name in OPS and len({x.shape for x in structs}) > 1:  # it broadcasts
        return _of_op(name, avals, params)
    ins, outs, full = _equation(name, structs, params)
    return rule.signature(ins, outs, full)


def _of_op(name: str, avals: Sequence[Any], params: dict[str, Any]) -> PlacementSignature:
    operands = jax.tree.map(_jax.whole_aval, list(avals))
    closed = jax.make_jaxpr(functools.partial(OPS[name], **params))(*operands)
    return program_table(_jax.without_dead_code(closed))


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
