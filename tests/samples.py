"""One table: primitive -> sample equations, made from public functions.

A sample is a function and makers of its arguments; the oracle traces it, takes the equations of
that primitive and tries every row on them. Data have both signs, ties and zeros, and are small
multiples of a power of two, so that partial terms add up exactly. Dims are 6 and 12 (2 and 3
devices), beside 1 and 5, which do not divide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import eq_to_p, le_to_p, lt_to_p, threefry2x32_p
from oracle import Equation, compiled
from simulated import on_host

from dtorchjax import _jax

Maker = Callable[[np.random.Generator], Any]

NEWER = {"log2", "one_minus_square", "polynomial"}
"""Primitives with a rule that jax 0.10 does not have."""

UNSAMPLED = {
    "empty": "no value yet: nothing to compare",
    "empty2": "a scalar that has no value yet: nothing to shard, nothing to compare",
    "select_and_scatter": "no public function has it; its rows are select_and_scatter_add's",
    "dim_as_value": "a scalar that only a symbolic export has: tests/test_ops_dynamic.py",
}

WITHOUT_DERIVATIVE = {
    "eig": "jax has one only for those who ask",
    "hessenberg": "jax has none",
    "householder_product": "jax has none",
    "schur": "jax has none",
    "tridiagonal": "jax has none",
    "igamma_grad_a": "jax has none",
    "approx_top_k": "of pairs that are not sorted",
    "nextafter": "jax has none",
    "ragged_dot_general": "jax has none where the contracted dim is ragged",
    "random_gamma": "by an implicit function, not exactly",
    "reduce": "jax has none of several operands",
    "reduce_window": "jax has none of several operands",
    "select_and_gather_add": "its own derivative is not that of sums of small numbers",
    "eq_to": "no number",
    "le_to": "no number",
    "lt_to": "no number",
    "polygamma": "jax has it for one of the operands",
    "reduce_precision": "rounds cotangents, so those of terms do not add up to that of the sum",
    "regularized_incomplete_beta": "jax has it for one of the operands",
    "scatter-mul": "jax has it only for unique indices, which a device's part does not promise",
    "zeta": "jax has none",
}


@dataclasses.dataclass(frozen=True)
class Sample:
    label: str
    fun: Callable[..., Any]
    makers: tuple[Maker, ...]


SAMPLES: dict[str, list[Sample]] = {}
"""Primitive name -> samples with labels of their own."""


def sample(names: str, label: str, fun: Callable[..., Any], *makers: Maker) -> None:
    """`fun` holds equations of every primitive in `names`."""
    for name in names.split():
        known = SAMPLES.setdefault(name, [])
        assert all(s.label != label for s in known), (name, label)
        known.append(Sample(label, fun, makers))


# ---- arguments -----------------------------------------------------------------------------------


def f32(*shape: int, low: float = -4, high: float = 4, dtype: Any = np.float32) -> Maker:
    """Sixty-five values from low to high, a tenth of them zero where zero is among them."""

    def make(rng: np.random.Generator) -> np.ndarray:
        x = low + (high - low) / 64 * rng.integers(0, 65, shape)
        return np.where((rng.random(shape) < 0.1) & (low <= 0 <= high), 0.0, x).astype(dtype)

    return make


def c64(*shape: int, low: float = -4) -> Maker:
    part = f32(*shape, low=low)
    return lambda rng: (part(rng) + 1j * part(rng)).astype(np.complex64)


def powers(*shape: int, dtype: Any = np.float32, zeros: float = 0.01) -> Maker:
    """Numbers whose products stay in range and are seldom zero."""
    choices = [-2, -1, 1, 2] if dtype == np.int32 else [-2, -1, -0.5, 0.5, 1, 2]

    def make(rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(shape) < zeros, 0, rng.choice(choices, shape)).astype(dtype)

    return make


def i32(*shape: int, low: int = -5, high: int = 5, dtype: Any = np.int32) -> Maker:
    return lambda rng: rng.integers(low, high + 1, shape).astype(dtype)


def bools(*shape: int, true: float = 0.5) -> Maker:
    return lambda rng: np.asarray(rng.random(shape) < true)


def places(n: int, count: int) -> Maker:
    """Different positions in a dim of n."""
    return lambda rng: rng.permutation(n)[:count].astype(np.int32)


def keys(*shape: int, impl: str | None = None) -> Maker:
    def make(rng: np.random.Generator) -> Any:
        key = jax.random.key(int(rng.integers(0, 1000)), impl=impl)
        return jax.random.split(key, shape) if shape else key

    return make


bf16 = functools.partial(f32, dtype=jnp.bfloat16)
i8 = functools.partial(i32, low=-120, high=120, dtype=np.int8)
u8 = functools.partial(i32, low=0, high=255, dtype=np.uint8)
u32 = functools.partial(i32, low=0, high=9, dtype=np.uint32)


def unary(names: str, label: str, *makers: Maker) -> None:
    """Primitives with a function of their own name in jax.lax."""
    for name in names.split():
        if hasattr(lax, name):
            sample(name, label, getattr(lax, name), *makers)
        else:
            assert name in NEWER, name


binary = unary

# ---- elements alone ------------------------------------------------------------------------------

unary("abs ceil cos cosh exp exp2 expm1 floor logistic neg sign sin sinh", "f32", f32(6, 5))
unary("asinh atan bessel_i0e bessel_i1e cbrt erf erfc square tan tanh", "f32", f32(6, 5))
unary("digamma lgamma log log1p log2 rsqrt sqrt", "f32", f32(6, 5))
unary("acos asin atanh erf_inv", "f32 in [-1, 1]", f32(6, 5, low=-1, high=1))
unary("acosh", "f32 from 1 on", f32(6, 5, low=1, high=9))
unary("exp tanh", "bf16", bf16(6, 12))
unary("exp", "f32 2d", f32(6, 12))
unary("abs neg sign square", "i32", i32(6, 5))
unary("abs neg sign square conj real imag", "c64", c64(6, 5))
unary("neg", "u32", u32(6))
unary("clz population_count", "i32", i32(6, 5))
unary("stop_gradient", "f32", f32(6, 5))
sample("complex", "f32", lax.complex, f32(6, 5), f32(6, 5))
sample("is_finite", "f32", lambda x: lax.is_finite(1 / x), f32(6, 5))
sample("not", "i32", lax.bitwise_not, i32(6, 5))
sample("not", "bool", lax.bitwise_not, bools(6, 5))
for _power in (3, 2, -1):
    sample("integer_pow", f"f32 ** {_power}", lambda x, y=_power: lax.integer_pow(x, y), f32(6, 5))
sample("integer_pow", "i32 ** 2", lambda x: lax.integer_pow(x, 2), i32(6, 5))
for _how in lax.RoundingMethod:
    sample("round", f"f32 {_how.name}", lambda x, how=_how: lax.round(x, how), f32(6, 5))
sample("reduce_precision", "f32", lambda x: lax.reduce_precision(x, 5, 3), f32(6, 5))
sample("one_minus_square", "f32", lambda x: jax.vjp(lax.tanh, x)[1](x), f32(6, 5))
if "log2" in dir(lax):  # jax 0.12 has both
    sample("polynomial", "f32", jnp.polyval, f32(3), f32(6, 5))
sample("copy", "f32", jnp.copy, f32(6, 5))
sample("copy", "bool", jnp.copy, bools(6))
sample("name", "f32", lambda x: checkpoint_name(x, "saved"), f32(6, 5))

binary("add sub mul max min", "f32", f32(6, 12), f32(6, 12))
binary("add sub mul max min", "f32 with a row", f32(6, 12), f32(1, 12))
binary("add sub mul max min", "f32 with a scalar", f32(6, 5), f32())
binary("add sub mul", "f32 after a scalar", f32(), f32(6, 5))
binary("add sub mul max min", "i32", i32(6, 5), i32(6, 5))
binary("add sub mul", "u8", u8(6, 5), u8(6, 5))
binary("mul div", "bf16", bf16(6, 5), bf16(6, 5, low=1, high=5))
binary("mul div", "c64", c64(6, 5), c64(6, 5, low=1))
binary("max min", "bool", bools(6, 5), bools(6, 5))
# where it is divided by zero, terms of both signs give nan instead of infinity
binary("div", "f32", f32(6, 12), f32(6, 12, low=1, high=5))
binary("div", "f32 by a row", f32(6, 12), powers(1, 12, zeros=0))
binary("div rem", "i32", i32(6, 5, low=-9, high=9), i32(6, 5, low=1, high=4))
binary("rem", "f32", f32(6, 5), f32(6, 5, low=1, high=3))
binary("pow", "f32", f32(6, 5, low=0.25, high=4.25), f32(6, 5, low=-2, high=2))
binary("pow", "to an i32", f32(6, 5), i32(6, 5, low=0, high=3))
binary("atan2 nextafter", "f32", f32(6, 5), f32(6, 5))
binary("eq ne lt le gt ge", "f32", f32(6, 12, low=-1, high=1), f32(6, 12, low=-1, high=1))
binary("eq ne lt le gt ge", "i32", i32(6, 5), i32(6, 5))
binary("eq ne", "bool", bools(6, 5), bools(6, 5))
for _name in ("and", "or", "xor"):
    sample(_name, "bool", getattr(lax, f"bitwise_{_name}"), bools(6, 5), bools(6, 5))
    sample(_name, "i32", getattr(lax, f"bitwise_{_name}"), i32(6, 5), i32(6, 5))
for _name in ("shift_left", "shift_right_arithmetic", "shift_right_logical"):
    sample(_name, "i32", getattr(lax, _name), i32(6, 5), i32(6, 5, low=0, high=4))
binary("igamma igammac zeta", "f32", *[f32(6, 5, low=1, high=5)] * 2)
binary("polygamma", "f32", i32(6, 5, low=0, high=3, dtype=np.float32), f32(6, 5, low=1, high=5))
binary("mulhi", "i32", *[i32(6, 5, low=-(10**9), high=10**9)] * 2)
sample("igamma_grad_a", "f32", lax.igamma_grad_a, *[f32(6, 5, low=1, high=5)] * 2)
sample(
    "regularized_incomplete_beta", "f32", lax.betainc,
    *[f32(6, 5, low=1, high=5)] * 2, f32(6, 5, low=0, high=1),
)  # fmt: skip
sample("add_any", "f32", lambda x: jax.vjp(lambda y: (y, y), x)[1]((x, 2 * x)), f32(6, 5))

sample("clamp", "f32", lax.clamp, f32(6, 5), f32(6, 5), f32(6, 5))
sample("clamp", "i32 between scalars", lax.clamp, i32(), i32(6, 5), i32(low=0))
sample("select_n", "f32", lax.select_n, bools(6, 12), f32(6, 12), f32(6, 12))
sample("select_n", "scalar predicate", lax.select_n, bools(), f32(6, 5), f32(6, 5))
sample("select_n", "three cases", lax.select_n, i32(6, low=0, high=2), f32(6), f32(6), f32(6))
sample("select_n", "bool cases", lax.select_n, bools(6, 5), bools(6, 5), bools(6, 5))
sample("select_n", "i32", lax.select_n, bools(6, 5), i32(6, 5), i32(6, 5))

_CASTS = {
    "f32 to i32": (f32(6, 5), np.int32), "i32 to f32": (i32(6, 5), np.float32),
    "f32 to bool": (f32(6, 5), np.bool_), "bool to f32": (bools(6, 5), np.float32),
    "f32 to bf16": (f32(6, 5), jnp.bfloat16), "bf16 to f32": (bf16(6, 5), np.float32),
    "i32 to i8": (i32(6, 5, low=-300, high=300), np.int8), "i8 to i32": (i8(6, 5), np.int32),
    "i8 to f32": (i8(6, 5), np.float32), "i32 to u32": (i32(6, 5), np.uint32),
    "u32 to i32": (u32(6, 5), np.int32), "u8 to i32": (u8(6, 5), np.int32),
    "f32 to c64": (f32(6, 5), np.complex64), "i32 to bool": (i32(6, 5), np.bool_),
    "bool to i32": (bools(6, 5), np.int32),
}  # fmt: skip
for _label, (_maker, _to) in _CASTS.items():
    sample(
        "convert_element_type", _label, lambda x, to=_to: lax.convert_element_type(x, to), _maker
    )
_BITS = {
    "same width": (np.int32, f32(6, 5)),
    "narrower": (np.uint8, f32(6, 5)),
    "wider": (np.float32, u8(6, 5, 4)),
}
for _label, (_to, _maker) in _BITS.items():
    sample(
        "bitcast_convert_type", _label, lambda x, to=_to: lax.bitcast_convert_type(x, to), _maker
    )

# ---- reductions and scans ------------------------------------------------------------------------


def along(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A function of jax.lax with everything given but the array."""
    return lambda x: getattr(lax, name)(x, *args, **kwargs)


