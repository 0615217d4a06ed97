"""Errors: what, where in the user's file, the values, the table, and remedies that were tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class PlacementError(ValueError):
    """Something about placements that cannot be: a wrong argument, a missing rule."""


class OpError(ValueError):
    """An operator that is declared wrongly: a name, a VJP rule, results that do not fit."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One redistribution that was tried and makes the equation legal.

    `code` can be pasted, `cost` says what moves ("all-reduce, 12 KiB per device"), `bytes` is what
    one device sends.
    """

    code: str
    cost: str
    bytes: float

    def __str__(self) -> str:
        return f"{self.code}   {self.cost}"


class PlacementMismatchError(PlacementError):
    """No row of a primitive's table fits the placements of its operands.

    Fields: `primitive` (name), `operands` (one line of text each), `axis` (mesh axis or None),
    `rows` (the table, as text), `remedies` (at most two), `where` ("train.py:41" or None).
    """

    def __init__(
        self,
        summary: str,
        *,
        primitive: str,
        operands: Sequence[str] = (),
        axis: str | None = None,
        rows: Sequence[str] = (),
        remedies: Sequence[Remedy] = (),
        where: str | None = None,
        line: str | None = None,
    ):
        self.primitive, self.axis, self.where = primitive, axis, where
        self.operands, self.rows, self.remedies = tuple(operands), tuple(rows), tuple(remedies)
        lines = [summary]
        if where:
            lines.append(f"  at         {where}" + (f"   {line}" if line else ""))
        lines += [f"  operand {i}  {text}" for i, text in enumerate(operands)]
        if rows:
            lines.append("  rows       " + " | ".join(rows))
        for i, remedy in enumerate(self.remedies):
            lines.append(("  remedies   " if i == 0 else "             ") + str(remedy))
        super().__init__("\n".join(lines))


def size_text(count: float) -> str:
    """Bytes for people: `6 KiB`, `1.5 MiB`, `12 B`.

    >>> size_text(6144), size_text(100), size_text(1.5 * 2**20)
    ('6 KiB', '100 B', '1.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
