"""The collectives in a dfunction's body: read from a trace on one device's shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from dtorchjax.collectives import View, viewing
from dtorchjax.local_calls import Aval
from dtorchjax.local_primitives import body_function, local_program
from dtorchjax.local_tables import Call, Way, view_of, ways_of
from dtorchjax.placements import Joint, Local, R, joint, local_shape
from dtorchjax.sent import Sent, collectives_of


@functools.lru_cache(maxsize=4096)
def communication(
    call: Call, operands: tuple[Aval, ...], inputs: tuple[Joint, ...], outputs: tuple[Joint, ...]
) -> tuple[Sent, ...]:
    """The collectives of one equation in the placements that its row gives.

    `operands` are the whole inputs of the equation, with the dims of vmap.
    """
    info, names = call.body.info(call.of), call.mesh.axis_names
    if not info.communicates:
        return ()
    sizes = tuple(call.mesh.shape[n] for n in names)
    chosen = ways_of(call, inputs, outputs)
    view = view_of(call, chosen, inputs, outputs, names)
    speaks_of = [n for letter in sorted(info.letters) for n in view.factors.get(letter, ())]
    speaks_of += [n for n in view.active if n in info.names]
    if not speaks_of:
        return ()
    number = {name: axis for axis, name in enumerate(names)}
    token = next((i for i, where in enumerate(inputs) if where.is_local), None)
    local = _Local(
        parts=tuple(
            Aval(local_shape(a.shape, where, sizes), a.dtype)
            for a, where in zip(operands, inputs, strict=True)
        ),
        body_parts=_body_parts(call, chosen, sizes),
        lead=() if token is None else _local_lead(operands[token].shape[:-1], inputs[token], sizes),
        token=token,
    )
    if call.body.expand is not None:
        local = local._replace(fun=body_function(call, chosen, inputs, outputs))
    # a body that names no axes does the same on axes of other names
    rename = {n: n if info.names else f"axis {i}" for i, n in enumerate(dict.fromkeys(speaks_of))}
    axes = tuple((rename[n], sizes[number[n]]) for n in rename)
    factors = tuple(
        (letter, tuple(rename.get(n, n) for n in over)) for letter, over in view.factors.items()
        if letter in info.letters
    )  # fmt: skip
    back = {new: number[old] for old, new in rename.items()}
    found = _collectives(call._replace(mesh=None), local, axes, factors)
    return tuple(sent.numbered(back) for sent in found)


class _Local(NamedTuple):
    """What one device has: the parts of the equation's inputs, and of the body's operands.

    `lead` are the dims of vmap of what is kept for the backward pass, `token` its number.
    """

    parts: tuple[Aval, ...]
    body_parts: tuple[Aval, ...]
    lead: tuple[int, ...]
    token: int | None
    fun: Callable[..., Any] | None = None


@functools.lru_cache(maxsize=4096)
def _collectives(
    call: Call, local: _Local, axes: tuple[tuple[str, int], ...],
    factors: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[Sent, ...]:  # fmt: skip
    """The collectives, with the names of their axes, from a trace."""
    fun = local.fun or call.body.fun
    names = [name for name, _ in axes]
    parts: list[Any] = [a.struct() for a in local.parts]
    with viewing(View((*names, *call.body.info(call.of).names), names, dict(factors))):
        if local.token is not None:
            masks = ((True,) * len(call.of),) * len(local.lead)
            forward = local_program(Call("forward", call.body, call.of, masks), fun)
            operands = [Aval((*local.lead, *a.shape), a.dtype).struct() for a in local.body_parts]
            trace = jax.make_jaxpr(forward, axis_env=axes, return_shape=True)
            parts[local.token] = trace(*operands)[1][-1]
        program = local_program(call, fun)
        return collectives_of(program, parts, axes)


def _body_parts(call: Call, chosen: Sequence[Way], sizes: Sequence[int]) -> tuple[Aval, ...]:
    """One device's parts of the body's operands, without the dims of vmap."""
    found = []
    for i, aval in enumerate(call.of):
        where = joint([w.base.inputs[i] if w.base else R for w in chosen])
        found.append(Aval(local_shape(aval.shape, where, sizes), aval.dtype))
    return tuple(found)


def _local_lead(lead: Sequence[int], where: Joint, sizes: Sequence[int]) -> tuple[int, ...]:
    """The examples of every vmap, the outermost first, that one device keeps something of."""
    found = list(lead)
    for p, size in zip(where.placements, sizes, strict=True):
        if isinstance(p, Local) and p.key[0] == "vmap":
            found[len(lead) - 1 - p.key[1]] //= size
    return tuple(found)


__all__ = ["Sent", "communication"]
