"""Dims that do not divide, and dims in blocks: values, gradients, bytes, storage."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from rotation import ROTATION, today

import dtorchjax as dt

MESHES = {"2x4": ((2, 4), ("a", "b")), "3": ((3,), ("a",)), "2x3": ((2, 3), ("a", "b"))}


def mesh_of(name):
    return dt.init_device_mesh(*MESHES[name])


def normal(*shape, dtype=np.float32):
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return (values * 4).astype(dtype)


def placements(mesh, rank):
    choices = ["R", *(f"S{d}" for d in range(rank))]
    return [list(p) for p in itertools.product(choices, repeat=len(mesh.axis_names))]


def close(ours, theirs, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(ours, is_leaf=dt_leaf), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def dt_leaf(x):
    return isinstance(x, dt.DTensor)


W = normal(5, 6)
LABELS = np.arange(7) % 5
FUNS = {
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(1),
    "prod": lambda x: jnp.prod(x / 4, 0),
    "mean of exp": lambda x: jnp.exp(x).mean(0),
    "var": lambda x: x.var(0),
    "any": lambda x: (x > 5).any(0),
    "all": lambda x: (x > -30).all(1),
    "product": lambda x: x @ W,
    "contraction": lambda x: x.T @ x,
    "outer": lambda x: x @ x.T,
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "log_softmax": lambda x: jax.nn.log_softmax(x, 1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "layer norm": lambda x: dt.ops.layer_norm(x, axis=0),
    "loss": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS).mean(),
    "cross_entropy": lambda x: dt.ops.cross_entropy(x, jnp.asarray(LABELS)),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cummax": lambda x: jax.lax.cummax(x, 1),
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmin": lambda x: jnp.argmin(x, 1),
    "sort": lambda x: jnp.sort(x, 0),
    "top_k": lambda x: jax.lax.top_k(x, 2)[0],
    "flip": lambda x: x[::-1],
    "rows": lambda x: x[1:6],
    "every second": lambda x: x[::2],
    "join": lambda x: jnp.concatenate([x, 2 * x]),
    "split": lambda x: jnp.split(x, [3])[1],
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 0))),
    "ravel": lambda x: x.reshape(-1),
    "regroup": lambda x: x.reshape(5, 7),
    "new dims": lambda x: x.reshape(7, 1, 5)[:, None],
    "transpose": lambda x: x.T * 2,
    "counting": lambda x: x + jnp.arange(7)[:, None] * jnp.arange(5),
    "triangle": lambda x: jnp.tril(x),
    "lookup": lambda x: x[jnp.array([6, 0, -1, 3])],
    "lookup outside": lambda x: jnp.take(x, jnp.array([6, 9, -8, 2]), axis=0, fill_value=3),
    "embedding": lambda x: x[jnp.arange(14).reshape(2, 7) % 7],
    "scatter": lambda x: x.at[jnp.array([6, 0, 6])].add(1.5),
    "scatter max": lambda x: jnp.full((3, 5), -9.0).at[jnp.arange(7) % 3].max(x),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.arange(7) % 3, 3),
    "segment min": lambda x: jnp.full((3, 5), 9.0).at[jnp.arange(7) % 3].min(x),
    "dynamic row": lambda x: jax.lax.dynamic_slice(x, (5, 1), (3, 4)),
    "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(4), 0.5, x.shape), x, 0),
    "permutation": lambda x: jax.random.permutation(jax.random.key(5), x),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) + y.mean(0), x),
    "scan over columns": lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[:, 0], x.T)[1],
    "accumulate": lambda x: jax.lax.scan(lambda c, k: (c + k * x.sum(0), None), x[0], W[0])[0],
    "vmap": lambda x: jax.vmap(lambda y: jnp.dot(y, y) + jnp.argmax(y))(x),
    "cast": lambda x: x.astype(jnp.bfloat16).sum(0),
    "integers": lambda x: x.astype(jnp.int32).sum(0) + x.astype(jnp.int32).max(),
    "where": lambda x: jnp.where(x > 0, x, 0).sum(0) / (x > 0).sum(0),
    "median": lambda x: jnp.median(x, 0),
    "norm": lambda x: jnp.linalg.norm(x, axis=0),
    "solve": lambda x: jnp.linalg.solve(jnp.eye(5) * 9 + x.T @ x, x.T),
    "window": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME"),
}
WITHOUT_GRADIENT = {"any", "all", "argmax", "argmin", "integers", "random", "cast"}


def check(fun, x, mesh, where):
    placed = dt.distribute_tensor(x, mesh, where)
    step = dt.jit(fun)
    close(step(placed), jax.jit(fun)(x), 2e-2 if fun is FUNS["cast"] else 2e-5)
    step.explain(placed).verify(step.lower(placed).compile())


def cases():
    for number, (name, mesh) in enumerate(itertools.product(FUNS, MESHES)):
        marks = () if (number + ROTATION) % 12 == 0 else pytest.mark.slow
        yield pytest.param(name, mesh, marks=marks, id=f"{name}, {mesh}")


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_values_and_bytes(name, mesh):
    mesh, x = mesh_of(mesh), normal(7, 5)
    every = [p for p in placements(mesh, 2) if set(p) != {"R"}]
    for i, where in enumerate(every):
        if (i + ROTATION) % 3 == 0 or len(every) < 3:
            check(FUNS[name], x, mesh, where)


def with_gradient():
    for number, name in enumerate(sorted(set(FUNS) - WITHOUT_GRADIENT)):
        yield pytest.param(name, marks=() if (number + ROTATION) % 8 == 0 else pytest.mark.slow)


@pytest.mark.parametrize("name", list(with_gradient()))
def test_gradients(name):
    mesh, x, fun = mesh_of("2x3"), normal(7, 5), FUNS[name]
    weights = [
        normal(*y.shape) for y in jax.tree.leaves(jax.eval_shape(fun, x)) if y.dtype == jnp.float32
    ]

    def loss(x):
        return sum((w * y).sum() for w, y in zip(weights, jax.tree.leaves(fun(x)), strict=True))

    where = placements(mesh, 2)[1 + ROTATION % 8]
    placed = dt.distribute_tensor(x, mesh, where)
    gradient = dt.jit(jax.grad(loss))(placed)
    close(gradient, jax.grad(loss)(x), 2e-4)
    assert gradient.placements == placed.placements
    outside = jax.grad(lambda x: dt.jit(loss)(x))(placed)
    close(outside, jax.grad(loss)(x), 2e-4)


@pytest.mark.parametrize("n", today([0, 1, 2, 3, 5, 8, 11], 2))
@pytest.mark.parametrize("mesh", MESHES)
def test_placements_of_every_size(n, mesh):
    mesh, x = mesh_of(mesh), normal(n, 3)
    every = placements(mesh, 2)
    for i, where in enumerate(every):
        if (i + n + ROTATION) % 3:
            continue
        placed = dt.distribute_tensor(x, mesh, where)
        assert placed.shape == (n, 3)
        np.testing.assert_array_equal(np.asarray(placed), x)
        blocks = placed.to_local()
        assert blocks.shape == (*mesh.devices.shape, *placed.layout.local_shape((n, 3)))
        again = dt.DTensor.from_local(blocks, mesh, where, shape=(n, 3))
        np.testing.assert_array_equal(np.asarray(again), x)
        other = every[(i * 5 + ROTATION) % len(every)]
        moved = placed.redistribute(other)
        np.testing.assert_array_equal(np.asarray(moved), x)
        assert np.asarray(moved.storage).sum(dtype=np.float64) == pytest.approx(x.sum(), abs=1e-4)
        np.testing.assert_array_equal(np.asarray(placed.to_array()), x)
        np.testing.assert_array_equal(np.asarray(placed.full_tensor()), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool", "complex64", "uint8"])
def test_dtypes(dtype):
    mesh = mesh_of("2x4")
    x = np.asarray(jnp.asarray(normal(7, 5)).astype(dtype))
    for where in (["S0", "R"], ["S0", "S0"], ["S1", "S0"]):
        placed = dt.distribute_tensor(x, mesh, where)
        np.testing.assert_array_equal(np.asarray(placed.redistribute(["R", "S1"])), x)
        for fun in (lambda x: x.sum(0), lambda x: jnp.sort(x, 0), lambda x: x[2:5]):
            close(dt.jit(fun)(placed), jax.jit(fun)(x), 1e-2)


def test_keys_lie_unevenly():
    mesh, keys = mesh_of("2x4"), jax.random.split(jax.random.key(0), 7)
    placed = dt.distribute_tensor(keys, mesh, ["R", "S0"])
    draw = jax.vmap(lambda k: jax.random.uniform(k, (3,)))
    close(dt.jit(draw)(placed), draw(keys))


def test_random_numbers_do_not_depend_on_the_number_of_devices():
    def draw(key):
        k = jax.random.split(key, 6)
        return (
            jax.random.bits(k[0], (7, 5)),
            jax.random.uniform(k[1], (7, 5)),
            jax.random.normal(k[2], (11,)),
            jax.random.bernoulli(k[3], 0.3, (7, 5)),
            jax.random.categorical(k[4], jnp.zeros((7, 5))),
            jax.random.permutation(k[5], 13),
        )

    key = jax.random.key(7)
    expected = draw(key)
    for n, where in ((1, "R"), (2, "S0"), (4, "S0"), (8, "R"), (8, "S0")):
        mesh = dt.init_device_mesh((n,), ("x",))
        found = dt.jit(draw, mesh=mesh, out_placements=where)(key)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_nothing_is_sent_where_rows_lie_together():
    mesh = mesh_of("2x4")
    x, y = (dt.distribute_tensor(normal(10, n), mesh, ["R", "S0"]) for n in (5, 6))
    for fun in (
        lambda x, y: jnp.tanh(x) * 2 + x.sum(1, keepdims=True),
        lambda x, y: jax.nn.softmax(x @ W, axis=1) + y,
        lambda x, y: jnp.einsum("bi,bj->bij", x, y),
    ):
        step = dt.jit(fun, redistribute="never")
        assert step.explain(x, y).bytes_per_device == 0
        close(step(x, y), fun(np.asarray(x), np.asarray(y)))
        assert step(x, y).placements[1] == dt.Shard(0)


def test_the_bytes_of_a_contraction_are_those_of_its_sum():
    mesh = dt.init_device_mesh((4,), ("x",))
    x = dt.distribute_tensor(normal(10, 64), mesh, "S0")
    plan = dt.jit(lambda x: x.T @ x, mesh=mesh, out_placements="R").explain(x)
    assert [c.kind for c in plan.collectives] == ["all-reduce"]
    assert plan.bytes_per_device == 2 * 64 * 64 * 4 * 3 / 4


def test_arrays_in_and_out():
    """A jax.Array cannot lie unevenly: only what is asked for comes as a DTensor."""
    mesh, x = mesh_of("2x4"), normal(10, 3)
    out = dt.jit(lambda x: x * 2, mesh=mesh, in_placements=["S0", "R"])(x)
    assert isinstance(out, jax.Array)
    close(out, x * 2)
    out = dt.jit(lambda x: x * 2, mesh=mesh, in_placements=["R", "S0"])(x)
    assert isinstance(out, jax.Array)
    close(out, x * 2)
    out = dt.jit(lambda x: x * 2, mesh=mesh, out_placements=["R", "S0"])(x)
    assert isinstance(out, dt.DTensor) and out.placements == (dt.Replicate(), dt.Shard(0))
    close(out, x * 2)
    ones = dt.ones((10, 3), mesh, ["S0", "S0"])
    assert ones.storage.shape == (16, 3) and float(ones.storage.sum()) == 30


def test_a_step_that_is_called_again():
    mesh = mesh_of("2x4")
    w, x = normal(9, 5) / 16, normal(7, 9) / 16  # where tanh is flat, adam would scale rounding up
    params = dt.distribute({"w": w, "b": normal(5) / 16}, mesh, {"w": {"b": "S0"}, "b": "R"})
    data = dt.distribute_tensor(x, mesh, {"a": "S0"})
    optimizer = optax.adam(0.1)

    def step(params, state, x):
        def loss(p):
            return jnp.square(jnp.tanh(x @ p["w"] + p["b"])).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    ours = dt.jit(step)
    state = dt.jit(optimizer.init)(params)
    plain = jax.tree.map(np.asarray, params, is_leaf=dt_leaf)
    plain_state = optimizer.init(plain)
    for _ in range(3):
        params, state, value = ours(params, state, data)
        plain, plain_state, expected = jax.jit(step)(plain, plain_state, x)
        close(params, plain, 1e-5)
        close(value, expected, 1e-5)
    assert params["w"].placements == (dt.Replicate(), dt.Shard(0))
    assert len(ours.programs) <= 2


def test_eager_operations():
    mesh = mesh_of("2x4")
    x = dt.distribute_tensor(normal(7, 5), mesh, ["S0", "R"])
    y = x * 2 + 1 - x[:, :1]
    assert y.shape == (7, 5) and y.placements == x.placements
    close(y, np.asarray(x) * 2 + 1 - np.asarray(x)[:, :1])
    close((x.T @ x).reduce_partial(), np.asarray(x).T @ np.asarray(x), 1e-4)
    assert "[7,5]" in repr(x)


def test_a_storage_that_does_not_fit_is_an_error():
    x = dt.distribute_tensor(normal(7, 5), mesh_of("2x4"), ["R", "S0"])
    cut = jax.tree.map(lambda storage: storage[:3], x)
    with pytest.raises(dt.PlacementError, match="does not fit its layout"):
        cut.full_tensor()


@pytest.mark.parametrize("name", ["flip", "pad", "rows", "join", "cumsum", "window"])
def test_rows_move_in_the_order_of_the_axes(name):
    """Permutes number devices in the mesh's order, whichever axis is major in the dim."""
    mesh, x, fun = mesh_of("2x4"), normal(7, 5), FUNS[name]
    placed = dt.distribute_tensor(x, mesh, jax.sharding.PartitionSpec(("b", "a")))
    close(dt.jit(fun)(placed), jax.jit(fun)(x))
    cube = dt.init_device_mesh((2, 2, 2), ("a", "b", "c"))
    placed = dt.distribute_tensor(x, cube, ["S0", "S1", "S0"])
    close(dt.jit(fun)(placed), jax.jit(fun)(x))


