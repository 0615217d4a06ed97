"""Random whole-array programs, for tests that hold for every program."""

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (2, 4, 8, 16)


def random_program(rng, equations, wide=False):
    """(function of arrays, their shapes): `equations` operations on float32 arrays of 1-3 dims.

    Dims divide by 2, mostly by 4; `wide` ones are large enough for communication to matter.
    """
    factor = 64 if wide else 1
    shapes = [
        tuple(int(factor * rng.choice(SIZES)) for _ in range(rng.integers(1, 3)))
        for _ in range(rng.integers(1, 3))
    ]
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    steps = []
    while len(steps) < equations:
        step = _step(rng, avals)
        if step is not None:
            operands, fun = step
            steps.append((operands, fun))
            avals.append(jax.eval_shape(fun, *(avals[i] for i in operands)))
    used = {i for operands, _ in steps for i in operands}

    def program(*arrays):
        values = list(arrays)
        for operands, fun in steps:
            values.append(fun(*(values[i] for i in operands)))
        return [v for i, v in enumerate(values) if i >= len(arrays) and i not in used]

    return program, shapes


def _step(rng, avals):
    """(operands, function) of one operation that fits, or None."""
    i = int(rng.integers(len(avals)))
    x = avals[i]
    rank = len(x.shape)
    kind = rng.choice(["unary", "binary", "matmul", "outer", "sum", "max", "transpose", "bias"])
    if kind == "unary":
        return (i,), [jnp.tanh, jnp.negative, lambda x: x * 2.0, jnp.exp][rng.integers(4)]
    if kind == "binary":
        same = [j for j, y in enumerate(avals) if y.shape == x.shape]
        return (i, int(rng.choice(same))), [jnp.add, jnp.multiply, jnp.maximum][rng.integers(3)]
    if kind == "matmul":
        other = [
            j for j, y in enumerate(avals)
            if rank > 1 and len(y.shape) == 2 and y.shape[0] == x.shape[-1]
        ]  # fmt: skip
        return ((i, int(rng.choice(other))), jnp.matmul) if other else None
    if kind == "outer":
        fits = rank == 2 and x.shape[0] <= 1024
        return ((i,), lambda x: jnp.einsum("bi,bo->io", x, jnp.tanh(x))) if fits else None
    if kind in ("sum", "max"):
        axis = int(rng.integers(rank))
        reduce = jnp.sum if kind == "sum" else jnp.max
        return ((i,), lambda x: reduce(x, axis)) if rank > 1 else None
    if kind == "transpose":
        return ((i,), jnp.transpose) if rank > 1 else None
    last = [j for j, y in enumerate(avals) if rank > 1 and y.shape == x.shape[-1:]]
    return ((i, int(rng.choice(last))), jnp.add) if last else None


def random_placements(rng, shape, sizes):
    """One placement per mesh axis, of dims that divide."""
    left, found = list(shape), []
    for n in sizes:
        dims = [d for d, size in enumerate(left) if size % n == 0]
        dim = int(rng.choice([*dims, -1])) if dims else -1
        if dim >= 0:
            left[dim] //= n
        found.append(f"S{dim}" if dim >= 0 else "R")
    return found


def random_arrays(rng, shapes):
    return [np.asarray(rng.normal(size=s), np.float32) for s in shapes]
