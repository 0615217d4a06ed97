"""Layouts of whole calls that another system's rule tests state, and ours beside them.

The facts are those of Paddle's and HyperParallel's tests of their sharding rules, and of the table
of DTorch, told in the notation of `layouts.py`. Where we keep more, the line says so (`+>`).
"""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from layouts import Case
from rotation import today

import dtorchjax as dt

A, B, C, D, E, F = (2, 3), (2, 4), (2, 2), (2, 2, 2), (4,), (2,)


def spread(*shape, most):
    """Integers below `most`, all kinds of them."""
    return np.random.default_rng(1).integers(0, most, shape).astype("int32")


def vjp(fun, count):
    """Cotangents of the first `count` arguments; the last argument is that of the result."""
    return lambda *args: jax.vjp(lambda *xs: fun(*xs, *args[count:-1]), *args[:count])[1](args[-1])


def named(equation):
    return lambda *xs: jnp.einsum(equation, *xs)


def layer_norm(x, scale, bias):
    return dt.ops.layer_norm(x, scale, bias, axis=(-1,), statistics=True)


def layer_norm_of_two(x, scale):
    """Over the last two dims, flattened in the parameters."""
    return dt.ops.layer_norm(x, scale.reshape(x.shape[1:]), axis=(1, 2), statistics=True)


def rms_norm(x, scale):
    inverse = lax.rsqrt((x**2).mean(-1) + 1e-6)
    return x * inverse[..., None] * scale, inverse


def group_norm(x, scale, bias):
    return dt.ops.group_norm(x, scale, bias, groups=2, axis=1)


def label_loss(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)
    return jax.nn.softmax(logits), -picked


def soft_loss(logits, labels):
    return -(jax.nn.log_softmax(logits) * labels).sum(-1, keepdims=True)


