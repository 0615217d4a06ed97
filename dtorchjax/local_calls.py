"""A dfunction in a whole-array program: its call, and the two passes of its gradient, as primitives
whose bodies run on one device's parts.

    dfunction            operands -> results
    dfunction_forward    operands -> results and what is kept for the backward pass
    dfunction_tangent    operands, kept, tangents -> tangents of results  (until it is transposed)
    dfunction_backward   operands, kept, cotangents of results -> gradients

What is kept is one opaque value in the whole-array program. On a device it is a tree of arrays of
any shapes, which stays there: `placements.Local` says by which row it was made, so forward and
backward pass always run by the same row. Second derivatives do not differentiate it: the backward
pass is a function of operands and cotangents, and what is kept only spares it work.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax import _jax, cost
from dtorchjax.collectives import View, viewing
from dtorchjax.errors import PlacementError
from dtorchjax.local_rules import BodyRow
from dtorchjax.placements import Layout


class Aval(NamedTuple):
    """Shape and dtype of a whole operand, without the dims of vmap."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_inexact(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Info(NamedTuple):
    """What a trace of a body on whole operands tells.

    `aliases` are the operands that are kept for the backward pass as they are, `kept_bytes` the
    size of all else that is kept, `communicates` is False for a body without collectives,
    `letters` and `names` are those of whose axes it speaks, `flops` those of its contractions.
    """

    results: tuple[Aval, ...]
    aliases: tuple[int, ...]
    kept_bytes: int
    communicates: bool
    letters: frozenset[str]
    names: frozenset[str]
    flops: int

    @property
    def inexact(self) -> tuple[int, ...]:
        """The results that have tangents."""
        return tuple(i for i, a in enumerate(self.results) if a.is_inexact)


@dataclasses.dataclass(eq=False)
class Body:
    """A function of flat local arrays with its rule; the same object for the same statics.

    fun: arrays -> list of arrays.
    table: whole avals of operands and results -> rows, all-R first.
    forward, backward: by hand. `forward(arrays, wrt) -> (results, residuals)`,
        `backward(residuals, cotangents, wrt) -> gradients of operands wrt` (None: zero).
    cotangents: what the user declares of them, see `local_rules`.
    layouts: for rules that speak of whole layouts: mesh, operands' and results' avals -> rows of
        Layouts.
    expand: layouts of operands and of results -> the local function to run, or None for `fun`.
    """

    name: str
    fun: Callable[..., list[Any]]
    table: Callable[[Sequence[Aval], Sequence[Aval]], list[BodyRow]]
    letters: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    cotangents: Mapping[int | str, str] = dataclasses.field(default_factory=dict)
    layouts: Callable[..., list[tuple[list[Layout], list[Layout]]]] | None = None
    expand: Callable[..., Callable[..., list[Any]] | None] | None = None
    source: Callable[..., Any] | None = None
    infos: dict[Any, Info] = dataclasses.field(default_factory=dict)

    @property
    def by_hand(self) -> bool:
        return self.backward is not None

    def info(self, of: tuple[Aval, ...]) -> Info:
        key = of, _jax.settings()
        if key not in self.infos:
            self.infos[key] = self._trace(of)
        return self.infos[key]

    def _trace(self, of: tuple[Aval, ...]) -> Info:
        structs = [a.struct() for a in of]
        with viewing(View()) as view:
            try:
                closed = jax.make_jaxpr(lambda *xs: self.fun(*xs))(*structs)
            except NameError as error:
                raise PlacementError(
                    f"dfunction `{self.name}`: {error} (a body speaks to other devices by dt.psum "
                    "and its like, which do nothing where there is no mesh)"
                ) from error
            self._check_constants(closed.consts)
            aliases: set[int] = set()

            def forward(*xs: Any) -> Any:
                inexact = [i for i, a in enumerate(of) if a.is_inexact]
                results, kept = run_forward(self, self.fun, xs, range(len(xs)), inexact)
                aliases.update(i for kind, i in kept.sources if kind == "operand")
                return results, kept.arrays

            differentiable = any(a.is_inexact for a in of)
            kept = jax.eval_shape(forward, *structs)[1] if differentiable else []
        results: Any = closed.out_avals
        return Info(
            tuple(Aval(tuple(a.shape), np.dtype(a.dtype) if not _is_key(a) else a.dtype)
                  for a in results),
            tuple(sorted(aliases)),
            sum(int(np.prod(k.shape)) * k.dtype.itemsize for k in kept),
            view.communicates,
            frozenset(view.asked),
            frozenset(view.mentioned),
            flops_of(closed.jaxpr),
        )  # fmt: skip

    def _check_constants(self, constants: Sequence[Any]) -> None:
        for x in constants:
            if isinstance(x, _jax.Tracer):
                name = _closed_over(self.source, x)
                raise PlacementError(
                    f"dfunction `{self.name}` closes over {name}, a traced array "
                    f"{_jax.short_type(x.aval)}: pass it as an argument, or its gradient and its "
                    "placement are not known"
                )


