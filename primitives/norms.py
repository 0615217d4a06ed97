"""Norms and distances. Their gradient where the norm is 0 is 0."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax.numerics import as_float, axes_of, expanded, reduced
from dtorchjax.op import op


@op
def p_norm(x, *, p=2, axis=None, keepdims=False):
    """(sum |x|^p)^(1/p) along `axis` (None: all dims): any p, also inf, -inf and 0 (a count).

    Elements are scaled by the greatest, so that their powers neither overflow nor vanish. The
    gradient of ties of inf is shared; it is 0 at elements that are 0.
    """
    x = as_float(x)
    axes = axes_of(x, axis)
    out = _norm(x, p, axes)
    return out if keepdims else out.squeeze(axes)


def _norm(x, p, axes):
    if p == 2:
        return _two_norm(x, axes)
    size = jnp.abs(x)
    if p == 0:
        return (size != 0).astype(size.dtype).sum(axes, keepdims=True)
    if p == 1:
        return size.sum(axes, keepdims=True)
    if p == jnp.inf:
        return jnp.max(size, axes, keepdims=True, initial=0)
    if p == -jnp.inf:
        return jnp.min(size, axes, keepdims=True, initial=jnp.inf)
    return _scaled_norm(size, p, axes)


def _two_norm(x, axes):
    total = jnp.square(jnp.abs(x)).sum(axes, keepdims=True)
    # here squares neither overflow nor vanish; to find the greatest would be to read x twice
    limits = jnp.finfo(total.dtype)
    plain = jnp.all((total > 1e4 * limits.tiny / limits.eps) & (total < limits.max))
    return lax.cond(
        plain, lambda x: jnp.sqrt(total), lambda x: _scaled_norm(jnp.abs(x), 2, axes), x
    )


def _scaled_norm(size, p, axes):
    if p > 0:
        scale = jnp.max(size, axes, keepdims=True, initial=0)
    else:
        scale = jnp.min(size, axes, keepdims=True, initial=jnp.inf)
    # at least the smallest number whose reciprocal is finite; 1 where it is not finite itself
    tiny = 4 * jnp.finfo(size.dtype).tiny
    scale = jnp.where(jnp.isfinite(scale), jnp.maximum(scale, tiny), 1)
    total = _power(size * (1 / scale), p).sum(axes, keepdims=True)
    root = jnp.sqrt(total) if p == 2 else jnp.where(total == 0, 0, _safe(total)) ** (1 / p)
    # a negative p makes the sum infinite where an element is 0, and the norm 0
    return jnp.where(jnp.isinf(total), 0, root * scale) if p < 0 else root * scale


def _safe(x):
    return jnp.where(x == 0, 1, x)


def _power(x, p):
    if p == 2:
        return x * x
    return jnp.where(x == 0, 0.0 if p > 0 else jnp.inf, _safe(x) ** p)


@p_norm.rule
def _(x, *, axis, keepdims, **_):
    """Dims that stay may be sharded: a device looks at the range of its own rows alone."""
    axes = set(axes_of(jax.ShapeDtypeStruct(x.shape, x.dtype), axis))
    words = [f"{f}!" if d in axes else f for d, f in enumerate(x.factors)]
    kept = ["1" if d in axes else f for d, f in enumerate(x.factors) if keepdims or d not in axes]
    return f"{' '.join(words) or '-'} -> {' '.join(kept) or '-'}"


@p_norm.vjp
def _(x, out, g, *, p, axis, keepdims):
    axes = axes_of(x, axis)
    out, g = expanded(out, axes, keepdims), expanded(g, axes, keepdims)
    size = jnp.abs(x)
    if p == 0:
        return jnp.zeros_like(x)
    if p == 1:
        return g * jnp.sign(x)
    if p in (jnp.inf, -jnp.inf):
        ties = (size == out).astype(x.dtype)
        return g * jnp.sign(x) * ties / jnp.maximum(ties.sum(axes, keepdims=True), 1)
    ratio = size / _safe(out)
    slope = jnp.where(size == 0, 0, _safe(ratio) ** (p - 1)) if p != 2 else ratio
    return g * jnp.where(out == 0, 0, jnp.sign(x) * slope)


@op
def squared_l2_norm(x):
    """The sum of the squares of all elements."""
    return jnp.square(jnp.abs(x)).sum()


@op
def normalize(x, *, p=2, axis=-1, epsilon=1e-12):
    """x over its p-norm along `axis`, `epsilon` at least."""
    norm = p_norm(x, p=p, axis=axis, keepdims=True)
    return x / jnp.maximum(norm, epsilon)


@op
def global_norm(tree):
    """The 2-norm of all elements of a pytree, in its widest dtype; its gradient at 0 is 0."""
    leaves = [x.astype(_wide(x)) for x in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros(())
    squares = [jnp.square(jnp.abs(x)).sum() for x in leaves]
    total = functools.reduce(jnp.add, squares)  # one sum: where leaves are sharded, one reduction
    return _root(total)


def _root(total):
    return jnp.where(total == 0, 0, jnp.sqrt(_safe(total)))


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


@op(upcast=False)
def clip_by_global_norm(tree, *, max_norm):
    """The pytree scaled down to a `global_norm` of at most `max_norm` (Pascanu et al. 2012)."""
    return _clipped(tree, global_norm(tree), max_norm)


@op(upcast=False)
def clip_by_norm(x, *, max_norm, axis=None):
    """x scaled down so that its 2-norm along `axis` (None: all dims) is at most `max_norm`."""
    return _clipped(x, p_norm(x.astype(_wide(x)), axis=axis, keepdims=True), max_norm)


def _clipped(tree, norm, max_norm):
    scale = jnp.where(norm > max_norm, max_norm / _safe(norm), 1)
    return jax.tree.map(lambda x: (x * scale).astype(x.dtype), tree)


@op
def cosine_similarity(x, y, *, axis=-1, epsilon=1e-8):
    """sum(x * y) over the product of the 2-norms along `axis`, each `epsilon` at least."""
    norms = [p_norm(v, axis=axis, keepdims=True) for v in (x, y)]
    x, y = (v * (1 / jnp.maximum(n, epsilon)) for v, n in zip((x, y), norms, strict=True))
    return (x * y).sum(axis)


@op
def pairwise_distance(x, y, *, p=2, epsilon=1e-6, keepdims=False):
    """The p-norm of x - y + epsilon along the last dim."""
    return p_norm(x - y + epsilon, p=p, axis=-1, keepdims=keepdims)


@op
def cosine_embedding_loss(x, y, target, *, margin=0.0, reduction="mean"):
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1: x, y [..., d]."""
    cos = cosine_similarity(x, y)
    apart = jnp.where(cos > margin, cos - margin, 0)
    return reduced(jnp.where(target == 1, 1 - cos, apart), reduction)


@op
def triplet_margin_loss(anchor, positive, negative, *, margin=1.0, p=2, reduction="mean"):
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) (Balntas et al. 2016)."""
    near = pairwise_distance(anchor, positive, p=p)
    far = pairwise_distance(anchor, negative, p=p)
    loss = near - far + margin
    return reduced(jnp.where(loss > 0, loss, 0), reduction)
