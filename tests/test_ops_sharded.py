"""Operators on a 2x4 mesh: equal to one device wherever the operands lie, by the printed table."""

import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from op_samples import SAMPLES
from rotation import today
from test_ops import BY_OP, Call, close, finite

import dtorchjax as dt
from dtorchjax.notation import PlacementSignature
from dtorchjax.op_tables import program_table
from dtorchjax.placements import parse_placement
from dtorchjax.program import Wanted, make_program


def axis_choices(shape, size):
    return ["R", *(f"S{d}" for d, n in enumerate(shape) if n > 1 and n % size == 0)]


def main_operand(call):
    """The number of the first operand with dims among the floats."""
    return next((i for i, x in enumerate(call.xs) if x.ndim and x.size > 1), None)


def placements(shape):
    """Every placement on the 2x4 mesh that divides."""
    for dp, tp in itertools.product(axis_choices(shape, 2), axis_choices(shape, 4)):
        if dp != tp or dp == "R" or shape[int(dp[1:])] % 8 == 0:
            yield f"{dp},{tp}"


@pytest.mark.parametrize("s", today(SAMPLES, 72))
def test_every_placement_equals_one_device(s, mesh24):
    call = Call(s, "float32")
    main = main_operand(call)
    if main is None:
        pytest.skip("all operands are numbers: there is one placement")
    with_gradient = call.differentiable and finite(s)

    def run(*xs):
        return call(*xs), call.gradient(*xs) if with_gradient else ()

    wanted = jax.jit(run)(*call.xs)
    for where in placements(call.xs[main].shape):
        given = ["R,R"] * len(call.xs)
        given[main] = where
        found = dt.jit(run, mesh=mesh24, in_placements=tuple(given))(*call.xs)
        close(found, wanted, 2e-5, where)


@pytest.fixture(scope="module")
def mesh2():
    return dt.init_device_mesh((2,), ("tp",))


def strict_results(call, placed, mesh):
    """The placements of the results in strict mode, operands placed on a mesh with one axis."""
    layouts = [dt.Layout(mesh, (p,)) for p in placed]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.xs]
    program = make_program(
        call, mesh, avals, layouts, layouts,
        lambda shapes: [Wanted(None, partial=True) for _ in jax.tree.leaves(shapes)],
        [""] * len(avals), strict=True, eager=True,
    )  # fmt: skip
    return tuple(layout.placements[0] for layout in program.out_layouts)


@pytest.mark.parametrize("name", today(sorted(BY_OP), 8))
def test_strict_mode_follows_the_table(name, mesh2):
    """Every row gives the placements it says; what is no row needs a collective."""
    call = Call(BY_OP[name], "float32")
    if main_operand(call) is None:
        pytest.skip("all operands are numbers: the table is one row")
    with jax.enable_x64(False):
        table = program_table(jax.make_jaxpr(call)(*call.xs), [2])
    rows = {r.inputs: r.outputs for r in table.rows}
    for inputs, outputs in itertools.islice(rows.items(), 24):
        if all(x.shape[p.dim] % 2 == 0 for x, p in zip(call.xs, inputs) if isinstance(p, dt.Shard)):
            found = strict_results(call, inputs, mesh2)
            assert found == outputs or dt.Replicate() in inputs, inputs
    choices = [axis_choices(x.shape, 2) for x in call.xs]
    for placed in itertools.islice(itertools.product(*choices), 48):
        placed = tuple(map(parse_placement, placed))
        if placed not in rows and dt.Replicate() not in placed:  # R may be sliced to fit
            with pytest.raises(dt.PlacementMismatchError):
                strict_results(call, placed, mesh2)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