for _name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
    _maker = powers if _name == "reduce_prod" else f32
    for _axes in ((1,), (0, 2), (0, 1, 2)):
        sample(_name, f"f32 over {_axes}", along(_name, _axes), _maker(6, 5, 6))
    _maker = functools.partial(powers, dtype=np.int32) if _name == "reduce_prod" else i32
    sample(_name, "i32", along(_name, (0, 2)), _maker(6, 5, 6))
sample("reduce_sum", "bf16", along("reduce_sum", (0,)), bf16(6, 5))
sample("reduce_max", "bf16", along("reduce_max", (0,)), bf16(6, 5))
for _name, _true in (("reduce_and", 0.9), ("reduce_or", 0.1), ("reduce_xor", 0.5)):
    sample(_name, "bool", along(_name, (0, 2)), bools(6, 6, 2, true=_true))
    sample(_name, "i32", along(_name, (0,)), i32(6, 12, low=0, high=255))
for _name in ("argmax", "argmin"):
    sample(_name, "f32", along(_name, 1, np.int32), f32(6, 12))
    sample(_name, "i32", along(_name, 0, np.int32), i32(6, 5))
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    sample(_name, "f32", along(_name, 0), powers(6, 12))
    sample(_name, "f32 reverse", along(_name, 1, reverse=True), powers(6, 12))
    if _name != "cumlogsumexp":
        sample(_name, "i32", along(_name, 1), i32(6, 5, low=-2, high=2))
