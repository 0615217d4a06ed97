"""Training steps of a small GPT: dt.jit, jax.jit and hand-written shard_map, side by side.

    python tests/benchmarks/training_steps.py [--markdown]

Eight simulated CPU devices. Per program: bytes that one device sends (from the optimized HLO),
GFLOP and MB of temporary memory per device (from XLA), seconds to plan and to compile, milliseconds
of a step (median of interleaved rounds; ratios say more than times on a shared machine).
"""

from __future__ import annotations

import argparse
import statistics
import time

import dtorchjax as dt

dt.simulate_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from dtorchjax import hlo  # noqa: E402

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 256, 1024, 8, 1024, 128, 8
ROUNDS = 9


# ---- the program, on whole arrays ----------------------------------------------------------------


def parameters():
    rng = np.random.default_rng(0)
    head = WIDTH // HEADS
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.02, jnp.float32)  # noqa: E731
    return dict(
        table=normal(VOCABULARY, WIDTH),
        attention_in=normal(LAYERS, 3, WIDTH, HEADS, head),
        attention_out=normal(LAYERS, HEADS, head, WIDTH),
        up=normal(LAYERS, WIDTH, HIDDEN),
        down=normal(LAYERS, HIDDEN, WIDTH),
        scales=jnp.ones((LAYERS, 2, WIDTH)),
    )


def normalised(x, scale):
    return x * scale * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def layer(x, w):
    heads = jnp.einsum("bsd,cdhk->cbhsk", normalised(x, w["scales"][0]), w["attention_in"])
    queries, keys, values = heads
    scores = queries @ keys.mT / np.sqrt(WIDTH // HEADS)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1) @ values
    x = x + jnp.einsum("bhsk,hkd->bsd", mixed, w["attention_out"])
    return x + jax.nn.gelu(normalised(x, w["scales"][1]) @ w["up"]) @ w["down"]


def loss(p, tokens):
    x = p["table"][tokens]
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, stacked(p))
    return cross_entropy(x @ p["table"].T, tokens)


def stacked(p):
    return {name: w for name, w in p.items() if name != "table"}


def cross_entropy(logits, tokens):
    logs = jax.nn.log_softmax(logits, -1)
    return -jnp.mean(jnp.take_along_axis(logs, tokens[..., None], -1))


def descend(p, gradient):
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient)


def step(p, tokens):
    value, gradient = jax.value_and_grad(loss)(p, tokens)
    return descend(p, gradient), value


# ---- by hand: fully sharded parameters, gathered layer by layer, again for the backward pass -----

SHARDED = dict(table=1, attention_in=2, attention_out=3, up=1, down=2, scales=2)


def fsdp_by_hand(p, tokens):
    def gather(name, w, less=0):
        return lax.all_gather(w, "dp", axis=SHARDED[name] - less, tiled=True)

    def local_loss(p, tokens):
        table = gather("table", p["table"])
        whole = lambda w: {name: gather(name, part, 1) for name, part in w.items()}  # noqa: E731
        block = jax.checkpoint(lambda x, w: (layer(x, whole(w)), None))
        x, _ = lax.scan(block, table[tokens], stacked(p))
        return cross_entropy(x @ table.T, tokens) / 8

    value, gradient = jax.value_and_grad(local_loss)(p, tokens)
    return descend(p, gradient), lax.psum(value, "dp")


# ---- placements ----------------------------------------------------------------------------------

MEGATRON = dict(
    table=["R", "S0"], attention_in=["R", "S3"], attention_out=["R", "S1"], up=["R", "S2"],
    down=["R", "S1"], scales=["R", "R"],
)  # fmt: skip
FSDP = {name: [f"S{dim}"] for name, dim in SHARDED.items()}
BOTH = {
    name: [f"S{SHARDED[name]}", MEGATRON[name][1]]
    for name in SHARDED
} | dict(table=["S1", "S0"])  # fmt: skip
PROGRAMS = {
    "data and tensor parallel, 2x4": ((2, 4), MEGATRON, None, None),
    "fully sharded, 8": ((8,), FSDP, None, None),
    "fully sharded, 8, memory_limit=14e6": ((8,), FSDP, 14e6, fsdp_by_hand),
    "fully sharded and tensor parallel, 2x4": ((2, 4), BOTH, None, None),
}


