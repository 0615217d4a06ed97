"""A call for every function of jax.numpy and jax.nn, and the page that says how each is covered.

`python tests/numpy_calls.py` writes docs/numpy.md. Calls are written with these names, all of
whose arrays have their first dim sharded: x, y floats [8, 4], u floats in (0, 1), n, m integers,
b, c bools, s, t [8, 8] (s is symmetric and positive), v, w [8], z complex, q [4, 4, 8] keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import dtorchjax as dt

# the same call for many functions
SHARED = {
    "f(x)": "abs absolute angle any arcsinh arctan argmax argmin argsort around asinh atan "
    "atleast_1d atleast_2d atleast_3d array asarray cbrt ceil conj conjugate copy cos cosh "
    "count_nonzero cumprod cumsum deg2rad degrees diag diagonal ediff1d exp exp2 expm1 fabs fix "
    "flip fliplr flipud floor frexp gradient i0 imag iscomplex isfinite isinf isnan isneginf "
    "isposinf isreal matrix_transpose max amax mean median min amin modf nan_to_num nanargmax "
    "nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar "
    "negative positive prod ptp rad2deg radians ravel real rint rot90 round sign signbit sin sinc "
    "sinh sort sort_complex square squeeze std sum tan tanh trace transpose tril triu trunc unwrap "
    "var zeros_like ones_like empty_like spacing diff all trapezoid",
    "f(u)": "arccos arccosh arcsin arctanh acos acosh asin atanh log log10 log1p log2 reciprocal "
    "sqrt",
    "f(x, y)": "add arctan2 atan2 allclose array_equal array_equiv copysign divide "
    "divmod equal float_power floor_divide fmax fmin fmod greater greater_equal heaviside hypot "
    "isclose less less_equal logaddexp logaddexp2 maximum minimum mod multiply nextafter not_equal "
    "remainder subtract true_divide vdot vecdot broadcast_arrays",
    "f(n, m)": "bitwise_and bitwise_or bitwise_xor gcd lcm bitwise_left_shift left_shift "
    "bitwise_right_shift right_shift",
    "f(n)": "bitwise_count bitwise_invert bitwise_not invert",
    "f(b, c)": "logical_and logical_or logical_xor",
    "f(b)": "logical_not",
    "f(x.T, y)": "matmul dot",
    "f([x, y])": "block column_stack concatenate concat dstack hstack stack vstack",
    "f(v, w)": "convolve correlate cross inner kron outer polyadd polymul polysub",
    "f(v)": "diagflat ix_ meshgrid polyder polyint poly vander corrcoef cov",
    "f(x, 2)": "array_split hsplit split repeat tile ldexp",
}
CALLS = {
    "append": "f(x, y, axis=1)",
    "apply_along_axis": "f(jnp.cumsum, 1, x)",
    "apply_over_axes": "f(jnp.sum, x, [1])",
    "argpartition": "f(x, 2, axis=1)",
    "astype": "f(x, 'float16')",
    "argwhere": "f(b, size=3)",
    "average": "f(x, weights=y * y, axis=1)",
    "bincount": "f(v.astype(int) % 4, length=5)",
    "broadcast_to": "f(x, (3, 8, 4))",
    "choose": "f(n % 2, [x, y], mode='clip')",
    "clip": "f(x, 0.0, 0.5)",
    "compress": "f(jnp.array([True, False, True, True]), x, axis=1, size=3)",
    "cross": "f(x[:, :3], y[:, :3])",
    "cumulative_prod": "f(x, axis=1)",
    "cumulative_sum": "f(x, axis=1)",
    "delete": "f(x, 1, axis=1)",
    "diag_indices_from": "f(s)",
    "digitize": "f(x, jnp.array([-1.0, 0.0, 1.0]))",
    "dsplit": "f(x.reshape(8, 2, 2), 2)",
    "einsum": "f('ij,kj->ik', x, y)",
    "expand_dims": "f(x, 1)",
    "extract": "f(b, x, size=3)",
    "fill_diagonal": "f(s, 1.0, inplace=False)",
    "flatnonzero": "f(b, size=3)",
    "full_like": "f(x, 2.5)",
    "histogram": "f(x, bins=4, range=(-1.0, 1.0))",
    "histogram2d": "f(v, w, bins=2, range=[(-1.0, 1.0), (-1.0, 1.0)])",
    "histogram_bin_edges": "f(x, bins=4)",
    "histogramdd": "f(x[:, :2], bins=2, range=[(-1.0, 1.0), (-1.0, 1.0)])",
    "insert": "f(x, 1, 0.5, axis=1)",
    "interp": "f(x, jnp.array([-1.0, 0.0, 1.0]), jnp.array([3.0, 1.0, 2.0]))",
    "intersect1d": "f(v, w, size=4)",
    "isin": "f(n, jnp.array([1, 3]))",
    "lexsort": "f((v, w))",
    "matvec": "f(s, v)",
    "moveaxis": "f(x, 0, 1)",
    "nanpercentile": "f(x, 30.0, axis=1)",
    "nanquantile": "f(x, 0.3, axis=1)",
    "nonzero": "f(b, size=3)",
    "packbits": "f(b, axis=1)",
    "pad": "f(x, ((0, 0), (1, 1)))",
    "partition": "f(x, 2, axis=1)",
    "percentile": "f(x, 30.0, axis=1)",
    "permute_dims": "f(x, (1, 0))",
    "piecewise": "f(x, [x < 0, x > 1], [jnp.sin, jnp.cos, 0.5])",
    "place": "f(x, b, 0.5, inplace=False)",
    "polydiv": "f(v, w[:3] + 3)",
    "polyfit": "f(w, v, 2)",
    "polyval": "f(v, u)",
    "pow": "f(u, y)",
    "power": "f(u, y)",
    "put": "f(x, jnp.array([0, 5]), 0.5, inplace=False)",
    "put_along_axis": "f(x, n % 4, y, axis=1, inplace=False)",
    "quantile": "f(x, 0.3, axis=1)",
    "ravel_multi_index": "f((n % 4, m % 4), (4, 4), mode='clip')",
    "reshape": "f(x, (8, 2, 2))",
    "resize": "f(x, (4, 4))",
    "roll": "f(x, 1, axis=1)",
    "rollaxis": "f(x, 1)",
    "roots": "f(v, strip_zeros=False)",
    "searchsorted": "f(jnp.array([-1.0, 0.0, 1.0]), x)",
    "select": "f([x < 0, x > 1], [x, y], 0.5)",
    "setdiff1d": "f(v, w, size=4)",
    "setxor1d": "f(v, w, size=4)",
    "swapaxes": "f(x, 0, 1)",
    "minmax": "f(x)",
    "top_k": "f(x, 2)",
    "take": "f(x, jnp.array([0, 2]), axis=1)",
    "take_along_axis": "f(x, n % 4, axis=1)",
    "tensordot": "f(x, y, axes=[[0], [0]])",
    "tril_indices_from": "f(s)",
    "triu_indices_from": "f(s)",
    "union1d": "f(v, w, size=4)",
    "unique": "f(n, size=4)",
    "unique_all": "f(n, size=4)",
    "unique_counts": "f(n, size=4)",
    "unique_inverse": "f(n, size=4)",
    "unique_values": "f(n, size=4)",
    "unpackbits": "f((n % 4).astype('uint8'), axis=1)",
    "unravel_index": "f(n % 16, (4, 4))",
    "unstack": "f(x, axis=1)",
    "vecmat": "f(v, s)",
    "vsplit": "f(x, 2)",
    "where": "f(b, x, 0.5)",
    "linalg.cond": "f(s)",
    "linalg.cross": "f(x[:, :3], y[:, :3])",
    "linalg.lstsq": "f(s, v)",
    "linalg.matmul": "f(x.T, y)",
    "linalg.matrix_power": "f(s, 3)",
    "linalg.multi_dot": "f([x.T, y, x.T])",
    "linalg.outer": "f(v, w)",
    "linalg.pinv": "f(s)",
    "linalg.solve": "f(s, v)",
    "linalg.tensordot": "f(x, y)",
    "linalg.tensorinv": "f(s, ind=1)",
    "linalg.tensorsolve": "f(s, v)",
    "linalg.vecdot": "f(x, y)",
    "fft.hfft": "f(z)",
    "fft.ihfft": "f(x)",
    "fft.rfft": "f(x)",
    "fft.rfft2": "f(x)",
    "fft.rfftn": "f(x)",
    "nn.celu": "f(x)",
    "nn.dot_product_attention": "f(q, q, q)",
    "nn.logmeanexp": "f(x, axis=1)",
    "nn.logsumexp": "f(x, axis=1)",
    "nn.one_hot": "f(n % 4, 4)",
    "nn.log1mexp": "f(u)",
    "nn.softmax": "f(x, axis=-1)",
    "nn.log_softmax": "f(x, axis=-1)",
    "nn.standardize": "f(x, axis=-1)",
    "nn.glu": "f(x, axis=1)",
}
CALLS |= {
    f"linalg.{name}": "f(s)"
    for name in "cholesky det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_rank "
    "matrix_transpose norm qr slogdet svd svdvals trace vector_norm".split()
}
CALLS |= {
    name: call for call, names in SHARED.items() for name in names.split() if name not in CALLS
}
OTHER = {
    "makes an array from numbers: place it, or use dt.zeros and its like": "arange bartlett "
    "blackman diag_indices empty eye fft.fftfreq fft.rfftfreq fromfunction fromiter full geomspace "
    "hamming hanning identity indices kaiser linspace logspace mask_indices ones tri tril_indices "
    "triu_indices zeros",
    "looks at shapes and dtypes": "broadcast_shapes can_cast einsum_path iscomplexobj isdtype "
    "isrealobj isscalar issubdtype iterable ndim promote_types result_type shape size",
    "reads, writes or prints on the host": "array_repr array_str from_dlpack frombuffer fromfile "
    "fromstring get_printoptions load printoptions save savez set_printoptions",
    "makes a function: give it to dt.jit": "frompyfunc vectorize",
    "its result's shape depends on values, which JAX does not compile": "trim_zeros",
    "needs formats of accelerators": "nn.get_scaled_dot_general_config nn.scaled_dot_general "
    "nn.scaled_matmul",
}
REASONS = {name: why for why, names in OTHER.items() for name in names.split()}
# not unique: a factor's sign, an order; compared by what they are for
LOOSE = {"linalg.eig", "linalg.eigvals", "roots"}


def functions() -> dict[str, Any]:
    """All of jax.numpy, its linalg and fft, and jax.nn, by name."""
    found = {}
    for prefix, module in (
        ("", jnp), ("linalg.", jnp.linalg), ("fft.", jnp.fft), ("nn.", jax.nn),
    ):  # fmt: skip
        for name in dir(module):
            value = getattr(module, name)
            plain = isinstance(value, type) or not callable(value)
            if not name.startswith("_") and not plain:
                found[prefix + name] = value
    return found


def call_of(name: str) -> str | None:
    """How it is called, None for what is not an operation on arrays."""
    if name in REASONS:
        return None
    return CALLS.get(name, "f(x)" if name.startswith("nn.") else "f(z)" if "fft." in name else "")


def ours(name: str) -> Any:
    if name.startswith("nn."):
        return getattr(dt.nn, name[3:])
    found = dt.numpy
    for part in name.split("."):
        found = getattr(found, part)
    return found


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def floats(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), "float32")

    s = floats(8, 8)
    return {
        "x": floats(8, 4), "y": floats(8, 4), "v": floats(8), "w": floats(8), "t": s,
        "u": jnp.asarray(rng.uniform(0.1, 0.9, (8, 4)), "float32"),
        "n": jnp.asarray(rng.integers(0, 6, (8, 4))), "m": jnp.asarray(rng.integers(1, 5, (8, 4))),
        "b": floats(8, 4) > 0, "c": floats(8, 4) > 0, "s": s @ s.T + 8 * jnp.eye(8),
        "z": floats(8, 4) + 1j * floats(8, 4), "q": floats(4, 4, 2, 8),
    }  # fmt: skip


def called(function: Any, call: str, given: dict[str, Any]) -> Any:
    return eval(call, {"f": function, "jnp": jnp, **given})


def placed(given: dict[str, Any], mesh: Any) -> dict[str, Any]:
    return {name: dt.distribute_tensor(x, mesh, "S0") for name, x in given.items()}


def describe(name: str, mesh: Any) -> str:
    """What comes of it where nothing may move."""
    call = call_of(name)
    if call is None:
        return f"| `{name}` | | {REASONS[name]} |"
    try:
        with dt.redistribution("never"):
            found = called(ours(name), call, placed(arrays(), mesh))
    except dt.PlacementMismatchError:
        return f"| `{name}` | `{call}` | moves data |"
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dt.DTensor))
    where = {str(x.placements[0]) for x in leaves if isinstance(x, dt.DTensor)}
    return f"| `{name}` | `{call}` | {', '.join(sorted(where))} |"


HEAD = """# jax.numpy and jax.nn on DTensors

Made by `python tests/numpy_calls.py`. `dt.numpy` and `dt.nn` have every name of `jax.numpy` and
`jax.nn`. The second column is a call with operands whose first dim is sharded (x, y, u floats
[8, 4]; n, m integers; b, c bools; s [8, 8]; v, w [8]; z complex; q [4, 4, 2, 8]). The third says
how its results lie in strict mode, where nothing is sent but by a row that names it, or that data
has to move: an error in strict mode, done under `with dt.redistribution("auto")`. Every call is
compared with one device. Types and constants (`float32`, `pi`, `newaxis`) are those of `jax.numpy`.

| name | call | results |
|---|---|---|
"""


def lines(mesh: Any) -> Iterator[str]:
    for name in functions():
        yield describe(name, mesh)


if __name__ == "__main__":
    dt.simulate_devices(8)
    page = Path(__file__).parent.parent / "docs/numpy.md"
    page.write_text(HEAD + "\n".join(lines(dt.init_device_mesh((4,), ("tp",)))) + "\n")
    sys.exit()
