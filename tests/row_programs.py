"""Programs in which each equation is in a stated row, on real meshes, compared with one device.

`python tests/row_programs.py 20` takes every declared row twenty times, `... 5 20 sort` those of
`sort` in rounds 20 to 24; random programs
(`fuzz.py`) seldom come by a Cholesky factor, a random key or a complex number.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import simulated
from jax import numpy as jnp
from layouts import place
from oracle import TOLERANCE, Equation
from samples import NEWER, SAMPLES, sampled

import dtorchjax as dt
from dtorchjax.notation import Row
from dtorchjax.rows import JointRow, joint_rows

MESHES = ((2,), (3,), (2, 3))
PIECES = 12
"""Equations of one program."""


NAMES = tuple(sorted(name for name in SAMPLES if name not in NEWER or jax.__version__ >= "0.12"))


@dataclasses.dataclass(eq=False)
class Piece:
    """An equation and where its operands and results lie."""

    label: str
    equation: Equation
    row: JointRow
    data: int

    def names(self) -> list[str]:
        """Its rows, one per mesh axis."""
        axes = range(len(self.row.inputs[0].placements if self.row.inputs else ()))
        both = self.row.inputs, self.row.outputs
        rows = [Row(*(tuple(j.placements[a] for j in side) for side in both)) for a in axes]
        return [f"{self.equation.name}: {row}" for row in rows]

    def placed(self, mesh: Any) -> list[Any]:
        operands = map(simulated.on_host, self.equation.operands[self.data])
        return [place(x, mesh, spec(j)) for x, j in zip(operands, self.row.inputs, strict=True)]


def spec(where: Any) -> list[str]:
    return [str(p) for p in where.placements]


@functools.cache
def choices(
    sizes: tuple[int, ...], names: tuple[str, ...]
) -> dict[str, list[tuple[str, Equation, JointRow]]]:
    """What can be tried on a mesh, by the row of any axis: some divide on one of them only."""
    found: dict[str, list[tuple[str, Equation, JointRow]]] = {}
    for name in names:
        for label, e in sampled(name).items():
            rows = e.signature().rows
            for joint_row in joint_rows([rows] * len(sizes), e.in_avals, e.out_avals, sizes):
                plain = tuple(range(len(sizes)))
                if any(j.order != plain for j in (*joint_row.inputs, *joint_row.outputs)):
                    continue
                for row in set(Piece(label, e, joint_row, 0).names()):
                    found.setdefault(row, []).append((label, e, joint_row))
    return found


def programs(
    round_number: int, names: tuple[str, ...] = NAMES
) -> Iterator[tuple[tuple[int, ...], list[Piece]]]:
    """Every row of these primitives once: a mesh and the pieces of one program on it."""
    rng = np.random.default_rng(round_number)
    sizes = MESHES[round_number % len(MESHES)]
    table = choices(sizes, names)
    pieces = []
    for name in rng.permutation(sorted(table)):
        label, equation, row = table[name][rng.integers(len(table[name]))]
        pieces.append(Piece(label, equation, row, int(rng.integers(len(equation.operands)))))
    for first in range(0, len(pieces), PIECES):
        yield sizes, pieces[first : first + PIECES]


class Difference(AssertionError):
    """An equation whose values on several devices are not those of one."""


def check(sizes: tuple[int, ...], pieces: list[Piece]) -> Counter[str]:
    """One program of these equations; how often each row was taken. Raises Difference."""
    mesh = dt.init_device_mesh(sizes, ("a", "b")[: len(sizes)])
    counts = [len(p.equation.in_avals) for p in pieces]

    def program(*xs: Any) -> list[list[Any]]:
        found, first = [], 0
        for piece, count in zip(pieces, counts, strict=True):
            found.append(piece.equation.bind(None, *xs[first : first + count]))
            first += count
        return found

    placed = [x for piece in pieces for x in piece.placed(mesh)]
    out = [[spec(j) for j in piece.row.outputs] for piece in pieces]
    step = dt.jit(program, mesh=mesh, redistribute="never", out_placements=out)
    ours = step(*placed)
    for piece, found in zip(pieces, ours, strict=True):
        wanted = piece.equation.whole(piece.data)
        operands = piece.equation.operands[piece.data]
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            value = a.full_tensor() if isinstance(a, dt.DTensor) else a
            if not same(value, b, operands):
                raise Difference(f"result {i} of {piece.names()} ({piece.label}) on {sizes}")
    return Counter(name for piece in pieces for name in piece.names())


def same(a: Any, b: Any, operands: list[Any]) -> bool:
    if simulated.is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == b).all())
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    sizes = [np.abs(x[np.isfinite(x)]).max(initial=1) for x in (b, *floats(operands))]
    tolerance = 8 * TOLERANCE.get(str(operands[0].dtype) if operands else "", 2e-5)
    return np.allclose(a, b, tolerance, tolerance * float(max(sizes)), equal_nan=True)


def floats(operands: list[Any]) -> list[np.ndarray]:
    found = [np.asarray(x) for x in operands if not simulated.is_key(x)]
    return [np.abs(x.astype("complex64")) for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]


def smaller(sizes: tuple[int, ...], pieces: list[Piece]) -> str:
    """What is wrong with which pieces of a program."""
    wrong = []
    for piece in pieces:
        try:
            check(sizes, [piece])
        except Exception as error:
            wrong.append(f"{piece.names()} ({piece.label}) on {sizes}: {str(error)[:400]}")
    return "\n".join(wrong) or "only together"


def main(arguments: list[str]) -> int:
    rounds = int(arguments[0]) if arguments else 3
    first = int(arguments[1]) if len(arguments) > 1 else 0
    names = tuple(arguments[2:]) or NAMES
    rows: Counter[str] = Counter()
    count = failed = 0
    for number in range(first, first + rounds):
        for sizes, pieces in programs(number, names):
            count += 1
            try:
                rows += check(sizes, pieces)
            except Exception as error:
                failed += 1
                print(f"round {number}: {error}\n{smaller(sizes, pieces)}", flush=True)
        jax.clear_caches()
    print(f"{count} programs: {failed} differ; {len(rows)} rows", flush=True)
    seldom = [f"{rows[row]:6}  {row}" for row in sorted(rows) if rows[row] < 20]
    print(f"{len(seldom)} rows less than 20 times", *seldom, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    dt.simulate_devices(8)
    sys.exit(main(sys.argv[1:]))