sample("sort", "f32", along("sort", dimension=1), f32(6, 12))
sample(
    "sort", "with values", lambda k, v: lax.sort((k, v), dimension=0, num_keys=1),
    i32(6, 12), f32(6, 12),
)  # fmt: skip
sample(
    "sort", "two keys, carried along", lambda *xs: lax.sort(xs, dimension=0, num_keys=2),
    bools(7, 2), bf16(7, 2), i32(7, 2),
)  # fmt: skip
sample("top_k", "f32", along("top_k", 2), f32(6, 12))


def window(
    combine: Any, start: Any, dims: Any = (1, 2, 3, 1), strides: Any = (1, 2, 1, 1),
    padding: Any = "VALID", base: Any = None, dilation: Any = None,
) -> Callable[..., Any]:  # fmt: skip
    """By default windows of 2 and 3 in the middle dims, every second of them."""
    how = dims, strides, padding, base, dilation
    return lambda x: lax.reduce_window(x, np.asarray(start, x.dtype), combine, *how)


DILATED = (3, 4), (1, 2), ((1, 2), (0, 3)), (2, 3), (2, 1)


for _name, _combine, _begin in (
    ("sum", lax.add, 0),
    ("max", lax.max, -np.inf),
    ("min", lax.min, np.inf),
):
    sample(f"reduce_window_{_name}", "f32", window(_combine, _begin), f32(6, 4, 5, 6))
    _least = max(min(_begin, 2**31 - 1), -(2**31))
    sample(f"reduce_window_{_name}", "dilated", window(_combine, _least, *DILATED), i32(6, 5))
