"""The tables of the primitives that call a dfunction, and what a row tells the body."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax.collectives import View, viewing
from dtorchjax.local_calls import Aval, Body, run_backward, run_forward, with_missing
from dtorchjax.local_rules import (
    BodyRow,
    differs,
    is_differentiable,
    operand_cotangent,
    result_cotangent,
)
from dtorchjax.notation import Row
from dtorchjax.placements import Joint, Layout, Local, Placement, R, Shard, joint, local_shape

Masks = tuple[tuple[bool, ...], ...]


class Call(NamedTuple):
    """What an equation says: its kind, the body, the whole operands without the dims of vmap.

    kind: "call", "forward", "tangent" or "backward". `batch` has one mask per vmap, the innermost
    first: which inputs of the equation have its dim. `wrt` are the operands that are
    differentiated, `given` those among the inputs. With `mesh` for rules on whole layouts.
    """

    kind: str
    body: Body
    of: tuple[Aval, ...]
    batch: Masks = ()
    wrt: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    mesh: Any = None

    def unbatched(self) -> Call:
        return self._replace(batch=())


class Way(NamedTuple):
    """One row of a call's table: the body's own row (None: it only shards a dim of vmap)."""

    row: Row
    base: Row | None
    factor: str = ""


def columns(call: Call, base: Row, key: Any) -> Row:
    """What a row of the body means for the inputs and results of the equation, one mesh axis."""
    body, info = call.body, call.body.info(call.of)
    if call.kind == "call":
        return base
    kept = Local(key)
    if call.kind == "forward":
        return Row(base.inputs, (*base.outputs, kept))
    if call.kind == "tangent":
        tangents = tuple(base.inputs[i] for i in call.wrt)
        return Row((*base.inputs, kept, *tangents), tuple(base.outputs[i] for i in info.inexact))
    said = body.cotangents
    operands = tuple(base.inputs[i] for i in call.given)
    cotangents = (result_cotangent(base, i, body.by_hand, said) for i in info.inexact)
    gradients = tuple(operand_cotangent(base, i, said) for i in call.wrt)
    return Row((*operands, kept, *cotangents), gradients)


def base_rows(call: Call) -> list[BodyRow]:
    """The body's own rows on one mesh axis; of a rule on whole layouts, all that occur."""
    body, info = call.body, call.body.info(call.of)
    if body.layouts is None:
        return body.table(call.of, info.results)
    found: dict[BodyRow, None] = {}
    for ins, outs in _layouts(body, call.mesh, call.of):
        for axis in range(len(call.mesh.axis_names)):
            row = Row(
                tuple(j.placements[axis] for j in ins), tuple(j.placements[axis] for j in outs)
            )
            found[BodyRow(row)] = None
    return sorted(found, key=lambda r: differs(r.row))


@functools.lru_cache(maxsize=1024)
def ways(call: Call) -> dict[Row, Way]:
    """The rows of an equation for one mesh axis, all-R first."""
    found: dict[Row, Way] = {}
    for base, factor in base_rows(call):
        if call.kind == "call" or is_differentiable(base):
            row = _batched(call, columns(call, base, base))
            found.setdefault(row, Way(row, base, factor))
    for level in range(len(call.batch)):
        row = _over_batch(call, level)
        found.setdefault(row, Way(row, None))
    return found


def _batched(call: Call, row: Row) -> Row:
    """The dims of vmap come first."""
    if not call.batch:
        return row
    counts = [sum(mask[i] for mask in call.batch) for i in range(len(row.inputs))]
    n = len(call.batch)
    return Row(
        tuple(_deeper(p, k) for p, k in zip(row.inputs, counts, strict=True)),
        tuple(_deeper(p, n) for p in row.outputs),
    )


def _deeper(p: Placement, dims: int) -> Placement:
    return Shard(p.dim + dims, p.blocks) if isinstance(p, Shard) else p


