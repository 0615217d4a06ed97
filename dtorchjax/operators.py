"""Arithmetic on DTensors: every operation is a small whole-array program, planned once and kept.

Operands are taken as they lie and results come as the primitives' tables give them, partial ones
included. A mismatch is an error; `with redistribution("auto"):` moves data instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dtorchjax import _jax
from dtorchjax.collectives import current_view
from dtorchjax.errors import PlacementError

if TYPE_CHECKING:
    from dtorchjax.dtensor import DTensor
    from dtorchjax.placements import Layout
    from dtorchjax.program import Program

NUMBERS = (int, float, complex)
ARRAYS = (jax.Array, np.ndarray, np.generic)
MODES = ("never", "auto")
_mode = contextvars.ContextVar("redistribution", default="never")


def redistribution(mode: str) -> contextlib.AbstractContextManager[None]:
    """What operations on DTensors do where placements do not fit, inside a `with` block.

    "never" (the default): PlacementMismatchError. "auto": they move data, the cheapest way. It
    holds for the thread, or the task, that enters the block. Raises ValueError for anything else.

    >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
    >>> x = distribute_tensor(jnp.ones((8, 16)), mesh, "S0,R")
    >>> y = distribute_tensor(jnp.ones((8, 16)), mesh, "S1,R")
    >>> with redistribution("auto"):
    ...     (x + y).shape
    (8, 16)
    """
    if mode not in MODES:
        raise ValueError(f"redistribution is 'never' or 'auto', not {mode!r}")
    return _redistribution(mode)


@contextlib.contextmanager
def _redistribution(mode: str) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


# ---- one operation -------------------------------------------------------------------------------


def run_eagerly(fun: Callable[..., Any], /, *args: Any, **static: Any) -> Any:
    """`fun(*args, **static)` on whole arrays; every array of the result is a DTensor.

    `args` are pytrees of DTensors (on one mesh), arrays and numbers; what is not a DTensor is R,
    but a jax.Array that lies on the mesh counts as it lies. `static` values are part of the
    program, which is kept for the next call with the same types, layouts and static values.

    Under a transformation (jax.grad) a result without dims is a plain array, reduced.

    Raises PlacementMismatchError where placements do not fit, PlacementError for two meshes.

    >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
    >>> x = distribute_tensor(jnp.ones((8, 16)), mesh, "S0,R")
    >>> run_eagerly(jnp.linalg.norm, x, axis=1).placements
    (Shard(0), Replicate())
    """
    if _jax.in_whole_trace():  # DTensors are constants of the program that is being traced
        return fun(*jax.tree.map(_constant, args, is_leaf=_is_dtensor), **static)
    if current_view() is not None:
        raise PlacementError(
            "the body of a dfunction uses a DTensor, but it sees one device's parts: pass it as an "
            "argument"
        )
    tree = None
    kinds = tuple(map(_kind, args))
    if None in kinds:
        leaves, tree = jax.tree.flatten(args, is_leaf=_is_dtensor)
        args, kinds = tuple(leaves), tuple(map(_kind, leaves))
    key = fun, tree, kinds, _mode.get(), _jax.settings(), _frozen(static) if static else None
    operation = _operations.get(key)
    if operation is None:
        operation = _operations[key] = _make(fun, static, args, tree)
        if len(_operations) > MOST_OPERATIONS:
            _operations.pop(next(iter(_operations)), None)
    return operation(args)


MOST_OPERATIONS = 2048
_operations: dict[Any, _Operation] = {}
"""The operations made last, by function, static values, kinds of operands, mode and settings."""


class _Operation(NamedTuple):
    """A program and what a call of it needs at once."""

    program: Program
    run: Callable[..., list[Any]]
    wrap: list[Callable[[Any], Any]]
    one_result: bool

    def __call__(self, args: Sequence[Any]) -> Any:
        program = self.program
        storages = [
            x.storage if isinstance(x, Operators) else _put(x, layout)
            for x, layout in zip(args, program.in_layouts, strict=True)
        ]
        results = self.run(*storages)
        if self.one_result:
            return self.wrap[0](results[0])
        wrapped = [wrap(x) for wrap, x in zip(self.wrap, results, strict=True)]
        return jax.tree.unflatten(program.out_tree, wrapped)


def _make(
    fun: Callable[..., Any], static: dict[str, Any], args: Sequence[Any], tree: Any
) -> _Operation:
    from dtorchjax.arguments import to_layout
    from dtorchjax.dtensor import DTensor, padding_of
    from dtorchjax.program import Wanted, layout_as_it_lies, make_program, shape_of, whole_aval

    meshes = list(dict.fromkeys(x.layout.mesh for x in args if _is_dtensor(x)))
    if len(meshes) != 1:
        raise PlacementError(
            f"operands on two meshes, {meshes[0]} and {meshes[1]}: redistribute does not cross "
            "meshes; take full_tensor() of one and distribute it on the other"
            if meshes
            else "no operand is a DTensor"
        )
    mesh = meshes[0]
    traced = any(isinstance(_storage(x), _jax.Tracer) for x in args)
    replicated = to_layout("R", mesh, ())
    layouts = [layout_as_it_lies(x, mesh) or to_layout("R", mesh, shape_of(x)) for x in args]

    def flat(*xs: Any) -> Any:
        return fun(*(xs if tree is None else jax.tree.unflatten(tree, xs)), **static)

    def lie(shapes: Any) -> list[Any]:
        return [
            Wanted(replicated, asked=True) if traced and not x.shape else Wanted(None, partial=True)
            for x in jax.tree.leaves(shapes)
        ]

    program = make_program(
        flat, mesh, [whole_aval(x) for x in args], layouts, layouts, lie,
        [_label(x) for x in args], strict=_mode.get() == "never", eager=True,
    )  # fmt: skip

    def wrapper(layout: Layout, shape: tuple[int, ...]) -> Callable[[Any], Any]:
        # under jax.grad a loss must be an array, not a pytree of one
        if traced and not shape:
            return lambda x: x
        padded = padding_of(layout, shape)
        return lambda x: DTensor(x, layout, padded)

    wrap = [
        wrapper(layout, aval.shape)
        for layout, aval in zip(program.out_layouts, program.out_avals, strict=True)
    ]
    constants = program.constants
    run = program.run if not constants else (lambda *xs: program.run(*xs, *constants))
    if _jax.is_checking():
        run = program
    one = program.out_tree == jax.tree.structure(0)
    return _Operation(program, program.differentiable if traced else run, wrap, one)


def _kind(x: Any) -> Any:
    """What a program depends on of an operand; None for a tree."""
    if isinstance(x, Operators):
        storage = x.storage
        traced = isinstance(storage, _jax.Tracer)
        return x.layout, x.padded, storage.shape, storage.dtype, traced
    if isinstance(x, NUMBERS):
        return type(x)
    if isinstance(x, jax.Array):
        if isinstance(x, _jax.Tracer):
            return _jax.Tracer, jax.typeof(x)
        return jax.typeof(x), x.sharding
    return (np.ndarray, x.shape, x.dtype) if isinstance(x, ARRAYS) else None


def _label(x: Any) -> str:
    """What errors call an operand."""
    return "a DTensor" if _is_dtensor(x) else "a number" if isinstance(x, NUMBERS) else "an array"


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, Operators)


def _storage(x: Any) -> Any:
    return x.storage if isinstance(x, Operators) else x


def _constant(x: Any) -> Any:
    return x.to_array() if isinstance(x, Operators) else x


def _put(x: Any, layout: Layout) -> Any:
    if isinstance(x, NUMBERS):
        return _number(x, repr(x), layout, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    from dtorchjax.program import storage_of

    return storage_of(x, layout)


@functools.lru_cache(maxsize=1024)
def _number(x: Any, text: str, layout: Layout, x64: bool) -> jax.Array:
    """A number on every device; `text` tells 0.0 from -0.0, and 1 from True."""
    from dtorchjax.program import storage_of

    with jax.ensure_compile_time_eval():  # an outer trace must not get hold of it
        return storage_of(x, layout)


# ---- static values, and the arrays among them ----------------------------------------------------


class _Hole(int):
    """Stands in a static value for an array, which it counts."""


def _without_arrays(value: Any, arrays: list[Any]) -> Any:
    """The value with a hole for every array in it; the arrays are appended to `arrays`.

    numpy's scalars stay: they may be an axis or a size.
    """
    if isinstance(value, jax.Array | np.ndarray | Operators):
        arrays.append(value)
        return _Hole(len(arrays) - 1)
    if type(value) in (tuple, list):
        return type(value)(_without_arrays(v, arrays) for v in value)
    if type(value) is dict:
        return {k: _without_arrays(v, arrays) for k, v in value.items()}
    return value


def _with_arrays(value: Any, arrays: Sequence[Any]) -> Any:
    """The inverse of `_without_arrays`."""
    if isinstance(value, _Hole):
        return arrays[value]
    if type(value) in (tuple, list):
        return type(value)(_with_arrays(v, arrays) for v in value)
    if type(value) is dict:
        return {k: _with_arrays(v, arrays) for k, v in value.items()}
    return value


def _frozen(value: Any) -> Any:
    """A key for a static value: slices have no hash, and 1, 1.0 and True are equal."""
    kind = type(value)
    if kind is slice:
        return kind, _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    if kind in (tuple, list):
        return kind, *map(_frozen, value)
    if kind is dict:
        return kind, *((k, _frozen(v)) for k, v in value.items())
    return kind, (repr(value) if kind in (float, complex) else value)


# ---- what a DTensor can do -----------------------------------------------------------------------

_Binary = Callable[[Any, Any], "DTensor"]


def _operator(fun: Callable[[Any, Any], Any]) -> tuple[_Binary, _Binary]:
    """An operator of two operands and its reflection."""

    def known(other: Any) -> bool:
        if type(other) in (list, tuple, dict, set):  # `==` would be False
            raise TypeError(
                f"unsupported operand type for {fun.__name__}: DTensor and "
                f"{type(other).__name__}; make it an array first"
            )
        return isinstance(other, (Operators, *NUMBERS, *ARRAYS))

    def forward(self: Any, other: Any) -> DTensor:
        return run_eagerly(fun, self, other) if known(other) else NotImplemented

    def reflected(self: Any, other: Any) -> DTensor:
        return run_eagerly(fun, other, self) if known(other) else NotImplemented

    return forward, reflected


def _unary(fun: Callable[[Any], Any]) -> Callable[[Any], DTensor]:
    return lambda self: run_eagerly(fun, self)


def _method(name: str) -> Callable[..., DTensor]:
    def fun(x: Any, *args: Any, **named: Any) -> Any:
        return getattr(x, name)(*args, **named)

    method = on_dtensors(fun)
    method.__name__ = name
    method.__doc__ = f"`jax.Array.{name}` of the whole array; the result lies as it comes."
    return method


def on_dtensors(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of whole arrays as an operation on DTensors, if one is among its arguments.

    Arrays anywhere in the arguments, and floats that stand alone, are operands; all else is static
    and part of the program. See `run_eagerly`.
    """

    def whole(*arrays: Any, call: Any) -> Any:
        args, named = _with_arrays(call, arrays)
        return fun(*args, **named)

    @functools.wraps(fun, updated=())
    def operation(*args: Any, **named: Any) -> Any:
        arrays: list[Any] = []
        call = _without_arrays((args, named), arrays)
        if not any(isinstance(x, Operators) for x in arrays):
            return fun(*args, **named)
        given = []
        for x in call[0]:
            if type(x) in (float, complex):  # one program for all values, as of an operator
                arrays.append(x)
                x = _Hole(len(arrays) - 1)
            given.append(x)
        return run_eagerly(whole, *arrays, call=(tuple(given), call[1]))

    return operation


