"""A value that is reduced here at the latest: the identity on whole arrays.

In strict mode, where collectives run only where a row names them, it is the row P -> R. In auto
mode the planner reduces where it is cheapest, so it asks for nothing.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

settled_p = Primitive("settled")
settled_p.def_impl(lambda x: x)
settled_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(settled_p, lambda ctx, x: [x])
ad.deflinear2(settled_p, lambda cotangent, x: [cotangent])
batching.primitive_batchers[settled_p] = lambda xs, dims: (settled_p.bind(*xs), dims[0])


def settled(x: Any) -> Any:
    """x, which no device has as a term of a sum from here on."""
    return settled_p.bind(x)