def convolution(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def depthwise(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=x.shape[1])


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def swiglu(x, y):
    return jax.nn.silu(x) * y


def swiglu_of_one(x):
    return swiglu(*jnp.split(x, 2, axis=-1))


def rotary(x):
    half, positions = x.shape[-1] // 2, jnp.arange(x.shape[1], dtype="float32")
    angle = (positions[:, None] * 0.1 ** jnp.arange(half))[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


X3 = (12, 6, 8)
IDS = spread(4, 12, most=24)
PADDLE = {  # name: (function, arguments, mesh, lines)
    "matmul": (jnp.matmul, [(12, 6), (6, 12)], A, [
        "(y,x) (x,.) -> (y,.)Px", "(y,.) (.,.) -> (y,.)",
        "(y,x) (.,.) => (y,x) (x,.) -> (y,.)Px", "(.,.) (y,x) => (.,y) (y,x) -> (.,x)Py",
        "(y,.) (.,x) -> (y,x)",
    ]),
    "matmul in batches": (jnp.matmul, [(4, 12, 6, 4), (4, 6)], A, [
        "(x,y,.,.) (.,.) -> (x,y,.,.)",
    ]),
    "matmul, x transposed": (named("abkm,kn->abmn"), [(4, 3, 6, 12), (6, 4)], A, [
        "(x,y,.,.) (.,.) -> (x,y,.,.)",
    ]),
    "matmul, x transposed, batches in three": (named("abkm,kn->abmn"), [(6, 4, 6, 12), (6, 4)], A, [
        "(y,.,.,x) (.,.) -> (y,.,x,.)",
    ]),
    "matmul, y transposed": (named("abmk,nk->abmn"), [(4, 3, 4, 6), (12, 6)], A, [
        "(.,.,.,.) (y,x) => (.,.,.,x) (y,x) -> (.,.,.,y)Px",
    ]),
    "matmul, both transposed": (named("abkm,nk->abmn"), [(4, 3, 6, 6), (12, 6)], A, [
        "(.,.,x,y) (y,x) => (.,.,x,y) (.,x) -> (.,.,y,.)Px",
    ]),
    "matmul of one batch and many": (jnp.matmul, [(1, 6, 4), (6, 4, 4, 6)], A, [
        "(.,.,.) (y,x,.,.) -> (y,x,.,.)",
    ]),
    "matmul with batches of one": (jnp.matmul, [(6, 4, 6, 4), (6, 1, 4, 6)], A, [
        "(.,x,.,.) (.,.,.,y) -> (.,x,.,y)",
    ]),
    "matmul, dims cut twice": (jnp.matmul, [(8, 8), (8, 8)], D, [
        "(xy,.) (.,z) -> (xy,z)", "(xy,z) (.,.) => (xy,z) (z,.) -> (xy,.)Pz",
        "(x,y) (z,x) => (x,yz) (yz,.) -> (x,.)PyPz",
    ]),
    "gradient of matmul": (vjp(jnp.matmul, 2), [(8, 8), (8, 8), (8, 8)], D, [
        "(xy,.) (.,z) (xy,z) -> (xy,.)Pz (.,z)PxPy",
    ]),
    "gradient of a broadcast operand": (vjp(jnp.matmul, 2), [(8, 6, 4), (1, 4, 6), (8, 6, 6)], D, [
        "(xyz,.,.) (.,.,.) (xyz,.,.) -> (xyz,.,.) (.,.,.)PxPyPz",
    ]),
    "add": (jnp.add, [(12, 8), (12, 8)], E, [
        "(x,.) (.,.) => (x,.) (x,.) -> (x,.)", "(x,.) (.,x) => (x,.) (x,.) -> (x,.)",
    ]),
    "add a vector": (jnp.add, [(12, 8, 12), (12,)], E, [
        "(.,.,x) (.) => (.,.,x) (x) -> (.,.,x)", "(x,.,.) (.) -> (x,.,.)",
    ]),
    "add a matrix of one row": (jnp.add, [(12, 8, 12), (1, 12)], E, ["(.,x,.) (.,.) -> (.,x,.)"]),
    "add with many dims of one": (jnp.add, [(8, 1, 1, 12), (8, 4, 12)], E, [
        "(x,.,.,.) (.,.,.) -> (x,.,.,.)",
    ]),
    "add on two axes": (jnp.add, [X3, X3], A, [
        "(x,.,.) (.,y,x) => (x,y,.) (x,y,.) -> (x,y,.)",
    ]),
    "add a vector on two axes": (jnp.add, [(12, 6, 6), (6,)], A, [
        "(x,.,.) (y) => (x,.,y) (y) -> (x,.,y)", "(x,y,.) (x) => (x,y,.) (.) -> (x,y,.)",
    ]),
    "compare": (jnp.greater, [(1, 8), (8,)], E, ["(.,x) (.) => (.,x) (x) -> (.,x)"]),
    "add, dims cut twice": (jnp.add, [(8, 8), (8, 8)], C, [
        "(x,y) (xy,.) => (x,y) (x,y) -> (x,y)", "(x,.) (y,.) => (xy,.) (xy,.) -> (xy,.)",
    ]),
    "sum": (lambda x: x.sum(0), [(12, 8)], E, ["(x,.) -> (.)Px"]),
    "max": (lambda x: x.max(0), [(12, 8)], E, ["(x,.) -> (.)Qx"]),
    "sum, the dim kept": (lambda x: x.sum(0, keepdims=True), [(12, 8)], E, ["(x,.) -> (.,.)Px"]),
    "sum over the other dim": (lambda x: x.sum(1), [(12, 8)], E, ["(x,.) -> (x)"]),
    "sum of all": (jnp.sum, [(12, 8)], E, ["(x,.) -> ()Px"]),
    "max of all": (jnp.max, [(12, 8)], E, ["(x,.) -> ()Qx"]),
    "sum over two dims": (lambda x: x.sum((1, 2)), [(12, 6, 6)], A, [
        "(x,.,.) -> (x)", "(.,x,y) -> (.)PxPy",
    ]),
    "max over two dims": (lambda x: x.max((1, 2)), [(12, 6, 6)], A, ["(x,y,.) -> (x)Qy"]),
    "sum over two dims, kept": (lambda x: x.sum((1, 2), keepdims=True), [(12, 6, 6)], A, [
        "(x,y,.) -> (x,.,.)Py",
    ]),
    "mean of all": (jnp.mean, [(4, 8)], E, ["(x,.) -> ()Px"]),
    "all": (lambda x: (x > 0).all(1), [(4, 6, 8)], F, ["(.,x,.) -> (.,.)Nx"]),
    "any": (lambda x: (x > 0).any(1), [(4, 6, 8)], F, ["(.,x,.) -> (.,.)Qx"]),
    "min": (lambda x: x.min(1), [(4, 6, 8)], F, ["(.,x,.) -> (.,.)Nx"]),
    "layer norm": (layer_norm, [(12, 8, 16), (16,), (16,)], A, [
        "(y,.,.) (.) (.) -> (y,.,.) (y,.) (y,.)",
        "(x,.,.) (.) (x) => (x,.,.) (.) (.) -> (x,.,.) (x,.) (x,.)",
    ]),
    "layer norm from dim 1 on": (layer_norm_of_two, [(12, 8, 16), (128,)], A, [
        # a scale that is cut by y is not gathered by ours: rows of it move, and the result is cut
        "(x,.,.) (.) -> (x,.,.) (x) (x)",
    ]),
    "layer norm from dim 1 on, batch cut twice": (layer_norm_of_two, [(12, 8, 16), (128,)], C, [
        "(xy,.,.) (.) -> (xy,.,.) (xy) (xy)",
    ]),
    "gradient of layer norm": (
        vjp(lambda *xs: layer_norm(*xs)[0], 3), [(4, 4, 8), (8,), (8,), (4, 4, 8)], C, [
        "(x,y,.) (.) (.) (x,y,.) -> (x,y,.) (.)PxPy (.)PxPy",
    ]),
    "rms norm": (rms_norm, [(12, 8, 16), (16,)], A, [
        "(y,.,.) (.) -> (y,.,.) (y,.)", "(y,x,.) (x) => (y,x,.) (.) -> (y,x,.) (y,x)",
    ]),
    "gradient of rms norm": (
        vjp(lambda *xs: rms_norm(*xs)[0], 2), [(4, 6, 8), (8,), (4, 6, 8)], A, [
        "(x,y,.) (.) (x,y,.) -> (x,y,.) (.)PxPy",
    ]),
    "group norm": (group_norm, [(8, 4, 3, 3), (4,), (4,)], E, ["(x,.,.,.) (.) (.) -> (x,.,.,.)"]),
    "gradient of group norm": (
        vjp(group_norm, 3), [(8, 4, 3, 3), (4,), (4,), (8, 4, 3, 3)], E, [
        "(x,.,.,.) (.) (.) (x,.,.,.) -> (x,.,.,.) (.)Px (.)Px",
    ]),
    "softmax": (jax.nn.softmax, [(8, 16, 8)], B, [
        "(y,.,.) -> (y,.,.)", "(y,.,x) => (y,.,.) -> (y,.,.)",
    ]),
    "log softmax along dim 1": (lambda x: jax.nn.log_softmax(x, 1), [(8, 16, 8)], B, [
        "(.,y,x) => (.,.,x) -> (.,.,x)",
    ]),
    "cross entropy of labels": (label_loss, [(8, 4, 24), spread(8, 4, 1, most=24)], B, [
        "(y,.,.) (.,x,.) => (y,x,.) (y,x,.) -> (y,x,.) (y,x,.)",
    ]),
    "cross entropy of distributions": (soft_loss, [(8, 4, 24), (8, 4, 24)], B, [
        "(y,x,.) (y,x,.) -> (y,x,.)",
    ]),
    "embedding": (lambda ids, w: w[ids], [IDS, (24, 8)], B, [
        "(y,.) (.,.) -> (y,.,.)", "(y,.) (.,x) -> (y,.,x)", "(y,.) (x,.) -> (y,.,.)Px",
        "(.,.) (y,.) -> (.,.,.)Py",
    ]),
    "gradient of embedding": (
        vjp(lambda w, ids: w[ids], 1), [(24, 8), spread(6, 12, most=24), (6, 12, 8)], A, [
        "(.,.) (y,.) (y,.,.) -> (.,.)Py",
    ]),
    "gradient of embedding, columns": (
        vjp(lambda w, ids: w[ids], 1), [(24, 6), spread(6, most=24), (6, 6)], A, [
        "(.,.) (x) (x,y) -> (.,y)Px",
    ]),
    "reshape, middle dims": (lambda x: x.reshape(1, 72, 8, 4, 6), [(6, 12, 8, 24)], A, [
        "(x,.,.,.) -> (.,x,.,.,.)", "(y,.,.,x) -> (.,y,.,x,.)",
    ]),
    "reshape, a dim before": (lambda x: x.reshape(1, 72, 48, 4, 6), [(6, 12, 48, 24)], A, [
        "(x,.,y,.) -> (.,x,y,.,.)",
    ]),
    "reshape, all dims": (lambda x: x.reshape(3, 24, 6, 8, 24), [(6, 12, 48, 24)], A, [
        "(y,.,.,x) -> (y,.,.,.,x)",
    ]),
    "reshape, two together": (lambda x: x.reshape(72, 3, 16, 24), [(6, 12, 48, 24)], A, [
        "(x,.,y,.) -> (x,y,.,.)", "(y,.,x,.) ~> (y,.,.,.) -> (y,.,.,.)",
    ]),
    "reshape, heads": (lambda x: x.reshape(8, 6, 4, 6), [(8, 6, 24)], A, [
        "(x,y,.) -> (x,y,.,.)", "(x,.,y) ~> (x,.,.) -> (x,.,.,.)",
    ]),
    "reshape, heads that divide": (lambda x: x.reshape(1, 8, 6, 8), [(1, 8, 48)], A, [
        "(.,.,y) -> (.,.,y,.)", "(.,x,y) -> (.,x,y,.)",
    ]),
    "reshape, microbatches": (lambda x: x.reshape(1, 2, 8, 4), [(1, 16, 4)], C, [
        "(.,x,.) -> (.,x,.,.)",
    ]),
    "reshape, the leading dim cut twice": (lambda x: x.reshape(2, 4, 4), [(2, 16)], C, [
        "(x,y) -> (x,y,.)",
    ]),
    "flatten the last three": (lambda x: x.reshape(4, 8, 8, 16), [(4, 8, 8, 4, 2, 2)], C, [
        "(x,.,.,.,.,.) -> (x,.,.,.)",
    ]),
    "flatten two": (lambda x: x.reshape(2, 8, 16), [(2, 8, 4, 4)], C, ["(x,.,y,.) -> (x,.,y)"]),
    "flatten all but the first": (lambda x: x.reshape(4, -1), [(4, 4, 4, 4)], C, [
        "(.,x,.,.) -> (.,x)", "(.,.,x,y) => (.,.,.,.) -> (.,.)",
    ]),
    "transpose": (jnp.transpose, [(12, 8)], E, ["(x,.) -> (.,x)"]),
    "permute": (lambda x: x.transpose(3, 0, 2, 1), [(2, 4, 6, 12)], A, ["(.,.,x,y) -> (y,.,x,.)"]),
    "permute three": (lambda x: x.transpose(1, 2, 0), [(6, 8, 12)], A, ["(x,.,y) -> (.,y,x)"]),
    "concatenate": (lambda *xs: jnp.concatenate(xs), [(8, 8, 8), (4, 8, 8), (2, 8, 8)], C, [
        "(.,x,y) (.,y,x) (.,.,x) => (.,y,x) (.,y,x) (.,y,x) -> (.,y,x)",
    ]),
    "concatenate vectors": (lambda *xs: jnp.concatenate(xs), [(16,), (32,), (64,)], C, [
        "(.) (.) (.) -> (.)",
    ]),
    "stack": (lambda *xs: jnp.stack(xs), [(8, 8, 4)] * 3, C, [
        "(.,x,y) (.,y,x) (.,.,x) => (.,y,x) (.,y,x) (.,y,x) -> (.,.,y,x)",
    ]),
    "stack inside": (lambda *xs: jnp.stack(xs, 1), [(8, 8, 4)] * 3, C, [
        "(.,x,y) (.,y,x) (.,.,x) => (.,y,x) (.,y,x) (.,y,x) -> (.,.,y,x)",
    ]),
    "split": (lambda x: jnp.split(x, 2, 1), [(12, 8, 12)], E, ["(x,.,.) -> (x,.,.) (x,.,.)"]),
    "split along a cut dim": (lambda x: jnp.split(x, [15, 31], 2), [(4, 8, 48)], E, [
        "(.,.,x) ~> (.,.,.) -> (.,.,.) (.,.,.) (.,.,.)",
    ]),
    "split on two axes": (lambda x: jnp.split(x, 3), [(12, 6, 4, 2)], A, [
        "(x,y,.,.) ~> (.,y,.,.) -> (.,y,.,.) (.,y,.,.) (.,y,.,.)",
    ]),
    "unbind": (lambda x: [x[:, i] for i in range(x.shape[1])], [(12, 2, 6)], A, [
        "(x,.,y) -> (x,y) (x,y)", "(y,x,.) => (y,.,.) -> (y,.) (y,.)",
    ]),
    "slice the last dim": (lambda x: x[..., 2:6], [(8, 8, 16, 16)], B, [
        "(.,x,y,.) -> (.,x,y,.)", "(.,.,y,x) ~> (.,.,y,.) -> (.,.,y,.)",
    ]),
    "slice the middle": (lambda x: x[:, 1:4, 2:9], [(8, 8, 16, 16)], B, [
        "(.,y,x,.) ~> (.,.,.,.) -> (.,.,.,.)",
    ]),
    "squeeze": (lambda x: x.squeeze((0, 2)), [(1, 8, 1, 16)], B, ["(.,x,.,y) -> (x,y)"]),
    "squeeze one": (lambda x: x.squeeze(-4), [(1, 8, 1, 16)], B, ["(.,x,.,y) -> (x,.,y)"]),
    "a new first dim": (lambda x: x[None], [(8, 16)], B, ["(x,y) -> (.,x,y)"]),
    "two new dims": (lambda x: x[:, None, None], [(8, 16)], B, ["(x,y) -> (x,.,.,y)"]),
    "another first dim": (lambda x: x[None], [(1, 8, 16)], B, ["(.,y,.) -> (.,.,y,.)"]),
    "tile": (lambda x: jnp.tile(x, (2, 2, 1, 1)), [(8, 8, 8)], C, [
        "(.,.,y) -> (.,.,.,y)", "(x,.,y) => (.,.,y) -> (.,.,.,y)",
    ]),
    "expand": (lambda x: jnp.broadcast_to(x, (4, 8, 12, 8, 8)), [(8, 1, 1, 8)], B, [
        "(y,.,.,x) -> (.,y,.,.,x)",
    ]),
    "expand the first": (lambda x: jnp.broadcast_to(x, (8, 12, 8, 4)), [(1, 12, 8, 4)], B, [
        "(.,x,.,.) -> (.,x,.,.)",
    ]),
    "expand as": (lambda x, y: jnp.broadcast_to(x, y.shape), [(1, 16), (2, 8, 16)], C, [
        "(.,.) (x,.,y) => (.,y) (x,.,y) -> (x,.,y)", "(.,.) (x,y,.) -> (x,y,.)",
    ]),
    "gradient of expand as": (
        vjp(lambda x: jnp.broadcast_to(x, (2, 8, 16)), 1), [(1, 16), (2, 8, 16)], C, [
        "(.,.) (x,y,.) -> (.,.)PxPy", "(.,y) (x,.,y) -> (.,y)Px",
    ]),
    "gradient of where": (
        vjp(lambda x, y, m: jnp.where(m > 0, x, y), 2), [(2, 8, 4), (8, 4), (2, 8, 4), (2, 8, 4)],
        C, ["(x,.,.) (.,.) (x,.,.) (x,.,.) -> (x,.,.) (.,.)Px"],
    ),
    "take": (lambda x, i: jnp.take(x, i, 0), [(12, 8, 12), spread(16, most=12)], E, [
        "(.,x,.) (.) -> (.,x,.)", "(x,.,.) (.) -> (.,.,.)Px",
    ]),
    "take along dim 1": (lambda x, i: jnp.take(x, i, 1), [(12, 6, 8), spread(9, most=6)], A, [
        "(x,y,.) (y) => (x,.,.) (.) -> (x,.,.)", "(x,.,.) (y) -> (x,y,.)",
    ]),
    "gradient of take": (
        vjp(lambda x, i: jnp.take(x, i, 0), 1), [(12, 8, 12), spread(16, most=12), (16, 8, 12)], A,
        ["(.,.,y) (x) (x,.,y) -> (.,.,y)Px", "(.,.,y) (.) (.,.,y) -> (.,.,y)"],
    ),
    "scatter rows": (
        lambda x, u, i: x.at[i].set(u), [(12, 8, 4), (4, 8, 4), np.array([3, 1, 11, 6])], E,
        ["(.,.,.) (.,x,.) (.) => (.,x,.) (.,x,.) (.) -> (.,x,.)"],
    ),
    "put along dim 0": (
        lambda x, i, v: dt.ops.put_along_axis(x, i, v, axis=0),
        [(4, 8, 8), spread(4, 8, 8, most=4) * 0 + np.arange(4)[:, None, None], (4, 8, 8)], E,
        ["(.,x,.) (.,.,.) (.,.,.) => (.,x,.) (.,x,.) (.,x,.) -> (.,x,.)"],
    ),
    "take along an axis": (
        lambda x, i: jnp.take_along_axis(x, i, 0), [(4, 8, 8), spread(8, 8, 8, most=4)], E,
        ["(.,.,.) (x,.,.) -> (x,.,.)", "(.,x,.) (.,x,.) -> (.,x,.)"],
    ),
    "argmax": (lambda x: x.argmax(1), [(12, 6, 8)], A, ["(x,.,.) -> (x,.)"]),
    "argmax of the last": (lambda x: x.argmax(-1, keepdims=True), [(12, 6, 8)], A, [
        "(x,y,.) -> (x,y,.)",
    ]),
    "cummax": (lambda x: lax.cummax(x, 1), [(8, 4, 8)], B, ["(x,.,.) -> (x,.,.)"]),
    "top k": (lambda x: lax.top_k(x, 2), [(8, 8, 8)], C, ["(x,y,.) -> (x,y,.) (x,y,.)"]),
    "roll": (lambda x: jnp.roll(x, (1, 3), (0, 2)), [(12, 6, 8)], A, ["(.,y,.) -> (.,y,.)"]),
    "gradient of triu": (vjp(jnp.triu, 1), [(4, 8, 8), (4, 8, 8)], C, [
        "(x,.,.) (x,.,.) -> (x,.,.)", "(x,.,y) (x,.,y) -> (x,.,y)",
    ]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 1), (2, 3))), [(8, 8, 8)], C, [
        "(x,.,.) -> (x,.,.)",
    ]),
    "a sum of two": (jnp.add, [(4, 8), (4, 8)], C, [
        "(x,.) (x,.) -> (x,.)", "(x,.)Py (x,.)Py -> (x,.)Py",
        "(x,.)Py (.,.)Py => (x,.)Py (x,.)Py -> (x,.)Py",
    ]),
    "attention": (attention, [(4, 8, 4, 8)] * 3, A, [
        "(x,.,.,.) (x,.,.,.) (x,.,.,.) -> (x,.,.,.)",
    ]),
    "attention over heads": (attention, [(4, 8, 4, 8)] * 3, C, [
        "(x,.,y,.) (x,.,.,.) (x,.,.,.) => (x,.,y,.) (x,.,y,.) (x,.,y,.) -> (x,.,y,.)",
        "(x,y,.,.) (x,.,.,.) (x,.,.,.) -> (x,y,.,.)",
    ]),
    "rotary embedding": (rotary, [(4, 8, 4, 8)], C, [
        "(x,.,.,.) -> (x,.,.,.)", "(x,y,.,.) -> (x,y,.,.)",
    ]),
    "convolution": (convolution, [(2, 4, 8, 8), (8, 4, 3, 3)], D, [
        "(x,.,.,.) (.,.,.,.) -> (x,.,.,.)", "(x,.,.,.) (y,.,.,.) -> (x,y,.,.)",
        "(.,x,.,.) (.,x,.,.) -> (.,.,.,.)Px", "(x,z,.,.) (y,z,.,.) -> (x,y,.,.)Pz",
    ]),
    "gradient of convolution": (
        vjp(convolution, 2), [(2, 4, 8, 8), (8, 4, 3, 3), (2, 8, 8, 8)], D, [
        "(x,.,.,.) (.,.,.,.) (x,.,.,.) -> (x,.,.,.) (.,.,.,.)Px",
        "(.,.,.,.) (x,.,.,.) (.,x,.,.) -> (.,.,.,.)Px (x,.,.,.)",
    ]),
    "depthwise convolution": (depthwise, [(2, 4, 8, 8), (4, 1, 3, 3)], D, [
        "(.,x,.,.) (x,.,.,.) -> (.,x,.,.)", "(x,.,.,.) (.,.,.,.) -> (x,.,.,.)",
    ]),
    "swiglu": (swiglu, [(4, 8), (4, 8)], F, ["(.,x) (.,x) -> (.,x)"]),
    "swiglu of one": (swiglu_of_one, [(4, 8)], F, ["(x,.) -> (x,.)"]),
    "a product with a bias": (lambda x, w, b: x @ w + b, [(8, 8), (8, 8), (8,)], C, [
        "(x,.) (.,y) (y) -> (x,y)", "(.,x) (x,.) (.)Px -> (.,.)Px",
    ]),
}  # fmt: skip

