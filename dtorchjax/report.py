"""A plan for people and for programs: table, JSON, HTML, memory."""

from __future__ import annotations

import collections
import html
import io
import json
import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from dtorchjax import hlo
from dtorchjax.errors import PlacementError, size_text
from dtorchjax.graph import Barrier, Loop, Node, Scope, Value
from dtorchjax.placements import Joint, local_shape

if TYPE_CHECKING:
    from dtorchjax.plan import Plan

COLUMNS = ("where", "needed by", "collective", "axes", "bytes x times", "why")


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
        groups.setdefault((c.where, c.primitive, c.kind, ",".join(c.axes), c.why), []).append(c)
    rows = []
    for (where, primitive, kind, axes, why), group in groups.items():
        count = sum(c.times for c in group)
        amount = size_text(group[0].bytes) if len({c.bytes for c in group}) == 1 else "various"
        rows.append((where, primitive, kind, axes, f"{amount} x {count:g}", why))
    return rows


def table_text(plan: Plan, width: int = 140) -> str:
    """Every collective, the totals by kind and axes, and what the plan is worth."""
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    for row in _rows(plan):
        table.add_row(*row)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(table)
    for (kind, axes), sent in sorted(totals(plan).items()):
        console.print(f"  {kind} over {axes}: {size_text(sent)}", highlight=False)
    console.print(
        f"  {size_text(plan.bytes_per_device)} sent per device; "
        f"{size_text(plan.memory_per_device)} of arrays live at the peak; "
        f"cost {size_text(plan.cost)}"
        + (f", no plan below {size_text(known)}" if (known := plan.known_bound) else ""),
        highlight=False,
    )
    return out.getvalue()


def to_json(plan: Plan) -> str:
    """The plan's collectives and totals as JSON text."""
    return json.dumps(
        dict(
            mesh={n: int(s) for n, s in zip(plan.mesh.axis_names, plan.sizes, strict=True)},
            bytes_per_device=plan.bytes_per_device,
            memory_per_device=plan.memory_per_device,
            cost=plan.cost,
            bound=plan.known_bound,
            collectives=[c.as_dict() for c in plan.collectives],
        ),
        indent=1,
    )


def to_html(plan: Plan) -> str:
    cells = lambda row, tag: "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row)  # noqa: E731
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in _rows(plan))
    return (
        f"<table><thead><tr>{cells(COLUMNS, 'th')}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{size_text(plan.bytes_per_device)} sent per device, "
        f"{size_text(plan.memory_per_device)} of arrays at the peak</p>"
    )


def verify(plan: Plan, text: str) -> None:
    """See `Plan.verify`; `text` is optimized HLO."""
    sizes = dict(zip(plan.mesh.axis_names, plan.sizes, strict=True))
    planned: dict[str, float] = collections.defaultdict(float)
    found: dict[str, float] = collections.defaultdict(float)
    for c in plan.collectives:
        group = f"groups of {math.prod(sizes[a] for a in c.axes)}"
        planned["permutes" if c.kind == "permute" else group] += c.bytes * c.times
    for sent in hlo.collectives(text):
        permute = sent.kind == "collective-permute"
        found["permutes" if permute else f"groups of {sent.group}"] += sent.sent * sent.times
    wrong = [
        f"  {where}: planned {size_text(planned[where])}, compiled {size_text(found[where])}"
        for where in sorted({*planned, *found})
        if abs(planned[where] - found[where]) > max(64, 0.02 * found[where])
    ]
    if wrong:
        raise PlacementError("\n".join(["the compiled program sends other bytes:", *wrong]))


# ---- memory --------------------------------------------------------------------------------------


def peak_memory(plan: Plan) -> int:
    """Bytes of arrays that are live at once on one device, at most; fusion may need less.

    Arguments stay live throughout; a value and its copies from its first to its last use.
    """
    inputs = sum(_size(plan, n.outputs[0]) for n in [*plan.graph.inputs, *plan.graph.constants])
    return int(inputs + _peak(plan, plan.graph.top))


def _size(plan: Plan, value: Value) -> float:
    places: list[Joint] = [plan.produced(value)]
    places += [move.target for move, _, _ in plan.moves.get(value, ())]
    shapes = (local_shape(value.aval.shape, w, plan.sizes) for w in places)
    return sum(math.prod(shape) for shape in shapes) * value.aval.dtype.itemsize


def _touches(step: Any) -> tuple[list[Value], list[Value], list[Scope]]:
    """Values that a step of a scope reads and makes in this scope, and its inner scopes."""
    if isinstance(step, Node):
        return step.inputs, step.outputs, []
    if isinstance(step, Barrier):
        return [p.inputs[0] for p in step.ports], [p.outputs[0] for p in step.ports], []
    assert isinstance(step, Loop)
    first = [p.inputs[0] for p in [*step.consts, *step.carries, *step.entering]]
    if step.kind == "cond" and step.test is not None:
        first.append(step.test.inputs[0])
    last = [p.outputs[-1] for p in [*step.carries, *step.leaving]]
    return first, last, step.scopes


def _peak(plan: Plan, scope: Scope) -> float:
    last: dict[Value, int] = {}
    steps = [_touches(step) for step in scope.steps]
    for i, (reads, _, _) in enumerate(steps):
        last.update((v, i) for v in reads)
    for node in plan.graph.outputs:
        last[node.inputs[0]] = len(steps)
    live: dict[Value, float] = {}
    peak = 0.0
    for i, (_, makes, scopes) in enumerate(steps):
        live.update((v, _size(plan, v)) for v in makes)
        inner = max((_peak(plan, s) for s in scopes), default=0.0)
        peak = max(peak, sum(live.values()) + inner)
        live = {v: size for v, size in live.items() if last.get(v, -1) > i}
    return peak