sample("reduce_window_sum", "i32", window(lax.add, 0), i32(6, 4, 5, 6))
sample(
    "select_and_scatter_add", "f32", lambda x, g: jax.vjp(window(lax.max, -np.inf), x)[1](g),
    f32(6, 4, 5, 6), f32(6, 2, 3, 6),
)  # fmt: skip
sample(
    "select_and_scatter_add", "padded",
    lambda x, g: jax.vjp(window(lax.min, np.inf, (3, 2), (2, 3), ((1, 2), (0, 1))), x)[1](g),
    f32(7, 6), f32(4, 2),
)  # fmt: skip
sample("reduce_window", "products", window(lax.mul, 1), f32(6, 4, 5, 6))
sample(
    "reduce_window", "of two",
    lambda x, y: lax.reduce_window(
        (x, y), (np.float32(0), np.int32(9)), lambda a, b: (a[0] + b[0], lax.min(a[1], b[1])),
        (1, 2), (1, 1), "VALID",
    ),
    f32(6, 5), i32(6, 5),
)  # fmt: skip
sample(
    "select_and_gather_add", "f32",
    lambda x, t: jax.jvp(window(lax.max, -np.inf), (x,), (t,))[1], f32(6, 4, 5, 6), f32(6, 4, 5, 6),
)  # fmt: skip
sample(
    "select_and_gather_add", "dilated",
    lambda x, t: jax.jvp(window(lax.min, np.inf, *DILATED), (x,), (t,))[1], f32(6, 5), f32(6, 5),
)  # fmt: skip
sample(
    "reduce", "of two",
    lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.int32(9)), lambda a, b: (a[0] + b[0], lax.min(a[1], b[1])), (1,)
    ),
    f32(6, 5), i32(6, 5),
)  # fmt: skip
sample("reduce", "no sum", lambda x: lax.reduce(x, np.int32(0), _shift, (0, 2)), i32(3, 6, 2))
sample("approx_top_k", "f32", lambda x: lax.approx_max_k(x, 2), f32(6, 12))
sample(
    "tridiagonal_solve", "f32",
    lambda a, b: lax.linalg.tridiagonal_solve(a * 0, a * 0 + 2, a * 0, b), f32(6, 4), f32(6, 4, 6),
)  # fmt: skip


def _shift(a: Any, b: Any) -> Any:
    return 2 * a + b


def definite(*shape: int) -> Maker:
    """Symmetric matrices with positive eigenvalues that lie apart."""

    def make(rng: np.random.Generator) -> np.ndarray:
        x = rng.integers(-8, 9, shape) / 64
        return (x + x.swapaxes(-1, -2) + np.diag(np.arange(1, shape[-1] + 1))).astype(np.float32)

    return make


sample(
    "cholesky eigh",
    "f32",
    lambda x: (lax.linalg.cholesky(x), lax.linalg.eigh(x)),
    definite(6, 3, 3),
)
for _name in ("hessenberg", "lu", "qr", "schur", "svd"):
    sample(_name, "f32", getattr(lax.linalg, _name), definite(6, 3, 3))