M8, M24 = (2, 2, 2), (2, 4)
HYPER = {
    "elementwise": (jax.nn.relu, [(4, 8, 16)], M8, ["(x,y,z) -> (x,y,z)"]),
    "add": (jnp.add, [(4, 8, 16)] * 2, M8, [
        "(x,.,z) (x,.,z) -> (x,.,z)", "(x,.,z) (.,.,.) => (x,.,z) (x,.,z) -> (x,.,z)",
        "(.,.,.)Px (.,.,.)Px -> (.,.,.)Px", "(xy,.,.) (xy,.,.) -> (xy,.,.)",
    ]),
    "add, dims of one": (jnp.add, [(1, 8, 16), (4, 8, 16)], M8, [
        "(.,.,.) (x,.,z) => (.,.,z) (x,.,z) -> (x,.,z)",
    ]),
    "add, dims of one on both sides": (jnp.add, [(4, 1, 16), (1, 8, 16)], M8, [
        "(x,.,.) (.,y,.) -> (x,y,.)",
    ]),
    "add, dims of one in all": (jnp.add, [(4, 8, 1), (1, 1, 16)], M8, [
        "(x,y,.) (.,.,z) -> (x,y,z)",
    ]),
    "add, an axis of one device": (jnp.add, [(8, 4, 2)] * 2, (2, 1, 4), [
        "(y,x,.) (yz,x,.) => (yz,x,.) (yz,x,.) -> (yz,x,.)",
    ]),
    "add on 2x4": (jnp.add, [(8, 8)] * 2, M24, ["(x,y) (x,.) => (x,y) (x,y) -> (x,y)"]),
    "matmul": (jnp.matmul, [(8, 8), (8, 8)], M24, [
        "(x,.) (.,.) -> (x,.)", "(.,.)Py (.,.) -> (.,.)Py", "(.,.) (.,.)Px -> (.,.)Px",
        "(.,.)Py (.,y) => (.,.) (.,y) -> (.,y)",
    ]),
    "matmul of partial rows": (jnp.matmul, [(8, 8), (8, 8)], M24, ["(.,y)Px (y,.) -> (.,.)PxPy"]),
    "matmul, x transposed": (named("km,kn->mn"), [(8, 8), (8, 8)], M24, ["(y,.) (y,.) -> (.,.)Py"]),
    "matmul, both transposed": (named("km,nk->mn"), [(8, 8), (8, 8)], M24, [
        "(y,x) (.,y) -> (x,.)Py",
    ]),
    "matmul, w transposed": (named("mk,nk->mn"), [(8, 8), (8, 8)], M8, [
        "(x,z) (y,z) -> (x,y)Pz", "(xy,z) (.,z) -> (xy,.)Pz",
    ]),
    "matmul, x transposed, cut twice": (named("km,kn->mn"), [(8, 8), (8, 8)], M8, [
        "(xy,z) (xy,.) -> (z,.)PxPy",
    ]),
    "products of batches": (jnp.matmul, [(4, 8, 8), (4, 8, 8)], M8, [
        "(x,y,z) (x,z,.) -> (x,y,.)Pz", "(.,xy,.) (.,.,z) -> (.,xy,z)",
    ]),
    "products of batches, transposed": (named("bkm,bkn->bmn"), [(4, 8, 8), (4, 8, 8)], M8, [
        "(x,z,.) (.,z,.) => (x,z,.) (x,z,.) -> (x,.,.)Pz",
    ]),
    "linear": (lambda x, w: x @ w.T, [(8, 8), (8, 8)], M24, [
        "(x,.) (.,.) -> (x,.)", "(x,.) (.,y) => (x,y) (.,y) -> (x,.)Py",
    ]),
    "linear with a bias": (lambda x, w, b: x @ w.T + b, [(8, 8), (8, 8), (8,)], M24, [
        "(x,.) (y,.) (y) -> (x,y)", "(x,y) (.,y) (.)Py -> (x,.)Py",
    ]),
    "linear in a chain": (
        lambda x, a, b: x @ a.T @ b.T, [(4, 16), (8, 16), (8, 8)], F,
        ["(.,x) (.,x) (.,.) -> (.,.)Px"],
    ),
    "sum": (lambda x: x.sum(0), [(8, 8, 8)], M8, ["(x,.,.) -> (.,.)Px"]),
    "sum, kept": (lambda x: x.sum(2, keepdims=True), [(8, 8, 8)], M8, ["(.,.,z) -> (.,.,.)Pz"]),
    "sum over two, kept": (lambda x: x.sum((0, 2), keepdims=True), [(8, 8, 8)], M8, [
        "(.,xy,z) -> (.,xy,.)Pz",
    ]),
    "sum over two": (lambda x: x.sum((0, 2)), [(8, 8, 8)], M8, ["(.,xy,z) -> (xy)Pz"]),
    "sum over the first two": (lambda x: x.sum((0, 1)), [(8, 8, 8)], M8, ["(.,xy,z) -> (z)PxPy"]),
    "softmax": (jax.nn.softmax, [(16, 16)], (8,), ["(x,.) -> (x,.)"]),
    "softmax along dim 0": (lambda x: jax.nn.softmax(x, 0), [(16, 16)], (8,), [
        "(.,x) -> (.,x)", "(x,.) => (.,.) -> (.,.)",
    ]),
    "reshape": (lambda x: x.reshape(16, 2, 4, 8), [(16, 8, 8)], M24, ["(x,.,.) -> (x,.,.,.)"]),
    "reshape many": (lambda x: x.reshape(4, 8, 2, 24, 20), [(32, 2, 24, 2, 10)], M8, [
        "(z,x,.,y,.) -> (z,.,x,.,y)",
    ]),
    "reshape over a boundary": (lambda x: x.reshape(4, 8, 2, 42), [(4, 8, 12, 7)], M24, [
        "(.,.,x,.) -> (.,.,x,.)", "(.,.,y,.) ~> (.,.,.,.) -> (.,.,y,.)",
    ]),
    "reshape a dim into two": (lambda x: x.reshape(32, 16, 4), [(32, 64)], M24, [
        "(x,y) -> (x,y,.)",
    ]),
    "reshape into itself": (lambda x: x.reshape(32, -1), [(32, 64)], M24, ["(x,y) -> (x,y)"]),
    "reshape two dims into one": (lambda x: x.reshape(32, 128), [(32, 16, 8)], M24, [
        "(x,y,.) -> (x,y)",
    ]),
    "transpose": (lambda x: jnp.swapaxes(x, 0, 2), [(4, 8, 8)], M8, ["(x,y,z) -> (z,y,x)"]),
    "transpose, cut twice": (lambda x: jnp.swapaxes(x, 1, 2), [(4, 8, 8)], M8, [
        "(.,xy,z) -> (.,z,xy)",
    ]),
    "expand": (lambda x: jnp.broadcast_to(x, (8, 5)), [(8, 1)], M24, ["(x,.) -> (x,.)"]),
    "expand before": (lambda x: jnp.broadcast_to(x, (2, 3, 8, 8)), [(8, 8)], M24, [
        "(.,y) -> (.,.,.,y)",
    ]),
    "expand a number": (lambda x: jnp.broadcast_to(x, (3, 4)), [()], M24, ["() -> (.,.)"]),
    "squeeze": (lambda x: x.squeeze(1), [(8, 1, 4)], M24, ["(x,.,.) -> (x,.)"]),
    "sort": (lambda x: jnp.sort(x), [(8, 8)], M24, ["(x,.) -> (x,.)", "(.,xy) ~> (.,.) -> (.,xy)"]),
    "top k": (lambda x: lax.top_k(x, 3), [(8, 8)], M24, ["(x,.) -> (x,.) (x,.)"]),
    "take": (lambda x, i: jnp.take(x, i, 0), [(8, 8), spread(8, most=8)], M24, [
        "(.,x) (y) -> (y,x)",
    ]),
    "gather of pairs": (
        lambda x, i: x[i[:, 0], i[:, 1]], [(8, 8), spread(16, 2, most=8)], (8,),
        ["(.,.) (x,.) -> (x)", "(.,.) (.,x) => (.,.) (.,.) -> (.)"],
    ),
    "embedding": (lambda ids, w: w[ids], [spread(8, 4, most=8), (8, 8)], M24, [
        "(x,.) (.,y) -> (x,.,y)", "(x,.) (.,.) -> (x,.,.)", "(x,.) (y,.) -> (x,.,.)Py",
    ]),
    "embedding of three dims": (lambda ids, w: w[ids], [spread(8, 2, 2, most=8), (8, 8)], M24, [
        "(x,.,.) (.,y) -> (x,.,.,y)",
    ]),
    "attention": (attention, [(4, 8, 4, 8)] * 3, M8, [
        "(x,.,y,.) (x,.,y,.) (x,.,y,.) -> (x,.,y,.)", "(x,z,y,.) (x,.,y,.) (x,.,y,.) -> (x,z,y,.)",
    ]),
    "attention of three dims": (
        lambda q, k, v: attention(q[None], k[None], v[None])[0], [(8, 4, 8)] * 3, (4, 2),
        ["(x,y,.) (.,y,.) (.,y,.) -> (x,y,.)"],
    ),
}  # fmt: skip