# ---- blocks --------------------------------------------------------------------------------------

HEADS = {
    "split": lambda x, w: [f(y) for f, y in zip((jnp.tanh, jnp.exp, abs), jnp.split(x @ w, 3, 1))],
    "slices": lambda x, w: (x @ w)[:, : w.shape[1] // 3] * (x @ w)[:, -(w.shape[1] // 3) :],
    "reshape": lambda x, w: jnp.prod((x @ w).reshape(len(x), 3, -1), 1),
    "elementwise": lambda x, w: jnp.tanh(x @ w) * 2,
    "softmax of each": lambda x, w: jax.nn.softmax((x @ w).reshape(len(x), 3, -1), 1),
}


@pytest.mark.parametrize("n", [8, 10])
@pytest.mark.parametrize("name", HEADS)
def test_fused_projections_split_without_communication(name, n):
    mesh, fun = mesh_of("2x4"), HEADS[name]
    x, w = normal(4, 6), normal(6, 3 * n) / 32  # small: sin(exp(y)) of a large y is rounding noise
    placed = (
        dt.distribute_tensor(x, mesh, ["S0", "R"]),
        dt.distribute_tensor(w, mesh, ["R", "S1/3"]),
    )
    step = dt.jit(fun, redistribute="never")
    assert step.explain(*placed).bytes_per_device == 0
    close(step(*placed), fun(x, w), 1e-4)

    def loss(x, w):
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(fun(x, w)))

    gradient = dt.jit(jax.grad(loss, 1))
    close(gradient(*placed), jax.grad(loss, 1)(x, w), 1e-3)
    assert gradient(*placed).placements[1] == dt.Shard(1, 3)
    plan = gradient.explain(*placed)
    assert {c.axes for c in plan.collectives} <= {("a",)}, plan.table()


