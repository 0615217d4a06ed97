"""DTensor: one array, and where its parts lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtorchjax import _jax
from dtorchjax.arguments import layout_of_sharding, spread_prefix, to_layout
from dtorchjax.chips import speeds_of
from dtorchjax.errors import PlacementError
from dtorchjax.lower import add_terms, drop_terms, storage_spec
from dtorchjax.operators import Operators
from dtorchjax.padding import filled
from dtorchjax.parts import join, spread
from dtorchjax.placements import (
    Layout,
    Partial,
    Placement,
    R,
    allowed_by,
    is_plain,
    joint,
    stored_shape,
)
from dtorchjax.redistribute import apply_move, table
from dtorchjax.registry import linear_position
from dtorchjax.rows import canonical


@jax.tree_util.register_pytree_with_keys_class
class DTensor(Operators):
    """An array of global `shape` whose parts lie on the devices of `mesh` by `placements`.

    The storage is one `jax.Array`: for R and S the array itself with a NamedSharding; for P there
    is one leading dim per partial axis, sharded on it, with one term per device. Where a dim does
    not divide, or is cut in blocks, the storage has the devices' parts one after the other, with
    zeros as padding. Make one with `distribute_tensor`; a DTensor is a pytree of its storage.
    """

    __slots__ = ("layout", "padded", "storage")

    def __init__(self, storage: Any, layout: Layout, padded: tuple[tuple[int, int], ...] = ()):
        """`padded`: (dim, size) of the dims whose storage is longer than they are."""
        self.storage, self.layout, self.padded = storage, layout, padded

    @classmethod
    def of_shape(cls, storage: Any, layout: Layout, shape: Sequence[int]) -> DTensor:
        """The DTensor of this global shape."""
        return cls(storage, layout, padding_of(layout, tuple(shape)))

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("storage"), self.storage),), (self.layout, self.padded)

    def tree_flatten(self):
        return (self.storage,), (self.layout, self.padded)

    @classmethod
    def tree_unflatten(cls, kept: Any, children: Sequence[Any]) -> DTensor:
        return cls(children[0], *kept)

    # ---- what it is

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.layout.placements

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        found = tuple(self.storage.shape[self._terms :])
        if self.padded:
            true = dict(self.padded)
            return tuple(true.get(d, n) for d, n in enumerate(found))
        return found

    @property
    def dtype(self) -> Any:
        return self.storage.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def _terms(self) -> int:
        return len(self.layout.joint.partial_axes())

    def _check(self) -> None:
        sizes = self.layout.sizes
        lead = tuple(sizes[a] for a in self.layout.joint.partial_axes())
        storage = getattr(self.storage, "shape", None)
        if storage is None or tuple(storage[: len(lead)]) != lead:
            raise PlacementError(
                f"the storage of this DTensor (shape {storage}) does not fit its layout "
                f"{self.layout}: a transformation took its terms apart; reduce_partial() it first"
            )
        shape = self.shape
        _fits(self.layout, shape)
        stored = stored_shape(shape, self.layout.joint, sizes)
        if tuple(storage[len(lead) :]) != stored:
            raise PlacementError(
                f"the storage of this DTensor (shape {storage}) does not fit its layout "
                f"{self.layout}, in which an array of shape {shape} takes {(*lead, *stored)}: a "
                "transformation changed dims that are padded; use dt.jit, or redistribute it first"
            )

    # ---- conversions

    def redistribute(self, placements: Any) -> DTensor:
        """The same array, placed otherwise. P comes only from R (as value and zeros) or P.

        `placements`: any form that `distribute_tensor` takes. Raises PlacementError if a dim does
        not exist or does not divide.
        """
        self._check()
        target = to_layout(placements, self.mesh, self.shape)
        traced = isinstance(self.storage, _jax.Tracer)
        make = _differentiable_mover if traced else _mover
        moved = make(self.mesh, self.layout, target, self.shape, self.dtype)
        return DTensor.of_shape(moved(self.storage), target, self.shape)

    def reduce_partial(self) -> DTensor:
        """P becomes R; R and S stay. One all-reduce per kind of P, over all its axes at once."""
        return self.redistribute(self.layout.without_terms())

    def full_tensor(self) -> jax.Array:
        """The whole array, replicated on every device of the mesh."""
        return self.redistribute("R").storage

    def to_array(self) -> jax.Array:
        """The jax.Array as it lies, without communication. Raises PlacementError for P.

        No jax.Array lies unevenly or in blocks: dims that do so are gathered.
        """
        if self._terms:
            raise PlacementError(
                f"this DTensor is a partial result {self.layout}; reduce_partial() it first"
            )
        self._check()
        if is_plain(self.shape, self.layout.joint, self.layout.sizes):
            return self.storage
        return self.redistribute(as_array(self.layout, self.shape)).storage

    def to_local(self) -> jax.Array:
        """One block per device: an array of shape `(*mesh.shape, *local_shape)`."""
        self._check()
        return _blocks(self.layout, self.ndim)(self.storage)

    @staticmethod
    def from_local(
        blocks: Any, mesh: Mesh, placements: Any, shape: Sequence[int] | None = None
    ) -> DTensor:
        """The inverse of `to_local`: blocks of shape `(*mesh.shape, *local_shape)`.

        Where an axis is R, the block of its first device counts. `shape` is the global shape, for
        dims that do not divide; all blocks are full where it is not given.
        """
        n = len(mesh.axis_names)
        sizes = tuple(mesh.shape[a] for a in mesh.axis_names)
        if tuple(np.shape(blocks)[:n]) != sizes:
            raise PlacementError(
                f"blocks of shape {np.shape(blocks)} need leading dims {sizes}, one per mesh axis"
            )
        rank = len(np.shape(blocks)) - n
        layout = to_layout(placements, mesh, None, rank=rank)
        held = np.shape(blocks)[n:]
        if shape is None:
            shape = list(held)
            for size, p in zip(sizes, layout.placements, strict=True):
                if (dim := getattr(p, "dim", None)) is not None:
                    shape[dim] *= size
        layout = layout.resolve(shape)
        if layout.local_shape(shape) != tuple(held):
            raise PlacementError(
                f"an array of shape {tuple(shape)} placed {layout} has blocks of shape "
                f"{layout.local_shape(shape)}, not {tuple(held)}"
            )
        spread = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        storage = _from_blocks(layout, tuple(shape))(put(blocks, spread))
        return DTensor.of_shape(storage, layout, shape)

    # ---- as a jax.Array would

    def _value(self) -> np.ndarray:
        if self._terms:
            raise PlacementError(
                f"a partial result {self.layout} has no values yet; reduce_partial() it first"
            )
        if not (self.storage.is_fully_addressable or self.storage.is_fully_replicated):
            raise PlacementError(
                f"a part of this DTensor {self.layout} lies on devices of other processes: call "
                "full_tensor() on every process, then look at that"
            )
        found = np.asarray(self.storage)
        for dim, n in enumerate(self.shape):
            found = join(found, dim, n, self.layout.joint.cuts_on(dim, self.layout.sizes), np)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._value(), dtype=dtype)

    def __float__(self) -> float:
        return float(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __bool__(self) -> bool:
        return bool(self._value())

    def __index__(self) -> int:
        return self._value().__index__()

    def item(self) -> Any:
        return self._value().item()

    def __format__(self, how: str) -> str:
        return (
            format(self._value()[()] if self.ndim == 0 else self._value(), how)
            if how
            else str(self)
        )

    def block_until_ready(self) -> DTensor:
        jax.block_until_ready(self.storage)
        return self

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d DTensor")
        return self.shape[0]

    def __repr__(self) -> str:
        text = f"DTensor({self._summary()} {self.layout}"
        if self._terms:
            return text + ": partial terms, reduce_partial() gives the value)"
        if isinstance(self.storage, _jax.Tracer) or not isinstance(self.storage, jax.Array):
            return text + ")"
        keys = jnp.issubdtype(self.dtype, jax.dtypes.prng_key)
        if keys or not self.storage.is_fully_addressable or self.size > 1000:
            return text + ")"
        return text + ",\n" + np.array2string(self._value(), separator=", ") + ")"

    def _summary(self) -> str:
        try:
            return _jax.ShapedArray(self.shape, self.dtype).str_short(short_dtypes=True)
        except (AttributeError, TypeError):
            return f"storage {self.storage!r}"

    def _repr_html_(self) -> str:
        from dtorchjax.visualize import visualize  # it draws other things as well

        return visualize(self)._repr_html_()

    def __str__(self) -> str:
        return str(self._value()) if self.ndim == 0 and not self._terms else repr(self)

    def __jax_array__(self) -> Any:
        if _jax.in_whole_trace():  # a constant of the program, where it lies
            return self.to_array()
        if _jax.asked_by_an_operator():
            return self  # no array: jax leaves `array + self` to us
        raise TypeError(
            "a jax.numpy function got a DTensor. Run it on the whole array with "
            "dt.jit(fun)(x), for example dt.jit(jnp.exp)(x), or take x.full_tensor()"
        )


@functools.lru_cache(maxsize=4096)
def _fits(layout: Layout, shape: tuple[int, ...]) -> None:
    layout.resolve(shape)


@functools.lru_cache(maxsize=4096)
def padding_of(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(dim, size) of the dims whose storage is longer than they are."""
    stored = stored_shape(shape, layout.joint, layout.sizes)
    return tuple((d, n) for d, (n, m) in enumerate(zip(shape, stored, strict=True)) if n != m)


