"""The collectives in a dfunction's body: read from a trace on one device's shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dtorchjax import _jax
from dtorchjax.collectives import viewing
from dtorchjax.local_calls import Aval
from dtorchjax.local_primitives import body_function, local_program
from dtorchjax.local_tables import Call, Way, view_of, ways_of
from dtorchjax.placements import Joint, Local, R, joint, local_shape

LOOP_TRIPS = 8
"""How often a while loop in a body is thought to run."""


class Sent(NamedTuple):
    """One collective of a body: `bytes` is what one device sends in one execution."""

    kind: str
    axes: tuple[int, ...]
    bytes: float
    times: int


KINDS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce",
    "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ppermute": "permute",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def communication(
    call: Call, operands: tuple[Aval, ...], inputs: tuple[Joint, ...], outputs: tuple[Joint, ...]
) -> tuple[Sent, ...]:
    """The collectives of one equation in the placements that its row gives.

    `operands` are the whole inputs of the equation, with the dims of vmap.
    """
    if not call.body.info(call.of).communicates:
        return ()
    names = call.mesh.axis_names
    sizes = tuple(call.mesh.shape[n] for n in names)
    chosen = ways_of(call, inputs, outputs)
    view = view_of(call, chosen, inputs, outputs, names)
    if not view.active:
        return ()
    fun = body_function(call, chosen, inputs, outputs)
    environment = list(zip(names, sizes, strict=True))
    parts: list[Any] = [
        jax.ShapeDtypeStruct(local_shape(a.shape, where, sizes), a.dtype)
        for a, where in zip(operands, inputs, strict=True)
    ]
    with viewing(view):
        token = next((i for i, where in enumerate(inputs) if where.is_local), None)
        if token is not None:
            lead = _local_lead(operands[token].shape[:-1], inputs[token], sizes)
            parts[token] = _kept(call, fun, chosen, sizes, lead, environment)
        program = local_program(call, fun)
        closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(program(*xs)), axis_env=environment)(
            *parts
        )
    numbers = {name: axis for axis, name in enumerate(names)}
    found: dict[tuple[str, tuple[int, ...], float], int] = {}
    for kind, axes, nbytes, times in _walk(closed.jaxpr, 1, numbers, sizes):
        key = kind, axes, nbytes
        found[key] = found.get(key, 0) + times
    return tuple(Sent(*key, times) for key, times in found.items())


def _local_lead(lead: Sequence[int], where: Joint, sizes: Sequence[int]) -> tuple[int, ...]:
    """The examples of every vmap, the outermost first, that one device keeps something of."""
    found = list(lead)
    for p, size in zip(where.placements, sizes, strict=True):
        if isinstance(p, Local) and p.key[0] == "vmap":
            found[len(lead) - 1 - p.key[1]] //= size
    return tuple(found)


def _kept(
    call: Call, fun: Callable[..., Any], chosen: Sequence[Way], sizes: Sequence[int],
    lead: tuple[int, ...], environment: list[tuple[str, int]],
) -> Any:  # fmt: skip
    """The shapes of what a device keeps for the backward pass."""
    masks = ((True,) * len(call.of),) * len(lead)
    forward = local_program(Call("forward", call.body, call.of, masks, mesh=call.mesh), fun)
    operands = []
    for i, aval in enumerate(call.of):
        where = joint([w.base.inputs[i] if w.base else R for w in chosen])
        shape = (*lead, *local_shape(aval.shape, where, sizes))
        operands.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    return jax.make_jaxpr(forward, axis_env=environment, return_shape=True)(*operands)[1][-1]


def _walk(
    jaxpr: Any, times: int, numbers: dict[str, int], sizes: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], float, int]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            yield from _sent(eqn, times, numbers, sizes)
        elif name == "cond":
            inner = [
                list(_walk(_jax.open_jaxpr(branch)[0], times, numbers, sizes))
                for branch in eqn.params["branches"]
            ]
            yield from max(inner, key=lambda found: sum(b * t for _, _, b, t in found))
        else:
            trips = {"scan": eqn.params.get("length", 1), "while": LOOP_TRIPS}.get(name, 1)
            for inner in _jax.inner_jaxprs(eqn):
                yield from _walk(inner, times * trips, numbers, sizes)


def _sent(
    eqn: Any, times: int, numbers: dict[str, int], sizes: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], float, int]]:
    """One collective, by ring algorithms."""
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(
        numbers[n] for n in ((named,) if isinstance(named, str) else named) if n in numbers
    )
    n = math.prod(sizes[a] for a in axes)
    stays = all(a == b for a, b in eqn.params.get("perm", ((0, 1),)))
    if n == 1 or stays:
        return
    kind = KINDS[eqn.primitive.name]
    part = {
        "all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n, "permute": 1.0,
    }[kind]  # fmt: skip
    held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.invars)
    yield kind, axes, held * part, times


__all__ = ["Sent", "communication"]
