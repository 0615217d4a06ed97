"""`dt.jit` and `dt.distribute`: whole-array programs on placed arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh

from dtorchjax import _jax
from dtorchjax.annotate import redistribute
from dtorchjax.arguments import is_placements, spread_prefix, to_layout
from dtorchjax.dtensor import DTensor, as_array, distribute_tensor, sharding
from dtorchjax.errors import PlacementError
from dtorchjax.placements import Layout, stored_shape
from dtorchjax.plan import Plan
from dtorchjax.program import (
    Program,
    Wanted,
    dtype_of,
    layout_as_it_lies,
    make_program,
    shape_of,
    storage_of,
    whole_aval,
)


def is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


def distribute(tree: Any, mesh: Mesh, placements: Any) -> Any:
    """Lay every array of a pytree out on a mesh.

    `placements` is a prefix of the tree (a leaf is any form that `distribute_tensor` takes; a dict
    is structure) or `by_path({...})`. Errors name the leaf.
    """
    where = spread_prefix(placements, tree, is_dtensor, "tree")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_dtensor)
    return jax.tree.unflatten(
        structure,
        [
            distribute_tensor(
                leaf, mesh, "R" if p is None else p, "tree" + jax.tree_util.keystr(path)
            )
            for (path, leaf), p in zip(leaves, where, strict=True)
        ],
    )


class _Settled(NamedTuple):
    arrive: list[Layout]
    wanted: list[Layout]
    paths: list[str]


class Jitted:
    """A function compiled by `dt.jit`. Call it, or ask `explain` and `lower`."""

    def __init__(self, fun: Callable, **options: Any):
        self.fun = fun
        self.options = options
        self.programs: dict[Any, Program] = {}
        functools.update_wrapper(self, fun, updated=())
        static = options["static_argnames"]
        names = {static} if isinstance(static, str) else set(static)
        numbers = _numbers(options["static_argnums"])
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # a builtin
            parameters = []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p.name for p in parameters if p.kind in kinds]
        open_ended = len(positional) < len(parameters)
        unknown = names - {p.name for p in parameters}
        if parameters and unknown and all(p.kind != p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{self._name()} has no arguments {sorted(unknown)} (static_argnames)")
        if not open_ended:  # numbers and names say the same
            names |= {positional[i] for i in numbers if -len(positional) <= i < len(positional)}
        numbers |= {i for i, name in enumerate(positional) if name in names}
        self.static_numbers, self.static_names = numbers, names
        self.donated = _numbers(options["donate_argnums"])

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A method compiled in its class: `self` is the first argument."""
        return self if owner is None else functools.partial(self, owner)

    # ---- arguments

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        numbers = {i + len(args) if i < 0 else i for i in self.static_numbers} & set(
            range(len(args))
        )
        static = tuple((i, a) for i, a in enumerate(args) if i in numbers)
        static += tuple((n, a) for n, a in sorted(kwargs.items()) if n in self.static_names)
        for where, value in static:
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"static argument {where!r} of {self._name()} must be hashable, "
                    f"got {type(value).__name__}"
                ) from None
        dynamic = tuple(a for i, a in enumerate(args) if i not in numbers)
        named = {n: a for n, a in kwargs.items() if n not in self.static_names}
        return dynamic, named, static, numbers

    def _name(self) -> str:
        return getattr(self.fun, "__name__", repr(self.fun))

    def _mesh(self, leaves: Sequence[Any]) -> Mesh:
        meshes: dict[Mesh, None] = {}
        for leaf in leaves:
            if isinstance(leaf, DTensor):
                meshes[leaf.mesh] = None
        given = self.options["mesh"] or next(iter(meshes), None) or _jax.current_mesh()
        if given is None:
            for leaf in leaves:
                found = getattr(getattr(leaf, "sharding", None), "mesh", None)
                if isinstance(found, Mesh) and not found.empty:
                    given = found
                    break
        if given is None:
            raise PlacementError(
                f"{self._name()}: on which mesh? Give dt.jit a mesh=, call it with DTensors, or "
                "inside `with jax.set_mesh(mesh):`"
            )
        for mesh in meshes:
            if mesh != given:
                raise PlacementError(f"{self._name()}: arrays on two meshes, {given} and {mesh}")
        return given

    def _prepare(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Program, list[Any], bool]:
        dynamic, named, static, numbers = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, named), is_leaf=is_dtensor)
        mesh = self._mesh(leaves)
        layouts = [layout_as_it_lies(x, mesh) for x in leaves]
        # 1, 1.0 and True are equal but trace to different programs
        call = tree, static, _types(static), mesh, _jax.settings()
        avals = tuple(_aval_key(x) for x in leaves)
        key = (*call, avals, tuple(layouts))
        program = self.programs.get(key)
        if program is None:
            lie = self._settle(dynamic, named, numbers, mesh, leaves, layouts)
            # arrays from the host and arrays that lie as those would be put are one program
            settled = (*call, avals, tuple(lie.arrive))
            program = self.programs.get(settled)
            if program is None:
                program = self._compile(dynamic, named, static, numbers, mesh, leaves, tree, lie)
            self.programs[key] = self.programs[settled] = program
        return program, leaves, any(map(is_dtensor, leaves))

    # ---- compilation

    def _settle(
        self, dynamic: tuple, named: dict, numbers: set[int], mesh: Mesh, leaves: list[Any],
        layouts: list[Layout | None],
    ) -> _Settled:  # fmt: skip
        """Where the arguments lie, or will be put, and where they are wanted."""
        paths = [
            _label(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(
                (dynamic, named), is_leaf=is_dtensor
            )[0]
        ]
        said = spread_prefix(self._prefix_of(dynamic, numbers), dynamic, is_dtensor, "args")
        said += [None] * (len(leaves) - len(said))
        asked = [
            None if p is None else to_layout(p, mesh, shape_of(x), what)
            for p, x, what in zip(said, leaves, paths, strict=True)
        ]
        arrive = [
            known or (_arriving(wanted, x) if wanted else to_layout("R", mesh, shape_of(x)))
            for known, wanted, x in zip(layouts, asked, leaves, strict=True)
        ]
        arrive = [
            w.resolve(shape_of(x), what) for w, x, what in zip(arrive, leaves, paths, strict=True)
        ]
        wanted = [a or w for a, w in zip(asked, arrive, strict=True)]
        return _Settled(arrive, wanted, paths)

    def _compile(
        self, dynamic: tuple, named: dict, static: tuple, numbers: set[int], mesh: Mesh,
        leaves: list[Any], tree: Any, lie: _Settled,
    ) -> Program:  # fmt: skip
        positions = dict(static)

        def flat(*xs: Any) -> Any:
            rest, keywords = jax.tree.unflatten(tree, xs)
            remaining, full = iter(rest), []
            for i in range(len(rest) + len(numbers)):
                full.append(positions[i] if i in numbers else next(remaining))
            named_static = {n: v for n, v in positions.items() if isinstance(n, str)}
            return self.fun(*full, **keywords, **named_static)

        return make_program(
            flat,
            mesh,
            [whole_aval(x) for x in leaves],
            lie.arrive,
            lie.wanted,
            lambda shapes: self._out_layouts(
                shapes, (dynamic, named), lie.wanted, mesh, any(map(is_dtensor, leaves))
            ),
            lie.paths,
            strict=self.options["redistribute"] == "never",
            donated=self._donated_leaves(tree, leaves, len(dynamic), numbers),
            memory_limit=self.options["memory_limit"],
            reduce_dtype=self.options["reduce_dtype"],
        )

    def _donated_leaves(
        self, tree: Any, leaves: list[Any], n_args: int, numbers: set[int]
    ) -> tuple[int, ...]:
        """The leaves of donated arguments; numbers count all positional arguments."""
        if not self.donated:
            return ()
        dynamic, _ = jax.tree.unflatten(tree, range(len(leaves)))
        count = n_args + len(numbers)
        donated = {i + count if i < 0 else i for i in self.donated}
        kept = [i for i in range(count) if i not in numbers]
        chosen = [jax.tree.leaves(a) for i, a in zip(kept, dynamic, strict=True) if i in donated]
        return tuple(sorted(i for group in chosen for i in group))

    def _prefix_of(self, dynamic: tuple, numbers: set[int]) -> Any:
        """The in_placements of the arguments that are not static."""
        prefix = self.options["in_placements"]
        if is_placements(prefix) or not isinstance(prefix, list | tuple):
            return prefix
        if numbers and len(prefix) == len(dynamic) + len(numbers):
            prefix = [p for i, p in enumerate(prefix) if i not in numbers]
        return tuple(prefix)

    def _out_layouts(
        self, shapes: Any, args: tuple, wanted: list[Layout], mesh: Mesh, wrap: bool
    ) -> list[Wanted]:
        """`wrap`: results are DTensors; else only those that the user asked to lie as no array."""
        said = spread_prefix(self.options["out_placements"], shapes, is_dtensor, "result")
        like = _like_arguments(shapes, args, wanted)
        found = []
        for p, (same, name), leaf in zip(said, like, jax.tree.leaves(shapes), strict=True):
            if p is not None:
                found.append(Wanted(to_layout(p, mesh, leaf.shape, "result"), asked=True))
            elif same is not None:
                where = same if wrap else as_array(same, leaf.shape)
                found.append(Wanted(where, label=f"the result (placed like {name})"))
            else:
                where = None if leaf.shape else to_layout("R", mesh, ())
                found.append(Wanted(where, array=not wrap))
        return found

    # ---- what users call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.in_whole_trace():
            return self._in_place(args, kwargs)
        program, leaves, wrap = self._prepare(args, kwargs)
        layouts = program.in_layouts
        results = program(*(storage_of(x, w) for x, w in zip(leaves, layouts, strict=True)))
        wrapped = [  # under jax.grad a loss must be an array, not a pytree of one
            DTensor.of_shape(x, layout, aval.shape)
            if (wrap and not (x.ndim == 0 and isinstance(x, _jax.Tracer)))
            or not layout.is_array(aval.shape)
            else x
            for x, layout, aval in zip(results, program.out_layouts, program.out_avals, strict=True)
        ]
        return jax.tree.unflatten(program.out_tree, wrapped)

    def _in_place(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Inside a program under `dt.jit`: part of that program; placements are annotations."""

        def annotate(prefix: Any, tree: Any, what: str) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            where = spread_prefix(prefix, tree, is_dtensor, what)
            placed = [
                x if p is None else redistribute(x, p) for x, p in zip(leaves, where, strict=True)
            ]
            return jax.tree.unflatten(structure, placed)

        dynamic, _, _, numbers = self._split(args, kwargs)
        placed = iter(annotate(self._prefix_of(dynamic, numbers), dynamic, "args"))
        full = [a if i in numbers else next(placed) for i, a in enumerate(args)]
        return annotate(self.options["out_placements"], self.fun(*full, **kwargs), "result")

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs). Runs nothing."""
        return self._prepare(args, kwargs)[0].plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program for these arguments, as `jax.jit(fun).lower` gives it."""
        program, leaves, _ = self._prepare(args, kwargs)
        avals = [
            jax.ShapeDtypeStruct(
                _storage_shape(x, w), dtype_of(x), sharding=sharding(w, len(shape_of(x)))
            )
            for x, w in zip(leaves, program.in_layouts, strict=True)
        ]
        return program.run.lower(*avals, *program.constants)


def _types(value: Any) -> Any:
    """The types of a static value and of what is in it: 1, 1.0 and True are equal."""
    inner = tuple(map(_types, value)) if isinstance(value, tuple | frozenset) else ()
    return type(value), inner


def _arriving(wanted: Layout, x: Any) -> Layout:
    """Where an array from the host is put: as wanted, where an array can lie so."""
    return as_array(wanted.without_terms(), shape_of(x))


def _numbers(given: int | Iterable[int] | None) -> set[int]:
    if given is None:
        return set()
    return {given} if isinstance(given, int) else set(given)


def _label(path: Sequence[Any]) -> str:
    """`args[0]['mlp']['w1']`"""
    first, rest = path[0], path[1:]
    return ("args" if getattr(first, "idx", 0) == 0 else "kwargs") + jax.tree_util.keystr(
        tuple(rest)
    )


def _storage_shape(x: Any, layout: Layout) -> tuple[int, ...]:
    sizes, where = layout.sizes, layout.joint
    terms = (sizes[a] for a in where.partial_axes())
    return (*terms, *stored_shape(shape_of(x), where, sizes))


def _aval_key(x: Any) -> tuple:
    aval = whole_aval(x)
    return aval.shape, aval.dtype, aval.weak_type


def _like_arguments(
    result: Any, args: tuple, wanted: list[Layout]
) -> list[tuple[Layout | None, str]]:
    """A subtree of the result with an argument's structure and shapes takes its layouts.

    Per leaf of the result: the layout, None if there is no such argument, and the argument's name.
    """
    dynamic, named = args
    known = []
    rest = iter(wanted)
    arguments = [(f"args[{i}]", a) for i, a in enumerate(dynamic)]
    for name, argument in [*arguments, *((k, named[k]) for k in sorted(named))]:
        leaves, structure = jax.tree.flatten(argument, is_leaf=is_dtensor)
        layouts = [next(rest) for _ in leaves]
        known.append((structure, [(shape_of(x), dtype_of(x)) for x in leaves], layouts, name))

    def find(tree: Any) -> list[tuple[Layout | None, str]]:
        leaves, structure = jax.tree.flatten(tree)
        shapes = [(tuple(x.shape), x.dtype) for x in leaves]
        for other, there, layouts, name in known:
            if structure == other and shapes == there:
                return [(None if w.joint.partial_axes() else w, name) for w in layouts]
        if jax.tree_util.all_leaves([tree]):
            return [(None, "")] * len(leaves)
        children = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)[0]
        return [w for child in children for w in find(child)]

    return find(result)


def jit(
    fun: Callable | None = None,
    mesh: Mesh | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    redistribute: str = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    memory_limit: float | None = None,
    reduce_dtype: Any = None,
) -> Any:
    """Compile a whole-array function for placed arrays: one shard_map, with the plan's collectives.

    mesh: that of the arguments, or of `jax.set_mesh`, where none is given.
    in_placements, out_placements: a pytree prefix of the positional arguments, of the results;
        a leaf is `"S0,R"`, `["S0", "R"]`, a Layout, PartitionSpec, NamedSharding, `by_path({...})`
        or None (arguments: as they lie; results: like an argument of the same structure and shapes,
        else as it comes, never partial).
    redistribute: "auto" inserts what is cheapest for the whole program; "never" raises
        PlacementMismatchError where an equation's operands do not fit.
    memory_limit: bytes that one device may hold at once (arguments, results, what is between; see
        `plan.memory_per_device`). To stay below, weights are gathered again for the backward pass,
        residuals stay sharded, those of loops are computed again. A warning says when it cannot be.
    reduce_dtype: the type in which floats that are narrower are summed up over devices, such as
        "float32" for bfloat16 (twice the bytes); else in their own. The plan shows it.

    Returns an object with `__call__`, `explain` and `lower`. Raises PlacementError for bad
    arguments and for primitives without a rule.

    >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
    >>> where = (["S0", "R"], ["R", "S1"])
    >>> step = jit(lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_placements=where)
    >>> tuple(step(jnp.ones((8, 16)), jnp.ones((16, 32))).sharding.spec)
    ('dp', 'tp')
    """
    if redistribute not in ("auto", "never"):
        raise ValueError(f"redistribute is 'auto' or 'never', not {redistribute!r}")
    wide = None if reduce_dtype is None else jnp.dtype(reduce_dtype)
    if wide is not None and not jnp.issubdtype(wide, jnp.floating):
        raise ValueError(f"reduce_dtype is a type of floats, such as 'float32', not {wide}")
    options = dict(
        mesh=mesh, in_placements=in_placements, out_placements=out_placements,
        redistribute=redistribute, static_argnums=static_argnums, static_argnames=static_argnames,
        donate_argnums=donate_argnums, memory_limit=memory_limit, reduce_dtype=wide,
    )  # fmt: skip
    if memory_limit is not None and not memory_limit > 0:
        raise ValueError(f"memory_limit is a number of bytes, not {memory_limit!r}")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a jax.sharding.Mesh, not {mesh!r}; see dt.init_device_mesh")
    if fun is None:
        return lambda f: Jitted(f, **options)
    if not callable(fun):
        raise TypeError(f"dt.jit takes a function, not {type(fun).__name__}")
    return Jitted(fun, **options)


def explain(fun: Callable, *args: Any, **options: Any) -> Plan:
    """The plan of `dt.jit(fun, **options)` for these arguments; shapes will do. Runs nothing."""
    return jit(fun, **options).explain(*args)


__all__ = ["Jitted", "distribute", "explain", "jit"]
