"""Scaled dot-product attention, without the scores of all pairs where there are many.

Source of the blockwise form: Rabe and Staats 2021; Dao et al. 2022, FlashAttention.
"""

from __future__ import annotations

import math

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax import blockwise
from dtorchjax.blockwise import NOTHING, Extra, Problem, chunked_queries, joined_queries, zero
from dtorchjax.errors import OpError
from dtorchjax.numerics import sum_to, wide_einsum
from dtorchjax.op import op

MOST_SCORES = 1 << 20
"""Up to so many pairs of a query and a key, all scores of a head exist at once."""


@op(upcast=False, saves=("logsumexp",))
def scaled_dot_product_attention(
    q, k, v, mask=None, bias=None, key=None, *, causal=False, scale=None, dropout=0.0, chunk=None
):
    """softmax(q k^T scale + bias) v along the sequence.

    q [..., s, h, d], k [..., t, g, d], v [..., t, g, e] with h a multiple of g (h / g heads of q
    share one of k and v) -> [..., s, h, e]. The mask (bool, True where a query sees a key) and the
    bias broadcast to [..., h, s, t]. `causal`: query i sees the keys up to i + t - s. `scale` is
    1 / sqrt(d) unless given. `dropout` is the rate at which weights are zeroed; it needs a `key`. A
    query that sees no key gives 0. Weights are computed in float32 at least.

    Above 2^20 pairs of a query and a key, scores exist in blocks of `chunk` x `chunk` (512) only,
    in the backward pass too, so that memory does not grow with s * t; a bias, a symbolic length or
    a symbolic size of heads keeps them whole, and `chunk` asks for blocks at any size.
    """
    problem = _problem(q, k, causal, scale, dropout, key)
    if not _in_blocks(q, k, bias, chunk):
        return _whole(q, k, v, mask, bias, key, problem)
    problem = problem._replace(chunk=chunk or blockwise.CHUNK)
    q4, k4, v4 = (_with_batch(x) for x in (q, k, v))
    extra = Extra(_wide_mask(mask, q, k4.shape[2]), key)
    queries = chunked_queries(q4, k4.shape[2], problem.chunk)
    start = blockwise.begin(queries, zero(q4, k4, v4), v4.shape[3])
    softmax = blockwise.attend(start, queries, (k4, v4), k4.shape[1] - q4.shape[1], problem, extra)
    out, logsumexp = blockwise.finish(softmax)
    out = joined_queries(out, q4.shape[1]).astype(q.dtype)
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp


@scaled_dot_product_attention.vjp
def _(q, k, v, mask, bias, key, out, logsumexp, g, *, causal, scale, dropout, chunk):
    problem = _problem(q, k, causal, scale, dropout, key)
    if not _in_blocks(q, k, bias, chunk):
        return _whole_gradients(q, k, v, mask, bias, key, out, logsumexp, g, problem)
    problem = problem._replace(chunk=chunk or blockwise.CHUNK)
    q4, k4, v4, out4, g4 = (_with_batch(x) for x in (q, k, v, out, g))
    heads = k4.shape[2]
    extra = Extra(_wide_mask(mask, q, heads), key)
    queries, slopes, means = (chunked_queries(x, heads, problem.chunk) for x in (q4, g4, out4))
    mean = (slopes.astype(logsumexp.dtype) * means).sum(-1)
    dq, (dk, dv) = blockwise.gradients(
        queries, (k4, v4), slopes, logsumexp, mean, k4.shape[1] - q4.shape[1], zero(q4, k4, v4, g4),
        problem, extra,
    )  # fmt: skip
    dq = joined_queries(dq, q4.shape[1])
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None, None, None


def _problem(q, k, causal, scale, dropout, key):
    if q.ndim < 3 or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise OpError(
            f"attention needs q [..., s, h, d] and k [..., t, g, d] with h a multiple of g, not "
            f"{q.shape} and {k.shape}"
        )
    if dropout and key is None:
        raise OpError("attention with dropout needs a key")
    if scale is None:
        size = q.shape[-1]
        scale = 1 / math.sqrt(size) if isinstance(size, int) else jnp.asarray(size) ** -0.5
    return Problem(causal, scale, blockwise.CHUNK, dropout)


def _in_blocks(q, k, bias, chunk):
    s, t, d = q.shape[-3], k.shape[-3], q.shape[-1]
    if bias is not None or not all(isinstance(n, int) for n in (s, t, d)):
        return False
    return chunk is not None or s * t > MOST_SCORES


