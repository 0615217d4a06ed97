"""Checkpoints: onto other meshes and placements, refusals, and runs that are killed."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import Mesh
from rotation import on_day

import dtorchjax as dt

pytestmark = pytest.mark.smoke
TRAINING = Path(__file__).parent / "checkpointed_training.py"


def mesh_of(shape, names):
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), names)


MESHES = [((2, 2), ("dp", "tp")), ((8,), ("tp",)), ((3, 2), ("dp", "tp")), ((1,), ("tp",))]
WHERE = {
    "*": "R", "w": {"tp": "S0"}, "odd": {"tp": "S0"}, "qkv": {"tp": "S1/3"}, "half": {"tp": "S1"},
}  # fmt: skip


def values():
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (16, 6)),
        "odd": jnp.arange(35.0).reshape(7, 5),  # divides by no axis
        "qkv": jax.random.normal(key, (4, 24)),
        "half": jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8),
        "nothing": jnp.zeros((0, 3)),
        "key": key,
        "keys": jax.random.split(key, 4),
        "host": np.arange(5, dtype=np.int64),
        "position": 2**40,
        "rate": 0.125,
        "done": True,
        "inner": [jnp.float32(3), (np.float32(2), jnp.arange(4))],
    }


def placed(mesh):
    tree = values()
    for name in ("w", "odd", "qkv", "half"):
        tree[name] = dt.distribute_tensor(tree[name], mesh, WHERE[name])
    return tree


def check_equal(tree, wanted):
    def equal(a, b):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        elif isinstance(b, bool | int | float):
            assert type(a) is type(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(equal, tree, wanted, is_leaf=lambda x: isinstance(x, dt.DTensor))


@pytest.mark.parametrize(("shape", "names"), MESHES)
def test_restored_onto_another_mesh(tmp_path, shape, names):
    with dt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, placed(mesh_of((4, 2), ("dp", "tp"))))
    mesh = mesh_of(shape, names)
    found = dt.Checkpoints(tmp_path).restore(placed(mesh))
    for name in ("w", "odd", "qkv", "half"):
        assert found[name].layout == placed(mesh)[name].layout
    check_equal(found, values())


def test_an_abstract_tree_is_placed_as_asked(tmp_path, mesh24):
    """The state is made nowhere: only what is read is held."""
    wanted = {name: x for name, x in values().items() if isinstance(x, jax.Array)}
    with dt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, wanted)
        like = jax.eval_shape(lambda: wanted)
        found = checkpoints.restore(like, mesh=mesh24, placements=dt.by_path(WHERE))
    check_equal(found, wanted)
    assert found["w"].sharding.spec[0] == "tp" and isinstance(found["w"], jax.Array)
    assert found["odd"].placements[1] == dt.Shard(0)  # a DTensor: no jax.Array lies so
    assert found["qkv"].placements[1] == dt.Shard(1, 3)


def test_no_device_gets_an_uneven_array_whole():
    from dtorchjax.checkpoint import array_layout

    mesh = mesh_of((2, 4), ("dp", "tp"))
    vocabulary = dt.Layout(mesh, ("R", "S0"))
    assert str(array_layout(vocabulary, (50257, 768))) == "[dp=R, tp=S1]"
    assert str(array_layout(dt.Layout(mesh, ("S0", "S0")), (10, 768))) == "[dp=S0, tp=S1]"
    assert str(array_layout(dt.Layout(mesh, ("S1", "S0/3")), (24, 9))) == "[dp=S0, tp=S0]"
    assert str(array_layout(vocabulary, (7,))) == "[dp=R, tp=R]"


def test_nnx_objects_in_place_and_in_the_background(tmp_path, mesh24):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.layers[1](nnx.relu(self.layers[0](x)))))

    def make(seed):
        model = Model(nnx.Rngs(seed))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    @dt.jit
    def step(state, x):
        model = state["model"]
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        state["optimizer"].update(model, grads)
        return loss

    where = dt.by_path({"*": "R", "*kernel*": {"tp": "S1"}})
    x = dt.distribute_tensor(jnp.sin(jnp.arange(64.0)).reshape(8, 8), mesh24, {"dp": "S0"})
    state = dt.place(make(0), mesh24, where)
    losses = []
    with dt.Checkpoints(tmp_path, keep=2) as checkpoints:
        for number in range(4):
            losses.append(float(step(state, x)))
            if number < 3:
                checkpoints.save(number, state)
        checkpoints.wait()
        assert checkpoints.steps == [1, 2] and checkpoints.latest == 2
        other = dt.place(make(1), mesh24, where)
        assert checkpoints.restore(other)["model"] is other["model"]
        assert float(step(other, x)) == losses[3]  # dropout's generator goes on as well
        assert checkpoints.restore(other, 1)["optimizer"] is other["optimizer"]
        assert float(step(other, x)) == losses[2]


def test_what_a_checkpoint_cannot_hold(tmp_path, mesh24):
    checkpoints = dt.Checkpoints(tmp_path)
    x = dt.distribute_tensor(jnp.ones((8, 8)), mesh24, "S0,S1")
    w = dt.distribute_tensor(jnp.ones((8, 8)), mesh24, "R,S0")
    with pytest.raises(dt.PlacementError, match=r"grads/w is a partial sum .*reduce_partial"):
        checkpoints.save(0, {"grads": {"w": x @ w}})
    with pytest.raises(TypeError, match="name is a str: a checkpoint holds arrays"):
        checkpoints.save(0, {"name": "gpt"})
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        checkpoints.save(0, {"a": {"b": 1}, "a/b": 2})
    with pytest.raises(FileNotFoundError, match="no checkpoint in "):
        checkpoints.restore({"w": 0})
    assert checkpoints.latest is None and not list(tmp_path.iterdir())


def test_differences_name_the_leaves(tmp_path, mesh24):
    with dt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"w": jnp.ones((4, 4)), "b": jnp.ones(4), "n": 1})
        checkpoints.wait()
        with pytest.raises(ValueError, match=r"w is float32\[4, 4\] there, float32\[4, 5\] here"):
            checkpoints.restore({"w": jnp.ones((4, 5)), "b": jnp.ones(4), "n": 1})
        with pytest.raises(ValueError, match=r"b is float32.* there, bfloat16"):
            checkpoints.restore({"w": jnp.ones((4, 4)), "b": jnp.ones(4, "bfloat16"), "n": 1})
        with pytest.raises(ValueError, match="it has no extra; it has b, n, which `like` has not"):
            checkpoints.restore({"w": jnp.ones((4, 4)), "extra": 1})
        assert set(checkpoints.restore({"w": jnp.ones((4, 4))}, partial=True)) == {"w"}
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 \(there are \[5\]\)"):
            checkpoints.restore({"w": 0}, 4)
        with pytest.raises(ValueError, match="step 5 is not later than the last checkpoint"):
            checkpoints.save(5, {"n": 1})
        with pytest.raises(dt.PlacementError, match="need a mesh="):
            checkpoints.restore({"n": 1}, placements="R")
        with pytest.raises(dt.PlacementError, match="w: nothing is restored as a partial sum"):
            checkpoints.restore({"w": jnp.ones((4, 4))}, mesh=mesh24, placements="P,R")


def test_orbax_reads_it_too(tmp_path, mesh24):
    """A flat table of whole arrays: nobody needs us to read it."""
    with dt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed(mesh24))
    with ocp.CheckpointManager(tmp_path) as manager:
        table = manager.restore(1, args=ocp.args.PyTreeRestore())
    np.testing.assert_array_equal(table["odd"], values()["odd"])
    np.testing.assert_array_equal(table["inner/1/1"], np.arange(4))


def test_arrays_may_be_donated_after_a_save(tmp_path, mesh24):
    step = dt.jit(lambda w: w + 1, donate_argnums=0)
    w = dt.distribute_tensor(jnp.zeros((512, 512)), mesh24, "S0,S1")
    with dt.Checkpoints(tmp_path) as checkpoints:
        for number in range(4):
            checkpoints.save(number, {"w": w})
            w = step(w)
        checkpoints.wait()
        for number in range(4):
            assert (np.asarray(checkpoints.restore({"w": w}, number)["w"]) == number).all()


# ---- killed runs ---------------------------------------------------------------------------------


def run_training(folder, mesh, steps, kill_after=None):
    """The losses that a process printed, by step; it is killed so many seconds after the first."""
    flags = "--xla_force_host_platform_device_count=8"
    program = subprocess.Popen(
        [sys.executable, str(TRAINING), str(folder), mesh, str(steps)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "XLA_FLAGS": flags},
    )  # fmt: skip
    assert program.stdout is not None
    losses = {}
    try:
        if kill_after is not None:
            lines = [program.stdout.readline()]
            try:
                program.wait(kill_after)
            except subprocess.TimeoutExpired:
                program.kill()
        else:
            lines = []
        lines += program.stdout.read().splitlines()
    finally:
        program.kill()
        program.wait()
    for line in lines:
        if found := re.fullmatch(r"(\d+) (\S+)\n?", line):
            losses[int(found[1])] = float(found[2])
    assert kill_after is not None or program.returncode == 0
    return losses


def kill_and_resume(tmp_path, kills, steps):
    mesh = "dp=2,tp=4"
    wanted = run_training(tmp_path / "whole", mesh, steps)
    assert sorted(wanted) == list(range(steps))
    rng = random.Random(os.environ.get("PYTEST_SEED", "7"))
    folder = tmp_path / "killed"
    for _ in range(kills):
        for number, loss in run_training(folder, mesh, steps, rng.uniform(0, 0.4)).items():
            assert loss == wanted[number], number
        if dt.Checkpoints(folder).latest == steps - 1:
            folder = tmp_path / f"killed{_}"
    for number, loss in run_training(folder, mesh, steps).items():
        assert loss == wanted[number], number
    assert dt.Checkpoints(folder).latest == steps - 1


@pytest.mark.smoke
@on_day(0, 2)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    kill_and_resume(tmp_path, kills=2, steps=24)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    kill_and_resume(tmp_path, kills=20, steps=200)
