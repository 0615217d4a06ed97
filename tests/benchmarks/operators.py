"""Compiled times of operators, forward and backward, beside jax.nn, optax or the obvious form.

`python tests/benchmarks/operators.py [names]` prints a table: medians of runs that alternate, so
that a busy machine slows both, and their ratio. Also the temporary memory of attention.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import numpy as np
import optax
from jax import numpy as jnp

from dtorchjax import ops

RUNS = 15
BIG = (2048, 4096)
random = np.random.default_rng(0)


def floats(*shape: int):
    return jnp.asarray(random.normal(size=shape), jnp.float32)


x, y = floats(*BIG), floats(*BIG)
scale, bias = floats(BIG[1]), floats(BIG[1])
image = floats(16, 64, 64, 64)
labels = jnp.asarray(random.integers(0, BIG[1], BIG[0]))


def layer_norm(x, s, b):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * s + b


def rms_norm(x, s):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * s


def group_norm(x):
    parts = x.reshape(*x.shape[:-1], 8, -1)
    mean, var = parts.mean((1, 2, 4), keepdims=True), parts.var((1, 2, 4), keepdims=True)
    return ((parts - mean) * jax.lax.rsqrt(var + 1e-6)).reshape(x.shape)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


qkv = [floats(2, 1024, 8, 64) for _ in range(3)]
CASES = {
    "softmax": (ops.softmax, jax.nn.softmax, [x]),
    "log_softmax": (ops.log_softmax, jax.nn.log_softmax, [x]),
    "logsumexp": (
        lambda x: ops.logsumexp(x, axis=-1), lambda x: jax.nn.logsumexp(x, -1), [x]
    ),
    "gelu": (ops.gelu, jax.nn.gelu, [x]),
    "gelu exact": (
        lambda x: ops.gelu(x, approximate=False), lambda x: jax.nn.gelu(x, False), [x]
    ),
    "silu": (ops.silu, jax.nn.silu, [x]),
    "relu": (ops.relu, jax.nn.relu, [x]),
    "elu": (ops.elu, jax.nn.elu, [x]),
    "softplus": (ops.softplus, jax.nn.softplus, [x]),
    "sigmoid": (ops.sigmoid, jax.nn.sigmoid, [x]),
    "mish": (ops.mish, jax.nn.mish, [x]),
    "layer_norm": (ops.layer_norm, layer_norm, [x, scale, bias]),
    "rms_norm": (ops.rms_norm, rms_norm, [x, scale]),
    "group_norm": (lambda x: ops.group_norm(x, groups=8), group_norm, [image]),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, labels),
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean(), [x],
    ),
    "bce_with_logits": (
        lambda x, y: ops.bce_with_logits(x, y),
        lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean(), [x, y],
    ),
    "huber_loss": (
        lambda x, y: ops.huber_loss(x, y), lambda x, y: optax.huber_loss(x, y).mean(), [x, y]
    ),
    "p_norm": (
        lambda x: ops.p_norm(x, axis=-1), lambda x: jnp.linalg.norm(x, axis=-1), [x]
    ),
    "std": (lambda x: ops.std(x, axis=-1), lambda x: x.std(-1), [x]),
    "cosine": (ops.cosine_similarity, optax.cosine_similarity, [x, y]),
    "attention": (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, causal=True), attention, qkv
    ),
}  # fmt: skip


def both_ways(fun):
    """(the forward pass, both passes for a cotangent that is given), compiled."""

    def passes(g, *xs):
        out, pull = jax.vjp(fun, *xs)
        return out, pull(g)

    return jax.jit(lambda g, *xs: fun(*xs)), jax.jit(passes)


def with_cotangent(fun, xs):
    out = jax.eval_shape(fun, *xs)
    return [floats(*out.shape).astype(out.dtype), *xs]


def seconds(fun, xs) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fun(*xs))
    return time.perf_counter() - start


def compared(ours, theirs, xs) -> tuple[float, float]:
    for fun in (ours, theirs):
        seconds(fun, xs)
    pairs = [(seconds(ours, xs), seconds(theirs, xs)) for _ in range(RUNS)]
    return tuple(statistics.median(column) for column in zip(*pairs, strict=True))


def attention_memory(length: int = 16384) -> tuple[int, int]:
    """Temporary bytes of causal attention and its gradients: ours, and with all scores."""
    shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)

    def temporary(fun) -> int:
        compiled = both_ways(fun)[1].lower(*[shape] * 4).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    return temporary(CASES["attention"][0]), temporary(whole)


def main(names: list[str]) -> None:
    print(
        f"{'':18}{'forward ms':>12}{'theirs':>8}{'ratio':>7}{'gradient ms':>14}{'theirs':>8}ratio"
    )
    for name, (ours, theirs, xs) in CASES.items():
        if names and name not in names:
            continue
        line = f"{name:18}"
        for a, b in zip(both_ways(ours), both_ways(theirs), strict=True):
            mine, other = compared(a, b, with_cotangent(ours, xs))
            line += f"{mine * 1e3:12.1f}{other * 1e3:8.1f}{mine / other:7.2f}"
        print(line, flush=True)
    if not names or "memory" in names:
        mine, other = attention_memory()
        print(
            f"attention at 16384: {mine / 1e6:.0f} MB beside {other / 1e6:.0f}: {mine / other:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
