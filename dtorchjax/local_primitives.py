"""The four primitives of `local_calls`: how they are traced, batched, differentiated and run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dtorchjax import _jax
from dtorchjax.checking import verify_whole
from dtorchjax.collectives import viewing
from dtorchjax.errors import PlacementError
from dtorchjax.local_calls import (
    Aval,
    Body,
    Kept,
    run_backward,
    run_forward,
    with_missing,
)
from dtorchjax.local_tables import (
    Call,
    Way,
    backward_body,
    base_layouts,
    joint_ways,
    tangent_body,
    view_of,
    ways,
    ways_of,
)
from dtorchjax.masks import (
    inner_shape,
    instantiated,
    is_zero,
    lead,
    summed_over_shared,
    to_front,
    vmapped,
)
from dtorchjax.notation import PlacementSignature
from dtorchjax.placements import Joint, local_shape
from dtorchjax.registry import LOCALS, RULES, LocalCall

KINDS = ("call", "forward", "tangent", "backward")
NAMES = {kind: "dfunction" if kind == "call" else f"dfunction_{kind}" for kind in KINDS}
primitives = {kind: Primitive(name) for kind, name in NAMES.items()}


def call(body: Body, operands: Sequence[Any]) -> list[Any]:
    """One equation of the program that is being traced; the results are flat."""
    of = tuple(Aval(tuple(x.shape), x.dtype) for x in operands)
    return _bind("call", operands, body=body, of=of, batch=())


def _bind(kind: str, xs: Sequence[Any], **params: Any) -> list[Any]:
    return list(primitives[kind].bind(*xs, **params))


def as_call(kind: str, params: dict[str, Any]) -> Call:
    fields = {k: v for k, v in params.items() if k in Call._fields}
    return Call(kind, **fields)


# ---- tracing and vmap ----------------------------------------------------------------------------


def _avals(kind: str, *avals: Any, **params: Any) -> list[Any]:
    """The types of the results, on whole arrays."""
    this = as_call(kind, params)
    info = this.body.info(this.of)
    if kind == "backward":
        found = [this.of[i] for i in this.wrt]
    elif kind == "tangent":
        found = [info.results[i] for i in info.inexact]
    else:
        found = list(info.results)
    if kind == "forward":  # an opaque value of the size of what is kept
        found.append(Aval((max(1, -(-info.kept_bytes // 4)),), np.dtype("float32")))
    front = lead([a.shape for a in avals], this.batch)
    return [_jax.ShapedArray((*front, *a.shape), a.dtype) for a in found]


def _batched(kind: str, xs: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    xs, mapped = to_front(xs, dims)
    results = _bind(kind, xs, **{**params, "batch": (*params["batch"], mapped)})
    return results, [0] * len(results)


# ---- derivatives ---------------------------------------------------------------------------------


def _differentiated(
    kind: str, xs: Sequence[Any], ts: Sequence[Any], *, body: Body, of: tuple[Aval, ...],
    batch: Any, wrt: Any = None,
) -> Any:  # fmt: skip
    """Derivatives of "call" and "forward": results are kept for a backward pass, tangents wait."""
    wrt = tuple(i for i, t in enumerate(ts) if not is_zero(t))
    *results, kept = _bind("forward", xs, body=body, of=of, batch=batch, wrt=wrt)
    masks = tuple((*mask, True, *(mask[i] for i in wrt)) for mask in batch)
    given = [instantiated(ts[i]) for i in wrt]
    found = _bind("tangent", [*xs, kept, *given], body=body, of=of, batch=masks, wrt=wrt)
    tangents: list[Any] = [_jax.zero_tangent(x) for x in results]
    for i, t in zip(body.info(of).inexact, found, strict=True):
        tangents[i] = t
    if kind == "call":
        return results, tangents
    return [*results, kept], [*tangents, _jax.zero_tangent(kept)]


def _again(kind: str, xs: Sequence[Any], ts: Sequence[Any], **params: Any) -> Any:
    """Derivatives of "tangent" and "backward": those of a dfunction of operands alone."""
    this = as_call(kind, params)
    n = len(this.of)
    if kind == "tangent":
        _check_forward_mode(this.body)
        derived = tangent_body(this.body, this.wrt, this.of)
    else:
        derived = backward_body(this.body, this.wrt, this.of)
    masks = tuple((*mask[:n], *mask[n + 1 :]) for mask in this.batch)
    operands = [*xs[:n], *xs[n + 1 :]]
    tangents = [*ts[:n], *ts[n + 1 :]]
    level = [inner_shape(x.shape, i, masks) for i, x in enumerate(operands)]
    of = tuple(Aval(shape, x.dtype) for shape, x in zip(level, operands, strict=True))

    def fun(*xs: Any) -> list[Any]:
        return _bind("call", xs, body=derived, of=of, batch=masks)

    wide = [
        np.zeros(x.shape, jax.dtypes.float0) if not jnp.issubdtype(x.dtype, jnp.inexact)
        else instantiated(t)
        for x, t in zip(operands, tangents, strict=True)
    ]  # fmt: skip
    return jax.jvp(fun, tuple(operands), tuple(wide))


def _transposed(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    """The backward pass."""
    this = as_call("tangent", params)
    n = len(this.of)
    linear = args[n + 1 :]
    if all(type(c) is ad.Zero for c in cotangents):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    given = [instantiated(c) for c in cotangents]
    masks = tuple((*mask[: n + 1], *(True for _ in given)) for mask in this.batch)
    gradients = _bind(
        "backward", [*args[: n + 1], *given], body=this.body, of=this.of, batch=masks, wrt=this.wrt,
        given=tuple(range(n)),
    )  # fmt: skip
    found: list[Any] = []
    for i, (g, x) in enumerate(zip(gradients, linear, strict=True)):
        g = summed_over_shared(g, n + 1 + i, this.batch)
        found.append(g if ad.is_undefined_primal(x) else None)
    return [None] * (n + 1) + found


def _used(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Dead code: of the operands the backward pass reads only those that are kept as they are."""
    params = eqn.params
    if not any(used):
        return [False] * len(eqn.invars), None
    this = as_call("backward", params)
    aliases = this.body.info(this.of).aliases
    n = len(this.given)
    needed = [i in aliases for i in this.given] + [True] * (len(eqn.invars) - n)
    new = {
        **params,
        "given": tuple(i for i in this.given if i in aliases),
        "batch": tuple(tuple(m for m, keep in zip(mask, needed, strict=True) if keep)
                       for mask in this.batch),
    }  # fmt: skip
    invars = [v for v, keep in zip(eqn.invars, needed, strict=True) if keep]
    return needed, eqn.replace(invars=invars, params=new)


