"""Declaring operators: rules, what is saved, transformations, kernels, switches, decompose."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import dtorchjax as dt


def soft(x, axis=-1):
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(axis, keepdims=True)))
    return e / e.sum(axis, keepdims=True)


# ---- declaration ---------------------------------------------------------------------------------


def test_errors_of_declarations(fresh):
    @fresh
    def plain_op(x, w=None, *, axis=-1):
        return x

    with pytest.raises(dt.OpError, match=r"asks for mean; it may name x, w, axis, out, g"):
        plain_op.vjp(lambda x, mean, g: g)
    with pytest.raises(dt.OpError, match="must take the cotangent"):
        plain_op.vjp(lambda x: x)
    plain_op.vjp(lambda g: (g, None))
    with pytest.raises(dt.OpError, match="has a VJP rule already"):
        plain_op.vjp(lambda g: (g, None))
    with pytest.raises(dt.OpError, match=r"`plain_op` is declared already \(.*test_op.py"):
        dt.op(plain_op.body)
    with pytest.raises(dt.OpError, match="one of JAX's primitives"):

        @fresh
        def sin(x):
            return x

    with pytest.raises(dt.OpError, match="name its static arguments"):

        @fresh
        def loose(x, **options):
            return x


def test_errors_of_calls(fresh):
    x = jnp.ones(3)
    with pytest.raises(TypeError, match=r"takes 2 operands \(x, mask\), 3 are given"):
        dt.ops.softmax(x, None, -1)
    with pytest.raises(TypeError, match="`axes` is not known"):
        dt.ops.softmax(x, axes=0)
    with pytest.raises(TypeError, match="needs the operand `x`"):
        dt.ops.softmax()
    with pytest.raises(TypeError, match="`x` is given twice"):
        dt.ops.softmax(x, x=x)
    with pytest.raises(TypeError, match="needs the static argument `window`"):
        dt.ops.max_pool(x)
    with pytest.raises(TypeError, match="`axis` is a static argument"):
        dt.ops.softmax(x, axis=jnp.int32(0))
    with pytest.raises(TypeError, match="an operand is str, not an array"):
        dt.ops.softmax("x")
    with pytest.raises(ValueError, match="axis 3 is out of bounds"):
        dt.ops.softmax(x, axis=3)
    with pytest.raises(ValueError, match="an axis is named twice"):
        dt.ops.softmax(jnp.ones((2, 3)), axis=(1, -1))

    @fresh
    def wrong_gradient(x, y):
        return x * y

    @wrong_gradient.vjp
    def _(x, y, g):
        return (g * y).sum(), g * x

    with pytest.raises(dt.OpError, match=r"gradient of operand 0 has shape \(\), the operand \(3,"):
        jax.grad(lambda x: wrong_gradient(x, x).sum())(x)

    @fresh
    def one_gradient(x, y):
        return x * y

    one_gradient.vjp(lambda y, g: g * y)
    with pytest.raises(dt.OpError, match="must return 2 gradients"):
        jax.grad(lambda x: one_gradient(x, x).sum())(x)

    @fresh
    def closes(x):
        return x + np.arange(3.0, dtype="float32")

    with pytest.raises(dt.OpError, match=r"closes over an array of shape \(3,\)"):
        closes(x)


def test_static_arguments_are_python_values():
    x = jnp.ones((2, 3))
    for axis in ([0, 1], (0, 1), None):
        assert dt.ops.softmax(x, axis=axis).sum() == pytest.approx(1)
    assert dt.ops.softmax(x, axis=np.int64(0)).shape == (2, 3)


def test_operands_are_pytrees_and_weak_types_stay_weak():
    tree = {"w": jnp.ones(4), "b": (jnp.zeros(2), None)}
    assert dt.ops.global_norm(tree) == 2
    gradient = jax.grad(dt.ops.global_norm)(tree)
    assert jax.tree.structure(gradient) == jax.tree.structure(tree)
    assert dt.ops.lerp(jnp.ones(3, jnp.bfloat16), 0.0, 0.5).dtype == jnp.bfloat16
    assert dt.ops.clip(jnp.arange(4), 1, 2).dtype == jnp.int32


# ---- what is saved -------------------------------------------------------------------------------


def scan_saves(fun, x):
    """The shapes that a scan of `fun` keeps for its backward pass, without the steps' dim."""
    loop = lambda x: jax.lax.scan(lambda c, _: (fun(c), None), x, None, length=7)[0].sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loop))(x).jaxpr
    first = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    return [v.aval.shape[1:] for v in first.outvars if v.aval.shape[:1] == (7,)]


