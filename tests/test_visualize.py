"""Pictures say what devices hold; every statement is compared with the parts themselves."""

import itertools
import re
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp
from test_programs import normal

import dtorchjax as dt


def rows_in(text):
    """`0:2 6:8` -> [0, 1, 6, 7]"""
    runs = [] if text == "-" else [run.split(":") for run in text.split()]
    return [i for a, b in runs for i in range(int(a), int(b))]


def held(picture):
    """Device id -> the rows of each sharded dim that the picture gives it, and its term."""
    found = {}
    for term, grid in enumerate(picture.grids()):
        for row, cells in zip(grid.rows, grid.cells):
            for column, devices in zip(grid.columns, cells):
                names = [row, *column.split(", ")] if picture.sharded else []
                pieces = [rows_in(name) for name in names if name]
                for device in devices.split():
                    found[int(device)] = pieces, term
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(
    "placements",
    [
        ["S0", "R"], ["R", "S0"], ["S1", "S0"], ["S0", "S1"], ["S0", "S0"], ["S1", "S1/2"],
        ["R", "S1/2"], ["S1/2", "S0"], ["S2", "S0"],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(8, 8, 3), (5, 4, 1)], ids=str)
def test_every_device_holds_what_its_picture_says(mesh24, shape, placements):
    whole = np.arange(1, np.prod(shape) + 1).reshape(shape)
    x = dt.distribute_tensor(whole, mesh24, placements)
    picture, parts = dt.visualize(x), np.asarray(x.to_local())
    said = held(picture)
    assert sorted(said) == list(range(8))
    for place in itertools.product(range(2), range(4)):
        pieces, _ = said[mesh24.devices[place].id]
        index = [np.arange(n) for n in shape]
        for dim, rows in zip(picture.sharded, pieces, strict=True):
            index[dim] = np.array(rows, int)
        part = parts[place]
        assert sorted(part[part > 0]) == sorted(whole[np.ix_(*index)].ravel())


def test_partial_arrays_are_sums_of_terms(mesh24):
    a = dt.distribute_tensor(normal(0, 8, 16), mesh24, ["S0", "S1"])
    b = dt.distribute_tensor(normal(1, 16, 4), mesh24, ["R", "S0"])
    product = a @ b
    picture, parts = dt.visualize(product), np.asarray(product.to_local())
    value = np.zeros((8, 4), "float32")
    for device, ((rows,), term) in held(picture).items():
        ((i, j),) = np.argwhere(np.vectorize(lambda d: d.id)(mesh24.devices) == device)
        assert term == j
        value[rows] += parts[i, j]
    np.testing.assert_allclose(value, product.full_tensor(), rtol=1e-6)
    assert str(picture).count("\n+\n") == 3
    greatest = dt.distribute_tensor(normal(2, 8), mesh24, ["R", "S0"]).max()
    assert "\nmax\n" in str(dt.visualize(greatest))


def texts(svg):
    tree = ElementTree.fromstring(svg)
    return [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_drawings(mesh24):
    x = dt.ones((10, 6), mesh24, ["S0", "S1"])
    words = texts(x._repr_html_())
    assert words[-1] == "f32[10,6] [dp=S0, tp=S1]: 5x2, 40 B on each device"
    assert {"dim 0: dp", "dim 1: tp", "0:5", "5:10", "-", *map(str, range(8))} <= set(words)
    partial = x.sum(1)
    assert partial.layout.placements[1] == dt.Partial()
    assert texts(dt.visualize(partial).svg).count("+") == 3


def test_a_number_a_key_and_many_pieces():
    mesh = dt.init_device_mesh((8,), ("x",))
    assert "one number" in str(dt.visualize(dt.ones((), mesh, "R")))
    many = jax.ShapeDtypeStruct(
        (512, 512),
        "float32",
        sharding=jax.NamedSharding(jax.sharding.AbstractMesh((256,), ("x",)), jax.P("x")),
    )
    with pytest.raises(dt.PlacementError, match="lies on no mesh"):
        dt.visualize(many)  # of no devices
    tall = dt.visualize(dt.ones((64, 2), mesh, ["S0"]))
    assert len(str(tall).splitlines()) < 16
    keys = dt.distribute_tensor(jax.random.split(jax.random.key(0), 8), mesh, "S0")
    assert "0:1" in str(dt.visualize(keys))


def test_trees_and_modules(mesh24):
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    dt.place(model, mesh24, dt.by_path({"*": "R", "*kernel": {"tp": "S1"}}))
    text = str(dt.visualize(model))
    assert re.search(r"  kernel +f32\[8,16\]\s+\[dp=R, tp=S1\]\s+128 B", text)
    assert "576 B in all, 192 B on each device" in text
    tree = dict(w=dt.ones((8, 8), mesh24, ["S0", "P"]), host=np.ones(3, "int8"), name="x")
    text = str(dt.visualize(tree))
    assert "[dp=S0, tp=P]" in text and "not an array" in text
    assert "128 B" in text and re.search(r"host.*i8\[3\]\s+on one device or the host\s+3 B", text)


def test_an_array_on_no_mesh_has_a_remedy():
    with pytest.raises(dt.PlacementError, match="distribute_tensor"):
        dt.visualize(jnp.ones(3))


def test_a_program_line_by_line(mesh24):
    def block(x, w):
        h = jnp.tanh(x @ w["up"])
        return x + h @ w["down"], None

    def loss(w, x):
        x, _ = lax.scan(block, x, w)
        return jnp.mean(x**2)

    optimizer = optax.adam(1e-3)

    def step(w, state, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(gradients, state, w)
        return optax.apply_updates(w, updates), state, value

    w = dict(up=normal(0, 4, 64, 256), down=normal(1, 4, 256, 64))
    where = dt.by_path({"*": "R", "*up": {"tp": "S2"}, "*down": {"tp": "S1"}})
    compiled = dt.jit(step, mesh=mesh24, in_placements=(where, where, {"dp": "S0"}))
    plan = compiled.explain(w, optimizer.init(w), normal(2, 64, 64))
    picture = dt.visualize(plan)
    text, page = str(picture), picture._repr_html_()
    for line in ('h = jnp.tanh(x @ w["up"])', "return jnp.mean(x**2)", "optimizer.update("):
        assert line in text and line.replace('"', "&quot;") in page
    up = next(line for line in picture.lines if line.text.startswith("h = "))
    assert up.depth == 1 and "f32[64,256] S0,S1" in " ".join(up.makes)
    # every collective of the plan stands at a line, once
    names = {f"{c.kind} {','.join(c.axes)}" for c in plan.collectives}
    said = [sent.split(":")[0] for line in picture.lines for sent in line.sends]
    assert set(said) == names


def test_both_branches_are_shown(mesh24):
    def choose(x, w):
        return lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: (x * 2).max())

    compiled = dt.jit(choose, mesh=mesh24, in_placements=(["S0", "S1"], ["R", "S0"]))
    lines = dt.visualize(compiled.explain(normal(0, 8, 8), normal(1, 8, 8))).lines
    assert [line.text for line in lines if line.where == ""][:2] == ["cond", "end of cond"]
    assert [line.depth for line in lines if "lambda" in line.text] != []