sample("eig", "f32", lambda x: lax.linalg.eig(x), definite(6, 3, 3))
sample("tridiagonal", "f32", lambda x: lax.linalg.tridiagonal(x), definite(6, 3, 3))
sample("householder_product", "f32", lax.linalg.householder_product, definite(6, 3, 3), f32(6, 3))
for _left in (True, False):
    sample(
        "triangular_solve", f"left {_left}",
        lambda a, b, left=_left: lax.linalg.triangular_solve(a, b, left_side=left),
        definite(6, 6, 6), f32(6, 6, 6),
    )  # fmt: skip
sample("fft", "c64", lambda x: jnp.fft.fftn(x, axes=(1, 2)), c64(6, 4, 3))
sample("fft", "real", jnp.fft.rfft, f32(6, 12))

# ---- contractions --------------------------------------------------------------------------------


def dot(
    label: str, left: Maker, right: Maker, contract: Any, batch: Any = ((), ()), to: Any = None
) -> None:
    def fun(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (contract, batch), preferred_element_type=to)

    sample("dot_general", label, fun, left, right)


dot("matrix, matrix", f32(6, 12), f32(12, 6), ((1,), (0,)))
dot("vector, vector", f32(12), f32(12), ((0,), (0,)))
dot("outer", f32(6), f32(12), ((), ()))
dot("matrix, vector", f32(12, 6), f32(12), ((0,), (0,)))
dot("batched", f32(6, 5, 6), f32(6, 6, 1), ((2,), (1,)), ((0,), (0,)))
dot(
    "two batch and two contracted dims", f32(6, 2, 6, 3, 1), f32(6, 3, 2, 6),
    ((0, 3), (3, 1)), ((1, 2), (2, 0)),
)  # fmt: skip
dot("i32", i32(6, 12), i32(12, 5), ((1,), (0,)))
dot("i8 to i32", i8(6, 6), i8(6, 5), ((1,), (0,)), to=np.int32)
RAGGED = lax.RaggedDotDimensionNumbers
_OF_EACH = [(2, 5, 1), (8, 0, 0), (1, 1, 6)] * 2
_BATCH = RAGGED((((2,), (2,)), ((0,), (0,))), [1], [1])
for _label, _numbers, _x, _y, _groups in (
    ("rows", RAGGED((((1,), (1,)), ((), ())), [0], [0]), (8, 6), (3, 6, 6), [2, 5, 1]),
    ("a batch", _BATCH, (6, 8, 6), (6, 3, 6, 2), [2, 5, 1]),
    ("groups of each", _BATCH, (6, 8, 6), (6, 3, 6, 2), _OF_EACH),
    ("contracted", RAGGED((((0,), (0,)), ((), ())), [0], []), (8, 6), (8, 6), [2, 5, 1]),
):
    sample(
        "ragged_dot_general", _label,
        lambda x, y, n=_numbers, g=_groups: lax.ragged_dot_general(x, y, np.array(g, "int32"), n),
        f32(*_x), f32(*_y),
    )  # fmt: skip
dot("bf16", bf16(6, 6), bf16(6, 5), ((1,), (0,)))
dot("bf16 to f32", bf16(6, 6), bf16(6, 5), ((1,), (0,)), to=np.float32)


def conv(
    label: str, image: Maker, kernel: Maker, order: tuple[str, str, str] | None,
    strides: tuple[int, int] = (1, 1), padding: Any = "SAME", **kwargs: Any,
) -> None:  # fmt: skip
    def fun(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=order, **kwargs)

    sample("conv_general_dilated", label, fun, image, kernel)


conv("NHWC", f32(6, 4, 4, 6), f32(3, 3, 6, 12), ("NHWC", "HWIO", "NHWC"))
conv("NCHW bf16", bf16(2, 6, 5, 4), bf16(6, 6, 1, 3), ("NCHW", "OIHW", "NCHW"))
conv("depthwise", f32(6, 12, 4, 4), f32(12, 1, 3, 3), None, feature_group_count=12)
conv("depthwise, two each", f32(2, 6, 4, 4), f32(12, 1, 3, 3), None, feature_group_count=6)
conv("one of each group", f32(2, 12, 4, 4), f32(6, 2, 3, 3), None, feature_group_count=6)
conv("batches, depthwise", f32(6, 2, 4, 4), f32(6, 2, 3, 3), None, batch_group_count=6)
conv("batches, one of each group", f32(12, 2, 4, 4), f32(6, 2, 3, 3), None, batch_group_count=6)
conv("groups", f32(6, 4, 4, 6), f32(3, 3, 3, 12), ("NHWC", "HWIO", "NHWC"), feature_group_count=2)
conv(
    "batch groups", f32(6, 4, 4, 6), f32(3, 3, 6, 6), ("NHWC", "HWIO", "NHWC"), batch_group_count=2
)
conv("strides", f32(2, 3, 6, 7), f32(4, 3, 3, 2), None, (2, 3), ((1, 0), (2, 1)))
conv("dilations", f32(2, 3, 6, 5), f32(4, 3, 2, 3), None, (1, 2), ((2, 1), (0, -1)),
     lhs_dilation=(2, 3), rhs_dilation=(3, 1))  # fmt: skip

