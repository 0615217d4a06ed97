"""Primitives that act on each element alone."""

from __future__ import annotations

from jax import numpy as jnp

from dtorchjax.registry import elementwise, elementwise_sentence, local, rule


def inexact(in_avals, out_avals, params) -> bool:
    """Integer division rounds, so it is not linear."""
    return not any(is_integer(a.dtype) for a in out_avals)


def is_integer(dtype) -> bool:
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


elementwise(
    """abs acos acosh asin atan2 atanh bessel_i0e bessel_i1e clz cos cosh digamma eq eq_to erf_inv
    erfc ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p log2
    lt lt_to mulhi ne threefry2x32
    nextafter one_minus_square polygamma polynomial population_count pow reduce_precision
    regularized_incomplete_beta rem rsqrt shift_left shift_right_arithmetic shift_right_logical sin
    sqrt square tan xor zeta"""
)
# Increasing functions: the largest of the terms stays the largest. log, log1p and sqrt are not
# among them, as a smaller term may lie where they are nan, and nan wins.
elementwise("asinh atan cbrt ceil erf exp exp2 expm1 floor logistic round sinh tanh", monotone=True)
elementwise("conj imag neg real", linear="0")
elementwise("copy name stop_gradient", linear="0", moves=True)
elementwise("add add_any complex sub", linear="jointly")
elementwise("mul", linear="each")
elementwise("div", linear="0", when=inexact)
elementwise("select_n", linear="1:", moves=True)


@rule("sign", monotone=True, when=lambda ins, outs, params: ins[0].dtype.kind != "c")
def _(x, *, out, **_):
    """The sign of a complex number is a direction"""
    return elementwise_sentence([x], out)


def lattice(name: str, kind: str, **kinds) -> None:
    """`max` and its like: the reduction itself also takes terms in both operands at once."""

    @rule(name, monotone=True, **kinds)
    def _(x, y, *, out, **_):
        of_bits = name in ("and", "or") and is_integer(x.dtype)
        rows = [] if of_bits else [f"P({kind}), P({kind}) -> P({kind})"]
        return elementwise_sentence([x, y], out), rows


def logical(in_avals, out_avals, params) -> bool:
    """On truth values `or` is max and `and` is min; on integers they work on bits."""
    return in_avals[0].dtype.name == "bool"


lattice("max", "max")
lattice("min", "min")
lattice("or", "max", when=logical)
lattice("and", "min", when=logical)


@rule("not")
def _(x, *, out, **_):
    """d -> d, and decreasing"""
    return elementwise_sentence([x], out), ["P(max) -> P(min)", "P(min) -> P(max)"]


@rule("clamp")
def _(low, x, high, *, out, **_):
    """-, d, - -> d, and increasing in x"""
    rows = ["R, P(max), R -> P(max)", "R, P(min), R -> P(min)"]
    return elementwise_sentence([low, x, high], out), rows


def as_precise(target, source) -> bool:
    new, old = jnp.finfo(target), jnp.finfo(source)
    return new.nmant >= old.nmant and new.maxexp >= old.maxexp


@rule("convert_element_type")
def _(x, *, out, new_dtype, **_):
    """d -> d: a sum passes where no term is rounded or cut, a max where the order stays

    Integers wrap around where their terms add up; as floats, or once widened, they would not. A sum
    of large terms of both signs is small, so the terms must not be rounded more than the sum.
    """
    source, rows = x.dtype, []
    exact = not is_integer(new_dtype) and new_dtype.name != "bool"
    if is_integer(source):
        keeps_sum = is_integer(new_dtype) and new_dtype.itemsize <= source.itemsize
        signed = source.kind == "i" and new_dtype.kind != "i"
        keeps_order = exact or (new_dtype.itemsize > source.itemsize and not signed)
    elif source.name == "bool":
        keeps_sum, keeps_order = False, True
    else:
        keeps_sum = exact and as_precise(new_dtype, source)
        keeps_order = new_dtype.name != "bool"
    if keeps_sum:
        rows += ["P -> P"]
    if keeps_order and source.kind != "c" and new_dtype.kind != "c":
        rows += ["P(max) -> P(max)", "P(min) -> P(min)"]
    return elementwise_sentence([x], out), rows


@rule("bitcast_convert_type")
def _(x, *, out, **_):
    """d -> d, or d -> d word! and back where the widths differ"""
    longer = max(x, out[0], key=len)
    names = [*longer][: min(len(x), len(out[0]))]
    word = [f"{f}!" for f in [*longer][len(names) :]]
    left, right = (" ".join([*names, *(word if len(d) > len(names) else [])]) for d in (x, out[0]))
    return f"{left or '-'} -> {right or '-'}"


@local("mulhi", uneven=True, blocks=True)
def _(call, x, y):
    """From halves: XLA knows no `mulhi` in a program for several devices."""
    info = jnp.iinfo(x.dtype)
    half, low = info.bits // 2, (1 << info.bits // 2) - 1
    a, b = (v.astype(f"uint{info.bits}") for v in (x, y))
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    first = a1 * b0 + (a0 * b0 >> half)
    second = a0 * b1 + (first & low)
    high = (a1 * b1 + (first >> half) + (second >> half)).astype(x.dtype)
    if info.min == 0:
        return high
    zero = jnp.zeros((), x.dtype)
    return high - jnp.where(x < 0, y, zero) - jnp.where(y < 0, x, zero)
