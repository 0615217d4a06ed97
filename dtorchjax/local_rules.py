"""The rows of dfunctions: what a sentence means for a body that sees one device's parts, and where
gradients lie.

The safe reading is the default: a letter that is missing on the right is needed whole, and no
operand may be a partial sum, unless `linear=` says that the body is linear there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtorchjax.errors import PlacementError
from dtorchjax.notation import (
    PlacementSignature,
    Row,
    parse_row,
    parse_sentence,
    sentence_rows,
)
from dtorchjax.placements import Optional, Partial, Placement, R, Replicate, Shard


class BodyRow(NamedTuple):
    """A row of a dfunction's table and the letter that it shards, "" if it has none."""

    row: Row
    factor: str = ""


_PARENTHESES = re.compile(r"\(([^()]*)\)")
_WORD = re.compile(r"\([^()]*\)|\.\.\.|[^\s()\[\]]+")


def sentence_table(
    text: str, ranks: Sequence[int | None], linear: str | None, extra: Sequence[str] = ()
) -> tuple[list[BodyRow], tuple[str, ...], list[int]]:
    """The rows of a dfunction's sentence for operands of these ranks (None: absent).

    With its letters and the ranks of its results.

    `...` are leading dims, `(g r)` is a dim of two factors of which the first may be sharded, `[b]`
    an operand that may be absent, `-` an operand without dims. `extra` are more rows as text,
    `"k: S1, S0 -> R"` if they shard a letter.

    >>> rows, _, _ = sentence_table("... i, i o, [o] -> ... o", [3, 2, None], None)
    >>> [str(r.row) for r in rows]
    ['R, R -> R', 'S0, R -> S0', 'S1, R -> S1', 'R, S1 -> S2']
    """
    plain, whole = _plain_sentence(text, ranks)
    parsed = parse_sentence(plain)
    optional = [i for i, operand in enumerate(parsed.inputs) if operand.optional]
    right = {f for operand in parsed.outputs for f in operand.factors}
    left = {f for operand in parsed.inputs for f in operand.factors}
    whole |= parsed.whole | (right - left)
    if linear is None:
        whole |= left - right
    rows = sentence_rows(
        parsed._replace(whole=frozenset(f for f in whole if f is not None)), linear=linear
    )
    if optional and linear != "jointly":
        # a bias beside a partial sum would be added once per device
        rows = [row for row in rows if not any(isinstance(p, Partial) for p in row.outputs)]
    letters = tuple(dict.fromkeys(f for f in parsed.factors() if not f.startswith("_")))
    table = [BodyRow(row, _letter_of(row, parsed)) for row in rows]
    present = [i for i, rank in enumerate(ranks) if rank is not None]
    for words in extra:
        factor, row = _extra_row(words)
        table += signature_table(PlacementSignature((row,)), ranks, factor, present)
    return list(dict.fromkeys(table)), letters, [len(o.factors) for o in parsed.outputs]


def _extra_row(text: str) -> tuple[str, Row]:
    factor, colon, row = text.partition(":")
    return (factor.strip(), parse_row(row)) if colon else ("", parse_row(text))


def _letter_of(row: Row, parsed: Any) -> str:
    for operand, p in zip((*parsed.inputs, *parsed.outputs), (*row[0], *row[1]), strict=True):
        if isinstance(p, Shard):
            return str(operand.factors[p.dim])
    return ""


def _plain_sentence(text: str, ranks: Sequence[int | None]) -> tuple[str, set[str | None]]:
    """A sentence of single letters for the operands that are present, and what it needs whole."""
    left, arrow, right = text.partition("->")
    if not arrow:
        parse_sentence(text)  # raises
    sides = [[part.strip() for part in side.split(",")] for side in (left, right)]
    if len(sides[0]) != len(ranks):
        raise PlacementError(f"{len(sides[0])} operands in the rule `{text}`, {len(ranks)} given")
    bare = set(re.findall(r"[A-Za-z_]\w*", _PARENTHESES.sub(" ", left)))
    whole: set[str | None] = set()
    for group in _PARENTHESES.findall(text):
        first, *rest = group.split()
        # where the first factor stands nowhere alone its size is not known
        whole |= {*rest, *([] if first in bare else [first])}
    sides = [[_PARENTHESES.sub(lambda m: m[1].split()[0], part) for part in side] for side in sides]
    leading: dict[int, int] = {}
    for i, (part, rank) in enumerate(zip(sides[0], ranks, strict=True)):
        words = [w for w in _WORD.findall(part) if w != "-"]
        if rank is None:
            if not part.startswith("["):
                raise PlacementError(f"operand {i} is None, which the rule `{text}` does not allow")
            continue
        count = rank - len([w for w in words if w != "..."])
        if count < 0 or (count and "..." not in words):
            raise PlacementError(f"operand {i} has {rank} dims, the rule `{text}` says `{part}`")
        if "..." in words:
            leading[i] = count
    if len(set(leading.values())) > 1:
        raise PlacementError(f"`...` stands for {sorted(set(leading.values()))} dims in `{text}`")
    dims = " ".join(f"_{d}" for d in range(max(leading.values(), default=0)))
    words = [[part.replace("...", dims) or "-" for part in side] for side in sides]
    given = [w for w, rank in zip(words[0], ranks, strict=True) if rank is not None]
    return f"{', '.join(given)} -> {', '.join(words[1])}", whole