TABLES = [
    ("softmax", (f32(8, 512),), {}, "R -> R; S0 -> S0"),
    ("softmax", (f32(8, 4, 6),), {"axis": 1}, "R -> R; S0 -> S0; S2 -> S2"),
    ("reduce_sum", (f32(8, 4),), {"axes": (0,)}, "R -> R; S1 -> S0; S0 -> P; P -> P"),
    ("sum", (f32(8, 4),), {"axis": 0}, "R -> R; S1 -> S0; S0 -> R; P -> R"),
    ("mean", (f32(8, 4),), {"axis": 0}, "R -> R; S1 -> S0; S0 -> R; P -> R"),
    ("add", (f32(8, 4), f32(8, 4)), {}, "R, R -> R; S0, S0 -> S0; S1, S1 -> S1; P, P -> P"),
    ("add", (f32(8, 4), f32(4)), {}, "R, R -> R; S0, R -> S0; S1, S0 -> S1; P, P -> P"),
    ("add", (f32(1, 4), f32(8, 4)), {}, "R, R -> R; R, S0 -> S0; S1, S1 -> S1; P, P -> P"),
    (
        "matmul", (f32(8, 4), f32(4, 6)), {},
        "R, R -> R; S0, R -> S0; R, S1 -> S1; S1, S0 -> P; R, P -> P; P, R -> P",
    ),
    (
        "linear", (f32(8, 4), f32(4, 6)), {},
        "R, R -> R; S0, R -> S0; R, S1 -> S1; S1, S0 -> P; R, P -> P; P, R -> P",
    ),
    (
        "linear", (f32(8, 4), f32(4, 6), f32(6)), {},
        "R, R, R -> R; S0, R, R -> S0; R, S1, S0 -> S1; S1, S0, P -> P; R, P, P -> P; P, R, P -> P",
    ),
    (
        "concat", ([f32(8, 4), f32(8, 4)],), {},
        "R, R -> R; S1, S1 -> S1; S0, S0 -> S0/2; P, P -> P; "
        "P(max), P(max) -> P(max); P(min), P(min) -> P(min)",
    ),
    (
        "embedding", (i32(8, 16), f32(32, 64)), {},
        "R, R -> R; R, S0 -> P; R, S1 -> S2; S0, R -> S0; S1, R -> S1; R, P -> P",
    ),
    ("relu", (f32(8, 4),), {}, "R -> R; S0 -> S0; S1 -> S1; P(max) -> P(max); P(min) -> P(min)"),
    ("layer_norm", (f32(8, 4, 6), f32(6)), {}, "R, R -> R; S0, R -> S0; S1, R -> S1; R, P -> P"),
    ("cross_entropy", (f32(8, 32), i32(8)), {}, "R, R -> R; S0, S0 -> R"),
    (
        "scaled_dot_product_attention", (f32(2, 16, 4, 8),) * 3, {},
        "R, R, R -> R; S0, S0, S0 -> S0; S2, S2, S2 -> S2; S1, R, R -> S1; R, R, S3 -> S3; "
        "R, R, P -> P",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "avals", "static", "text"), TABLES, ids=lambda v: str(v)[:20])
def test_printed_tables(name, avals, static, text):
    table = dt.signature(name, *avals, **static)
    assert isinstance(table, PlacementSignature)
    assert set(str(table).splitlines()) == set(text.split("; "))


