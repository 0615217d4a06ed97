"""Layouts of whole calls in one line, and whether a call takes them without sending anything.

`(y,x) (x,.) -> (y,.)Px`: one entry per dim, the mesh axes that cut it (`.`: none, `xy`: x major),
then the axes of which the value is a sum of terms (`Px`; `Qx` a maximum, `Nx` a minimum). Before
`=>` stands what cannot stay so: it has to move first, or, if it is whole, be cut. `+>`: so says
another system whose rows keep less than ours, here the operands stay where they are; with `~>` rows
move that the table names, fewer than the whole. Axes are called x, y, z. For one axis a row
(`S0, R -> S0`) says the same.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import simulated

import dtorchjax as dt
from dtorchjax.notation import parse_row
from dtorchjax.placements import joint, parse_placements

AXES = "xyz"
TERMS = {"P": "P", "Q": "P(max)", "N": "P(min)"}
Layouts = list[list[str]]


def layout(text: str, mesh_axes: Sequence[str]) -> list[str]:
    """`(y,.)Px` as one placement per mesh axis."""
    dims, terms = re.fullmatch(r"\(([xyz.,]*)\)((?:[PQN][xyz])*)", text).groups()
    found = ["R"] * len(mesh_axes)
    for dim, axes in enumerate(dims.split(",")):
        for axis in axes.replace(".", ""):
            found[mesh_axes.index(axis)] = f"S{dim}"
    for kind, axis in re.findall("(.)(.)", terms):
        found[mesh_axes.index(axis)] = TERMS[kind]
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and the layouts that one line gives for it."""

    fun: Callable[..., Any]
    arguments: Sequence[Any]  # shapes, or arrays
    mesh_sizes: tuple[int, ...]
    line: str

    def parsed(self) -> tuple[Layouts, Layouts, Layouts]:
        """Layouts of the operands as given and as needed, and of the results."""
        if "(" not in self.line:
            row = parse_row(self.line)
            inputs, results = ([[str(p)] for p in side] for side in (row.inputs, row.outputs))
            return inputs, inputs, results
        before, after = self.line.split("->")
        given, _, needed = re.sub("[+~]>", "=>", before).partition("=>")
        parts = [given, needed or given, after]
        return tuple([layout(t, self.axes) for t in part.split()] for part in parts)  # type: ignore

    def arrays(self) -> list[Any]:
        rng = np.random.default_rng(5)
        return [_array(a, rng) for a in self.arguments]

    @property
    def mesh(self) -> Any:
        return dt.init_device_mesh(self.sizes, self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that the line names: work would be split over the others, which is no layout's."""
        return tuple(a for a in AXES if a in self.line) or ("x",)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh_sizes[AXES.index(a)] for a in self.axes)

    def check_plan(self) -> None:
        """The layouts after `=>` send nothing; those before do, unless the line says otherwise."""
        given, needed, results = self.parsed()
        out = results if len(results) > 1 else results[0]
        plan = self.program(out, "never").explain(*self.placed(needed))
        assert plan.bytes_per_device == 0, plan
        if "+>" in self.line or _only_cuts(given, needed):
            asked = None if "+>" in self.line else out
            plan = self.program(asked, "never").explain(*self.placed(given))
            assert plan.bytes_per_device == 0, plan
        elif "~>" in self.line:
            plan = self.program(None, "never").explain(*self.placed(given))
            gathers = self.program(None, "auto", needed).explain(*self.placed(given))
            assert 0 < plan.bytes_per_device < gathers.bytes_per_device
        elif "=>" in self.line:
            with pytest.raises(dt.PlacementError):
                self.program(out, "never").explain(*self.placed(given))

    def check_refused(self) -> None:
        """An error, or rows that move; with movement, the values of one device."""
        given, _, results = self.parsed()
        out = results if len(results) > 1 else results[0]
        try:
            plan = self.program(out, "never").explain(*self.placed(given))
            assert plan.bytes_per_device > 0, plan
        except dt.PlacementError:
            pass
        wanted = jax.tree.leaves(jax.jit(self.fun)(*self.arrays()))
        self._compare(self.program(None, "auto")(*self.placed(given)), wanted)

    def check_values(self) -> None:
        """Without movement from what is needed, and from what is given: as on one device."""
        given, needed, results = self.parsed()
        out = results if len(results) > 1 else results[0]
        wanted = jax.tree.leaves(jax.jit(self.fun)(*self.arrays()))
        found = self.program(out, "never")(*self.placed(needed))
        self._compare(found, wanted)
        for value, where in zip(_leaves(found), results, strict=True):
            assert value.placements == parse_placements(where)
        if given != needed:
            self._compare(self.program(None, "auto")(*self.placed(given)), wanted)

    def _compare(self, found: Any, wanted: list[Any]) -> None:
        for a, b in zip(_leaves(found), wanted, strict=True):
            a, b = np.asarray(a.full_tensor() if isinstance(a, dt.DTensor) else a), np.asarray(b)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            exact = a.dtype.kind in "biu"
            np.testing.assert_allclose(a, b, **({} if exact else {"rtol": 2e-4, "atol": 2e-4}))

    def program(self, out: Any, redistribute: str, first: Layouts = ()) -> Any:
        fun = self.fun  # results as a flat tuple, whatever the function returns

        @functools.wraps(fun)
        def flat(*args: Any) -> Any:
            moved = [dt.redistribute(x, where) for x, where in zip(args, first, strict=False)]
            leaves = jax.tree.leaves(fun(*(moved or args)))
            return tuple(leaves) if len(leaves) > 1 else leaves[0]

        asked = {} if out is None else {"out_placements": _tupled(out)}
        return dt.jit(flat, mesh=self.mesh, redistribute=redistribute, **asked)

    def placed(self, layouts: Layouts) -> list[Any]:
        arrays = self.arrays()
        assert len(layouts) == len(arrays), self.line
        return [place(x, self.mesh, where) for x, where in zip(arrays, layouts, strict=True)]


def _only_cuts(given: Layouts, needed: Layouts) -> bool:
    """Whether devices only drop a part of what they hold: new axes are minor."""
    for before, after in zip(given, needed, strict=True):
        for axis, (g, n) in enumerate(zip(before, after, strict=True)):
            if g != n and (g != "R" or not n.startswith("S") or n in before[axis + 1 :]):
                return False
    return True


def place(x: Any, mesh: Any, placements: Sequence[str]) -> Any:
    """A DTensor whose terms, if it has any, are of both signs."""
    if not any(p.startswith("P") for p in placements):
        return dt.distribute_tensor(x, mesh, list(placements))
    where, sizes = joint(parse_placements(list(placements))), tuple(mesh.devices.shape)
    parts = simulated.shards(x, where, sizes, np.random.default_rng(0))
    blocks = np.stack([parts[p] for p in simulated.devices(sizes)])
    return dt.DTensor.from_local(blocks.reshape(*sizes, *blocks.shape[1:]), mesh, placements)


def _array(argument: Any, rng: np.random.Generator) -> Any:
    if isinstance(argument, tuple):
        return rng.normal(size=argument).astype("float32")
    return np.asarray(argument)


def _tupled(out: Any) -> Any:
    return tuple(tuple(o) if isinstance(o, list) else o for o in out)


def _leaves(found: Any) -> list[Any]:
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dt.DTensor))