def test_a_loop_keeps_only_what_the_rule_reads():
    x = jnp.ones((3, 5))
    assert scan_saves(dt.ops.softmax, x) == [(3, 5)]
    assert scan_saves(dt.ops.silu, x) == [(3, 5)]
    assert sorted(scan_saves(dt.ops.layer_norm, x)) == [(3, 1), (3, 1), (3, 1), (3, 5)]
    assert sorted(scan_saves(dt.ops.rms_norm, x)) == [(3, 1), (3, 5)]
    # the mean's rule names x, but reads its shape only
    assert scan_saves(lambda x: x + dt.ops.mean(x, axis=0, keepdims=True), x) == []
    dropped = lambda x: dt.ops.dropout(x, jax.random.key(0), rate=0.5)  # noqa: E731
    assert scan_saves(dropped, x) == [(3, 5)]


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.smoke
def test_softmax_under_every_transformation():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (3, 5), jnp.float64)
        ours = lambda x: dt.ops.softmax(x)  # noqa: E731

        def both(transform, tolerance=1e-12):
            np.testing.assert_allclose(
                *jax.jit(lambda x: (transform(ours)(x), transform(soft)(x)))(x),
                rtol=tolerance,
                atol=tolerance,
            )

        def cubes(f):
            return lambda x: (f(x) ** 3).sum()

        both(lambda f: f)
        for derivative in (jax.jacfwd, jax.jacrev, lambda f: jax.jacfwd(jax.jacrev(f))):
            both(derivative)
        for second in (
            jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacrev(f)),
            lambda f: jax.jacrev(jax.jacfwd(f)),
        ):  # fmt: skip
            both(lambda f, second=second: second(cubes(f)), 1e-10)
        both(lambda f: jax.vmap(jax.grad(cubes(f))))
        cube = x[:, None] * x[None, :, None, :1]
        both(lambda f: lambda x: jax.vmap(jax.vmap(f, 0, 1), 1, 0)(cube[0] * x.sum()))
        both(lambda f: lambda x: jax.jvp(f, (x,), (x * x,))[1])

        def looped(f):
            body = lambda x: jax.lax.scan(lambda c, r: (c + f(r), c.sum()), x[0], x)[0]  # noqa: E731
            return jax.grad(jax.jit(jax.checkpoint(lambda x: (body(x) ** 2).sum())))

        both(looped)
        b, c = jax.export.symbolic_shape("b, c")
        exported = jax.export.export(jax.jit(jax.grad(cubes(ours))))(
            jax.ShapeDtypeStruct((b, c), jnp.float64)
        )
        np.testing.assert_allclose(exported.call(x), jax.grad(cubes(soft))(x), atol=1e-12)


def test_vmap_sums_gradients_of_what_it_shares():
    x, w = jnp.arange(12.0).reshape(4, 3) / 7, jnp.arange(6.0).reshape(3, 2) / 5
    scale = jnp.arange(3.0) + 1

    def loss(fun):
        return lambda x, s: (jax.vmap(lambda r: fun(r, s))(x) ** 2).sum()

    ours = jax.grad(loss(lambda r, s: dt.ops.rms_norm(r, s)), (0, 1))(x, scale)
    plain = jax.grad(loss(lambda r, s: r / jnp.sqrt((r * r).mean() + 1e-6) * s), (0, 1))(x, scale)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    stacked = jax.vmap(dt.ops.linear, (0, None))(x, w)
    np.testing.assert_allclose(stacked, x @ w, rtol=1e-6)


