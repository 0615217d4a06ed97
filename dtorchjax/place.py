"""Models and states of flax laid out on a mesh, as arrays that flax, optax and orbax know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from dtorchjax.api import distribute, is_dtensor


def place(tree: Any, mesh: Mesh, placements: Any) -> Any:
    """Lay a model, an optimizer or any pytree out on a mesh, as jax.Arrays where that can be.

    `placements` is as for `dt.distribute`: usually `dt.by_path({...})`, whose patterns find the
    moments of an optimizer beside their parameters (`*/qkv/kernel`). Arrays become jax.Arrays with
    a NamedSharding, so that what takes jax.Arrays takes them; where a placement has no such array
    (a dim that does not divide, blocks, P) they become DTensors. NNX modules and optimizers, alone
    or in a tree, are changed in place and returned (a variable that one has at two places lies as
    the first of its paths says); of other trees a new one is returned. Raises PlacementError as
    `dt.distribute` does; then nothing has been changed.

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
    states, back = modules_as_states(tree)
    return back(
        jax.tree.map(
            lambda x: x.to_array() if x.layout.is_array(x.shape) else x,
            distribute(states, mesh, placements),
            is_leaf=is_dtensor,
        )
    )


def modules_as_states(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A tree with the states of NNX objects in their place, and the way back.

    A variable that an object has at two places (tied weights) stands in its state once, by its
    first path. The way back takes such a tree, changes the objects in place and returns the tree
    with them.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree, lambda states: states

    def is_object(x: Any) -> bool:
        return isinstance(x, nnx.Pytree)

    def put(x: Any, new: Any) -> Any:
        if not is_object(x):
            return new
        nnx.update(x, new)
        return x

    def is_leaf(x: Any) -> bool:
        return is_object(x) or is_dtensor(x)

    states = jax.tree.map(lambda x: nnx.state(x) if is_object(x) else x, tree, is_leaf=is_leaf)
    return states, lambda new: jax.tree.map(put, tree, new, is_leaf=is_leaf)


__all__ = ["place"]
