"""Rules and local programs by primitive name.

A rule says which placements are right; a local program says what one device computes. Neither
knows of cost. Names are the primitives' own: "dot_general", "scatter-add".
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from dtorchjax.errors import PlacementError
from dtorchjax.exchange import Span, counting, entry, spans, window
from dtorchjax.notation import (
    Dims,
    PlacementSignature,
    parse_row,
    parse_sentence,
    sentence_rows,
)
from dtorchjax.padding import filled
from dtorchjax.parts import lengths, rows_of
from dtorchjax.placements import Allowed, Joint, Partial, local_shape
from dtorchjax.sent import Sent, collectives_of

RULES: dict[str, Any] = {}
"""Primitive name -> its rule. Declared once: a second declaration raises, naming both places."""

LOCALS: dict[str, LocalProgram] = {}
"""Primitive name -> its local program; without one the primitive is bound as it is. Once, too."""

REFUSALS: dict[str, str] = {}
"""Primitive name -> why it has no rule."""

OPS: dict[str, Any] = {}
"""Operator name -> operator. Once, too."""

KNOWS: dict[str, tuple[bool, bool]] = {}
"""Primitive name -> whether its local program knows parts that are not full, and blocks."""

SENDS: set[str] = set()
"""Primitives whose local programs have collectives of their own, in rows that name them."""

LocalProgram = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to write a primitive's sentence, and what holds besides (see `notation.sentence_rows`).

    `sentence(*dims, **params)` gets one `Dims` per operand and returns the sentence, or a tuple of
    the sentence and more rows as text. A parameter named `out` (keyword only) gets the results'
    `Dims`. `when(in_avals, out_avals, params)` says whether partial placements pass at all.
    """

    name: str
    sentence: Callable[..., str | tuple[str, Sequence[str]]]
    partial: str = "sum"
    linear: str | None = None
    moves: bool = False
    monotone: bool = False
    when: Callable[..., bool] | None = None
    place: str = ""

    def allowed(self, found: Allowed) -> Allowed:
        """What of the placements that occur in a program this primitive can take."""
        uneven, blocks = KNOWS.get(self.name, (True, True))
        return Allowed(
            found.uneven if uneven else frozenset(), found.blocks if blocks else frozenset()
        )

    def communication(
        self, primitive: Any, in_avals: Sequence[Any], out_avals: Sequence[Any],
        params: dict[str, Any], inputs: Sequence[Joint], outputs: Sequence[Joint],
        sizes: tuple[int, ...],
    ) -> list[Sent]:  # fmt: skip
        """The collectives of the local program in these placements, read from a trace."""
        if self.name not in SENDS:
            return []
        key: Any = None
        try:
            types = tuple((a.shape, a.dtype) for a in (*in_avals, *out_avals))
            key = (LOCALS[self.name], types, *sorted(params.items()), inputs, outputs, sizes)
            if key in _sent:
                return _sent[key]
        except TypeError:  # a parameter that cannot be hashed or sorted
            key = None
        names = [f"axis {a}" for a in range(len(sizes))]
        call = LocalCall(
            primitive, params, in_avals, out_avals, inputs, outputs, sizes,
            lambda axes: linear_position(axes, names, sizes), names,
        )  # fmt: skip
        parts = [jax.ShapeDtypeStruct(call.in_shape(i), a.dtype) for i, a in enumerate(in_avals)]
        program = functools.partial(LOCALS[self.name], call)
        with counting():
            found = collectives_of(program, parts, list(zip(names, sizes, strict=True)))
        result = [sent.numbered({n: i for i, n in enumerate(names)}) for sent in found]
        if key is not None:
            _sent[key] = result
        return result

    def signature(
        self, in_avals: Sequence[Any], out_avals: Sequence[Any], params: dict[str, Any]
    ) -> PlacementSignature:
        """The table for these shapes and parameters."""
        dims = [
            Dims((f"{_letter(i)}{d}" for d in range(len(aval.shape))), aval.shape, aval.dtype)
            for i, aval in enumerate(in_avals)
        ]
        if "out" in inspect.signature(self.sentence).parameters:
            outs = [
                Dims((f"out{i}_{d}" for d in range(len(aval.shape))), aval.shape)
                for i, aval in enumerate(out_avals)
            ]
            params = {**params, "out": outs}
        said = self.sentence(*dims, **params)
        text, extra = (said, ()) if isinstance(said, str) else said
        params.pop("out", None)
        passes = self.when is None or self.when(in_avals, out_avals, params)
        rows = sentence_rows(
            parse_sentence(text),
            partial=self.partial,
            linear=self.linear if passes else None,
            moves=self.moves and passes,
            monotone=self.monotone and passes,
        )
        rows += [parse_row(row) for row in extra]
        avals = [*in_avals, *out_avals]
        return PlacementSignature(
            tuple(
                row
                for row in rows
                if all(summable(p, a) for p, a in zip(row.inputs + row.outputs, avals, strict=True))
            )
        )


