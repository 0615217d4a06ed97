"""Softmax attention to one block of keys after the other (FlashAttention, Dao et al. 2022).

Queries and keys are cut into chunks, so that the scores of one pair of chunks are all that ever
exists; gradients compute them again. Here b counts the batch, g the heads of the keys, r the
queries' heads that share one of them, and d is the head's size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.numerics import wide_einsum

CHUNK = 512  # the most queries, and the most keys, whose scores exist at once, unless told
NOTHING = -1e30  # a score that counts nothing; finite, so that no difference of two is nan


class Softmax(NamedTuple):
    """A softmax and the mean under it, as far as keys have been seen; by chunks of queries.

    The greatest score and the sum of exponentials [n, b, g, r, q], the weighted sum of the values
    [n, b, g, r, q, d]; all in float32 at least.
    """

    greatest: Any
    total: Any
    values: Any


class Problem(NamedTuple):
    """What stays the same from block to block; `dropout` is the rate of weights that are zeroed."""

    causal: bool
    scale: float
    chunk: int
    dropout: float = 0.0


class Extra(NamedTuple):
    """Arrays besides q, k and v.

    A mask, True where a query sees a key, [b, g, r, q, k] with dims of size 1 that broadcast; a key
    for dropout.
    """

    mask: Any = None
    key: Any = None


PLAIN = Extra()


def zero(*xs: Any) -> Any:
    """The number 0, made from arrays inside a shard_map of the user's.

    There, what a loop starts with has to vary along the same mesh axes as what it makes of it.
    """
    if not any(map(_jax.varies, xs)):
        return 0
    return sum(lax.convert_element_type(x[:1, :1, :1, :1], jnp.int32).sum() * 0 for x in xs)


def chunked(x: Any, most: int) -> Any:
    """[b, s, ...] -> [n, b, c, ...]: dim 1 in chunks, the last one filled up with zeros."""
    count = max(1, -(-x.shape[1] // most))
    size = -(-x.shape[1] // count)
    if missing := count * size - x.shape[1]:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)


def joined(chunks: Any, length: int) -> Any:
    """The reverse of `chunked`."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def chunked_queries(x: Any, groups: int, most: int) -> Any:
    """[b, s, (g r), d] -> [n, b, g, r, c, d]."""
    x = chunked(x.reshape(*x.shape[:2], groups, -1, x.shape[3]), most)
    return jnp.moveaxis(x, 2, 4)


def joined_queries(chunks: Any, length: int) -> Any:
    """The reverse of `chunked_queries`."""
    x = joined(jnp.moveaxis(chunks, 4, 2), length)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def begin(queries: Any, zero: Any, size: int | None = None) -> Softmax:
    """The softmax of no keys; values have `size` features, as queries have unless told."""
    zeros = _zeros(queries[..., 0], zero)
    size = queries.shape[-1] if size is None else size
    return Softmax(zeros + NOTHING, zeros, jnp.full((*zeros.shape, size), zero, zeros.dtype))


@functools.partial(jax.jit, static_argnums=4)
def attend(
    softmax: Softmax, q: Any, block: Any, offset: Any, problem: Problem, extra: Extra = PLAIN
) -> Softmax:
    """`softmax` after one more block of keys: q is chunked, `block` is k and v, [b, t, g, d].

    `offset` is the position of the first query less that of the first key.
    """
    length = block[0].shape[1]
    keys = chunked(block[0], problem.chunk), chunked(block[1], problem.chunk)
    extra = _filled(extra, q, keys[0])

    def each_queries(_: None, row: Any) -> Any:
        i, q, softmax = row

        def each_keys(softmax: Softmax, column: Any) -> Any:
            j, k, v = column

            def see(softmax: Softmax) -> Softmax:
                visible = _visible(i, j, q, k, length, offset, problem, extra)
                scores = jnp.where(visible, _scores(q, k, problem), NOTHING)
                greatest = jnp.maximum(softmax.greatest, scores.max(-1))
                p = jnp.where(visible, jnp.exp(scores - greatest[..., None]), 0)
                shrink = jnp.exp(softmax.greatest - greatest)
                kept = _dropped(p, i, j, problem, extra)
                values = wide_einsum("bgrqk,bkgd->bgrqd", kept.astype(v.dtype), v)
                return Softmax(
                    greatest,
                    softmax.total * shrink + p.sum(-1),
                    softmax.values * shrink[..., None] + values,
                )

            return _where_visible(see, softmax, i, j, q, k, offset, problem), None

        return None, lax.scan(each_keys, softmax, _numbered(*keys))[0]

    return lax.scan(each_queries, None, _numbered(q, softmax))[1]


def finish(softmax: Softmax) -> tuple[Any, Any]:
    """The mean of the values, [n, b, g, r, q, d], and the logsumexp of the scores."""
    total = jnp.where(softmax.total == 0, 1, softmax.total)  # a query that sees no key
    return softmax.values / total[..., None], softmax.greatest + jnp.log(total)