def as_array(layout: Layout, shape: Sequence[int]) -> Layout:
    """The nearest layout that a jax.Array can have: whole where this is uneven, or in blocks."""
    sizes, where = layout.sizes, layout.joint
    found = list(layout.placements)
    for dim in range(len(shape)):
        axes = where.axes_on(dim)
        for count in range(len(axes), -1, -1):
            kept = [R if a in axes[count:] else p for a, p in enumerate(layout.placements)]
            alone = [p if a in axes else R for a, p in enumerate(kept)]
            if is_plain(shape, joint(alone, where.order), sizes):
                break
        for a in axes[count:]:
            found[a] = R
    return Layout(layout.mesh, tuple(found), layout.order)


def stored(array: Any, layout: Layout) -> Any:
    """An array (numpy's, jax's or a tracer) as its storage: padded, in blocks; not yet placed."""
    if is_plain(np.shape(array), layout.joint, layout.sizes):
        return array
    if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = stored(jax.random.key_data(array), layout)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    numpy = jnp if isinstance(array, jax.Array) else np
    array = numpy.asarray(array)
    for dim in range(array.ndim):
        array = spread(array, dim, layout.joint.cuts_on(dim, layout.sizes), numpy)
    return array


def put(array: Any, there: NamedSharding) -> jax.Array:
    """Lay an array from the host, or one device, out on a mesh.

    A process puts the parts of its own devices; all processes have the same array.
    """
    if there.is_fully_addressable or _is_global(array):
        return jax.device_put(array, there)
    if hasattr(array, "dtype") and not _plain(array.dtype):
        impl, spec = jax.random.key_impl(array), PartitionSpec(*there.spec)
        data = put(jax.random.key_data(array), NamedSharding(there.mesh, spec))
        return jax.device_put(jax.random.wrap_key_data(data, impl=impl), there)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, there, lambda part: host[part])