def _check_forward_mode(body: Body) -> None:
    if body.by_hand:
        raise PlacementError(
            f"dfunction `{body.name}` has a backward pass of its own, so it has no forward-mode "
            "derivative (jvp, jacfwd, hessian); without defvjp JAX derives both"
        )


# ---- one device ----------------------------------------------------------------------------------


def local_program(this: Call, fun: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What one device runs for an equation: flat parts in, flat parts out.

    `fun` is the body's function, or what the rule puts in its place.
    """
    body = this.body
    aliases = body.info(this.of).aliases
    n = len(this.given) if this.kind == "backward" else len(this.of)

    def run(*xs: Any) -> Any:
        if this.kind == "call":
            return list(fun(*xs))
        if this.kind == "forward":
            results, kept = run_forward(body, fun, xs, aliases, this.wrt)
            return [*results, kept]
        if this.kind == "tangent":
            _check_forward_mode(body)
            derived = tangent_body(body, this.wrt, this.of)
            return derived.fun(*xs[:n], *xs[n + 1 :])
        operands = dict(zip(this.given, xs[:n], strict=True))
        cotangents = with_missing(xs[n + 1 :], xs[n].results)
        return run_backward(body, fun, this.of, operands, xs[n], cotangents, this.wrt)

    return vmapped(run, this.batch)


def body_function(
    this: Call, chosen: Sequence[Way], inputs: Sequence[Joint], outputs: Sequence[Joint]
) -> Callable[..., list[Any]]:
    """The body's function, or what its rule puts in its place for these layouts."""
    if this.body.expand is None:
        return this.body.fun
    order = next((j.order for j in (*inputs, *outputs) if not j.is_local), None)
    ins, outs = base_layouts(this, chosen, order)
    return this.body.expand(outs, ins) or this.body.fun


def _run(kind: str, local: LocalCall, *xs: Any) -> list[Any]:
    """An equation on one device's parts, inside shard_map."""
    this = as_call(kind, local.params)
    chosen = ways_of(this, local.inputs, local.outputs)
    fun = body_function(this, chosen, local.inputs, local.outputs)
    names = this.mesh.axis_names
    with viewing(view_of(this, chosen, local.inputs, local.outputs, names)) as view:
        results = local_program(this, fun)(*xs)
    _check_shapes(this, local, results)
    if _jax.is_checking():
        for i, (x, where) in enumerate(zip(results, local.outputs, strict=True)):
            if not isinstance(x, Kept):
                verify_whole(this.body.name, _what(this, i), x, where, view.active, names)
    return results


def _what(this: Call, i: int) -> str:
    return f"the gradient of operand {this.wrt[i]}" if this.kind == "backward" else f"result {i}"


def _check_shapes(this: Call, local: LocalCall, results: Sequence[Any]) -> None:
    for i, (x, where) in enumerate(zip(results, local.outputs, strict=True)):
        if isinstance(x, Kept):
            continue
        wanted = local_shape(local.out_avals[i].shape, where, local.sizes)
        if tuple(np.shape(x)) != wanted:
            parts = ", ".join(
                str(local.in_shape(k)) for k, j in enumerate(local.inputs) if not j.is_local
            )
            raise PlacementError(
                f"dfunction `{this.body.name}`: {_what(this, i)} has local shape "
                f"{tuple(np.shape(x))}; its rule says {where} of "
                f"{tuple(local.out_avals[i].shape)}, which is {wanted} on one device (local "
                f"operands {parts})"
            )


# ---- what the planner asks -----------------------------------------------------------------------


class DfunctionRule:
    """The rule of one of the primitives; its rows are those of the body in its parameters."""

    moves, needs_mesh, place = False, True, __file__

    def __init__(self, kind: str):
        self.kind = kind

    def signature(self, ins: Any, outs: Any, params: dict[str, Any]) -> PlacementSignature:
        this = as_call(self.kind, params)
        if self.kind == "tangent":
            _check_forward_mode(this.body)
        return PlacementSignature(tuple(ways(this)))

    def flops(self, params: dict[str, Any]) -> int:
        """Of the whole equation; a backward pass takes about twice as many."""
        this = as_call(self.kind, params)
        times = {"call": 1, "forward": 1, "tangent": 2, "backward": 2}[self.kind]
        return times * this.body.info(this.of).flops

    def joint_rows(self, ins: Any, outs: Any, params: dict[str, Any]) -> Any:
        """All joint rows of a rule on whole layouts; None for other rules."""
        found = joint_ways(as_call(self.kind, params))
        return list(found) if found is not None else None

    def communication(
        self, primitive: Any, ins: Any, outs: Any, params: dict[str, Any], inputs: Sequence[Joint],
        outputs: Sequence[Joint], sizes: tuple[int, ...],
    ) -> Any:  # fmt: skip
        """The collectives inside the body for one joint row."""
        from dtorchjax.local_communication import communication

        operands = tuple(Aval(tuple(a.shape), a.dtype) for a in ins)
        return communication(as_call(self.kind, params), operands, tuple(inputs), tuple(outputs))


for _kind, _primitive in primitives.items():
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(functools.partial(_avals, _kind))
    batching.primitive_batchers[_primitive] = functools.partial(_batched, _kind)
    RULES[NAMES[_kind]] = DfunctionRule(_kind)
    LOCALS[NAMES[_kind]] = functools.partial(_run, _kind)
for _kind in ("call", "forward"):
    ad.primitive_jvps[primitives[_kind]] = functools.partial(_differentiated, _kind)
for _kind in ("tangent", "backward"):
    ad.primitive_jvps[primitives[_kind]] = functools.partial(_again, _kind)
ad.primitive_transposes[primitives["tangent"]] = _transposed
_jax.dead_code_rule(primitives["backward"], _used)


__all__ = ["DfunctionRule", "as_call", "body_function", "call", "local_program"]