def test_gate_and_up_join_without_communication():
    mesh = mesh_of("2x4")
    x, up, gate, down = normal(4, 6), normal(6, 8) / 4, normal(6, 8) / 4, normal(16, 6) / 4
    placed = [
        dt.distribute_tensor(a, mesh, p)
        for a, p in (
            (x, ["S0", "R"]), (up, ["R", "S1"]), (gate, ["R", "S1"]), (down, ["R", "S0/2"]),
        )
    ]  # fmt: skip

    def fun(x, up, gate, down):
        return jnp.concatenate([jnp.tanh(x @ up), x @ gate], 1) @ down

    step = dt.jit(fun, out_placements=["S0", "P"])
    assert step.explain(*placed).bytes_per_device == 0
    close(step(*placed).reduce_partial(), fun(x, up, gate, down), 1e-4)


@pytest.mark.parametrize("n", today([6, 12, 24, 30], 4))
def test_blocks_are_stored_printed_moved_and_gathered(n):
    mesh, x = mesh_of("2x3"), normal(n, 4)
    every = [["S0/2", "R"], ["R", "S0/3"], ["S0", "S1/2"], ["S1/2", "S0/2"], ["R", "S0"]]
    if n % 6 == 0 and n % 4 == 0:
        every += [["S0/2", "S0/2"]]
    for one, other in itertools.product(every, repeat=2):
        placed = dt.distribute_tensor(x, mesh, one)
        assert ", ".join(map(str, placed.placements)) == ", ".join(one)
        np.testing.assert_array_equal(np.asarray(placed), x)
        np.testing.assert_array_equal(np.asarray(placed.full_tensor()), x)
        np.testing.assert_array_equal(np.asarray(placed.redistribute(other)), x)
    assert "a=S0/2" in repr(dt.distribute_tensor(x, mesh, ["S0/2", "R"]))


