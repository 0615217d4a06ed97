"""The linear relaxation of a labelling problem: a lower bound, labels ruled out, labels found.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", PAMI 2006) raises a lower bound of the cost. A label whose own lower bound
is above the cost of labels that are known can be in no better solution and is dropped, which makes
later rounds faster; where the relaxation is tight, as for most programs, nothing else is left. What
remains goes to a mixed-integer program, by HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dtorchjax.cost import IMPOSSIBLE

if TYPE_CHECKING:
    from dtorchjax.solver import Problem

EQUAL = 1e-9
"""Costs that differ by less, relative to the whole, are equal."""
MOST_FLOWS = 6e3
"""Pairs of labels in the largest mixed-integer program: about a second."""


class Messages:
    """Message passing along the order of the variables; owns the problem and drops labels from it.

    `kept[i]` are the labels of variable i that are left, by their first numbers.
    """

    def __init__(self, problem: Problem, order: Sequence[int]):
        self.problem, self.order = problem, list(order)
        place = {i: k for k, i in enumerate(order)}
        self.kept = {i: np.arange(len(problem.unary[i])) for i in order}
        self.sent: dict[tuple[int, int], np.ndarray] = {}
        for i, j in problem.edges:
            if i in place and j in place:
                self.sent[i, j] = np.zeros(len(problem.unary[j]))
                self.sent[j, i] = np.zeros(len(problem.unary[i]))
        self.before = {i: [j for j in problem.neighbours[i] if place[j] < place[i]] for i in order}
        self.after = {i: [j for j in problem.neighbours[i] if place[j] > place[i]] for i in order}
        self.share = {i: 1 / max(1, len(self.before[i]), len(self.after[i])) for i in order}
        self.bound = -np.inf
        self.margins: dict[int, np.ndarray] = {}
        self._bound_of_margins = -np.inf

    def run(self, rounds: int, upper: float) -> tuple[dict[int, int], float]:
        """The best labels of some rounds, and their cost; stops early when the bound meets it."""
        best: tuple[dict[int, int], float] = ({}, np.inf)
        for _ in range(rounds):
            labels = self._forward()
            cost = self.problem.cost(labels, self.order)
            best = min(best, (labels, cost), key=lambda f: f[1])
            self._bound_of_margins = self.bound
            self.bound = max(self.bound, self._backward())
            if closed(min(best[1], upper), self.bound):
                break
        return best

    def prune(self, upper: float, labels: dict[int, int] | None = None) -> dict[int, int]:
        """Drop every label that no solution below `upper` has; `labels` stay, renumbered.

        When the backward pass comes to a variable, its margins are those of the least costs with
        each label; the bound has not fallen since the round before.
        """
        p, kept, found = self.problem, {}, {}
        for i in self.order:
            possible = self.margins[i] + self._bound_of_margins <= upper + EQUAL * abs(upper)
            if labels is not None:
                possible[labels[i]] = True
                found[i] = int(possible[: labels[i]].sum())
            kept[i] = np.flatnonzero(possible)
        for i in self.order:
            if len(kept[i]) < len(p.unary[i]):
                p.unary[i] = p.unary[i][kept[i]]
                self.kept[i] = self.kept[i][kept[i]]
                self.margins[i] = self.margins[i][kept[i]]
        for i, j in p.edges:
            if i in kept and j in kept:
                if p.edges[i, j].shape != (len(kept[i]), len(kept[j])):
                    p.edges[i, j] = p.edges[i, j][np.ix_(kept[i], kept[j])]
                    self.sent[i, j] = self.sent[i, j][kept[j]]
                    self.sent[j, i] = self.sent[j, i][kept[i]]
        return found

    def _belief(self, i: int) -> np.ndarray:
        total = self.problem.unary[i]
        for j in self.problem.neighbours[i]:
            total = total + self.sent[j, i]
        return total

    def _send(self, i: int, j: int, belief: np.ndarray) -> float:
        through = (self.share[i] * belief - self.sent[j, i])[:, None] + self.problem.edge(i, j)
        message = through.min(0)
        least = float(message.min())
        self.sent[i, j] = message - least
        return least

    def _forward(self) -> dict[int, int]:
        labels: dict[int, int] = {}
        for i in self.order:
            decided = self.problem.unary[i]
            for j in self.before[i]:
                decided = decided + self.problem.edge(j, i)[labels[j]]
            for j in self.after[i]:
                decided = decided + self.sent[j, i]
            labels[i] = int(decided.argmin())
            belief = self._belief(i)
            for j in self.after[i]:
                self._send(i, j, belief)
        return labels

    def _backward(self) -> float:
        bound = 0.0
        for i in reversed(self.order):
            belief = self._belief(i)
            least = float(belief.min())
            belief = belief - least
            self.margins[i] = belief
            bound += least
            for j in self.before[i]:
                bound += self._send(i, j, belief)
        return bound


def closed(cost: float, bound: float) -> bool:
    """The bound meets the cost: nothing is cheaper (or nothing is possible)."""
    return cost - bound <= EQUAL * abs(cost) or bound >= IMPOSSIBLE / 2


# ---- the mixed-integer program -------------------------------------------------------------------


def mixed_integer(
    problem: Problem,
    order: Sequence[int],
    margins: dict[int, np.ndarray],
    labels: dict[int, int],
) -> tuple[dict[int, int] | None, float]:
    """(The best labels found, if any; a lower bound).

    Of a large problem only the labels of least margin of each variable count, so many that there
    are no more than `MOST_FLOWS` pairs, and there is no bound. The relaxation has one flow per
    pair of labels on an edge, consistent with both ends.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    edges = {e: m for e, m in problem.edges.items() if e[0] in margins and e[1] in margins}
    counts = {i: len(margins[i]) for i in order}
    most = max(counts.values())
    while most > 2 and sum(counts[i] * counts[j] for i, j in edges) > MOST_FLOWS:
        most = most * 3 // 4
        counts = {i: min(len(margins[i]), most) for i in order}
    whole_problem = all(counts[i] == len(margins[i]) for i in order)
    kept = {}
    for i in order:
        least = np.argsort(margins[i], kind="stable")[: counts[i]]
        kept[i] = np.array(sorted({*least.tolist(), labels[i]}))
    start, n = {}, 0
    costs: list[np.ndarray] = []
    for i in order:
        start[i] = n
        n += len(kept[i])
        costs.append(problem.unary[i][kept[i]])
    whole = n
    rows, columns, data, right = [], [], [], []
    row = 0
    for i in order:
        size = len(kept[i])
        rows.append(np.full(size, row))
        columns.append(start[i] + np.arange(size))
        data.append(np.ones(size))
        right.append(1.0)
        row += 1
    for (i, j), matrix in edges.items():
        part = matrix[np.ix_(kept[i], kept[j])]
        a, b = part.shape
        flows = n + np.arange(a * b).reshape(a, b)
        n += a * b
        costs.append(part.ravel())
        for one, flow in ((i, flows), (j, flows.T)):
            size, other = flow.shape
            rows += [np.repeat(row + np.arange(size), other), row + np.arange(size)]
            columns += [flow.ravel(), start[one] + np.arange(size)]
            data += [np.ones(flow.size), -np.ones(size)]
            right += [0.0] * size
            row += size
    cost = np.concatenate(costs)
    scale = 1e6
    result = milp(
        np.minimum(cost, 1e9) / scale,
        constraints=LinearConstraint(
            sparse.csr_array(
                (np.concatenate(data), (np.concatenate(rows), np.concatenate(columns))),
                shape=(row, n),
            ),
            np.array(right),  # type: ignore[arg-type]
            np.array(right),  # type: ignore[arg-type]
        ),
        integrality=np.r_[np.ones(whole), np.zeros(n - whole)],
        bounds=Bounds(np.zeros(n), np.where(cost < IMPOSSIBLE / 2, 1.0, 0.0)),  # type: ignore[arg-type]
        options={"node_limit": 200, "mip_rel_gap": 1e-9 if whole_problem else 1e-3},
    )
    bound = -np.inf
    if whole_problem and result.mip_dual_bound is not None:
        bound = result.mip_dual_bound * scale
    if result.x is None:
        return None, bound
    chosen = {i: int(result.x[start[i] : start[i] + len(kept[i])].argmax()) for i in order}
    return {i: int(kept[i][k]) for i, k in chosen.items()}, bound