UNSOUND = [
    ("softmax", (f32(8, 4),), {}, ["P -> P", "S1 -> S1"]),
    ("layer_norm", (f32(8, 4),), {}, ["P -> P", "S1 -> S1"]),
    ("relu", (f32(8, 4),), {}, ["P -> P"]),
    ("clip", (f32(8, 4), f32(), f32()), {}, ["P, R, R -> P"]),
    ("masked_fill", (f32(8, 4), jax.ShapeDtypeStruct((8, 4), "bool"), f32()), {},
     ["P, R, R -> P", "S0, R, R -> S0"]),
    ("multiply", (f32(8, 4), f32(8, 4)), {}, ["P, P -> P"]),
    ("matmul", (f32(8, 8), f32(8, 8)), {}, ["S1, R -> P", "R, S0 -> P", "S0, S0 -> P"]),
    ("flatten", (f32(2, 4, 4, 8),), {"start": 1, "stop": 2}, ["S3 -> S1"]),
    ("scaled_dot_product_attention", (f32(2, 8, 4, 8),) * 3, {"causal": True},
     ["R, S1, S1 -> R", "S1, S1, S1 -> S1"]),
    ("batch_norm", (f32(8, 4), f32(4), f32(4), f32(4), f32(4)), {},
     ["S0, R, R, R, R -> S0, R, R"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "avals", "static", "rows"), UNSOUND, ids=lambda v: str(v)[:20])
def test_unsound_rows_are_absent(name, avals, static, rows):
    table = str(dt.signature(name, *avals, **static)).splitlines()
    assert not set(rows) & set(table)


STATISTICS = {
    "softmax": lambda x: dt.ops.softmax(x),
    "log_softmax": lambda x: dt.ops.log_softmax(x),
    "layer_norm": lambda x: dt.ops.layer_norm(x),
    "cross_entropy": lambda x: dt.ops.cross_entropy(x, jnp.zeros(x.shape[0], jnp.int32)),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_sharded_dim_stays_sharded(name, mesh24):
    """Along it only statistics move: at most four numbers per row, both ways."""
    fun = STATISTICS[name]
    x = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    for f, most in ((fun, 3), (jax.grad(lambda x: (fun(x) ** 2).sum()), 5)):
        plan = dt.explain(f, x, mesh=mesh24, in_placements="S0,S1")
        rows, n = 128 * 4, 4
        assert plan.bytes_per_device <= most * 2 * rows * (n - 1) / n + 32
        assert {c.kind for c in plan.collectives} <= {"all-reduce", "reduce-scatter"}


def test_a_sum_names_its_collective(mesh24):
    x = dt.distribute_tensor(jnp.arange(32.0).reshape(8, 4), mesh24, "S0,S1")
    total = dt.ops.sum(x, axis=1)
    assert total.placements == (dt.Shard(0), dt.Replicate())
    np.testing.assert_array_equal(total.full_tensor(), np.arange(32.0).reshape(8, 4).sum(1))
    plan = dt.explain(
        lambda x: dt.ops.sum(x, axis=1), np.zeros((8, 4), np.float32), mesh=mesh24,
        in_placements="S0,S1", redistribute="never",
    )  # fmt: skip
    (collective,) = plan.collectives
    assert (collective.kind, collective.axes) == ("all-reduce", ("tp",))
    assert collective.bytes == 2 * 16 * 3 / 4  # four numbers of four bytes, on four devices


def test_jax_nn_shards_as_well(mesh24):
    """The mechanism is the primitive set: the same bytes for JAX's own functions."""
    import optax

    x = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    labels = jnp.zeros(256, jnp.int32)
    pairs = [
        (lambda x: dt.ops.softmax(x), lambda x: jax.nn.softmax(x)),
        (lambda x: dt.ops.log_softmax(x), lambda x: jax.nn.log_softmax(x)),
        (lambda x: dt.ops.logsumexp(x, axis=-1), lambda x: jax.nn.logsumexp(x, -1)),
        (
            lambda x: dt.ops.cross_entropy(x, labels),
            lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean(),
        ),
    ]
    for ours, theirs in pairs:
        sent = [
            dt.explain(f, x, mesh=mesh24, in_placements="S0,S1").bytes_per_device
            for f in (ours, theirs)
        ]
        assert abs(sent[0] - sent[1]) <= 64, sent


def test_flax_modules_shard_as_well(mesh24):
    from flax import nnx

    x = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    norm = nnx.RMSNorm(4096, rngs=nnx.Rngs(0))
    graph, state = nnx.split(norm)
    scale = jax.ShapeDtypeStruct((4096,), jnp.float32)

    def theirs(scale, x):
        return nnx.merge(graph, nnx.State({"scale": nnx.Param(scale)}))(x)

    def ours(scale, x):
        return dt.ops.rms_norm(x, scale)

    for both in (lambda f: f, lambda f: jax.grad(lambda s, x: (f(s, x) ** 2).sum(), (0, 1))):
        sent = [
            dt.explain(both(f), scale, x, mesh=mesh24, in_placements=("R,S0", "S0,S1"))
            for f in (ours, theirs)
        ]
        assert sent[0].bytes_per_device <= sent[1].bytes_per_device + 64
    assert jax.tree.leaves(state)


def test_operators_take_dtensors(mesh24):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(8, 4, 16)), jnp.float32)
    rows, heads = "S0,R", "S0,S2"
    d = dt.distribute_tensor(x, mesh24, rows)
    scale = dt.distribute_tensor(jnp.arange(16.0), mesh24, "R,R")
    found = dt.ops.layer_norm(d, scale, None)
    assert found.placements == d.placements
    close(found.full_tensor(), dt.ops.layer_norm(x, jnp.arange(16.0)), 1e-6)
    out, mean, var = dt.ops.layer_norm(d, statistics=True)
    assert {v.placements for v in (out, mean, var)} == {d.placements}
    tree = {"a": d, "b": dt.distribute_tensor(x, mesh24, "R,S1")}
    norm = dt.ops.global_norm({"a": x, "b": x})
    with dt.redistribution("auto"):
        close(dt.ops.global_norm(tree).full_tensor(), norm, 1e-5)
        close(dt.ops.softmax(dt.distribute_tensor(x, mesh24, heads)).full_tensor(),
              dt.ops.softmax(x), 1e-6)  # fmt: skip
    key = jax.random.key(1)
    dropped = dt.ops.dropout(d, key, rate=0.5)
    np.testing.assert_array_equal(dropped.full_tensor(), dt.ops.dropout(x, key, rate=0.5))
    clipped = dt.ops.clip(d, -0.5, 0.5)
    close(clipped.full_tensor(), jnp.clip(x, -0.5, 0.5), 0)
    # three heads of q, k and v, sharded on the heads
    qkv = jnp.asarray(random.normal(size=(2, 8, 4, 8)), jnp.float32)
    shards = dt.distribute_tensor(qkv, mesh24, "S0,S2")
    found = dt.ops.scaled_dot_product_attention(shards, shards, shards, causal=True)
    assert found.placements == shards.placements
    close(
        found.full_tensor(), dt.ops.scaled_dot_product_attention(qkv, qkv, qkv, causal=True), 1e-5
    )
    gradient = jax.grad(lambda d: dt.ops.sum(dt.ops.silu(d) * 2))(d)
    assert gradient.placements == d.placements
    close(gradient.full_tensor(), jax.grad(lambda x: (jax.nn.silu(x) * 2).sum())(x), 1e-5)


