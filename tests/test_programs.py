"""Whole programs through dt.jit against one device: values, gradients, layouts, communication."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

import dtorchjax as dt
from dtorchjax.hlo import collective_bytes


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def same(got, expected, tolerance=1e-5):
    got = jax.tree.leaves(got, is_leaf=lambda t: isinstance(t, dt.DTensor))
    expected = jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        a = a.full_tensor() if isinstance(a, dt.DTensor) else a
        if np.asarray(b).dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            scale = max(1.0, float(np.max(np.abs(b), initial=0)))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def inner(jaxpr):
    """Programs inside an equation's parameters."""
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield eqn, item


def shard_maps(jaxpr):
    """How many shard_maps, and what computes outside them."""
    count, outside = 0, set()
    calls = {id(eqn): eqn for eqn, _ in inner(jaxpr)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            count += 1
        elif id(eqn) not in calls:
            outside.add(eqn.primitive.name)
    for eqn, program in inner(jaxpr):
        if eqn.primitive.name != "shard_map":
            n, names = shard_maps(program)
            count, outside = count + n, outside | names
    return count, outside


def multiplications(jaxpr):
    """Multiply-adds of the contractions of a program, loop bodies as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
    for eqn, program in inner(jaxpr):
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += trips * multiplications(program)
    return total


def check(
    fun,
    args,
    mesh,
    in_placements=None,
    out_placements=None,
    tolerance=1e-5,
    divided=False,
):
    """dt.jit(fun) gives what fun gives, in one shard_map whose bytes are the plan's.

    divided: every device does its part of the contractions and no more.
    """
    step = dt.jit(fun, mesh=mesh, in_placements=in_placements, out_placements=out_placements)
    out = step(*args)
    same(out, jax.jit(fun)(*args), tolerance)
    local = jax.make_jaxpr(step)(*args).jaxpr
    assert shard_maps(local) == (1, set())
    if divided:
        whole = multiplications(jax.make_jaxpr(fun)(*args).jaxpr)
        assert multiplications(local) <= 1.05 * whole / mesh.size
    plan, compiled = step.explain(*args), step.lower(*args).compile()
    plan.verify(compiled)
    real = collective_bytes(compiled.as_text())
    assert abs(plan.bytes_per_device - real) <= max(64, 0.02 * real), (plan.bytes_per_device, real)
    return out, plan


def mlp_loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def mlp():
    return dict(a=normal(0, 16, 32), b=normal(1, 32, 8)), normal(2, 8, 16), normal(3, 8, 8)


MEGATRON = dict(a=["R", "S1"], b=["R", "S0"])


@pytest.mark.smoke
def test_value_and_grad_of_an_mlp(mesh24):
    where = (MEGATRON, ["S0", "R"], ["S0", "R"])
    (loss, grads), plan = check(jax.value_and_grad(mlp_loss), mlp(), mesh24, where)
    assert grads["a"].sharding.spec == PartitionSpec(None, "tp")  # a gradient lies as its primal
    assert loss.sharding.is_fully_replicated
    assert {c.kind for c in plan.collectives} == {"all-reduce"}
    # the row-parallel product over tp, the loss over both axes, both gradients together over dp
    assert plan.bytes_per_device == 2 * 128 * 3 / 4 + 7 + (16 * 8 + 8 * 8) * 4


@pytest.mark.parametrize("order", ["S0,R", "R,S0", "S0,S0", "R,R", "S1,S0"])
def test_batch_placements(mesh24, order):
    check(jax.value_and_grad(mlp_loss), mlp(), mesh24, (MEGATRON, order, "R"))


def test_placement_of_results(mesh24):
    params, x, y = mlp()
    step = dt.jit(
        lambda p, x, y: (mlp_loss(p, x, y), x @ p["a"]),
        mesh=mesh24,
        in_placements=(MEGATRON, ["S0", "R"], ["S0", "R"]),
        out_placements=("R", ["S0", "R"]),
    )
    _, hidden = step(params, x, y)
    assert hidden.sharding.spec == PartitionSpec("dp")


def sgd(params, x, y):
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_a_step_of_a_step_traces_once(mesh24):
    traces = 0

    def counted(params, x, y):
        nonlocal traces
        traces += 1
        return sgd(params, x, y)

    params, x, y = mlp()
    params = dt.distribute(params, mesh24, MEGATRON)
    x, y = (dt.distribute_tensor(a, mesh24, {"dp": "S0"}) for a in (x, y))
    step = dt.jit(counted)
    first, _ = step(params, x, y)
    second, loss = step(first, x, y)
    assert traces == 1
    assert second["a"].placements == params["a"].placements
    expected = sgd(sgd(*mlp())[0], *mlp()[1:])
    same((second, loss), expected)


def test_results_are_dtensors_only_if_an_argument_is_one(mesh24):
    x = normal(0, 8, 16)
    assert isinstance(dt.jit(jnp.exp, mesh=mesh24)(x), jax.Array)
    assert isinstance(dt.jit(jnp.exp)(dt.distribute_tensor(x, mesh24, "S0,R")), dt.DTensor)


def test_scan_accumulates_before_it_reduces(mesh8):
    """Microbatches in a scan: the gradients are summed over devices once, after the loop."""
    params = mlp()[0]
    xs, ys = normal(5, 4, 8, 16), normal(6, 4, 8, 8)

    def step(params, xs, ys):
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(params, *xy)), None

        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), (xs, ys))[0]

    _, plan = check(step, (params, xs, ys), mesh8, (["R"], ["S1"], ["S1"]), "R")
    assert all(c.times == 1 for c in plan.collectives)
    assert plan.bytes_per_device <= 2 * 4 * (16 * 32 + 32 * 8) * 7 / 8


def test_scan_with_stacked_weights(mesh24):
    ws, x = normal(0, 3, 16, 16) / 4, normal(1, 8, 16)

    def loss(ws, x):
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), h.sum()))
        h, sums = lax.scan(body, x, ws)
        return (h**2).sum() + (sums**2).sum()

    for where in (["R", "S2"], ["S1", "S2"], ["R", "S0"]):
        if where[1] == "S0":
            where = ["R", "R"]
        check(jax.value_and_grad(loss, (0, 1)), (ws, x), mesh24, (where, ["S0", "R"]))


def test_scan_reverse_and_constants(mesh24):
    x, w = normal(0, 6, 8), normal(1, 8, 8)

    def f(x, w):
        return lax.scan(lambda c, r: (c * 0.5 + r @ w, c), jnp.zeros(8), x, reverse=True)

    check(f, (x, w), mesh24, ("R", ["R", "S1"]))
    check(f, (x, w), mesh24, (["R", "S1"], ["R", "S0"]))


def test_while_loop(mesh24):
    def f(x, w):
        def body(state):
            i, y = state
            return i + 1, jnp.tanh(y @ w)

        return lax.while_loop(lambda s: (s[0] < 5) & (jnp.abs(s[1]).sum() > 1e-3), body, (0, x))

    x, w = normal(0, 8, 16), normal(1, 16, 16)
    step = dt.jit(f, mesh=mesh24, in_placements=(["S0", "R"], ["R", "S1"]))
    same(step(x, w), f(x, w))


def test_fori_loop(mesh24):
    def f(x):
        return lax.fori_loop(0, 4, lambda i, y: y * 1.5 + i, x)

    check(f, (normal(0, 8, 16),), mesh24, ("S0,S1",))


@pytest.mark.parametrize("flag", [True, False])
def test_cond(mesh24, flag):
    def f(flag, x, w):
        return lax.cond(flag, lambda x, w: jnp.tanh(x @ w), lambda x, w: x + 1.0, x, w)

    args = (jnp.asarray(flag), normal(0, 8, 16), normal(1, 16, 16))
    step = dt.jit(f, mesh=mesh24, in_placements=("R", ["S0", "R"], ["R", "S1"]))
    same(step(*args), f(*args))
    grad = jax.grad(lambda x, w: f(args[0], x, w).sum(), (0, 1))
    check(grad, args[1:], mesh24, (["S0", "R"], ["R", "S1"]))


def test_what_depends_on_the_platform(mesh24):
    """The branch of the mesh's devices is the program: no cond is left."""

    def fun(x):
        y = jax.lax.platform_dependent(x, cpu=lambda x: x * 2, tpu=lambda x: x * 3)
        other = jax.lax.platform_dependent(x, cuda=lambda x: x * 7, default=jnp.sin)
        return y + other + jnp.linalg.det(jnp.eye(3) * x[0, 0])

    x = jnp.arange(16.0).reshape(8, 2) + 1
    placed = dt.distribute_tensor(x, mesh24, "S0,R")
    batched = jax.vmap(lambda x: fun(jnp.stack([x, x])))
    for f in (fun, batched, jax.grad(lambda x: fun(x).sum())):
        np.testing.assert_allclose(dt.jit(f)(placed), f(x), rtol=1e-5)
    assert "stablehlo.case" not in dt.jit(fun).lower(placed).as_text()


def test_custom_derivatives(mesh24):
    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(*p), 2 * t[0]))

    def loss(x, w):
        return jnp.sum(clip_gradient(f(x @ w)) ** 2)

    check(
        jax.value_and_grad(loss, (0, 1)),
        (normal(0, 8, 16), normal(1, 16, 8)),
        mesh24,
        (["S0", "S1"], ["R", "S0"]),
    )


