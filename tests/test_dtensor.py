"""DTensor without arithmetic: making, moving, reading, printing."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import dtorchjax as dt

X = np.arange(64, dtype="float32").reshape(8, 8)


@pytest.mark.parametrize(
    "form",
    [
        "S1,R",
        ["S1", "R"],
        (dt.Shard(1), "R"),
        {"dp": "S1"},
        {"dp": "S-1"},
        PartitionSpec(None, "dp"),
    ],
)
def test_every_form_of_placements(mesh24, form):
    x = dt.distribute_tensor(X, mesh24, form)
    assert x.placements == (dt.Shard(1), dt.Replicate())
    assert x.to_array().sharding.is_equivalent_to(
        NamedSharding(mesh24, PartitionSpec(None, "dp")), 2
    )
    np.testing.assert_array_equal(x, X)
    same = dt.distribute_tensor(X, mesh24, x.layout)
    assert same.layout == x.layout == dt.distribute_tensor(X, mesh24, x.to_array().sharding).layout


def test_axis_order(mesh24):
    x = dt.distribute_tensor(X, mesh24, PartitionSpec(("tp", "dp")))
    assert x.layout.order == (1, 0) and "major first: tp, dp" in str(x.layout)
    assert x.layout == dt.Layout(mesh24, ("S0", "S0"), ("tp", "dp"))
    y = x.redistribute("S0,S0")
    assert y.layout != x.layout
    np.testing.assert_array_equal(x.full_tensor(), X)
    np.testing.assert_array_equal(y.full_tensor(), X)
    assert y.to_array().sharding.spec == PartitionSpec(("dp", "tp"))


def test_partial_terms(mesh24):
    x = dt.distribute_tensor(X, mesh24, "P,S1")
    assert x.shape == (8, 8) and x.storage.shape == (2, 8, 8)
    np.testing.assert_array_equal(x.full_tensor(), X)
    np.testing.assert_array_equal(x.reduce_partial().to_array(), X)
    assert x.reduce_partial().placements == (dt.Replicate(), dt.Shard(1))
    np.testing.assert_array_equal(x.redistribute("S0,S1"), X)
    for read in (x.to_array, lambda: np.asarray(x), lambda: float(x)):
        with pytest.raises(dt.PlacementError, match=r"reduce_partial\(\)"):
            read()
    assert "partial terms" in repr(x)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_from_local_terms(mesh24, op):
    blocks = np.random.default_rng(0).normal(size=(2, 4, 4, 8)).astype("float32")
    x = dt.DTensor.from_local(blocks, mesh24, ["S0", f"P({op})"])
    assert x.shape == (8, 8)
    whole = getattr(np, op)(np.concatenate([blocks[0], blocks[1]], axis=1), axis=0)
    np.testing.assert_allclose(x.full_tensor(), whole, rtol=1e-5)
    np.testing.assert_array_equal(x.to_local(), blocks)


@pytest.mark.parametrize("where", ["R,R", "S0,S1", "S1,S1", "S0,R"])
def test_to_local_and_back(mesh24, where):
    x = dt.distribute_tensor(X, mesh24, where)
    blocks = x.to_local()
    assert blocks.shape == (2, 4, *x.layout.local_shape((8, 8)))
    back = dt.DTensor.from_local(blocks, mesh24, where)
    assert back.layout == x.layout
    np.testing.assert_array_equal(back, X)


def test_as_a_jax_array(mesh24):
    x = dt.distribute_tensor(jnp.float32(2.5), mesh24, "R")
    assert float(x) == 2.5 and int(x) == 2 and bool(x) and f"{x:.2f}" == "2.50" and str(x) == "2.5"
    assert x.item() == 2.5
    y = dt.distribute_tensor(X, mesh24, "S0,R")
    assert (y.ndim, y.size, len(y), y.dtype) == (2, 64, 8, np.float32)
    assert repr(y).startswith("DTensor(float32[8,8] [dp=S0, tp=R]") or "[dp=S0, tp=R]" in repr(y)
    with pytest.raises(TypeError, match=r"dt\.jit\(jnp\.exp\)\(x\)"):
        jnp.exp(y)


def test_pytree(mesh24):
    x = dt.distribute_tensor(X, mesh24, "S0,R")
    doubled = jax.tree.map(lambda a: a * 2, x)
    assert isinstance(doubled, dt.DTensor) and doubled.layout == x.layout
    np.testing.assert_array_equal(doubled, X * 2)
    np.testing.assert_array_equal(jax.jit(lambda t: t)(x), X)
    partial = dt.distribute_tensor(X, mesh24, "P,R")
    (lost,) = jax.tree.leaves(
        jax.tree.map(lambda a: a[0], partial), is_leaf=lambda t: t is not None
    )
    with pytest.raises(dt.PlacementError, match="does not fit its layout"):
        lost.full_tensor()


def test_creation(mesh24):
    for made, expected in [
        (dt.zeros((8, 4), mesh24, "S0,S1"), np.zeros((8, 4))),
        (dt.ones((8, 4), mesh24, "S0,R"), np.ones((8, 4))),
        (dt.full((8, 4), 7, mesh24, "R,S0"), np.full((8, 4), 7)),
        (dt.ones((8, 4), mesh24, "P,S0"), np.ones((8, 4))),
    ]:
        assert made.shape == (8, 4)
        np.testing.assert_array_equal(made.full_tensor(), expected)
    key = jax.random.key(4)
    random = dt.randn((8, 4), mesh24, "S0,S1", key=key)
    np.testing.assert_allclose(random, jax.random.normal(key, (8, 4)), rtol=1e-6)
    assert random.placements == (dt.Shard(0), dt.Shard(1))


TREE = dict(
    embed=dict(table=np.ones((8, 4))),
    layers=[dict(qkv=dict(kernel=np.ones((4, 8)), bias=np.ones(8))) for _ in range(2)],
    step=np.int32(3),
)


def test_by_path(mesh24):
    placed = dt.distribute(
        TREE,
        mesh24,
        dt.by_path({"*": "R", "*/qkv/kernel": {"tp": "S1"}, "layers/1/*": {"dp": "S0"}}),
    )
    assert placed["embed"]["table"].placements == (dt.Replicate(), dt.Replicate())
    assert placed["layers"][0]["qkv"]["kernel"].placements == (dt.Replicate(), dt.Shard(1))
    assert placed["layers"][1]["qkv"]["kernel"].placements == (dt.Shard(0), dt.Replicate())
    assert placed["step"].placements == (dt.Replicate(), dt.Replicate())


def test_prefixes(mesh24):
    placed = dt.distribute(TREE, mesh24, dict(embed="R,S0", layers="R", step="R"))
    assert placed["embed"]["table"].placements == (dt.Replicate(), dt.Shard(0))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (dt.by_path({"*": "R", "*/nothing": "S0"}), r"'\*/nothing' matches no leaf"),
        (dt.by_path({"layers/*": "R"}), r"no pattern matches 'embed/table'"),
        (
            dt.by_path({"*": "R", "*/bias": {"tp": "S1"}}),
            r"tree\['layers'\]\[0\]\['qkv'\]\['bias'\]",
        ),
        (dict(embed="R", layers="R"), r"lack \['step'\]"),
        (dict(embed="R", layers="R", step="R", more="R"), r"name \['more'\]"),
        (dict(embed="Q", layers="R", step="R"), "'Q'"),
        (dict(embed=3, layers="R", step="R"), "embed"),
    ],
)
def test_errors_name_the_leaf(mesh24, placements, message):
    with pytest.raises(dt.PlacementError, match=message):
        dt.distribute(TREE, mesh24, placements)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ("S0", "1 placements"),
        ("S0,R,R", "3 placements"),
        ("S2,R", "no dim 2"),
        ("S-3,R", "no dim -3"),
        ({"pp": "S0"}, "no mesh axis 'pp'"),
        (PartitionSpec("pp"), "no mesh axis"),
        (PartitionSpec(None, None, "dp"), "has 3 dims"),
        (["S0", 5], "5"),
        ("S0,P(mean)", "P\\(mean\\)|mean"),
    ],
)
def test_bad_placements(mesh24, placements, message):
    with pytest.raises(dt.PlacementError, match=message):
        dt.distribute_tensor(X, mesh24, placements)


def test_meshes():
    with pytest.raises(dt.PlacementError, match=r"dt\.simulate_devices\(64\)"):
        dt.init_device_mesh((8, 8), ("a", "b"))
    with pytest.raises(dt.PlacementError, match="differ in length"):
        dt.init_device_mesh((8,), ("a", "b"))
    with pytest.raises(RuntimeError, match="before the first use"):
        jax.devices()
        dt.simulate_devices(1000)
    one, two = dt.init_device_mesh((8,), ("a",)), dt.init_device_mesh((2, 4), ("a", "b"))
    x, y = dt.distribute_tensor(X, one, "S0"), dt.distribute_tensor(X, two, "S0,R")
    with pytest.raises(dt.PlacementError, match="two meshes"):
        dt.jit(jnp.add)(x, y)
    with pytest.raises(dt.PlacementError, match="on which mesh"):
        dt.jit(jnp.exp)(X)


def test_meshes_of_one_device_and_of_fewer_than_all():
    mesh = dt.init_device_mesh((1, 2), ("dp", "tp"))
    x = dt.distribute_tensor(X, mesh, "S0,S1")
    out = dt.jit(lambda x: x @ x.T)(x)
    np.testing.assert_allclose(out, X @ X.T)


def test_keys(mesh24):
    keys = jax.random.split(jax.random.key(0), 8)
    x = dt.distribute_tensor(keys, mesh24, "S0,R")
    same = x.redistribute("R,S0").full_tensor()
    assert (jax.random.key_data(same) == jax.random.key_data(keys)).all()


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "bfloat16", "float16"])
def test_dtypes_move(mesh24, dtype):
    x = dt.distribute_tensor(jnp.asarray(X % 3, dtype), mesh24, "S0,S1")
    for where in ("S1,S0", "R,R", "S0,S0", "R,S1"):
        moved = x.redistribute(where)
        assert moved.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(moved.full_tensor(), jnp.asarray(X % 3, dtype))


def test_the_table_for_dtensors(mesh24):
    a = dt.distribute_tensor(np.ones((8, 16)), mesh24, ["S0", "S1"])
    b = dt.distribute_tensor(np.ones((16, 4)), mesh24, ["R", "S0"])
    shapes = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")
    assert str(dt.signature("dot_general", a, b)) == str(dt.signature("dot_general", *shapes))
