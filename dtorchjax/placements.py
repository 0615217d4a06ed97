"""Placements: where the parts of one array lie, one word per mesh axis.

>>> parse_placement("S0"), parse_placement("R"), parse_placement("P(max)")
(Shard(0), Replicate(), Partial('max'))
>>> str(Shard(1)), str(Partial())
('S1', 'P')

This floor imports no JAX: a mesh is anything with `axis_names` and a `shape` mapping.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dtorchjax.errors import PlacementError
from dtorchjax.parts import Cut, is_even, lengths, stored_length

REDUCTIONS = ("sum", "max", "min", "prod")


class Placement:
    """What one mesh axis does with an array: `Replicate`, `Shard` or `Partial`."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Every device along the axis holds the whole array. Written `R`."""

    def __str__(self) -> str:
        return "R"

    def __repr__(self) -> str:
        return "Replicate()"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """Dim `dim` is cut into parts, one per device along the axis. Written `S0`, `S-1`.

    Of n rows on k devices, each holds ceil(n / k); the last ones hold fewer, or none.
    With `blocks=k` (written `S0/2`) the dim is `k` equal blocks, each cut by itself: what joining
    sharded halves gives (a fused qkv kernel).
    """

    dim: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise PlacementError(f"Shard takes an integer dim, not {self.dim!r}")
        if not isinstance(self.blocks, int) or self.blocks < 1:
            raise PlacementError(f"Shard takes blocks >= 1, not {self.blocks!r}")

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"/{self.blocks}" if self.blocks > 1 else "")

    def __repr__(self) -> str:
        return f"Shard({self.dim}" + (f", blocks={self.blocks})" if self.blocks > 1 else ")")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Each device along the axis holds a term; the value is their reduction. Written `P`, `P(max)`.

    `op` is one of "sum", "max", "min", "prod".
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise PlacementError(f"Partial takes one of {', '.join(REDUCTIONS)}, not {self.op!r}")

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Optional(Placement):
    """An absent operand. Only inside signatures. Written `-`."""

    def __str__(self) -> str:
        return "-"

    def __repr__(self) -> str:
        return "Optional()"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Local(Placement):
    """What a dfunction keeps for its backward pass: every device its own, whatever its shape.

    `key` says by which row it was made; only the same row can use it. Nothing else can be done
    with such a value but to carry it along.
    """

    key: Any

    def __str__(self) -> str:
        return "L"

    def __repr__(self) -> str:
        return f"Local({self.key})"


R = Replicate()
_FORM = re.compile(r"(?:(R)|S(-?\d+)(?:/(\d+))?|(P)(?:\((\w+)\))?|(-))")


def parse_placement(text: str | Placement) -> Placement:
    """`"R"`, `"S0"`, `"S-1"`, `"S0/2"`, `"P"`, `"P(max)"` -> a Placement (a Placement stays).

    Raises PlacementError for anything else, naming the forms that exist.
    """
    if isinstance(text, Placement):
        return text
    match = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise PlacementError(
            f"{text!r} is not a placement; write R, S<dim>, S<dim>/<blocks>, P or P(max|min|prod)"
        )
    replicate, dim, blocks, _, op, _ = match.groups()
    if replicate:
        return R
    if dim is not None:
        return Shard(int(dim), int(blocks or 1))
    return Optional() if match.group(6) else Partial(op or "sum")


def parse_placements(text: str | Iterable[str | Placement]) -> tuple[Placement, ...]:
    """`"S0,R"` or `["S0", "R"]` -> one Placement per mesh axis.

    >>> parse_placements("S0, P(max)")
    (Shard(0), Partial('max'))
    """
    items = text.split(",") if isinstance(text, str) else text
    return tuple(parse_placement(item) for item in items)


