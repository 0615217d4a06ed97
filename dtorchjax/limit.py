"""Plans that hold no more than a device has: what is held at the peak gets a price.

The plan of least cost comes first. While it holds too much, every copy that is live at its fullest
moment is priced higher and the program is planned again: gathers move into loops, gathered weights
are fetched again for the backward pass, residuals stay sharded. Where that is not enough, residuals
of loops are computed again (`remat`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from dtorchjax.cost import part
from dtorchjax.errors import size_text
from dtorchjax.graph import Graph, Value
from dtorchjax.memory import AGAIN
from dtorchjax.placements import Joint
from dtorchjax.plan import Plan, make_plan
from dtorchjax.remat import recompute_residuals, separate_far_uses

FIRST_PRICE = 0.25
"""Bytes sent that one byte less at the fullest moment is worth at first; it doubles."""
ROUNDS = 8
HIGH_PRICE = 4.0
"""The price of every byte at any time, at which a plan holds about as little as it can."""
HALVINGS = 2


def plan_within(graph: Graph, mesh: Any, limit: float | None, strict: bool = False) -> Plan:
    """The plan of least cost found that holds at most `limit` bytes on one device.

    Where none does: a warning, and the plan that holds least. The graph may be changed.
    """
    plan = make_plan(graph, mesh, strict)
    if limit is None or plan.memory_per_device <= limit:
        return plan
    least = plan  # of the graph as it is now: plans of an earlier one are of no use
    if recompute_residuals(graph, contractions=False):
        least = make_plan(graph, mesh, strict)
        if least.memory_per_device <= limit:
            return least
    separate_far_uses(graph, _held_on_several(least))
    for last in (False, True):
        if last:
            recompute_residuals(graph, contractions=True)
        least = _priced(graph, mesh, strict, limit, last)
        if least.memory_per_device <= limit:
            return least
    warnings.warn(
        f"no plan was found that holds at most memory_limit={size_text(limit)} on one device; the "
        f"smallest one holds {size_text(least.memory_per_device)}",
        stacklevel=2,
    )
    return least


def _priced(graph: Graph, mesh: Any, strict: bool, limit: float, last: bool) -> Plan:
    """A plan within the limit as prices rise, else the one that holds least.

    Unless this is the `last` resort, the attempt ends if a price on everything does not help. The
    prices that are high enough first are then lowered by halves towards those before.
    """
    low: dict[Value, float] = {}
    least = make_plan(graph, mesh, strict, dict.fromkeys(graph.values(), HIGH_PRICE))
    if not last and least.memory_per_device > limit:
        return least
    plan = make_plan(graph, mesh, strict)
    for i in range(ROUNDS):
        if plan.memory_per_device <= limit:
            return plan
        high = dict(low)
        for value in _with_late_uses(plan.peak.live):
            high[value] = high.get(value, 0.0) + FIRST_PRICE * 2**i
        plan = make_plan(graph, mesh, strict, high)
        if plan.memory_per_device <= limit:
            return _cheaper(graph, mesh, strict, limit, low, high, plan)
        least = min(least, plan, key=lambda p: p.memory_per_device)
        low = high
    return least


def _held_on_several(plan: Plan) -> set[Value]:
    """The values that are live at the fullest moment on more devices than they need be."""
    devices = math.prod(plan.sizes)
    return {v for v, where in plan.peak.live if part(where, plan.sizes) * devices > 1.5}


def _with_late_uses(live: Iterable[tuple[Value, Joint]]) -> set[Value]:
    """The values that are live, and what carries them to late uses."""
    values = {value for value, _ in live}
    ports = (user for value in values for user, _ in value.uses if user.name == AGAIN)
    return values | {port.outputs[0] for port in ports}


def _cheaper(
    graph: Graph, mesh: Any, strict: bool, limit: float, low: dict[Value, float],
    high: dict[Value, float], plan: Plan,
) -> Plan:  # fmt: skip
    """The cheapest plan within the limit of a few between two sets of prices."""
    below, above = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        old = {value: low.get(value, 0.0) for value in high}
        prices = {value: old[value] + middle * (high[value] - old[value]) for value in high}
        found = make_plan(graph, mesh, strict, prices)
        if found.memory_per_device <= limit:
            above = middle
            plan = min(plan, found, key=lambda p: p.cost)
        else:
            below = middle
    return plan
