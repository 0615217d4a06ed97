# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A sharded training step from scratch
#
# A model in flax NNX, an optimizer of optax and a training step, written for one device. Then,
# without a change to them: where the arrays lie, what is sent and held, other placements, a
# checkpoint, another mesh.

# %%
import dtorchjax as dt

dt.simulate_devices(8)

# %%
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

# %% [markdown]
# ## For one device
#
# The task: say the letters of a word backwards. A small transformer sees `abcd|dcba` and learns
# what comes after the bar.

# %%
LETTERS, LENGTH, WIDTH, HEADS = 26, 12, 128, 4
TOTAL = 2 * LENGTH + 1


def batch(seed, count=128):
    words = np.random.default_rng(seed).integers(0, LETTERS, (count, LENGTH))
    bar = np.full((count, 1), LETTERS)
    return np.concatenate([words, bar, words[:, ::-1]], 1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        qkv = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        seen = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(LETTERS + 1, WIDTH, rngs=rngs)
        self.places = nnx.Embed(TOTAL, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.tokens.attend(self.norm(self.block(x)))


def loss(model, words):
    logits = model(words[:, :-1])[:, LENGTH:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, LENGTH + 1 :]).mean()


def make():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)


def step(model, optimizer, words):
    value, gradients = nnx.value_and_grad(loss)(model, words)
    optimizer.update(model, gradients)
    return model, optimizer, value


# %% [markdown]
# ## Where arrays lie
#
# A mesh of 2 x 4 devices: the batch over `dp`, the matrices over `tp`. The patterns are paths in
# the state; they find the moments of the optimizer beside the parameters. `make` runs under
# `dt.jit` as well, so that every device makes its own parts and no device ever has the whole
# model.

# %%
mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
megatron = dt.by_path(
    {
        "*": "R",
        "*qkv/kernel": {"tp": "S1/3"},  # queries, keys and values: each cut by itself
        "*out/kernel": {"tp": "S0"},
        "*up/kernel": {"tp": "S1"},
        "*up/bias": {"tp": "S0"},
        "*down/kernel": {"tp": "S0"},
    }
)
model, optimizer = dt.jit(make, mesh=mesh, out_placements=megatron)()
dt.visualize(model.block)

# %%
model.block.up.kernel[...]

# %% [markdown]
# That was the text of a jax.Array. A DTensor shows who has what, by device number:

# %%
dt.distribute_tensor(model.block.up.kernel[...], mesh, {"tp": "S1"})

# %% [markdown]
# ## Training
#
# `dt.jit` takes the same `step`. The first call plans and compiles.

# %%
train = dt.jit(step, donate_argnums=(0, 1))


def run(state, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        words = dt.distribute_tensor(batch(i), mesh, {"dp": "S0"})
        *state, value = train(*state, words)
        losses.append(float(value))
    return state, losses


state, losses = run((model, optimizer), 60)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# One device says the same:

# %%
plain, one_device = make(), []
for i in range(5):
    *plain, value = jax.jit(step)(*plain, batch(i))
    one_device.append(float(value))
np.testing.assert_allclose(losses[:5], one_device, rtol=2e-4)

# %% [markdown]
# ## What is sent, and for which line
#
# The plan of the step: every collective, the line that needs it, and why.

# %%
words = dt.distribute_tensor(batch(0), mesh, {"dp": "S0"})
plan = train.explain(*state, words)
plan

# %% [markdown]
# Along the lines of the program: what each one makes, where it lies, what it sends. (The lines
# of the model come twice, forward and backward.)

# %%
dt.visualize(plan)

# %% [markdown]
# ## Other placements
#
# Only the patterns change. Here parameters and moments are sharded over all eight devices (and
# gathered when they are needed), and the batch as well.

# %%
fully_sharded = dt.by_path(
    {"*": "R", "*kernel": {"dp": "S0", "tp": "S0"}, "*embedding": {"dp": "S1", "tp": "S1"}}
)
placements = {
    "data parallel": dt.by_path({"*": "R"}),
    "megatron": megatron,
    "fully sharded": fully_sharded,
}
plans = {}
for name, where in placements.items():
    over = {"dp": "S0"} if name == "megatron" else {"dp": "S0", "tp": "S0"}
    fresh = dt.place(make(), mesh, where)
    for count in (16, 128):
        words = dt.distribute_tensor(batch(0, count), mesh, over)
        plans[name, count] = dt.jit(step, donate_argnums=(0, 1)).explain(*fresh, words)
    small, large = plans[name, 16], plans[name, 128]
    print(
        f"{name:14}: {small.bytes_per_device / 2**20:.2f} MiB sent for 16 words, "
        f"{large.bytes_per_device / 2**20:.2f} for 128, {large.memory_per_device / 2**20:.2f} held"
    )

# %% [markdown]
# With few words it is cheaper to send activations (megatron), with many to gather the weights,
# and then the plan does that, whatever the placements at rest are: they say where arrays lie
# between steps, not how to compute.

# %% [markdown]
# `diff` says where two plans differ:

# %%
print(plans["data parallel", 128].diff(plans["fully sharded", 128]))

# %% [markdown]
# ## A checkpoint, and another mesh
#
# A checkpoint has whole arrays by their paths; where they lay leaves no trace. So the run may go
# on with four devices and other placements. What it restores into is laid out by `dt.place`.

# %%
checkpoints = dt.Checkpoints(tempfile.mkdtemp())
checkpoints.save(60, tuple(state))
state, uninterrupted = run(state, 5, first=60)

# %%
mesh = dt.init_device_mesh((2, 2), ("dp", "tp"))
state = checkpoints.restore(dt.place(make(), mesh, fully_sharded))
dt.visualize(state[0].block)

# %%
state, resumed = run(state, 5, first=60)
np.testing.assert_allclose(resumed, uninterrupted, rtol=1e-3)
print(*(f"{value:.4f}" for value in resumed))

# %% [markdown]
# ## It has learned
#
# The model is a flax module as before: `dt.jit` of its call, on whatever mesh it lies.

# %%
words = batch(1000, 8)
model = state[0]
guess = dt.jit(lambda model, words: model(words[:, :-1]).argmax(-1))(model, words)
right = (np.asarray(guess)[:, LENGTH:] == words[:, LENGTH + 1 :]).mean()
print(f"{right:.0%} of the letters of new words are right")
