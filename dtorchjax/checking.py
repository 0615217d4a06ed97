"""`dt.checking()`: what a dfunction's rule says is verified as programs run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.placements import Joint, Replicate
from dtorchjax.redistribute import reduce_extreme

_found: list[str] = []


@contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Programs that run inside verify that what dfunctions say is whole is the same on all devices.

    That is so for results, and for gradients. The environment variable DTORCHJAX_CHECK=1 does it
    everywhere. It costs two more reductions for each of them. A program that finds a difference
    raises PlacementError with the dfunction's name, the result and its placements.

    >>> with checking():
    ...     _jax.is_checking()
    True
    """
    with _jax.check_context(on):
        yield


_jax.check_by_default(os.environ.get("DTORCHJAX_CHECK", "0") not in ("", "0"))


def verify_whole(
    name: str, what: str, x: Any, where: Joint, active: Sequence[str], names: Sequence[str]
) -> None:
    """On one device: note a difference along axes where `x` is said to be whole."""
    axes = tuple(
        n for n, p in zip(names, where.placements, strict=True)
        if n in active and isinstance(p, Replicate)
    )  # fmt: skip
    if not axes or not (
        jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    ):
        return
    low, high = reduce_extreme(x, axes, "min"), reduce_extreme(x, axes, "max")
    same = (low == high) | ((x != x) & (low != low) & (high != high))
    text = (
        f"dfunction `{name}`: {what} is said to be whole along {', '.join(map(repr, axes))} "
        f"({where}), but differs from device to device"
    )
    jax.debug.callback(_note, jnp.all(same), text=text)


def _note(same: Any, *, text: str) -> None:
    if not same and text not in _found:
        _found.append(text)


def raise_found(results: Any) -> None:
    """After a program has run: raise what it noted."""
    jax.block_until_ready(results)
    jax.effects_barrier()
    if _found:
        text = "\n".join(_found)
        _found.clear()
        raise PlacementError(text)


__all__ = ["checking", "raise_found", "verify_whole"]
