"""Models and states of flax laid out on a mesh, as arrays that flax, optax and orbax know."""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax.sharding import Mesh

from dtorchjax.api import distribute
from dtorchjax.dtensor import DTensor


def place(tree: Any, mesh: Mesh, placements: Any) -> Any:
    """Lay a model, an optimizer or any pytree out on a mesh, as jax.Arrays where that can be.

    `placements` is as for `dt.distribute`: usually `dt.by_path({...})`, whose patterns find the
    moments of an optimizer beside their parameters (`*/qkv/kernel`). Arrays become jax.Arrays with
    a NamedSharding, so that what takes jax.Arrays takes them; where a placement has no such array
    (a dim that does not divide, blocks, P) they become DTensors. An NNX module or optimizer is
    changed in place and returned (a variable that it has at two places lies as the first of their
    paths says); of other trees a new one is returned. Raises PlacementError as `dt.distribute`
    does; then nothing has been changed.

    To make a large model without a whole copy anywhere, let the program that makes it place it:
    `dt.jit(lambda: Model(nnx.Rngs(0)), mesh=mesh, out_placements=dt.by_path({...}))()`.

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
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Pytree):
        # its state has a variable that lies at two places (tied weights) once, by its first path
        nnx.update(tree, place(nnx.state(tree), mesh, placements))
        return tree
    return jax.tree.map(
        lambda x: x.to_array() if x.layout.is_array(x.shape) else x,
        distribute(tree, mesh, placements),
        is_leaf=lambda x: isinstance(x, DTensor),
    )


__all__ = ["place"]