def test_what_a_device_holds_of_blocks():
    mesh = dt.init_device_mesh((2,), ("x",))
    blocks = dt.distribute_tensor(np.arange(8), mesh, "S0/2").to_local()
    assert blocks.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_blocks_that_are_not_equal():
    with pytest.raises(dt.PlacementError, match="7 rows are not 2 equal blocks"):
        dt.distribute_tensor(np.zeros(7), mesh_of("3"), "S0/2")


# ---- what lies beside a part ---------------------------------------------------------------------

KERNEL = normal(3, 3, 2, 2)
BESIDE = {
    "a convolution with strides": (
        lambda x: lax.conv_general_dilated(
            x, KERNEL, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (2, 96, 4, 2),
    ),
    "a transposed convolution": (
        lambda x: lax.conv_transpose(x, KERNEL, (3, 2), "SAME"), (2, 96, 4, 2),
    ),
    "max pooling": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
        (2, 96, 4, 2),
    ),
    "every second row, from 1": (lambda x: x[:, 1::2], (2, 92, 8)),
    "rows of another length": (lambda x: x.reshape(2, 72, 5), (2, 90, 4)),
    "rows of several": (lambda x: x.reshape(2, 45, 2, 3), (2, 90, 3)),
}  # fmt: skip


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_part_is_all_that_is_sent(name, n):
    """Forward and backward; rows of another length drift apart, the more the later they lie."""
    fun, shape = BESIDE[name]
    mesh = dt.init_device_mesh((n,), ("x",))
    x = dt.distribute_tensor(normal(*shape), mesh, "S1")
    weights = normal(*jax.eval_shape(fun, np.asarray(x)).shape)

    def loss(x, weights):
        y = fun(x)
        return (y * y * weights).sum(), y

    both = jax.value_and_grad(loss, has_aux=True)
    step = dt.jit(both, redistribute="never", out_placements=((["P"], ["S1"]), ["S1"]))
    weights = dt.distribute_tensor(weights, mesh, "S1")
    (value, y), gradient = step(x, weights)
    assert y.placements == gradient.placements == (dt.Shard(1),)
    close(((value.reduce_partial(), y), gradient), both(np.asarray(x), np.asarray(weights)), 1e-4)
    plan = step.explain(x, weights)
    plan.verify(step.lower(x, weights).compile())
    assert {c.kind for c in plan.collectives} <= {"permute"}, plan.table()
    assert plan.bytes_per_device < 4 * x.size / 8, plan.table()


