"""Plans against exhaustive search and against the mixed-integer program over all labels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_programs import random_arrays, random_placements, random_program
from rotation import today
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

import dtorchjax as dt
from dtorchjax import plan, program, rows
from dtorchjax.cost import IMPOSSIBLE

MOST = 3e7


@pytest.fixture(scope="module")
def mesh():
    return dt.init_device_mesh((2, 4), ("x", "y"))


def planned(mesh, seed, equations, monkeypatch):
    """(plan, the problem that it solves) of a random program."""
    rng = np.random.default_rng(seed)
    fun, shapes = random_program(rng, equations, wide=bool(seed % 2))
    posed = []

    def keep(problem, *args, **options):
        posed.append(problem)
        return solve(problem, *args, **options)

    solve = plan.solve
    monkeypatch.setattr(plan, "solve", keep)
    monkeypatch.setattr(program, "_plans", {})
    where = [random_placements(rng, s, (2, 4)) for s in shapes]
    step = dt.jit(fun, mesh=mesh, in_placements=where)
    return step.explain(*random_arrays(rng, shapes)), posed[0]


def exhaustive(problem):
    """The least cost over all choices of labels; None if there are too many to try.

    A variable whose costs depend on one other only is minimised for each choice of the other;
    what remains is tried in all combinations.
    """
    unary, edges = dict(enumerate(problem.unary)), dict(problem.edges)
    constant = 0.0
    while True:
        leaf = next(
            (i for i in unary if sum(i in e for e in edges) <= 1),
            None,
        )
        if leaf is None:
            break
        costs = unary.pop(leaf)
        edge = next((e for e in edges if leaf in e), None)
        if edge is None:
            constant += costs.min()
            continue
        matrix = edges.pop(edge) if edge[0] == leaf else edges.pop(edge).T
        other = edge[1] if edge[0] == leaf else edge[0]
        unary[other] = unary[other] + (costs[:, None] + matrix).min(0)
    if np.prod([float(len(u)) for u in unary.values()]) > MOST:
        return None
    axes = {i: axis for axis, i in enumerate(unary)}
    total = np.zeros((1,) * len(axes))
    for i, costs in unary.items():
        total = total + costs.reshape([-1 if a == axes[i] else 1 for a in range(len(axes))])
    for (i, j), costs in edges.items():
        matrix = costs if axes[i] < axes[j] else costs.T
        total = total + matrix.reshape([len(unary[v]) if v in (i, j) else 1 for v in axes])
    return constant + float(total.min())


def mixed_integer_program(problem):
    """The least cost by HiGHS over all labels: one variable per label, one per pair on an edge."""
    unary = [np.asarray(u) for u in problem.unary]
    starts = np.cumsum([0, *map(len, unary)])
    costs, rows, columns, data, right = list(unary), [], [], [], []
    n, row = int(starts[-1]), 0
    for i, u in enumerate(unary):
        rows += [row] * len(u)
        columns += range(starts[i], starts[i + 1])
        data += [1.0] * len(u)
        right.append(1.0)
        row += 1
    for (i, j), matrix in problem.edges.items():
        pairs = n + np.arange(matrix.size).reshape(matrix.shape)
        n += matrix.size
        costs.append(matrix.ravel())
        for one, flow in ((i, pairs), (j, pairs.T)):
            for label, of_label in enumerate(flow):
                rows += [row] * (len(of_label) + 1)
                columns += [*of_label, starts[one] + label]
                data += [1.0] * len(of_label) + [-1.0]
                right.append(0.0)
                row += 1
    cost = np.concatenate(costs)
    matrix = sparse.csr_array((data, (rows, columns)), shape=(row, n))
    result = milp(
        np.where(cost < IMPOSSIBLE / 2, cost, 0) / 1e5,
        constraints=LinearConstraint(matrix, right, right),
        integrality=np.r_[np.ones(starts[-1]), np.zeros(n - starts[-1])],
        bounds=Bounds(0, np.where(cost < IMPOSSIBLE / 2, 1.0, 0.0)),
        options={"mip_rel_gap": 1e-9},
    )
    assert result.status == 0, result.message
    return result.fun * 1e5


@pytest.mark.parametrize("block", today(range(10), 10))
def test_small_programs_are_planned_like_exhaustive_search(mesh, block, monkeypatch):
    tried, seeds = 0, itertools.count(block, 10)
    while tried < 20:
        seed = next(seeds)
        with monkeypatch.context() as patch:
            found, problem = planned(mesh, seed, 1 + seed % 4, patch)
        best = exhaustive(problem)
        if best is None:
            continue
        tried += 1
        assert found.cost == pytest.approx(best, rel=1e-6), seed
        assert found.bound <= found.cost * (1 + 1e-9), seed


@pytest.mark.parametrize("block", today(range(10), 4))
def test_programs_are_planned_like_the_mixed_integer_program(mesh, block, monkeypatch):
    for seed in range(1000 + block, 1050, 10):
        with monkeypatch.context() as patch:
            found, problem = planned(mesh, seed, 5 + seed % 8, patch)
        best = mixed_integer_program(problem)
        assert found.cost == pytest.approx(best, rel=1e-6), seed


def test_equal_layers_are_planned_as_one(mesh, monkeypatch):
    """The plan by classes costs what the exact one costs, and its bound is one of the whole."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(2, 256, 256)).astype("float32") for _ in range(6)]
    x = rng.normal(size=(16, 256)).astype("float32")

    def loss(weights, x):
        for w in weights:
            x = x + jax.nn.relu(x @ w[0]) @ w[1]
        return jnp.mean(x**2)

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        return [w - 0.1 * g / (1 + norm) for w, g in zip(weights, gradients, strict=True)], value

    where = [["R", "S2"]] * 6, ["S0", "R"]
    exact = dt.explain(step, weights, x, mesh=mesh, in_placements=where)
    monkeypatch.setattr(rows, "LARGE", 1)
    monkeypatch.setattr(program, "_plans", {})
    by_class = dt.jit(step, mesh=mesh, in_placements=where)
    found = by_class.explain(weights, x)
    labels = rows.Labels(found.graph, found.sizes)
    assert len(set(labels.first.values())) < 0.6 * len(found.graph.nodes)
    assert found.cost == pytest.approx(exact.cost, rel=1e-5)
    assert found.known_bound is None
    assert exact.cost * 0.99 <= found.bound <= found.cost
    got, expected = by_class(weights, x), step(weights, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
