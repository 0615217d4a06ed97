"""THE oracle: what a row of a rule's table claims, tried by brute force. No mesh is needed.

A row is right if every device, running the primitive's local program on its own parts, gets its
part of what one device gets from the whole operands; and if the devices' own derivatives make up
the derivative of the whole. Everything raises `WrongRow`; nothing returns a verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import numpy as jnp
from simulated import Coordinate, Misplaced, check_placed, devices, is_inexact, on_host, shards

from dtorchjax import exchange
from dtorchjax.notation import PlacementSignature, Row
from dtorchjax.padding import filled, summed_up
from dtorchjax.placements import Allowed, Joint, Partial, R, Shard, divides, joint, local_shape
from dtorchjax.registry import LOCALS, RULES, LocalCall, linear_position
from dtorchjax.rows import joint_rows as rows_on_a_mesh
from dtorchjax.rows import lie_together

COUNTS = (2, 3)
"""Numbers of devices along the one simulated axis."""

TOLERANCE = {"float32": 2e-5, "complex64": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
"""Of sums in another order, relative to the largest number around. Other dtypes must be equal."""

compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Programs here run a few times on a few numbers: compiling them is what takes time."""


class WrongRow(AssertionError):
    """A row does not hold; the message says for which primitive, where and by how much."""


