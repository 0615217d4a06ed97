"""The rule and the local program of `settled`: the one row with a collective of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.placements import Joint, Partial, R, Shard, elements, kinds_of, local_shape
from dtorchjax.redistribute import Move, apply_move
from dtorchjax.registry import LOCALS, RULES, LocalCall
from dtorchjax.sent import Sent


def _moves(where: Joint, target: Joint) -> list[Move]:
    """The all-reduce over all axes on which the value is partial, if it is."""
    axes = where.partial_axes()
    kinds = kinds_of(where.placements)
    return [Move("all-reduce", tuple(axes), where, target, op=kind) for kind in kinds]


class SettledRule:
    """Every placement stays, but a partial one becomes whole."""

    moves, needs_mesh, place = True, True, __file__

    def signature(self, ins: Any, outs: Any, params: dict[str, Any]) -> PlacementSignature:
        ops = ("max", "min") if str(ins[0].dtype) == "bool" else ("sum", "max", "min", "prod")
        rows = [Row((p,), (p,)) for p in (R, *map(Shard, range(len(ins[0].shape))))]
        return PlacementSignature((*rows, *(Row((Partial(op),), (R,)) for op in ops)))

    def communication(
        self, primitive: Any, ins: Any, outs: Any, params: dict[str, Any], inputs: Sequence[Joint],
        outputs: Sequence[Joint], sizes: tuple[int, ...],
    ) -> list[Sent]:  # fmt: skip
        size = elements(local_shape(ins[0].shape, inputs[0], sizes)) * ins[0].dtype.itemsize
        moves = _moves(inputs[0], outputs[0])
        return [Sent(m.kind, m.axes, size * m.sent(sizes), 1, str(ins[0].dtype)) for m in moves]


def _run(call: LocalCall, x: Any) -> Any:
    names = call.params["mesh"].axis_names
    for move in _moves(call.inputs[0], call.outputs[0]):
        x = apply_move(x, move, names, call.sizes, call.in_avals[0].shape)
    return x


RULES["settled"] = SettledRule()
LOCALS["settled"] = _run
