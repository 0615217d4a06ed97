"""A training that writes a checkpoint every other step, and goes on from the last one it finds.

`python tests/checkpointed_training.py FOLDER dp=2,tp=4 STEPS` prints each step's number and loss.
"""

import sys

import numpy as np
import optax

import dtorchjax as dt

dt.simulate_devices(8)

import jax  # noqa: E402
from jax import numpy as jnp  # noqa: E402

RULE = optax.adam(1e-2)


def step(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["up"])
        kept = jax.random.bernoulli(jax.random.fold_in(state["key"], 1), 0.9, hidden.shape)
        return jnp.mean((jnp.where(kept, hidden, 0) @ params["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, moments = RULE.update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return dict(params=params, moments=moments, key=jax.random.split(state["key"])[0]), value


def main(folder: str, mesh_text: str, steps: int) -> None:
    axes = dict(item.split("=") for item in mesh_text.split(","))
    mesh = dt.init_device_mesh([int(n) for n in axes.values()], list(axes))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (32, 256)) / 6,
        "down": jax.random.normal(keys[1], (256, 32)) / 16,
    }
    state = dict(params=params, moments=RULE.init(params), key=keys[2])
    where = {"*": "R", "*/up": {"tp": "S1"}, "*/down": {"tp": "S0"}}
    state = dt.place(state, mesh, dt.by_path(where))
    train = dt.jit(step, mesh=mesh, donate_argnums=0)
    with dt.Checkpoints(folder, keep=2) as checkpoints:
        first = 0
        if (latest := checkpoints.latest) is not None:
            found = checkpoints.restore({"state": state, "position": 0})
            state, first = found["state"], found["position"]
            assert first == latest + 1
        for number in range(first, steps):
            batch = np.random.default_rng([1, number]).standard_normal((16, 32), np.float32)
            state, loss = train(state, batch)
            print(number, repr(float(loss)), flush=True)
            if number % 2 or number == steps - 1:
                checkpoints.save(number, {"state": state, "position": number + 1})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