# ---- movement ------------------------------------------------------------------------------------

sample("transpose", "f32", along("transpose", (2, 0, 1)), f32(6, 12, 5))
sample("transpose", "bool", along("transpose", (1, 0)), bools(6, 12))
sample("squeeze", "middle and last", along("squeeze", (1, 3)), f32(6, 1, 12, 1))
sample("squeeze", "to a scalar", along("squeeze", (0,)), i32(1))
sample("rev", "last", along("rev", (1,)), f32(6, 12))
sample("broadcast_in_dim", "leading dim", along("broadcast_in_dim", (6, 12), (1,)), f32(12))
sample("broadcast_in_dim", "scalar", along("broadcast_in_dim", (6, 5), ()), f32())
sample("broadcast_in_dim", "size 1", along("broadcast_in_dim", (6, 12, 6), (0, 1)), i32(6, 1))
sample("tile", "f32", lambda x: jnp.tile(x, (1, 2)), f32(6, 12))
for _to in ("int32", "float32", "bfloat16", "uint8"):
    sample("iota", _to, lambda to=_to: lax.broadcasted_iota(to, (6, 300), 1))
_RESHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "merge": ((6, 12), (72,)),
    "split": ((12,), (6, 2)),
    "split with a short lead": ((12,), (2, 6)),
    "merge the last two": ((6, 12, 5), (6, 60)),
    "unequal leads": ((6, 4), (4, 6)),
    "size 1 dims come and go": ((1, 6, 1, 12), (6, 12, 1)),
    "merge and split": ((6, 12, 2), (72, 1, 2)),
    "heads": ((6, 5, 12), (6, 5, 2, 6)),
    "no dim alike": ((5, 12), (6, 10)),
    "trailing": ((2, 3, 12), (6, 12)),
    "leads that do not divide": ((4, 3, 2), (3, 2, 4)),
    "merge, lead does not divide": ((2, 5, 6), (10, 6)),
    "to a scalar": ((1, 1), ()),
    "from a scalar": ((), (1,)),
}
for _label, (_source, _target) in _RESHAPES.items():
    sample("reshape", _label, along("reshape", _target), f32(*_source))
for _label, _source, _target, _order in (
    ("permuted", (6, 4, 12), (6, 12, 4), (0, 2, 1)),
    ("permuted and merged", (6, 4, 12), (72, 4), (2, 0, 1)),
    ("permuted square", (6, 12, 6), (6, 72), (2, 1, 0)),
):
    sample("reshape", _label, along("reshape", _target, _order), f32(*_source))
sample("reshape", "bool", along("reshape", (72,)), bools(6, 12))
sample("slice", "a part", along("slice", (0, 3), (6, 9)), f32(6, 12))
sample("slice", "every second", along("slice", (0, 0), (6, 12), (1, 2)), i32(6, 12))
sample("slice", "every second, from 1", along("slice", (1, 0), (12, 6), (2, 1)), f32(12, 6))
sample("slice", "every fifth", along("slice", (0, 2), (6, 12), (1, 5)), f32(6, 12))
_PADS = {
    "positive": ((0, 0, 0), (1, 2, 0)),
    "negative and interior": ((0, 0, 0), (-1, -2, 1)),
    "several": ((1, 0, 0), (0, 0, 2)),
    "interior": ((2, 1, 2), (-2, 3, 1)),
}
for _label, _config in _PADS.items():
    sample("pad", _label, lambda x, v, c=_config: lax.pad(x, v, c), f32(6, 12), f32(low=1))
sample("pad", "i32", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 0, 0))), i32(6, 12), i32(low=1))
sample("concatenate", "columns", lambda *x: lax.concatenate(x, 1), f32(6, 12), f32(6, 6))
sample("concatenate", "three", lambda *x: lax.concatenate(x, 0), i32(6), i32(6), i32(6))
sample("split", "columns", along("split", (6, 6), 1), f32(6, 12))
sample("stack", "middle", lambda *x: jnp.stack(x, 1), f32(6, 12), f32(6, 12))
sample("unstack", "first", jnp.unstack, f32(2, 6, 12))
_START = i32(), i32(low=-2, high=14)  # clamped
sample(
    "dynamic_slice", "f32", lambda x, i, j: lax.dynamic_slice(x, (i, j), (6, 4)),
    f32(6, 12), *_START,
)  # fmt: skip
for _maker in (f32, bools):
    sample(
        "dynamic_update_slice", _maker.__name__,
        lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
        _maker(6, 12), _maker(6, 4), *_START,
    )  # fmt: skip

# ---- lookups -------------------------------------------------------------------------------------


def lookup(mode: str, **kwargs: Any) -> Callable[..., Any]:
    return lambda x, *i: x.at[i].get(mode=mode, wrap_negative_indices=False, **kwargs)


