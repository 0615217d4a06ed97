"""The cross entropy of logits that are sharded on the classes (Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax import numpy as jnp

from dtorchjax.collectives import axes_of, axis_index, axis_size, pmax, psum
from dtorchjax.dfunction import dfunction


@dfunction(rule="... v, ... -> ...", extra=("v: S-1, R -> R",))
def vocab_parallel_cross_entropy(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
) -> Any:
    """The cross entropy of every token, of logits that may be sharded on the classes.

    logits [..., v] floats, labels [...] ints -> losses [...], float32 for 16-bit logits. With p the
    softmax, a token's loss is

        -(1 - label_smoothing) log p[label] - label_smoothing mean(log p)
        + z_loss logsumexp(logits)^2

    and 0 where the label is `ignore_index`. Any other label that is no class gives nan. The
    gradient has the dtype of the logits.

    Where v is sharded, three numbers per token are all-reduced (the greatest logit, the sum of
    exponentials, the label's logit; a fourth with label smoothing) and none for the gradient, which
    computes the softmax again. The leading dims may be sharded as well.

    Source: Shoeybi et al. 2019, Megatron-LM, section 3; the z-loss is that of PaLM.

    >>> vocab_parallel_cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -1]), ignore_index=-1)
    Array([1.3862944, 0.       ], dtype=float32)
    """
    return _forward(
        logits, labels, label_smoothing=label_smoothing, ignore_index=ignore_index, z_loss=z_loss
    )[0]


def _forward(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
) -> tuple[Any, Any]:
    axes = axes_of("v")
    labels = labels.astype(jnp.int32)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greatest = pmax(wide.max(-1), axes)
    here = _is_label(logits, labels)
    sums = [jnp.exp(wide - greatest[..., None]).sum(-1), jnp.where(here, wide, 0).sum(-1)]
    if label_smoothing:
        sums.append(wide.sum(-1))
    total, of_label, *everything = psum(sums, axes)
    logsumexp = greatest + jnp.log(total)
    loss = logsumexp - (1 - label_smoothing) * of_label + z_loss * logsumexp**2
    if label_smoothing:
        loss -= label_smoothing / _classes(logits) * everything[0]
    weight = _weight(logits, labels, ignore_index)
    loss = jnp.where(weight == 0, 0, loss * weight)
    return loss, (logits, labels, logsumexp, label_smoothing, ignore_index, z_loss)


def _backward(residuals: Any, g: Any) -> tuple[Any, None]:
    logits, labels, logsumexp, label_smoothing, ignore_index, z_loss = residuals
    softmax = jnp.exp(logits.astype(logsumexp.dtype) - logsumexp[..., None])
    target = jnp.where(_is_label(logits, labels), 1 - label_smoothing, 0)
    if label_smoothing:
        target += label_smoothing / _classes(logits)
    slope = (1 + 2 * z_loss * logsumexp[..., None]) * softmax - target
    weight = _weight(logits, labels, ignore_index)
    dlogits = jnp.where(weight[..., None] == 0, 0, (g * weight)[..., None] * slope)
    return dlogits.astype(logits.dtype), None


def _classes(logits: Any) -> int:
    return logits.shape[-1] * axis_size(axes_of("v"))


def _is_label(logits: Any, labels: Any) -> Any:
    """Where the logit of a token's label lies, among the classes of this device."""
    first = axis_index(axes_of("v")) * logits.shape[-1]
    classes = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return classes == (labels - first)[..., None]


def _weight(logits: Any, labels: Any, ignore_index: int | None) -> Any:
    """Per token: 1, or 0 if it is ignored, or nan if its label is no class."""
    known = (labels >= 0) & (labels < _classes(logits))
    weight = jnp.where(known, jnp.float32(1), jnp.float32(jnp.nan))
    return weight if ignore_index is None else jnp.where(labels == ignore_index, 0, weight)


vocab_parallel_cross_entropy.defvjp(_forward, _backward)