# ---- one equation -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Equation:
    """A primitive with parameters, and one or more sets of whole operands to try it on."""

    name: str
    primitive: Any
    params: dict[str, Any]
    in_avals: list[Any]
    out_avals: list[Any]
    operands: list[list[Any]]

    def __post_init__(self) -> None:
        self._compiled: dict[Any, Any] = {}
        self._results: dict[int, list[Any]] = {}
        self._together: dict[Any, tuple] = {}  # example arguments of programs compiled as one

    def signature(self) -> PlacementSignature:
        return RULES[self.name].signature(self.in_avals, self.out_avals, dict(self.params))

    def bind(self, place: Any, *operands: Any) -> list[Any]:
        found = self.primitive.bind(*operands, **self.params)
        return list(found) if isinstance(found, list | tuple) else [found]

    def whole(self, data: int) -> list[Any]:
        """What one device gets."""
        if data not in self._results:
            found = self.run("whole", self.bind, np.zeros(1, np.int32), *self.operands[data])
            self._results[data] = [on_host(x) for x in found]
        return self._results[data]

    def program(
        self, inputs: Sequence[Joint], outputs: Sequence[Joint], sizes: Sequence[int]
    ) -> tuple[Any, Callable[..., list[Any]]]:
        """`(key, program)`: the local program, `program(coordinate, *parts)`.

        Equal keys stand for the same program.
        """
        local = LOCALS.get(self.name)
        even = self.divides(inputs, outputs, sizes)
        if local is None and even:
            shapes = zip(self.in_avals, inputs, strict=True)
            return tuple(local_shape(a.shape, w, sizes) for a, w in shapes), self.bind
        where = (kindless(inputs), kindless(outputs)) if even else (tuple(inputs), tuple(outputs))

        def program(place: Any, *parts: Any) -> list[Any]:
            def position(axes: Sequence[int]) -> Any:
                index: Any = 0
                for axis in axes:
                    index = index * sizes[axis] + place[axis]
                return index

            if not even:  # as `lower` does it
                parts = tuple(
                    filled(x, a.shape, w, sizes, position, summed_up(w, outputs, len(a.shape)))
                    for x, a, w in zip(parts, self.in_avals, inputs, strict=True)
                )
            if local is None:
                return self.bind(place, *parts)
            call = LocalCall(
                self.primitive, self.params, self.in_avals, self.out_avals, *where, tuple(sizes),
                position,
            )  # fmt: skip
            found = local(call, *parts)
            return list(found) if isinstance(found, list | tuple) else [found]

        return (*where, tuple(sizes)), program

    def all_at_once(
        self, inputs: Sequence[Joint], outputs: Sequence[Joint], n: int
    ) -> Callable[..., list[Any]]:
        """The local program of all devices of one axis, with its collectives, on stacked parts."""

        def program(*parts: Any) -> list[Any]:
            position = lambda axes: linear_position(axes, ["axis"], [n])  # noqa: E731
            parts = tuple(
                filled(x, a.shape, w, [n], position, summed_up(w, outputs, len(a.shape)))
                for x, a, w in zip(parts, self.in_avals, inputs, strict=True)
            )
            call = LocalCall(
                self.primitive, self.params, self.in_avals, self.out_avals, inputs, outputs, (n,),
                position, ["axis"],
            )  # fmt: skip
            with mock.patch.object(exchange, "permuted", permuted_by_gathering):
                found = LOCALS[self.name](call, *parts)
            return list(found) if isinstance(found, list | tuple) else [found]

        differ = tuple(None if w.placements == (R,) else 0 for w in inputs)
        return compiled(jax.vmap(program, differ, axis_name="axis", axis_size=n))

    def run(self, key: Any, program: Callable[..., Any], *arguments: Any) -> Any:
        """Run a program, compiled."""
        if key in self._together:
            keys, everything = list(self._together), {**self._together, key: arguments}
            try:
                return self._compiled["together"](list(everything.values()))[keys.index(key)]
            except Exception:  # one of them is wrong; alone, each tells its own story
                self._together = {}
        if key not in self._compiled:
            self._compiled[key] = compiled(program)
        return self._compiled[key](*arguments)

    def prepare(self, rows: Sequence[Row], backward: Sequence[int] = ()) -> None:
        """Compile what these rows will need as one program, which takes half the time.

        `backward`: the numbers of devices for which derivatives will be asked.
        """
        programs: dict[Any, Any] = {"whole": self.bind}
        examples: dict[Any, tuple] = {"whole": (ORIGIN, *self.operands[0])}
        for row, n in itertools.product(rows, COUNTS):
            inputs, outputs = placed(row)
            if row.by or not self.fits(inputs, outputs, (n,), sends=False):
                continue
            key, program = self.program(inputs, outputs, (n,))
            parts = [p[0,] for p in self.parts(0, inputs, (n,))]
            programs[key], examples[key] = program, (ORIGIN, *parts)
            if n in backward and self.has_derivative(row) and self.divides(inputs, outputs, (n,)):
                cotangents = [p.get((0,)) for p in self.cotangents(outputs, (n,))]
                programs[key, "back"] = self.pull_back(program)
                examples[key, "back"] = ORIGIN, parts, cotangents
                programs["whole", "back"] = self.pull_back(self.bind)
                examples["whole", "back"] = ORIGIN, self.operands[0], self.whole_cotangents()
        several = list(programs.values())
        self._compiled["together"] = compiled(
            lambda everything: [f(*some) for f, some in zip(several, everything, strict=True)]
        )
        self._together = dict(zip(examples, jax.device_put(list(examples.values())), strict=True))

    # -- data

    def divides(
        self, inputs: Sequence[Joint], outputs: Sequence[Joint], sizes: Sequence[int]
    ) -> bool:
        """Every sharded dim has equal parts, so these placements can be tried."""
        pairs = zip((*inputs, *outputs), (*self.in_avals, *self.out_avals), strict=True)
        return all(divides(aval.shape, where.placements, sizes) for where, aval in pairs)

    def in_groups(
        self, inputs: Sequence[Joint], outputs: Sequence[Joint], sizes: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """(groups, devices) of every row whose devices have to divide its groups."""
        for row in self.signature().rows if self.name in RULES else ():
            axes = [
                a
                for a in range(len(sizes))
                if row.inputs == tuple(j.placements[a] for j in inputs)
                and row.outputs == tuple(j.placements[a] for j in outputs)
            ]
            if row.groups and axes:
                yield row.groups, math.prod(sizes[a] for a in axes)

    def fits(
        self, inputs: Sequence[Joint], outputs: Sequence[Joint], sizes: Sequence[int], sends: bool
    ) -> bool:
        """These placements are among the rows of a program in which every size may be uneven."""
        avals = [*self.in_avals, *self.out_avals]
        if any(groups % devices for groups, devices in self.in_groups(inputs, outputs, sizes)):
            return False
        if self.divides(inputs, outputs, sizes):
            return True
        blocks = {
            (aval.shape[p.dim], p.blocks)
            for where, aval in zip((*inputs, *outputs), avals, strict=True)
            for p in where.placements
            if isinstance(p, Shard) and p.blocks > 1
        }
        every = Allowed(frozenset(n for a in avals for n in a.shape if n > 1), frozenset(blocks))
        allowed = RULES[self.name].allowed(every)
        return lie_together((*inputs, *outputs), avals, sizes, allowed, sends)

    def parts(
        self, data: int, inputs: Sequence[Joint], sizes: Sequence[int]
    ) -> list[dict[Coordinate, Any]]:
        rng = np.random.default_rng([data, *sizes])
        operands = zip(self.operands[data], inputs, strict=True)
        return [shards(x, where, sizes, rng) for x, where in operands]

    def whole_cotangents(self) -> list[Any]:
        """One for every inexact result, None for the others."""
        rng = np.random.default_rng(0)
        return [
            (rng.integers(-16, 17, a.shape) / 8).astype(a.dtype) if is_inexact(a.dtype) else None
            for a in self.out_avals
        ]

    def cotangents(
        self, outputs: Sequence[Joint], sizes: Sequence[int]
    ) -> list[dict[Coordinate, Any]]:
        rng = np.random.default_rng(sizes)
        return [
            {} if c is None else shards(c, dual(where), sizes, rng)
            for c, where in zip(self.whole_cotangents(), outputs, strict=True)
        ]

    # -- derivatives

    def differentiable(self) -> list[int]:
        """The operands that have gradients, if some result has a cotangent."""
        if not any(is_inexact(a.dtype) for a in self.out_avals):
            return []
        return [i for i, a in enumerate(self.in_avals) if is_inexact(a.dtype)]

    def has_derivative(self, row: Row) -> bool:
        """Only R, S and P(sum) have dual placements."""
        placements = row.inputs + row.outputs
        other = any(isinstance(p, Partial) and p.op != "sum" for p in placements)
        return bool(self.differentiable()) and not other

    def pull_back(self, program: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """`(coordinate, parts, cotangents) -> gradients` of the inexact operands."""
        wanted = self.differentiable()
        kept = [j for j, a in enumerate(self.out_avals) if is_inexact(a.dtype)]

        def back(place: Any, parts: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            def forward(*inexact: Any) -> list[Any]:
                full = list(parts)
                for i, x in zip(wanted, inexact, strict=True):
                    full[i] = x
                results = program(place, *full)
                return [results[j] for j in kept]

            _, pull = jax.vjp(forward, *(parts[i] for i in wanted))
            return list(pull([cotangents[j] for j in kept]))

        return back


def permuted_by_gathering(x: Any, names: Sequence[str], pairs: list[tuple[int, int]]) -> Any:
    """A permute in which some devices send nothing, which `jax.vmap` does not know."""
    everything = jax.lax.all_gather(x, names[0])
    sender = np.full(len(everything), -1)
    for source, target in pairs:
        sender[target] = source
    mine = jnp.asarray(sender)[jax.lax.axis_index(names[0])]
    return jnp.where(mine < 0, jnp.zeros_like(x), everything[mine])


ORIGIN = np.zeros(1, np.int32)


def at(place: Coordinate) -> np.ndarray:
    return np.array(place, np.int32)


def placed(row: Row) -> tuple[tuple[Joint, ...], tuple[Joint, ...]]:
    """A row's placements on a mesh of one axis."""
    return tuple(joint((p,)) for p in row.inputs), tuple(joint((p,)) for p in row.outputs)


def kindless(where: Sequence[Joint]) -> tuple[Joint, ...]:
    """What a local program may depend on: that an operand is partial, but not which kind of it."""
    return tuple(
        joint([Partial() if isinstance(p, Partial) else p for p in w.placements], w.order)
        for w in where
    )


def dual(where: Joint) -> Joint:
    """The placement of a cotangent: terms for what is replicated, and the other way round."""
    swap: dict[Any, Any] = {R: Partial(), Partial(): R}
    return joint([swap.get(p, p) for p in where.placements], where.order)


def tolerance_of(*dtypes: Any) -> float:
    return max((TOLERANCE.get(str(d), 0.0) for d in dtypes), default=0.0)


# ---- declared rows -------------------------------------------------------------------------------


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is a WrongRow that says about what."""
    try:
        yield
    except (WrongRow, Misplaced) as error:
        raise WrongRow(f"{what}{error}") from None
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise WrongRow(f"{what}raises {type(error).__name__}: {first}") from error


def check_row(equation: Equation, row: Row, exact: bool = False) -> int:
    """Raises WrongRow unless the row holds on every data set and for every number of devices.

    `exact`: floats must be equal, too. Returns on how many numbers of devices it could be tried.
    """
    tried = 0
    inputs, outputs = placed(row)
    split = any(p != R for p in row.inputs + row.outputs)  # else all numbers are alike
    for n in COUNTS if split else COUNTS[:1]:
        if equation.fits(inputs, outputs, (n,), bool(row.by)):
            with _about(f"`{equation.name}` row {row} on {n} devices: "):
                check_joint(equation, inputs, outputs, (n,), exact, bool(row.by))
            tried += 1
    return tried


def check_joint(
    equation: Equation,
    inputs: Sequence[Joint],
    outputs: Sequence[Joint],
    sizes: Sequence[int],
    exact: bool = False,
    together: bool = False,
) -> None:
    """Raises WrongRow unless these placements, on any simulated mesh, are right.

    `together`: devices of the one axis send each other something.
    """
    if together:
        at_once = equation.all_at_once(inputs, outputs, sizes[0])
    else:
        program = equation.program(inputs, outputs, sizes)
    in_dtypes = [a.dtype for a in equation.in_avals]
    for data in range(len(equation.operands)):
        parts = equation.parts(data, inputs, sizes)
        results: list[dict[Coordinate, Any]] = [{} for _ in outputs]
        if together:
            stacked = at_once(
                *(
                    p[0,] if w.placements == (R,) else jnp.stack([p[d] for d in devices(sizes)])
                    for p, w in zip(parts, inputs, strict=True)
                )
            )
        for place in devices(sizes):
            if together:
                found = [x[place] for x in stacked]
            else:
                found = equation.run(*program, at(place), *(p[place] for p in parts))
            for result, x in zip(results, found, strict=True):
                result[place] = on_host(x)
        whole = equation.whole(data)
        for j, (result, where, x) in enumerate(zip(results, outputs, whole, strict=True)):
            rounds = is_inexact(x.dtype) and not exact
            with _about(f"result {j}, " if len(whole) > 1 else ""):
                tolerance = tolerance_of(x.dtype, *in_dtypes) if rounds else 0.0
                check_placed(result, where, sizes, x, tolerance)


def check_vjp(equation: Equation, row: Row, counts: Sequence[int] = COUNTS) -> int:
    """Raises WrongRow unless the devices' own derivatives make up the derivative of the whole.

    Every device differentiates its local program; cotangents and gradients lie in the dual
    placements. Applies to rows of R, S and P(sum). Returns how many numbers of devices were tried.
    """
    if row.by or not equation.has_derivative(row):
        return 0  # what devices send each other is differentiated in the whole program only
    tried, wanted = 0, equation.differentiable()
    inputs, outputs = placed(row)
    for n in counts:
        if not equation.divides(inputs, outputs, (n,)):
            continue
        tried += 1
        with _about(f"`{equation.name}` row {row} on {n} devices, derivative: "):
            operands, cotangents = equation.operands[0], equation.whole_cotangents()
            whole = equation.run(
                ("whole", "back"), equation.pull_back(equation.bind), ORIGIN, operands, cotangents
            )
            key, program = equation.program(inputs, outputs, (n,))
            parts = equation.parts(0, inputs, (n,))
            pulled = equation.cotangents(outputs, (n,))
            gradients: list[dict[Coordinate, Any]] = [{} for _ in wanted]
            for place in devices((n,)):
                found = equation.run(
                    (key, "back"), equation.pull_back(program), at(place),
                    [p[place] for p in parts], [p.get(place) for p in pulled],
                )  # fmt: skip
                for gradient, g in zip(gradients, found, strict=True):
                    gradient[place] = np.asarray(g)
            for i, gradient, x in zip(wanted, gradients, whole, strict=True):
                with _about(f"gradient of operand {i}, "):
                    tolerance = 2 * tolerance_of(x.dtype)
                    check_placed(
                        gradient, dual(inputs[i]), (n,), np.asarray(x), tolerance, only_finite=True
                    )
    return tried


def joint_rows(
    equation: Equation, rows: Sequence[Row], sizes: Sequence[int]
) -> list[tuple[tuple[Joint, ...], tuple[Joint, ...]]]:
    """What a planner may choose from, if every dim may be uneven, or in the rows' blocks."""
    avals = [*equation.in_avals, *equation.out_avals]
    blocks = {
        (aval.shape[p.dim], p.blocks)
        for row in rows
        for p, aval in zip((*row.inputs, *row.outputs), avals, strict=True)
        if isinstance(p, Shard) and p.blocks > 1
    }
    every = Allowed(frozenset(n for a in avals for n in a.shape if n > 1), frozenset(blocks))
    found = rows_on_a_mesh(
        [rows] * len(sizes), equation.in_avals, equation.out_avals, tuple(sizes),
        RULES[equation.name].allowed(every),
    )  # fmt: skip
    return [(row.inputs, row.outputs) for row in found]


# ---- rows that hold but are not declared --------------------------------------------------------


def choices(aval: Any, n: int) -> list[Any]:
    """Every placement that an array can have on an axis of n devices."""
    name = str(aval.dtype)
    kinds = ("sum", "max", "min", "prod")
    if aval.shape == () and not is_inexact(aval.dtype):  # an index, a predicate: terms of no use
        kinds = ()
    elif name == "bool":
        kinds = ("max", "min")
    elif name.startswith("complex"):
        kinds = ("sum", "prod")
    elif name.startswith("key<"):
        kinds = ()
    dims = [d for d, size in enumerate(aval.shape) if size and size % n == 0]
    return [R, *map(Shard, dims), *map(Partial, kinds)]


def covers(strong: Row, weak: Row) -> bool:
    """`weak` follows from `strong`, as what is replicated is also a P(max) and a P(min)."""

    def serves(given: Any, wanted: Any) -> bool:
        return given == wanted or (given == R and wanted in (Partial("max"), Partial("min")))

    return all(serves(w, s) for w, s in zip(weak.inputs, strong.inputs, strict=True)) and all(
        serves(s, w) for s, w in zip(strong.outputs, weak.outputs, strict=True)
    )


def missed_rows(
    equation: Equation,
    rows: Sequence[Row],
    exact: bool = False,
    budget: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows that hold on all data for all numbers of devices and follow from no declared row.

    `exact`: floats must be equal, too.
    `budget`: look at so many placements of the operands, picked at random.
    """
    shapes = [a.shape for a in (*equation.in_avals, *equation.out_avals)]
    dims = [size for shape in shapes for size in shape]
    counts = [n for n in COUNTS if any(size % n == 0 for size in dims)] or COUNTS
    n = math.lcm(*counts)
    tried = list(itertools.product(*(choices(a, n) for a in equation.in_avals)))
    if budget is not None and len(tried) > budget:
        tried = random.Random(seed).sample(tried, budget)
    found: list[Row] = []
    for inputs in tried:
        holding = [set(choices(a, n)) for a in equation.out_avals]
        for count, data in itertools.product(counts, range(len(equation.operands))):
            _drop_wrong(equation, inputs, count, data, holding, exact)
            if not all(holding):
                break
        for options in holding:
            if R in options:  # the others say less
                options -= {Partial("max"), Partial("min")}
        found += [Row(tuple(inputs), outputs) for outputs in itertools.product(*holding)]
    found = [row for row in found if not any(covers(known, row) for known in rows)]
    return sorted(
        (row for row in found if not any(other != row and covers(other, row) for other in found)),
        key=str,
    )


def _drop_wrong(
    equation: Equation,
    inputs: Sequence[Any],
    n: int,
    data: int,
    holding: list[set[Any]],
    exact: bool,
) -> None:
    """Take out of `holding`, the placements that every result may have, those that are wrong."""
    wheres = tuple(joint((p,)) for p in inputs)
    parts = equation.parts(data, wheres, (n,))
    # only a program of its own may depend on where the results are to lie
    together = [tuple(sorted(options, key=str)) for options in holding]
    for outputs in itertools.product(*together) if equation.name in LOCALS else [together]:
        claimed = outputs if equation.name in LOCALS else tuple(o[0] for o in outputs)
        program = equation.program(wheres, [joint((p,)) for p in claimed], (n,))
        results: list[dict[Coordinate, Any]] = [{} for _ in holding]
        try:
            for place in devices((n,)):
                found = _run_or_refuse(equation, *program, at(place), *(p[place] for p in parts))
                for result, x in zip(results, found, strict=True):
                    result[place] = on_host(x)
        except Exception:  # such parts do not fit together
            results = []
        for j, options in enumerate(outputs):
            for p in options if isinstance(options, tuple) else (options,):
                x = equation.whole(data)[j]
                tolerance = tolerance_of(x.dtype, *(a.dtype for a in equation.in_avals))
                try:
                    if not results:
                        raise Misplaced
                    rounds = is_inexact(x.dtype) and not exact
                    check_placed(results[j], joint((p,)), (n,), x, tolerance if rounds else 0.0)
                except Misplaced:
                    holding[j].discard(p)


def _run_or_refuse(equation: Equation, key: Any, program: Any, place: Any, *parts: Any) -> Any:
    """Remembers programs that cannot run, so that each is traced only once."""
    refused = equation._compiled.get(("refused", key))
    if refused is not None:
        raise refused
    try:
        return equation.run(key, program, place, *parts)
    except Exception as error:
        equation._compiled["refused", key] = error
        raise
