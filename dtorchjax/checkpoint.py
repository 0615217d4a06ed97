"""Checkpoints of sharded trees through orbax, restored onto any mesh, placement or device count."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh

from dtorchjax import _jax
from dtorchjax.api import is_dtensor
from dtorchjax.arguments import path_text, spread_prefix, to_layout
from dtorchjax.dtensor import DTensor, put, sharding
from dtorchjax.errors import PlacementError
from dtorchjax.place import modules_as_states
from dtorchjax.placements import Layout, R, Replicate, Shard

SCALARS = (bool, int, float, complex)


class Checkpoints:
    """The checkpoints of one training in one folder, a thin layer over orbax's CheckpointManager.

    A checkpoint is a flat table from a leaf's path (`params/layers/0/qkv/kernel`, the paths of
    `dt.by_path`) to the whole array; where arrays lay when it was written leaves no trace in it.
    So a tree may come back on another mesh, with other placements, or in other containers whose
    leaves have these paths. Every process writes and reads its own parts only. Saving goes on in
    the background (the next save and `close` wait for it); a checkpoint appears in the folder when
    it is complete, so that a run killed at any moment has the one before.

    `keep`: how many to keep (None: all). Use it in a `with` block, or call `close`.

    >>> import tempfile
    >>> import dtorchjax as dt
    >>> mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    >>> state = {"w": dt.distribute_tensor(jnp.arange(8.0), mesh, {"tp": "S0"}), "seen": 320}
    >>> with dt.Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
    ...     checkpoints.save(10, state)
    ...     checkpoints.wait()
    ...     like = {"w": jax.ShapeDtypeStruct((8,), "float32"), "seen": 0}
    ...     again = checkpoints.restore(like, mesh=mesh, placements={"w": "S0,R", "seen": "R"})
    >>> again["seen"], tuple(again["w"].sharding.spec)
    (320, ('dp',))
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = None):
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._writer: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what there is

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        if not self.directory.is_dir():
            return []
        return sorted(_orbax().utils.checkpoint_steps(self.directory))

    @property
    def latest(self) -> int | None:
        """The last of `steps`, None where there is none."""
        return max(self.steps, default=None)

    # ---- writing

    def save(self, step: int, tree: Any) -> None:
        """Write a tree of DTensors, jax.Arrays, numpy arrays, numbers, keys and NNX objects.

        Returns when what is to be written has been copied to the host: the next step may be given
        the same arrays to reuse (`donate_argnums`). Raises PlacementError for a partial sum and
        TypeError for a leaf that is no array, each naming the leaf, and ValueError for a step that
        is not later than the last one.
        """
        table = {path: _to_save(leaf, path) for path, leaf in _leaves(tree)}
        self.wait()  # orbax writes one at a time
        if self.latest is not None and step <= self.latest:
            raise ValueError(
                f"step {step} is not later than the last checkpoint in {self.directory}, that of "
                f"step {self.latest}: use another folder, or remove the later ones"
            )
        ocp = _orbax()
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, cleanup_tmp_directories=True
            )
            self._writer = ocp.CheckpointManager(self.directory, options=options)
        # orbax takes no array of size 0: there is nothing to keep of it
        table = {path: x for path, x in table.items() if math.prod(x.shape)}
        self._writer.save(step, args=ocp.args.PyTreeSave(table), force=True)

    def wait(self) -> None:
        """Return when everything is written. Raises what went wrong while writing."""
        if self._writer is not None:
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Finish writing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ---- reading

    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        mesh: Mesh | None = None,
        placements: Any = None,
        partial: bool = False,
    ) -> Any:
        """A tree like `like` with the values of a checkpoint (the latest, where `step` is None).

        A leaf comes back as it is in `like`: a DTensor in its layout, a jax.Array or a
        ShapeDtypeStruct with its sharding, a numpy array or a number as such. With `mesh` and
        `placements` (as for `dt.distribute`) arrays lie as these say, as jax.Arrays where the
        placement has one, so that `like` may be abstract (`jax.eval_shape`). NNX objects are
        changed in place.

        Raises FileNotFoundError where there is no such checkpoint, and ValueError, naming the
        leaves, where shapes, dtypes or paths differ; with `partial=True` the checkpoint may have
        leaves that `like` does not have (the parameters alone, of a training's state).
        """
        self.wait()
        steps = self.steps
        if not steps or step not in (None, *steps):
            what = f"of step {step} (there are {steps})" if steps else ""
            raise FileNotFoundError(f"no checkpoint {what} in {self.directory}".replace("  ", " "))
        step = steps[-1] if step is None else step
        states, back = modules_as_states(like)
        leaves = _leaves(states)
        if placements is not None and mesh is None:
            raise PlacementError("restore: placements need a mesh=")
        where = [None] * len(leaves)
        if mesh is not None:
            spread = spread_prefix(placements, states, is_dtensor, "like")
            where = [
                to_layout("R" if p is None else p, mesh, np.shape(leaf), f"like: {path}")
                for (path, leaf), p in zip(leaves, spread, strict=True)
            ]
        targets = {
            path: _target(leaf, layout, path)
            for (path, leaf), layout in zip(leaves, where, strict=True)
        }
        ocp = _orbax()
        wanted = {path: t.abstract for path, t in targets.items() if math.prod(t.abstract.shape)}
        with self._reader() as reader:
            found = reader.item_metadata(step)
            if found is None:
                raise FileNotFoundError(f"{self.directory} step {step} is no checkpoint of arrays")
            _compare(wanted, found.tree, partial, f"checkpoint {step} in {self.directory}")
            options = {path: _how_to_read(x) for path, x in wanted.items()}
            read = reader.restore(
                step, args=ocp.args.PyTreeRestore(wanted, options, partial_restore=True)
            )
        values = [
            t.make(read[path] if path in read else np.zeros(t.abstract.shape, t.abstract.dtype))
            for path, t in targets.items()
        ]
        return back(jax.tree.unflatten(jax.tree.structure(states, is_leaf=is_dtensor), values))

    def _reader(self) -> Any:
        ocp = _orbax()
        # without cleaning up: another program may be writing in the folder
        options = ocp.CheckpointManagerOptions(create=False, save_root_metadata=False)
        return ocp.CheckpointManager(
            self.directory, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        )


