"""Models and states of flax laid out on a mesh, as arrays that flax, optax and orbax know."""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax.sharding import Mesh

from dtorchjax.api import distribute
from dtorchjax.dtensor import DTensor
from dtorchjax.placements import is_plain, kinds_of


def place(tree: Any, mesh: Mesh, placements: Any) -> Any:
    """Lay a model, an optimizer or any pytree out on a mesh, as jax.Arrays where that can be.

    `placements` is as for `dt.distribute`: usually `dt.by_path({...})`, whose patterns find the
    moments of an optimizer beside their parameters (`*/qkv/kernel`). Arrays become jax.Arrays with
    a NamedSharding, so that what takes jax.Arrays takes them; where a placement has no such array
    (a dim that does not divide, blocks, P) they become DTensors. An NNX module or optimizer is
    changed in place and returned; of other trees a new one is returned. Raises PlacementError as
    `dt.distribute` does; then nothing has been changed.

    To make a large model without a whole copy anywhere, let the program that makes it place it:
    `dt.jit(lambda: Model(nnx.Rngs(0)), mesh=mesh, out_placements=dt.by_path({...}))()`.

    >>> import jax
    >>> from flax import nnx
    >>> import dtorchjax as dt
    >>> mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    >>> model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    >>> where = dt.by_path({"*": "R", "*kernel": {"tp": "S1"}})
    >>> dt.place(model, mesh, where) is model
    True
    >>> tuple(model.kernel[...].sharding.spec)
    (None, 'tp')
    """
    placed = jax.tree.map(
        _as_array, distribute(tree, mesh, placements), is_leaf=lambda x: isinstance(x, DTensor)
    )
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Pytree):
        nnx.update(tree, nnx.state(placed))
        return tree
    return placed


def _as_array(x: DTensor) -> Any:
    sizes = tuple(x.mesh.devices.shape)
    plain = is_plain(x.shape, x.layout.joint, sizes) and not kinds_of(x.placements)
    return x.to_array() if plain else x


__all__ = ["place"]
