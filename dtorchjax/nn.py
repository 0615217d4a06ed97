"""`jax.nn` on DTensors: `dt.nn.relu(x)`, `dt.nn.softmax(x, axis=-1)`; see `dtorchjax.numpy`.

>>> import dtorchjax as dt
>>> mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
>>> x = dt.distribute_tensor(jnp.ones((8, 16)), mesh, ["S0", "S1"])
>>> dt.nn.gelu(x).layout
Layout[dp=S0, tp=S1]
"""

from typing import Any

import jax.nn

from dtorchjax.operators import Functions

_functions = Functions(jax.nn, plain=("initializers",))


def __getattr__(name: str) -> Any:
    return getattr(_functions, name)


def __dir__() -> list[str]:
    return dir(_functions)