def _over_batch(call: Call, level: int) -> Row:
    """Devices share the examples of one vmap."""
    info, masks, n = call.body.info(call.of), call.batch, len(call.batch)
    whole = Row((R,) * len(call.of), (R,) * len(info.results))
    token = len(call.given if call.kind == "backward" else call.of)

    def place(i: int) -> Placement:
        here = masks[level][i]
        if call.kind in ("tangent", "backward") and i == token:
            before = sum(mask[i] for mask in masks[:level])
            return Local(("vmap", before)) if here else Local(whole)
        return Shard(sum(mask[i] for mask in masks[level + 1 :])) if here else R

    split = Shard(n - 1 - level)
    if call.kind == "backward":
        outputs: tuple[Placement, ...] = (split,) * len(call.wrt)
    else:
        outputs = (split,) * len(info.inexact if call.kind == "tangent" else info.results)
        if call.kind == "forward":
            outputs = (*outputs, Local(("vmap", level)))
    return Row(tuple(place(i) for i in range(len(masks[level]))), outputs)


# ---- rules on whole layouts ----------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _layouts(body: Body, mesh: Any, of: tuple[Aval, ...]) -> list[tuple[Any, Any]]:
    """Joint placements of operands and results that the rule accepts, on all axes at once."""
    assert body.layouts is not None
    found = []
    for ins, outs in body.layouts(mesh, of, body.info(of).results):
        row = tuple(x.joint for x in ins), tuple(x.joint for x in outs)
        if _shapes_agree(body, mesh, of, row, ins, outs):
            found.append(row)
    return found


def _shapes_agree(
    body: Body, mesh: Any, of: tuple[Aval, ...], row: tuple[Any, Any], ins: Any, outs: Any
) -> bool:
    """False where the body cannot run on such parts: a rule may say more than it knows."""
    sizes = tuple(mesh.shape[n] for n in mesh.axis_names)
    results = body.info(of).results
    parts = tuple(local_shape(a.shape, j, sizes) for a, j in zip(of, row[0], strict=True))
    wanted = tuple(local_shape(a.shape, j, sizes) for a, j in zip(results, row[1], strict=True))
    fun = (body.expand(outs, ins) if body.expand else None) or body.fun
    ins, outs = row
    rows = [
        Row(tuple(j.placements[a] for j in ins), tuple(j.placements[a] for j in outs))
        for a in range(len(sizes))
    ]
    active = tuple(n for n, r in zip(mesh.axis_names, rows, strict=True) if differs(r))
    structs = [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(parts, of, strict=True)]
    environment = list(zip(mesh.axis_names, sizes, strict=True))
    try:
        with viewing(View(mesh.axis_names, active)):
            closed = jax.make_jaxpr(lambda *xs: fun(*xs), axis_env=environment)(*structs)
    except (TypeError, ValueError):
        return False
    results: Any = closed.out_avals
    return tuple(tuple(a.shape) for a in results) == wanted


@functools.lru_cache(maxsize=256)
def joint_ways(call: Call) -> dict[tuple[Any, Any], tuple[Way, ...]] | None:
    """The joint rows of an equation whose rule speaks of whole layouts; None for other rules."""
    if call.body.layouts is None:
        return None
    found = {}
    for ins, outs in _layouts(call.body, call.mesh, call.of):
        ways_here = []
        for axis in range(len(call.mesh.axis_names)):
            base = Row(
                tuple(j.placements[axis] for j in ins), tuple(j.placements[axis] for j in outs)
            )
            if call.kind != "call" and not is_differentiable(base):
                break
            row = _batched(call, columns(call, base, base))
            ways_here.append(Way(row, base))
        else:
            order = next((j.order for j in (*ins, *outs) if _shares_a_dim(j)), None)
            sides = [
                tuple(joint(c, order) for c in zip(*(side(w.row) for w in ways_here), strict=True))
                for side in (lambda r: r.inputs, lambda r: r.outputs)
            ]
            found[sides[0], sides[1]] = tuple(ways_here)
    return found


def _shares_a_dim(where: Joint) -> bool:
    dims = [p.dim for p in where.placements if isinstance(p, Shard)]
    return len(set(dims)) < len(dims)


# ---- what a row tells the body -------------------------------------------------------------------


def ways_of(call: Call, inputs: Sequence[Joint], outputs: Sequence[Joint]) -> tuple[Way, ...]:
    """The row of each mesh axis, for the joint placements that the plan has chosen."""
    joint_table = joint_ways(call)
    found = joint_table.get((tuple(inputs), tuple(outputs))) if joint_table else None
    if found is not None:
        return found
    table = ways(call)
    axes = len((*inputs, *outputs)[0].placements)
    rows = [
        Row(tuple(j.placements[a] for j in inputs), tuple(j.placements[a] for j in outputs))
        for a in range(axes)
    ]
    return tuple(table[row] for row in rows)


