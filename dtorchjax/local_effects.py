"""Callbacks in a whole-array program: called once, by the first device, with whole values.

What a callback returns is a term of that device; the plan adds it to the zeros of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Partial, R
from dtorchjax.registry import LOCALS, RULES, LocalCall

NAMES = ("debug_callback", "debug_print", "io_callback", "pure_callback")


class CallbackRule:
    """Operands are needed whole; results are whole on one device, and zero on all others."""

    moves, place = False, __file__

    def refuses(self, params: dict[str, Any]) -> str | None:
        ordered = params.get("ordered") or "Ordered" in str(params.get("effect", ""))
        return (
            "ordered effects cannot run on several devices, as in jax.jit; leave out ordered=True"
            if ordered
            else None
        )

    def signature(
        self, ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]
    ) -> PlacementSignature:
        terms = tuple(Partial("max" if str(a.dtype) == "bool" else "sum") for a in outs)
        return PlacementSignature((Row((R,) * len(ins), terms),))


def _run(call: LocalCall, *operands: Any) -> Any:
    everywhere = tuple(a for a, size in enumerate(call.sizes) if size > 1)

    def called(*xs: Any) -> list[Any]:
        found = call.bind(*xs)
        return list(found) if isinstance(found, list | tuple) else [found]

    def silent(*_: Any) -> list[Any]:
        return [jnp.zeros(a.shape, a.dtype) for a in call.out_avals]

    first = call.position(everywhere) == 0
    results = lax.cond(first, called, silent, *operands)
    whole = [  # along axes where nothing adds them up
        tuple(call.names[a] for a in everywhere if where.placements[a] == R)
        for where in call.outputs
    ]
    return [
        jax.tree.map(lambda y, axes=axes: lax.psum(y, axes), x) if axes else x
        for x, axes in zip(results, whole, strict=True)
    ]


for _name in NAMES:
    RULES[_name] = CallbackRule()
    LOCALS[_name] = _run
