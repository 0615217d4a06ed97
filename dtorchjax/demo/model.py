"""The model: a small pre-norm decoder over bytes. Whole-array code, nothing here is sharded."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from dtorchjax import primitives as ops
from dtorchjax.parallel import vocab_parallel_cross_entropy

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 128
    heads: int = 4
    hidden: int = 384
    seq: int = 128
    dropout: float = 0.1


def _kernel(scale: float = 1.0):
    return nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal")


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of q, k and v [batch, seq, heads, head]."""
    return ops.scaled_dot_product_attention(q, k, v, causal=True)


class Norm(nnx.Module):
    """Root mean square normalisation of the last dim."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return ops.rms_norm(x, self.scale[...])


class Attention(nnx.Module):
    """Causal self-attention. The fused kernel is [width, 3, heads, head]: q, k and v lie on a dim
    of their own, so that sharding the heads gives each device whole heads of all three."""

    def __init__(self, c: Config, rngs: nnx.Rngs, attend: Attend):
        head = c.width // c.heads
        self.attend = attend
        self.qkv = nnx.LinearGeneral(
            c.width, (3, c.heads, head), use_bias=False, kernel_init=_kernel(), rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (c.heads, head),
            c.width,
            axis=(-2, -1),
            use_bias=False,
            kernel_init=_kernel(0.5 / c.layers),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(x)
        q, k, v = (qkv[:, :, i] for i in range(3))
        positions = jnp.arange(x.shape[1])
        q, k = (ops.rotary_embedding(y, positions) for y in (q, k))
        return self.out(self.attend(q, k, v))


class MLP(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        def linear(n, m, scale=1.0):
            return nnx.Linear(n, m, use_bias=False, kernel_init=_kernel(scale), rngs=rngs)

        self.gate, self.up = linear(c.width, c.hidden), linear(c.width, c.hidden)
        self.down = linear(c.hidden, c.width, 0.5 / c.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ops.swiglu(self.gate(x), self.up(x)))


class Block(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs, attend: Attend):
        self.attention_norm, self.mlp_norm = Norm(c.width), Norm(c.width)
        self.attention, self.mlp = Attention(c, rngs, attend), MLP(c, rngs)
        self.dropout = c.dropout

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + self._drop(self.attention(self.attention_norm(x)), keys[0])
        return x + self._drop(self.mlp(self.mlp_norm(x)), keys[1])

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return ops.dropout(x, key, rate=self.dropout, deterministic=key is None)


class GPT(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs, attend: Attend = attend):
        self.embed = nnx.Embed(
            VOCABULARY, c.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.layers = nnx.List([Block(c, rngs, attend) for _ in range(c.layers)])
        self.norm = Norm(c.width)
        # Small, so that training starts from near-uniform guesses: ln 256 = 5.55 nats per byte.
        self.head = nnx.Linear(
            c.width, VOCABULARY, use_bias=False, kernel_init=_kernel(0.02), rngs=rngs
        )

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [batch, seq, 256] of tokens [batch, seq]; dropout is on where a key is given."""
        x = self.embed(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return self.head(self.norm(x))


def init(c: Config, seed: int, attend: Attend = attend):
    """(graph, parameters): the parameters as nested dicts of arrays, so that paths are readable."""
    graph, state = nnx.split(GPT(c, nnx.Rngs(seed), attend), nnx.Param)
    return graph, nnx.to_pure_dict(state)


def loss(graph, params, batch: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats per byte; batch is [batch, seq + 1]."""
    logits = nnx.merge(graph, params)(batch[:, :-1], key)
    return vocab_parallel_cross_entropy(logits, batch[:, 1:]).mean()


def sample(graph, params, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> bytes:
    """`length` bytes that follow the prompt. Each one costs a whole forward pass: simple, and cheap
    enough at this size."""
    start = len(prompt)
    tokens = jnp.zeros((1, start + length), jnp.int32).at[0, :start].set(jnp.array([*prompt]))

    def body(i, tokens):
        logits = nnx.merge(graph, params)(tokens)[0, i - 1] / temperature
        byte = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), i), logits)
        return tokens.at[0, i].set(byte)

    run = jax.jit(lambda tokens: jax.lax.fori_loop(start, start + length, body, tokens))
    return bytes(run(tokens)[0].tolist())
