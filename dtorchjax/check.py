"""`check_dfunction`: every row of a dfunction, by brute force on simulated shards.

No mesh is needed: the devices of an axis are a vmap with its name, in which collectives work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AbstractMesh

from dtorchjax.collectives import View, viewing
from dtorchjax.dfunction import Dfunction
from dtorchjax.errors import PlacementError
from dtorchjax.flat_call import FlatCall
from dtorchjax.local_calls import Aval
from dtorchjax.local_primitives import body_function, local_program
from dtorchjax.local_rules import is_differentiable, operand_cotangent, result_cotangent
from dtorchjax.local_tables import Call, Way, joint_ways, view_of, ways
from dtorchjax.placements import Partial, Placement, Replicate, Shard, divides, joint, local_shape

OTHER_AXIS = "any_axis"
"""The name of the simulated axis; bodies that name axes themselves run on those as well."""
TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float16": 2e-3, "bfloat16": 2e-2}


class CheckError(PlacementError, AssertionError):
    """A dfunction that does not do what its rule says. The message names row, operand and shard."""


class Report(NamedTuple):
    """What was checked: rows of placements, each on as many shards as its dims allow."""

    name: str
    checked: list[str]
    skipped: list[str]

    def __str__(self) -> str:
        lines = [f"dfunction `{self.name}`: {len(self.checked)} checks passed"]
        lines += [f"  ok       {row}" for row in self.checked]
        lines += [f"  skipped  {row}" for row in self.skipped]
        return "\n".join(lines)


def check_dfunction(
    fun: Dfunction, *args: Any, shards: Sequence[int] = (2, 3, 4), derivative: bool = True,
    **kwargs: Any,
) -> Report:  # fmt: skip
    """Run every row of a dfunction on simulated shards and compare with the call on whole arrays.

    Shapes, results and gradients; that results and gradients that are said to be whole agree on all
    shards; that a backward pass by hand is the derivative that JAX finds (unless `derivative` is
    False). `args` are arrays (ShapeDtypeStructs: random ones) of small dims that divide by some of
    `shards`, of which a row takes the first two that fit; a row that none fits is reported as
    skipped. Differences of sums in another order are allowed, 1e-4 of the greatest value in
    float32.

    Raises CheckError that names what is wrong, in which row, of which operand, on which shard.

    >>> from dtorchjax import dfunction
    >>> @dfunction(rule="b i, i o -> b o", linear="each")
    ... def linear(x, w):
    ...     return x @ w
    >>> report = check_dfunction(linear, jnp.ones((4, 2)), jnp.ones((2, 6)))
    >>> len(report.checked), report.skipped
    (13, [])
    """
    if hasattr(fun, "dfunction"):  # the class form
        fun = fun.dfunction()  # type: ignore[attr-defined]
    if not isinstance(fun, Dfunction):
        raise TypeError(f"check_dfunction takes a dfunction, not {type(fun).__name__}")
    args, kwargs = jax.tree.map(_value, (args, kwargs), is_leaf=_is_struct)
    flat, operands = fun.flat(args, kwargs)
    flat.settle()
    check = _Check(fun, flat, [jnp.asarray(x) for x in operands])
    check.plain(derivative)
    for sizes, names in check.meshes(shards):
        check.rows(sizes, names)
    return check.report()


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _value(x: Any) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(_random(x.shape, 0)).astype(x.dtype)
    return jnp.zeros(x.shape, x.dtype)


def _random(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=tuple(shape))


class _Check:
    def __init__(self, fun: Dfunction, flat: FlatCall, operands: list[Any]):
        self.fun, self.flat, self.body, self.operands = fun, flat, flat.body, operands
        self.of = tuple(Aval(tuple(x.shape), x.dtype) for x in operands)
        with viewing(View()) as view:
            self.results = self.body.fun(*operands)
        self.named = tuple(sorted(view.mentioned))
        self.info = self.body.info(self.of)
        self.inexact = [i for i, a in enumerate(self.of) if a.is_inexact]
        self.cotangents = [
            jnp.asarray(_random(self.results[i].shape, 7 + i)).astype(self.results[i].dtype)
            for i in self.info.inexact
        ]
        self.gradients: list[Any] = []
        self.done: dict[str, list[int]] = {}
        self.missed: dict[str, None] = {}

    def report(self) -> Report:
        checked = [f"{row}  ({n} shards)" for row, counts in self.done.items() for n in counts]
        return Report(self.fun.name, checked, [row for row in self.missed if row not in self.done])

    def fail(self, what: str) -> None:
        raise CheckError(f"dfunction `{self.fun.name}`: {what}")

    def attempt(self, where: str, run: Any, *xs: Any) -> Any:
        """What the body raises is a finding too."""
        try:
            return run(*xs)
        except (TypeError, ValueError, IndexError) as error:
            raise CheckError(f"dfunction `{self.fun.name}`: {where}: {error}") from error

    def plain(self, derivative: bool) -> None:
        """The call on whole arrays, and its gradients."""
        call = Call("forward", self.body, self.of, wrt=tuple(self.inexact))
        if not self.inexact or not self.info.inexact:
            return
        with viewing(View()):
            *results, kept = local_program(call, self.body.fun)(*self.operands)
            self.gradients = self.attempt(
                "the backward pass on whole arrays", self._backward, self.body.fun, self.operands,
                kept, self.cotangents,
            )  # fmt: skip
            for i, (x, y) in enumerate(zip(results, self.results, strict=True)):
                if (worst := _difference(x, y)) is not None:
                    self.fail(
                        f"result {i} of the forward pass is not that of the function: {worst}"
                    )
            if not (derivative and self.body.by_hand):
                return
            mine = _of_operands(self.body.fun, self.operands, self.inexact)
            inputs = [self.operands[i] for i in self.inexact]
            full = iter(self.cotangents)
            expected = jax.vjp(mine, *inputs)[1](
                [
                    next(full) if a.is_inexact else np.zeros(a.shape, jax.dtypes.float0)
                    for a in self.info.results
                ]
            )
        for i, x, y in zip(self.inexact, self.gradients, expected, strict=True):
            if (worst := _difference(x, y)) is not None:
                self.fail(
                    f"the gradient of {self.operand(i)} by its backward pass is not the derivative "
                    f"of the function, on whole arrays: {worst}"
                )

    def operand(self, i: int) -> str:
        for name, numbers in self.flat.shape.operands.items():
            if i in numbers:
                return f"operand {i} (`{name}`)"
        return f"operand {i}"

    def _backward(self, fun: Any, operands: Any, kept: Any, cotangents: Any) -> list[Any]:
        n = tuple(range(len(self.of)))
        call = Call("backward", self.body, self.of, wrt=tuple(self.inexact), given=n)
        return local_program(call, fun)(*operands, kept, *cotangents)

    def meshes(self, shards: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
        names = (*self.named, OTHER_AXIS)
        found: list[Any] = [((n,), (name,)) for name in names for n in shards]
        if self.body.layouts is not None:  # such rules may want two axes
            pair = (*names, "second_axis")[:2]
            found.append(((2, 2), pair))
        return found

    def rows(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
        mesh = AbstractMesh(sizes, names)
        call = Call("call", self.body, self.of, mesh=mesh)
        joint_table = joint_ways(call)
        table: list[tuple[Way, ...]] = (
            [(w,) for w in ways(call).values()]
            if joint_table is None
            else list(joint_table.values())
        )
        for chosen in table:
            text = " ; ".join(str(w.row) for w in chosen)
            if names[0] != OTHER_AXIS:
                text += f"  on {names[0]!r}"
            if len(self.done.get(text, ())) < 2:
                self.row(call, chosen, text, sizes, names)

    def row(
        self, call: Call, chosen: tuple[Way, ...], text: str, sizes: tuple[int, ...],
        names: tuple[str, ...],
    ) -> None:  # fmt: skip
        bases = [w.base for w in chosen if w.base is not None]
        ins = list(zip(*(b.inputs for b in bases), strict=True))
        outs = list(zip(*(b.outputs for b in bases), strict=True))
        avals = [*self.of, *self.info.results]
        if not all(divides(a.shape, p, sizes) for a, p in zip(avals, (*ins, *outs), strict=True)):
            self.missed[text] = None
            return
        places = [joint(p) for p in ins], [joint(p) for p in outs]
        view = view_of(call, chosen, *places, names)
        # a body may speak of axes of the whole mesh
        view = View((*names, *self.named), view.active, view.factors)
        where = f"row `{text}` on {math.prod(sizes)} shards"
        parts = [
            _split(x, p, sizes, i) for i, (x, p) in enumerate(zip(self.operands, ins, strict=True))
        ]
        differentiable = bool(self.gradients) and all(map(is_differentiable, bases))
        said, by_hand = self.body.cotangents, self.body.by_hand
        given = [
            _split(c, [result_cotangent(b, i, by_hand, said) for b in bases], sizes, 90 + i)
            for i, c in zip(self.info.inexact, self.cotangents, strict=True)
        ]

        def forward(operands: Any) -> Any:
            with viewing(view):
                return list(body_function(call, chosen, *places)(*operands))

        def backward(operands: Any, cotangents: Any) -> Any:
            with viewing(view):
                fun = body_function(call, chosen, *places)
                ahead = Call("forward", self.body, self.of, wrt=tuple(self.inexact))
                *results, kept = local_program(ahead, fun)(*operands)
                return results, self._backward(fun, operands, kept, cotangents)

        def on_all(run: Any, *xs: Any) -> Any:
            for name in reversed(names):
                run = jax.vmap(run, axis_name=name)
            return self.attempt(where, run, *xs)

        for i, (x, p) in enumerate(zip(on_all(forward, parts), outs, strict=True)):
            self.compare(x, self.results[i], p, sizes, f"{where}: result {i}")
        if differentiable:
            results, gradients = on_all(backward, parts, given)
            for i, (x, p) in enumerate(zip(results, outs, strict=True)):
                what = f"{where}: result {i} of the forward pass"
                self.compare(x, self.results[i], p, sizes, what)
            for i, g, expected in zip(self.inexact, gradients, self.gradients, strict=True):
                p = [operand_cotangent(b, i, said) for b in bases]
                self.compare(g, expected, p, sizes, f"{where}: the gradient of {self.operand(i)}")
        self.done.setdefault(text, []).append(math.prod(sizes))

    def compare(
        self, parts: Any, whole: Any, placements: Sequence[Placement], sizes: tuple[int, ...],
        what: str,
    ) -> None:  # fmt: skip
        said = ",".join(map(str, placements))
        wanted = local_shape(whole.shape, joint(placements), sizes)
        here = tuple(parts.shape[len(sizes) :])
        if here != wanted:
            self.fail(f"{what} has local shape {here}, where {said} says {wanted}")
        parts = np.asarray(parts.astype(jnp.float32) if parts.dtype == jnp.bfloat16 else parts)
        whole = np.asarray(whole.astype(jnp.float32) if whole.dtype == jnp.bfloat16 else whole)
        found = np.zeros(whole.shape, parts.dtype)
        for place in np.ndindex(*sizes):
            index = _block(whole.shape, placements, sizes, place)
            first = tuple(
                0 if isinstance(p, Replicate) else i for i, p in zip(place, placements, strict=True)
            )
            same = place != first
            if same and (worst := _difference(parts[place], parts[first], 1e-6)) is not None:
                self.fail(
                    f"{what} is said to be the same on all shards ({said}); shard {place} and "
                    f"shard {first} differ: {worst}{self._named_hint()}"
                )
            if not same:
                if any(isinstance(p, Partial) for p in placements):
                    found[index] = _reduce(found[index], parts[place], placements, place)
                else:
                    found[index] = parts[place]
        if (worst := _difference(found, whole)) is not None:
            shard = _shard_of(worst.place, whole.shape, placements, sizes)
            self.fail(f"{what} ({said}) is wrong{shard}: {worst}{self._named_hint()}")

    def _named_hint(self) -> str:
        if not self.named:
            return ""
        return (
            f". The body names the mesh axes {', '.join(map(repr, self.named))}, but a row holds "
            "on every axis: dt.axes_of(letter) gives the axes of a call"
        )


class _Worst(NamedTuple):
    place: tuple[int, ...]
    found: Any
    expected: Any

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.found!s} instead of {self.expected!s}{at}"


def _difference(found: Any, expected: Any, tolerance: float | None = None) -> _Worst | None:
    """The place where two arrays differ most, None if they agree."""
    if tuple(np.shape(found)) != tuple(np.shape(expected)):
        return _Worst((), f"shape {np.shape(found)}", f"shape {np.shape(expected)}")
    kind = str(np.dtype(found.dtype)) if found.dtype != jnp.bfloat16 else "bfloat16"
    tolerance = TOLERANCE.get(kind, 1e-4) if tolerance is None else tolerance
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        bad = np.asarray(found != expected)
        wide = bad.astype(float)
    else:
        one, two = np.asarray(found, np.complex128), np.asarray(expected, np.complex128)
        scale = np.max(np.abs(two[np.isfinite(two)]), initial=1e-30)
        equal = (one == two) | (np.isnan(one) & np.isnan(two))
        wide = np.where(equal, 0.0, np.abs(one - two))
        wide = np.where(np.isnan(wide), np.inf, wide)
        bad = wide > tolerance * scale
    if not bad.any():
        return None
    place = tuple(int(i) for i in np.unravel_index(np.argmax(wide), wide.shape))
    return _Worst(place, np.asarray(found)[place], np.asarray(expected)[place])


def _of_operands(fun: Any, operands: Sequence[Any], which: Sequence[int]) -> Any:
    def of(*xs: Any) -> Any:
        full = list(operands)
        for i, x in zip(which, xs, strict=True):
            full[i] = x
        return fun(*full)

    return of


# ---- shards --------------------------------------------------------------------------------------


def _block(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int],
    place: Sequence[int],
) -> tuple[slice, ...]:  # fmt: skip
    """The part of an array that one shard has, major axes first."""
    starts, lengths = [0] * len(shape), list(shape)
    for p, n, i in zip(placements, sizes, place, strict=True):
        if isinstance(p, Shard):
            lengths[p.dim] //= n
            starts[p.dim] += i * lengths[p.dim]
    return tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))


def _split(x: Any, placements: Sequence[Placement], sizes: tuple[int, ...], seed: int) -> Any:
    """The parts of all shards, with one leading dim per axis; terms of a partial sum differ."""
    terms: dict[tuple[int, ...], Any] = {}
    partial = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    places = list(itertools.product(*(range(sizes[a]) for a in partial)))
    left = x
    for number, at in enumerate(places[:-1]):
        kind = placements[partial[0]]
        if isinstance(kind, Partial) and kind.op != "sum":
            terms[at] = _other_term(x, kind.op, number)
            continue
        noise = _random(x.shape, seed + number) * (2 * float(jnp.max(jnp.abs(x), initial=1)))
        terms[at] = jnp.asarray(noise).astype(x.dtype)
        left = left - terms[at]
    terms[places[-1]] = left
    found = []
    for place in np.ndindex(*sizes):
        term = terms[tuple(place[a] for a in partial)]
        found.append(term[_block(x.shape, placements, sizes, place)])
    stacked = jnp.stack(found)
    return stacked.reshape((*sizes, *stacked.shape[1:]))


def _other_term(x: Any, op: str, number: int) -> Any:
    if op == "prod":
        return jnp.ones_like(x)
    return x - (number + 1) if op == "max" else x + (number + 1)


def _reduce(so_far: Any, part: Any, placements: Sequence[Placement], place: Sequence[int]) -> Any:
    op = next(p.op for p in placements if isinstance(p, Partial))
    first = all(i == 0 for i, p in zip(place, placements, strict=True) if isinstance(p, Partial))
    if first:
        return part
    return {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op](
        so_far, part
    )


def _shard_of(
    at: tuple[int, ...], shape: Sequence[int], placements: Sequence[Placement],
    sizes: tuple[int, ...],
) -> str:  # fmt: skip
    for place in np.ndindex(*sizes):
        block = _block(shape, placements, sizes, place)
        if len(at) == len(block) and all(
            s.start <= i < s.stop for s, i in zip(block, at, strict=True)
        ):
            return f" on shard {place}" if any(isinstance(p, Shard) for p in placements) else ""
    return ""


__all__ = ["CheckError", "Report", "check_dfunction"]
