"""The planner's solver against exhaustive search on small problems."""

import itertools

import numpy as np
import pytest

from dtorchjax.cost import IMPOSSIBLE
from dtorchjax.solver import Problem, min_plus, solve


def random_problem(rng, variables, labels, edges, impossible=0.0):
    problem = Problem()
    sizes = rng.integers(1, labels + 1, variables)
    for n in sizes:
        problem.variable(rng.uniform(0, 1e6, n))
    for _ in range(edges):
        i, j = rng.integers(0, variables, 2)
        costs = rng.uniform(0, 1e6, (sizes[i], sizes[j]))
        costs[rng.uniform(size=costs.shape) < impossible] = IMPOSSIBLE
        problem.connect(int(i), int(j), costs)
    return problem, sizes


def cheapest(problem, sizes):
    everything = range(len(sizes))
    return min(
        problem.cost(dict(enumerate(choice)), everything)
        for choice in itertools.product(*(range(n) for n in sizes))
    )


@pytest.mark.parametrize("seed", range(60))
def test_small_problems_are_solved(seed):
    rng = np.random.default_rng(seed)
    problem, sizes = random_problem(
        rng, variables=7, labels=3, edges=int(rng.integers(4, 22)), impossible=0.1 * (seed % 3)
    )
    best = cheapest(problem, sizes)
    if best >= IMPOSSIBLE / 2:
        assert solve(problem).cost >= IMPOSSIBLE / 2
        return
    solution = solve(problem)
    chosen = dict(enumerate(solution.labels))
    assert problem.cost(chosen, range(len(sizes))) == pytest.approx(solution.cost)
    assert solution.bound <= best * (1 + 1e-9)
    assert solution.cost == pytest.approx(best, rel=1e-6)


def test_trees_are_exact():
    """What elimination can do needs nothing else: cost and bound agree."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = Problem()
        for _ in range(12):
            problem.variable(rng.uniform(0, 1, 4))
        for i in range(1, 12):
            problem.connect(i, int(rng.integers(0, i)), rng.uniform(0, 1, (4, 4)))
        solution = solve(problem)
        assert solution.cost == solution.bound


def test_the_same_problem_has_the_same_solution():
    problem, _ = random_problem(np.random.default_rng(1), 40, 6, 120)
    first, second = solve(problem), solve(problem)
    assert first.labels == second.labels and first.bound <= first.cost


def test_min_plus():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(size=(5, 4)), rng.uniform(size=(4, 6))
    expected = (a[:, :, None] + b[None]).min(1)
    np.testing.assert_array_equal(min_plus(a, b), expected)