def flops_of(jaxpr: Any) -> int:
    """Multiplies and adds of all contractions of a program, loops included."""
    total = 0
    for eqn in jaxpr.eqns:
        avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        total += cost.flops(eqn.primitive.name, *avals, eqn.params)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        total += times * sum(map(flops_of, _jax.inner_jaxprs(eqn)))
    return total


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _closed_over(fun: Any, x: Any) -> str:
    """The name under which a function sees a value."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(fun)) if fun is not None else None
    except TypeError:
        found = None
    names = {**found.globals, **found.nonlocals} if found is not None else {}
    for name, value in names.items():
        if any(leaf is x for leaf in jax.tree.leaves(value)):
            return repr(name)
    return next((repr(n) for n, v in names.items() if isinstance(v, _jax.Tracer)), "a value")


# ---- passes on one device ------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Kept:
    """What one device keeps for the backward pass; `sources` says where each residual comes from.

    ("operand", i): an operand, which is not stored again; ("array", i): `arrays[i]`;
    ("static", value): not an array. `wrt` are the operands that are differentiated, `avals` the
    types of all, `results` those of the results.
    """

    def __init__(
        self, arrays: Sequence[Any], structure: Any, sources: tuple[tuple[str, Any], ...],
        wrt: tuple[int, ...], avals: tuple[Aval, ...], results: tuple[Aval, ...],
    ):  # fmt: skip
        self.arrays, self.structure, self.sources = list(arrays), structure, sources
        self.wrt, self.avals, self.results = wrt, avals, results

    def tree_flatten(self):
        return self.arrays, (self.structure, self.sources, self.wrt, self.avals, self.results)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Sequence[Any]) -> Kept:
        return cls(arrays, *aux)

    def residuals(self, operands: Mapping[int, Any]) -> Any:
        leaves = [
            operands[value] if kind == "operand" else self.arrays[value] if kind == "array"
            else value
            for kind, value in self.sources
        ]  # fmt: skip
        return jax.tree.unflatten(self.structure, leaves)


def run_forward(
    body: Body, fun: Callable[..., list[Any]], operands: Sequence[Any], aliases: Sequence[int],
    wrt: Sequence[int],
) -> tuple[list[Any], Kept]:  # fmt: skip
    """Results and what the backward pass needs; operands in `aliases` are referred to."""
    if body.forward is not None and fun == body.fun:
        results, residuals = body.forward(operands, tuple(wrt))
    else:
        results, residuals = jax.vjp(*_of_inexact(fun, operands))
    leaves, structure = jax.tree.flatten(residuals)
    arrays: list[Any] = []
    sources: list[tuple[str, Any]] = []
    for leaf in leaves:
        same = next((i for i in aliases if operands[i] is leaf), None)
        if same is not None:
            sources.append(("operand", same))
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
            sources.append(("array", len(arrays)))
            arrays.append(leaf)
        else:
            sources.append(("static", leaf))
    types = [tuple(Aval(tuple(x.shape), x.dtype) for x in xs) for xs in (operands, results)]
    return results, Kept(arrays, structure, tuple(sources), tuple(wrt), *types)


def _of_inexact(fun: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """`fun` of its inexact operands alone, and these."""
    inexact = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of(*xs: Any) -> Any:
        full = list(operands)
        for i, x in zip(inexact, xs, strict=True):
            full[i] = x
        return fun(*full)

    return of, *(operands[i] for i in inexact)


def run_backward(
    body: Body, fun: Callable[..., list[Any]], of: Sequence[Aval], operands: Mapping[int, Any],
    kept: Kept, cotangents: Sequence[Any], wrt: Sequence[int],
) -> list[Any]:  # fmt: skip
    """Gradients of the operands `wrt`, in their dtypes; `cotangents` are of all results."""
    residuals = kept.residuals(operands)
    if body.backward is not None and fun == body.fun:
        found = dict(zip(wrt, body.backward(residuals, list(cotangents), tuple(wrt)), strict=True))
    else:
        inexact = [i for i, a in enumerate(of) if a.is_inexact]
        found = dict(zip(inexact, residuals(list(cotangents)), strict=True))
    return [
        jnp.zeros(kept.avals[i].shape, of[i].dtype) if found[i] is None
        else jnp.asarray(found[i]).astype(of[i].dtype)
        for i in wrt
    ]  # fmt: skip


def with_missing(cotangents: Sequence[Any], results: Sequence[Aval]) -> list[Any]:
    """Cotangents of all results from those of the inexact ones."""
    rest = iter(cotangents)
    return [next(rest) if a.is_inexact else np.zeros(a.shape, jax.dtypes.float0) for a in results]


__all__ = [
    "Aval", "Body", "Info", "Kept", "run_backward", "run_forward", "with_missing",
]  # fmt: skip
