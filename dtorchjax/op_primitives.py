"""How the primitives of operators are traced, batched, differentiated and compiled.

An operator has a primitive for itself and one for its tangents. The second takes only what the
operator's VJP rule reads, so a loop keeps only that for the backward pass; its transpose is the
rule, and forward mode is the linear transpose of the rule.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dtorchjax import _jax
from dtorchjax.errors import OpError
from dtorchjax.masks import (
    inner_shape,
    instantiated,
    is_zero,
    lead,
    summed_over_shared,
    to_front,
    vmapped,
)
from dtorchjax.switches import has_vjp, state, uses_kernel

log = logging.getLogger("dtorchjax.vjp")
decompose_log = logging.getLogger("dtorchjax.decompose")

PLATFORMS = {"gpu": ("cuda", "rocm")}


class Traced(NamedTuple):
    """An operator's decomposition for operands of given types."""

    program: Any  # a closed jaxpr without constants
    tree: Any  # how the results are put together


class Rule(NamedTuple):
    """An operator's VJP rule for operands of given types: (saved, cotangents) -> gradients."""

    program: Any  # a closed jaxpr
    saved: tuple[int, ...]  # which of the flat operands and results it reads
    results: tuple[Any, ...]  # the types of the results that callers get
    inexact: tuple[int, ...]  # which of them have tangents


def _key() -> Any:
    return _jax.trace_key(), state()


def _pairs(params: dict[str, Any]) -> tuple[Any, ...]:
    """Parameters in a form that can be hashed."""
    return tuple((name, params[name]) for name in sorted(params))


# ---- tracing -------------------------------------------------------------------------------------


def types_of(xs: Sequence[Any]) -> tuple[Any, ...]:
    """The types of flat operands or results."""
    return tuple(x if isinstance(x, _jax.ShapedArray) else jax.typeof(x) for x in xs)


@functools.lru_cache(maxsize=4096)
def traced(op: Any, static: Any, tree: Any, types: tuple[Any, ...], _: Any) -> Traced:
    """The decomposition on operands of these types, outside of any vmap."""
    found: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        results = op.run(*jax.tree.unflatten(tree, xs), **dict(static))
        leaves, made = jax.tree.flatten(results)
        found.append(made)
        return leaves

    program = without_constants(jax.make_jaxpr(flat)(*map(_jax.struct, types)), op.name)
    if decompose_log.isEnabledFor(logging.DEBUG):
        decompose_log.debug("%s", describe(op.name, program))
    return Traced(program, found[-1])


def describe(name: str, program: Any) -> str:
    """One line: the operator, its types, and the primitives that it becomes."""
    jaxpr, _ = _jax.open_jaxpr(program)
    short = [_jax.short_type(v.aval) for v in jaxpr.invars]
    results = [_jax.short_type(v.aval) for v in jaxpr.outvars]
    emitted = ", ".join(
        f"{eqn.primitive.name} {' '.join(_jax.short_type(v.aval) for v in eqn.outvars)}"
        for eqn in _jax.equations(jaxpr)
    )
    return f"{name}({', '.join(short)}) -> {', '.join(results)}: {emitted or 'nothing'}"


def without_constants(closed: Any, name: str) -> Any:
    """The program; an error if it closes over an array."""
    _, constants = _jax.open_jaxpr(closed)
    if constants:
        shapes = ", ".join(str(jnp.shape(c)) for c in constants)
        raise OpError(
            f"op `{name}` closes over an array of shape {shapes}: make it an operand, or build it "
            "with jnp inside (jnp.arange, jnp.zeros)"
        )
    return closed


def result_types(program: Any) -> list[Any]:
    return [v.aval for v in _jax.open_jaxpr(program)[0].outvars]


def trace(op: Any, static: Any, tree: Any, types: tuple[Any, ...]) -> Traced:
    return traced(op, static, tree, types, _key())


def _inner_types(xs: Sequence[Any], batch: Any) -> tuple[Any, ...]:
    types = types_of(xs)
    if not batch:
        return types
    return tuple(_jax.of_shape(t, inner_shape(t.shape, i, batch)) for i, t in enumerate(types))