UNARY = (
    "relu sigmoid leaky_relu elu gelu silu exp square rsqrt abs round floor cos sin asin tanh "
    "negative reciprocal log isinf isnan"
)
POSITIVE = np.random.default_rng(2).uniform(0.1, 0.9, (4, 8)).astype("float32")
BINARY = (
    "add subtract multiply divide power equal greater less greater_equal less_equal logical_and "
    "logical_or minimum maximum"
)
DTORCH = {
    name: (getattr(jax.nn, name, None) or getattr(jnp, name, None) or getattr(lax, name),
           [POSITIVE], F, ["S0 -> S0", "S1 -> S1"])
    for name in UNARY.split()
} | {
    name: (getattr(jnp, name), [POSITIVE, POSITIVE + 0.5], F, ["S0, S0 -> S0", "S1, S1 -> S1"])
    for name in BINARY.split()
} | {
    "negative of terms": (jnp.negative, [(4, 8)], F, ["P -> P"]),
    "a vector": (jnp.add, [(4, 8), (8,)], F, ["S0, R -> S0", "S1, S0 -> S1"]),
    "a row": (jnp.add, [(1, 8), (4, 8)], F, ["R, S0 -> S0", "S1, S1 -> S1"]),
    "chunk": (lambda x: jnp.split(x, 2, 1), [(4, 8)], F, ["S0 -> S0, S0", "P -> P, P"]),
    "another dtype": (lambda x: x.astype("bfloat16"), [(4, 8)], F, ["S0 -> S0", "S1 -> S1"]),
    "joined": (lambda *xs: jnp.concatenate(xs, 1), [(4, 8), (4, 8)], F, [
        "P, P -> P", "S0, S0 -> S0", "S1, S1 -> S1/2",
    ]),
    "patches": (
        lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "VALID"), [(2, 3, 8, 8), (4, 3, 2, 2)],
        F, ["S0, R -> S0", "S2, R -> S2", "S3, R -> S3", "S1, S1 -> P", "R, S0 -> S1"],
    ),
    "einsum of one": (named("abc->cab"), [(2, 4, 6)], F, ["S0 -> S1", "S2 -> S0", "P -> P"]),
    "embedding": (lambda i, w: w[i], [spread(4, 6, most=8), (8, 4)], F, [
        "R, S1 -> S2", "S0, R -> S0", "S1, R -> S1", "R, S0 -> P", "R, P -> P",
    ]),
    "expand": (lambda x: jnp.broadcast_to(x, (3, 4, 8)), [(4, 8)], F, [
        "P -> P", "S0 -> S1", "S1 -> S2",
    ]),
    "flatten": (lambda x: x.reshape(2, 12, 6), [(2, 4, 3, 6)], F, [
        "P -> P", "S0 -> S0", "S1 -> S1", "S3 -> S2",
    ]),
    "index": (lambda x: x[:, 1], [(4, 8, 2)], F, ["P -> P", "S0 -> S0", "S2 -> S1"]),
    "half of two blocks": (lambda x: x[4:], [(8, 2)], F, ["S0/2 -> S0", "S1 -> S1"]),
    "linear": (lambda x, w, b: x @ w.T + b, [(2, 4, 8), (6, 8), (6,)], F, [
        "S0, R, R -> S0", "S1, R, R -> S1", "R, S0, S0 -> S2", "S2, S1, P -> P", "P, R, P -> P",
        "R, P, P -> P",
    ]),
    "matmul": (jnp.matmul, [(4, 8), (8, 6)], F, [
        "S0, R -> S0", "R, S1 -> S1", "S1, S0 -> P", "P, R -> P", "R, P -> P",
    ]),
    "matmul of batches": (jnp.matmul, [(4, 6, 8), (4, 8, 6)], F, ["S0, S0 -> S0", "S2, S1 -> P"]),
    "a vector and a matrix": (jnp.matmul, [(8,), (8, 6)], F, ["S0, S0 -> P", "R, S1 -> S0"]),
    "a matrix and a vector": (jnp.matmul, [(6, 8), (8,)], F, ["S0, R -> S0", "S1, S0 -> P"]),
    "two vectors": (jnp.matmul, [(8,), (8,)], F, ["S0, S0 -> P", "R, P -> P"]),
    "layer norm": (lambda *xs: layer_norm(*xs)[0], [(4, 6, 8), (8,), (8,)], F, [
        "S0, R, R -> S0", "S1, R, R -> S1",
    ]),
    "group norm": (group_norm, [(4, 4, 6), (4,), (4,)], F, ["S0, R, R -> S0", "S1, S0, S0 -> S1"]),
    "outer": (jnp.outer, [(4,), (8,)], F, ["P, R -> P", "R, P -> P", "S0, R -> S0", "R, S0 -> S1"]),
    "permute": (lambda x: x.transpose(1, 2, 0), [(2, 4, 6)], F, ["P -> P", "S0 -> S2", "S2 -> S1"]),
    "sum": (lambda x: x.sum(0), [(4, 8)], F, ["S0 -> P", "S1 -> S0", "P -> P"]),
    "mean": (lambda x: x.mean(1), [(4, 8)], F, ["S0 -> S0", "S1 -> P"]),
    "repeat": (lambda x: jnp.repeat(x, 3, 1), [(4, 8)], F, ["P -> P", "S0 -> S0", "S1 -> S1"]),
    "reshape": (lambda x: x.reshape(4, 4, 2, 3), [(4, 8, 3)], F, [
        "P -> P", "S0 -> S0", "S1 -> S1",
    ]),
    "attention": (attention, [(2, 4, 4, 8)] * 3, F, [
        "S0, S0, S0 -> S0", "S2, S2, S2 -> S2", "S1, R, R -> S1",
    ]),
    "softmax": (lambda x: jax.nn.softmax(x, 1), [(4, 8, 6)], F, ["S0 -> S0", "S2 -> S2"]),
    "squeeze": (lambda x: x.squeeze((1, -1)), [(4, 1, 8, 1)], F, [
        "P -> P", "S0 -> S0", "S2 -> S1",
    ]),
    "unsqueeze": (lambda x: jnp.expand_dims(x, -1), [(4, 8)], F, [
        "P -> P", "S0 -> S0", "S1 -> S1",
    ]),
    "dropout": (lambda x: dt.ops.dropout(x, jax.random.key(0), rate=0.5), [(4, 8)], F, [
        "S0 -> S0", "S1 -> S1",
    ]),
    "fill": (lambda x, m: jnp.where(m > 0, 3.0, x), [(4, 8), (4, 8)], F, ["S0, S0 -> S0"]),
    "pooling": (lambda x: dt.ops.max_pool(x, window=(2, 2)), [(2, 4, 8, 8)], F, [
        "S0 -> S0", "S1 -> S1", "S2 -> S2",
    ]),
    "batch norm": (
        lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5), [(4, 8)], F, ["S1 -> S1"],
    ),
}  # fmt: skip

