"""The rule sentence and the rows it stands for.

A sentence names the dims of every operand and result by factors. A factor on both sides may be
sharded; one that is missing on the right is reduced, so sharding it leaves a partial result; one
that stands only on the right is created. `k!` is needed whole, `1` has size 1.

>>> print(einsum_signature("m k, k n -> m n", linear="each"))
R, R -> R
S0, R -> S0
R, S1 -> S1
S1, S0 -> P
P, R -> P
R, P -> P

The words (factor, need whole) are those of Shardy's sharding rules.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtorchjax.errors import PlacementError
from dtorchjax.placements import (
    Optional,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    parse_placement,
)


class Row(NamedTuple):
    """One line of a signature for one mesh axis: `S1, S0 -> P`.

    `by` names the collective that the devices need for it: `S0 -> S0 by permute`; or they take
    what they need from the whole, by no equal cut: `R, R -> S2 by slice`. `S1, S0 -> S1 in 6
    groups` is for numbers of devices that divide the groups.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    by: str = ""
    groups: int = 0

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        how = f" by {self.by}" if self.by else f" in {self.groups} groups" if self.groups else ""
        return " -> ".join(sides).strip() + how


def parse_row(text: str) -> Row:
    """`"P, S0 -> P"` -> Row."""
    text, _, by = text.partition(" by ")
    text, _, groups = text.partition(" in ")
    left, arrow, right = text.partition("->")
    if not arrow:
        raise PlacementError(f"a row is `inputs -> outputs`, not {text!r}")
    sides = [
        tuple(parse_placement(word) for word in side.split(",") if word.strip())
        for side in (left, right)
    ]
    return Row(sides[0], sides[1], by, int(groups.removesuffix(" groups") or 0))


# ---- sentences ---------------------------------------------------------------------------------


class Operand(NamedTuple):
    """The factors of one operand, None for a dim of size 1; `optional` for `[b]`."""

    factors: tuple[str | None, ...]
    optional: bool = False


class Sentence(NamedTuple):
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    whole: frozenset[str]

    def factors(self) -> list[str]:
        """Kept and created factors as they stand on the right, then the reduced ones."""
        seen: dict[str, None] = {}
        for side in (self.outputs, self.inputs):
            for operand in side:
                seen.update((f, None) for f in operand.factors if f is not None)
        return list(seen)


_WORD = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)(?P<whole>!?)|(?P<one>1)|(?P<none>-)|(?P<bad>\S))")


def _fail(sentence: str, at: int, why: str) -> PlacementError:
    return PlacementError(f"{why}\n  {sentence}\n  {' ' * at}^")


def parse_sentence(sentence: str) -> Sentence:
    """`"b m k, b k n -> b m n"` -> Sentence. Errors show the place with a caret."""
    arrow = sentence.find("->")
    if arrow < 0:
        raise _fail(sentence, len(sentence), "a rule sentence needs `->` before its results")
    whole: set[str] = set()

    def side(start: int, end: int, is_input: bool) -> tuple[Operand, ...]:
        operands = []
        if not sentence[start:end].strip():
            return ()
        while True:
            comma = sentence.find(",", start, end)
            stop = comma if comma >= 0 else end
            operands.append(operand(start, stop, is_input))
            if comma < 0:
                return tuple(operands)
            start = comma + 1

    def operand(start: int, end: int, is_input: bool) -> Operand:
        text = sentence[start:end].strip()
        optional = text.startswith("[") and text.endswith("]")
        if optional:
            if not is_input:
                raise _fail(sentence, start, "a result cannot be optional")
            start, end = sentence.index("[", start) + 1, sentence.rindex("]", start, end)
        found: list[str | None] = []
        at = start
        while at < end and (match := _WORD.match(sentence, at, end)):
            at = match.end()
            if match["bad"]:
                raise _fail(sentence, match.start("bad"), f"unexpected {match['bad']!r}")
            name = match["name"]
            if match["none"]:
                continue
            if name is not None and name in found:
                raise _fail(sentence, match.start("name"), f"factor {name!r} twice in one operand")
            found.append(name)
            if name is not None and match["whole"]:
                whole.add(name)
        return Operand(tuple(found), optional)

    inputs = side(0, arrow, True)
    return Sentence(inputs, side(arrow + 2, len(sentence), False), frozenset(whole))


