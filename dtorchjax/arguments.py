"""What users say about placements, in every form, turned into Layouts."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtorchjax.errors import PlacementError
from dtorchjax.placements import (
    Layout,
    Placement,
    Replicate,
    dims_to_placements,
    layout_from_dict,
    parse_placement,
    parse_placements,
)


def to_layout(
    placements: Any,
    mesh: Mesh,
    shape: Sequence[int] | None,
    what: str = "array",
    rank: int | None = None,
) -> Layout:
    """Any placements argument for one array -> a Layout with dims from the front, checked.

    `shape` None: only `rank` is known, so divisibility is not checked.
    """
    rank = len(shape) if shape is not None else rank
    assert rank is not None
    n = len(mesh.axis_names)
    try:
        if isinstance(placements, Layout):
            if placements.mesh != mesh:
                raise PlacementError(f"a layout on another mesh: {placements.mesh} and {mesh}")
            layout = placements
        elif isinstance(placements, NamedSharding):
            found = layout_of_sharding(placements, rank)
            if found is None or found.mesh.axis_names != mesh.axis_names:
                raise PlacementError(f"a sharding on another mesh: {placements} and {mesh}")
            layout = Layout(mesh, found.placements, found.order)
        elif isinstance(placements, PartitionSpec):
            layout = layout_of_spec(placements, mesh, rank)
        elif isinstance(placements, Mapping):
            layout = layout_from_dict(mesh, placements)
        elif isinstance(placements, str | Placement):
            one = parse_placements(placements) if isinstance(placements, str) else (placements,)
            if len(one) == 1 and (n == 1 or isinstance(one[0], Replicate)):
                one = one * n
            layout = Layout(mesh, one)
        elif isinstance(placements, Sequence):
            layout = Layout(mesh, parse_placements(placements))
        else:
            raise PlacementError(
                f"{placements!r} is not placements; write 'S0,R', ['S0', 'R'], {{'tp': 'S1'}}, a "
                "Layout, a PartitionSpec or a NamedSharding"
            )
    except PlacementError as error:
        raise PlacementError(f"{what}: {error}") from None
    return layout.resolve(shape, what) if shape is not None else layout


def layout_of_spec(spec: PartitionSpec, mesh: Mesh, rank: int) -> Layout:
    """PartitionSpec -> Layout; axes that share a dim keep the spec's order."""
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    if any(d is PartitionSpec.UNCONSTRAINED for d in spec):
        raise PlacementError(f"{spec}: say where every dim lies; UNCONSTRAINED is no placement")
    if len(dims) > rank:
        raise PlacementError(f"{spec} has {len(dims)} dims, the array {rank}")
    unknown = {name for d in dims for name in d} - set(mesh.axis_names)
    if unknown:
        raise PlacementError(f"no mesh axis {sorted(unknown)}; the axes are {mesh.axis_names}")
    placements, order = dims_to_placements(dims, mesh.axis_names)
    return Layout(mesh, placements, order)


def layout_of_sharding(sharding: Any, rank: int) -> Layout | None:
    """The Layout of a NamedSharding on a real mesh; None for any other sharding."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return layout_of_spec(sharding.spec, sharding.mesh, rank)


# ---- trees ---------------------------------------------------------------------------------------


class ByPath:
    """Placements for the leaves of a tree by patterns on their paths. See `by_path`."""

    def __init__(self, patterns: Mapping[str, Any]):
        self.patterns = dict(patterns)

    def __repr__(self) -> str:
        return f"by_path({self.patterns!r})"


def by_path(patterns: Mapping[str, Any]) -> ByPath:
    """Placements by `fnmatch` patterns on a leaf's path, such as `layers/0/qkv/kernel`.

    The last pattern that matches wins; `*` crosses slashes. A pattern that matches no leaf is an
    error, and so is a leaf with dims that no pattern matches; scalars are R by default.
    """
    return ByPath(patterns)


def path_text(path: Sequence[Any]) -> str:
    """`layers/0/qkv/kernel`, without the `value` in which flax's variables keep their array."""
    words = []
    for key in path:
        word = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
        words.append(str(key) if word is None else str(word))
    if len(words) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and words[-1] in (
        "value", "raw_value",
    ):  # fmt: skip
        words.pop()
    return "/".join(words)