def _is_global(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


@functools.lru_cache(maxsize=4096)
def sharding(layout: Layout, rank: int) -> NamedSharding:
    """How an array of `rank` dims is stored in this layout."""
    return NamedSharding(layout.mesh, storage_spec(layout.joint, rank, layout.mesh.axis_names))


@functools.lru_cache(maxsize=1024)
def _mover(mesh: Mesh, source: Layout, target: Layout, shape: tuple[int, ...], dtype: Any) -> Any:
    """A compiled function from storage in one layout to storage in another."""
    names, sizes = tuple(mesh.axis_names), source.sizes
    start, end = canonical(source.joint, sizes), canonical(target.joint, sizes)
    kinds = tuple(
        sorted({p.op for w in (start, end) for p in w.placements if isinstance(p, Partial)})
    )
    allowed = allowed_by([(shape, start), (shape, end)], sizes)
    size = np.dtype(dtype).itemsize if _plain(dtype) else 8
    paths = table(shape, size, kinds, sizes, speeds_of(mesh), allowed)
    try:
        moves = paths.path(start, end)
    except ValueError:
        raise PlacementError(
            f"cannot make {target} of {source}: a partial {', '.join(kinds)} comes only from "
            "an operation that leaves it"
        ) from None

    def local(x: Any) -> Any:
        x = _drop(x, source)
        for move in moves:
            x = apply_move(x, move, names, sizes, shape)
        return _add(at_rest(x, shape, target), target)

    rank = len(shape)
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=storage_spec(source.joint, rank, names),
            out_specs=storage_spec(target.joint, rank, names),
            check_vma=False,
        )
    )


