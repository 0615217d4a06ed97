"""Training steps as people write them, small: values, no replicated work, bytes as planned."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp
from test_programs import check, normal, same

import dtorchjax as dt

LAYERS, WIDTH, HIDDEN, HEADS, WORDS, LENGTH, BATCH = 2, 32, 64, 4, 64, 16, 8


def check_step(step, args, mesh, where, out):
    return check(step, args, mesh, where, out, tolerance=2e-5, divided=True)


def gpt():
    key = jax.random.split(jax.random.key(0), 5)
    shapes = dict(
        embed=(WORDS, WIDTH),
        qkv=(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
        out=(LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        up=(LAYERS, WIDTH, HIDDEN),
        down=(LAYERS, HIDDEN, WIDTH),
    )
    params = {
        n: jax.random.normal(k, s) * 0.2 for k, (n, s) in zip(key, shapes.items(), strict=True)
    }
    return params | dict(scale=jnp.ones((LAYERS, 2, WIDTH)))


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def gpt_loss(params, tokens):
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def block(x, p):
        q, k, v = jnp.einsum("bsd,dchk->cbshk", rms(x, p["scale"][0]), p["qkv"])
        scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(WIDTH // HEADS)
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        x = x + jnp.einsum("bhst,bthk,hkd->bsd", scores, v, p["out"])
        return x + jax.nn.gelu(rms(x, p["scale"][1]) @ p["up"]) @ p["down"], None

    stacked = {n: p for n, p in params.items() if n != "embed"}
    x, _ = lax.scan(block, params["embed"][tokens], stacked)
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def sgd(params, tokens):
    loss, grads = jax.value_and_grad(gpt_loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def accumulate(params, tokens):
    def body(total, batch):
        loss, grads = jax.value_and_grad(gpt_loss)(params, batch)
        return (jax.tree.map(jnp.add, total[0], grads), total[1] + loss), None

    zero = jax.tree.map(jnp.zeros_like, params), 0.0
    (grads, loss), _ = lax.scan(body, zero, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g / len(tokens), params, grads), loss


def tokens(*shape):
    return jax.random.randint(jax.random.key(1), shape, 0, WORDS)


PLACEMENTS = {
    "megatron": dict(embed="R,S0", qkv="R,S3", out="R,S1", up="R,S2", down="R,S1", scale="R"),
    "fsdp_tp": dict(
        embed="S1,S0", qkv="S1,S3", out="S3,S1", up="S1,S2", down="S2,S1", scale="S2,R"
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PLACEMENTS)
def test_gpt_step_on_two_axes(mesh24, name):
    where = PLACEMENTS[name]
    check_step(sgd, (gpt(), tokens(BATCH, LENGTH)), mesh24, (where, ["S0", "R"]), (where, "R"))


def test_gpt_step_with_sharded_parameters(mesh8):
    where = dict(embed="S1", qkv="S1", out="S3", up="S1", down="S2", scale="S2")
    check_step(sgd, (gpt(), tokens(BATCH, LENGTH)), mesh8, (where, "S0"), (where, "R"))


def test_gpt_accumulation(mesh8):
    where = jax.tree.map(lambda _: "R", gpt())
    args = gpt(), tokens(4, BATCH, LENGTH)
    _, plan = check_step(accumulate, args, mesh8, (where, "S1"), (where, "R"))
    assert all(c.times == 1 for c in plan.collectives), "gradients are reduced once, after the loop"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)

    def __call__(self, x, key):
        h = nnx.gelu(self.up(self.norm(x)))
        return x + self.down(self.dropout(h, rngs=key))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, ids, key):
        return self.embed.attend(self.norm(self.block(self.embed(ids), key)))


def nnx_step():
    """Parameters, optimizer state and a step: AdamW, clipping, a schedule, dropout."""
    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule))

    def step(params, state, ids, key):
        def loss(params):
            logits = nnx.merge(graph, params)(ids, key)
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return params, optimizer.init(params), step


PATHS = {
    "*": "R",
    "*embedding": {"tp": "S0"},
    "*up/kernel": {"tp": "S1"},
    "*down/kernel": {"tp": "S0"},
}


@pytest.mark.smoke
@pytest.mark.parametrize("paths", [PATHS, {"*": "R"}, {**PATHS, "*up/kernel": "S0,S1"}])
def test_flax_and_optax(mesh24, paths):
    params, state, step = nnx_step()
    ids = tokens(BATCH, LENGTH)
    placed = dt.distribute(params, mesh24, dt.by_path(paths))
    placed_state = dt.distribute(state, mesh24, dt.by_path(paths))
    batch = dt.distribute_tensor(ids, mesh24, {"dp": "S0"})
    compiled, traces = dt.jit(step), []
    reference = jax.jit(step)
    for i in range(3):
        key = jax.random.key(i)
        params, state, loss = reference(params, state, ids, key)
        placed, placed_state, value = compiled(placed, placed_state, batch, key)
        traces.append(len(set(compiled.programs.values())))
        assert isinstance(value, dt.DTensor) and np.isclose(float(value), float(loss), rtol=1e-5)
    assert traces == [1, 1, 1]
    same(placed, params, 1e-4)
    assert all(w.placements == v.placements for w, v in zip(
        jax.tree.leaves(placed_state, is_leaf=lambda t: isinstance(t, dt.DTensor)),
        jax.tree.leaves(dt.distribute(state, mesh24, dt.by_path(paths)),
                        is_leaf=lambda t: isinstance(t, dt.DTensor)),
        strict=True))  # fmt: skip


def test_plain_arrays_stay_plain(mesh24):
    w = normal(0, 8, 8)
    assert type(dt.jit(lambda w: w @ w, mesh=mesh24)(w)) is type(w)


def test_small_reductions_are_merged(mesh8):
    """Forty small parameters, their gradients' norm and the loss: a handful of collectives."""
    params = {f"scale{i}": normal(i, 16) for i in range(40)}

    def step(params, x):
        def loss(params):
            h = x
            for scale in params.values():
                h = jnp.tanh(h * scale)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
        factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        return jax.tree.map(lambda p, g: p - 0.1 * factor * g, params, grads), value

    where = jax.tree.map(lambda _: "R", params)
    _, plan = check(step, (params, normal(1, 4096, 16)), mesh8, (where, "S0"), (where, "R"), 2e-5)
    assert len(plan.collectives) <= 4, plan.table()
    assert any("other small reductions" in c.why for c in plan.collectives)