@pytest.mark.smoke
@pytest.mark.parametrize("vocabulary", ["R,S0", "S0,S0", "R,S1", "R,R"])
def test_embedding_and_cross_entropy(mesh24, vocabulary):
    table, ids = normal(0, 32, 16), jax.random.randint(jax.random.key(1), (8, 4), 0, 32)

    def loss(table, ids):
        logits = jnp.take(table, ids, axis=0) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    check(jax.value_and_grad(loss), (table, ids), mesh24, (vocabulary, ["S0", "R"]))


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["R,R", "S0,R", "S0,S1", "S1,S0", "S0,S0", "R,S1"])
def test_random_numbers_do_not_depend_on_placements(mesh24, where):
    def f(key):
        return (
            jax.random.bits(key, (8, 16)),
            jax.random.uniform(key, (8, 16)),
            jax.random.bernoulli(key, 0.3, (8, 16)),
            jax.random.randint(key, (8, 16), 0, 100),
        )

    key = jax.random.key(3)
    got = dt.jit(f, mesh=mesh24, out_placements=where)(key)
    for a, b in zip(got, f(key), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["S0,R", "S0,S0", "R,R"])
def test_as_many_as_a_size_says(mesh24, where):
    """jnp.nonzero and its like, in newer jax a call that has no program of its own in the jaxpr."""
    x = np.arange(22) % 3

    def f(x):
        chosen = jnp.where(x > 1, size=3)[0]
        unique, counts = jnp.unique(x, size=4, return_counts=True)
        grads = jax.grad(lambda y: (y[jnp.nonzero(x, size=5)[0]] ** 2).sum())(x * 1.5)
        return chosen, jnp.flatnonzero(x, size=20, fill_value=-1), unique, counts, grads

    same(dt.jit(f, mesh=mesh24, in_placements=where)(x), f(x))