@functools.lru_cache(maxsize=1024)
def _differentiable_mover(
    mesh: Mesh, source: Layout, target: Layout, shape: tuple[int, ...], dtype: Any
) -> Any:
    """The same under a transformation: the identity as a program, whose gradient is planned too."""
    from dtorchjax.program import Wanted, make_program

    program = make_program(
        lambda x: x, mesh, [jax.ShapeDtypeStruct(shape, dtype)], [source], [source],
        lambda _: [Wanted(target, asked=True)], eager=True,
    )  # fmt: skip
    return lambda storage: program(storage)[0]


def _plain(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


def at_rest(x: Any, shape: Sequence[int], layout: Layout) -> Any:
    """A device's part with zeros as padding."""
    names, sizes = tuple(layout.mesh.axis_names), layout.sizes
    place = functools.partial(linear_position, names=names, sizes=sizes)
    return filled(x, shape, layout.joint, sizes, place, ["sum"] * len(shape))


def _drop(x: Any, layout: Layout) -> Any:
    return drop_terms(x, layout.joint)


def _add(x: Any, layout: Layout) -> Any:
    return add_terms(x, layout.joint)


@functools.lru_cache(maxsize=256)
def _blocks(layout: Layout, rank: int) -> Any:
    names = layout.mesh.axis_names

    def local(x: Any) -> Any:
        x = _drop(x, layout)
        return x.reshape((1,) * len(names) + x.shape)

    return jax.jit(
        jax.shard_map(
            local, mesh=layout.mesh, in_specs=storage_spec(layout.joint, rank, names),
            out_specs=PartitionSpec(*names), check_vma=False,
        )
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _from_blocks(layout: Layout, shape: tuple[int, ...]) -> Any:
    names, rank = layout.mesh.axis_names, len(shape)
    replicated = tuple(n for n, p in zip(names, layout.placements, strict=True) if p == R)

    def local(x: Any) -> Any:
        x = x.reshape(x.shape[len(names) :])
        if replicated:
            x = jax.lax.all_gather(x, replicated, axis=0, tiled=False)[0]
        return _add(at_rest(x, shape, layout), layout)

    return jax.jit(
        jax.shard_map(
            local, mesh=layout.mesh, in_specs=PartitionSpec(*names),
            out_specs=storage_spec(layout.joint, rank, names), check_vma=False,
        )
    )  # fmt: skip


def distribute_tensor(array: Any, mesh: Mesh, placements: Any, what: str = "array") -> DTensor:
    """Lay an array out on a mesh.

    `placements`: `"S0,R"`, `["S0", "R"]`, `"R"`, `{"tp": "S1"}`, a Layout, PartitionSpec or
    NamedSharding. A P(sum) placement puts the value on the first device and zeros on the others.
    A dim of n rows need not divide: each of k devices holds ceil(n / k), the last ones fewer.
    Where devices of several processes take part, each of them must give the same array.
    Raises PlacementError if a dim does not exist.

    >>> x = distribute_tensor(np.arange(8.), dt_mesh((2, 4), ("dp", "tp")), {"tp": "S0"})
    >>> x.placements
    (Replicate(), Shard(0))
    """
    if isinstance(array, DTensor):
        if array.mesh != mesh:
            raise PlacementError(f"{what} is on another mesh: {array.mesh} and {mesh}")
        return array.redistribute(placements)
    array = array if isinstance(array, jax.Array) else jnp.asarray(array)
    layout = to_layout(placements, mesh, array.shape, what=what)
    shape = array.shape
    if not layout.joint.partial_axes():
        storage = put(stored(array, layout), sharding(layout, len(shape)))
        return DTensor.of_shape(storage, layout, shape)
    return distribute_tensor(array, mesh, layout.without_terms()).redistribute(layout)


def from_process_local(tree: Any, mesh: Mesh, placements: Any) -> Any:
    """DTensors of which this process has the parts of its own devices, such as its batch.

    Each leaf is an array (of the host) with the rows that this process' devices hold, in their
    order; a dim that lies across processes is as many times longer. `placements` is as for
    `dt.distribute`. With one process it is `dt.distribute`. Nothing is sent. Raises
    PlacementError for partial sums, and for dims that do not divide.

    >>> mesh = dt_mesh((2, 4), ("dp", "tp"))
    >>> batch = {"text": np.ones((16, 128), np.int32)}
    >>> from_process_local(batch, mesh, {"text": {"dp": "S0"}})["text"].shape
    (16, 128)
    """
    where = spread_prefix(placements, tree, lambda x: isinstance(x, DTensor), "tree")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(
        structure,
        [
            _from_process_local(
                x, mesh, "R" if p is None else p, f"tree{jax.tree_util.keystr(path)}"
            )
            for (path, x), p in zip(leaves, where, strict=True)
        ],
    )


def _from_process_local(array: Any, mesh: Mesh, placements: Any, what: str) -> DTensor:
    array = np.asarray(array)
    layout = to_layout(placements, mesh, None, what, rank=array.ndim)
    there = sharding(layout.resolve([0] * array.ndim), array.ndim)
    try:
        whole = jax.make_array_from_process_local_data(there, array)
    except ValueError:  # it does not divide
        whole = None
    if whole is None or not layout.resolve(whole.shape, what).is_array(whole.shape):
        raise PlacementError(
            f"{what} of local shape {array.shape} cannot lie as {layout} says: a process has parts "
            "of equal size, and no terms or blocks; leave out the last rows, or give all processes "
            "the whole array (dt.distribute_tensor)"
        )
    return DTensor(whole, layout.resolve(whole.shape, what))


def from_array(array: jax.Array, mesh: Mesh | None = None) -> DTensor:
    """A jax.Array with a NamedSharding, seen as a DTensor. No communication."""
    layout = layout_of_sharding(array.sharding, array.ndim)
    if layout is None or (mesh is not None and layout.mesh != mesh):
        raise PlacementError(f"an array with sharding {array.sharding} lies on no mesh")
    return DTensor(array, layout)


def dt_mesh(shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """See `init_device_mesh`."""
    from dtorchjax.devices import init_device_mesh

    return init_device_mesh(tuple(shape), tuple(axis_names))


def zeros(shape: Sequence[int], mesh: Mesh, placements: Any, dtype: Any = None) -> DTensor:
    """A DTensor of zeros; no device ever holds more than its part."""
    return full(shape, 0, mesh, placements, dtype=dtype or jnp.float32)


def ones(shape: Sequence[int], mesh: Mesh, placements: Any, dtype: Any = None) -> DTensor:
    """A DTensor of ones."""
    return full(shape, 1, mesh, placements, dtype=dtype or jnp.float32)


def full(
    shape: Sequence[int], fill_value: Any, mesh: Mesh, placements: Any, dtype: Any = None
) -> DTensor:
    """A DTensor filled with one value."""
    return _create(lambda: jnp.full(tuple(shape), fill_value, dtype), shape, mesh, placements)


def randn(
    shape: Sequence[int], mesh: Mesh, placements: Any, key: Any = None, dtype: Any = None
) -> DTensor:
    """Normal random numbers: the same on any mesh, `jax.random.normal(key, shape)`.

    `key` is `jax.random.key(0)` where none is given.
    """
    key = jax.random.key(0) if key is None else key
    return _create(
        lambda: jax.random.normal(key, tuple(shape), dtype or jnp.float32), shape, mesh, placements
    )


def _create(make: Any, shape: Sequence[int], mesh: Mesh, placements: Any) -> DTensor:
    from dtorchjax.api import jit

    layout = to_layout(placements, mesh, tuple(shape))
    if layout.joint.partial_axes():
        return _create(make, shape, mesh, layout.without_terms()).redistribute(layout)
    array = jit(make, mesh=mesh, out_placements=layout)()
    return array if isinstance(array, DTensor) else DTensor(array, layout)


__all__ = [
    "DTensor", "distribute_tensor", "from_array", "from_process_local", "full", "ones", "put",
    "randn", "sharding", "zeros",
]  # fmt: skip
