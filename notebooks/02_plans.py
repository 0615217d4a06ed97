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
# # Reading plans
#
# `dt.jit` plans before it compiles: which array moves where, which line of the program needs it,
# how many bytes one device sends. This notebook trains nothing; it reads plans and changes them.

# %%
import dtorchjax as dt

dt.simulate_devices(8)

# %%
import jax
import jax.numpy as jnp
from jax import lax

mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))

# %% [markdown]
# ## A training step
#
# Four layers of two matrices, scanned. Nothing in it knows about devices.

# %%
LAYERS, WIDTH, HIDDEN, BATCH = 4, 256, 1024, 2048


def block(x, w):
    h = jax.nn.gelu(x @ w["up"])
    return x + h @ w["down"], None


def loss(w, x):
    x, _ = lax.scan(block, x, w)
    return jnp.mean(jnp.square(x))


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient), value


shapes = (
    dict(
        up=jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        down=jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    ),
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)

# %% [markdown]
# ## Its plan
#
# Columns of `up` and rows of `down` over `tp`, the batch over `dp`. A plan needs shapes only. Each
# row says which line needs which collective, over which mesh axes, how often, and why: which
# operand had which placement and which one the chosen row of the primitive's table takes.

# %%
megatron = dict(up=["R", "S2"], down=["R", "S1"])
plan = dt.explain(step, *shapes, mesh=mesh, in_placements=(megatron, ["S0", "R"]))
plan

# %% [markdown]
# The gradients are reduced over `dp` once, after the loop, as stacks: the carry and the stacked
# results of a scan may be partial sums. `bound` is a cost below which no plan exists; where it
# equals `cost`, this plan is proved to be the cheapest.

# %%
print(f"{plan.bytes_per_device / 1e6:.2f} MB sent, {plan.memory_per_device / 1e6:.1f} MB held")
print(f"cost {plan.cost / 1e6:.3f}, bound {plan.bound / 1e6:.3f}")
assert plan.cost <= plan.bound * 1.03

# %% [markdown]
# ## Other placements, and what they change
#
# Fully sharded parameters: each weight is gathered when it is needed and its gradient is scattered.

# %%
line = dt.init_device_mesh((8,), ("dp",))
sharded = dict(up=["S1"], down=["S2"])
options = dict(mesh=line, in_placements=(sharded, ["S0"]))
kept = dt.explain(step, *shapes, **options)
print(kept.table())

# %% [markdown]
# The gathered weights are kept from the forward to the backward pass. A `memory_limit` forbids
# that: they are gathered again inside both loops, and what the backward pass needs of the
# activations is computed again where it must be. `diff` shows what that costs.

# %%
limited = dt.explain(step, *shapes, memory_limit=0.3 * kept.memory_per_device, **options)
assert limited.memory_per_device <= 0.3 * kept.memory_per_device
print(kept.diff(limited))

# %% [markdown]
# ## Trust, and check
#
# `verify` reads the collectives out of the compiled program and compares bytes by mesh axes.

# %%
weights = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), shapes[0])
batch = jnp.ones(shapes[1].shape)
compiled = dt.jit(step, **options)
print(kept.verify(compiled.lower(weights, batch).compile()))

# %% [markdown]
# In strict mode nothing is moved that the program does not ask for: the first operation that does
# not fit is an error with remedies that were tried.

# %%
strict = dt.jit(
    lambda w, x: jnp.tanh(x @ w),
    mesh=line,
    in_placements=(["S0"], ["S1"]),
    redistribute="never",
)
try:
    strict.explain(jnp.ones((256, 64)), jnp.ones((128, 256)))
except dt.PlacementMismatchError as error:
    print(error)
