"""What the bodies of many operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core, lax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.settled import settled

Axis = int | Sequence[int] | None


def axes_of(x: Any, axis: Axis) -> tuple[int, ...]:
    """The dims that `axis` means, counted from the front and sorted; None is all of them.

    A value without dims has none, whatever `axis` says of its last one. ValueError for a dim that
    is not there or is named twice.
    """
    if axis is None:
        return tuple(range(x.ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if x.ndim == 0 and all(a in (-1, 0) for a in axes):
        return ()
    for a in axes:
        if not -x.ndim <= a < x.ndim:
            raise ValueError(f"axis {a} is out of bounds for an array of {x.ndim} dims")
    found = sorted(a % x.ndim for a in axes)
    if len(set(found)) != len(found):
        raise ValueError(f"an axis is named twice in {tuple(axes)}")
    return tuple(found)


def one_axis(x: Any, axis: int) -> int:
    """The dim that `axis` means, counted from the front."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is out of bounds for an array of {x.ndim} dims")
    return axis % x.ndim


def count_of(x: Any, axes: Sequence[int]) -> Any:
    """The number of elements along `axes` in the dtype of x; above 2^31, or symbolic, too."""
    count = math.prod(x.shape[a] for a in axes)
    return jnp.asarray(float(count) if isinstance(count, int) else count, x.dtype)


def average_over(x: Any, axes: Sequence[int]) -> Callable[[Any], Any]:
    """The mean along `axes`, dims kept, of arrays of the shape of x."""
    return lambda value: value.sum(axes, keepdims=True) / count_of(x, axes)


def moments(x: Any, average: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """(centre, offset, variance) by `average`: x - centre - offset has mean 0.

    The mean is two numbers, since far from 0 one of them cannot tell it to the precision that the
    differences have. The second pass over x gives the offset and the variance together.
    """
    centre = average(x)
    near = x - centre
    offset = average(near)
    var = average(jnp.square(near)) - jnp.square(offset)
    return centre, offset, jnp.maximum(var, 0)


def as_float(x: Any) -> Any:
    """Integers and bools as the default float; floats as they are."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def sum_to(g: Any, shape: Sequence[Any]) -> Any:
    """The reverse of broadcasting to `g.shape`: the sum over the dims that were made."""
    lead = g.ndim - len(shape)
    if lead:
        g = g.sum(tuple(range(lead)))
    ones = tuple(
        i for i, (a, b) in enumerate(zip(g.shape, shape, strict=True)) if b == 1 and a != 1
    )
    return g.sum(ones, keepdims=True) if ones else g


def safe_product(x: Any, y: Any) -> Any:
    """x * y, and 0 where y is 0: limits such as -inf * exp(-inf)."""
    return jnp.where(y == 0, 0, x) * y


def expanded(x: Any, axes: Sequence[int], keepdims: bool) -> Any:
    """A reduced value or its cotangent, with the reduced dims of size 1 again."""
    return x if keepdims else jnp.expand_dims(x, tuple(axes))


def finite_max(x: Any, axes: Sequence[int], mask: Any = None) -> Any:
    """The greatest value (dims kept), for shifting exponents: 0 where it is not finite."""
    shift = jnp.max(x, axes, keepdims=True, initial=-jnp.inf, where=mask)
    return lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))


def reduced(loss: Any, reduction: str, weight: Any = None) -> Any:
    """ "none", "sum" or "mean" of a loss per element; a mean is over the sum of the weights.

    The mean of no elements, or of weights that are all 0, is 0.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return settled(loss.sum())
    if reduction != "mean":
        raise OpError(f'reduction {reduction!r} is not "none", "sum" or "mean"')
    if weight is None:
        return settled(loss.sum()) / max_one(loss.size, loss.dtype)
    total = settled(jnp.broadcast_to(weight, loss.shape).astype(loss.dtype).sum())
    return settled(loss.sum()) / jnp.where(total == 0, 1, total)


def max_one(size: Any, dtype: Any) -> Any:
    """A number of elements as a divisor, 1 where there are none; it may be symbolic."""
    size = core.max_dim(size, 1)
    return jnp.asarray(float(size) if isinstance(size, int) else size, dtype)


def channel_shape(x: Any, axis: int) -> list[Any]:
    """The shape of a vector along `axis` that broadcasts to `x`."""
    return [x.shape[d] if d == axis % x.ndim else 1 for d in range(x.ndim)]


def wide_einsum(sentence: str, x: Any, y: Any) -> Any:
    """An einsum that adds up, and gives its result, in float32 at least.

    On the CPU half precision is cast before: it gains nothing there, and XLA (jaxlib 0.10) refuses
    some products of bfloat16 with a float32 result.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if jax.default_backend() == "cpu":
        x, y = x.astype(wide), y.astype(wide)
    return jnp.einsum(sentence, x, y, preferred_element_type=wide)
