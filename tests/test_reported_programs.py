"""Faults that were reported against other sharding systems: programs, and what is right.

Each value is that of one device. Strict mode may refuse with a remedy; it may not be wrong.
"""

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from rotation import today

import dtorchjax as dt

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def mesh_of(*sizes):
    return dt.init_device_mesh(sizes, ("x", "y", "z")[: len(sizes)])


def terms(mesh, *values, op="P"):
    """A pending sum (or `P(max)`, ...) with one term per device."""
    return dt.DTensor.from_local(np.array(values, dtype="float32"), mesh, [op])


def close(found, wanted, tolerance=2e-5):
    for a, b in zip(
        jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dt.DTensor)),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        a = np.asarray(a.full_tensor() if isinstance(a, dt.DTensor) else a)
        b = np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


def smoothed(logits, labels, smoothing=0.1):
    classes = logits.shape[-1]
    wanted = jax.nn.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
    return -(jax.nn.log_softmax(logits) * wanted).sum(-1).mean()


def two_losses(logits, labels):
    """Both from one log_softmax whose classes are sharded."""
    logs = jax.nn.log_softmax(logits)
    picked = -jnp.take_along_axis(logs, labels[:, None], -1).mean()
    return picked + (jnp.exp(logs) * (logs + np.log(logits.shape[-1]))).sum(-1).mean()


def losses(x, y):
    d = x - y
    huber = jnp.where(jnp.abs(d) < 1, d**2 / 2, jnp.abs(d) - 0.5).mean()
    binary = optax.sigmoid_binary_cross_entropy(x, (y > 0) * 1.0).mean()
    return (d**2).mean() + huber + binary


def pencil(x):
    """A two-dimensional transform, one dim after the other."""
    return jnp.abs(jnp.fft.fft(jnp.fft.fft(x, axis=1), axis=0))


def accumulate(table, ids, weights):
    """Gradients of an embedding over microbatches."""

    def step(total, batch):
        i, w = batch
        return total + jax.grad(lambda t: (t[i] * w).sum())(table), None

    return lax.scan(step, jnp.zeros_like(table), (ids, weights))[0]


def written(x, start):
    return lax.dynamic_update_slice(x, jnp.full((2, 1), 99.0), (0, start))


