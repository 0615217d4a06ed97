"""Attention over a sequence that is sharded: as a ring, or by exchanging heads."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax import blockwise
from dtorchjax.blockwise import (
    Problem,
    attend,
    begin,
    chunked_queries,
    finish,
    gradients,
    joined_queries,
    zero,
)
from dtorchjax.collectives import all_to_all, axes_of, axis_index, axis_size, ppermute
from dtorchjax.dfunction import dfunction
from dtorchjax.errors import PlacementError

_RULE = "b s (g r) d!, b s g d!, b s g d! -> b s (g r) d!"


@dfunction(rule=_RULE)
def ring_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None
) -> Any:
    """softmax(q k^T scale) v, with the sequence sharded and the keys sent around a ring.

    q [b, s, h, d], k and v [b, t, g, d] -> [b, s, h, d] in q's dtype; h is a multiple of g, and
    each head of k and v serves h / g successive heads of q. `scale` is 1 / sqrt(d) unless given.
    With `causal`, for which t is s, a token sees those up to itself. Sums are in float32 for 16-bit
    operands. b, the heads, and s and t together may be sharded, d not.

    Where s is sharded over n devices, each sends a block of k and of v n - 1 times. For the
    gradients it does so again, and the terms of dk and dv follow their block, in float32, n times.
    No device holds scores of more than 512 queries and 512 keys at once. With `causal`, the device
    of the last tokens has the most to do, and the others wait for it.

    Raises ValueError where h is no multiple of g, or t is not s with `causal`.

    Source: Liu, Zaharia, Abbeel 2023, Ring Attention with Blockwise Transformers.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> ring_attention(x, x, x, causal=True).shape
    (1, 4, 2, 8)
    """
    return _ring(q, k, v, axes_of("s"), causal, scale)[0]


def _ring_forward(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None
) -> tuple[Any, Any]:
    return _ring(q, k, v, axes_of("s"), causal, scale)


def _ring_backward(residuals: Any, g: Any) -> tuple[Any, Any, Any]:
    return _ring_gradients(residuals, g, axes_of("s"))


ring_attention.defvjp(_ring_forward, _ring_backward)


@dfunction(rule=_RULE)
def ulysses_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None
) -> Any:
    """softmax(q k^T scale) v, with the sequence sharded but whole while attending.

    Shapes, dtypes and errors as in `ring_attention`. Where s is sharded over n devices, they trade
    shards of the sequence for shards of the heads and back: one all-to-all each of q, k, v and the
    result, and as many for the gradients. All devices have the same to do.

    Raises PlacementError where g, the heads of k on one device, are no multiple of n.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> ulysses_attention(x, x, x, causal=True).shape
    (1, 4, 2, 8)
    """
    return _ulysses_forward(q, k, v, causal=causal, scale=scale)[0]


def _ulysses_forward(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None
) -> tuple[Any, Any]:
    axes = axes_of("s")
    if k.shape[2] % axis_size(axes):
        raise PlacementError(
            f"ulysses_attention: {k.shape[2]} heads of k and v cannot be shared out to the "
            f"{axis_size(axes)} devices of mesh axes {axes}, over which the sequence is sharded: "
            "ring_attention has no such limit"
        )
    q, k, v = _to_heads((q, k, v), axes)
    out, residuals = _ring(q, k, v, (), causal, scale)
    return _to_sequence(out, axes), residuals


def _ulysses_backward(residuals: Any, g: Any) -> tuple[Any, Any, Any]:
    axes = axes_of("s")
    return _to_sequence(_ring_gradients(residuals, _to_heads(g, axes), ()), axes)


ulysses_attention.defvjp(_ulysses_forward, _ulysses_backward)


def _to_heads(xs: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda x: all_to_all(x, axes, 2, 1), xs)


def _to_sequence(xs: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda x: all_to_all(x, axes, 1, 2), xs)


def _ring(
    q: Any, k: Any, v: Any, axes: tuple[str, ...], causal: bool, scale: float | None
) -> tuple[Any, Any]:
    """The result, and what its gradient needs."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads of q are no multiple of {k.shape[2]} of k and v")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    problem = Problem(causal, scale, blockwise.CHUNK)
    size, queries = axis_size(axes), chunked_queries(q, k.shape[2], problem.chunk)

    def step(carry: Any, i: Any) -> Any:
        softmax, block = carry
        following = _next(block, axes)  # travels while the block here is at work
        return (attend(softmax, queries, block, _offset(i, q, axes), problem), following), None

    carry = begin(queries, zero(q, k, v)), (k, v)
    if size > 1:
        carry, _ = lax.scan(step, carry, jnp.arange(size - 1))
    softmax, block = carry
    softmax = attend(softmax, queries, block, _offset(size - 1, q, axes), problem)
    out, logsumexp = finish(softmax)
    out = joined_queries(out, q.shape[1]).astype(q.dtype)
    return out, (q, k, v, out, logsumexp, problem)


def _ring_gradients(residuals: Any, g: Any, axes: tuple[str, ...]) -> tuple[Any, Any, Any]:
    q, k, v, out, logsumexp, problem = residuals
    size, heads = axis_size(axes), k.shape[2]
    queries, slopes, out = (chunked_queries(x, heads, problem.chunk) for x in (q, g, out))
    mean = (slopes.astype(logsumexp.dtype) * out).sum(-1)
    start = zero(q, k, v, g)

    def terms(block: Any, i: Any) -> Any:
        """What the block that is here at step i gives: dq, and (dk, dv)."""
        offset = _offset(i, q, axes)
        return gradients(queries, block, slopes, logsumexp, mean, offset, start, problem)

    def add(sums: Any, block: Any, i: Any) -> Any:
        dq, travelling = sums
        return jax.tree.map(jnp.add, (dq, _next(travelling, axes)), terms(block, i))

    def step(carry: Any, i: Any) -> Any:
        sums, block = carry
        following = _next(block, axes)
        return (add(sums, block, i), following), None

    block = k, v
    sums = terms(block, 0)
    if size > 1:  # dk and dv follow their block, and go one step further, home
        carry, _ = lax.scan(step, (sums, _next(block, axes)), jnp.arange(1, size - 1))
        dq, travelling = add(*carry, size - 1)
        sums = dq, _next(travelling, axes)
    dq, (dk, dv) = sums
    dq = joined_queries(dq, q.shape[1])
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _next(xs: Any, axes: tuple[str, ...]) -> Any:
    """What the device before this one has."""
    size = axis_size(axes)
    return ppermute(xs, axes, [(i, (i + 1) % size) for i in range(size)])


def _offset(i: Any, q: Any, axes: tuple[str, ...]) -> Any:
    """The position of the first query less that of the first key, at step i of the ring."""
    size, here = axis_size(axes), axis_index(axes)
    return (here - (here - i) % size) * q.shape[1]