def _outer(results: Sequence[Any], xs: Sequence[Any], batch: Any) -> list[Any]:
    if not batch:
        return list(results)
    front = lead([x.shape for x in xs], batch)
    return [_jax.of_shape(r, (*front, *r.shape)) for r in results]


def decomposition(eqn_types: Sequence[Any], params: dict[str, Any]) -> Any:
    """The closed jaxpr that an equation of one of our primitives stands for."""
    return _program(tuple(eqn_types), _pairs(params), _key())


@functools.lru_cache(maxsize=4096)
def _program(types: tuple[Any, ...], params: Any, _: Any) -> Any:
    given = dict(params)
    run = _run_tangent if "wrt" in given else _run
    fun = functools.partial(run, **given)
    return without_constants(jax.make_jaxpr(fun)(*map(_jax.struct, types)), given["op"].name)


# ---- the operator itself -------------------------------------------------------------------------


def _flat(op: Any, static: Any, tree: Any) -> Callable[..., list[Any]]:
    return lambda *xs: jax.tree.leaves(op.run(*jax.tree.unflatten(tree, xs), **dict(static)))


def _run(*xs: Any, op: Any, static: Any, tree: Any, batch: Any) -> list[Any]:
    return vmapped(_flat(op, static, tree), batch)(*xs)


def _run_kernel(
    kernel: Callable[..., Any], *xs: Any, op: Any, static: Any, tree: Any, batch: Any
) -> list[Any]:
    """A platform's own program in place of the decomposition, whose types it must keep."""
    if not uses_kernel(op.name):
        return _run(*xs, op=op, static=static, tree=tree, batch=batch)

    def flat(*xs: Any) -> list[Any]:
        found = jax.tree.leaves(kernel(*jax.tree.unflatten(tree, xs), **dict(static)))
        program = trace(op, static, tree, types_of(xs)).program
        check_results(f"the kernel of `{op.name}`", types_of(found), result_types(program))
        return found

    return vmapped(flat, batch)(*xs)


