"""What the padding of parts that are not full must hold where it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax.parts import is_even, rows_of
from dtorchjax.placements import Joint, Partial


def extremes(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest value of a real dtype, 0-d; infinite where it has infinities.

    >>> [float(x) for x in extremes("float8_e4m3fn")]
    [-448.0, 448.0]
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return np.array(False), np.array(True)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return np.array(limits.min, dtype), np.array(limits.max, dtype)
    least, greatest = np.array(-np.inf).astype(dtype), np.array(np.inf).astype(dtype)
    if greatest != greatest:  # some floats of 8 bits have no infinity
        least, greatest = (np.array(n, dtype) for n in (jnp.finfo(dtype).min, jnp.finfo(dtype).max))
    return least, greatest


def neutral(op: str, dtype: Any) -> Any:
    """The value that does not count in a reduction: 0 in a sum, the least in a max.

    `last`: the least of all in the order in which XLA sorts, that of -nan with all bits set.
    """
    if op == "last" and jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.asarray(-1, f"int{jnp.finfo(dtype).bits}")
        return jax.lax.bitcast_convert_type(bits, dtype)
    if op in ("sum", "prod"):
        return jnp.asarray(op == "prod", dtype)
    least, greatest = extremes(dtype)
    return jnp.asarray(greatest if op == "min" else least)


def filled(
    x: Any, shape: Sequence[int], where: Joint, sizes: Sequence[int],
    position: Callable[[tuple[int, ...]], Any], ops: Sequence[str | None],
) -> Any:  # fmt: skip
    """A device's part of an array of `shape` with its padding filled.

    `ops` has for every dim the reduction in which it must not count, None if it does not matter.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    for dim, op in enumerate(ops):
        cuts = where.cuts_on(dim, sizes)
        if op is None or not cuts or is_even(shape[dim], cuts):
            continue
        _, real = rows_of(shape[dim], cuts, [position((a,)) for a in where.axes_on(dim)], jnp)
        real = jnp.expand_dims(real, [d for d in range(x.ndim) if d != dim])
        x = jnp.where(real, x, neutral(op, x.dtype))
    return x


def summed_up(where: Joint, outputs: Sequence[Joint], rank: int) -> list[str | None]:
    """For every dim of an operand, the reduction over it: an axis that cuts it leaves terms."""
    found: list[str | None] = [None] * rank
    for dim in range(rank):
        for axis in where.axes_on(dim):
            for out in outputs:
                p = out.placements[axis]
                if isinstance(p, Partial):
                    found[dim] = p.op
    return found