def _with_batch(x):
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _wide_mask(mask, q, groups):
    """A mask as [b, g, r, s, t], dims of size 1 where it broadcasts."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (q.ndim - mask.ndim) + mask.shape)
    lead = mask.shape[: q.ndim - 3]
    if any(n != 1 for n in lead):
        mask = jnp.broadcast_to(mask, (*q.shape[: q.ndim - 3], *mask.shape[-3:]))
    mask = _with_batch(mask)
    split = (1, 1) if mask.shape[1] == 1 else (groups, mask.shape[1] // groups)
    return mask.reshape(mask.shape[0], *split, *mask.shape[2:])


# ---- all scores at once: [..., g, s, t], or [..., g, r, s, t] where r heads of q share one ------


def _heads(q, k):
    """The letters of the heads' dims."""
    return "g" if q.shape[-2] == k.shape[-2] else "gr"


def _split_heads(x, q, k):
    """[..., h, s, t] (all of q's dims, or fewer) with the heads' dim as in scores."""
    x = x.reshape((1,) * (q.ndim - x.ndim) + x.shape)
    if _heads(q, k) == "g":
        return x
    groups = k.shape[-2]
    split = (1, 1) if x.shape[-3] == 1 else (groups, x.shape[-3] // groups)
    return x.reshape(*x.shape[:-3], *split, *x.shape[-2:])


def _grouped(x, k):
    """[..., s, h, d] with the heads' dim as in scores."""
    if x.shape[-2] == k.shape[-2]:
        return x
    groups = k.shape[-2]
    return x.reshape(*x.shape[:-2], groups, x.shape[-2] // groups, x.shape[-1])


def _scores(q, k, mask, bias, problem):
    """Scaled scores, -inf where a query does not see a key."""
    h = _heads(q, k)
    scores = wide_einsum(f"...s{h}d,...tgd->...{h}st", _grouped(q, k), k) * problem.scale
    if bias is not None:
        scores += _split_heads(bias, q, k)
    seen = None if mask is None else _split_heads(mask, q, k)
    if problem.causal:
        s, t = q.shape[-3], k.shape[-3]
        past = jnp.arange(t)[None, :] <= jnp.arange(s)[:, None] + (t - s)
        seen = past if seen is None else seen & past
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _dropped(x, key, problem):
    if not problem.dropout:
        return x
    kept = jax.random.bernoulli(key, 1 - problem.dropout, x.shape)
    return jnp.where(kept, x / (1 - problem.dropout), 0)


def _whole(q, k, v, mask, bias, key, problem):
    h, scores = _heads(q, k), _scores(q, k, mask, bias, problem)
    # at least a number that leaves 0 of a query that sees no key
    greatest = jnp.maximum(scores.max(-1, keepdims=True, initial=-jnp.inf), NOTHING)
    greatest = lax.stop_gradient(greatest)
    p = jnp.exp(scores - greatest)
    total = p.sum(-1, keepdims=True)
    if mask is not None or problem.causal:
        total = jnp.where(total == 0, 1, total)
    p = _dropped(p / total, key, problem).astype(v.dtype)
    out = wide_einsum(f"...{h}st,...tge->...s{h}e", p, v)
    logsumexp = (greatest + jnp.log(total)).squeeze(-1)
    return out.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype), logsumexp


def _whole_gradients(q, k, v, mask, bias, key, out, logsumexp, g, problem):
    h = _heads(q, k)
    p = jnp.exp(_scores(q, k, mask, bias, problem) - logsumexp[..., None])
    slope, queries = _grouped(g, k), _grouped(q, k)
    mean = (slope.astype(p.dtype) * _grouped(out, k)).sum(-1)
    mean = jnp.moveaxis(mean, -1 - len(h), -1)[..., None]
    dp = _dropped(wide_einsum(f"...s{h}e,...tge->...{h}st", slope, v), key, problem)
    dscores = p * (dp - mean)
    dbias = None
    if bias is not None:
        lead = dscores.shape[: dscores.ndim - 2 - len(h)]
        dbias = sum_to(dscores.reshape(*lead, q.shape[-2], *dscores.shape[-2:]), bias.shape)
    ds = (dscores * problem.scale).astype(q.dtype)
    dq = wide_einsum(f"...{h}st,...tgd->...s{h}d", ds, k)
    dk = wide_einsum(f"...{h}st,...s{h}d->...tgd", ds, queries)
    dv = wide_einsum(f"...{h}st,...s{h}e->...tge", _dropped(p, key, problem).astype(g.dtype), slope)
    return dq.reshape(q.shape), dk, dv, None, dbias, None