_sent: dict[Any, list[Sent]] = {}
"""What local programs send, by what that depends on."""


def _letter(operand: int) -> str:
    return chr(ord("a") + operand) if operand < 26 else f"x{operand}_"


def summable(placement: Any, aval: Any) -> bool:
    """Truth values have a max and a min but no sum, complex numbers the reverse; keys none."""
    if not isinstance(placement, Partial):
        return True
    name = str(aval.dtype)
    if name == "bool":
        return placement.op in ("max", "min")
    if name.startswith("complex"):
        return placement.op in ("sum", "prod")
    return not name.startswith("key<")


def caller(*files: str) -> str:
    """Where a declaration stands in the user's file; `files` are passed over."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename in (__file__, *files):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _declare(name: str, entry: Rule) -> None:
    if name in RULES:
        raise PlacementError(
            f"primitive {name!r} has a rule already ({RULES[name].place}); "
            f"the second one is at {entry.place}"
        )
    if name in REFUSALS:
        raise PlacementError(f"primitive {name!r} is refused already: {REFUSALS[name]}")
    RULES[name] = entry


def rule(names: str, **kinds: Any) -> Callable[[Callable], Callable]:
    """Declare how the primitives in `names` (separated by blanks) write their sentence.

    >>> @rule("doctest_matmul", linear="each")
    ... def _(x, y, **_):
    ...     return f"{x}, {y.shared([0], x[1])} -> {x[0]} {y[1]}"

    Keywords are the fields of `Rule`. Raises PlacementError if a name has a rule.
    """
    place = caller()

    def declare(sentence: Callable) -> Callable:
        for name in names.split():
            _declare(name, Rule(name, sentence, place=place, **kinds))
        return sentence

    return declare


def elementwise(names: str, **kinds: Any) -> None:
    """Primitives whose results have their operands' dims; an operand may have size 1 or none."""
    place = caller()

    def sentence(*operands: Dims, out: Sequence[Dims], **_: Any) -> str:
        return elementwise_sentence(operands, out)

    for name in names.split():
        _declare(name, Rule(name, sentence, place=place, **kinds))


def declare_op_rule(
    name: str, sentence: Callable[..., Any], kinds: dict[str, Any], place: str
) -> None:
    """The rule of an operator's primitive, whose parameters hold the static arguments."""
    takes = inspect.signature(sentence).parameters

    def of_params(*dims: Dims, static: Any, **params: Any) -> Any:
        return sentence(*dims, **dict(static), **{k: params[k] for k in ("out",) if k in takes})

    def with_out(*dims: Dims, out: Any, **params: Any) -> Any:
        return of_params(*dims, out=out, **params)

    written = with_out if "out" in takes else of_params
    _declare(name, Rule(name, written, place=place, **kinds))


def elementwise_sentence(operands: Sequence[Dims], out: Sequence[Dims]) -> str:
    """The sentence of an elementwise primitive, for rules that add rows to it."""
    result = Dims((f"d{d}" for d in range(len(out[0]))), out[0].shape)
    words = [
        "-"
        if len(x) == 0
        else " ".join(
            "1" if size == 1 and full != 1 else factor
            for factor, size, full in zip(result, x.shape, result.shape, strict=True)
        )
        for x in operands
    ]
    return f"{', '.join(words)} -> {', '.join([str(result)] * len(out))}"