class Functions:
    """The functions of a module of whole arrays, as operations on DTensors; all else as it is.

    `queries` look at shapes and dtypes only and are asked of an array of that shape; what is
    `like` an array lies as it does; `plain` functions and `modules` within are treated apart.
    """

    def __init__(
        self, module: Any, *, queries: Sequence[str] = (), plain: Sequence[str] = (),
        modules: Sequence[str] = (),
    ):  # fmt: skip
        self._module, self._queries, self._plain = module, queries, plain
        self._modules = modules

    def __dir__(self) -> list[str]:
        return sorted(name for name in dir(self._module) if not name.startswith("_"))

    def __getattr__(self, name: str) -> Any:
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name in self._modules:
            return Functions(value)
        if name in self._queries:
            return _query(value)
        if name in self._plain or isinstance(value, type) or not callable(value):
            return value
        if name.endswith("_like"):
            return _like(value)
        operation = on_dtensors(value)
        for method in UFUNC if isinstance(value, jax.numpy.ufunc) else ():
            setattr(operation, method, on_dtensors(getattr(value, method)))
        return operation


UFUNC = ("accumulate", "at", "outer", "reduce", "reduceat")


def _query(fun: Callable[..., Any]) -> Callable[..., Any]:
    def stands_for(x: Any) -> Any:
        # neither holds the array's memory nor looks at what is in it
        return np.broadcast_to(np.zeros((), x.dtype), x.shape) if _is_dtensor(x) else x

    @functools.wraps(fun)
    def query(*args: Any, **named: Any) -> Any:
        args, named = jax.tree.map(stands_for, (args, named), is_leaf=_is_dtensor)
        return fun(*args, **named)

    return query