def view_of(
    call: Call, chosen: Sequence[Way], inputs: Sequence[Joint], outputs: Sequence[Joint],
    names: Sequence[str],
) -> View:  # fmt: skip
    """What the body sees of the mesh in this row."""
    active = [n for n, w in zip(names, chosen, strict=True) if w.base and differs(w.base)]
    order = next(
        (j.order for j in (*inputs, *outputs) if j.order != tuple(range(len(names)))), None
    )
    axes = order or range(len(names))
    factors = {
        letter: tuple(names[a] for a in axes if chosen[a].factor == letter and chosen[a].base)
        for letter in call.body.letters
    }
    return View(names, active, factors)


def base_layouts(
    call: Call, chosen: Sequence[Way], order: tuple[int, ...] | None
) -> tuple[list[Layout], list[Layout]]:
    """Where operands and results lie, as a rule on whole layouts sees them."""
    n_in, n_out = len(call.of), len(call.body.info(call.of).results)
    whole = Row((R,) * n_in, (R,) * n_out)
    rows = [w.base or whole for w in chosen]
    sides = [
        zip(*(r.inputs for r in rows), strict=True),
        zip(*(r.outputs for r in rows), strict=True),
    ]
    return tuple([Layout(call.mesh, c, order or ()) for c in side] for side in sides)  # type: ignore[return-value]


# ---- bodies of higher derivatives ----------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def tangent_body(body: Body, wrt: tuple[int, ...], of: tuple[Aval, ...]) -> Body:
    """Operands and tangents -> tangents of results: a dfunction of its own, for higher orders."""
    n, inexact = len(of), body.info(of).inexact

    def fun(*xs: Any) -> list[Any]:
        tangents = [
            np.zeros(x.shape, jax.dtypes.float0) if not a.is_inexact else jnp.zeros_like(x)
            for x, a in zip(xs[:n], of, strict=True)
        ]
        for i, t in zip(wrt, xs[n:], strict=True):
            tangents[i] = t
        out = jax.jvp(lambda *xs: body.fun(*xs), xs[:n], tuple(tangents))[1]
        return [out[i] for i in inexact]

    return _derived(body, "tangent", fun, wrt, of)


@functools.lru_cache(maxsize=4096)
def backward_body(body: Body, wrt: tuple[int, ...], of: tuple[Aval, ...]) -> Body:
    """Operands and cotangents -> gradients, computed anew: a dfunction of its own."""
    n = len(of)

    def fun(*xs: Any) -> list[Any]:
        _, kept = run_forward(body, body.fun, xs[:n], range(n), wrt)
        cotangents = with_missing(xs[n:], kept.results)
        return run_backward(body, body.fun, of, dict(enumerate(xs[:n])), kept, cotangents, wrt)

    return _derived(body, "backward", fun, wrt, of)


def _derived(
    body: Body, kind: str, fun: Callable[..., list[Any]], wrt: tuple[int, ...], of: tuple[Aval, ...]
) -> Body:
    call = Call(kind, body, of, wrt=wrt, given=tuple(range(len(of))))
    n = len(of)

    def without_kept(ins: Sequence[Any], outs: Sequence[Any]) -> tuple[Any, Any]:
        return (*ins[:n], *ins[n + 1 :]), outs

    def table(_: Sequence[Aval], __: Sequence[Aval]) -> list[BodyRow]:
        return [
            BodyRow(Row(*without_kept(of_pass.inputs, of_pass.outputs)), factor)
            for base, factor in body.table(of, body.info(of).results)
            if is_differentiable(base)
            for of_pass in [columns(call, base, base)]
        ]

    def layouts(mesh: Any, _: Sequence[Aval], __: Sequence[Aval]) -> list[tuple[Any, Any]]:
        rows = joint_ways(call._replace(mesh=mesh)) or {}
        return [
            tuple(
                [Layout(mesh, j.placements, j.order) for j in side] for side in without_kept(*row)
            )
            for row in rows
        ]  # type: ignore[return-value]

    return Body(
        f"{kind} of {body.name}", fun, table, body.letters, source=body.source,
        layouts=layouts if body.layouts else None,
    )  # fmt: skip


__all__ = [
    "Call", "Way", "backward_body", "base_layouts", "joint_ways", "tangent_body", "view_of", "ways",
    "ways_of",
]  # fmt: skip