def is_placements(x: Any) -> bool:
    """True for a value that stands for one array's placements inside a tree of them."""
    if (
        isinstance(x, str | Placement | Layout | NamedSharding | PartitionSpec | ByPath)
        or x is None
    ):
        return True
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return len(x) > 0 and all(_is_placement(item) for item in x)
    return False


def _is_placement(item: Any) -> bool:
    if isinstance(item, Placement):
        return True
    if not isinstance(item, str) or "," in item:
        return False
    try:
        parse_placement(item)
    except PlacementError:
        return False
    return True


def spread_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], what: str) -> list[Any]:
    """One entry of `prefix` per leaf of `tree`; `prefix` may stop at any subtree.

    Raises PlacementError that names the place where the structures differ.
    """
    if isinstance(prefix, ByPath):
        return _by_path(prefix, tree, is_leaf, what)
    if is_placements(prefix):
        return [prefix] * len(jax.tree.leaves(tree, is_leaf=is_leaf))
    if is_leaf(tree) or jax.tree_util.all_leaves([tree]):
        if isinstance(prefix, Mapping):  # not structure after all: `{"tp": "S1"}` for one array
            return [dict(prefix)]
        raise PlacementError(f"{what} is one array, but its placements are {prefix!r}")
    children, own = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    try:
        parts, structure = jax.tree_util.tree_flatten(prefix, is_leaf=lambda x: x is not prefix)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{what}: {error}") from None
    if structure != own:
        every = ""
        if isinstance(prefix, Mapping) and all(map(_is_placement, prefix.values())):
            every = f"; to place every array so, write dt.by_path({{'*': {dict(prefix)!r}}})"
        if isinstance(prefix, list | tuple) and isinstance(tree, list | tuple):
            if len(parts) != len(children):
                raise PlacementError(
                    f"{what} has {len(children)} items, its placements {len(parts)}"
                )
        elif isinstance(prefix, Mapping) and isinstance(tree, Mapping):
            extra, missing = set(prefix) - set(tree), set(tree) - set(prefix)
            raise PlacementError(
                f"{what}: its placements "
                + (f"name {sorted(map(str, extra))}, which it does not have" if extra else "")
                + (" and " if extra and missing else "")
                + (f"lack {sorted(map(str, missing))}" if missing else "")
                + every
            )
        else:
            hint = f"; for one argument write ({prefix!r},)" if what == "args" else ""
            raise PlacementError(
                f"{what} is a {type(tree).__name__}, but its placements are a "
                f"{type(prefix).__name__}: {prefix!r}{hint}{every}"
            )
    found: list[Any] = []
    for (path, child), part in zip(children, parts, strict=True):
        found += spread_prefix(part, child, is_leaf, what + jax.tree_util.keystr(path))
    return found


def _by_path(spec: ByPath, tree: Any, is_leaf: Callable[[Any], bool], what: str) -> list[Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    used: set[str] = set()
    found = []
    for path, leaf in leaves:
        text = path_text(path)
        matches = [p for p in spec.patterns if fnmatch.fnmatchcase(text, p)]
        used.update(matches)
        if matches:
            found.append(spec.patterns[matches[-1]])
        elif not getattr(leaf, "shape", ()):
            found.append("R")
        else:
            raise PlacementError(f"{what}: no pattern matches {text!r}; add '*': 'R' for the rest")
    unused = [p for p in spec.patterns if p not in used]
    if unused:
        some = ", ".join(repr(path_text(p)) for p, _ in leaves[:4])
        raise PlacementError(
            f"{what}: pattern {unused[0]!r} matches no leaf; the paths look like {some}"
        )
    return found