class Joint(NamedTuple):
    """The placements of one array on all mesh axes, and the order of axes that share a dim.

    `order` is a permutation of the axis numbers; axes that shard the same dim stand in it from
    major to minor, all others in their own place. Build it with `joint`, which makes equal
    layouts compare equal.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...]

    def axes_on(self, dim: int) -> tuple[int, ...]:
        """The mesh axes that shard `dim`, major first."""
        found = self.placements
        return tuple(a for a in self.order if isinstance(p := found[a], Shard) and p.dim == dim)

    def cuts_on(self, dim: int, sizes: Sequence[int]) -> list[Cut]:
        """How `dim` is cut, major axis first."""
        found = self.placements
        return [Cut(sizes[a], found[a].blocks) for a in self.axes_on(dim)]  # type: ignore[attr-defined]

    def partial_axes(self) -> tuple[int, ...]:
        return tuple(a for a, p in enumerate(self.placements) if isinstance(p, Partial))

    @property
    def is_local(self) -> bool:
        """True for what a dfunction keeps on its device."""
        return any(isinstance(p, Local) for p in self.placements)

    def __str__(self) -> str:
        text = ",".join(map(str, self.placements))
        plain = tuple(range(len(self.order)))
        return text if self.order == plain else f"{text} order {','.join(map(str, self.order))}"


def joint(placements: Sequence[Placement], order: Sequence[int] | None = None) -> Joint:
    """A Joint with the canonical order: axes that share a dim fill the places of their group.

    >>> joint([Shard(0), R], (1, 0)) == joint([Shard(0), R])
    True
    """
    found = tuple(placements)
    plain = tuple(range(len(found)))
    if order is None or tuple(order) == plain:
        return Joint(found, plain)
    if sorted(order) != list(plain):
        raise PlacementError(f"order must be a permutation of {plain}, not {tuple(order)}")
    if any(isinstance(p, Local) for p in found):
        return Joint(found, tuple(order))
    result = list(plain)
    for dim in {p.dim for p in found if isinstance(p, Shard)}:
        group = [a for a in order if isinstance(p := found[a], Shard) and p.dim == dim]
        for place, axis in zip(sorted(group), group, strict=True):
            result[place] = axis
    return Joint(found, tuple(result))


def local_shape(shape: Sequence[int], where: Joint, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape that one device holds, with its padding where dims do not divide."""
    return tuple(lengths(n, where.cuts_on(d, sizes))[-1] for d, n in enumerate(shape))


