"""Declaring operators: rules, what is saved, transformations, kernels, switches, decompose."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import dtorchjax as dt
from dtorchjax.decompose import census, decomposed
from dtorchjax.op import Op
from dtorchjax.registry import OPS, RULES
from dtorchjax.switches import Choice


def primitives(fun, *args):
    """The names of all primitives in a function's program, inner programs included."""
    found = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for p in eqn.params.values():
                for item in p if isinstance(p, list | tuple) else (p,):
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


@pytest.fixture
def fresh():
    """Declare operators that are forgotten after the test."""
    before = dict(OPS), dict(RULES)
    yield dt.op
    for registry, old in zip((OPS, RULES), before, strict=True):
        for name in set(registry) - set(old):
            del registry[name]


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


# ---- decompose -----------------------------------------------------------------------------------


def program(x):
    def body(c, row):
        return c + dt.ops.softmax(row), dt.ops.gelu(row).sum()

    c, ys = jax.lax.scan(jax.checkpoint(body), x[0], x)
    picked = jax.lax.cond(
        c.sum() > 0, lambda c: dt.ops.layer_norm(c).sum(), lambda c: dt.ops.p_norm(c), c
    )
    last = jax.lax.while_loop(lambda c: c.sum() > 1e3, lambda c: dt.ops.silu(c), c)
    return picked + ys.sum() + last.sum() + jax.jit(dt.ops.cross_entropy)(x, jnp.arange(3))


def differentiable(x):
    c, ys = jax.lax.scan(lambda c, r: (c + dt.ops.softmax(r), dt.ops.gelu(r).sum()), x[0], x)
    return dt.ops.layer_norm(c) @ c + ys.sum() + jax.jit(dt.ops.cross_entropy)(x, jnp.arange(3))


PROGRAMS = {"all": program, "loop": differentiable, "gradient": jax.grad(differentiable)}


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_decompose_goes_through_everything(fun):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    taken = dt.decompose(fun)
    assert primitives(taken, x) <= dt.primitive_set()
    assert not primitives(fun, x) <= dt.primitive_set()
    np.testing.assert_allclose(taken(x), fun(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(taken)(x), fun(x), rtol=1e-5, atol=1e-6)
    kept = primitives(dt.decompose(fun, deny=["softmax"]), x)
    assert {n for n in kept - dt.primitive_set()} <= {"softmax", "softmax_tangent"}
    assert "softmax" in kept
    only = primitives(dt.decompose(fun, allow="softmax"), x)
    assert "softmax" not in only and "gelu" in only | {"gelu"}
    assert "softmax" in primitives(dt.decompose(fun, allow="softmax", deny={"softmax"}), x)


def test_decompose_of_forward_mode():
    x = jnp.arange(4.0)
    fun = lambda x: jax.jvp(dt.ops.softmax, (x,), (x * x,))[1]  # noqa: E731
    assert "softmax_tangent" in primitives(fun, x)
    assert primitives(dt.decompose(fun), x) <= dt.primitive_set()
    np.testing.assert_allclose(dt.decompose(fun)(x), fun(x), rtol=1e-6)


def test_names_are_checked():
    with pytest.raises(dt.OpError, match="no op `sofmax`"):
        dt.decompose(dt.ops.softmax, deny=["sofmax"])
    with pytest.raises(TypeError, match="str, list, tuple or set"):
        dt.decompose(dt.ops.softmax, allow=3)
    with pytest.raises(TypeError, match="names are strings"):
        dt.decompose(dt.ops.softmax, allow=[3])
    for name in ("softmax", "layer_norm"):
        assert dt.has_decomposition(name)
    assert not dt.has_decomposition("exp") and not dt.has_decomposition("dot_general")
    with pytest.raises(dt.OpError, match="neither an op nor a primitive"):
        dt.has_decomposition("sofmax")
    with pytest.raises(dt.OpError, match="has no decomposition"):
        dt.decomposition("exp")
    x = jnp.arange(4.0)
    np.testing.assert_allclose(dt.decomposition("softmax")(x, axis=0), dt.ops.softmax(x), rtol=1e-6)
    assert [dt.vjp_kind(n) for n in ("softmax", "lerp", "add")] == ["custom", "automatic", "plain"]
    with dt.custom_vjps(deny="softmax"):
        assert dt.vjp_kind("softmax") == "automatic"


def test_contexts_and_environment(monkeypatch):
    x = jnp.arange(4.0)
    both = lambda x: dt.ops.softmax(dt.ops.silu(x))  # noqa: E731
    names = lambda: primitives(dt.decompose(both), x) & {"softmax", "silu"}  # noqa: E731
    assert names() == set()
    with dt.decomposing(deny="softmax"):
        assert names() == {"softmax"}
        with dt.decomposing(allow=["softmax", "silu"]):  # a denial wins, outside ones too
            assert names() == {"softmax"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "silu")
    assert names() == {"softmax"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "none")
    assert names() == {"softmax", "silu"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "all")
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE_DENY", "silu;gelu")
    assert names() == {"silu"}
    monkeypatch.setenv("DTORCHJAX_VJP_DENY", "softmax")
    assert "softmax_tangent" not in primitives(lambda x: jax.jvp(both, (x,), (x,)), x)
    monkeypatch.delenv("DTORCHJAX_VJP_DENY")
    assert "softmax_tangent" in primitives(lambda x: jax.jvp(both, (x,), (x,)), x)


def test_a_denied_rule_is_not_in_jits_cache():
    fun = jax.jit(jax.grad(lambda x: (dt.ops.clip(x, 0.0) ** 2).sum() + dt.ops.relu6(x).sum()))
    x = jnp.array([0.0, 6.0])
    assert fun(x).tolist() == [0, 12]
    with dt.custom_vjps(deny=["relu6"]):
        assert fun(x).tolist() == [0.5, 12.5]  # JAX shares the gradient of equal elements
    assert fun(x).tolist() == [0, 12]


def test_every_decomposition_and_rule_is_in_the_primitive_set():
    from op_samples import SAMPLES
    from test_ops import Call

    for s in SAMPLES:
        call = Call(s, "float32")
        left = primitives(dt.decompose(call), *call.xs) - dt.primitive_set()
        assert not left, (s.op, left)
        if call.differentiable:
            left = primitives(dt.decompose(call.gradient), *call.xs) - dt.primitive_set()
            assert not left, (f"gradient of {s.op}", left)


# ---- logs ----------------------------------------------------------------------------------------


def test_logs(caplog):
    x = jnp.arange(5.0, dtype=jnp.float32)
    with caplog.at_level(logging.DEBUG, "dtorchjax"):
        dt.decompose(lambda x: dt.ops.silu(dt.ops.softsign(x)), deny="silu")(x)
        jax.grad(lambda x: dt.ops.softsign(x).sum())(x)
        with dt.custom_vjps(deny="softsign"):
            jax.grad(lambda x: dt.ops.softsign(x).sum())(x)
    text = "\n".join(f"{r.name}: {r.getMessage()}" for r in caplog.records)
    for line in (
        "dtorchjax.decompose: softsign(f32[5]) -> f32[5]: ",
        "dtorchjax.decompose: softsign: taken",
        "dtorchjax.decompose: silu: denied",
        "dtorchjax.decompose: before: 1 softsign, 1 silu",
        "dtorchjax.vjp: softsign: its rule reads x f32[5]; gradients ",
        "dtorchjax.vjp: softsign: derivative of its decomposition (its rule is denied)",
    ):
        assert line in text, (line, text)


def test_log_switch(monkeypatch):
    from dtorchjax.switches import set_loggers

    logger = logging.getLogger("dtorchjax.vjp")
    level, handlers = logger.level, list(logger.handlers)
    try:
        set_loggers("vjp:info")
        assert logger.level == logging.INFO and logger.handlers
        with pytest.raises(dt.OpError, match="is not one of decompose, vjp"):
            set_loggers("vpj:debug")
        with pytest.raises(dt.OpError, match="with a level"):
            set_loggers("vjp:loud")
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_census_counts_inner_programs():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(jnp.sin(x)))(1.0).jaxpr
    assert census(jaxpr) == "2 sin, 1 jit"


