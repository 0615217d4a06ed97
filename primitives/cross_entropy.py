"""Cross entropy and the losses of probabilities.

`reduction` is "mean" (over the elements, or the sum of their weights), "sum" or "none".
"""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.numerics import count_of, finite_max, one_axis, reduced, sum_to
from dtorchjax.op import op
from dtorchjax.settled import settled


def _is_label(x, labels, axis):
    """Where along `axis` the label's class is."""
    classes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return classes == jnp.expand_dims(labels, axis)


def _partition(logits, axis):
    """(shift, log of the sum of exp(logits - shift)), dims kept: together the logsumexp.

    They stay apart, since the sum of the two is not precise where logits are great.
    """
    shift = finite_max(logits, (axis,))
    return shift, jnp.log(jnp.exp(logits - shift).sum(axis, keepdims=True))


@op(saves=("shift", "log_total"))
def label_cross_entropy(logits, labels, *, axis=-1, label_smoothing=0.0, z_loss=0.0):
    """The loss of every label under softmax(logits), not reduced; see `cross_entropy`."""
    axis = one_axis(logits, axis)
    shift, log_total = _partition(logits, axis)
    of_label = _of_label(logits, labels, axis) - shift
    loss = log_total - (1 - label_smoothing) * of_label
    if label_smoothing:
        mean = (logits - shift).sum(axis, keepdims=True) / count_of(logits, (axis,))
        loss -= label_smoothing * mean
    if z_loss:
        loss += z_loss * jnp.square(shift + log_total)
    return loss.squeeze(axis), shift, log_total


def _of_label(x, labels, axis):
    """The element of each label along `axis`, dims kept; that of a class for a label that is none.

    A lookup, as a sum over all classes where only one counts would read all of x once more.
    """
    classes = jnp.clip(labels, 0, x.shape[axis] - 1)
    return jnp.take_along_axis(x, jnp.expand_dims(classes, axis), axis)


@label_cross_entropy.vjp
def _(logits, labels, shift, log_total, g, *, axis, label_smoothing, z_loss):
    axis = one_axis(logits, axis)
    g = jnp.expand_dims(g, axis)
    # what multiplies exp(logits - shift) is made once for each label, not for each class
    weight = g * jnp.exp(-log_total)
    if z_loss:
        weight *= 1 + 2 * z_loss * (shift + log_total)
    of_label = jnp.where(_is_label(logits, labels, axis), (1 - label_smoothing) * g, 0)
    if label_smoothing:
        of_label += label_smoothing * g / count_of(logits, (axis,))
    return jnp.exp(logits - shift) * weight - of_label, None


@op(saves=("shift", "log_total"))
def soft_cross_entropy(logits, target, *, axis=-1, z_loss=0.0):
    """-sum(target * log(softmax(logits))) along `axis`, for any targets (0 * -inf is 0)."""
    axis = one_axis(logits, axis)
    shift, log_total = _partition(logits, axis)
    log_p = logits - shift - log_total
    loss = -jnp.where(target == 0, 0, target * log_p).sum(axis)
    if z_loss:
        loss += z_loss * jnp.square(shift + log_total).squeeze(axis)
    return loss, shift, log_total


@soft_cross_entropy.vjp
def _(logits, target, shift, log_total, g, *, axis, z_loss):
    axis = one_axis(logits, axis)
    log_p, g = logits - shift - log_total, jnp.expand_dims(g, axis)
    weight = target.sum(axis, keepdims=True)
    if z_loss:
        weight += 2 * z_loss * (shift + log_total)
    return g * (jnp.exp(log_p) * weight - target), -g * log_p


