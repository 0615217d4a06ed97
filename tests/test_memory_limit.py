"""`memory_limit`: plans that hold less, with the same results."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dtorchjax as dt
from dtorchjax import memory

LAYERS, WIDTH, BATCH = 6, 256, 512


@pytest.fixture(scope="module")
def mesh():
    return dt.init_device_mesh((8,), ("dp",))


def block(x, w):
    return x + jnp.tanh(jax.nn.relu(x @ w[0]) @ w[1])


def training_step(loss):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value

    return step


def tied(w, x):
    """The first matrix is used at both ends, some activations early and late."""
    first = w[0][0]
    y = x @ first
    for layer in w[1:]:
        y = block(y, layer) * jnp.tanh(x)
    return jnp.mean((y @ first.T - x) ** 2) + jnp.mean(y**2)


def scanned(w, x):
    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, w)
    return jnp.mean(x**2)


def unrolled(w, x):
    for layer in w:
        x = block(x, layer)
    return jnp.mean(x**2)


def arguments(loss):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, 2, WIDTH, WIDTH)).astype("float32") * 0.05
    x = rng.normal(size=(BATCH, WIDTH)).astype("float32")
    return (w if loss is scanned else list(w)), x


def weights(loss):
    """Fully sharded, on the first dim of a matrix."""
    return ["S2"] if loss is scanned else [["S1"]] * LAYERS


def gathered(plan):
    return sum(c.bytes * c.times for c in plan.collectives if c.kind == "all-gather")


@pytest.mark.parametrize("part", [0.9, 0.6, 0.01])
def test_values_under_any_limit(mesh, part):
    step, args = training_step(tied), arguments(unrolled)
    options = dict(mesh=mesh, in_placements=(weights(unrolled), ["S0"]))
    limit = part * dt.explain(step, *args, **options).memory_per_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = dt.jit(step, memory_limit=limit, **options)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [scanned, unrolled])
def test_weights_are_gathered_again_for_the_backward_pass(mesh, loss):
    step, args = training_step(loss), arguments(loss)
    options = dict(mesh=mesh, in_placements=(weights(loss), ["S0"]))
    kept = dt.explain(step, *args, **options)
    limit = 0.65 * kept.memory_per_device
    limited = dt.jit(step, memory_limit=limit, **options)
    plan = limited.explain(*args)
    assert plan.memory_per_device <= limit
    assert gathered(plan) > 1.5 * gathered(kept)
    compiled = limited.lower(*args).compile()
    plan.verify(compiled)  # XLA has not merged the two gathers
    before = dt.jit(step, **options).lower(*args).compile().memory_analysis()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * before.temp_size_in_bytes
    for a, b in zip(jax.tree.leaves(limited(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def attention(x, w):
    """A layer whose residuals are many and large: scores, softmax, gelu."""
    q, k, v = (x @ w[i] for i in range(3))
    scores = jax.nn.softmax(q @ k.mT / 8, -1)
    return x + jax.nn.gelu(scores @ v @ w[3])


@pytest.mark.parametrize("part, contractions", [(0.8, False), (0.45, True)])
def test_residuals_are_computed_again(mesh, part, contractions):
    """First what costs no contraction; the whole layer only where that is not enough."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(4, 4, 32, 32)).astype("float32") * 0.2
    x = rng.normal(size=(8, 64, 32)).astype("float32")

    def loss(w, x):
        x, _ = lax.scan(lambda x, w: (attention(x, w), None), x, w)
        return jnp.mean(x**2)

    step = training_step(loss)
    options = dict(mesh=mesh, in_placements=(["R"], ["S0"]))
    kept = dt.explain(step, w, x, **options)
    limited = dt.jit(step, memory_limit=part * kept.memory_per_device, **options)
    plan = limited.explain(w, x)
    assert plan.memory_per_device <= part * kept.memory_per_device
    count = lambda p: sum(  # noqa: E731
        n.scope.times for n in p.graph.nodes if n.name == "dot_general"
    )
    assert (count(plan) > count(kept)) == contractions
    assert len(plan.graph.nodes) > len(kept.graph.nodes)
    for a, b in zip(jax.tree.leaves(limited(w, x)), jax.tree.leaves(step(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dropout_masks_are_the_same_again(mesh):
    """What is drawn from keys is drawn alike when it is computed again."""
    w = np.linspace(-1, 1, 4 * 32 * 32, dtype="float32").reshape(4, 32, 32)
    x = np.ones((16, 32), "float32")

    def loss(w, x, key):
        def layer(x, wk):
            w, k = wk
            kept = jax.random.bernoulli(k, 0.5, x.shape)
            return jnp.where(kept, jnp.tanh(x @ w), 0.0) * 2, None

        x, _ = lax.scan(layer, x, (w, jax.random.split(key, 4)))
        return jnp.mean(x**2)

    step = jax.value_and_grad(loss)
    options = dict(mesh=mesh, in_placements=(["S1"], ["S0"], ["R"]))
    key = jax.random.key(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        limited = dt.jit(step, memory_limit=1.0, **options)
        value, gradient = limited(w, x, key)
    expected = step(w, x, key)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-7)


def test_a_limit_that_cannot_be_kept_is_a_warning(mesh):
    step, args = training_step(scanned), arguments(scanned)
    limited = dt.jit(step, mesh=mesh, in_placements=(["S2"], ["S0"]), memory_limit=1000.0)
    with pytest.warns(UserWarning, match=r"memory_limit=1000 B.*smallest one holds"):
        plan = limited.explain(*args)
    assert plan.memory_per_device > 1000


def test_a_limit_that_is_kept_anyway_changes_nothing(mesh):
    step, args = training_step(scanned), arguments(scanned)
    options = dict(mesh=mesh, in_placements=(["S2"], ["S0"]))
    plan = dt.explain(step, *args, memory_limit=1e9, **options)
    assert plan.bytes_per_device == dt.explain(step, *args, **options).bytes_per_device


@pytest.mark.parametrize("bad", [0, -1, float("nan")])
def test_a_limit_is_a_number_of_bytes(bad):
    with pytest.raises(ValueError, match="memory_limit is a number of bytes"):
        dt.jit(lambda x: x, memory_limit=bad)


def test_donated_arguments_hold_the_results(mesh):
    w, x = arguments(scanned)
    options = dict(mesh=mesh, in_placements=(["R"], ["S0"]))
    kept = dt.explain(training_step(scanned), w, x, **options)
    donated = dt.explain(training_step(scanned), w, x, donate_argnums=0, **options)
    assert kept.memory_per_device - donated.memory_per_device == w.nbytes


def test_fused_results_are_not_counted(mesh):
    """A chain of elementwise operations holds its argument and its result."""
    x = np.ones((64, 1024), "float32")
    plan = dt.explain(lambda x: jnp.tanh(x * 2 + 1) ** 3, x, mesh=mesh, in_placements="S0")
    assert plan.memory_per_device == 2 * x.nbytes / 8
    assert memory.peak(plan).bytes == plan.memory_per_device


def test_far_uses_one_after_the_other(mesh):
    """The value that a barrier waits for may itself have a far use."""

    def program(w, x):
        y = x @ w
        for _ in range(20):
            y = jnp.sin(y)
        z = y * 2
        out = z @ w
        for _ in range(20):
            out = jnp.sin(out)
        return out + z

    w, x = np.eye(64, dtype="float32"), np.ones((1024, 64), "float32")
    options = dict(mesh=mesh, in_placements=(["S0"], ["S0"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = dt.jit(program, memory_limit=1.0, **options)(w, x)
    np.testing.assert_allclose(got, program(w, x), rtol=1e-5)