def check_results(what: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Raise OpError unless number, shapes and dtypes of two lists of types are the same."""
    if len(found) != len(wanted):
        raise OpError(f"{what} has {len(found)} results, its decomposition {len(wanted)}")
    for i, (have, want) in enumerate(zip(found, wanted, strict=True)):
        if have.shape != want.shape or have.dtype != want.dtype:
            raise OpError(
                f"{what}: result {i} is {_jax.short_type(have)}, that of its decomposition "
                f"{_jax.short_type(want)}"
            )


def _avals(*xs: Any, op: Any, static: Any, tree: Any, batch: Any) -> list[Any]:
    program = trace(op, static, tree, _inner_types(xs, batch)).program
    return _outer(result_types(program), xs, batch)


def _batched(primitive: Primitive, xs: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    xs, mapped = to_front(xs, dims)
    results = primitive.bind(*xs, **{**params, "batch": (*params["batch"], mapped)})
    return results, [0] * len(results)


@functools.lru_cache(maxsize=2048)
def _compiled(primitive: Primitive, params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _now(primitive: Primitive, run: Any, *xs: Any, **params: Any) -> list[Any]:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return run(*xs, **params)
    return _compiled(primitive, _pairs(params))(*xs)


# ---- derivatives ---------------------------------------------------------------------------------


def _differentiated(
    xs: Sequence[Any], ts: Sequence[Any], *, op: Any, static: Any, tree: Any, batch: Any
) -> Any:
    wrt = tuple(i for i, t in enumerate(ts) if not is_zero(t))
    params = {"op": op, "static": static, "tree": tree, "batch": batch}
    if not wrt:
        results = op.primitive.bind(*xs, **params)
        return results, [_jax.zero_tangent(r) for r in results]
    if not has_vjp(op):
        why = "no rule of its own" if op.vjp_rule is None else "its rule is denied"
        log.debug("%s: derivative of its decomposition (%s)", op.name, why)
        return _automatic(functools.partial(_run, **params), xs, ts, wrt)
    types = _inner_types(xs, batch)
    rule = vjp_rule(op, static, tree, types, wrt)
    results = op.primitive.bind(*xs, **params)
    n = len(xs)
    everything = [*xs, *results]
    masks = tuple(tuple(i >= n or mask[i] for i in (*rule.saved, *wrt)) for mask in batch)
    found = op.tangent.bind(
        *(everything[i] for i in rule.saved), *(instantiated(ts[i]) for i in wrt),
        op=op, static=static, tree=tree, of=types, wrt=wrt, batch=masks,
    )  # fmt: skip
    tangents: list[Any] = [_jax.zero_tangent(r) for r in results]
    for i, t in zip(rule.inexact, found, strict=True):
        tangents[i] = t
    visible = len(rule.results)
    if visible < len(results):  # dead code unless somebody differentiates the rule
        hidden = functools.partial(_run_hidden, visible, **params)
        tangents[visible:] = _automatic(hidden, xs, ts, wrt)[1]
    return results, tangents


def _run_hidden(visible: int, *xs: Any, **params: Any) -> list[Any]:
    """What an operator saves, without what callers get."""
    return _run(*xs, **params)[visible:]


def _automatic(
    fun: Callable[..., Any], xs: Sequence[Any], ts: Sequence[Any], wrt: Sequence[int]
) -> Any:
    """The derivative of the decomposition, in the operands that have a tangent."""

    def of_some(*some: Any) -> Any:
        full = list(xs)
        for i, x in zip(wrt, some, strict=True):
            full[i] = x
        return fun(*full)

    return jax.jvp(of_some, [xs[i] for i in wrt], [instantiated(ts[i]) for i in wrt])


def vjp_rule(op: Any, static: Any, tree: Any, types: tuple[Any, ...], wrt: tuple[int, ...]) -> Rule:
    return _vjp_rule(op, static, tree, types, wrt, _key())


@functools.lru_cache(maxsize=4096)
def _vjp_rule(
    op: Any, static: Any, tree: Any, types: tuple[Any, ...], wrt: tuple[int, ...], _: Any
) -> Rule:
    """The rule's program, and which values it really reads: the others are not kept."""
    found = trace(op, static, tree, types)
    everything = result_types(found.program)
    out_tree = jax.tree.structure(op.split(jax.tree.unflatten(found.tree, everything))[0])
    results = tuple(everything[: out_tree.num_leaves])
    inexact = tuple(i for i, r in enumerate(results) if jnp.issubdtype(r.dtype, jnp.inexact))
    n, m = len(types), len(everything)

    def pull(*xs: Any) -> list[Any]:
        operands = jax.tree.unflatten(tree, xs[:n])
        made = jax.tree.unflatten(found.tree, xs[n : n + m])
        given = dict(zip(inexact, xs[n + m :], strict=True))
        g = jax.tree.unflatten(out_tree, [given.get(i) for i in range(len(results))])
        gradients = op.pull(operands, made, g, dict(static))
        return [fitted(op.name, i, gradients[i], types[i]) for i in wrt]

    cotangents = [results[i] for i in inexact]
    closed = jax.make_jaxpr(pull)(*map(_jax.struct, (*types, *everything, *cotangents)))
    closed = without_constants(closed, f"{op.name}.vjp")
    program, used = _jax.dead_operands(closed, [*([False] * (n + m)), *([True] * len(cotangents))])
    saved = tuple(i for i in range(n + m) if used[i])
    if log.isEnabledFor(logging.DEBUG):
        names = op.value_names(tree, len(results))
        read = [f"{names[i]} {_jax.short_type((*types, *everything)[i])}" for i in saved]
        log.debug(
            "%s: its rule reads %s; gradients %s", op.name,
            ", ".join(read) or "nothing",
            describe("", program),
        )  # fmt: skip
    return Rule(program, saved, results, inexact)


def fitted(name: str, operand: int, gradient: Any, wanted: Any) -> Any:
    """A gradient in its operand's dtype; OpError unless it has the operand's shape."""
    if gradient is None:
        return jnp.zeros(wanted.shape, wanted.dtype)
    gradient = jnp.asarray(gradient)
    if gradient.shape != wanted.shape:
        raise OpError(
            f"the VJP rule of `{name}`: the gradient of operand {operand} has shape "
            f"{gradient.shape}, the operand {wanted.shape}"
        )
    return gradient.astype(wanted.dtype)


def _rule_of(params: dict[str, Any]) -> Rule:
    return vjp_rule(params["op"], params["static"], params["tree"], params["of"], params["wrt"])


def _run_tangent(*xs: Any, batch: Any, **params: Any) -> list[Any]:
    """Saved values, then tangents of the operands `wrt` -> tangents of the results."""
    rule = _rule_of(params)
    k = len(rule.saved)
    pull = core.jaxpr_as_fun(rule.program)
    cotangents = [_jax.struct(rule.results[i]) for i in rule.inexact]

    def run(*xs: Any) -> list[Any]:
        transposed = jax.linear_transpose(lambda *gs: pull(*xs[:k], *gs), *cotangents)
        return list(transposed(list(xs[k:])))

    return vmapped(run, batch)(*xs)


def _tangent_avals(*xs: Any, batch: Any, **params: Any) -> list[Any]:
    rule = _rule_of(params)
    return _outer([_strong(rule.results[i]) for i in rule.inexact], xs, batch)


def _strong(aval: Any) -> Any:
    return aval.update(weak_type=False)


def _tangent_differentiated(xs: Sequence[Any], ts: Sequence[Any], **params: Any) -> Any:
    wrt = [i for i, t in enumerate(ts) if not is_zero(t)]
    return _automatic(functools.partial(_run_tangent, **params), xs, ts, wrt)


def _transposed(cotangents: Sequence[Any], *xs: Any, batch: Any, **params: Any) -> list[Any]:
    """The backward pass: the rule."""
    rule = _rule_of(params)
    k = len(rule.saved)
    if all(type(c) is ad.Zero for c in cotangents):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]
    pull = core.jaxpr_as_fun(rule.program)
    masks = tuple((*mask[:k], *(True for _ in cotangents)) for mask in batch)
    gradients = vmapped(pull, masks)(*xs[:k], *map(instantiated, cotangents))
    return [None] * k + [
        summed_over_shared(g, k + i, batch) if ad.is_undefined_primal(xs[k + i]) else None
        for i, g in enumerate(gradients)
    ]