@op
def cross_entropy(
    logits, labels, weights=None, *, axis=-1, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    reduction="mean",
):  # fmt: skip
    """The cross entropy of labels under softmax(logits) along `axis`.

    logits [..., v, ...] floats; labels are integers, without that dim, or probabilities, with it.
    With p the softmax, the loss of one label is

        -(1 - label_smoothing) log p[label] - label_smoothing mean(log p)
        + z_loss logsumexp(logits)^2

    times the weight of its class (weights [v]), 0 where the label is `ignore_index` and nan where
    it is no class. "mean" divides by the sum of the labels' weights (and is 0 if all are ignored),
    or by the number of losses if labels are probabilities.

    Where v is sharded, statistics of the size of the labels are all that is reduced.

    Source of the z-loss: Chowdhery et al. 2022, PaLM.
    """
    axis = one_axis(logits, axis)
    classes = logits.shape[axis]
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if labels.shape != logits.shape:
            raise OpError(
                f"labels that are probabilities have the logits' shape, {logits.shape}, not "
                f"{labels.shape}"
            )
        target = (1 - label_smoothing) * labels + label_smoothing / count_of(logits, (axis,))
        if weights is not None:
            target *= weights.reshape([-1 if d == axis else 1 for d in range(logits.ndim)])
        return reduced(soft_cross_entropy(logits, target, axis=axis, z_loss=z_loss), reduction)
    loss = label_cross_entropy(
        logits, labels, axis=axis, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return _weighted(loss, labels, weights, classes, ignore_index, reduction)


def _weighted(loss, labels, weights, classes, ignore_index, reduction):
    """Losses of labels, each by its weight: nan for a label that is no class."""
    known = (labels >= 0) & (labels < classes)
    ignored = jnp.zeros_like(known) if ignore_index is None else labels == ignore_index
    weight = 1
    if weights is not None:
        weight = jnp.take(weights, jnp.where(known, labels, 0), axis=0)
    weight = jnp.where(ignored, 0, jnp.where(known, weight, jnp.nan)).astype(loss.dtype)
    loss = jnp.where(ignored, 0, loss)
    return reduced(loss * weight, reduction, weight)


@op
def nll_loss(log_p, labels, weights=None, *, axis=-1, ignore_index=-100, reduction="mean"):
    """-log_p[label] along `axis`, times the class's weight; see `cross_entropy`."""
    axis = one_axis(log_p, axis)
    loss = -_of_label(log_p, labels, axis).squeeze(axis)
    return _weighted(loss, labels, weights, log_p.shape[axis], ignore_index, reduction)


@op
def binary_entropy(p, target):
    """-(y log p + (1 - y) log(1 - p)) of each element; see `bce_loss`."""
    return -(target * jnp.maximum(jnp.log(p), -100) + (1 - target) * _log_rest(p))


def _log_rest(p):
    return jnp.maximum(jnp.log1p(-p), -100)


@binary_entropy.vjp
def _(p, target, g):
    slope = (p - target) / jnp.maximum(p * (1 - p), 1e-12)
    return g * slope, g * (_log_rest(p) - jnp.maximum(jnp.log(p), -100))


@op
def bce_loss(p, target, weights=None, *, reduction="mean"):
    """Binary cross entropy of probabilities: each logarithm is -100 at least, so that it and its
    gradient are finite at 0 and 1."""
    loss = binary_entropy(p, target)
    return reduced(loss if weights is None else loss * weights, reduction)


@op
def binary_logit_entropy(logits, target, pos_weight=None):
    """bce of sigmoid(logits), of each element; see `bce_with_logits`."""
    tail = jnp.log1p(jnp.exp(-jnp.abs(logits)))
    if pos_weight is None:
        return jnp.maximum(logits, 0) - logits * target + tail
    log_weight = 1 + (pos_weight - 1) * target
    return (1 - target) * logits + log_weight * (tail + jnp.maximum(-logits, 0))


@binary_logit_entropy.vjp
def _(logits, target, pos_weight, g):
    p, q = lax.logistic(logits), lax.logistic(-logits)
    tail = jnp.log1p(jnp.exp(-jnp.abs(logits))) + jnp.maximum(-logits, 0)
    if pos_weight is None:
        return g * (p - target), -g * logits, None
    weight = jnp.broadcast_to(pos_weight, logits.shape)
    dlogits = (1 - target) * p - weight * target * q
    return (
        g * dlogits,
        g * ((weight - 1) * tail - logits),
        sum_to(g * target * tail, pos_weight.shape),
    )


@op
def bce_with_logits(
    logits, target, weights=None, pos_weight=None, *, ignore_index=None, reduction="mean"
):
    """Binary cross entropy of sigmoid(logits), finite for every finite logit.

    `pos_weight` multiplies the terms of target 1. Where the target is `ignore_index` the loss is 0
    and not counted in the mean.
    """
    kept = None if ignore_index is None else target != ignore_index
    if kept is not None:
        target = jnp.where(kept, target, 0)
    loss = binary_logit_entropy(logits, target, pos_weight)
    loss = loss if weights is None else loss * weights
    if kept is None:
        return reduced(loss, reduction)
    return reduced(jnp.where(kept, loss, 0), reduction, kept)


@op
def sigmoid_focal_loss(logits, target, *, alpha=None, gamma=2.0, reduction="mean"):
    """bce_with_logits times (1 - p of the true class)^gamma (Lin et al. 2017)."""
    loss = binary_logit_entropy(logits, target)
    away = lax.logistic(jnp.where(target > 0.5, -logits, logits))
    loss = loss * jnp.where(away == 0, 0, jnp.where(away == 0, 1, away) ** gamma)
    if alpha is not None:
        loss = loss * (alpha * target + (1 - alpha) * (1 - target))
    return reduced(loss, reduction)


@op
def log_loss(p, target, *, epsilon=1e-4):
    """-y log(p + epsilon) - (1 - y) log(1 - p + epsilon), of each element."""
    return -target * jnp.log(p + epsilon) - (1 - target) * jnp.log(1 - p + epsilon)


@op
def kl_div(log_p, target, *, log_target=False, reduction="mean"):
    """target * (log(target) - log_p), 0 where the target is 0.

    With `log_target` the target is given as its logarithm.
    "batchmean" divides the sum by the first dim, as the definition does.
    """
    if log_target:
        loss = jnp.exp(target) * jnp.where(target == -jnp.inf, 0, target - log_p)
    else:
        safe = jnp.where(target > 0, target, 1)
        loss = jnp.where(target > 0, safe * (jnp.log(safe) - log_p), 0)
    if reduction == "batchmean":
        return settled(loss.sum()) / loss.shape[0]
    return reduced(loss, reduction)
