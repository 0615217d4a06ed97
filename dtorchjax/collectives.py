"""Collectives for local code: what a dfunction's body says to the devices beside it.

A body is a program of one device. In a call only some mesh axes matter to it, those along which the
devices hold different parts (see `View`); along all others every device does the same work, and a
collective is the identity there, as it is where there is no mesh at all. So a body gives the same
result wherever its operands lie. Their derivatives are exact adjoints of the program of all devices
together: psum's is psum, that of an all-gather a reduce-scatter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.redistribute import reduce_extreme

AxisNames = str | Sequence[str]


class View:
    """What a running body sees of the mesh.

    `names` are all mesh axes (None: a trace on whole arrays, on any mesh), `active` those along
    which this call's operands or results differ, `factors` the axes over which each letter of the
    rule is sharded, major first. Compared by identity, so that jax's caches never mix two calls.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        active: Sequence[str] = (),
        factors: dict[str, tuple[str, ...]] | None = None,
    ):
        self.names, self.active, self.factors = names, tuple(active), factors or {}
        self.communicates = False
        self.mentioned: set[str] = set()  # axes that the body names itself
        self.asked: set[str] = set()  # letters of which it asks the axes


_view = _jax.user_context()


@contextmanager
def viewing(view: View) -> Iterator[View]:
    """Bodies that run inside see `view`."""
    with _view(view), _jax.not_whole_trace():
        yield view


def current_view() -> View | None:
    """The view of the body that runs, None outside of bodies."""
    return _view.value


def _over(axes: AxisNames) -> tuple[str, ...]:
    """The axes among `axes` over which there is something to do."""
    wanted = (axes,) if isinstance(axes, str) else tuple(axes)
    view = current_view()
    if view is None:  # the user's own shard_map or vmap, or no mesh
        return tuple(name for name in wanted if _jax.axis_is_bound(name))
    view.communicates = view.communicates or bool(wanted)
    if view.names is None:
        view.mentioned.update(wanted)
        return ()
    for name in wanted:
        if name not in view.names:
            raise PlacementError(f"no mesh axis {name!r}; the axes are {tuple(view.names)}")
    return tuple(name for name in wanted if name in view.active)


def axes_of(factor: str) -> tuple[str, ...]:
    """The mesh axes over which a letter of the rule is sharded in this call, major first.

    Empty where it is whole, and without a mesh. Inside a body only; a body whose rule is not a
    sentence has no letters, and gets an error unless it runs without a mesh.

    >>> axes_of("k")
    ()
    """
    view = current_view()
    if view is None:
        return ()
    view.communicates = True
    if view.names is None:
        view.asked.add(factor)
        return ()
    if factor not in view.factors:
        known = ", ".join(map(repr, view.factors)) or "none: its rule is not a sentence"
        raise PlacementError(f"dt.axes_of({factor!r}): the letters of this dfunction are {known}")
    return view.factors[factor]


def axis_size(axes: AxisNames) -> int:
    """The number of devices along mesh axes that share this call's work: 1 without a mesh."""
    return math.prod(_jax.axis_size(name) for name in _over(axes))


def axis_index(axes: AxisNames) -> Any:
    """This device's place along mesh axes (int32, major first): 0 without a mesh."""
    over = _over(axes)
    index: Any = jnp.int32(0)
    for name in over:
        index = index * _jax.axis_size(name) + lax.axis_index(name)
    return index


def psum(x: Any, axes: AxisNames) -> Any:
    """The sum over the devices along mesh axes: an array or tree of the same shapes.

    The identity without a mesh, and along axes where every device of this call does the same.

    >>> psum(jnp.ones(2), "tp")
    Array([1., 1.], dtype=float32)
    """
    over = _over(axes)
    return lax.psum(x, over) if over else x


def pmax(x: Any, axes: AxisNames) -> Any:
    """The greatest value over the devices along mesh axes; nan wins.

    Its gradient goes to the devices that hold the greatest value, in equal parts, as jnp.max's.
    """
    return _extreme(x, axes, "max")


def pmin(x: Any, axes: AxisNames) -> Any:
    """The least value over the devices along mesh axes; see `pmax`."""
    return _extreme(x, axes, "min")


def _extreme(x: Any, axes: AxisNames, op: str) -> Any:
    over = _over(axes)
    return jax.tree.map(functools.partial(_reduced, over=over, op=op), x) if over else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _reduced(x: Any, over: tuple[str, ...], op: str) -> Any:
    return reduce_extreme(jnp.asarray(x), over, op)


@_reduced.defjvp
def _(over: tuple[str, ...], op: str, primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    extreme = _reduced(x, over, op)
    here = (x == extreme).astype(t.dtype)
    return extreme, lax.psum(here / lax.psum(here, over) * t, over)


def all_gather(x: Any, axes: AxisNames, *, axis: int = 0, tiled: bool = True) -> Any:
    """The parts of all devices along mesh axes, joined on dim `axis`.

    `tiled=False` stacks them on a new dim instead; the default is not that of jax.lax, so that it
    is the identity without a mesh.
    """
    over = _over(axes)
    if over:
        return lax.all_gather(x, over, axis=axis, tiled=tiled)
    return x if tiled else jnp.expand_dims(x, axis)


def psum_scatter(x: Any, axes: AxisNames, *, scatter_dimension: int = 0, tiled: bool = True) -> Any:
    """The sum over the devices along mesh axes, of which each keeps its block of one dim.

    `tiled=False` needs a dim as long as there are devices, and drops it.
    """
    over = _over(axes)
    if over:
        return lax.psum_scatter(x, over, scatter_dimension=scatter_dimension, tiled=tiled)
    return x if tiled else jnp.squeeze(x, scatter_dimension)


def all_to_all(
    x: Any, axes: AxisNames, split_axis: int, concat_axis: int, *, tiled: bool = True
) -> Any:
    """Cut dim `split_axis` into one block per device, send them, and join those that come.

    The blocks that come are joined on `concat_axis`, by the number of the device that sent them.
    """
    over = _over(axes)
    if over:
        return lax.all_to_all(x, over, split_axis=split_axis, concat_axis=concat_axis, tiled=tiled)
    return x if tiled else jnp.expand_dims(jnp.squeeze(x, split_axis), concat_axis)


def ppermute(x: Any, axes: AxisNames, perm: Sequence[tuple[int, int]]) -> Any:
    """Send `x` from device to device along mesh axes, for every pair (from, to).

    Devices to which nothing is sent get zeros. Without a mesh the pair (0, 0) is the identity, and
    no pair at all gives zeros.
    """
    over = _over(axes)
    if over:
        return lax.ppermute(x, over, perm)
    return x if any(pair[1] == 0 for pair in perm) else jax.tree.map(jnp.zeros_like, x)


def local_key(key: Any) -> Any:
    """A random key of its own for every part of the call's work.

    Numbers drawn with it depend on the mesh and on where the operands lie, unlike all others in
    dtorchjax: draw them outside of the dfunction where that matters. Without a mesh they are those
    of the first device.
    """
    view = current_view()
    axes = view.active if view is not None else ()
    return jax.random.fold_in(key, axis_index(axes))


__all__ = [
    "View", "all_gather", "all_to_all", "axes_of", "axis_index", "axis_size", "current_view",
    "local_key", "pmax", "pmin", "ppermute", "psum", "psum_scatter", "viewing",
]  # fmt: skip