def stored_shape(shape: Sequence[int], where: Joint, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of all devices' parts together, with their padding."""
    return tuple(stored_length(n, where.cuts_on(d, sizes)) for d, n in enumerate(shape))


def is_plain(shape: Sequence[int], where: Joint, sizes: Sequence[int]) -> bool:
    """True if the parts one after the other are the array: no padding, no blocks."""
    cuts = [where.cuts_on(d, sizes) for d in range(len(shape))]
    return all(
        all(cut.blocks == 1 for cut in on) and is_even(n, on)
        for n, on in zip(shape, cuts, strict=True)
    )


SYMBOLIC = 1024
"""What a symbolic dim counts as where costs are estimated."""


def elements(shape: Sequence[Any]) -> int:
    """The number of elements; a symbolic dim counts as `SYMBOLIC`."""
    return math.prod(n if isinstance(n, int) else SYMBOLIC for n in shape)


def is_multiple(n: Any, parts: int) -> bool:
    """True if n is known to be a multiple; a symbolic dim says so by a factor, as in 8*n.

    A constraint such as mod(n, 8) == 0 does not do: sizes of parts would be quotients that JAX
    cannot compare.
    """
    return bool(n % parts == 0) and (isinstance(n, int) or "floordiv" not in str(n // parts))


def divides(shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """True if every sharded dim is a positive multiple of its number of parts, without blocks."""
    if any(isinstance(p, Shard) and p.blocks > 1 for p in placements):
        return False
    parts: dict[int, int] = {}
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] = parts.get(placement.dim, 1) * size
    return all(
        d < len(shape) and (not isinstance(shape[d], int) or shape[d] > 0)
        and is_multiple(shape[d], n)
        for d, n in parts.items()
    )  # fmt: skip


class Allowed(NamedTuple):
    """By the size of a dim: which are cut into parts that are not equal, which into blocks.

    A program knows those that occur in it, so that others need not be planned for.
    """

    uneven: frozenset[int] = frozenset()
    blocks: frozenset[tuple[int, int]] = frozenset()
    """(size of a dim, blocks)"""

    def shards(self, dim: int, n: Any) -> list[Shard]:
        """The placements that cut a dim of this size."""
        found = [Shard(dim)] if not isinstance(n, int) or n > 1 or n in self.uneven else []
        return found + [Shard(dim, k) for size, k in sorted(self.blocks) if size == n]

    def admits(self, shape: Sequence[int], where: Joint, sizes: Sequence[int]) -> bool:
        """True if every dim that is cut may be cut so."""
        for dim, n in enumerate(shape):
            cuts = where.cuts_on(dim, sizes)
            if not cuts:
                continue
            if any(b > 1 and (n, b) not in self.blocks for _, b in cuts):
                return False
            if not isinstance(n, int):
                if not is_multiple(n, math.prod(cut.count for cut in cuts)):
                    return False
                continue
            try:
                if not (n > 0 and is_even(n, cuts)) and n not in self.uneven:
                    return False
            except ValueError:  # blocks that are not equal
                return False
        return True

    def __or__(self, other: Allowed) -> Allowed:  # type: ignore[override]
        return Allowed(self.uneven | other.uneven, self.blocks | other.blocks)


EVEN = Allowed()


def allowed_by(wheres: Iterable[tuple[Sequence[int], Joint]], sizes: Sequence[int]) -> Allowed:
    """What must be allowed for arrays of these shapes to lie so, and for each of their blocks."""
    uneven, blocks = set(), set()
    for shape, where in wheres:
        for dim, n in enumerate(shape):
            cuts = where.cuts_on(dim, sizes)
            if not cuts or not isinstance(n, int):
                continue
            blocks |= {(n, cut.blocks) for cut in cuts if cut.blocks > 1}
            if not is_even(n, cuts) or n == 0:
                uneven |= {n, *(n // cut.blocks for cut in cuts)}
    return Allowed(frozenset(uneven), frozenset(blocks))


def kinds_of(placements: Iterable[Placement]) -> set[str]:
    """The kinds of partial among placements: one at most, as max(1, 2) + 3 is not max(1, 2 + 3)."""
    return {p.op for p in placements if isinstance(p, Partial)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placements on a mesh and, where two axes shard one dim, their order (major first).

    `placements` has one entry per mesh axis (strings are parsed). `order` names mesh axes, by name
    or number, major first; the mesh's own order where it is not given.
    """

    mesh: Any
    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(self.mesh.axis_names)
        parsed = parse_placements(self.placements)
        if len(parsed) != len(names):
            raise PlacementError(
                f"{len(parsed)} placements ({', '.join(map(str, parsed))}) for a mesh with "
                f"{len(names)} axes {names}: one per axis, or a dict like {{{names[0]!r}: ...}}; "
                "for several arrays a list of lists"
            )
        if any(isinstance(p, Optional) for p in parsed):
            raise PlacementError("Optional() stands in signatures only, not in a layout")
        if len(kinds_of(parsed)) > 1:
            raise PlacementError(
                f"{', '.join(map(str, parsed))}: an array has one kind of partial, as the value "
                "of two kinds depends on which is reduced first"
            )
        order = [names.index(a) if isinstance(a, str) else a for a in self.order]
        canonical = joint(parsed, order or None)
        # until dims are counted from the front, S-1 and S1 may be the same dim
        settled = all(p.dim >= 0 for p in parsed if isinstance(p, Shard))
        object.__setattr__(self, "placements", canonical.placements)
        object.__setattr__(self, "order", canonical.order if settled or not order else tuple(order))

    def is_array(self, shape: Sequence[int]) -> bool:
        """True if a jax.Array can lie so: no terms, no padding, no blocks."""
        return not self.joint.partial_axes() and is_plain(shape, self.joint, self.sizes)

    def without_terms(self) -> Layout:
        """The same layout with R where this has P."""
        found = tuple(R if isinstance(p, Partial) else p for p in self.placements)
        return Layout(self.mesh, found, self.order)

    @property
    def joint(self) -> Joint:
        return Joint(self.placements, self.order)

    @property
    def sizes(self) -> tuple[int, ...]:
        return mesh_sizes(self.mesh)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part of an array of (global) `shape`."""
        return local_shape(shape, self.joint, self.sizes)

    def resolve(self, shape: Sequence[int], what: str = "array") -> Layout:
        """The same layout with dims counted from the front, checked against `shape`.

        P on an axis of size 1 becomes R.

        Raises PlacementError for a dim that does not exist, a symbolic dim that is not known to
        divide by the number of its parts, and a dim that is not so many equal `blocks`.
        """
        rank = len(shape)
        found: list[Placement] = []
        for name, p in zip(self.mesh.axis_names, self.placements, strict=True):
            if isinstance(p, Partial) and self.mesh.shape[name] == 1:
                p = R  # one term is the value
            if isinstance(p, Shard):
                dim = p.dim + rank if p.dim < 0 else p.dim
                if not 0 <= dim < rank:
                    raise PlacementError(
                        f"{what} of shape {tuple(shape)} has no dim {p.dim} to shard on {name!r}"
                    )
                p = Shard(dim, p.blocks)
            found.append(p)
        layout = Layout(self.mesh, tuple(found), self.order)
        for dim in range(rank):
            axes = layout.joint.axes_on(dim)
            parts = math.prod(self.sizes[a] for a in axes)
            if not isinstance(shape[dim], int) and not is_multiple(shape[dim], parts):
                names = ", ".join(f"{self.mesh.axis_names[a]}={self.sizes[a]}" for a in axes)
                raise PlacementError(
                    f"{what} of shape {tuple(shape)}: dim {dim} is not known to divide into "
                    f"{parts} parts ({names}): write it as a multiple in symbolic_shape, "
                    f"'{parts}*{shape[dim]}' (of all mesh axes that may share it)"
                )
            try:
                lengths(shape[dim], layout.joint.cuts_on(dim, self.sizes))
            except ValueError as error:
                raise PlacementError(
                    f"{what} of shape {tuple(shape)}, dim {dim} placed as {layout}: {error}"
                ) from None
        return layout

    def named(self) -> dict[str, str]:
        """`{"dp": "S0", "tp": "R"}`"""
        return {n: str(p) for n, p in zip(self.mesh.axis_names, self.placements, strict=True)}

    def __str__(self) -> str:
        text = ", ".join(f"{n}={p}" for n, p in self.named().items())
        if self.order != tuple(range(len(self.order))):
            text += "; major first: " + ", ".join(self.mesh.axis_names[a] for a in self.order)
        return f"[{text}]"

    def __repr__(self) -> str:
        return f"Layout{self}"


def mesh_sizes(mesh: Any) -> tuple[int, ...]:
    shape = mesh.shape
    return tuple(shape[name] for name in mesh.axis_names)


def layout_from_dict(mesh: Any, named: Mapping[str, str | Placement]) -> Layout:
    """`{"tp": "S1"}` -> Layout; axes that are not named are R."""
    unknown = set(named) - set(mesh.axis_names)
    if unknown:
        raise PlacementError(
            f"no mesh axis {', '.join(map(repr, sorted(unknown)))}; the axes are {mesh.axis_names}"
        )
    return Layout(mesh, tuple(parse_placement(named.get(n, R)) for n in mesh.axis_names))


def dims_to_placements(
    dims: Sequence[Sequence[str]], axis_names: Sequence[str]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Axis names per dim, major first (a PartitionSpec's content) -> placements and order.

    >>> dims_to_placements([("tp", "dp"), ()], ("dp", "tp"))
    ((Shard(0), Shard(0)), (1, 0))
    """
    found: list[Placement] = [R] * len(axis_names)
    order: list[int] = []
    for dim, names in enumerate(dims):
        for name in names:
            axis = list(axis_names).index(name)
            found[axis] = Shard(dim)
            order.append(axis)
    order += [a for a in range(len(axis_names)) if a not in order]
    return tuple(found), joint(found, order).order
