"""Least total cost of one label per variable, with a cost per label and per pair on every edge.

In four steps: (1) variables with at most two neighbours are eliminated exactly; (2) sequential
tree-reweighted message passing gives a lower bound and first labels (Kolmogorov, "Convergent
tree-reweighted message passing for energy minimization", PAMI 2006); (3) descent by exact
minimisation over random induced forests, all labels outside the forest fixed; (4) a mixed-integer
program on the labels that the messages prefer, by HiGHS, and descent from there.

Plain numpy; nothing here knows about arrays or meshes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from dtorchjax.cost import IMPOSSIBLE

_LARGEST = 4e7  # elements of one elimination


class Problem:
    """Variables with label costs, and edges with a matrix of costs."""

    def __init__(self) -> None:
        self.unary: list[np.ndarray] = []
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.neighbours: list[set[int]] = []

    def variable(self, costs: Iterable[float]) -> int:
        self.unary.append(np.asarray(list(costs), float))
        self.neighbours.append(set())
        return len(self.unary) - 1

    def connect(self, i: int, j: int, costs: np.ndarray) -> None:
        """Add `costs[label of i, label of j]`."""
        if i == j:
            self.unary[i] = self.unary[i] + np.diag(costs)
            return
        if i > j:
            i, j, costs = j, i, costs.T
        if (i, j) in self.edges:
            self.edges[i, j] = self.edges[i, j] + costs
        else:
            self.edges[i, j] = costs
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)

    def edge(self, i: int, j: int) -> np.ndarray:
        return self.edges[i, j] if i < j else self.edges[j, i].T

    def cut(self, i: int, j: int) -> None:
        self.edges.pop((min(i, j), max(i, j)))
        self.neighbours[i].discard(j)
        self.neighbours[j].discard(i)

    def cost(self, labels: dict[int, int] | Sequence[int], among: Iterable[int]) -> float:
        chosen = set(among)
        total = sum(self.unary[i][labels[i]] for i in chosen)
        return float(
            total
            + sum(
                m[labels[i], labels[j]]
                for (i, j), m in self.edges.items()
                if i in chosen and j in chosen
            )
        )


@dataclasses.dataclass
class Solution:
    labels: list[int]
    cost: float
    bound: float


def solve(problem: Problem, seed: int = 0, small: int = 8, large: int = 24) -> Solution:
    """Labels of low cost, the cost, and a lower bound of it.

    The mixed-integer step keeps `small` labels per variable, `large` where there are many.
    Deterministic for one seed: it never looks at a clock.
    """
    reduction = Reduction(problem)
    core = reduction.core()
    if not core:
        return Solution(reduction.expand({}), reduction.constant, reduction.constant)
    core_problem = reduction.problem
    rng = np.random.default_rng(seed)
    messages = Messages(core_problem, core)
    bound, labels = messages.run(20)
    best = descend(core_problem, core, labels, rng)
    gap = 1e-3 * (abs(best[1]) + abs(reduction.constant))
    if best[1] - bound > gap:
        found = mixed_integer(core_problem, core, messages.margins(), best[0], small, large)
        if found is not None:
            best = min(best, descend(core_problem, core, found, rng), key=lambda f: f[1])
    return Solution(
        reduction.expand(best[0]), best[1] + reduction.constant, bound + reduction.constant
    )


# ---- (1) exact elimination -----------------------------------------------------------------------


class Reduction:
    """Eliminates variables from a copy of a problem and remembers how to get their labels back."""

    def __init__(self, problem: Problem):
        self.problem = Problem()
        self.problem.unary = list(problem.unary)
        self.problem.edges = dict(problem.edges)
        self.problem.neighbours = [set(n) for n in problem.neighbours]
        self.live = set(range(len(problem.unary)))
        self.constant = 0.0
        self.log: list[tuple] = []
        self._eliminate()

    def core(self) -> list[int]:
        return sorted(self.live)

    def _eliminate(self) -> None:
        p = self.problem
        heap = [(len(p.neighbours[i]), i) for i in self.live]
        heapq.heapify(heap)
        while heap:
            degree, i = heapq.heappop(heap)
            if i not in self.live or degree != len(p.neighbours[i]):
                continue
            costs, around = p.unary[i], sorted(p.neighbours[i])
            if len(costs) == 1:
                for j in around:
                    p.unary[j] = p.unary[j] + p.edge(i, j)[0]
                    p.cut(i, j)
                self.log.append(("fold", i))
                self.constant += float(costs[0])
            elif degree == 0:
                self.log.append(("free", i, costs))
                self.constant += float(costs.min())
            elif degree == 1:
                (j,) = around
                table = costs[:, None] + p.edge(i, j)
                p.cut(i, j)
                p.unary[j] = p.unary[j] + table.min(0)
                self.log.append(("leaf", i, j, table.argmin(0)))
            elif degree == 2:
                j, k = around
                if len(costs) * len(p.unary[j]) * len(p.unary[k]) > _LARGEST:
                    continue
                left, right = costs[:, None] + p.edge(i, j), p.edge(i, k)
                p.cut(i, j)
                p.cut(i, k)
                best = min_plus(left.T, right)
                self.log.append(("chain", i, j, k, left, right))
                p.connect(j, k, best)
            else:
                continue
            self.live.discard(i)
            for j in around:
                heapq.heappush(heap, (len(p.neighbours[j]), j))

    def expand(self, labels: dict[int, int]) -> list[int]:
        """Labels of the core -> labels of all variables."""
        found = dict(labels)
        for step in reversed(self.log):
            i = step[1]
            if step[0] == "fold":
                found[i] = 0
            elif step[0] == "free":
                found[i] = int(step[2].argmin())
            elif step[0] == "leaf":
                found[i] = int(step[3][found[step[2]]])
            else:
                _, _, j, k, left, right = step
                found[i] = int((left[:, found[j]] + right[:, found[k]]).argmin())
        return [found[i] for i in range(len(found))]


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`out[j, k] = min over i of a[j, i] + b[i, k]`."""
    out = np.empty((a.shape[0], b.shape[1]))
    rows = max(1, int(2e6) // max(1, b.size))
    for start in range(0, a.shape[0], rows):
        block = a[start : start + rows]
        out[start : start + rows] = (block[:, :, None] + b[None]).min(1)
    return out


# ---- (3) descent ---------------------------------------------------------------------------------


def descend(
    problem: Problem,
    order: Sequence[int],
    labels: dict[int, int],
    rng: np.random.Generator,
    patience: int = 20,
) -> tuple[dict[int, int], float]:
    """Exact minimisation over random induced forests until `patience` of them bring nothing."""
    best, cost, idle = dict(labels), problem.cost(labels, order), 0
    while idle < patience:
        found = _forest(problem, order, best, rng)
        new = problem.cost(found, order)
        idle = 0 if new < cost - 1e-6 else idle + 1
        if new <= cost:
            best, cost = found, new
    return best, cost


def _forest(
    problem: Problem, order: Sequence[int], labels: dict[int, int], rng: np.random.Generator
) -> dict[int, int]:
    root: dict[int, int] = {}
    tree: dict[int, list[int]] = {}

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i in rng.permutation(np.asarray(order)).tolist():
        roots = [find(j) for j in problem.neighbours[i] if j in root]
        if len(roots) == len(set(roots)):
            root[i] = i
            tree[i] = [j for j in problem.neighbours[i] if j in tree]
            for j in tree[i]:
                tree[j].append(i)
            for r in roots:
                root[r] = i
    costs = {}
    for i in tree:
        total = problem.unary[i]
        for j in problem.neighbours[i]:
            if j not in tree:
                total = total + problem.edge(i, j)[:, labels[j]]
        costs[i] = total
    found, seen = dict(labels), set()
    for start in tree:
        if start in seen:
            continue
        stack, visit = [(start, -1)], []
        while stack:
            i, parent = stack.pop()
            seen.add(i)
            visit.append((i, parent))
            stack += [(j, i) for j in tree[i] if j != parent]
        choice = {}
        for i, parent in reversed(visit):
            if parent >= 0:
                both = costs[i][:, None] + problem.edge(i, parent)
                choice[i] = both.argmin(0)
                costs[parent] = costs[parent] + both.min(0)
        for i, parent in visit:
            found[i] = int(costs[i].argmin()) if parent < 0 else int(choice[i][found[parent]])
    return found


# ---- (2) lower bound -----------------------------------------------------------------------------


class Messages:
    """Sequential tree-reweighted message passing along the order of the variables."""

    def __init__(self, problem: Problem, order: Sequence[int]):
        self.problem, self.order = problem, list(order)
        place = {i: k for k, i in enumerate(order)}
        self.sent: dict[tuple[int, int], np.ndarray] = {}
        for i, j in problem.edges:
            if i in place and j in place:
                self.sent[i, j] = np.zeros(len(problem.unary[j]))
                self.sent[j, i] = np.zeros(len(problem.unary[i]))
        self.before = {i: [j for j in problem.neighbours[i] if place[j] < place[i]] for i in order}
        self.after = {i: [j for j in problem.neighbours[i] if place[j] > place[i]] for i in order}
        self.share = {i: 1 / max(1, len(self.before[i]), len(self.after[i])) for i in order}

    def run(self, rounds: int) -> tuple[float, dict[int, int]]:
        """(lower bound, labels)."""
        best: tuple[float, dict[int, int]] = (np.inf, {})
        bound = -np.inf
        for _ in range(rounds):
            labels = self._forward()
            cost = self.problem.cost(labels, self.order)
            best = min(best, (cost, labels), key=lambda f: f[0])
            new = self._backward()
            done = new - bound < 1e-6 * abs(new) or best[0] - new < 1e-6 * abs(new)
            bound = max(bound, new)
            if done:
                break
        return bound, best[1]

    def belief(self, i: int) -> np.ndarray:
        total = self.problem.unary[i]
        for j in self.problem.neighbours[i]:
            total = total + self.sent[j, i]
        return total

    def margins(self) -> dict[int, np.ndarray]:
        return {i: (b := self.belief(i)) - b.min() for i in self.order}

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
            belief = self.belief(i)
            for j in self.after[i]:
                self._send(i, j, belief)
        return labels

    def _backward(self) -> float:
        bound = 0.0
        for i in reversed(self.order):
            belief = self.belief(i)
            least = float(belief.min())
            belief = belief - least
            bound += least
            for j in self.before[i]:
                bound += self._send(i, j, belief)
        return bound


# ---- (4) mixed-integer program -------------------------------------------------------------------


def mixed_integer(
    problem: Problem,
    order: Sequence[int],
    margins: dict[int, np.ndarray],
    labels: dict[int, int],
    small: int,
    large: int,
) -> dict[int, int] | None:
    """The best labels among the few per variable with the least margin; None if none was found.

    The relaxation has one flow per pair of labels on an edge, consistent with both ends.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    kept = {}
    for i in order:
        count = large if len(margins[i]) > 60 else small
        kept[i] = np.array(
            sorted({*np.argsort(margins[i], kind="stable")[:count].tolist(), labels[i]})
        )
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
    for (i, j), matrix in problem.edges.items():
        if i not in kept or j not in kept:
            continue
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
        options={"node_limit": 200, "mip_rel_gap": 1e-3, "time_limit": 60},
    )
    if result.x is None:
        return None
    return {i: int(kept[i][result.x[start[i] : start[i] + len(kept[i])].argmax()]) for i in order}
