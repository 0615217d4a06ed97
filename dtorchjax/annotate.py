"""Explicit redistribution: eager on DTensors, an annotation in programs.

In a program it is a primitive that the planner obeys: the value has this placement there, whatever
that costs. Elsewhere it is the identity; its derivative is the identity too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtorchjax import _jax
from dtorchjax.arguments import layout_of_spec, to_layout
from dtorchjax.dtensor import DTensor, from_array
from dtorchjax.placements import Layout, Placement, Shard, parse_placement

redistribute_p = Primitive("redistribute")
redistribute_p.def_impl(lambda x, **_: x)
redistribute_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(redistribute_p, lambda ctx, x, **_: [x])
ad.deflinear2(redistribute_p, lambda cotangent, x, **_: [cotangent])


def _batch(xs: Sequence[Any], dims: Sequence[int], *, placements: Any) -> tuple[Any, int]:
    (x,), (dim,) = xs, dims

    def shifted(p: Placement) -> Placement:
        return Shard(p.dim + 1, p.blocks) if isinstance(p, Shard) and p.dim >= dim else p

    if isinstance(placements, Layout):
        where: Any = Layout(
            placements.mesh, tuple(map(shifted, placements.placements)), placements.order
        )
    else:
        where = tuple((name, shifted(p)) for name, p in placements)
    return redistribute_p.bind(x, placements=where), dim


batching.primitive_batchers[redistribute_p] = _batch


def redistribute(x: Any, placements: Any) -> Any:
    """Place an array otherwise: `dt.redistribute(y, ["S0", "R"])`.

    On a DTensor (or a jax.Array with a NamedSharding) it moves the data now and returns the same
    kind. In a program under `dt.jit` it is an annotation that the plan obeys; under plain `jax.jit`
    it changes nothing.
    """
    if isinstance(x, DTensor):
        return x.redistribute(placements)
    if isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer):
        if isinstance(x.sharding, NamedSharding):
            return from_array(x).redistribute(placements).to_array()
        return x
    if not isinstance(x, jax.Array):
        x = jax.numpy.asarray(x)
    return redistribute_p.bind(x, placements=_hashable(placements, x.ndim))


def _hashable(placements: Any, rank: int) -> Any:
    """Placements by axis name (or by position), with dims counted from the front."""

    def front(p: Any) -> Placement:
        p = parse_placement(p)
        return Shard(p.dim + rank, p.blocks) if isinstance(p, Shard) and p.dim < 0 else p

    if isinstance(placements, Layout):
        return Layout(placements.mesh, tuple(map(front, placements.placements)), placements.order)
    if isinstance(placements, NamedSharding | PartitionSpec):
        spec = placements.spec if isinstance(placements, NamedSharding) else placements
        return (("spec", spec),)
    if isinstance(placements, Mapping):
        return tuple((name, front(p)) for name, p in placements.items())
    if isinstance(placements, str):
        placements = placements.split(",")
    items = [placements] if isinstance(placements, Placement) else list(placements)
    return tuple((i, front(p)) for i, p in enumerate(items))


def asked_placements(mesh: Mesh) -> dict[str, Any]:
    """Primitive name -> (parameters, shape and number of an operand) -> Layout or None.

    The planner must obey the Layout.
    """

    def asked(params: dict[str, Any], shape: Sequence[int], _: int) -> Layout:
        where = params["placements"]
        if isinstance(where, Layout):
            return to_layout(where, mesh, shape, "dt.redistribute")
        if where and where[0][0] == "spec":
            return to_layout(where[0][1], mesh, shape, "dt.redistribute")
        if where and isinstance(where[0][0], int):
            items = [p for _, p in where]
            return to_layout(items[0] if len(items) == 1 else items, mesh, shape, "dt.redistribute")
        return to_layout(dict(where), mesh, shape, "dt.redistribute")

    def sharding(name: str) -> Any:
        def found(params: dict[str, Any], shape: Sequence[int], _: int) -> Layout | None:
            spec, types = params[name].spec, params[name].mesh.axis_types
            if name == "dst_sharding" and all(t == AxisType.Auto for t in types):
                return None  # reshard speaks of Explicit axes only (flax puts it around dropout)
            return layout_of_spec(spec, mesh, len(shape)).resolve(shape)

        return found

    def device(params: dict[str, Any], shape: Sequence[int], i: int) -> Layout | None:
        found = _jax.device_target(params)[i]
        if found is None:  # one device, or a kind of memory: nothing that the values depend on
            return None
        return layout_of_spec(found.spec, mesh, len(shape)).resolve(shape)

    return {
        "device_put": device,
        "redistribute": asked,
        "sharding_constraint": sharding("sharding"),
        "reshard": sharding("dst_sharding"),
    }
