"""What an eager call of a dfunction costs beside the same jitted shard_map, on 8 simulated devices.

    python tests/benchmarks/eager_dfunction.py

Both run the same local function on arrays that lie as it takes them; calls alternate, medians are
compared. Prints microseconds per call and their ratio for three sizes.
"""

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import dtorchjax as dt


@dt.dfunction(rule="b i, i o -> b o")
def linear(x, w):
    return jnp.tanh(x @ w)


def main() -> None:
    mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    by_hand = jax.jit(
        jax.shard_map(
            linear.fun, mesh=mesh, check_vma=False, out_specs=PartitionSpec("dp", "tp"),
            in_specs=(PartitionSpec("dp"), PartitionSpec(None, "tp")),
        )
    )  # fmt: skip
    for size in (64, 256, 1024):
        x = dt.distribute_tensor(jnp.ones((size, size)), mesh, "S0,R")
        w = dt.distribute_tensor(jnp.ones((size, size)), mesh, "R,S1")
        plain = x.to_array(), w.to_array()
        times: tuple[list[float], list[float]] = [], []
        for i in range(1200):
            for run, args, found in ((linear, (x, w), times[0]), (by_hand, plain, times[1])):
                start = time.perf_counter()
                jax.block_until_ready(run(*args))
                if i >= 200:
                    found.append(time.perf_counter() - start)
        ours, theirs = (statistics.median(t) * 1e6 for t in times)
        print(f"{size:5}  {ours:8.1f} us  {theirs:8.1f} us  ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
