"""What things cost, in bytes that one device sends on the fastest axis: the planner's unit."""

from __future__ import annotations

import math
from typing import Any

from dtorchjax.chips import Speeds
from dtorchjax.placements import Joint, Shard, elements

IMPOSSIBLE = 1e15
LOCAL_COPY = 1e-3
"""Bytes sent per byte copied locally: enough to prefer doing nothing."""
REPLICATED_FLOP = 0.3
"""Bytes per multiply or add that more than one device does: never worth what it saves."""
REPLICATED_CONTRACTION = 10
"""In collectives: however small a contraction is, doing it twice is no way to save a few."""
OUTPUT_BYTE = 0.002
"""Bytes sent per byte of result written on one device."""


def nbytes(aval: Any) -> int:
    return elements(aval.shape) * aval.dtype.itemsize


def flops(name: str, in_avals: Any, out_avals: Any, params: dict[str, Any]) -> int:
    """Multiplies and adds of the whole equation; only contractions and convolutions count."""
    result = 2 * elements(out_avals[0].shape) if out_avals else 0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return result * elements([in_avals[0].shape[d] for d in contracted])
    if name == "conv_general_dilated":
        _, channels, *window = params["dimension_numbers"].rhs_spec
        return result * elements([in_avals[1].shape[d] for d in (channels, *window)])
    return 0


def work(
    name: str, in_avals: Any, out_avals: Any, params: dict[str, Any], moves: bool, speeds: Speeds,
    contraction: int | None = None,
) -> float:  # fmt: skip
    """What doing all of an equation on one device more costs; moving data is free (it is fused).

    Elementwise work costs the bytes that it reads or writes, by half: what is fused touches memory
    less often. `contraction` is the number of multiplies and adds, where it is known.
    """
    contraction = flops(name, in_avals, out_avals, params) if contraction is None else contraction
    if contraction:
        return REPLICATED_FLOP * contraction + REPLICATED_CONTRACTION * speeds.latency
    return 0.0 if moves else speeds.memory * max(map(nbytes, (*in_avals, *out_avals)), default=0)


def row_cost(work: float, out_avals: Any, row: tuple, sizes: tuple[int, ...]) -> float:
    """Replicated work and written bytes of one joint row, per execution."""
    inputs, outputs = row
    split = math.prod(
        size
        for axis, size in enumerate(sizes)
        if any(isinstance(j.placements[axis], Shard) for j in (*inputs, *outputs))
    )
    total = work * (1 / split - 1 / math.prod(sizes))
    for aval, where in zip(out_avals, outputs, strict=True):
        total += OUTPUT_BYTE * nbytes(aval) * part(where, sizes)
    return total


def part(where: Joint, sizes: tuple[int, ...]) -> float:
    """The part of an array that one device holds."""
    return 1 / math.prod(
        n for p, n in zip(where.placements, sizes, strict=True) if isinstance(p, Shard)
    )


__all__ = ["IMPOSSIBLE", "LOCAL_COPY", "flops", "nbytes", "part", "row_cost", "work"]