def test_keys_split_and_fold(mesh24):
    def f(key, x):
        a, b = jax.random.split(key)
        mask = jax.random.bernoulli(jax.random.fold_in(a, 3), 0.5, x.shape)
        return jnp.where(mask, x, 0.0), b

    key, x = jax.random.key(0), normal(1, 8, 16)
    got, next_key = dt.jit(f, mesh=mesh24, in_placements=("R", ["S0", "S1"]))(key, x)
    expected, expected_key = f(key, x)
    np.testing.assert_array_equal(got, expected)
    assert (jax.random.key_data(next_key) == jax.random.key_data(expected_key)).all()


def test_closed_over_arrays(mesh24):
    w = jax.device_put(normal(0, 16, 8), NamedSharding(mesh24, PartitionSpec(None, "tp")))
    bias = np.arange(8, dtype="float32")
    out, plan = check(lambda x: x @ w + bias, (normal(1, 8, 16),), mesh24, (["S0", "R"],))
    assert not plan.collectives
    assert out.sharding.spec == PartitionSpec("dp", "tp")


def test_mismatched_arguments_are_redistributed_by_the_plan(mesh24):
    x = jax.device_put(normal(0, 8, 16), NamedSharding(mesh24, PartitionSpec(None, "tp")))
    _, plan = check(lambda x: x * 2, (x,), mesh24, (["S0", "R"],))
    assert plan.collectives