def signature_table(
    signature: PlacementSignature, ranks: Sequence[int | None], factor: str = "",
    present: Sequence[int] | None = None,
) -> list[BodyRow]:  # fmt: skip
    """The rows of a signature that fit the operands that are present, without the absent ones."""
    here = [i for i, rank in enumerate(ranks) if rank is not None]
    found = []
    for row in signature.rows:
        places = row.inputs
        if len(places) == len(here) != len(ranks):
            places = tuple(
                places[here.index(i)] if i in here else Optional() for i in range(len(ranks))
            )
        if len(places) != len(ranks):
            raise PlacementError(
                f"{len(row.inputs)} operands in the row `{row}`, {len(ranks)} given"
            )
        absent = [i for i, p in enumerate(places) if isinstance(p, Optional)]
        if absent != [i for i, rank in enumerate(ranks) if rank is None]:
            continue
        inputs = tuple(_from_front(places[i], ranks[i] or 0) for i in here)
        found.append(BodyRow(Row(inputs, row.outputs), factor))
    return found


def _from_front(p: Placement, rank: int) -> Placement:
    return Shard(p.dim + rank, p.blocks) if isinstance(p, Shard) and p.dim < 0 else p


def checked_table(
    table: Sequence[BodyRow], in_ranks: Sequence[int], out_ranks: Sequence[int], name: str
) -> list[BodyRow]:
    """The all-R row first, then the rest, with dims counted from the front."""
    n_in, n_out = len(in_ranks), len(out_ranks)
    found = [BodyRow(Row((R,) * n_in, (R,) * n_out))]
    for row, factor in table:
        if len(row.outputs) != n_out:
            raise PlacementError(
                f"`{name}` returns {n_out} arrays, its rule says {len(row.outputs)}: {row}"
            )
        outputs = tuple(_from_front(p, k) for p, k in zip(row.outputs, out_ranks, strict=True))
        for what, p, rank in zip(
            (*(f"operand {i}" for i in range(n_in)), *(f"result {i}" for i in range(n_out))),
            (*row.inputs, *outputs), (*in_ranks, *out_ranks), strict=True,
        ):  # fmt: skip
            if isinstance(p, Shard) and not 0 <= p.dim < rank:
                raise PlacementError(f"`{name}`: {what} has {rank} dims, its rule says {p}: {row}")
        found.append(BodyRow(Row(row.inputs, outputs), factor))
    return list(dict.fromkeys(found))


# ---- where gradients lie -------------------------------------------------------------------------


def differs(row: Row) -> bool:
    """True if devices along the axis hold different parts of anything in the call."""
    return any(not isinstance(p, Replicate) for p in (*row.inputs, *row.outputs))


def result_cotangent(
    row: Row, result: int, by_hand: bool, said: Mapping[int | str, str]
) -> Placement:
    """Where the cotangent of a result lies, one mesh axis.

    A backward pass by hand sees it whole; one that JAX derives takes it once, on one device, as the
    exact adjoint of what all devices do together.
    """
    p = row.outputs[result]
    if isinstance(p, Partial):
        return R
    if isinstance(p, Replicate) and differs(row):
        if "return" in said:
            return Partial() if said["return"] == "P" else R
        return R if by_hand else Partial()
    return p


def operand_cotangent(row: Row, operand: int, said: Mapping[int | str, str]) -> Placement:
    """Where the gradient of an operand lies, one mesh axis.

    Of an operand that all devices hold whole, each has the term of its own part of the work.
    """
    p = row.inputs[operand]
    if isinstance(p, Partial):
        return R
    if isinstance(p, Replicate) and differs(row):
        return R if said.get(operand) == "R" else Partial()
    return p


def is_differentiable(row: Row) -> bool:
    """False for rows with partial results that are no sums: a term has no gradient of its own."""
    return all(not isinstance(p, Partial) or p.op == "sum" for p in (*row.inputs, *row.outputs))


__all__ = [
    "BodyRow", "checked_table", "differs", "is_differentiable", "operand_cotangent",
    "result_cotangent", "sentence_table", "signature_table",
]  # fmt: skip