def _orbax() -> Any:
    """orbax, whose import takes a second."""
    import orbax.checkpoint

    return orbax.checkpoint


def _how_to_read(x: jax.ShapeDtypeStruct) -> Any:
    ocp = _orbax()
    if x.sharding is None:  # to the host; orbax would look for the devices of the one who wrote
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
    return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf); paths are names in the checkpoint, so they must differ."""
    states, _ = modules_as_states(tree)
    found = jax.tree_util.tree_flatten_with_path(states, is_leaf=is_dtensor)[0]
    named = [(path_text(path) or "array", leaf) for path, leaf in found]
    seen: set[str] = set()
    for path, _ in named:
        if path in seen:
            raise ValueError(f"two leaves have the path {path!r}: rename one, a checkpoint cannot")
        seen.add(path)
    return named


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), jax.dtypes.prng_key)


# ---- one leaf ------------------------------------------------------------------------------------


def _to_save(leaf: Any, path: str) -> Any:
    """A jax.Array or numpy array with the whole array's shape."""
    if is_dtensor(leaf):
        if leaf.layout.joint.partial_axes():
            raise PlacementError(
                f"{path} is a partial sum {leaf.layout}: terms are no checkpoint. Save "
                "x.reduce_partial(), or let the program return it reduced (out_placements)"
            )
        leaf = leaf.redistribute(array_layout(leaf.layout, leaf.shape)).to_array()
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and (jax.process_count() == 1 or not leaf.is_fully_addressable):
        return leaf
    if isinstance(leaf, jax.Array):  # one of this process alone, the same on each
        return np.asarray(leaf)
    if isinstance(leaf, (np.ndarray, np.generic, *SCALARS)):
        return np.array(leaf)  # a copy: it is written while the program goes on
    raise TypeError(f"{path} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers")


