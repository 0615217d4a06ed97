"""Rows that other systems have and that are wrong: ours have not, and programs stay right."""

import re

import jax
import numpy as np
import oracle
import pytest
import simulated
from jax import lax
from jax import numpy as jnp
from samples import Sample, bools, equations, f32

import dtorchjax as dt
from dtorchjax.notation import parse_row
from dtorchjax.placements import joint, parse_placements

X = f32(6, 12)
MATRICES = (f32(6, 12), f32(12, 6))
FACTS = {  # what the row would say: primitive, program, arguments, the row
    "exp of each term": ("exp", jnp.exp, (X,), "P -> P"),
    "clip each term": ("clamp", lambda x: lax.clamp(-1.0, x, 1.0), (X,), "R, P, R -> P"),
    "square each term": ("integer_pow", lambda x: x**2, (X,), "P -> P"),
    "relu of each term": ("max", jax.nn.relu, (X,), "P, R -> P"),
    "abs of each term": ("abs", jnp.abs, (X,), "P -> P"),
    "round each term": ("round", jnp.round, (X,), "P -> P"),
    "add a number to each term": ("add", lambda x: x + 1.0, (X,), "P, R -> P"),
    "add a whole bias to each term": ("add", lambda x, b: x + b, (X, X), "P, R -> P"),
    "multiply term by term": ("mul", lambda x, y: x * y, (X, X), "P, P -> P"),
    "divide by each term": ("div", lambda x, y: x / y, (X, f32(6, 12, low=1)), "R, P -> P"),
    "a sum beside a maximum": ("add", lambda x, y: x + y, (X, X), "P, P(max) -> P"),
    "a maximum beside a sum": ("max", jnp.maximum, (X, X), "P, P(max) -> P(max)"),
    "fill where a mask holds": (
        "select_n", lambda m, x: jnp.where(m, -7.0, x), (bools(6, 12), X), "R, P, R -> P",
    ),
    "a mask that lies otherwise": (
        "select_n", lambda m, x, y: jnp.where(m, x, y), (bools(6, 12), X, X), "R, S0, S0 -> S0",
    ),
    "data that lies otherwise than the mask": (
        "select_n", lambda m, x, y: jnp.where(m, x, y), (bools(6, 12), X, X), "S0, R, R -> R",
    ),
    "contract a part with the whole": ("dot_general", jnp.dot, MATRICES, "S1, R -> P"),
    "contract the whole with a part": ("dot_general", jnp.dot, MATRICES, "R, S0 -> P"),
    "rows and contracted dim": ("dot_general", jnp.dot, MATRICES, "S0, S0 -> P"),
    "contracted dim and columns": ("dot_general", jnp.dot, MATRICES, "S1, S1 -> P"),
    "a product of sums": ("dot_general", jnp.dot, MATRICES, "P, P -> P"),
    "flatten moves later dims one too far": (
        "reshape", lambda x: x.reshape(6, 36, 6), (f32(6, 6, 6, 6),), "S3 -> S1",
    ),
    "flatten cuts a minor dim": ("reshape", lambda x: x.reshape(72), (X,), "S1 -> S0"),
    "reshape over a boundary": ("reshape", lambda x: x.reshape(4, 6), (f32(6, 4),), "S1 -> S1"),
    "a new last dim before the last": (
        "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (6, 12, 12), (0, 1)), (X,),
        "S1 -> S2",
    ),
    "means of parts": ("reduce_sum", lambda x: x.sum(0), (X,), "S0 -> R"),
    "a norm of terms": ("sqrt", jnp.sqrt, (f32(6, 12, low=0),), "P -> P"),
    "terms summed into one": ("reduce_max", lambda x: x.max(0), (X,), "P -> P"),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("fact", FACTS)
def test_the_row_is_neither_in_the_table_nor_true(fact):
    name, fun, makers, text = FACTS[fact]
    equation = equations(name, Sample(fact, fun, makers))[0]
    row = parse_row(text)
    assert row not in equation.signature().rows
    with pytest.raises(oracle.WrongRow, match=re.escape(f"`{name}` row {row}")):
        assert oracle.check_row(equation, row), "the row could not be tried"


def test_the_sound_neighbours_are_in_the_table():
    for name, fun, makers, text in [
        ("add", lambda x, y: x + y, (X, X), "P, P -> P"),
        ("mul", lambda x, y: x * y, (X, X), "P, R -> P"),
        ("dot_general", jnp.dot, MATRICES, "S1, S0 -> P"),
        ("reshape", lambda x: x.reshape(6, 36, 6), (f32(6, 6, 6, 6),), "S3 -> S2"),
        ("reduce_sum", lambda x: x.sum(0), (X,), "S0 -> P"),
    ]:
        equation = equations(name, Sample(text, fun, makers))[0]
        assert parse_row(text) in equation.signature().rows
        oracle.check_row(equation, parse_row(text))


# ---- whole programs ------------------------------------------------------------------------------

SIZES = (2, 4)


def place(x, placements, mesh):
    """A DTensor with terms of both signs."""
    where = joint(parse_placements(placements))
    parts = simulated.shards(x, where, SIZES, np.random.default_rng(0))
    blocks = np.stack([parts[p] for p in simulated.devices(SIZES)])
    return dt.DTensor.from_local(blocks.reshape(*SIZES, *blocks.shape[1:]), mesh, placements)


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def batch_norm(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def causal_attention(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k)
    seen = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[None, :]
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v


def row_parallel(x, w, b):
    return x @ w + b


PROGRAMS = {
    "softmax of terms": (jax.nn.softmax, [((8, 16), "P,S0")]),
    "softmax over a sharded dim": (jax.nn.softmax, [((8, 16), "S0,S1")]),
    "layer norm of terms": (layer_norm, [((8, 16), "S0,P")]),
    "layer norm over a sharded dim": (layer_norm, [((8, 16), "S0,S1")]),
    "relu of terms": (jax.nn.relu, [((8, 16), "P,P")]),
    "terms and a number": (lambda x: (x + 3.0) ** 2, [((8, 16), "P,R")]),
    "terms by terms": (lambda x: x * x, [((8, 16), "R,P")]),
    "batch norm of a sharded batch": (batch_norm, [((16, 8), "S0,R")]),
    "a mean over both axes": (lambda x: x.mean(), [((16, 8), "S0,S1")]),
    "a row-parallel product with a whole bias": (
        row_parallel, [((8, 16), "S0,S1"), ((16, 8), "R,S0"), ((8,), "R,R")],
    ),
    "causal attention, sharded queries": (
        causal_attention, [((16, 8), "S0,R"), ((16, 8), "R,R"), ((16, 8), "R,R")],
    ),
    "causal attention, sharded keys": (
        causal_attention, [((16, 8), "R,R"), ((16, 8), "S0,R"), ((16, 8), "S0,R")],
    ),
    "a flattened pair of dims before a sharded one": (
        lambda x: x.reshape(4, 8, 8) * 2, [((4, 2, 4, 8), "S0,S3")],
    ),
    "a new last dim": (lambda x: x[..., None] * jnp.ones(3), [((8, 16), "S0,S1")]),
    "a mask that lies otherwise": (
        lambda m, x: jnp.where(m > 0, x, 0), [((8, 16), "R,S1"), ((8, 16), "S0,R")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_equal_one_device(what, mesh24):
    fun, arguments = PROGRAMS[what]
    rng = np.random.default_rng(3)
    arrays = [f32(*shape)(rng) for shape, _ in arguments]
    placed = [place(x, where, mesh24) for x, (_, where) in zip(arrays, arguments, strict=True)]
    found = dt.jit(fun)(*placed)
    np.testing.assert_allclose(np.asarray(found), fun(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "fun", [jnp.exp, jax.nn.relu, lambda x: x + 1.0, lambda x: x * x, lambda x: jnp.clip(x, 0, 1)]
)
def test_terms_are_refused_where_nothing_may_move(fun, mesh24):
    x = place(f32(8, 16)(np.random.default_rng(0)), "P,R", mesh24)
    with pytest.raises(dt.PlacementMismatchError, match="partial sum"):
        dt.jit(fun, redistribute="never")(x)


def test_a_mean_over_uneven_parts_is_the_mean(mesh24):
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    placed = dt.distribute_tensor(x, mesh24, "R,S0")
    np.testing.assert_allclose(dt.jit(lambda x: x.mean())(placed), x.mean())