@functools.partial(jax.jit, static_argnums=7)
def gradients(
    q: Any,
    block: Any,
    g: Any,
    logsumexp: Any,
    mean: Any,
    offset: Any,
    zero: Any,
    problem: Problem,
    extra: Extra = PLAIN,
) -> tuple[Any, tuple[Any, Any]]:
    """What a block of keys gives to dq (chunked) and to its own (dk, dv); in float32 at least.

    g is the gradient of the result, `mean` its product with the result: the mean under the softmax
    of the gradient of p, the softmax. Chunked as the queries.
    """
    length = block[0].shape[1]
    keys = chunked(block[0], problem.chunk), chunked(block[1], problem.chunk)
    extra = _filled(extra, q, keys[0])
    nothing = tuple(_zeros(x, zero) for x in keys)

    def each_queries(sums: Any, row: Any) -> Any:
        i, q, g, logsumexp, mean = row

        def each_keys(dq: Any, column: Any) -> Any:
            j, k, v, dk, dv = column

            def see(sums: Any) -> Any:
                dq, dk, dv = sums
                visible = _visible(i, j, q, k, length, offset, problem, extra)
                scores = _scores(q, k, problem) - logsumexp[..., None]
                p = jnp.exp(jnp.where(visible, scores, NOTHING))
                dp = _dropped(wide_einsum("bgrqd,bkgd->bgrqk", g, v), i, j, problem, extra)
                ds = (p * (dp - mean[..., None]) * problem.scale).astype(q.dtype)
                return (
                    dq + wide_einsum("bgrqk,bkgd->bgrqd", ds, k),
                    dk + wide_einsum("bgrqk,bgrqd->bkgd", ds, q),
                    dv
                    + wide_einsum(
                        "bgrqk,bgrqd->bkgd", _dropped(p, i, j, problem, extra).astype(g.dtype), g
                    ),
                )

            dq, dk, dv = _where_visible(see, (dq, dk, dv), i, j, q, k, offset, problem)
            return dq, (dk, dv)

        dq, sums = lax.scan(each_keys, _zeros(q, zero), _numbered(*keys, *sums))
        return sums, dq

    (dk, dv), dq = lax.scan(each_queries, nothing, _numbered(q, g, logsumexp, mean))
    return dq, (joined(dk, length), joined(dv, length))


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _zeros(x: Any, zero: Any) -> Any:
    return jnp.full(x.shape, zero, _wide(x))


def _scores(q: Any, k: Any, problem: Problem) -> Any:
    return wide_einsum("bgrqd,bkgd->bgrqk", q, k) * problem.scale


def _numbered(*xs: Any) -> Any:
    """What a scan takes: the number of each chunk, and the chunks."""
    return jnp.arange(jax.tree.leaves(xs)[0].shape[0]), *xs


def _filled(extra: Extra, q: Any, k: Any) -> Extra:
    """The mask filled up to whole chunks of queries and keys."""
    if extra.mask is None:
        return extra
    whole = q.shape[0] * q.shape[4], k.shape[0] * k.shape[2]
    sizes = extra.mask.shape[3:]
    more = [(0, 0 if n == 1 else full - n) for n, full in zip(sizes, whole, strict=True)]
    return extra._replace(mask=jnp.pad(extra.mask, [(0, 0)] * 3 + more))


def _dropped(x: Any, i: Any, j: Any, problem: Problem, extra: Extra) -> Any:
    """x [b, g, r, q, k] for chunks i and j with a part of its elements zeroed."""
    if not problem.dropout:
        return x
    key = jax.random.fold_in(jax.random.fold_in(extra.key, i), j)
    kept = jax.random.bernoulli(key, 1 - problem.dropout, x.shape)
    return jnp.where(kept, x / (1 - problem.dropout), 0)


def _visible(
    i: Any, j: Any, q: Any, k: Any, length: int, offset: Any, problem: Problem, extra: Extra
) -> Any:
    """Which keys of chunk j the queries of chunk i see: [q, k], or [b, g, r, q, k] by a mask."""
    key = j * k.shape[1] + jnp.arange(k.shape[1])[None, :]
    query = i * q.shape[3] + jnp.arange(q.shape[3])[:, None]
    visible = key < length  # the last chunk is filled up
    if problem.causal:
        visible &= key <= query + offset
    if extra.mask is None:
        return visible
    mask = extra.mask
    for dim, chunk, size in ((3, i, q.shape[3]), (4, j, k.shape[1])):
        if mask.shape[dim] != 1:
            mask = lax.dynamic_slice_in_dim(mask, chunk * size, size, dim)
    return visible & mask


def _where_visible(
    see: Any, sums: Any, i: Any, j: Any, q: Any, k: Any, offset: Any, problem: Problem
) -> Any:
    """see(sums), or sums where the queries of chunk i see no key of chunk j."""
    if not problem.causal:
        return see(sums)
    last_query = (i + 1) * q.shape[3] - 1 + offset
    return lax.cond(j * k.shape[1] <= last_query, see, lambda sums: sums, sums)
