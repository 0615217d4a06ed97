"""A plan for people and for programs: table, JSON, HTML, memory."""

from __future__ import annotations

import collections
import html
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from dtorchjax import hlo
from dtorchjax.chips import chip_of
from dtorchjax.errors import PlacementError, size_text

if TYPE_CHECKING:
    from dtorchjax.plan import Plan

COLUMNS = ("where", "needed by", "collective", "axes", "type", "bytes x times", "time", "why")
SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def totals(plan: Plan) -> dict[tuple[str, str], float]:
    """Bytes that one device sends by (kind, axes)."""
    found: dict[tuple[str, str], float] = collections.defaultdict(float)
    for c in plan.collectives:
        found[c.kind, ",".join(c.axes)] += c.bytes * c.times
    return dict(found)


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    """Collectives that differ in nothing but the array stand in one row."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for c in plan.collectives:
        key = c.where, c.primitive, c.kind, ",".join(c.axes), short_dtype(c.dtype), c.why
        groups.setdefault(key, []).append(c)
    rows = []
    for (*said, why), group in groups.items():
        count = sum(c.times for c in group)
        amount = size_text(group[0].bytes) if len({c.bytes for c in group}) == 1 else "various"
        time = time_text(sum(c.seconds * c.times for c in group))
        rows.append((*said, f"{amount} x {count:g}", time, why))
    return rows


def short_dtype(name: str) -> str:
    """`f32` for `float32`."""
    for long, short in SHORT.items():
        if name.startswith(long):
            return name.replace(long, short)
    return name


def time_text(seconds: float) -> str:
    """`12 us`, `3.4 ms`, `1.2 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _summary(plan: Plan) -> list[str]:
    lines = [
        f"  {kind} over {axes}: {size_text(sent)}"
        for (kind, axes), sent in sorted(totals(plan).items())
    ]
    known = plan.known_bound
    chip = chip_of(plan.mesh.devices.flat[0].device_kind).name
    return [
        *lines,
        f"  {size_text(plan.bytes_per_device)} sent per device, about {time_text(plan.seconds)} on "
        f"{chip}; {size_text(plan.memory_per_device)} held at the peak",
        f"  cost {size_text(plan.cost)}"
        + (f"; no plan is below {size_text(known)}" if known else ""),
    ]


def table_text(plan: Plan, width: int = 140) -> str:
    """Every collective, the totals by kind and axes, and what the plan is worth."""
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    for row in _rows(plan):
        table.add_row(*row)
    return rendered(table, _summary(plan), width)


def to_json(plan: Plan) -> str:
    """The plan's collectives and totals as JSON text."""
    return json.dumps(
        dict(
            mesh={n: int(s) for n, s in zip(plan.mesh.axis_names, plan.sizes, strict=True)},
            bytes_per_device=plan.bytes_per_device,
            memory_per_device=plan.memory_per_device,
            seconds=plan.seconds,
            cost=plan.cost,
            bound=plan.known_bound,
            collectives=[c.as_dict() for c in plan.collectives],
        ),
        indent=1,
    )


def to_html(plan: Plan) -> str:
    return html_table(COLUMNS, _rows(plan), _summary(plan))


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[str] = ()
) -> str:
    """A table for notebooks, with lines below it; spaces and line ends in cells are kept."""

    def cells(row: Sequence[str], tag: str) -> str:
        how = ' style="text-align:left;white-space:pre"'
        return "".join(f"<{tag}{how}>{html.escape(c)}</{tag}>" for c in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f"<table><thead><tr>{cells(columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{'<br>'.join(html.escape(line.strip()) for line in below)}</p>"
    )


def verify(plan: Plan, text: str) -> str:
    """See `Plan.verify`; `text` is optimized HLO."""
    names = plan.mesh.axis_names
    planned: dict[str, list[float]] = collections.defaultdict(list)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for c in plan.collectives:
        over = (
            "permutes"
            if c.kind == "permute"
            else f"over {','.join(sorted(c.axes, key=names.index))}"
        )
        planned[over].append(c.bytes * c.times)
    for sent in hlo.collectives(text):
        axes = hlo.axes_of(sent.groups, plan.sizes)
        over = f"over {','.join(names[a] for a in axes)}" if axes is not None else "over no axes"
        permute = sent.kind == "collective-permute"
        found["permutes" if permute else over].append(sent.sent * sent.times)
    lines, wrong = [], False
    for over in sorted({*planned, *found}):
        ours, theirs = planned[over], found[over]
        line = f"  {over}: planned {size_text(sum(ours))}, compiled {size_text(sum(theirs))}"
        if abs(sum(ours) - sum(theirs)) > max(64, 0.02 * sum(theirs)):
            wrong = True
        elif len(ours) != len(theirs):
            verb = "merged" if len(theirs) < len(ours) else "split"
            line += f" (XLA {verb} {len(ours)} collectives into {len(theirs)})"
        lines.append(line)
    if wrong:
        raise PlacementError("\n".join(["the compiled program sends other bytes:", *lines]))
    return "\n".join(lines)


def difference(plan: Plan, other: Plan) -> str:
    """See `Plan.diff`."""

    def by_need(p: Plan) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for c in p.collectives:
            found[c.where, c.primitive, c.kind, ",".join(c.axes)] += c.bytes * c.times
        return found

    before, after = by_need(plan), by_need(other)
    table = Table(
        "where", "needed by", "collective", "axes", "before", "after", box=box.SIMPLE_HEAD
    )
    for key in {**before, **after}:
        old, new = before.get(key, 0.0), after.get(key, 0.0)
        if abs(old - new) > 0.5:
            table.add_row(*key, *(size_text(n) if n else "-" for n in (old, new)))
    figures = [
        ("sent per device", plan.bytes_per_device, other.bytes_per_device),
        ("held at the peak", plan.memory_per_device, other.memory_per_device),
    ]
    lines = [f"  {what}: {size_text(a)} -> {size_text(b)}" for what, a, b in figures]
    return rendered(table if table.row_count else "  the same collectives", lines)


def rendered(first: Any, lines: Sequence[str] = (), width: int = 140) -> str:
    """A rich table and lines below it as text."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, force_jupyter=False)
    console.print(first)
    for line in lines:
        console.print(line, highlight=False)
    return out.getvalue()
