"""What one of several processes runs in test_processes.py: `distributed_program.py FOLDER WHAT...`.

`train:NAME` trains the demo with these placements, `arrays` tries what a process can do with arrays
of which it has parts, `wait` takes steps until somebody stops it.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from rich.console import Console

import dtorchjax as dt
from dtorchjax.demo import model
from dtorchjax.demo.train import Options, train

TINY = model.Config(layers=1, width=32, heads=4, hidden=64, seq=16)
RUN = Options(steps=10, batch=8, sample=0, config=TINY)


def arrays(folder: Path) -> float:
    mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    me, count = jax.process_index(), jax.process_count()
    whole = np.arange(96.0, dtype=np.float32).reshape(8, 12)

    # each process has its rows of the batch
    rows = np.split(whole, count)[me]
    batch = dt.from_process_local({"x": rows, "n": np.float32(2)}, mesh, {"x": "S0,R", "n": "R"})
    assert batch["x"].shape == (8, 12) and batch["n"].shape == ()
    np.testing.assert_array_equal(batch["x"].full_tensor(), whole)
    if count > 1:
        with pytest.raises(dt.PlacementError, match="on devices of other processes"):
            np.asarray(batch["x"])
        assert repr(batch["x"]) == "DTensor(f32[8,12] [dp=S0, tp=R])"
    with pytest.raises(dt.PlacementError, match="parts of equal size"):
        dt.from_process_local(np.ones((4, 6)), mesh, "S0,S1")

    # each process gives the same array: uneven, in blocks, keys, a partial sum
    for where in ("R,S0", "S1,S0", ["R", "S1/3"], "S0,R", "P,S1"):
        x = dt.distribute_tensor(whole[:7], mesh, where)
        np.testing.assert_array_equal(x.full_tensor(), whole[:7])
        np.testing.assert_array_equal(x.redistribute("S1,S0").full_tensor(), whole[:7])
    keys = dt.distribute_tensor(jax.random.split(jax.random.key(3), 8), mesh, "S0,R")
    bits = dt.jit(jax.vmap(lambda key: jax.random.bits(key, (2,))), out_placements="R")(keys)
    own = jax.vmap(lambda key: jax.random.bits(key, (2,)))(jax.random.split(jax.random.key(3), 8))
    np.testing.assert_array_equal(bits.full_tensor(), own)
    drawn = dt.randn((6, 5), mesh, "S0,R", jax.random.key(1)).full_tensor()
    np.testing.assert_array_equal(drawn, jax.random.normal(jax.random.key(1), (6, 5)))

    # a numpy argument, a closed-over array, eager operations, results on the host
    step = dt.jit(lambda x, y: (jnp.tanh(x * scale) @ y.T).sum(), mesh=mesh)
    scale = jnp.float32(0.01)
    total = float(step(batch["x"], whole))
    np.testing.assert_allclose(total, np.tanh(whole * 0.01).dot(whole.T).sum(), rtol=1e-5)
    assert float((batch["x"] * 2).sum().reduce_partial()) == 2 * whole.sum()

    linear = dt.place(
        nnx.Linear(12, 8, rngs=nnx.Rngs(0)), mesh, dt.by_path({"*": "R", "kernel": "R,S1"})
    )
    with dt.Checkpoints(folder / "checkpoints") as checkpoints:
        if checkpoints.latest is None:
            checkpoints.save(
                1, {"x": batch["x"], "linear": linear, "seen": 5, "key": jax.random.key(8)}
            )
        like = {"x": batch["x"], "linear": linear, "seen": 0, "key": jax.random.key(0)}
        found = checkpoints.restore(like)
    assert found["seen"] == 5 and found["x"].layout == batch["x"].layout
    np.testing.assert_array_equal(found["x"].full_tensor(), whole)
    return total


def training(name: str) -> list[float]:
    return train(dataclasses.replace(RUN, placements=name), Console(quiet=True))["losses"]


def wait() -> None:
    mesh = dt.init_device_mesh((8,), ("dp",))
    x = dt.ones((64, 8), mesh, "S0")
    step = dt.jit(lambda x: x + x.sum() * 0)
    while True:
        x = step(x)
        x.block_until_ready()
        print("step", flush=True)


def run(folder: Path, tasks: list[str]) -> dict[str, Any]:
    """What each task found."""
    found: dict[str, Any] = {"devices": jax.device_count()}
    for task in tasks:
        kind, _, name = task.partition(":")
        found[task] = training(name) if kind == "train" else arrays(folder)
    return found


def main(folder: Path, tasks: list[str]) -> None:
    dt.init_distributed(timeout=10)
    dt.init_distributed()  # a second time does nothing
    if tasks == ["wait"]:
        wait()
    found = run(folder, tasks)
    if jax.process_index() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