def test_ops_are_ops():
    assert all(isinstance(OPS[n], Op) == dt.has_decomposition(n) for n in OPS)
    assert repr(dt.ops.softmax) == "<op softmax>" and repr(dt.ops.add) == "<op add, JAX's own>"


# ---- the command line and the page ---------------------------------------------------------------


def test_decompose_command(capsys):
    from dtorchjax.cli import main

    assert main(["decompose", "softmax", "--shapes", "bf16[8,4,6]", "--static", "axis=1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "softmax: exp(x)",
        "f32[8,6] = reduce_max",
        "VJP: custom",
        "saves out",
        "S2 -> S2",
    ):
        assert part in text, part
    assert main(["decompose", "lerp", "--shapes", *["f32[4]"] * 3]) == 0
    assert "VJP: automatic" in capsys.readouterr().out
    assert main(["decompose", "list"]) == 0
    assert "custom: amax amin batch_norm" in capsys.readouterr().out
    for wrong, says in (
        (["sofmax"], "there is no op 'sofmax'"),
        (["linear"], "needs the operand `weight`"),
        (["softmax", "--shapes", "f32"], "write an array as f32[8,128]"),
        (["softmax", "--static", "axis"], "write name=value"),
        (["softmax", "--static", "axis=7"], "axis 7 is out of bounds"),
    ):
        assert main(["decompose", *wrong]) == 2
        assert says in capsys.readouterr().err


def test_the_page_has_every_operator():
    """After a change: `make operators`."""
    page = (Path(dt.__file__).parent.parent / "primitives" / "README.md").read_text("utf-8")
    sections = {line[3:] for line in page.splitlines() if line.startswith("## ")}
    assert sections == {n for n, o in OPS.items() if isinstance(o, Op) and n in dt.ops.__all__}


def test_results_are_checked_against_the_operators_own(fresh):
    wide = [False]

    @fresh
    def fickle(x):
        return jnp.stack([x, x]) if wide[0] else x

    x = jnp.ones(3)
    jaxpr = jax.make_jaxpr(fickle)(x)
    wide[0] = True
    with pytest.raises(dt.OpError, match=r"`fickle`: result 0 is f32\[3\], .* f32\[2,3\]"):
        decomposed(jaxpr, Choice())
