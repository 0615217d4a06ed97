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
# # Functions on local arrays
#
# Some computations are easier to write for one device: it has a part of every array, and speaks to
# its neighbours. `@dt.dfunction` makes such a function safe. A rule says where operands and results
# may lie; the placements of gradients follow from it; `dt.check_dfunction` proves both.

# %%
import dtorchjax as dt

dt.simulate_devices(8)

# %%
import jax
import jax.numpy as jnp
import numpy as np

mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
w = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)

# %% [markdown]
# ## A function and a sentence
#
# Letters name dims. A letter that stands on both sides may be sharded over any mesh axis; one that
# is missing on the right is needed whole.


# %%
@dt.dfunction(rule="b i, i o -> b o")
def linear(x, w):
    return x @ w


print(linear.signature(x, w))

# %% [markdown]
# On plain arrays it is the function itself. On DTensors it runs on every device's parts; nothing is
# sent, and operands that fit no row are an error with remedies that were tried.

# %%
dx = dt.distribute_tensor(x, mesh, ["S0", "R"])
dw = dt.distribute_tensor(w, mesh, ["R", "S1"])
print(linear(x, w).shape, linear(dx, dw).layout)
try:
    linear(dt.distribute_tensor(x, mesh, ["R", "S1"]), dt.distribute_tensor(w, mesh, ["R", "S0"]))
except dt.PlacementMismatchError as error:
    print(error)

# %% [markdown]
# In a program under `dt.jit` the planner knows its rows like those of any primitive, and moves data
# where that is cheapest.


# %%
def loss(x, w):
    return jnp.mean(jnp.tanh(linear(x, w)) ** 2)


print(float(loss(x, w)), float(dt.jit(loss)(dx, dw)))

# %% [markdown]
# ## Gradients and where they lie
#
# `x` is whole along `tp` and `w` has other columns on each device: what a device computes for the
# gradient of `x` is one term of a sum. That follows from the row, so it is reduced exactly once.
# `defvjp` gives a backward pass of its own; what it keeps stays on its device.

# %%
linear.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
)
gradients = jax.grad(loss, (0, 1))
found = dt.jit(gradients)(dx, dw)
for g, expected in zip(found, gradients(x, w), strict=True):
    print(g.layout, float(abs(g.full_tensor() - expected).max()))
big = (
    jax.ShapeDtypeStruct((2048, 1024), jnp.float32),
    jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
)
dt.explain(gradients, *big, mesh=mesh, in_placements=(["S0", "R"], ["R", "S1"]))

# %% [markdown]
# ## Speaking to other devices
#
# `dt.axes_of("v")` are the mesh axes over which `v` is sharded in this call: none on plain arrays,
# where collectives do nothing. A row that the sentence cannot say is in `extra`: the classes are
# sharded and the result is whole, as the body reduces it.


# %%
@dt.dfunction(rule="t v, t -> t", extra=("v: S1, R -> R",))
def cross_entropy(logits, labels):
    axes = dt.axes_of("v")
    greatest = dt.pmax(logits.max(1), axes)
    total = dt.psum(jnp.exp(logits - greatest[:, None]).sum(1), axes)
    first = dt.axis_index(axes) * logits.shape[1]
    here = first + jnp.arange(logits.shape[1]) == labels[:, None]
    picked = dt.psum(jnp.where(here, logits, 0).sum(1), axes)
    return greatest + jnp.log(total) - picked


labels = jnp.asarray(rng.integers(0, 16, 8))
print(dt.check_dfunction(cross_entropy, x, labels))

# %% [markdown]
# The check ran every row on simulated shards and compared results and gradients with the call on
# whole arrays. The plan lists what the body sends: three numbers per token, no logits.

# %%
shapes = (
    jax.ShapeDtypeStruct((4096, 32000), jnp.float32),
    jax.ShapeDtypeStruct((4096,), jnp.int32),
)
plan = dt.explain(cross_entropy, *shapes, mesh=mesh, in_placements=(["S0", "S1"], ["S0", "R"]))
assert plan.bytes_per_device == 3 * 2 * (3 / 4) * 4096 / 2 * 4
plan

