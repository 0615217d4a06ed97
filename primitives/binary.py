"""Functions of two arrays that broadcast, all JAX's own.

Equal elements of maximum and minimum share the gradient; fmax and fmin prefer a number to nan.
"""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp
from jax.scipy import special

from dtorchjax.op import elementary

add = elementary("add", jnp.add)
subtract = elementary("subtract", jnp.subtract)
multiply = elementary("multiply", jnp.multiply)
divide = elementary("divide", jnp.divide)
power = elementary("power", jnp.power)
maximum = elementary("maximum", jnp.maximum)
minimum = elementary("minimum", jnp.minimum)
fmax = elementary("fmax", jnp.fmax)
fmin = elementary("fmin", jnp.fmin)
remainder = elementary("remainder", jnp.remainder)
floor_divide = elementary("floor_divide", jnp.floor_divide)
atan2 = elementary("atan2", jnp.arctan2)
equal = elementary("equal", jnp.equal)
not_equal = elementary("not_equal", jnp.not_equal)
less = elementary("less", jnp.less)
less_equal = elementary("less_equal", jnp.less_equal)
greater = elementary("greater", jnp.greater)
greater_equal = elementary("greater_equal", jnp.greater_equal)
logical_and = elementary("logical_and", jnp.logical_and)
logical_or = elementary("logical_or", jnp.logical_or)
logaddexp = elementary("logaddexp", jnp.logaddexp)
xlogy = elementary("xlogy", special.xlogy)
square = elementary("square", jnp.square)
sqrt = elementary("sqrt", jnp.sqrt)
rsqrt = elementary("rsqrt", lax.rsqrt)
abs = elementary("abs", jnp.abs)
reciprocal = elementary("reciprocal", jnp.reciprocal)