def test_an_error_names_the_operator(mesh24):
    x = dt.distribute_tensor(jnp.ones((8, 16)), mesh24, "S0,S1")
    with pytest.raises(dt.PlacementMismatchError, match="`sub` in `softmax` cannot combine") as e:
        dt.ops.softmax(x)
    assert e.value.primitive == "sub" and e.value.where.startswith("test_ops_sharded.py")


# ---- faults that other frameworks had with sharded operators -------------------------------------

RANDOM = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


TABLE, IDS = array(16, 8), jnp.asarray(RANDOM.integers(0, 16, (8, 4)))
# the number of the report (PaddlePaddle), function, operands, placements on dp=2, tp=4
SHARDED = [
    (16, lambda x, y: dt.ops.matmul(x.T, y), (array(8, 4), array(8, 16)), ("S0,R", "S0,S1")),
    (16, lambda x, y: dt.ops.matmul(x, y), (array(2, 8, 4), array(4, 8)), ("S0,S2", "R,S0")),
    (16, lambda x, y: dt.ops.matmul(x, y.T), (array(8), array(16, 8)), ("R,S0", "S0,S1")),
    (17, lambda x, y: dt.ops.multiply(x, y), (array(1, 8), array(8, 8)), ("R,S1", "S0,S1")),
    (17, lambda x, y: dt.ops.add(x, y), (array(8, 1, 4), array(1, 8, 4)), ("S0,R", "R,S1")),
    (18, lambda x: dt.ops.reshape(x, (2, 16, 4)), (array(8, 16),), ("S0,S1",)),
    (18, lambda x: dt.ops.reshape(x, (1, 8, 16)), (array(8, 1, 16),), ("S0,S2",)),
    (19, lambda x: dt.ops.transpose(x, (2, 0, 1)), (array(2, 8, 4),), ("S0,S2",)),
    (19, lambda x: x[IDS[:, 0] % 8, IDS[:, 1] % 8], (array(8, 8),), ("S0,S1",)),
    (20, lambda x, v: x.at[IDS[:4, 0]].add(v), (array(16, 8), array(4, 8)), ("S0,S1", "R,S1")),
    (20, lambda x, v: x.at[jnp.arange(4)].set(v), (array(16, 8), array(4, 8)), ("R,S0", "R,S0")),
    (21, lambda t: dt.ops.embedding(IDS, t), (TABLE,), ("R,S0",)),
    (21, lambda t: dt.ops.embedding(IDS, t, padding_idx=3), (TABLE,), ("S0,S1",)),
    (22, lambda x: dt.ops.cross_entropy(x, IDS[:, 0]), (array(8, 16),), ("S0,S1",)),
    (
        23, lambda q, k: dt.ops.scaled_dot_product_attention(q, k, k, jnp.tri(8, dtype=bool)),
        (array(2, 8, 4, 4), array(2, 8, 4, 4)), ("S0,S2", "S0,S2"),
    ),
    (25, lambda x: dt.ops.add(dt.ops.sum(x, axis=0), 1.0), (array(8, 4),), ("S0,R",)),
    (26, lambda x, v: x.at[:, 2:6].set(v), (array(4, 8), array(4, 4)), ("S0,S1", "R,S1")),
    (26, lambda x, v: x.at[IDS[0, :2] % 8].add(v), (array(8, 8), array(8)), ("S1,R", "R,S0")),
]  # fmt: skip


