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
# # Placements
#
# A mesh is an array of devices with named axes. A *placement* says, for one axis, what its devices
# hold of an array: all of it (`R`), a part of one dim (`S0`, `S1`, ...), or a term of a sum (`P`).

# %%
import dtorchjax as dt

dt.simulate_devices(8)

# %%
import jax
import jax.numpy as jnp

mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))

# %% [markdown]
# ## Where an array lies
#
# Two axes, two placements. The numbers in the cells are devices: 0 to 3 are the first row of the
# mesh, 4 to 7 the second.

# %%
x = jnp.arange(8.0 * 8).reshape(8, 8)
dt.distribute_tensor(x, mesh, ["S0", "S1"])

# %%
dt.distribute_tensor(x, mesh, ["S0", "R"])

# %% [markdown]
# Two axes may share a dim. The first axis is the major one, unless the layout says otherwise.

# %%
dt.distribute_tensor(x, mesh, ["S0", "S0"])

# %%
dt.distribute_tensor(x, mesh, dt.Layout(mesh, ("S0", "S0"), order=("tp", "dp")))

# %% [markdown]
# A dim need not divide: the last devices hold less, or nothing. What their parts are padded with
# never counts.

# %%
uneven = dt.distribute_tensor(jnp.ones((10, 5)), mesh, ["R", "S0"])
uneven

# %%
float(uneven.sum().reduce_partial())

# %% [markdown]
# A fused projection (queries, keys and values in one matrix) wants each of its three blocks sharded
# by itself: `S1/3`.

# %%
dt.distribute_tensor(jnp.ones((4, 24)), mesh, {"tp": "S1/3"})

# %% [markdown]
# ## Operations
#
# Each primitive has a table: one row for one mesh axis, operands on the left, results on the right.
# The rows are brute-forced against one device.

# %%
a = dt.distribute_tensor(jnp.ones((8, 16)), mesh, ["S0", "S1"])
b = dt.distribute_tensor(jnp.ones((16, 4)), mesh, ["R", "S0"])
print(dt.signature("dot_general", a, b))

# %% [markdown]
# On `dp` this product takes the row `S0, R -> S0`, on `tp` the row `S1, S0 -> P`: every device
# multiplies its columns with its rows, and has one term of the sum. Nothing has been sent.

# %%
product = a @ b
product

# %% [markdown]
# Linear operations go through the terms; a nonlinear one does not, and says so.

# %%
print((2 * product)[:, :2].layout)
try:
    dt.numpy.tanh(product)
except dt.PlacementMismatchError as error:
    print(error)

# %% [markdown]
# ## Moving
#
# `reduce_partial` makes the sum (an all-reduce); `redistribute` goes anywhere, the cheapest way:
# from `P` to `S1` it is a reduce-scatter, half the bytes.

# %%
print(product.reduce_partial().layout, product.redistribute(["S0", "S1"]).layout)
with dt.redistribution("auto"):
    print(dt.numpy.tanh(product).layout)

# %% [markdown]
# ## Gradients
#
# `jax.grad` returns gradients that lie like what they are the gradients of.

# %%
loss = lambda a, b: ((a @ b).reduce_partial() ** 2).mean()  # noqa: E731
[gradient.layout for gradient in jax.grad(loss, (0, 1))(a, b)]

# %% [markdown]
# ## A program
#
# Under `dt.jit` the function sees whole arrays (nothing is partial in it, nothing to reduce), is
# planned together, and sends what is cheapest for all of it: notebook 02 reads such plans.

# %%
dt.jit(jax.grad(lambda a, b: ((a @ b) ** 2).mean())).explain(a, b)