@pytest.mark.parametrize("kind", ["set_mesh", "explicit"])
def test_under_set_mesh(mesh24, kind):
    mesh = mesh24
    if kind == "explicit":
        types = (jax.sharding.AxisType.Explicit,) * 2
        mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=types)
    params, x, y = mlp()
    with jax.set_mesh(mesh):
        step = dt.jit(jax.value_and_grad(mlp_loss), in_placements=(MEGATRON, "S0,R", "S0,R"))
        same(step(params, x, y), jax.value_and_grad(mlp_loss)(params, x, y))
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
        same(dt.jit(lambda x: jnp.cumsum(x @ x.T, 1))(placed), jnp.cumsum(x @ x.T, 1))


def test_static_and_donated_arguments(mesh24):
    def f(x, power, *, scale):
        return x**power * scale

    x = dt.distribute_tensor(normal(0, 8, 16), mesh24, "S0,R")
    step = dt.jit(f, static_argnums=1, static_argnames="scale")
    same(step(x, 2, scale=3.0), np.asarray(x) ** 2 * 3)
    same(step(x, 3, scale=2.0), np.asarray(x) ** 3 * 2)
    with pytest.raises(TypeError, match="hashable"):
        step(x, [2], scale=1.0)
    donate = dt.jit(lambda x, y: x + y, donate_argnums=0)
    a, b = (dt.distribute_tensor(normal(s, 8, 16), mesh24, "S0,R") for s in (1, 2))
    donate(a, b)
    assert a.storage.is_deleted() and not b.storage.is_deleted()


def test_annotations_are_obeyed(mesh24):
    def f(x):
        h = dt.redistribute(jnp.sin(x), {"tp": "S1"})
        return jax.grad(lambda h: jnp.sum(dt.redistribute(h, ["S0", "R"]) ** 2))(h) + h

    check(f, (normal(0, 8, 16),), mesh24, (["S0", "R"],))

    def g(x):
        spec = NamedSharding(mesh24, PartitionSpec(None, "dp"))
        return lax.with_sharding_constraint(x + 1, spec)

    out, plan = check(g, (normal(0, 8, 16),), mesh24, (["S0", "R"],))
    assert tuple(out.sharding.spec)[:1] == ("dp",)  # like the argument of the same shape
    assert {c.kind for c in plan.collectives} == {"all-to-all"}


def test_a_primitive_without_a_rule_says_how_to_add_one(mesh24):
    unknown = Primitive("unknown_to_the_tables")
    unknown.def_abstract_eval(lambda x: x)
    with pytest.raises(dt.PlacementError) as caught:
        dt.jit(lambda x: unknown.bind(x) * 2, mesh=mesh24)(normal(0, 8))
    text = str(caught.value)
    assert "no sharding rule for primitive `unknown_to_the_tables`" in text
    assert 'dt.elementwise("unknown_to_the_tables")' in text and "@dt.rule" in text
    assert "test_programs.py:" in text


def test_derivatives_of_a_compiled_function(mesh24):
    """Outside dt.jit too: by the whole program, not by transposing the shard_map."""
    where = (MEGATRON, ["S0", "R"], ["S0", "R"])
    loss = dt.jit(mlp_loss, mesh=mesh24, in_placements=where)
    args = mlp()
    expected = jax.value_and_grad(mlp_loss)(*args)
    same(jax.value_and_grad(loss)(*args), expected)
    same(jax.jit(jax.value_and_grad(loss))(*args), expected)
    grads = jax.grad(lambda p: 3.0 * loss(p, *args[1:]))(args[0])
    same(grads, jax.tree.map(lambda g: 3.0 * g, expected[1]))
    with pytest.raises(dt.PlacementError, match="closes over a traced array"):
        jax.grad(lambda w: dt.jit(lambda x: (x @ w).sum(), mesh=mesh24)(args[1]))(args[0]["a"])


def test_derivatives_over_dtensors(mesh24):
    """A gradient has its primal's layout; integers and keys have none."""
    x = dt.distribute_tensor(normal(0, 8, 16), mesh24, "S0,S1")
    ids = dt.distribute_tensor(jnp.arange(8), mesh24, "S0,R")
    total = dt.jit(lambda x, ids: (x[ids] ** 2).sum(), out_placements="R")
    grad = jax.grad(lambda x: total(x, ids))(x)
    assert grad.layout == x.layout
    same(grad, 2 * normal(0, 8, 16))
    terms = dt.distribute_tensor(normal(0, 8, 16), mesh24, "P,S1")
    grad = jax.grad(lambda x: total(x, ids))(terms)
    assert grad.layout == terms.layout
    same(grad, 2 * normal(0, 8, 16))