def update(mode: str, how: str = "add") -> Callable[..., Any]:
    """`x, *indices, updates`"""
    return lambda x, *i: getattr(x.at[i[:-1]], how)(i[-1], mode=mode, wrap_negative_indices=False)


_ROWS, _COLUMNS = {"low": 0, "high": 11}, {"low": 0, "high": 5}  # positions in a table of 12 by 6
for _mode in ("fill", "clip", "promise_in_bounds"):
    _wild = {} if _mode == "promise_in_bounds" else {"low": -3, "high": 15}
    _at = i32(6, **{**_ROWS, **_wild})
    _pair = _at, i32(6, **{**_COLUMNS, **_wild})
    sample("gather", f"rows, {_mode}", lookup(_mode), f32(12, 6), i32(6, 2, **{**_ROWS, **_wild}))
    sample("gather", f"elements, {_mode}", lookup(_mode), f32(12, 6), *_pair)
    sample("scatter-add", f"rows, {_mode}", update(_mode), f32(12, 6), _at, f32(6, 6))
    sample("scatter-add", f"elements, {_mode}", update(_mode), i32(12, 6), *_pair, i32(6))
    sample("scatter", f"rows, {_mode}", update(_mode, "set"), f32(12, 6), places(12, 6), f32(6, 6))
sample("gather", "i32, fill", lookup("fill"), i32(12), i32(6, low=-3, high=15))
sample(
    "gather", "own fill value", lookup("fill", fill_value=7), u32(12, 5), i32(6, low=-3, high=15)
)
sample("gather", "bool", lookup("clip"), bools(12, 5), i32(6, **_ROWS))
sample("gather", "narrow index", lookup("clip"), f32(300, 2), u8(6))
sample("gather", "one row", lambda x, i: jnp.take(x, i, axis=0), f32(12, 6), i32(**_ROWS))
sample("gather", "columns", lambda x, i: jnp.take(x, i, axis=1), f32(6, 12), i32(6, **_ROWS))
sample(
    "gather", "along an axis", lambda x, i: jnp.take_along_axis(x, i, 1),
    f32(6, 12), i32(6, 2, low=-14, high=14),
)  # fmt: skip
sample("gather", "parts of rows", lambda x, i: x[i, 1:3], f32(12, 6), i32(6, **_ROWS))
_window = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (None, 0))
sample("gather", "windows", _window, f32(12, 6), i32(6, low=-2, high=14))
_window = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)))
sample("gather", "a window each", _window, f32(6, 5, 6), i32(6, low=-2, high=7))
sample(
    "scatter-add", "of a lookup", lambda x, i, g: jax.vjp(lambda y: y[i], x)[1](g),
    f32(12, 6), i32(6, low=-12, high=11), f32(6, 6),
)  # fmt: skip
sample(
    "scatter-add", "along an axis",
    lambda x, i, g: jax.vjp(lambda y: jnp.take_along_axis(y, i, 1), x)[1](g),
    f32(6, 12), i32(6, 2, **_ROWS), f32(6, 2),
)  # fmt: skip
sample("scatter-add", "one row", update("fill"), f32(12, 6), i32(**_ROWS), f32(6))
sample("scatter-add", "bf16", update("fill"), bf16(12, 5), i32(6, **_ROWS), bf16(6, 5))
_window = jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)))
sample("scatter", "a window each", _window, f32(6, 5, 6), f32(6, 2, 6), i32(6, low=-2, high=7))


def _add_windows(x: Any, at: Any, updates: Any) -> Any:
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0,))
    return lax.scatter_add(x, at[:, None], updates, numbers, mode="fill")


sample("scatter-add", "windows", _add_windows, f32(12, 6), i32(6, low=-2, high=13), f32(6, 2, 6))
for _name, _how in {"sub": "subtract", "mul": "mul", "min": "min", "max": "max"}.items():
    sample(f"scatter-{_name}", "rows", update("fill", _how), f32(12, 6), i32(6, **_ROWS), f32(6, 6))

# ---- random numbers ------------------------------------------------------------------------------


def bits(*shape: int, width: int = 32) -> Callable[..., Any]:
    return lambda key: jax.random.bits(key, shape, f"uint{width}")


