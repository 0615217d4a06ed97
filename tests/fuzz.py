"""Random whole-array programs, compared with one device; `python tests/fuzz.py 200 --seed 7`.

A program is a list of steps, each a function of values that were made before, so what fails is
made small by keeping only what the first wrong value is made of.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import dtorchjax as dt

MESHES = (((8,), ("a",)), ((2, 4), ("a", "b")), ((3,), ("a",)), ((2, 3), ("a", "b")))
SIZES = (1, 2, 3, 4, 5, 6, 8, 12)
MOST = 4000
"""Elements of a value."""


@dataclasses.dataclass(eq=False)
class Step:
    name: str
    fun: Callable[..., Any]
    operands: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Program:
    """`inputs` arrays, then a value per step; the last values are the results."""

    inputs: list[np.ndarray]
    steps: list[Step]
    results: list[int]

    def __call__(self, *xs: Any) -> list[Any]:
        values = list(xs)
        for step in self.steps:
            values.append(step.fun(*(values[i] for i in step.operands)))
        return [values[i] for i in self.results]

    def only(self, result: int) -> Program:
        """What one value is made of."""
        n, wanted, stack = len(self.inputs), set(), [result]
        while stack:
            i = stack.pop()
            if i not in wanted:
                wanted.add(i)
                stack += self.steps[i - n].operands if i >= n else ()
        kept = [i for i in range(n, n + len(self.steps)) if i in wanted]
        new = {i: i for i in range(n)} | {old: n + k for k, old in enumerate(kept)}
        steps = [
            Step(s.name, s.fun, tuple(new[i] for i in s.operands))
            for s in (self.steps[i - n] for i in kept)
        ]
        return Program(self.inputs, steps, [new[result]])

    def __str__(self) -> str:
        n = len(self.inputs)
        lines = [f"v{i}: {x.dtype}{list(x.shape)}" for i, x in enumerate(self.inputs)]
        lines += [
            f"v{n + k} = {s.name}({', '.join(f'v{i}' for i in s.operands)})"
            for k, s in enumerate(self.steps)
        ]
        return "\n".join([*lines, f"-> {', '.join(f'v{i}' for i in self.results)}"])


# ---- steps: each gets a source of choices and a value, and says what to do, or nothing -----------


class Choices:
    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def of(self, items: Any) -> Any:
        items = list(items)
        return items[int(self.random.integers(len(items)))]

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def array(self, *shape: int) -> np.ndarray:
        return (self.random.integers(-8, 9, shape) / 4).astype(np.float32)


def on_dim(fun: Callable[..., Any]) -> Callable[[Choices, Any], Any]:
    """A step that works along one dim."""

    def make(c: Choices, x: Any) -> Any:
        if not x.ndim or 0 in x.shape:
            return None
        dim = c.number(0, x.ndim - 1)
        return fun(c, x, dim)

    return make


def cut(c: Choices, x: Any, d: int) -> Any:
    start = c.number(0, x.shape[d] - 1)
    stop, step = c.number(start + 1, x.shape[d]), c.number(1, 2)
    return lambda v: lax.slice_in_dim(v, start, stop, step, d)


def padded(c: Choices, x: Any, d: int) -> Any:
    low, high = c.number(-1, 3), c.number(0, 3)
    if x.shape[d] + low + high < 1:
        return None
    config = [(low, high, 0) if k == d else (0, 0, 0) for k in range(x.ndim)]
    return lambda v: lax.pad(v, jnp.float32(1.5), config)


def joined(c: Choices, x: Any, d: int) -> Any:
    count = c.number(2, 3)
    return lambda v: jnp.concatenate([v * k for k in range(1, count + 1)], d)


def halves(c: Choices, x: Any, d: int) -> Any:
    if x.shape[d] < 2:
        return None
    at = c.number(1, x.shape[d] - 1)
    return lambda v: jnp.split(v, [at], d)[1]


def taken(c: Choices, x: Any, d: int) -> Any:
    index = c.random.integers(-1, x.shape[d] + 1, c.number(1, 9))
    return lambda v: jnp.take(v, index, d, mode="fill", fill_value=2.0)


def added(c: Choices, x: Any, d: int) -> Any:
    index = c.random.integers(0, x.shape[d], c.number(1, 5))
    rows = c.array(len(index), *x.shape[:d], *x.shape[d + 1 :])
    kind = c.of(["add", "max", "set"])
    if kind == "set":
        index = np.unique(index)
        rows = rows[: len(index)]

    def fun(v: Any) -> Any:
        moved = jnp.moveaxis(v, d, 0)
        return jnp.moveaxis(getattr(moved.at[index], kind)(rows), 0, d)

    return fun


def window_at(c: Choices, x: Any, d: int) -> Any:
    size, start = c.number(1, x.shape[d]), c.number(-2, x.shape[d] + 1)
    return lambda v: lax.dynamic_slice_in_dim(v, jnp.int32(start) + v.size * 0, size, d)


def written(c: Choices, x: Any, d: int) -> Any:
    size, start = c.number(1, x.shape[d]), c.number(-2, x.shape[d] + 1)
    update = c.array(*(size if k == d else n for k, n in enumerate(x.shape)))
    return lambda v: lax.dynamic_update_slice_in_dim(v, update, start, d)


def regrouped(c: Choices, x: Any) -> Any:
    if x.ndim < 1 or 0 in x.shape:
        return None
    kind = c.of(["ravel", "merge", "split", "ones"])
    if kind == "merge" and x.ndim > 1:
        d = c.number(0, x.ndim - 2)
        shape = (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
    elif kind == "split":
        d = c.number(0, x.ndim - 1)
        a = c.of([k for k in range(1, x.shape[d] + 1) if x.shape[d] % k == 0])
        shape = (*x.shape[:d], a, x.shape[d] // a, *x.shape[d + 1 :])
    else:
        shape = (-1,) if kind == "ravel" else (1, *x.shape)
    return lambda v: v.reshape(shape)


def product(c: Choices, x: Any) -> Any:
    if x.ndim < 1:
        return None
    d = c.number(0, x.ndim - 1)
    w = c.array(x.shape[d], c.of(SIZES)) / 8
    return lambda v: jnp.tensordot(v, w, ((d,), (0,)))


def gram(c: Choices, x: Any, d: int) -> Any:
    return lambda v: jnp.tensordot(v, v, ((d,), (d,))) / 16 if v.ndim < 3 else v


def convolved(c: Choices, x: Any, d: int) -> Any:
    size, stride = c.number(1, 3), c.number(1, 2)
    if x.shape[d] < size:
        return None
    kernel, padding = c.array(size, 1, 1), c.of(["SAME", "VALID"])

    def fun(v: Any) -> Any:
        lines = jnp.moveaxis(v, d, -1)
        flat = lines.reshape(-1, v.shape[d], 1)
        out = lax.conv_general_dilated(
            flat, kernel, (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.moveaxis(out.reshape(*lines.shape[:-1], out.shape[1]), -1, d)

    return fun


def pooled(c: Choices, x: Any, d: int) -> Any:
    size, stride, padding = c.number(1, 3), c.number(1, 2), c.of(["SAME", "VALID"])
    if x.shape[d] < size:
        return None
    window = [size if k == d else 1 for k in range(x.ndim)]
    strides = [stride if k == d else 1 for k in range(x.ndim)]
    start, combine = c.of([(-jnp.inf, lax.max), (0.0, lax.add)])
    return lambda v: lax.reduce_window(v, start, combine, window, strides, padding)


def scanned(c: Choices, x: Any, d: int) -> Any:
    reverse = c.of([True, False])

    def fun(v: Any) -> Any:
        rows = jnp.moveaxis(v, d, 0)
        last, out = lax.scan(
            lambda s, row: (jnp.tanh(s + row), s * row), jnp.zeros_like(rows[0]), rows,
            reverse=reverse,
        )  # fmt: skip
        return jnp.moveaxis(out + last, 0, d)

    return fun


def branched(c: Choices, x: Any) -> Any:
    which = c.number(0, 1)
    return lambda v: lax.cond(v.sum() * 0 + which > 0.5, lambda v: v * 2, lambda v: v - v.mean(), v)


def looped(c: Choices, x: Any) -> Any:
    times = c.number(1, 3)
    return lambda v: lax.fori_loop(0, times, lambda i, y: jnp.sin(y) + i, v)


def drawn(c: Choices, x: Any) -> Any:
    seed = c.number(0, 99)
    return lambda v: v + jax.random.normal(jax.random.key(seed), v.shape)


def greatest(x: Any, dim: int, k: int) -> Any:
    return jnp.moveaxis(lax.top_k(jnp.moveaxis(x, dim, -1), k)[0], -1, dim)


SHAPE_KEEPING = {
    "tanh": jnp.tanh, "abs": jnp.abs, "exp": lambda v: jnp.exp(-jnp.abs(v)), "square": jnp.square,
    "negative": jnp.negative, "logistic": jax.nn.sigmoid, "where": lambda v: jnp.where(v > 0, v, 1),
    "double": lambda v: 2 * v, "floor": jnp.floor,
}  # fmt: skip
STEPS: dict[str, Callable[[Choices, Any], Any]] = {
    **{name: (lambda c, x, fun=fun: fun) for name, fun in SHAPE_KEEPING.items()},
    "slice": on_dim(cut), "pad": on_dim(padded), "concatenate": on_dim(joined),
    "split": on_dim(halves), "take": on_dim(taken), "scatter": on_dim(added),
    "dynamic_slice": on_dim(window_at), "dynamic_update_slice": on_dim(written),
    "reshape": regrouped, "product": product, "gram": on_dim(gram), "conv": on_dim(convolved),
    "window": on_dim(pooled), "scan": on_dim(scanned), "cond": branched, "loop": looped,
    "random": drawn,
    "transpose": lambda c, x: partial(jnp.transpose, axes=tuple(c.random.permutation(x.ndim))),
    "flip": on_dim(lambda c, x, d: lambda v: jnp.flip(v, d)),
    "roll": on_dim(lambda c, x, d: partial(jnp.roll, shift=c.number(1, 3), axis=d)),
    "sum": on_dim(lambda c, x, d: lambda v: v.sum(d) / 4),
    "mean": on_dim(lambda c, x, d: lambda v: v.mean(d, keepdims=True)),
    "max": on_dim(lambda c, x, d: lambda v: v.max(d)),
    "min": on_dim(lambda c, x, d: lambda v: v.min(d)),
    "softmax": on_dim(lambda c, x, d: lambda v: jax.nn.softmax(v, d)),
    "logsumexp": on_dim(lambda c, x, d: lambda v: jax.nn.logsumexp(v, d)),
    "cumsum": on_dim(lambda c, x, d: lambda v: jnp.cumsum(v, d) / 4),
    "cummax": on_dim(lambda c, x, d: partial(lax.cummax, axis=d, reverse=c.of([True, False]))),
    "sort": on_dim(lambda c, x, d: lambda v: jnp.sort(v, d)),
    "argmax": on_dim(lambda c, x, d: lambda v: jnp.argmax(v, d).astype(jnp.float32)),
    "top_k": on_dim(lambda c, x, d: partial(greatest, dim=d, k=c.number(1, x.shape[d]))),
}  # fmt: skip
PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "maximum": jnp.maximum,
    "where 2": lambda a, b: jnp.where(a > b, a, b / 2),
}  # fmt: skip


def random_program(seed: int, most: int = 30) -> Program:
    """Five to `most` steps on arrays of 1 to 3 dims."""
    c = Choices(seed)
    inputs = [c.array(*(c.of(SIZES) for _ in range(c.number(1, 3)))) for _ in range(c.number(1, 3))]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    steps: list[Step] = []
    wanted = c.number(5, most)
    for _ in range(10 * wanted):
        if len(steps) == wanted:
            break
        i = len(types) - 1 - min(int(c.random.geometric(0.4)) - 1, len(types) - 1)
        alike = [j for j, t in enumerate(types) if t.shape == types[i].shape and j != i]
        if alike and c.number(0, 3) == 0:
            name, operands = c.of(PAIRS), (i, c.of(alike))
            fun: Any = PAIRS[name]
        else:
            name, operands = c.of(STEPS), (i,)
            fun = STEPS[name](c, types[i])
        if fun is None:
            continue
        out = jax.eval_shape(fun, *(types[j] for j in operands))
        if out.size > MOST or out.size == 0 or out.dtype != jnp.float32 or out.ndim > 4:
            continue
        steps.append(Step(name, fun, operands))
        types.append(out)
    last = len(types) - 1
    return Program(inputs, steps, sorted({last, c.number(len(inputs), last)}))


def placements_of(c: Choices, mesh: Any, rank: int) -> list[str]:
    return [c.of(["R", *(f"S{d}" for d in range(rank))]) for _ in mesh.axis_names]


class Difference(AssertionError):
    """A program whose values on several devices are not those of one."""


def compare(program: Program, mesh: Any, where: list[list[str]], gradient: bool = False) -> Any:
    """Raises Difference; returns the plan."""

    def loss(*xs: Any) -> Any:
        return sum(jnp.sin(y).sum() for y in program(*xs))

    fun = jax.grad(loss, tuple(range(len(program.inputs)))) if gradient else program
    placed = [dt.distribute_tensor(x, mesh, p) for x, p in zip(program.inputs, where, strict=True)]
    step = dt.jit(fun, mesh=mesh)
    ours, theirs = step(*placed), jax.jit(fun)(*program.inputs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1.0, float(np.abs(b).max(initial=0, where=np.isfinite(b))))
        if a.shape != b.shape or not np.allclose(a, b, 2e-4, 2e-4 * scale, equal_nan=True):
            raise Difference(f"result {i} of\n{program}\nmesh {mesh.shape}, placements {where}")
    return step.explain(*placed)


def shrunk(program: Program, mesh: Any, where: list[list[str]], gradient: bool) -> Program:
    """The part that makes the first value that is wrong by itself."""
    n = len(program.inputs)
    for i in range(n, n + len(program.steps)):
        part = program.only(i)
        try:
            compare(part, mesh, where, gradient)
        except Exception:
            return part
    return program


def check(seed: int, most: int = 30) -> Counter[str]:
    """One random program; how often each row of a rule was taken. Raises with a small program."""
    program, c = random_program(seed, most), Choices(seed + 10**6)
    mesh = dt.init_device_mesh(*c.of(MESHES))
    where = [placements_of(c, mesh, x.ndim) for x in program.inputs]
    gradient = c.number(0, 3) == 0 and not {"argmax", "floor"} & {s.name for s in program.steps}
    try:
        plan = compare(program, mesh, where, gradient)
    except Exception as error:
        small = shrunk(program, mesh, where, gradient)
        raise Difference(
            f"seed {seed}, gradient {gradient}: {type(error).__name__}: {str(error)[:300]}\n"
            f"{small}\nmesh {dict(mesh.shape)}, placements {where}"
        ) from error
    return Counter(
        f"{node.name}: "
        + ", ".join(map(str, row.inputs))
        + " -> "
        + ", ".join(map(str, row.outputs))
        for node, row in plan.rows.items()
        if node.kind == "equation"
    )


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else 100
    first = int(arguments[arguments.index("--seed") + 1]) if "--seed" in arguments else 0
    rows: Counter[str] = Counter()
    failed = 0
    for seed in range(first, first + count):
        try:
            rows += check(seed)
        except Difference as error:
            failed += 1
            print(f"{error}\n", flush=True)
        if seed % 25 == 24:
            jax.clear_caches()
    print(f"{count} programs from seed {first}: {failed} differ; {len(rows)} rows")
    for row, times in rows.most_common() if "--rows" in arguments else ():
        print(f"{times:6}  {row}")
    return bool(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    dt.simulate_devices(8)
    sys.exit(main(sys.argv[1:]))