IDS = RNG.integers(0, 11, 8).astype("int32")
X = np.arange(10, dtype="float32").reshape(10, 1)
LABELS = np.arange(8, dtype="int32") % 16
PROGRAMS = {  # what: (function, arguments, mesh, placements)
    "a number beside a sum": (lambda x: x.sum() + 10, [X], (2,), "S0"),
    "the reciprocal of a norm": (
        lambda x: 1 / (jnp.linalg.norm(x) + 1e-6), [X], (2,), "S0",
    ),
    "filled like a sum": (lambda x: jnp.full_like(x.sum(1), 3), [normal(16, 8)], (4,), "S1"),
    "one less a sum": (lambda x: 1 - x.sum(1), [normal(16, 8)], (4,), "S1"),
    "a masked sum": (
        lambda x: jnp.where(jnp.arange(16) % 3 > 0, 1 - x.sum(1), 0), [normal(16, 8)], (4,), "S1",
    ),
    "the first of the largest": (
        jnp.argmax, [np.array([10, 5, 3, 8], "float32")], (2,), "S0",
    ),
    "the first of equals": (jnp.argmax, [np.array([3, 8, 8, 8], "float32")], (2,), "S0"),
    "the largest of columns": (lambda x: x.argmax(0), [np.round(normal(16, 8))], (8,), "S0"),
    "a mean of uneven parts": (
        jnp.mean, [np.arange(12, dtype="float32").reshape(3, 4)], (2,), "S0",
    ),
    "a mean beside an empty part": (
        jnp.mean, [np.arange(4, dtype="float32").reshape(1, 4)], (2,), "S0",
    ),
    "gradients of mean losses": (
        jax.grad(losses), [normal(8, 4), normal(8, 4)], (4,), "S0",
    ),
    "two losses of sharded classes": (
        jax.value_and_grad(two_losses), [normal(8, 16), LABELS], (4,), "S1 R",
    ),
    "smoothed labels": (jax.value_and_grad(smoothed), [normal(8, 16), LABELS], (4,), "S1 R"),
    "smoothed labels of whole logits": (
        jax.value_and_grad(smoothed), [normal(8, 16), LABELS], (4,), "R R",
    ),
    "a view whose rows move": (lambda x: x.reshape(16, 6), [normal(12, 8)], (4,), "S1"),
    "a longer view": (lambda x: x.reshape(32, 6), [normal(24, 8)], (8,), "S1"),
    "an uneven dim, flattened": (lambda x: x.reshape(-1), [normal(6, 16)], (4,), "S0"),
    "empty parts, flattened": (lambda x: x.reshape(-1), [normal(6, 16)], (8,), "S0"),
    "rows set": (lambda x: x.at[:3].set(0), [normal(16, 8)], (8,), "S0"),
    "labels over a table's part": (
        jax.grad(lambda t, i: (t[i] ** 2).sum()), [normal(11, 4), IDS], (2,), "S0 S0",
    ),
    "microbatches of an embedding": (
        accumulate, [normal(11, 4), IDS.reshape(2, 4), normal(2, 4, 4)], (2,), "R S1 S1",
    ),
    "the first of the largest four": (lambda x: lax.top_k(x, 1), [normal(3, 16)], (4,), "S1"),
    "the largest four": (lambda x: lax.top_k(x, 4), [normal(3, 16)], (4,), "S1"),
    "a transform of sharded rows": (pencil, [normal(8, 16)], (4,), "S0"),
    "a transform of sharded columns": (pencil, [normal(8, 16)], (4,), "S1"),
    "a mean of seven": (
        lambda x: (x * (jnp.arange(8) < 7)).sum() / (jnp.arange(8) < 7).sum(),
        [np.arange(8, dtype="float32")], (8,), "S0",
    ),
    "a vocabulary of 17": (cross_entropy, [normal(8, 17), LABELS], (8,), "S1 R"),
    "truncated before it is summed": (
        lambda x: x.sum(0).astype("int32"), [normal(8, 3) * 20], (4,), "S0",
    ),
    "rounded before it is summed": (
        lambda x: lax.reduce_precision(x.sum(0), 5, 3), [normal(8, 3) * 20], (4,), "S0",
    ),
    "a sum between ones": (
        lambda x: jnp.pad(x.sum(0), 1, constant_values=1.0), [normal(8, 3)], (4,), "S0",
    ),
    "ones like a sum": (lambda x: jnp.ones_like(x.sum(0)), [normal(8, 3)], (4,), "S0"),
    "a carry that starts at zero": (
        lambda x: lax.scan(lambda c, row: (c + row.sum(), c), 0.0, x), [normal(5, 8)], (8,), "S1",
    ),
    "a matrix's exponential": (jax.scipy.linalg.expm, [normal(4, 4) / 4], (2,), "S0"),
    "chosen at random": (
        lambda x: jax.random.choice(jax.random.key(3), x, (5,)), [normal(16)], (8,), "S0",
    ),
} | {
    f"written from column {start}": (written, [np.arange(8.0, dtype="float32").reshape(2, 4),
                                               np.int32(start)], (4,), "S1 R")
    for start in (-9, -1, 0, 2, 3, 4, 99)
} | {
    f"rolled by {shift}": (
        lambda x, shift=shift: jax.vjp(lambda x: jnp.roll(x, shift), x)[1](x)[0],
        [normal(8)], (8,), "S0",
    )
    for shift in (-1, 1, 5, 8)
}  # fmt: skip