def sharding(mesh, placements):
    dims = {int(p[1:]): [] for p in placements if p != "R"}
    for name, p in zip(mesh.axis_names, placements, strict=True):
        if p != "R":
            dims[int(p[1:])].append(name)
    rank = max(dims, default=-1) + 1
    return NamedSharding(mesh, PartitionSpec(*(tuple(dims[d]) if d in dims else None
                                               for d in range(rank))))  # fmt: skip


def measure(shape, where, limit, by_hand):
    """{who: figures} of one program."""
    mesh = dt.init_device_mesh(shape, ("dp", "tp")[: len(shape)])
    batch = ["S0", "R"][: len(shape)]
    p = parameters()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, SEQUENCE)))
    shardings = {name: sharding(mesh, w) for name, w in where.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.device_put(p, shardings), jax.device_put(tokens, sharding(mesh, batch))

    start = time.perf_counter()
    ours = dt.jit(
        step, mesh=mesh, in_placements=(where, batch), memory_limit=limit,
        out_placements=(where, ["R"] * len(shape)),
    )  # fmt: skip
    plan = ours.explain(*args)
    planned = time.perf_counter() - start
    peers = {"dt.jit": ours, "jax.jit": jax.jit(step, out_shardings=(shardings, whole))}
    if by_hand is not None:
        specs = {name: s.spec for name, s in shardings.items()}, sharding(mesh, batch).spec
        peers["by hand"] = jax.jit(
            jax.shard_map(
                by_hand, mesh=mesh, in_specs=specs, out_specs=(specs[0], PartitionSpec()),
                check_vma=False,
            )
        )  # fmt: skip
    found, expected = {}, jax.jit(step)(p, tokens)
    for who, fun in peers.items():
        start = time.perf_counter()
        compiled = fun.lower(*args).compile()
        seconds = time.perf_counter() - start
        for a, b in zip(jax.tree.leaves(fun(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
        found[who] = dict(
            sent=hlo.collective_bytes(compiled.as_text()) / 1e6,
            work=compiled.cost_analysis()["flops"] / 1e9,
            memory=compiled.memory_analysis().temp_size_in_bytes / 1e6,
            plan=planned if who == "dt.jit" else 0.0,
            compile=seconds,
        )
    plan.verify(ours.lower(*args).compile())
    times: dict[str, list[float]] = {who: [] for who in peers}
    for _ in range(ROUNDS):
        for who, fun in peers.items():
            start = time.perf_counter()
            jax.block_until_ready(fun(*args))
            times[who].append(time.perf_counter() - start)
    for who, samples in times.items():
        found[who]["step"] = 1e3 * statistics.median(samples)
    return found


COLUMNS = (
    ("sent", "MB sent", ".2f"), ("work", "GFLOP", ".2f"), ("memory", "temp MB", ".1f"),
    ("plan", "plan s", ".1f"), ("compile", "compile s", ".1f"), ("step", "step ms", ".0f"),
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    markdown = parser.parse_args().markdown
    titles = ["program", "who", *(title for _, title, _ in COLUMNS)]
    if markdown:
        print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    else:
        print(f"{titles[0]:40}{titles[1]:9}" + "".join(f"{t:>11}" for t in titles[2:]))
    for name, program in PROGRAMS.items():
        for who, row in measure(*program).items():
            cells = [format(row[key], form) for key, _, form in COLUMNS]
            if markdown:
                print("| " + " | ".join([name, who, *cells]) + " |", flush=True)
            else:
                print(f"{name:40}{who:9}" + "".join(f"{c:>11}" for c in cells), flush=True)
    print(f"\njax {jax.__version__}, {jax.devices()[0].device_kind}, 8 simulated devices")


if __name__ == "__main__":
    main()
