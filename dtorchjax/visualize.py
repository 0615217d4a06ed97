"""Pictures of where arrays lie: one array, a tree of them, a planned program."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich import box
from rich.table import Table

from dtorchjax import _jax
from dtorchjax.arguments import layout_of_sharding, path_text
from dtorchjax.dtensor import DTensor
from dtorchjax.errors import PlacementError, size_text
from dtorchjax.parts import rows_of
from dtorchjax.place import modules_as_states
from dtorchjax.placements import Layout
from dtorchjax.plan import Plan
from dtorchjax.report import html_table, rendered
from dtorchjax.source_lines import Line, lines_of

MOST = 16
"""Rows and columns of a picture; what lies between the first and the last ones is left out."""


def visualize(x: Any) -> Picture:
    """A picture of where `x` lies: text when printed, a drawing in a notebook.

    - An array (a DTensor, a jax.Array or ShapeDtypeStruct with a NamedSharding): which device
      holds which rows of every sharded dim; a partial array as the terms of its sum.
    - A pytree or NNX model: a line for every array, by its path (as in `dt.by_path`), with the
      bytes that one device holds.
    - A plan (`step.explain(*args)`): every line of the program, where the arrays lie that it makes,
      what it sends.

    `picture.svg` is the drawing of an array, to be written to a file. Raises PlacementError for an
    array that lies on no mesh.

    >>> import dtorchjax as dt
    >>> mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    >>> print(dt.visualize(dt.ones((10, 6), mesh, ["S0", "R"])))
    f32[10,6] [dp=S0, tp=R]: 5x6, 120 B on each device
    <BLANKLINE>
      dim 0: dp
     ─────────────────────
      0:5         0 1 2 3
      5:10        4 5 6 7
    """
    if isinstance(x, Plan):
        return ProgramPicture(list(lines_of(x)))
    layout = layout_of(x)
    if layout is not None:
        return ArrayPicture(_jax.short_type(x), tuple(x.shape), x.dtype, layout)
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        raise PlacementError(
            f"{_jax.short_type(x)} lies on no mesh: dt.distribute_tensor(x, mesh, placements) "
            "puts it there"
        )
    states, _ = modules_as_states(x)
    leaves, _ = jax.tree_util.tree_flatten_with_path(states, is_leaf=_is_dtensor)
    return TreePicture([(path_text(path), leaf) for path, leaf in leaves])


def layout_of(x: Any) -> Layout | None:
    if isinstance(x, DTensor):
        return x.layout
    sharding = getattr(x, "sharding", None)
    return layout_of_sharding(sharding, len(x.shape)) if sharding is not None else None


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


class Picture:
    """What `dt.visualize` returns: `str` is text, `_repr_html_` what notebooks show."""

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)


# ---- one array -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Grid:
    """One term of an array (or all of it): which devices hold which piece."""

    rows: list[str]
    columns: list[str]
    cells: list[list[str]]


@dataclasses.dataclass(repr=False)
class ArrayPicture(Picture):
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout

    @property
    def title(self) -> str:
        held = self.layout.local_shape(self.shape)
        size = size_text(math.prod(held) * self.dtype.itemsize)
        part = "x".join(map(str, held)) if held else "one number"
        return f"{self.kind} {self.layout}: {part}, {size} on each device"

    @property
    def sharded(self) -> list[int]:
        return [d for d in range(len(self.shape)) if self.layout.joint.axes_on(d)]

    def heading(self, dims: Sequence[int]) -> str:
        """`dim 0: dp, dim 2: tp`"""
        names = self.layout.mesh.axis_names
        return ", ".join(
            f"dim {d}: {' x '.join(names[a] for a in self.layout.joint.axes_on(d))}" for d in dims
        )

    @property
    def headings(self) -> tuple[str, str]:
        return self.heading(self.sharded[:1]), self.heading(self.sharded[1:])

    @property
    def operator(self) -> str:
        """What stands between the terms."""
        partial = self.layout.joint.partial_axes()
        op = self.layout.placements[partial[0]].op if partial else "sum"  # type: ignore[union-attr]
        return "+" if op == "sum" else op

    def pieces(self, dim: int) -> list[tuple[tuple[int, ...], str]]:
        """(coordinates on the axes of a dim, the rows there) in order."""
        axes, sizes = self.layout.joint.axes_on(dim), self.layout.sizes
        cuts = self.layout.joint.cuts_on(dim, sizes)
        places = itertools.product(*(range(sizes[a]) for a in axes))
        return [(p, _ranges(*rows_of(self.shape[dim], cuts, p, np))) for p in places]

    def grids(self) -> Iterator[Grid]:
        """One for every term, all of the same rows and columns."""
        where, mesh = self.layout.joint, self.layout.mesh
        devices = mesh.devices if isinstance(mesh, Mesh) else None
        ids = (
            np.vectorize(lambda d: d.id)(devices)
            if devices is not None
            else np.arange(math.prod(self.layout.sizes)).reshape(self.layout.sizes)
        )
        partial, dims = where.partial_axes(), self.sharded
        rows = self.pieces(dims[0]) if dims else [((), "all")]
        across = [self.pieces(d) for d in dims[1:]]
        columns = [
            (tuple(p for p, _ in cs), ", ".join(text for _, text in cs))
            for cs in itertools.product(*across)
        ]
        for term in itertools.product(*(range(self.layout.sizes[a]) for a in partial)):
            cells = []
            for row, _ in rows:
                cells.append([])
                for column, _ in columns:
                    at: list[Any] = [slice(None)] * len(self.layout.sizes)
                    for a, i in zip(partial, term):
                        at[a] = i
                    for dim, place in zip(dims, (row, *column)):
                        for a, i in zip(where.axes_on(dim), place):
                            at[a] = i
                    cells[-1].append(_some([str(i) for i in ids[tuple(at)].ravel()], 4, " "))
            yield Grid([t for _, t in rows], [t for _, t in columns], cells)

    def __str__(self) -> str:
        parts = []
        for i, grid in enumerate(self.grids()):
            if i == MOST:
                parts.append(f"{self.operator} ...\n")
                break
            down, across = self.headings
            table = Table(down, *_shortened(grid.columns), box=box.SIMPLE_HEAD, title=across)
            if not across:
                table.columns[1].header = ""
            for name, cells in _shortened(list(zip(grid.rows, grid.cells)), ("...", ["..."])):
                table.add_row(name, *_shortened(cells))
            text = "\n".join(line.rstrip() for line in rendered(table).splitlines())
            parts.append((f"{self.operator}" if i else "") + text.rstrip())
        return "\n".join([self.title, *parts])

    @property
    def svg(self) -> str:
        """The picture as a drawing: a colour for every piece, its devices written in it."""
        return _drawing(self)

    def _repr_html_(self) -> str:
        return self.svg


def _ranges(index: np.ndarray, real: np.ndarray) -> str:
    """`0:4`, `0:2 6:8`, `-` where there are no rows."""
    rows = index[real]
    if not len(rows):
        return "-"
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [f"{run[0]}:{run[-1] + 1}" for run in np.split(rows, breaks)]
    return _some(runs, 4, " ")


def _some(words: Sequence[str], most: int, between: str) -> str:
    """All words, or the first ones, the last and how many they are."""
    if len(words) <= most:
        return between.join(words)
    return between.join([*words[: most - 2], "...", words[-1]]) + f" ({len(words)})"


def _shortened(items: Sequence[Any], gap: Any = "...") -> list[Any]:
    if len(items) <= MOST:
        return list(items)
    return [*items[: MOST - 2], gap, items[-1]]


WIDE, HIGH, LEFT, TOP, LETTER = 76, 30, 84, 58, 6.6
COLOURS = ["#8ecae6", "#ffb703", "#95d5b2", "#ffafcc", "#cdb4db", "#f4a261", "#e9ff70", "#a9d6e5"]


def _drawing(picture: ArrayPicture) -> str:
    found: list[str] = []

    def text(x: float, y: float, words: str, how: str = "") -> None:
        found.append(f'<text x="{x:g}" y="{y:g}" {how}>{html.escape(words)}</text>')

    down, across = picture.headings
    x, bottom = 8.0, 0.0
    widest = len(picture.title) * LETTER + 16
    for i, grid in enumerate(picture.grids()):
        if i:
            text(x, TOP + HIGH, picture.operator if i < 4 else "...")
            x += 12 + len(picture.operator) * LETTER
        if i == 4:
            break
        columns, rows = _shortened(grid.columns), _shortened(list(zip(grid.rows, grid.cells)), None)
        cell = max(WIDE, *(len(c) * LETTER + 12 for row in grid.cells for c in row))
        cell = max(cell, *(len(c) * LETTER + 12 for c in columns))
        left = x + (max(LEFT, len(down) * LETTER + 10) if down else 0)
        text(x, TOP - 6, down)
        text(left, TOP - 24, across)
        for j, name in enumerate(columns if across else ()):
            text(left + (j + 0.5) * cell, TOP - 6, name, 'text-anchor="middle"')
        for r, row in enumerate(rows):
            y = TOP + r * HIGH
            if row is None:
                text(left, y + 20, "...")
                continue
            text(left - 8, y + 20, row[0] if down else "", 'text-anchor="end"')
            for j, devices in enumerate(_shortened(row[1])):
                colour = COLOURS[(r * len(columns) + j) % len(COLOURS)]
                found.append(
                    f'<rect x="{left + j * cell:g}" y="{y:g}" width="{cell:g}" height="{HIGH}" '
                    f'fill="{colour}" stroke="#555"/>'
                )
                text(left + (j + 0.5) * cell, y + 20, devices, 'text-anchor="middle"')
        x = left + len(columns) * cell + 14
        bottom = max(bottom, TOP + len(rows) * HIGH)
    text(8, 18, picture.title, 'font-weight="bold"')
    width, height = max(x, widest), bottom + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="monospace" font-size="11">'
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>{"".join(found)}</svg>'
    )


# ---- trees and programs --------------------------------------------------------------------------


class TablePicture(Picture):
    columns: tuple[str, ...]

    def cells(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def summary(self) -> list[str]:
        return []

    def __str__(self) -> str:
        table = Table(*self.columns, box=box.SIMPLE_HEAD)
        for row in self.cells():
            table.add_row(*row)
        text = rendered(table, self.summary())
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.cells(), self.summary())


@dataclasses.dataclass(repr=False)
class TreePicture(TablePicture):
    leaves: list[tuple[str, Any]]
    columns = ("array", "type", "placements", "on each device")

    def cells(self) -> list[tuple[str, ...]]:
        return [(path, *self.described(leaf)) for path, leaf in self.leaves]

    @staticmethod
    def held(leaf: Any) -> int:
        layout = layout_of(leaf)
        shape = leaf.shape if layout is None else layout.local_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    def described(self, leaf: Any) -> tuple[str, str, str]:
        if not hasattr(leaf, "dtype"):
            return type(leaf).__name__, "not an array", ""
        layout = layout_of(leaf)
        where = "on one device or the host" if layout is None else str(layout)
        return _jax.short_type(leaf), where, size_text(self.held(leaf))

    def summary(self) -> list[str]:
        arrays = [leaf for _, leaf in self.leaves if hasattr(leaf, "dtype")]
        whole = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        held = sum(map(self.held, arrays))
        return [f"  {size_text(whole)} in all, {size_text(held)} on each device"]


@dataclasses.dataclass(repr=False)
class ProgramPicture(TablePicture):
    lines: list[Line]
    columns = ("line", "program", "makes", "sends")

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                line.where,
                "  " * line.depth + line.text,
                "\n".join(line.makes),
                "\n".join(line.sends),
            )
            for line in self.lines
        ]


__all__ = ["visualize"]