# ---- declaration ---------------------------------------------------------------------------------


def make_primitives(name: str) -> tuple[Primitive, Primitive]:
    """The primitive of an operator and that of its tangents."""
    main, tangent = Primitive(name), Primitive(f"{name}_tangent")
    for primitive, run, avals in ((main, _run, _avals), (tangent, _run_tangent, _tangent_avals)):
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(_now, primitive, run))
        primitive.def_abstract_eval(avals)
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
        batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    ad.primitive_jvps[main] = _differentiated
    ad.primitive_jvps[tangent] = _tangent_differentiated
    ad.primitive_transposes[tangent] = _transposed
    return main, tangent


def set_kernel(primitive: Primitive, platform: str, kernel: Callable[..., Any]) -> None:
    for name in PLATFORMS.get(platform, (platform,)):
        lowered = mlir.lower_fun(functools.partial(_run_kernel, kernel), multiple_results=True)
        mlir.register_lowering(primitive, lowered, platform=name)


def is_op_equation(eqn: Any) -> bool:
    """True for an operator's primitive or that of its tangents."""
    op = eqn.params.get("op")
    return op is not None and eqn.primitive in (
        getattr(op, "primitive", None),
        getattr(op, "tangent", None),
    )


def op_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of operators in a program and in the programs inside it."""
    for eqn in jaxpr.eqns:
        if is_op_equation(eqn):
            yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from op_equations(inner)