SORTS = {
    "values": lambda x: jnp.sort(x, 0),
    "order": lambda x: jnp.argsort(x, 0),
    "descending": lambda x: jnp.sort(x, 0, descending=True),
    "carried along": lambda x: lax.sort((x, x * 2, x + 1), dimension=0, num_keys=2),
    "truth values": lambda x: jnp.sort(x > 0, 0),
}


@pytest.mark.parametrize("n", today([64, 61, 3, 8], 2))
def test_sorting_along_a_cut_dim(n):
    """With ties, nans and zeros of both signs, whose order a stable sort keeps; by permutes."""
    x = np.random.default_rng(n).integers(-4, 4, (n, 3)).astype(np.float32)
    x[::7], x[1::5] = np.nan, -0.0
    for mesh, where in (("2x4", ["S0", "S0"]), ("2x3", ["S0", "S1"]), ("3", ["S0"])):
        placed = dt.distribute_tensor(x, mesh_of(mesh), where)
        for fun in SORTS.values():
            step = dt.jit(fun, redistribute="never")
            for ours, expected in zip(
                jax.tree.leaves(step(placed), is_leaf=dt_leaf), jax.tree.leaves(fun(x)), strict=True
            ):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))
            plan = step.explain(placed)
            plan.verify(step.lower(placed).compile())
            assert {c.kind for c in plan.collectives} == {"permute"}, plan.table()


