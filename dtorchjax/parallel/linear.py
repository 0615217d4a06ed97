"""Linear layers whose weight is sharded (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax import numpy as jnp

from dtorchjax.collectives import axes_of, axis_size
from dtorchjax.dfunction import dfunction


@dfunction(rule="... i, i o, [o] -> ... o")
def column_parallel_linear(x: Any, w: Any, b: Any = None) -> Any:
    """`x @ w + b`, where `w` and `b` may be sharded on the columns of `w`.

    x [..., i], w [i, o], b [o] or None -> [..., o]. Where o is sharded, x is whole and so is the
    result sharded, without communication; the gradient of x is a partial sum, one all-reduce. The
    leading dims of x may be sharded as well. The result has the wider dtype of x and w; 16-bit
    products are summed in float32, the gradients too, which come in the dtype of their operand.

    Raises TypeError where i differs between x and w.

    Source: Shoeybi et al. 2019, Megatron-LM, section 3.

    >>> column_parallel_linear(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    return _linear(x, w, b, 1)


@dfunction(
    rule="... i, i o, [o] -> ... o",
    extra=("i: S-1, S0, R -> P", "i: S-1, S0, - -> P"),
)
def row_parallel_linear(x: Any, w: Any, b: Any = None) -> Any:
    """`x @ w + b`, where x and `w` may be sharded on the dim that is summed.

    x [..., i], w [i, o], b [o] or None -> [..., o]. Where i is sharded, the result is a partial sum
    to which every device adds its share of b; whoever uses it decides between an all-reduce and a
    reduce-scatter. The gradients of x and w need no communication, that of b an all-reduce of o
    numbers; it is the dense one. Dtypes and errors as in `column_parallel_linear`.

    Source: Shoeybi et al. 2019, Megatron-LM, section 3.

    >>> row_parallel_linear(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    return _linear(x, w, b, axis_size(axes_of("i")))


def _linear(x: Any, w: Any, b: Any, shares: int) -> Any:
    """The product and one of `shares` equal shares of the bias."""
    dtype = jnp.result_type(x, w)
    out = _dot(x, w, [x.ndim - 1], [0], dtype)
    if b is not None:
        out += b.astype(out.dtype) / shares
    return out.astype(dtype)


def _dot(x: Any, y: Any, over_x: list[int], over_y: list[int], dtype: Any) -> Any:
    """A product summed in float32 at least."""
    return lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        ((over_x, over_y), ((), ())),
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )


def _column_forward(x: Any, w: Any, b: Any = None) -> tuple[Any, Any]:
    return _linear(x, w, b, 1), (x, w, b)


def _column_backward(residuals: Any, g: Any) -> tuple[Any, ...]:
    return _gradients(residuals, g, 1)


def _row_forward(x: Any, w: Any, b: Any = None) -> tuple[Any, Any]:
    return _linear(x, w, b, axis_size(axes_of("i"))), (x, w, b)


def _row_backward(residuals: Any, g: Any) -> tuple[Any, ...]:
    return _gradients(residuals, g, axis_size(axes_of("i")))


def _gradients(residuals: Any, g: Any, shares: int) -> tuple[Any, ...]:
    x, w, b = residuals
    leading = list(range(g.ndim - 1))
    dx = _dot(g, w, [g.ndim - 1], [1], g.dtype).astype(x.dtype)
    dw = _dot(x, g, leading, leading, g.dtype).astype(w.dtype)
    if b is None:
        return dx, dw
    # Every device that shares the sum sees the whole g, so the terms of db add up `shares` times.
    wide = jnp.promote_types(g.dtype, jnp.float32)
    return dx, dw, (g.sum(leading, dtype=wide) / shares).astype(b.dtype)


column_parallel_linear.defvjp(_column_forward, _column_backward)
row_parallel_linear.defvjp(_row_forward, _row_backward)
