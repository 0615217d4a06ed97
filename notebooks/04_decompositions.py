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
# # Operators and their decompositions
#
# `dt.ops` has the composite operators of deep learning. Each is a JAX primitive: it stands as one
# equation in a jaxpr, has a decomposition into JAX's own primitives and, where JAX's derivative of
# that would be imprecise or keep too much, a VJP rule of its own.

# %%
import dtorchjax as dt

dt.simulate_devices(8)

# %%
import jax
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
jax.make_jaxpr(lambda x: dt.ops.softmax(x))(x)

# %%
jax.make_jaxpr(dt.decompose(lambda x: dt.ops.softmax(x)))(x)

# %% [markdown]
# ## A new operator
#
# The body is the decomposition. The names of the VJP rule's arguments say what is saved: operands,
# the result `out`, its cotangent `g`.


# %%
@dt.op
def squash(x, *, axis=-1):
    """x / (1 + |x|^2) |x| along `axis`."""
    square = (x * x).sum(axis, keepdims=True)
    return x * jnp.sqrt(square) / (1 + square)


@dt.op
def soft_clip(x, *, most=1.0):
    """x, smoothly kept within -most and most."""
    return most * jnp.tanh(x / most)


@soft_clip.vjp
def _(out, g, *, most):
    return g * (1 - (out / most) ** 2)


print(dt.vjp_kind("squash"), dt.vjp_kind("soft_clip"))
jax.grad(lambda x: soft_clip(x, most=2.0).sum())(x[0, :4])

# %% [markdown]
# It works under every transformation of JAX, and shards through its decomposition: the placement
# table follows from those of the primitives.

# %%
shape = jax.ShapeDtypeStruct((8, 16), "float32")
print(dt.signature("squash", shape))
print()
print(dt.signature("soft_clip", shape))

# %%
mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))


def loss(x):
    return (squash(x) ** 2).sum()


gradient = dt.jit(jax.grad(loss), mesh=mesh, in_placements="S0,R")
np.testing.assert_allclose(gradient(x), jax.grad(loss)(x), rtol=1e-5)
squash(dt.distribute_tensor(x, mesh, "S0,R")).placements

# %% [markdown]
# Softmax along a sharded dim is no row of its table, but the planner keeps the dim sharded: only
# the greatest value and the sum of each row move.

# %%
wide = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
dt.explain(lambda x: dt.ops.softmax(x), wide, mesh=mesh, in_placements="S0,S1")

# %% [markdown]
# ## What a loop keeps
#
# `jax.nn.softmax` in a scan keeps three arrays per step for the backward pass, ours keeps its
# result.


# %%
def kept(fun):
    def loop(x):
        return jax.lax.scan(lambda c, _: (fun(c), None), x, None, length=7)[0].sum()

    equations = jax.make_jaxpr(jax.grad(loop))(x).jaxpr.eqns
    scan = next(e for e in equations if e.primitive.name == "scan")
    return [v.aval.shape for v in scan.outvars if v.aval.shape[:1] == (7,)]


print("jax.nn.softmax", kept(jax.nn.softmax))
print("dt.ops.softmax", kept(dt.ops.softmax))

# %% [markdown]
# ## Precision
#
# Half precision is computed in float32. Far from 0, logits keep their differences, and variances
# are computed in two passes.

# %%
logits = jnp.asarray([[1e4, 9999.0, -1e4]])
print(dt.ops.log_softmax(logits), dt.ops.cross_entropy(logits, jnp.array([1])))
far = x + 1e4
print(float(dt.ops.layer_norm(far).std()), float(jax.nn.standardize(far).std()))

# %% [markdown]
# A rule can be turned off, to see what it does.

# %%
zeros = jnp.zeros(3)
print(jax.grad(lambda x: dt.ops.p_norm(x))(zeros))
with dt.custom_vjps(deny="p_norm"):
    print(jax.grad(lambda x: dt.ops.p_norm(x))(zeros))