def local(
    names: str, uneven: bool = False, blocks: bool = False, sends: bool = False
) -> Callable[[LocalProgram], LocalProgram]:
    """Declare what one device computes: `def _(call, *operands): return call.bind(*operands, ...)`.

    `call` is a `LocalCall`; the operands are one device's parts. `uneven`: it also knows parts that
    end in padding, whose place is `call.span`. What a row sums up is filled there with zeros (or
    what else does not count) before it runs; other padding may hold anything. `blocks`: it knows
    parts of several blocks. Without these, such placements are not used. `sends`: in rows that say
    `by ...` it has collectives, over `call.names`.
    """

    def declare(program: LocalProgram) -> LocalProgram:
        for name in names.split():
            if name in LOCALS:
                raise PlacementError(f"primitive {name!r} has a local program already")
            LOCALS[name] = program
            KNOWS[name] = uneven, blocks
            if sends:
                SENDS.add(name)
        return program

    return declare


def refuse(names: str, because: str) -> None:
    """Say why primitives have no rule; the error message gives the reason."""
    for name in names.split():
        if name in RULES:
            raise PlacementError(f"primitive {name!r} has a rule ({RULES[name].place})")
        REFUSALS[name] = because


@dataclasses.dataclass(frozen=True)
class LocalCall:
    """What a local program may ask: parameters, whole shapes, placements, where this device is.

    `position(axes)` is this device's coordinate along mesh axes (major first), a traced integer;
    `names` are the mesh axes' names, for collectives.
    """

    primitive: Any
    params: dict[str, Any]
    in_avals: Sequence[Any]
    out_avals: Sequence[Any]
    inputs: Sequence[Joint]
    outputs: Sequence[Joint]
    sizes: Sequence[int]
    position: Callable[[tuple[int, ...]], Any]
    names: Sequence[str] = ()

    def in_shape(self, operand: int) -> tuple[int, ...]:
        return local_shape(self.in_avals[operand].shape, self.inputs[operand], self.sizes)

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        return local_shape(self.out_avals[result].shape, self.outputs[result], self.sizes)

    def shard(self, where: Joint, dim: int) -> tuple[Any, int]:
        """(number of this device's part of `dim`, number of parts); (0, 1) if it is whole."""
        axes = where.axes_on(dim)
        return (self.position(axes) if axes else 0), math.prod(self.sizes[a] for a in axes)

    def axis_names(self, axes: Sequence[int]) -> list[str]:
        return [self.names[a] for a in axes]

    def spans(self, where: Joint, shape: Sequence[int], dim: int) -> list[Span]:
        """The rows of every device along the axes that cut a dim without blocks."""
        return spans(shape[dim], where.cuts_on(dim, self.sizes))

    def along(self, axes: Sequence[int], where: Joint, values: Sequence[Any], dim: int) -> list:
        """What is known of a dim's parts, for every device along mesh axes that include its own."""
        on = where.axes_on(dim)
        found = []
        for place in itertools.product(*(range(self.sizes[a]) for a in axes)):
            at = dict(zip(axes, place, strict=True))
            number = 0
            for axis in on:
                number = number * self.sizes[axis] + at[axis]
            found.append(values[number])
        return found

    def window(
        self, x: Any, operand: int, dim: int, starts: Sequence[int], length: int, fill: Any = 0,
        axes: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """Rows [starts[i], starts[i] + length) of a dim of an operand, for device i.

        Devices are counted along `axes`, by default those that cut the dim.
        """
        where, shape = self.inputs[operand], self.in_avals[operand].shape
        axes = where.axes_on(dim) if axes is None else tuple(axes)
        held = self.along(axes, where, self.spans(where, shape, dim), dim)
        return self.exchanged(x, dim, held, starts, length, fill, axes)

    def exchanged(
        self, x: Any, dim: int, held: Sequence[Span], starts: Sequence[int], length: int,
        fill: Any, axes: Sequence[int],
    ) -> Any:  # fmt: skip
        """Rows [starts[i], starts[i] + length) for device i along mesh axes, of `held` in `x`."""
        numbers = in_mesh_order(axes, self.sizes)
        names, me = self.axis_names(sorted(axes)), self.position(tuple(axes))
        return window(x, dim, held, starts, length, fill, names, me, numbers)

    def dilated(
        self, x: Any, operand: int, dim: int, starts: Sequence[int], length: int, step: int,
        fill: Any = 0, axes: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """Rows as of `window`, of a dim with `step` - 1 rows of `fill` between any two."""
        if step == 1:
            return self.window(x, operand, dim, starts, length, fill, axes)
        begins, offsets = [s // step for s in starts], [s % step for s in starts]
        count = (max(offsets) + length - 1) // step + 1
        x = self.window(x, operand, dim, begins, count, fill, axes)
        widths = [(0, step - 1, step - 1) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        x = lax.pad(x, jnp.asarray(fill, x.dtype), widths)
        axes = self.inputs[operand].axes_on(dim) if axes is None else axes
        return lax.dynamic_slice_in_dim(x, entry(offsets, self.position(tuple(axes))), length, dim)

    def real(self, x: Any, operand: int, dim: int, op: str) -> Any:
        """An operand whose padding along a sharded dim does not count in a reduction."""
        where, shape = self.inputs[operand], self.in_avals[operand].shape
        ops = [op if d == dim else None for d in range(len(shape))]
        return filled(x, shape, where, self.sizes, self.position, ops)

    def span(self, where: Joint, shape: Sequence[int], dim: int) -> tuple[Any, Any]:
        """(first, count): rows [first, first + count) of `dim` lie here, at the front of the part.

        Of a dim without blocks. `shape` is that of the whole array.
        """
        first, count = 0, shape[dim]
        cuts = where.cuts_on(dim, self.sizes)
        parts = lengths(shape[dim], cuts)[1:]
        for axis, cut, m, part in zip(
            where.axes_on(dim), cuts, lengths(shape[dim], cuts), parts, strict=False
        ):
            before = self.position((axis,)) * part
            first = first + before
            even = isinstance(count, int) and m == part * cut.count
            count = part if even else jnp.clip(count - before, 0, part)
        return first, count

    def rows(self, where: Joint, shape: Sequence[int], dim: int) -> tuple[Any, Any]:
        """(row of the whole `dim`, whether there is one) for every row of this device's part."""
        cuts = where.cuts_on(dim, self.sizes)
        return rows_of(shape[dim], cuts, [self.position((a,)) for a in where.axes_on(dim)], jnp)

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """The primitive itself on local operands, with some parameters changed."""
        return self.primitive.bind(*operands, **{**self.params, **changed})


def linear_position(axes: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> Any:
    """This device's coordinate along several mesh axes, major first."""
    index: Any = 0
    for axis in axes:
        index = index * sizes[axis] + lax.axis_index(names[axis])
    return index


def in_mesh_order(axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The numbers along the same axes in the mesh's order, of devices counted major first.

    >>> in_mesh_order((1, 0), (2, 3))
    [0, 3, 1, 4, 2, 5]
    """
    found = []
    for place in itertools.product(*(range(sizes[a]) for a in axes)):
        number = 0
        for axis, i in sorted(zip(axes, place, strict=True)):
            number = number * sizes[axis] + i
        found.append(number)
    return found


def missing_rule(name: str) -> PlacementError:
    if name in REFUSALS:
        return PlacementError(f"`{name}` cannot be sharded: {REFUSALS[name]}")
    return PlacementError(
        f"no sharding rule for primitive `{name}`. Add one in three lines, for example\n"
        f'  dt.elementwise("{name}")\n'
        "if it acts on each element alone, or\n"
        f'  @dt.rule("{name}")\n'
        f'  def _(x, **params): return f"{{x}} -> {{x}}"\n'
        "where x.whole(dim) is a dim that no device can do in part. "
        "See docs/extending.md."
    )


def find_rule(name: str) -> Rule:
    """The rule of a primitive; raises PlacementError that says how to add one."""
    try:
        return RULES[name]
    except KeyError:
        raise missing_rule(name) from None