def sentence_rows(
    sentence: Sentence,
    *,
    partial: str = "sum",
    linear: str | None = None,
    moves: bool = False,
    monotone: bool = False,
) -> list[Row]:
    """All rows of a sentence.

    partial: what sharding a reduced factor leaves.
    linear: which operands may be a partial sum: "jointly" (all at once), "each" (one at a time),
        or groups of operand numbers, "0", "1:" (all from 1 on) or "0 2; 1" (`0 2` at once, or 1).
    moves: the operands that `linear` names may be any other kind of partial as well.
    monotone: increasing in every operand, so P(max) and P(min) pass.
    """
    n_in, n_out = len(sentence.inputs), len(sentence.outputs)
    rows = [Row((R,) * n_in, (R,) * n_out)]
    kept = {f for operand in sentence.outputs for f in operand.factors}
    for factor in sentence.factors():
        if factor in sentence.whole:
            continue

        def place(operand: Operand, absent: Placement, factor: str = factor) -> Placement:
            at = operand.factors
            return Shard(at.index(factor)) if factor in at else absent

        # A result that lacks a kept factor would differ from device to device in the others' terms.
        if factor in kept and any(factor not in o.factors for o in sentence.outputs):
            continue
        absent = R if factor in kept else Partial(partial)
        rows.append(
            Row(
                tuple(place(o, R) for o in sentence.inputs),
                tuple(place(o, absent) for o in sentence.outputs),
            )
        )
    for group, kind in _partial_groups(n_in, linear, moves, monotone):
        p = Partial(kind)
        rows.append(Row(tuple(p if i in group else R for i in range(n_in)), (p,) * n_out))
    return list(dict.fromkeys(rows))


def _numbers(group: str, n: int) -> set[int]:
    """`"0 2"` -> {0, 2}; `"1:"` -> all from 1 on."""
    if group.strip().endswith(":"):
        return set(range(int(group.strip()[:-1]), n))
    return set(map(int, group.split()))


def _partial_groups(
    n: int, linear: str | None, moves: bool, monotone: bool
) -> Iterable[tuple[set[int], str]]:
    everything = set(range(n))
    if linear == "jointly":
        groups = [everything]
    elif linear == "each":
        groups = [{i} for i in range(n)]
    else:
        groups = [_numbers(g, n) for g in (linear or "").split(";") if g.strip()]
    for group in groups:
        yield group, "sum"
    if moves:
        for kind in ("max", "min", "prod"):
            for group in groups:
                yield group, kind
    elif monotone:
        for kind in ("max", "min"):
            # f(max x, max y) is max f(x, y) only when a single operand varies
            for i in range(n):
                yield {i}, kind


# ---- signatures --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlacementSignature:
    """A table of rows: input placements -> output placements, matched on each mesh axis by itself.

    >>> sig = (PlacementSignature.builder(2, 1)
    ...        .add_input("S0").add_input("R").add_output("S0").build().finish())
    >>> print(sig)
    R, R -> R
    S0, R -> S0
    >>> sig.match([["S0", "R"], ["R", "R"]])
    [[Shard(0), Replicate()]]
    >>> sig.match([["R", "R"], ["S0", "R"]]) is None
    True
    """

    rows: tuple[Row, ...]

    @staticmethod
    def builder(inputs: int, outputs: int) -> SignatureBuilder:
        """A builder for signatures of `inputs` operands and `outputs` results."""
        return SignatureBuilder(inputs, outputs)

    def finish(self) -> PlacementSignature:
        """This signature with the all-R row first (for an optional operand, present and absent)."""
        absences = dict.fromkeys(
            tuple(isinstance(p, Optional) for p in row.inputs) for row in self.rows
        )
        n_out = len(self.rows[0].outputs) if self.rows else 0
        replicated = [
            Row(tuple(Optional() if absent else R for absent in pattern), (R,) * n_out)
            for pattern in absences
        ]
        return PlacementSignature(tuple(dict.fromkeys([*replicated, *self.rows])))

    def match(
        self, operands: Sequence[Sequence[str | Placement] | None]
    ) -> list[list[Placement]] | None:
        """Placements of the operands (one list per operand, None if absent) -> of the results.

        Each mesh axis is matched by itself; None if some axis fits no row.
        Raises PlacementError if the number of operands or axes is wrong.
        """
        arity = len(self.rows[0].inputs)
        if len(operands) != arity:
            raise PlacementError(f"{arity} operands in the signature, {len(operands)} given")
        given = [None if o is None else [parse_placement(p) for p in o] for o in operands]
        axes = {len(o) for o in given if o is not None}
        if len(axes) != 1:
            raise PlacementError(
                f"every operand needs one placement per mesh axis, got {sorted(axes)} of them"
            )
        found = []
        for axis in range(axes.pop()):
            wanted = tuple(Optional() if o is None else o[axis] for o in given)
            row = next((row for row in self.rows if row.inputs == wanted), None)
            if row is None:
                return None
            found.append(row.outputs)
        return [list(column) for column in zip(*found, strict=True)]

    def __str__(self) -> str:
        def kind(row: Row) -> int:
            if any(isinstance(p, Partial) for p in row.inputs):
                return 2
            return int(
                not all(isinstance(p, Replicate | Optional) for p in row.inputs + row.outputs)
            )

        return "\n".join(map(str, sorted(self.rows, key=kind)))


