"""Taking operators apart, as a transformation of programs."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend import core

from dtorchjax import _jax
from dtorchjax.errors import OpError
from dtorchjax.op import Op
from dtorchjax.op_primitives import check_results, is_op_equation, result_types
from dtorchjax.op_primitives import decomposition as program_of
from dtorchjax.registry import OPS, RULES
from dtorchjax.switches import Choice, check_names, decompositions, named, vjp_rules

log = logging.getLogger("dtorchjax.decompose")

CONTROL_FLOW = frozenset({"scan", "while", "cond"})


def primitive_set() -> frozenset[str]:
    """The closed set of primitives into which every operator decomposes, by name.

    It is what has a sharding rule, control flow, and calls of programs (jit, remat, custom_jvp).

    >>> {"exp", "dot_general", "scan"} <= primitive_set(), "softmax" in primitive_set()
    (True, False)
    """
    ours = {n for n in RULES if n.startswith("dfunction")}
    ours |= {n for n, op in OPS.items() if isinstance(op, Op)}
    return frozenset(RULES) - ours | CONTROL_FLOW | _jax.IN_PLACE


def has_decomposition(name: str) -> bool:
    """True for an operator of ours; OpError if the name is neither that nor a primitive.

    >>> has_decomposition("softmax"), has_decomposition("exp")
    (True, False)
    """
    return isinstance(_known(name), Op)


def decomposition(name: str) -> Callable[..., Any]:
    """The decomposition of an operator, as a function with the same arguments.

    Raises OpError if there is none.

    >>> decomposition("relu")(jax.numpy.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    op = _known(name)
    if not isinstance(op, Op):
        raise OpError(f"`{name}` has no decomposition: it is made of JAX's primitives already")

    @functools.wraps(op.body)
    def run(*args: Any, **kwargs: Any) -> Any:
        operands, static = op.bind(args, kwargs)
        arrays = jax.tree.map(op.array, operands)
        return op.split(op.run(*arrays, **dict(static)))[0]

    return run


def vjp_kind(name: str) -> str:
    """How a name is differentiated: "custom" by a VJP rule of its own, "automatic" through its
    decomposition, "plain" by JAX's own rule.

    >>> vjp_kind("softmax"), vjp_kind("lerp"), vjp_kind("exp")
    ('custom', 'automatic', 'plain')
    """
    op = _known(name)
    if not isinstance(op, Op):
        return "plain"
    return "custom" if op.vjp_rule is not None and vjp_rules().takes(name) else "automatic"


def _known(name: str) -> Any:
    if name in OPS:
        return OPS[name]
    if name in primitive_set() or name in _jax.primitive_names():
        return None
    raise OpError(f"`{name}` is neither an op nor a primitive")


def decompose(
    fun: Callable[..., Any], allow: Collection[str] | None = None, deny: Collection[str] = ()
) -> Callable[..., Any]:
    """`fun` with its operators taken apart: those of `allow` (None: all) that are not in `deny`.

    It goes through scan, while, cond, jit and remat, and through derivatives: the operators' VJP
    rules are in `decompose(jax.grad(f))`, taken apart as well. Keyword arguments of `fun` are not
    traced. A context (`decomposing`) or `DTORCHJAX_DECOMPOSE` may narrow the choice; a denial
    wins. Raises OpError for a name that is no operator, or where a decomposition's results differ
    from the operator's in number, dtype or shape.

    >>> x = jax.numpy.ones(3)
    >>> [e.primitive.name for e in jax.make_jaxpr(decompose(OPS["relu"]))(x).eqns]
    ['max']
    """
    check_names((named(allow) if allow is not None else frozenset()) | named(deny))

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = decompositions().narrowed(allow, deny)
        traced = functools.partial(fun, **kwargs)
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args)
        program = decomposed(closed, chosen)
        results = core.jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def decomposed(closed: Any, chosen: Choice) -> Any:
    """A closed jaxpr with the chosen operators taken apart, inner programs included."""
    if log.isEnabledFor(logging.INFO):
        log.info("before: %s", census(closed.jaxpr))
    program = closed.replace(jaxpr=_rewritten(closed.jaxpr, chosen))
    if log.isEnabledFor(logging.INFO):
        log.info("after: %s", census(program.jaxpr))
    return program


def census(jaxpr: Any) -> str:
    """How often each primitive stands in a program, the most frequent first."""
    counts: collections.Counter[str] = collections.Counter()

    def count(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            counts[eqn.primitive.name] += 1
            for inner in _jax.inner_jaxprs(eqn):
                count(inner)

    count(jaxpr)
    return ", ".join(f"{n} {name}" for name, n in counts.most_common()) or "nothing"


def _rewritten(jaxpr: Any, chosen: Choice) -> Any:
    known: dict[Any, Any] = {}  # variables that are another atom now
    eqns: list[Any] = []

    def now(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else known.get(atom, atom)

    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[now(v) for v in eqn.invars])
        if is_op_equation(eqn) and _takes(eqn, chosen):
            found, results = _inlined(eqn, chosen)
            eqns += found
            known.update(zip(eqn.outvars, results, strict=True))
        else:
            eqns.append(eqn.replace(params=_inside(eqn.params, chosen)))
    return jaxpr.replace(eqns=eqns, outvars=[now(v) for v in jaxpr.outvars])


def _takes(eqn: Any, chosen: Choice) -> bool:
    name = eqn.params["op"].name
    taken = chosen.takes(name)
    if log.isEnabledFor(logging.DEBUG):
        why = "taken" if taken else "denied" if name in chosen.deny else "not among the allowed"
        log.debug("%s: %s", eqn.primitive.name, why)
    return taken


def _inside(params: dict[str, Any], chosen: Choice) -> dict[str, Any]:
    """Parameters of an equation, with the programs among them rewritten."""

    def one(p: Any) -> Any:
        if isinstance(p, list | tuple):
            items = [one(item) for item in p]
            changed = any(a is not b for a, b in zip(items, p, strict=True))
            return type(p)(items) if changed and type(p) in (list, tuple) else p
        inner = _jax.open_jaxpr(p)[0]
        if not hasattr(inner, "eqns"):
            return p
        new = _rewritten(inner, chosen)
        return new if inner is p else p.replace(jaxpr=new)

    return {name: one(p) for name, p in params.items()}


def _inlined(eqn: Any, chosen: Choice) -> tuple[list[Any], list[Any]]:
    """The equations of an operator's decomposition with variables of their own, and its results."""
    program = program_of([v.aval for v in eqn.invars], eqn.params)
    body = _rewritten(_jax.open_jaxpr(program)[0], chosen)
    types = [v.aval for v in eqn.outvars]
    check_results(f"`{eqn.primitive.name}`", types, result_types(program))
    new: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))

    def atom(v: Any) -> Any:
        return v if isinstance(v, core.Literal) else new[v]

    found = []
    for inner in body.eqns:
        invars = [atom(v) for v in inner.invars]
        for v in inner.outvars:
            new[v] = _jax.fresh_variable(v)
        found.append(inner.replace(invars=invars, outvars=[new[v] for v in inner.outvars]))
    return found, [atom(v) for v in body.outvars]
