"""Primitives that act on each element alone."""

from __future__ import annotations

from dtorchjax.registry import elementwise


def inexact(in_avals, out_avals, params) -> bool:
    """Integer division rounds, so it is not linear."""
    return all(a.dtype.kind not in "iub" for a in out_avals)


def keeps_fractions(in_avals, out_avals, params) -> bool:
    """A cast from float to integer rounds each term; to a truth value it is not linear at all."""
    source, target = in_avals[0].dtype, out_avals[0].dtype
    return target.name != "bool" and not (source.kind not in "iub" and target.kind in "iu")


elementwise(
    """abs acos acosh and asin asinh atan atan2 atanh clamp clz cos cosh digamma eq erf_inv erfc
    ge gt integer_pow is_finite le lgamma lt ne nextafter not one_minus_square or
    population_count pow random_fold_in random_seed reduce_precision rem rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh square tan xor"""
)
# increasing functions: the max of the terms passes
elementwise("cbrt ceil erf exp exp2 expm1 floor log log1p logistic round sqrt tanh", monotone=True)
elementwise("max min", monotone=True)
elementwise("neg real imag", linear="0")
elementwise("copy copy_p name stop_gradient", linear="0", moves=True)
elementwise("add add_any sub", linear="jointly")
elementwise("mul", linear="each")
elementwise("div", linear="0", when=inexact)
elementwise("convert_element_type", linear="0", monotone=True, when=keeps_fractions)
elementwise("select_n", linear="1:")
elementwise("bitcast_convert_type")