def test_compiled_functions_inside_and_under_other_transformations(mesh24):
    inner = dt.jit(
        lambda x: jnp.tanh(x @ x.T),
        mesh=mesh24,
        in_placements=(["S0", "R"],),
        out_placements="R,S0",
    )
    x = normal(0, 8, 8)
    expected = jnp.tanh(x @ x.T)
    check(lambda x: inner(x) * 2, (x,), mesh24, (["S1", "S0"],))
    check(jax.grad(lambda x: inner(x).sum()), (x,), mesh24, (["S1", "S0"],))
    same(jax.jit(lambda x: inner(x) + 1)(x), expected + 1)
    xs = normal(1, 3, 8, 8)
    same(jax.vmap(inner)(xs), jax.vmap(lambda x: jnp.tanh(x @ x.T))(xs))
    placed = dt.distribute_tensor(x, mesh24, "S0,S1")
    closed = dt.jit(lambda y: jnp.add(y, placed), mesh=mesh24, in_placements=(["R", "S0"],))
    same(closed(x), x + x)


def test_the_local_function_that_ndim_zero_and_one_programs_make(mesh24):
    same(dt.jit(lambda: jnp.arange(8) * 2, mesh=mesh24)(), jnp.arange(8) * 2)
    same(dt.jit(lambda x: x + 1, mesh=mesh24)(2.0), 3.0)
    same(dt.jit(lambda x: x, mesh=mesh24)(normal(0, 4)), normal(0, 4))


@pytest.mark.parametrize(
    "where",
    [
        (dict(a="R,S1", b=["R", "S0"]), "S0,R", (dt.Shard(0), "R")),
        (dict(a=PartitionSpec(None, "tp"), b=PartitionSpec("tp")), PartitionSpec("dp"), "S0,R"),
        ("R", ["S0", "R"], ["S0", "R"]),
        (dt.by_path({"*": "R", "a": {"tp": "S1"}, "b": {"tp": "S-2"}}), "S0,R", None),
        "R",
        None,
    ],
)
def test_every_form_of_in_placements(mesh24, where):
    loss, plan = check(mlp_loss, mlp(), mesh24, where)
    assert loss.shape == () and plan.bytes_per_device >= 0


def test_layouts_and_shardings_as_placements(mesh24):
    layout = dt.Layout(mesh24, ("S0", "S0"), ("tp", "dp"))
    named = NamedSharding(mesh24, PartitionSpec(("tp", "dp")))
    x = normal(0, 8, 16)
    for form in (layout, named, PartitionSpec(("tp", "dp"))):
        out, plan = check(lambda x: x * 2, (x,), mesh24, (form,), form)
        assert out.sharding.is_equivalent_to(named, 2) and not plan.collectives
    out, _ = check(lambda x: dict(a=x, b=(x + 1, x.sum())), (x,), mesh24, ("S0,R",), dict(
        a="R,S1", b=("S1,S0", None)))  # fmt: skip
    assert out["a"].sharding.spec == PartitionSpec(None, "tp")
    assert out["b"][0].sharding.spec == PartitionSpec("tp", "dp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(in_placements=(["R"], "R", "R")), r"args\[0\]\['a'\]: 1 placements"),
        (dict(in_placements=(["R", "R"], ["R", "R"])), "args has 3 items, its placements 2"),
        (dict(in_placements=(dict(a="R"), "R", "R")), r"args\[0\]: its placements lack \['b'\]"),
        (dict(in_placements=("R", dict(z="S0"), "R")), "no mesh axis 'z'"),
        (dict(in_placements=(dict(a="S0,S0", b="R"), "S0,S0", "S0,S0,R")), r"args\[2\]"),
        (dict(out_placements=["S0", "R"]), "result"),
        (dict(redistribute="sometimes"), "'auto' or 'never'"),
    ],
)
def test_bad_arguments_are_named(mesh24, options, message):
    with pytest.raises(ValueError, match=message):
        dt.jit(mlp_loss, mesh=mesh24, **options)(*mlp())