class _Target(NamedTuple):
    abstract: jax.ShapeDtypeStruct
    """What orbax reads."""
    make: Callable[[Any], Any]
    """What becomes of it."""


def _target(leaf: Any, layout: Layout | None, path: str) -> _Target:
    if isinstance(leaf, SCALARS):
        return _Target(jax.ShapeDtypeStruct((), np.asarray(leaf).dtype), lambda x: type(leaf)(x))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"{path} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers")
    shape, dtype = tuple(leaf.shape), leaf.dtype
    as_dtensor = layout is None and is_dtensor(leaf)
    layout = leaf.layout if as_dtensor else layout
    if layout is not None and layout.joint.partial_axes():
        raise PlacementError(f"{path}: nothing is restored as a partial sum {layout}")
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        impl = _jax.key_impl(dtype)
        there = sharding(layout, len(shape)) if layout else getattr(leaf, "sharding", None)

        def key(x: Any) -> Any:
            found = jax.random.wrap_key_data(jnp.asarray(np.asarray(x)), impl=impl)
            found = found if there is None else put(found, there)
            return DTensor(found, layout) if as_dtensor and layout else found

        return _Target(jax.ShapeDtypeStruct(data.shape, data.dtype), key)
    if layout is None:
        there = getattr(leaf, "sharding", None)
        abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=there)
        host = isinstance(leaf, np.ndarray | np.generic)
        if host:
            return _Target(abstract, lambda x: np.asarray(x, dtype)[()] if shape == () else x)
        return _Target(abstract, jnp.asarray if there is None else lambda x: x)
    near = array_layout(layout, shape)

    def placed(x: Any) -> Any:
        found = DTensor(x, near) if isinstance(x, jax.Array) else None
        if found is None:  # of size 0
            found = DTensor(put(x, sharding(near, len(shape))), near)
        found = found.redistribute(layout)
        return found if as_dtensor or not layout.is_array(shape) else found.to_array()

    return _Target(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(near, len(shape))), placed)


def array_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """A layout near this one that a jax.Array can have.

    An axis that cuts a dim unevenly or in blocks cuts another dim if one divides, so that no device
    gets the whole array.
    """
    if layout.is_array(shape):
        return layout
    found: list[Any] = [p if isinstance(p, Replicate) else None for p in layout.placements]
    for axis, p in enumerate(layout.placements):
        if not isinstance(p, Shard):
            continue
        own = p.dim
        dims = sorted(range(len(shape)), key=lambda d: (d != own, -shape[d]))
        for choice in (*map(Shard, dims), R):
            found[axis] = choice
            if Layout(layout.mesh, tuple(q or R for q in found)).is_array(shape):
                break
    return Layout(layout.mesh, tuple(found))


def _compare(wanted: dict[str, Any], found: dict[str, Any], partial: bool, where: str) -> None:
    """Raise where a checkpoint does not have what is wanted."""
    missing = [path for path in wanted if path not in found]
    extra = [] if partial else [path for path in found if path not in wanted]
    wrong = [
        f"{path} is {np.dtype(x.dtype).name}{list(x.shape)} there, "
        f"{np.dtype(w.dtype).name}{list(w.shape)} here"
        for path, w in wanted.items()
        if (x := found.get(path)) is not None
        and (tuple(x.shape), np.dtype(x.dtype)) != (tuple(w.shape), np.dtype(w.dtype))
    ]
    problems = [f"it has no {_some(missing)}"] if missing else []
    if extra:
        problems.append(
            f"it has {_some(extra)}, which `like` has not (partial=True leaves them out)"
        )
    problems += wrong[:4] + ([f"{len(wrong) - 4} more"] if len(wrong) > 4 else [])
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


__all__ = ["Checkpoints"]