# %% [markdown]
# ## Mistakes, caught
#
# Without the reduction every device has a sum of its own. The check names row, result and shard;
# `with dt.checking():` finds it in a running program.


# %%
@dt.dfunction(rule="b i, i o -> b o", extra=("i: S1, S0 -> R",))
def row_linear(x, w):
    return x @ w  # forgets dt.psum(..., dt.axes_of("i"))


try:
    dt.check_dfunction(row_linear, x, w)
except dt.CheckError as error:
    print(error)
sx, sw = dt.distribute_tensor(x, mesh, ["R", "S1"]), dt.distribute_tensor(w, mesh, ["R", "S0"])
try:
    with dt.checking():
        row_linear(sx, sw)
except dt.PlacementError as error:
    print(error)

# %% [markdown]
# ## A rule as a function of layouts
#
# A `LayoutRule` sees whole layouts, and may put another local function in the place of the user's:
# here every device adds its share of the bias. The gradient of the bias is the dense one.


# %%
class LinearWithBias(dt.LayoutRule):
    op_name = "linear with bias"

    def infer_layout(self, x, w, b):
        rows = {("R", "R"): "R", ("S0", "R"): "S0", ("S1", "S0"): "P"}
        pairs = zip(x.placements, w.placements, b.placements, strict=True)
        if any(str(bias) != "R" for _, _, bias in pairs):
            raise ValueError("the bias is whole")
        pairs = zip(x.placements, w.placements, strict=True)
        return dt.Layout(x.mesh, tuple(rows[str(p), str(q)] for p, q in pairs))

    def get_expand_impl(self, fun, out_layouts, in_layouts):
        split = [n for p, n in zip(in_layouts[0].placements, in_layouts[0].sizes) if str(p) == "S1"]
        return lambda x, w, b: fun(x, w, b / np.prod(split, initial=1))


LinearWithBias()


class Linear(dt.DFunction):
    """The class form, for those who come from PyTorch's autograd functions."""

    op_name = "linear with bias"

    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g, g.sum(0)


b = dt.distribute_tensor(jnp.arange(8.0), mesh, "R")
out = Linear.apply(sx, sw, b)
print(out.layout, float(abs(out.full_tensor() - (x @ w + jnp.arange(8.0))).max()))
gradient = jax.grad(lambda b: (Linear.apply(sx, sw, b).reduce_partial() ** 2).sum())(b)
print(
    gradient.layout, float(abs(gradient.full_tensor() - 2 * (x @ w + jnp.arange(8.0)).sum(0)).max())
)

# %% [markdown]
# ## A ring in ten lines
#
# Each device holds some rows of `k`. They go round, and every device sees all of them, one block at
# a time. The gradient goes round the other way: JAX derives it from the body.


# %%
@dt.dfunction(rule="s d!, s d! -> s")
def nearest(q, k):
    axes = dt.axes_of("s")
    size = dt.axis_size(axes)
    best = jnp.full(q.shape[0], -jnp.inf)
    for _ in range(size):
        best = jnp.maximum(best, (q @ k.T).max(1))
        k = dt.ppermute(k, axes, [(i, (i + 1) % size) for i in range(size)])
    return best


print(len(dt.check_dfunction(nearest, x, x[::-1]).checked), "checks passed")

# %% [markdown]
# `dt.parallel` has such functions ready: row- and column-parallel linear layers, vocab-parallel
# cross entropy, ring and Ulysses attention, dispatch and combine for mixtures of experts.

# %%
q = jax.ShapeDtypeStruct((1, 16384, 8, 64), jnp.float32)
kv = jax.ShapeDtypeStruct((1, 16384, 2, 64), jnp.float32)
line = dt.init_device_mesh((8,), ("sp",))
ring = dt.jit(dt.parallel.ring_attention, mesh=line, in_placements="S1", out_placements="S1")
print(ring.explain(q, kv, kv).table())