def test_convolutions_are_not_done_twice(mesh24):
    def loss(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return (
            lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims) ** 2
        ).sum()

    args = normal(0, 3, 3, 8, 16) / 8, normal(1, 8, 8, 8, 8)
    _, plan = check(jax.value_and_grad(loss), args, mesh24, ("R", ["S0", "R"]), tolerance=1e-4)
    rows = [row for node, row in plan.rows.items() if node.name == "conv_general_dilated"]
    parts = [{str(p) for j in (*r.inputs, *r.outputs) for p in j.placements} for r in rows]
    assert len(rows) == 2 and all(any(p.startswith("S") for p in found) for found in parts)


def test_verify_says_what_differs(mesh24):
    x = normal(0, 8, 16)
    one = dt.jit(lambda x: x * 2, mesh=mesh24, in_placements=("S0,R",), out_placements="S0,R")
    other = dt.jit(lambda x: x * 2, mesh=mesh24, in_placements=("S0,R",), out_placements="R")
    one.explain(x).verify(one.lower(x).compile())
    with pytest.raises(dt.PlacementError, match=r"over dp: planned 0 B, compiled 256 B"):
        one.explain(x).verify(other.lower(x).compile())


# ---- plans are made once -------------------------------------------------------------------------


def test_a_program_made_again_takes_its_plan(mesh24):
    def compiled(scale, **options):
        def layer(x, w):
            return jax.nn.gelu(x @ w) * scale, None

        return dt.jit(
            lambda x, w: jax.lax.scan(layer, x, w)[0], mesh=mesh24,
            in_placements=("S0,R", "R,S2"), **options,
        )  # fmt: skip

    x, w = normal(0, 8, 16), normal(1, 3, 16, 16)
    plan = compiled(2.0).explain(x, w)
    assert compiled(2.0).explain(x, w) is plan
    assert compiled(3.0).explain(x, w) is not plan
    assert compiled(2.0, memory_limit=1e9).explain(x, w) is not plan
    assert compiled(2.0).explain(x[:4], w) is not plan
    np.testing.assert_allclose(compiled(3.0)(x, w), compiled(3.0).fun(x, w), rtol=1e-5)


def test_programs_with_other_closed_over_arrays_are_other_programs(mesh24):
    x = normal(0, 8, 16)

    def compiled(array):
        return dt.jit(lambda x: x + array, mesh=mesh24, in_placements=("S0,R",))

    one, two = jnp.ones((8, 16)), jnp.full((8, 16), 2.0)
    assert float(compiled(one)(x)[0, 0] - x[0, 0]) == pytest.approx(1)
    assert float(compiled(two)(x)[0, 0] - x[0, 0]) == pytest.approx(2)
    assert compiled(one).explain(x) is compiled(one).explain(x)


def test_dropout_of_flax_moves_no_masks(mesh24):
    """flax asks, by `reshard`, for nothing on Auto axes: masks are drawn where they are used."""
    dropout = nnx.Dropout(0.5)

    def drop(x, key):
        return dropout(x, deterministic=False, rngs=key)

    x, key = normal(0, 8, 16), jax.random.key(0)
    step = dt.jit(drop, mesh=mesh24, in_placements=("S0,S1", "R"), out_placements="S0,S1")
    assert step.explain(x, key).bytes_per_device == 0
    np.testing.assert_array_equal(step(x, key), drop(x, key))


def test_weak_types_stay_weak(mesh24):
    """A number that meets no array gives way to the next one, as under jax.jit."""

    def step(count, x):
        return count + 1, 2.0 * count, x * 2.0

    x = jnp.ones(8, "bfloat16")
    compiled = dt.jit(step, mesh=mesh24, in_placements=("R", ["S0", "R"]))
    for ours, theirs in zip(compiled(0, x), jax.jit(step)(0, x)):
        assert ours.weak_type == theirs.weak_type
        assert (ours * x).dtype == (theirs * x).dtype
    count = 0
    for _ in range(3):
        count, *_ = compiled(count, x)
    assert len(set(compiled.programs.values())) == 1
    total = dt.distribute_tensor(x, mesh24, ["R", "S0"]) * dt.distribute_tensor(
        compiled(0, x)[1], mesh24, "R"
    )
    assert total.dtype == jnp.bfloat16