def test_a_cut_row_and_its_blocks_on_two_axes():
    """(6, 12) as 72: what the second axis cuts are blocks of all rows, so it is the major one."""
    mesh, x = mesh_of("2x3"), np.arange(72, dtype=np.float32).reshape(6, 12)
    for there in (["S0", "S0/6"], ["S0/6", "S0"]):
        for here in (["S0", "S1"], ["S1", "S0"], ["S0", "S0"], ["R", "S1"]):
            placed = dt.distribute_tensor(x, mesh, here)
            close(dt.jit(lambda x: x.reshape(72), out_placements=there)(placed), x.reshape(72))
            flat = dt.jit(lambda x: x.reshape(72), out_placements=there)(placed)
            close(dt.jit(lambda x: x.reshape(6, 12), out_placements=here)(flat), x)


# ---- a loop of vmap ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 61])
def test_a_while_loop_with_a_predicate_per_row(n):
    mesh, x = mesh_of("2x4"), np.linspace(1, 9, n, dtype=np.float32)

    def one(value, most):
        def step(state):
            value, count, seen = state
            return value * 2, count + 1, seen + value * jnp.ones(1000)

        start = value, jnp.float32(1), jnp.zeros(1000)
        return jax.lax.while_loop(lambda state: state[0] * state[1] < most, step, start)

    fun = jax.vmap(one, (0, None))
    for where in (["S0", "R"], ["R", "S0"], ["S0", "S0"]):
        placed, step = dt.distribute_tensor(x, mesh, where), dt.jit(fun)
        close(step(placed, 90.0), fun(x, 90.0), 1e-5)
        plan = step.explain(placed, 90.0)
        plan.verify(step.lower(placed, 90.0).compile())
        assert plan.bytes_per_device <= 4 * n, plan.table()  # at most the values at the start
