"""Least total cost of one label per variable, with a cost per label and per pair on every edge.

Variables with at most two neighbours are eliminated exactly. On the others the linear relaxation
gives a lower bound and rules labels out (`relaxation`), in stages; between them, descent by exact
minimisation over random induced forests, all labels outside the forest fixed, improves the labels.
Bound and labels meet for most programs; else a mixed-integer program has the last word.

Plain numpy; nothing here knows about arrays or meshes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from dtorchjax.relaxation import Messages, closed, mixed_integer

STAGE = 20
"""Rounds of messages, after which labels are improved and others dropped."""
STALLED = 0.01
"""By less of the gap in one stage the bound no longer rises."""
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


def solve(problem: Problem, seed: int = 0, rounds: int = 300) -> Solution:
    """Labels of low cost, the cost, and a lower bound of it; most often they are equal.

    Deterministic for one seed: it never looks at a clock.
    """
    reduction = Reduction(problem)
    core, rest = reduction.core(), reduction.problem
    if not core:
        return Solution(reduction.expand({}), reduction.constant, reduction.constant)
    rng = np.random.default_rng(seed)
    messages = Messages(rest, core)
    labels, cost = dict.fromkeys(core, 0), np.inf
    for _ in range(rounds // STAGE):
        before = messages.bound
        found, _ = messages.run(STAGE, cost)
        labels, cost = min(
            (labels, cost),
            *(descend(rest, core, start, rng, 3) for start in (found, labels)),
            key=lambda f: f[1],
        )
        if closed(cost, messages.bound):
            break
        labels = messages.prune(cost, labels)
        if messages.bound - before < STALLED * (cost - messages.bound):
            break
    bound = messages.bound
    if not closed(cost, bound):
        found, proved = mixed_integer(rest, core, messages.margins, labels)
        bound = max(bound, proved)
        for start in (labels, found or labels):
            labels, cost = min((labels, cost), descend(rest, core, start, rng), key=lambda f: f[1])
    chosen = {i: int(messages.kept[i][labels[i]]) for i in core}
    total = cost + reduction.constant
    return Solution(reduction.expand(chosen), total, min(total, bound + reduction.constant))


def lower_bound(problem: Problem, upper: float, gap: float, rounds: int = 300) -> float:
    """A lower bound, raised until it is within `gap` of `upper`, the cost of known labels."""
    reduction = Reduction(problem)
    core, constant = reduction.core(), reduction.constant
    if not core:
        return min(upper, constant)
    messages = Messages(reduction.problem, core)
    for _ in range(rounds // STAGE):
        before = messages.bound
        messages.run(STAGE, upper - constant)
        found = messages.bound + constant
        if found >= upper * (1 - gap) or messages.bound - before < STALLED * (upper - found):
            break
        messages.prune(upper - constant)
    return min(upper, messages.bound + constant)


# ---- exact elimination ---------------------------------------------------------------------------


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


# ---- descent -------------------------------------------------------------------------------------


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
