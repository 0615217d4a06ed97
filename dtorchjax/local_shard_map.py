"""A user's shard_map in a whole-array program: its body runs in place, its specs are layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from dtorchjax import _jax
from dtorchjax.errors import PlacementError
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Joint, dims_to_placements, joint, local_shape, mesh_sizes
from dtorchjax.registry import LOCALS, RULES, LocalCall
from dtorchjax.sent import Sent, collectives_of


def _joint(spec: Any, mesh: Any) -> Joint:
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    unknown = {name for d in dims for name in d} - set(mesh.axis_names)
    if unknown:
        raise PlacementError(
            f"a shard_map over axes {sorted(unknown)} inside a program on a mesh with axes "
            f"{tuple(mesh.axis_names)}"
        )
    return joint(*dims_to_placements(dims, mesh.axis_names))


class ShardMapRule:
    """One row for all mesh axes: that of the specs."""

    moves, needs_mesh, place = False, True, __file__

    def joint_rows(
        self, ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]
    ) -> list[tuple[tuple[Joint, ...], tuple[Joint, ...]]]:
        mesh = params["mesh"]
        automatic = {n for n in mesh.axis_names if mesh.shape[n] > 1} - set(
            params.get("newly_manual_axes", params.get("manual_axes", mesh.axis_names))
        )
        if automatic:
            raise PlacementError(
                f"a shard_map that leaves axes {sorted(automatic)} to the compiler: name all axes "
                "of the mesh"
            )
        sides = [tuple(_joint(s, mesh) for s in params[k]) for k in ("in_specs", "out_specs")]
        sizes = mesh_sizes(mesh)
        body, _ = _jax.open_jaxpr(params["jaxpr"])
        for var, aval, where in zip(body.invars, ins, sides[0], strict=True):
            if tuple(var.aval.shape) != local_shape(aval.shape, where, sizes):
                raise PlacementError(
                    f"a shard_map on another mesh: it takes parts of shape {var.aval.shape} where "
                    f"{where} of {aval.shape} has {local_shape(aval.shape, where, sizes)} here"
                )
        return [(sides[0], sides[1])]

    def signature(
        self, ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]
    ) -> PlacementSignature:
        ((given, made),) = self.joint_rows(ins, outs, params)
        return PlacementSignature(
            tuple(
                Row(tuple(j.placements[a] for j in given), tuple(j.placements[a] for j in made))
                for a in range(len(params["mesh"].axis_names))
            )
        )

    def communication(
        self, primitive: Any, ins: Any, outs: Any, params: dict[str, Any], inputs: Sequence[Joint],
        outputs: Sequence[Joint], sizes: tuple[int, ...],
    ) -> list[Sent]:  # fmt: skip
        """The collectives of its body."""
        names = params["mesh"].axis_names
        number = {n: i for i, n in enumerate(names)}
        parts = [
            jax.ShapeDtypeStruct(local_shape(a.shape, where, sizes), a.dtype)
            for a, where in zip(ins, inputs, strict=True)
        ]
        program = functools.partial(_jax.run_manual, params["jaxpr"])
        found = collectives_of(program, parts, list(zip(names, sizes, strict=True)))
        return [sent.numbered(number) for sent in found]


def _run(call: LocalCall, *operands: Any) -> Any:
    return _jax.run_manual(call.params["jaxpr"], *operands)


RULES["shard_map"] = ShardMapRule()
LOCALS["shard_map"] = _run