@pytest.mark.parametrize("what", today(PROGRAMS, 4))
def test_values(what):
    fun, arguments, sizes, layouts = PROGRAMS[what]
    mesh = mesh_of(*sizes)
    places = layouts.split()
    places += ["R"] * (len(arguments) - len(places))
    placed = [
        dt.distribute_tensor(x, mesh, [p]) for x, p in zip(arguments, places, strict=True)
    ]  # fmt: skip
    wanted = jax.jit(fun)(*arguments)
    close(dt.jit(fun, mesh=mesh)(*placed), wanted)
    try:
        close(dt.jit(fun, mesh=mesh, redistribute="never")(*placed), wanted)
    except dt.PlacementError as error:
        assert "remedies" in str(error) or "dt.redistribute" in str(error)


TERMS = {  # what: (function, terms of the first argument, kind, right value)
    "a norm": (jnp.linalg.norm, ([1, 3], [2, 1]), "P", 5.0),
    "a maximum": (jnp.max, ([5, -5], [-4, 4]), "P", 1.0),
    "a minimum": (jnp.min, ([5, -5], [-4, 4]), "P", -1.0),
    "any": (lambda x: (x > 3).any(), ([5, -5], [-4, 4]), "P", False),
    "clipped": (lambda x: jnp.clip(x, max=2), ([100.0], [44.0]), "P", [2.0]),
    "a threshold": (lambda x: jnp.where(x > 0, x, 5), ([-1.0], [-3.0]), "P(max)", [5.0]),
    "a negative factor": (lambda x: x * -2, ([-1.0, 4], [-3.0, 6]), "P(max)", [2.0, -12]),
    "less a maximum": (lambda x: 1 - x, ([-1.0, 4], [-3.0, 6]), "P(max)", [2.0, -5]),
    "truncated": (lambda x: x.astype("int32"), ([15.5, -2.5], [15.75, -2.5]), "P", [31, -5]),
}


@pytest.mark.parametrize("what", TERMS)
def test_terms_are_summed_first(what):
    fun, values, kind, wanted = TERMS[what]
    mesh = mesh_of(2)
    close(dt.jit(fun)(terms(mesh, *values, op=kind)), np.asarray(wanted))
    with pytest.raises(dt.PlacementError):
        dt.jit(fun, redistribute="never")(terms(mesh, *values, op=kind))


@pytest.mark.parametrize(("value", "count"), [(np.float32(0.1), 3), (np.int32(7), 4)])
def test_there_and_back_is_bitwise_the_same(value, count):
    x = dt.distribute_tensor(np.full(3, value), mesh_of(count), ["R"])
    there = x.redistribute(["P"])
    back = there.redistribute(["R"]).full_tensor()
    assert (np.asarray(back) == value).all() and back.dtype == value.dtype


def plan_of(fun, mesh, *placed, **options):
    return dt.jit(fun, mesh=mesh, **options).explain(*placed)


