"""Equations in stated rows on real meshes, and the batch dims that no primitive may send for."""

import jax
import pytest
from rotation import ROTATION, today
from row_programs import NAMES, check, programs
from samples import SAMPLES, sampled

import dtorchjax as dt

UNBATCHED = {  # primitive: samples whose batch is no batch
    "random_bits": ("rbg", "a batch of rbg keys"),  # these bits depend on the whole batch
    "random_fold_in": ("rbg batch",),
    "random_split": ("rbg batch",),
    "rng_bit_generator": ("default",),
    "ragged_dot_general": ("a batch", "groups of each"),  # jax cannot vmap these
    "reduce": ("of two", "no sum"),
    "reduce_window": ("products", "of two"),
}


@pytest.mark.parametrize("name", today(sorted(SAMPLES), 3))
def test_a_batch_dim_sends_nothing(name):
    """Under jax.vmap over a dim that is sharded everywhere, in strict mode."""
    mesh = dt.init_device_mesh((2,), ("a",))
    for label, equation in sampled(name).items():
        if not equation.in_avals or label in UNBATCHED.get(name, ()):
            continue
        batch = [jax.ShapeDtypeStruct((6, *a.shape), a.dtype) for a in equation.in_avals]
        fun = jax.vmap(lambda *xs, e=equation: e.bind(None, *xs))
        results = [["S0"]] * len(equation.out_avals)
        step = dt.jit(
            fun, mesh=mesh, in_placements=[["S0"]] * len(batch), out_placements=results,
            redistribute="never",
        )  # fmt: skip
        plan = step.explain(*batch)
        assert plan.bytes_per_device == 0, (label, plan.table())


def test_programs_of_stated_rows():
    for sizes, pieces in programs(ROTATION, NAMES[ROTATION % 24 :: 24]):
        assert check(sizes, pieces)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_every_row_on_a_mesh(number):
    for sizes, pieces in programs(number):
        assert check(sizes, pieces)
