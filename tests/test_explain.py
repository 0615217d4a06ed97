"""What a plan says: times, differences, verification by mesh axes, the command line."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dtorchjax as dt
from dtorchjax import chips, cli, hlo
from dtorchjax.demo import UsageError
from dtorchjax.explain_command import load, parse_shape

X = np.ones((64, 256), "float32")
W = np.ones((256, 512), "float32")


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


STEP = jax.value_and_grad(loss)


@pytest.fixture(scope="module")
def mesh():
    return dt.init_device_mesh((2, 4), ("dp", "tp"))


# ---- figures of devices --------------------------------------------------------------------------


def fake_mesh(kind, shape, processes, platform="gpu"):
    devices = np.array(
        [SimpleNamespace(device_kind=kind, process_index=p, platform=platform) for p in processes]
    ).reshape(shape)
    return SimpleNamespace(devices=devices)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"),
        ("TPU v4", "TPU v4"), ("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"), ("TPU v6 lite", "TPU v6e"), ("TPU v6e", "TPU v6e"),
        ("cpu", "simulated CPU"), ("something new", "H100"),
    ],
)  # fmt: skip
def test_device_kinds_are_known(kind, name):
    assert chips.chip_of(kind).name == name


def test_an_axis_between_hosts_is_slower():
    mesh = fake_mesh("NVIDIA H100 80GB HBM3", (2, 4), [0] * 4 + [1] * 4)
    assert chips.crosses_hosts(mesh) == (True, False)
    speeds = chips.speeds_of(mesh)
    assert speeds.slowness == (9.0, 1.0)
    assert chips.seconds(1e9, [0], mesh) > 8 * chips.seconds(1e9, [1], mesh)
    assert chips.seconds(1e9, [0, 1], mesh) == chips.seconds(1e9, [0], mesh)


def test_figures_are_of_one_order():
    for chip in chips.CHIPS.values():
        assert chip.memory_bandwidth > chip.link >= chip.network > 0, chip
        assert chip.flops > chip.memory_bandwidth and 0 < chip.latency < 1e-3


# ---- tables --------------------------------------------------------------------------------------


def test_times_add_up(mesh):
    plan = dt.explain(STEP, W, X, mesh=mesh, in_placements=(["R", "S1"], ["S0", "R"]))
    assert plan.seconds == pytest.approx(sum(c.seconds * c.times for c in plan.collectives))
    assert all(c.seconds > 20e-6 * 0.99 for c in plan.collectives)
    assert plan.table().count(" us ") + plan.table().count(" ms ") >= len(plan.collectives)
    assert json.loads(plan.to_json())["seconds"] == plan.seconds
    assert "simulated CPU" in plan.table() and "held at the peak" in plan._repr_html_()


def test_diff_names_what_changed(mesh):
    kept = dt.explain(STEP, W, X, mesh=mesh, in_placements=(["R", "S1"], ["S0", "R"]))
    other = dt.explain(STEP, W, X, mesh=mesh, in_placements=(["S0", "S1"], ["S0", "R"]))
    text = kept.diff(other)
    assert "test_explain.py" in text and "before" in text and "->" in text
    assert "the same collectives" in kept.diff(kept)


# ---- verification --------------------------------------------------------------------------------


def test_verify_names_the_axes(mesh):
    step = dt.jit(STEP, mesh=mesh, in_placements=(["R", "S1"], ["S0", "R"]))
    lines = step.explain(W, X).verify(step.lower(W, X).compile())
    assert "over dp: planned" in lines


def test_groups_of_devices_are_mesh_axes():
    listed = hlo.groups("(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dims", 8)
    assert hlo.axes_of(listed, (2, 4)) == (1,)
    iota = hlo.groups("(%x), replica_groups=[4,2]<=[2,4]T(1,0), dims", 8)
    assert sorted(map(sorted, iota)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert hlo.axes_of(iota, (2, 4)) == (0,)
    assert hlo.axes_of(hlo.groups("replica_groups=[1,8]<=[8]", 8), (2, 4)) == (0, 1)
    assert hlo.axes_of(hlo.groups("replica_groups={}", 8), (2, 4)) == (0, 1)
    assert hlo.axes_of([[0, 1], [2, 3], [4, 5], [6, 7]], (2, 4)) is None
    assert hlo.axes_of([[0, 1], [2, 3], [4, 5], [6, 7]], (2, 2, 2)) == (2,)


# ---- the command ---------------------------------------------------------------------------------

MODULE = """
import jax, jax.numpy as jnp
import dtorchjax as dt

def forward(x, w):
    return jnp.tanh(x @ w)

def arguments():
    return jax.ShapeDtypeStruct((64, 256), "float32"), dict(w=jnp.ones((256, 512)))

def of_dict(x, p):
    return jnp.tanh(x @ p["w"])
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "explained_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "explained_module"
    sys.modules.pop("explained_module", None)


def command(*words):
    return cli.main(["explain", *words])


def test_explain_prints_the_plan(module, capsys):
    shapes = ["--shapes", "f32[64,256]", "f32[256,512]", "--placements", "S0,S1", "R,R"]
    assert command(f"{module}:forward", "--mesh", "dp=2,tp=4", *shapes) == 0
    out = capsys.readouterr().out
    assert "explained_module.py:6" in out and "sent per device" in out


def test_explain_prints_json_for_arguments_of_a_function(module, capsys):
    words = ["--args", f"{module}:arguments", "--out-placements", "R,R", "--json"]
    assert command(f"{module}:of_dict", "--mesh", "dp=2,tp=4", *words) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forward", "--shapes"], "write module:function"),
        (["explained_module:backward"], "has no 'backward'"),
        (["no_such_module:f"], "cannot be imported"),
        (["explained_module:forward", "--shapes", "f32[4"], "write an array as f32[8,128]"),
        (["explained_module:forward", "--shapes", "f7[4]"], "f7 is no dtype"),
        (["explained_module:forward", "--shapes", "f32[4,8]"], "does not take these arguments"),
        (["explained_module:forward", "--shapes", "f32[4]", "--placements", "R,R", "R,R"],
         "2 placements for 1 shapes"),
        (["explained_module:forward", "--shapes", "f32[64,256]", "f32[256,512]",
          "--placements", "S7,R"], "has no dim 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_said(module, words, message, capsys):
    assert command(*words, "--mesh", "dp=2,tp=4") == 2
    assert message in capsys.readouterr().err


def test_shapes_and_names():
    assert parse_shape("bf16[8, 4]") == jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    assert parse_shape("i32[]").shape == ()
    assert load("math:pi") > 3
    with pytest.raises(UsageError):
        load("math:")