class SignatureBuilder:
    """Adds rows operand by operand; a new row starts when the last one is full."""

    def __init__(self, inputs: int, outputs: int):
        self._counts = inputs, outputs
        self._rows: list[Row] = []
        self._inputs: list[tuple[Placement, ...]] = []
        self._outputs: list[Placement] = []

    def add_input(self, placement: str | Placement) -> SignatureBuilder:
        return self._add((parse_placement(placement),))

    def add_optional_input(self, placement: str | Placement) -> SignatureBuilder:
        """An operand that may be absent: the row stands twice, with it and without it."""
        return self._add((parse_placement(placement), Optional()))

    def _add(self, choices: tuple[Placement, ...]) -> SignatureBuilder:
        if len(self._inputs) == self._counts[0]:
            raise PlacementError(f"this row has its {self._counts[0]} inputs already")
        self._inputs.append(choices)
        return self

    def add_output(self, placement: str | Placement) -> SignatureBuilder:
        if len(self._inputs) < self._counts[0]:
            raise PlacementError(
                f"{self._counts[0]} inputs come first; this row has {len(self._inputs)}"
            )
        self._outputs.append(parse_placement(placement))
        if len(self._outputs) == self._counts[1]:
            rows: list[tuple[Placement, ...]] = [()]
            for choices in self._inputs:
                rows = [(*row, choice) for row in rows for choice in choices]
            self._rows += [Row(row, tuple(self._outputs)) for row in rows]
            self._inputs, self._outputs = [], []
        return self

    def build(self) -> PlacementSignature:
        if self._inputs or self._outputs:
            raise PlacementError(
                f"the last row is not complete: {len(self._inputs)} of {self._counts[0]} inputs, "
                f"{len(self._outputs)} of {self._counts[1]} outputs"
            )
        return PlacementSignature(tuple(dict.fromkeys(self._rows)))


def einsum_signature(sentence: str, *, linear: str | None = None) -> PlacementSignature:
    """The table of a rule sentence; an operand in brackets, `[b]`, may be absent.

    `linear="each"` (a product) or `"jointly"` (a sum) adds the rows of partial sums.

    >>> print(einsum_signature("b i, i o, [o] -> b o"))
    R, R, R -> R
    R, R, - -> R
    S0, R, R -> S0
    S0, R, - -> S0
    R, S1, S0 -> S1
    R, S1, - -> S1
    S1, S0, - -> P
    """
    parsed = parse_sentence(sentence)
    rows = sentence_rows(parsed, linear=linear)
    for i, operand in enumerate(parsed.inputs):
        if operand.optional:
            rows = [
                version
                for row in rows
                for version in (
                    row,
                    Row((*row.inputs[:i], Optional(), *row.inputs[i + 1 :]), row.outputs),
                )
                # beside a partial result an operand that is R would be added once per device
                if version.outputs[0] not in {Partial()}
                or not isinstance(version.inputs[i], Replicate)
            ]
    return PlacementSignature(tuple(dict.fromkeys(rows)))


# ---- dims, from which rules write their sentence -------------------------------------------------


class Dims:
    """The factors of one operand, for f-strings in rules: `f"{x}, {y} -> {x.drop(1)}"`.

    >>> x = Dims(("a", "b", "c"))
    >>> f"{x} -> {x[[2, 0]]} | {x.drop((1,))} | {x.whole(1)} | {x[0]}"
    'a b c -> c a | a c | a b! c | a'
    """

    def __init__(self, factors: Iterable[str], shape: Sequence[int] = (), dtype: object = None):
        self.factors, self.shape, self.dtype = tuple(factors), tuple(shape), dtype

    def __len__(self) -> int:
        return len(self.factors)

    def __iter__(self):
        return iter(self.factors)

    def __getitem__(self, dims) -> Dims:
        picked = (
            [dims]
            if isinstance(dims, int)
            else range(len(self))[dims]
            if isinstance(dims, slice)
            else dims
        )
        return Dims(
            (self.factors[d] for d in picked),
            [self.shape[d] for d in picked if self.shape],
            self.dtype,
        )

    def drop(self, *groups: Iterable[int]) -> Dims:
        gone = {d for group in groups for d in group}
        return self[[d for d in range(len(self)) if d not in gone]]

    def shared(self, dims: Sequence[int], other: Iterable[str]) -> Dims:
        """These dims take the factors of another operand."""
        new = dict(zip(dims, other, strict=True))
        factors = (new.get(d, f) for d, f in enumerate(self.factors))
        return Dims(factors, self.shape, self.dtype)

    def whole(self, *dims: int) -> Dims:
        """These dims are needed whole on every device."""
        return Dims(
            (
                f + "!" if d in dims and not f.endswith("!") else f
                for d, f in enumerate(self.factors)
            ),
            self.shape,
            self.dtype,
        )

    def __str__(self) -> str:
        return " ".join(self.factors) or "-"
