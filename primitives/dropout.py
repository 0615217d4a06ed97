"""Dropout: the same numbers on every mesh. The key is a `jax.random` key."""

from __future__ import annotations

import jax
from jax import numpy as jnp

from dtorchjax.errors import OpError
from dtorchjax.op import op


def _checked(rate):
    if not 0 <= rate <= 1:
        raise OpError(f"a dropout rate is in [0, 1], not {rate}")


@op(upcast=False, saves=("mask",))
def dropout(x, key=None, *, rate=0.5, deterministic=False, mode="upscale", shared_axes=()):
    """Zeroes each element with probability `rate` (Srivastava et al. 2014).

    "upscale" divides what stays by 1 - rate and leaves x alone when `deterministic`; "downscale"
    leaves what stays and multiplies by 1 - rate when `deterministic`. Along `shared_axes` the
    elements share one draw. A rate of 1 gives zeros.
    """
    _checked(rate)
    if mode not in ("upscale", "downscale"):
        raise OpError(f'dropout mode {mode!r} is not "upscale" or "downscale"')
    whole = jnp.ones((), bool)
    if deterministic:
        return (x * (1 - rate) if mode == "downscale" else x), whole
    if key is None and 0 < rate < 1:
        raise OpError("dropout needs a key unless it is deterministic")
    if rate == 0:
        return x, whole
    if rate == 1:
        return jnp.zeros_like(x), whole
    shared = {a % x.ndim for a in shared_axes}
    shape = [1 if d in shared else n for d, n in enumerate(x.shape)]
    mask = jax.random.bernoulli(key, 1 - rate, shape)
    return jnp.where(mask, x / (1 - rate) if mode == "upscale" else x, 0), mask


@dropout.vjp
def _(mask, g, *, rate, deterministic, mode):
    if deterministic:
        return g * (1 - rate) if mode == "downscale" else g, None
    if rate == 1:
        return jnp.zeros_like(g), None
    return jnp.where(mask, g / (1 - rate) if mode == "upscale" else g, 0), None


@op
def alpha_dropout(x, key=None, *, rate=0.5, deterministic=False):
    """Dropout that keeps mean 0 and variance 1 of selu units (Klambauer et al. 2017)."""
    _checked(rate)
    if deterministic or rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    if key is None:
        raise OpError("alpha_dropout needs a key unless it is deterministic")
    floor = -1.7580993408473766  # -scale * alpha of selu, its limit at -inf
    a = (1 - rate + (1 - rate) * rate * floor**2) ** -0.5
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return a * jnp.where(kept, x, floor) - a * rate * floor