def _like(fun: Callable[..., Any]) -> Callable[..., Any]:
    operation = on_dtensors(fun)

    @functools.wraps(fun)
    def like(a: Any, *args: Any, **named: Any) -> Any:
        found = operation(a, *args, **named)
        if not _is_dtensor(a) or not _is_dtensor(found) or found.shape != a.shape:
            return found
        return found.redistribute(a.layout.without_terms())

    return like


def _property(name: str) -> Any:
    get = operator.attrgetter(name)
    return property(lambda self: run_eagerly(get, self), doc=f"`jax.Array.{name}`.")


def _integer_power(x: Any, exponent: int) -> Any:
    return x**exponent


def _take(x: Any, *arrays: Any, index: Any) -> Any:
    return x[_with_arrays(index, arrays)]


def _row(x: Any, i: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


class Operators:
    """The arithmetic of a `DTensor`: operators, indexing and methods as a jax.Array has them.

    Each runs as a small whole-array program under the primitives' tables; see `run_eagerly` for
    what may stand beside a DTensor, `redistribution` for placements that do not fit. Raises
    PlacementMismatchError with remedies where they do not.

    >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
    >>> x = distribute_tensor(jnp.ones((8, 16)), mesh, "S0,S1")
    >>> w = distribute_tensor(jnp.ones((16, 4)), mesh, "R,S0")
    >>> (x @ w).placements
    (Shard(0), Partial())
    >>> y = (x @ w).reduce_partial() + 1.0
    >>> y.placements, float(y.sum().reduce_partial())
    ((Shard(0), Replicate()), 544.0)
    """

    __slots__ = ()
    __array_priority__ = 1000  # above numpy's and jax's arrays: they leave the operator to us

    if TYPE_CHECKING:  # what the subclass has
        storage: Any
        layout: Layout
        padded: Any
        shape: Any

        def to_array(self) -> jax.Array: ...

    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv)
    __mod__, __rmod__ = _operator(operator.mod)
    __divmod__, __rdivmod__ = _operator(divmod)
    __matmul__, __rmatmul__ = _operator(operator.matmul)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __lt__, __gt__ = _operator(operator.lt)[0], _operator(operator.gt)[0]
    __le__, __ge__ = _operator(operator.le)[0], _operator(operator.ge)[0]
    __eq__ = _operator(operator.eq)[0]  # type: ignore[assignment]
    __ne__ = _operator(operator.ne)[0]  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    _pow, __rpow__ = _operator(operator.pow)

    def __run_eagerly__(self, fun: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Operators of `dt.ops` call this; see `run_eagerly`."""
        return run_eagerly(fun, *args, **static)

    def __pow__(self, other: Any) -> DTensor:
        if type(other) is int:  # part of the program, as for a jax.Array: x**2 is x * x
            return run_eagerly(_integer_power, self, exponent=other)
        return self._pow(other)

    def __getitem__(self, index: Any) -> DTensor:
        """`x[2:4]`, `x[None, ..., 0]`, `x[rows]`: arrays are operands, all else is static."""
        is_row = isinstance(index, int | np.integer) and not isinstance(index, bool)
        if is_row and self.shape:  # one program for all rows
            return run_eagerly(_row, self, index)
        arrays: list[Any] = []
        index = _without_arrays(index, arrays)
        return run_eagerly(_take, self, *arrays, index=index)

    def __iter__(self) -> Iterator[DTensor]:
        if not self.shape:
            raise TypeError("iteration over a 0-d DTensor")
        return (self[i] for i in range(self.shape[0]))

    @property
    def at(self) -> At:
        """`x.at[index].set(values)`, also get, add, subtract, multiply, divide, power, min, max."""
        return At(self)

    T, mT = _property("T"), _property("mT")
    real, imag = _property("real"), _property("imag")
    all = _method("all")
    any = _method("any")
    argmax = _method("argmax")
    argmin = _method("argmin")
    argsort = _method("argsort")
    astype = _method("astype")
    clip = _method("clip")
    conj = _method("conj")
    copy = _method("copy")
    cumprod = _method("cumprod")
    cumsum = _method("cumsum")
    diagonal = _method("diagonal")
    dot = _method("dot")
    flatten = _method("flatten")
    max = _method("max")
    mean = _method("mean")
    min = _method("min")
    prod = _method("prod")
    ravel = _method("ravel")
    repeat = _method("repeat")
    reshape = _method("reshape")
    round = _method("round")
    sort = _method("sort")
    squeeze = _method("squeeze")
    std = _method("std")
    sum = _method("sum")
    swapaxes = _method("swapaxes")
    take = _method("take")
    trace = _method("trace")
    transpose = _method("transpose")
    var = _method("var")


def _update(name: str) -> Callable[..., DTensor]:
    """A method of `jax.Array.at[index]`."""

    def fun(x: Any, values: Any, arrays: Any, index: Any, options: Any) -> Any:
        return getattr(x.at[_with_arrays(index, arrays)], name)(*values, **dict(options))

    def update(self: Any, *values: Any, **options: Any) -> DTensor:
        arrays: list[Any] = []
        index = _without_arrays(self.index, arrays)
        return run_eagerly(fun, self.array, values, arrays, index=index, options=options)

    update.__name__ = name
    update.__doc__ = f"`jax.Array.at[index].{name}`: a new DTensor."
    return update


class At:
    """`x.at`, and `x.at[index]`: changes of parts of a DTensor, each a new DTensor."""

    __slots__ = ("array", "index")

    def __init__(self, array: Any, index: Any = None):
        self.array, self.index = array, index

    def __getitem__(self, index: Any) -> At:
        return At(self.array, index)

    get = _update("get")
    set = _update("set")
    add = _update("add")
    subtract = _update("subtract")
    multiply = _update("multiply")
    divide = _update("divide")
    power = _update("power")
    min = _update("min")
    max = _update("max")


__all__ = ["Functions", "Operators", "on_dtensors", "redistribution", "run_eagerly"]