sample("random_bits", "8 bits", bits(12, width=8), keys())
sample("random_bits", "16 bits", bits(12, width=16), keys())
sample("random_bits", "2d", bits(6, 12), keys())
sample("random_bits", "3d", bits(6, 5, 12), keys())
sample("random_bits", "a batch of keys", jax.vmap(bits(12)), keys(6))
sample("random_bits", "rbg", bits(6, 12), keys(impl="rbg"))
sample("random_bits", "a batch of rbg keys", jax.vmap(bits(12)), keys(6, impl="rbg"))
sample("random_seed", "one", jax.random.key, i32(low=0))
sample("random_seed", "batch", jax.vmap(jax.random.key), i32(6, low=0))
sample("random_split", "one", lambda k: jax.random.split(k, 6), keys())
sample("random_split", "batch", jax.vmap(lambda k: jax.random.split(k, (2, 3))), keys(6))
sample("random_split", "rbg batch", jax.vmap(jax.random.split), keys(6, impl="unsafe_rbg"))
sample("random_gamma", "f32", jax.random.gamma, keys(), f32(6, 5, low=0.5))
sample(
    "rng_bit_generator", "default",
    lambda k: lax.rng_bit_generator(k.astype(np.uint32), (6, 4)), i32(4, low=0),
)  # fmt: skip
sample(
    "threefry2x32", "u32", lambda *xs: threefry2x32_p.bind(*(x.astype(np.uint32) for x in xs)),
    i32(6, 5, low=0), i32(6, 5, low=0), i32(6, 5, low=0), i32(6, 5, low=0),
)  # fmt: skip
for _name, _compare in (("eq_to", eq_to_p), ("le_to", le_to_p), ("lt_to", lt_to_p)):
    sample(_name, "f32", _compare.bind, f32(6, 5), f32(6, 5))
sample("random_fold_in", "one key", jax.vmap(jax.random.fold_in, (None, 0)), keys(), i32(6, low=0))
sample("random_fold_in", "batch", jax.vmap(jax.random.fold_in), keys(6), i32(6, low=0))
sample(
    "random_fold_in", "rbg batch", jax.vmap(jax.random.fold_in),
    keys(6, impl="unsafe_rbg"), i32(6, low=0),
)  # fmt: skip
sample("random_wrap", "batch", jax.random.wrap_key_data, u32(6, 2, high=99))
sample("random_unwrap", "batch", jax.random.key_data, keys(6))

# ---- from a sample to its equations --------------------------------------------------------------


def equations(name: str, one: Sample, seeds: Sequence[int] = (0, 1)) -> list[Equation]:
    """The equations of a primitive in a sample, with operands for every seed."""
    arguments = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        arguments.append([make(rng) for make in one.makers])
    found = list(_find(jax.make_jaxpr(one.fun)(*arguments[0]), name))
    if not found:
        raise AssertionError(f"sample {one.label!r} of {name} has no such equation")
    run = compiled(lambda *args: [operands(args) for _, operands in found])
    values = [run(*args) for args in arguments]
    result: dict[str, Equation] = {}
    for i, (eqn, _) in enumerate(found):
        avals = [v.aval for v in eqn.invars]
        data = [[on_host(x) for x in value[i]] for value in values]
        equation = Equation(
            name, eqn.primitive, _jax.clean_params(eqn), avals, [v.aval for v in eqn.outvars], data
        )
        result.setdefault(f"{eqn.params} {avals}", equation)
    return list(result.values())


@functools.cache
def sampled(name: str) -> dict[str, Equation]:
    """`{label: equation}` of a primitive; skips the test where this jax has it not."""
    found = {}
    for one in SAMPLES[name]:
        try:
            several = equations(name, one)
        except AssertionError:
            if name in NEWER and jax.__version__ < "0.12":
                continue
            raise
        for i, equation in enumerate(several):
            found[one.label + (f", {i + 1}" if i else "")] = equation
    if not found:
        pytest.skip(f"jax {jax.__version__} has no {name}")
    return found


def _find(closed: Any, name: str) -> Iterator[tuple[Any, Callable[[Sequence[Any]], list]]]:
    """Equations of a primitive, each with a function from arguments to its operands."""
    alias: dict[Any, Any] = {}
    made: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    hits: list[Any] = []

    def walk(jaxpr: Any, consts: Sequence[Any]) -> None:
        constants.update(zip(jaxpr.constvars, consts, strict=True))
        for eqn in jaxpr.eqns:
            inner = _jax.inner_program(eqn)
            if inner is None:
                made.update({v: eqn for v in eqn.outvars})
                if eqn.primitive.name == name:
                    hits.append(eqn)
                continue
            body, inner_consts = inner
            alias.update(zip(body.invars, eqn.invars, strict=True))
            walk(body, inner_consts)
            alias.update(zip(eqn.outvars, body.outvars, strict=True))

    walk(closed.jaxpr, closed.consts)

    def reader(arguments: Sequence[Any]) -> Callable[[Any], Any]:
        known: dict[Any, Any] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        known.update(constants)

        def read(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return jnp.asarray(atom.val, atom.aval.dtype)
            if atom in known:
                return known[atom]
            if atom in alias:
                known[atom] = read(alias[atom])
            else:
                eqn = made[atom]
                results = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
                known.update(zip(eqn.outvars, results, strict=True))
            return known[atom]

        return read

    for eqn in hits:
        yield eqn, lambda args, eqn=eqn: list(map(reader(args), eqn.invars))