CASES = {
    f"{table}: {name}: {line}": Case(fun, arguments, mesh, line)
    for table, cases in (("paddle", PADDLE), ("hyper", HYPER), ("dtorch", DTORCH))
    for name, (fun, arguments, mesh, lines) in cases.items()
    for line in lines
}


@pytest.mark.parametrize("case", today(CASES, 4))
def test_the_layouts_send_nothing(case):
    CASES[case].check_plan()


@pytest.mark.parametrize("case", today(CASES, 12))
def test_the_values_are_those_of_one_device(case):
    CASES[case].check_values()


REFUSED = {
    "updates of a part of the rows": (
        lambda x, u, i: x.at[i].add(u), [(12, 4), (8, 4), spread(8, most=12)], E,
        "(x,.) (x,.) (x) -> (.,.)Px",
    ),
    "a gate beside its values": (swiglu_of_one, [(4, 8)], F, "(.,x) -> (.,x)"),
    "queries with keys of their part only": (attention, [(2, 4, 2, 4)] * 3, F,
                                             "(.,x,.,.) (.,x,.,.) (.,x,.,.) -> (.,x,.,.)"),
    "a maximum as terms of a sum": (lambda x: x.max(1), [(4, 8)], F, "(.,x) -> (.)Px"),
    "classes over devices": (soft_loss, [(8, 24), (8, 24)], B, "(.,x) (.,x) -> (.,.)"),
    "rows over two axes": (jnp.add, [(4, 8), (4, 8)], C, "(x,.) (y,.) -> (x,.)"),
    "rows cut otherwise": (jnp.add, [(8, 8), (8, 8)], D, "(xy,.) (xz,.) -> (xy,.)"),
    "terms and a part": (jnp.add, [(1, 8), (4, 8)], C, "(.,.)Px (x,.) -> (x,.)"),
    "terms and the whole": (jnp.add, [(4, 8), (4, 8)], F, "(.,.)Px (.,.) -> (.,.)Px"),
    "terms of a sum and of a maximum": (jnp.add, [(4, 8), (4, 8)], F, "(.,.)Px (.,.)Qx -> (.,.)Px"),
    "a bias over the rows' axis": (
        lambda x, w, b: x @ w.T + b, [(8, 8), (8, 8), (8,)], M24, "(x,y) (.,y) (x) -> (x,.)",
    ),
    "a table and its ids": (lambda i, w: w[i], [IDS, (24, 8)], F, "(x,.) (x,.) -> (x,.,.)"),
    "pairs and their table": (
        lambda x, i: x[i[:, 0], i[:, 1]], [(8, 8), spread(8, 2, most=8)], (8,),
        "(x,.) (x,.) -> (x)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_layouts_that_need_movement(what):
    Case(*REFUSED[what]).check_refused()


X = np.ones((4, 8, 16), "float32")
NOT_ARRAYS = {
    "shapes that do not broadcast": lambda x: x + jnp.ones((4, 7, 16)),
    "a dim too early": lambda x: x.sum((-4, -2)),
    "a dim too late": lambda x: jnp.swapaxes(x, 0, 3),
    "another number of elements": lambda x: x.reshape(10, 30),
    "fewer elements": lambda x: jnp.broadcast_to(x, (5, 8, 16)),
    "fewer dims": lambda x: jnp.broadcast_to(x, (16,)),
    "no dim of one": lambda x: x.squeeze(1),
    "no such dim": lambda x: x.squeeze(5),
    "top k of no dim": lambda x: lax.top_k(x, 2, axis=5),
    "an index past the dims": lambda x: x[0, 0, 0, 0],
}


@pytest.mark.parametrize("what", NOT_ARRAYS)
def test_mistakes_in_shapes_are_jax_s_own_errors(what):
    mesh = dt.init_device_mesh(M8, ("x", "y", "z"))
    placed = dt.distribute_tensor(X, mesh, ["S0", "S1", "S2"])
    with pytest.raises(Exception) as theirs:
        jax.jit(NOT_ARRAYS[what])(X)
    with pytest.raises(type(theirs.value)) as ours:
        dt.jit(NOT_ARRAYS[what])(placed)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
