"""Collectives in programs for one device, read from a trace: what is sent, and how often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dtorchjax import _jax

LOOP_TRIPS = 8
"""How often a while loop in a body is thought to run."""


class Sent(NamedTuple):
    """One collective of a body: `bytes` is what one device sends in one execution.

    `axes` are numbers of mesh axes, or names as long as no mesh is known.
    """

    kind: str
    axes: tuple[Any, ...]
    bytes: float
    times: int
    dtype: str

    def numbered(self, number: Mapping[str, int]) -> Sent:
        """The same with the numbers of its axes."""
        return self._replace(axes=tuple(number[n] for n in self.axes))


KINDS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce",
    "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ppermute": "permute",
}  # fmt: skip


def collectives_of(
    program: Callable[..., Any], parts: Sequence[Any], axes: Sequence[tuple[str, int]]
) -> tuple[Sent, ...]:
    """The collectives of a program on parts of these types; their axes are names.

    `axes` are the names and sizes of the mesh axes that it may name.
    """
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(program(*xs)), axis_env=list(axes))(*parts)
    found: dict[Sent, int] = {}
    for sent in _walk(closed.jaxpr, 1, dict(axes)):
        key = sent._replace(times=1)
        found[key] = found.get(key, 0) + sent.times
    return tuple(key._replace(times=times) for key, times in found.items())


def _walk(jaxpr: Any, times: int, sizes: dict[str, int]) -> Iterator[Sent]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            yield from _sent(eqn, times, sizes)
        elif name == "cond":
            inner = [
                list(_walk(_jax.open_jaxpr(branch)[0], times, sizes))
                for branch in eqn.params["branches"]
            ]
            yield from max(inner, key=lambda found: sum(c.bytes * c.times for c in found))
        else:
            trips = {"scan": eqn.params.get("length", 1), "while": LOOP_TRIPS}.get(name, 1)
            for inner in _jax.inner_jaxprs(eqn):
                yield from _walk(inner, times * trips, sizes)


def _sent(eqn: Any, times: int, sizes: dict[str, int]) -> Iterator[Sent]:
    """One collective, by ring algorithms."""
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    over = tuple(n for n in ((named,) if isinstance(named, str) else named) if n in sizes)
    n = math.prod(sizes[name] for name in over)
    stays = all(a == b for a, b in eqn.params.get("perm", ((0, 1),)))
    if n == 1 or stays:
        return
    kind = KINDS[eqn.primitive.name]
    part = {
        "all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n, "permute": 1.0,
    }[kind]  # fmt: skip
    held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.invars)
    yield Sent(kind, over, held * part, times, str(eqn.invars[0].aval.dtype))


__all__ = ["Sent", "collectives_of"]