@pytest.mark.parametrize("case", SHARDED, ids=lambda c: str(c[0]))
def test_sharded_programs(case, mesh24):
    """Values as on one device; each gradient lies as its operand does (24)."""
    _, fun, operands, where = case
    count = range(len(operands))
    both = lambda *xs: (  # noqa: E731
        fun(*xs),
        jax.grad(lambda *xs: (fun(*xs) ** 2).sum(), tuple(count))(*xs),
    )
    placed = [dt.distribute_tensor(x, mesh24, p) for x, p in zip(operands, where, strict=True)]
    out, gradients = dt.jit(both, mesh=mesh24)(*placed)
    wanted, wanted_gradients = both(*operands)
    close(out.full_tensor() if isinstance(out, dt.DTensor) else out, wanted, 1e-5)
    for g, w in zip(gradients, wanted_gradients, strict=True):
        close(g.full_tensor(), w, 1e-5)
    gradients = dt.jit(lambda *xs: both(*xs)[1], mesh=mesh24)(*placed)
    for g, x in zip(gradients, placed, strict=True):
        assert g.placements == x.placements


OTHER_MESHES = [((1, 8), "R,S1"), ((2, 2, 2), "S0,S1,S2"), ((2, 2, 2), "S0,S0,S1"), ((8,), "S1")]
SOME = {
    "norms": lambda x: dt.ops.p_norm(dt.ops.normalize(jax.vmap(dt.ops.softmax)(x)), axis=-1),
    "loop": lambda x: jax.lax.scan(
        lambda c, _: (dt.ops.layer_norm(dt.ops.gelu(c)), None), x, None, length=3
    )[0],
    "median": lambda x: dt.ops.median(x, axis=1),  # a reshape that takes dims in another order
    "alpha dropout": lambda x: dt.ops.alpha_dropout(x, jax.random.key(3), rate=0.3),
}


@pytest.mark.parametrize(("sizes", "where"), OTHER_MESHES, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_on_other_meshes_and_twice(name, sizes, where):
    mesh = dt.init_device_mesh(sizes, tuple("abc"[: len(sizes)]))
    gradient = jax.grad(lambda x: (SOME[name](x) ** 2).sum())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 16)), jnp.float32)
    step = dt.jit(gradient, mesh=mesh, in_placements=where)
    for values in (x, x * 2 + 1):
        close(step(values), jax.jit(gradient)(values), 1e-5)