def test_inside_shard_map_and_on_explicit_meshes(mesh24):
    from jax.sharding import PartitionSpec as P

    x = jnp.arange(32.0).reshape(8, 4) / 9
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    for mesh, check in ((mesh24, True), (mesh24, False)):
        local = jax.shard_map(
            jax.grad(lambda x: (dt.ops.softmax(x) ** 2).sum()), mesh=mesh,
            in_specs=P("dp"), out_specs=P("dp"), check_vma=check,
        )  # fmt: skip
        wanted = jax.grad(lambda x: (soft(x) ** 2).sum())(x)
        np.testing.assert_allclose(jax.jit(local)(x), wanted, rtol=1e-5, atol=1e-7)
    with jax.set_mesh(explicit):
        y = jax.device_put(x, jax.NamedSharding(explicit, P("dp")))
        found = jax.jit(jax.grad(lambda x: (dt.ops.softmax(x) ** 2).sum()))(y)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


# ---- tables and kernels --------------------------------------------------------------------------


def test_a_table_of_its_own_is_tried_first(fresh, mesh24):
    @fresh
    def normalised_rows(x):
        return x / x.sum(-1, keepdims=True)

    decomposed = str(dt.signature("normalised_rows", jax.ShapeDtypeStruct((8, 4, 4), "float32")))
    assert decomposed.splitlines() == ["R -> R", "S0 -> S0", "S1 -> S1"]

    @normalised_rows.rule
    def _(x):
        return "b r! c! -> b r! c!"

    table = str(dt.signature("normalised_rows", jax.ShapeDtypeStruct((8, 4, 4), "float32")))
    assert table.splitlines() == ["R -> R", "S0 -> S0", "S1 -> S1"]
    x = jnp.arange(1.0, 129).reshape(8, 4, 4)
    plan = dt.explain(normalised_rows, x, mesh=mesh24, in_placements="S0,R")
    assert "normalised_rows" in [n.name for n in plan.graph.nodes]
    for where in ("S0,R", "S0,S1", "R,S2"):  # where the table has no row, the decomposition
        found = dt.jit(normalised_rows, mesh=mesh24, in_placements=where)(x)
        np.testing.assert_allclose(found, x / x.sum(-1, keepdims=True), rtol=1e-6)
    strict = normalised_rows(dt.distribute_tensor(x, mesh24, "S0,S1"))
    assert strict.placements == (dt.Shard(0), dt.Shard(1))
    with pytest.raises(dt.PlacementMismatchError):
        normalised_rows(dt.distribute_tensor(x, mesh24, "R,S2"))


def test_a_kernel_replaces_the_decomposition(fresh):
    @fresh
    def doubled(x):
        return x + x

    doubled.vjp(lambda g: 2 * g)
    calls = []

    @doubled.kernel("cpu")
    def _(x):
        calls.append(x.shape)
        return 2 * x + 1  # wrong on purpose: it is seen to run

    x = jnp.ones(3)
    assert doubled(x).tolist() == [3, 3, 3] and calls
    assert jax.vmap(doubled)(x).tolist() == [3, 3, 3]
    assert jax.grad(lambda x: doubled(x).sum())(x).tolist() == [2, 2, 2]
    with dt.decomposing(allow=["doubled"]):  # the decomposition stays the reference
        assert doubled(x).tolist() == [2, 2, 2]
    with dt.decomposing(allow=["doubled"], deny="doubled"):
        assert doubled(x).tolist() == [3, 3, 3]
    assert dt.decompose(doubled)(x).tolist() == [2, 2, 2]
    with pytest.raises(dt.OpError, match="has a kernel for cpu already"):
        doubled.kernel("cpu")(lambda x: x)

    @fresh
    def other(x):
        return x + x

    other.kernel("cpu")(lambda x: x.astype(jnp.float16))
    with pytest.raises(dt.OpError, match=r"kernel of `other`: result 0 is f16\[3\], .* f32\[3\]"):
        other(x)
