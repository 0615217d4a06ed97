"""Linear algebra. Half precision stays half precision here: the products add up in float32."""

from __future__ import annotations

from jax import numpy as jnp

from dtorchjax.op import elementary, op

matmul = elementary("matmul", jnp.matmul)
dot = elementary("dot", jnp.dot)
vdot = elementary("vdot", jnp.vdot)
inner = elementary("inner", jnp.inner)
tensordot = elementary("tensordot", jnp.tensordot)
einsum = elementary("einsum", jnp.einsum)
trace = elementary("trace", jnp.trace)
tril = elementary("tril", jnp.tril)
triu = elementary("triu", jnp.triu)
eye = elementary("eye", jnp.eye)
diagonal = elementary("diagonal", jnp.diagonal)


@op(upcast=False)
def linear(x, weight, bias=None):
    """x @ weight + bias: x [..., i], weight [i, o], bias [o] -> [..., o]."""
    out = jnp.matmul(x, weight)
    return out if bias is None else out + bias


@op(upcast=False)
def bmm(x, y):
    """The product of each matrix of x [b, m, k] with that of y [b, k, n] -> [b, m, n]."""
    if x.ndim != 3 or y.ndim != 3 or x.shape[0] != y.shape[0]:
        raise ValueError(f"bmm needs two batches of matrices, not {x.shape} and {y.shape}")
    return jnp.matmul(x, y)


@op(upcast=False)
def addmm(input, x, y, *, beta=1.0, alpha=1.0):
    """beta * input + alpha * (x @ y); input is not read if beta is 0."""
    product = _scaled(alpha, jnp.matmul(x, y))
    return product if beta == 0 else _scaled(beta, input) + product


@op(upcast=False)
def baddbmm(input, x, y, *, beta=1.0, alpha=1.0):
    """beta * input + alpha * (x @ y) for batches of matrices: x [b, m, k], y [b, k, n]."""
    if x.ndim != 3 or y.ndim != 3:
        raise ValueError(f"baddbmm needs two batches of matrices, not {x.shape} and {y.shape}")
    product = _scaled(alpha, jnp.matmul(x, y))
    return product if beta == 0 else _scaled(beta, input) + product


def _scaled(factor, x):
    return x if factor == 1 else factor * x


@op(upcast=False)
def outer(x, y):
    """x [m], y [n] -> x[i] * y[j], [m, n]."""
    if x.ndim != 1 or y.ndim != 1:
        raise ValueError(f"outer needs two vectors, not {x.shape} and {y.shape}")
    return x[:, None] * y[None, :]


@op(upcast=False)
def kron(x, y):
    """The Kronecker product: along each dim, every element of x times all of y."""
    rank = max(x.ndim, y.ndim)
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    y = y.reshape((1,) * (rank - y.ndim) + y.shape)
    pairs = jnp.expand_dims(x, range(1, 2 * rank, 2)) * jnp.expand_dims(y, range(0, 2 * rank, 2))
    return pairs.reshape([m * n for m, n in zip(x.shape, y.shape, strict=True)])


@op(upcast=False)
def bilinear(x, y, weight, bias=None):
    """x [..., i], y [..., j], weight [o, i, j], bias [o] -> x weight y + bias, [..., o]."""
    out = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return out if bias is None else out + bias


@op(upcast=False)
def diag(x, *, offset=0, padding=0):
    """A matrix with x [n] on a diagonal and `padding` elsewhere, or the diagonal of x [m, n].

    A diagonal outside of the matrix is empty.
    """
    if x.ndim == 1:
        size = x.shape[0] + abs(offset)
        rows, columns = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
        values = jnp.pad(x, (max(offset, 0), max(-offset, 0)))
        return jnp.where(columns - rows == offset, values[None, :], jnp.asarray(padding, x.dtype))
    if x.ndim != 2:
        raise ValueError(f"diag needs a vector or a matrix, not {x.shape}")
    m, n = x.shape
    length = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    at = jnp.arange(length)
    return x[at + max(-offset, 0), at + max(offset, 0)]


@op(upcast=False)
def cross(x, y, *, axis=-1):
    """The cross product of vectors of size 3 along `axis`."""
    x, y = (jnp.moveaxis(v, axis, 0) for v in jnp.broadcast_arrays(x, y))
    if x.shape[0] != 3:
        raise ValueError(f"cross needs vectors of size 3, axis {axis} has {x.shape[0]}")
    (a, b, c), (d, e, f) = x, y
    return jnp.stack([b * f - c * e, c * d - a * f, a * e - b * d], axis)
