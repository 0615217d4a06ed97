"""vmap of equations of our own: which operands each vmap maps, outermost last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad

Masks = Sequence[Sequence[bool]]
"""Per vmap, per operand: mapped or not. Results are always mapped, at dim 0."""


def vmapped(fun: Callable[..., Any], batch: Masks) -> Callable[..., Any]:
    """`fun` on flat operands under these vmaps."""
    for mask in batch:
        fun = jax.vmap(fun, in_axes=tuple(0 if m else None for m in mask), out_axes=0)
    return fun


def to_front(xs: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], tuple[bool, ...]]:
    """Operands of a vmap with the mapped dim in front, and which are mapped."""
    mapped = tuple(d is not None for d in dims)
    pairs = zip(xs, dims, strict=True)
    return [x if d is None or d == 0 else jnp.moveaxis(x, d, 0) for x, d in pairs], mapped


def lead(shapes: Sequence[Sequence[Any]], batch: Masks) -> tuple[Any, ...]:
    """The sizes that the vmaps put in front of every result."""
    sizes = [
        next(
            shape[sum(m[i] for m in batch[level + 1 :])]
            for i, shape in enumerate(shapes)
            if mask[i]
        )
        for level, mask in enumerate(batch)
    ]
    return tuple(sizes[::-1])


def inner_shape(shape: Sequence[Any], operand: int, batch: Masks) -> tuple[Any, ...]:
    """The shape of an operand inside all vmaps."""
    return tuple(shape[sum(mask[operand] for mask in batch) :])


def summed_over_shared(gradient: Any, operand: int, batch: Masks) -> Any:
    """A gradient that has every vmap's dim, summed over the vmaps that share the operand."""
    levels = len(batch)
    shared = tuple(levels - 1 - level for level, mask in enumerate(batch) if not mask[operand])
    return gradient.sum(shared) if shared else gradient


def is_zero(tangent: Any) -> bool:
    """True for a symbolic zero, and for the tangent of a value that has none (integers)."""
    return type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0


def instantiated(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent) if type(tangent) is ad.Zero else tangent
