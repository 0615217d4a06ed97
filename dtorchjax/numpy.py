"""`jax.numpy` on DTensors: `dt.numpy.exp(x)`, `dt.numpy.linalg.norm(x, axis=1)`.

A call with a DTensor among its arguments runs as an operator on DTensors does: on whole arrays,
each primitive by its table, strict unless `with dt.redistribution("auto")`; results lie as they
come. Without a DTensor a function is that of `jax.numpy`, so that it serves under `dt.jit` as well.
`zeros_like` and its kind lie as their argument. Under `jax.grad` DTensors work too.

>>> import dtorchjax as dt
>>> mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
>>> x = dt.distribute_tensor(jnp.ones((8, 16)), mesh, ["S0", "S1"])
>>> dt.numpy.exp(x).layout
Layout[dp=S0, tp=S1]
>>> dt.numpy.sum(x, axis=1).layout
Layout[dp=S0, tp=P]
>>> dt.numpy.shape(x), dt.numpy.zeros_like(x).layout
((8, 16), Layout[dp=S0, tp=S1])
"""

from typing import Any

import jax.numpy

from dtorchjax.operators import Functions

QUERIES = (
    "dtype", "iscomplexobj", "isrealobj", "isscalar", "issubdtype", "ndim", "promote_types",
    "result_type", "shape", "size", "can_cast", "broadcast_shapes",
)  # fmt: skip
# what takes no arrays, makes functions, or brings values to the host
PLAIN = (
    "array_repr", "array_str", "from_dlpack", "frombuffer", "fromfile", "frompyfunc", "fromstring",
    "get_printoptions", "load", "printoptions", "save", "savez", "set_printoptions", "vectorize",
)  # fmt: skip
_functions = Functions(jax.numpy, queries=QUERIES, plain=PLAIN, modules=("linalg", "fft"))


def __getattr__(name: str) -> Any:
    return getattr(_functions, name)


def __dir__() -> list[str]:
    return dir(_functions)