FREE = {  # what: (function, arguments, placements, those of the result or None)
    "a product of three dims": (
        lambda x, w: x @ w, [normal(2, 16, 6), normal(6, 5)], ["S1", "R"], "S1",
    ),
    "squeezed": (lambda x: x.squeeze(), [normal(8, 1, 4)], ["S0"], "S0"),
    "microbatches": (
        lambda x: lax.scan(lambda c, b: (c, (b * 2).sum(-1)), 0.0,
                           jnp.swapaxes(x.reshape(-1, 4, 6), 0, 1))[1],
        [normal(32, 6)], ["S0"], "S1",
    ),
    "depthwise": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=3),
        [normal(8, 3, 5, 5), normal(3, 1, 3, 3)], ["S0", "R"], "S0",
    ),
    "cholesky in batches": (
        jax.vmap(lambda m: jnp.linalg.cholesky(m @ m.T + jnp.eye(3))), [normal(8, 3, 3)], ["S0"],
        "S0",
    ),
    "transforms in batches": (jax.vmap(lambda v: jnp.fft.fft(v)), [normal(8, 6)], ["S0"], "S0"),
    "pairs": (lambda x: x.reshape(4, 2, 5), [normal(8, 5)], ["S0"], None),
    "a gradient": (
        jax.grad(lambda x, w: (x @ w).sum()), [normal(8, 6), normal(6, 4)], ["S0", "R"], "S0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FREE)
def test_what_needs_no_communication_has_none(what):
    fun, arguments, places, result = FREE[what]
    mesh = mesh_of(8)
    if result is None:  # on as many devices as the leading dim has elements
        mesh = mesh_of(4)
    placed = [dt.distribute_tensor(x, mesh, [p]) for x, p in zip(arguments, places, strict=True)]
    step = dt.jit(fun, mesh=mesh, redistribute="never", out_placements=result or "S0")
    assert step.explain(*placed).bytes_per_device == 0
    close(step(*placed), jax.jit(fun)(*arguments))


def test_the_gradient_of_a_product_keeps_its_dims():
    mesh = mesh_of(2, 2)
    x, w = normal(8, 6), normal(6, 4)
    placed = dt.distribute_tensor(x, mesh, ["S0", "S1"]), dt.distribute_tensor(w, mesh, "R,S0")
    step = dt.jit(jax.grad(lambda x, w: (x @ w).sum()), mesh=mesh, out_placements="S0,S1")
    assert step.explain(*placed).bytes_per_device == 0
    close(step(*placed), jax.grad(lambda x, w: (x @ w).sum())(x, w))


def test_a_vocabulary_over_one_axis_is_summed_over_that_axis_only():
    mesh = mesh_of(2, 4)
    ids = dt.distribute_tensor(np.arange(8, dtype="int32") % 5, mesh, "S0,R")
    table = dt.distribute_tensor(normal(16, 4), mesh, "R,S0")
    (only,) = plan_of(lambda i, t: t[i], mesh, ids, table, out_placements="S0,R").collectives
    assert (only.kind, only.axes) == ("all-reduce", ("y",))


def test_both_axes_are_summed_at_once():
    mesh = mesh_of(2, 4)
    x = dt.distribute_tensor(normal(8, 8, 3), mesh, ["S0", "S1"])
    step = dt.jit(lambda x: x.sum((0, 1)), mesh=mesh, out_placements="R,R")
    assert str(jax.make_jaxpr(step)(x)).count(" psum") == 1
    parts = [np.asarray(shard.data) for shard in step(x).to_array().addressable_shards]
    assert all((part == parts[0]).all() for part in parts)


def test_a_hundred_parameters_and_a_norm_send_two_messages():
    mesh = mesh_of(8)
    weights = {f"w{i}": np.ones((8, 4), "float32") for i in range(100)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    shards = jax.tree.map(lambda w: dt.distribute_tensor(w, mesh, ["S0"]), weights)
    state = dt.jit(optimizer.init, mesh=mesh)(shards)
    step = dt.jit(optimizer.update, mesh=mesh)
    assert len(step.explain(shards, state, shards).collectives) <= 2


@pytest.mark.parametrize("n", [5, 6])
def test_rows_over_two_axes_in_both_orders(n):
    """Every transition between all placements of an uneven vector, both axes on its dim."""
    mesh = mesh_of(2, 2)
    x = np.arange(n, dtype="float32")
    spec = jax.sharding.PartitionSpec
    for order in (("x", "y"), ("y", "x")):
        start = dt.distribute_tensor(x, mesh, spec(order))
        np.testing.assert_array_equal(start.full_tensor(), x)
        for target in (*"RS", "x", "y", "xy", "yx"):
            where = {"R": spec(), "S": spec("x")}.get(target, spec(tuple(target)))
            moved = start.redistribute(where)
            np.testing.assert_array_equal(moved.full_tensor(), x)
            np.testing.assert_array_equal(moved.redistribute(spec(order)).full_tensor(), x)


KINDS = ("uniform", "bernoulli", "categorical", "permutation", "dropout")


@pytest.mark.parametrize("case", today([f"{kind} {n}" for kind in KINDS for n in (62, 124)], 4))
def test_random_numbers_do_not_depend_on_devices(case):
    kind, rows = case.split()[0], int(case.split()[1])

    def draw(x):
        key = jax.random.key(5)
        if kind == "categorical":
            return jax.random.categorical(key, x)
        if kind == "permutation":
            return jax.random.permutation(key, x)
        if kind == "dropout":
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
        return getattr(jax.random, kind)(key, shape=x.shape)

    x = normal(rows, 4)
    wanted = np.asarray(jax.jit(draw)(x))
    for sizes, where in [((4,), "S0"), ((8,), "S0"), ((4,), "S1"), ((2, 4), "S0,S1"), ((8,), "R")]:
        mesh = mesh_of(*sizes)
        found = dt.jit(draw, mesh=mesh)(dt.distribute_tensor(x, mesh, where))
        np.testing.assert_array_equal(np.asarray(found), wanted)
    if kind == "dropout":
        assert (
            not (wanted[: rows // 2] == 0).all()
            and ((wanted[: rows // 2] == 0) != (wanted[rows // 2 :] == 0)).any()
        )


def test_optimizer_state_lies_as_its_parameters_do():
    mesh = mesh_of(2, 4)
    weights = {"w": dt.distribute_tensor(normal(8, 8), mesh, "S0,S1")}
    state = dt.jit(optax.adam(1e-3).init, mesh=mesh)(weights)
    for moment in (state[0].mu["w"], state[0].nu["w"]):
        assert moment.placements == weights["w"].placements


def test_an_axis_of_one_device_and_a_dim_of_size_one():
    mesh = mesh_of(1)
    x = dt.distribute_tensor(normal(1, 4), mesh, ["S0"])

    def loss(x):
        return ((x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)) ** 3).sum()

    close(dt.jit(jax.grad(loss))(x), jax.grad(loss)(np.asarray(x)))


def test_outer_transformations_of_a_sharded_function():
    mesh = mesh_of(4)
    x, w = normal(4, 8), normal(8, 3)
    fun = dt.jit(lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_placements=[["S0"], ["R"]])
    close(jax.vmap(fun, (0, None))(x[None], w), jnp.tanh(x @ w)[None])
    close(jax.jacrev(fun)(x, w), jax.jacrev(lambda x: jnp.tanh(x @ w))(x), 1e-4)


def test_a_step_of_its_own_result_is_traced_once():
    traced = []

    def step(x):
        traced.append(1)
        return x * 2

    mesh = mesh_of(4)
    run = dt.jit(step, mesh=mesh)
    x = dt.distribute_tensor(normal(8), mesh, ["S0"])
    for _ in range(3):
        x = run(x)
    assert len(traced) == 1


def test_microbatches_add_up_before_they_are_sent():
    mesh = mesh_of(4)
    w, x = normal(8, 4), normal(16, 8)
    placed = [dt.distribute_tensor(w, mesh, ["R"]), dt.distribute_tensor(x, mesh, ["S0"])]

    def step(w, x, count):
        batches = jnp.swapaxes(x.reshape(-1, count, 8), 0, 1)
        grad = jax.grad(lambda w, b: (jnp.tanh(b @ w) ** 2).sum())
        total, _ = lax.scan(lambda c, b: (c + grad(w, b), None), jnp.zeros_like(w), batches)
        return total

    sent = [
        plan_of(lambda w, x, m=m: step(w, x, m), mesh, *placed, out_placements="R").bytes_per_device
        for m in (1, 4)
    ]
    assert sent[0] == sent[1] > 0


def test_two_dims_change_places_within_two_shards():
    """`P(y,,x)` to `P(,(x,y),)`: never the whole array on a device."""
    mesh = mesh_of(2, 4)
    x = dt.distribute_tensor(normal(16, 16, 16), mesh, jax.sharding.PartitionSpec("y", None, "x"))
    target = jax.sharding.PartitionSpec(None, ("x", "y"), None)
    step = dt.jit(lambda x: x, mesh=mesh, out_placements=target)
    close(step(x), np.asarray(x.full_tensor()))
    plan = step.explain(x)
    assert [c.kind for c in plan.collectives] == ["all-to-all"] * 2
    assert plan.bytes_per_device <= 2 * x.full_tensor().nbytes / 8
