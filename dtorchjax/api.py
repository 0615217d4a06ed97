"""`dt.jit` and `dt.distribute`: whole-array programs on placed arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dtorchjax import _jax
from dtorchjax.annotate import asked_placements
from dtorchjax.arguments import is_placements, layout_of_sharding, spread_prefix, to_layout
from dtorchjax.dtensor import DTensor, distribute_tensor, sharding
from dtorchjax.errors import PlacementError
from dtorchjax.graph import build
from dtorchjax.lower import lower, spec, storage_spec
from dtorchjax.placements import Layout
from dtorchjax.plan import Infeasible, Plan, make_plan
from dtorchjax.strict import explain_mismatch


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


@dataclasses.dataclass(eq=False)
class Program:
    """One traced, planned and lowered call signature."""

    plan: Plan
    run: Callable[..., list[Any]]  # jitted: storages in, storages out
    in_layouts: list[Layout]
    constants: list[Any]
    out_layouts: list[Layout]
    out_tree: Any
    traced: Any


class Jitted:
    """A function compiled by `dt.jit`. Call it, or ask `explain` and `lower`."""

    def __init__(self, fun: Callable, **options: Any):
        self.fun = fun
        self.options = options
        self.programs: dict[Any, Program] = {}
        functools.update_wrapper(self, fun, updated=())
        static = options["static_argnames"]
        names = {static} if isinstance(static, str) else set(static)
        try:
            parameters = list(inspect.signature(fun).parameters)
        except (TypeError, ValueError):
            parameters = []
        numbers = _numbers(options["static_argnums"])
        names |= {parameters[i] for i in numbers if -len(parameters) <= i < len(parameters)}
        numbers |= {i for i, name in enumerate(parameters) if name in names}
        self.static_numbers, self.static_names = numbers, names
        self.donated = _numbers(options["donate_argnums"])

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
        layouts = [_layout(x, mesh) for x in leaves]
        key = (
            tree, static, mesh, tuple(layouts),
            tuple(_aval_key(x) for x in leaves),
        )  # fmt: skip
        program = self.programs.get(key)
        if program is None:
            program = self._compile(dynamic, named, static, numbers, mesh, leaves, tree, layouts)
            self.programs[key] = program
        return program, leaves, any(map(is_dtensor, leaves))

    # ---- compilation

    def _compile(
        self, dynamic: tuple, named: dict, static: tuple, numbers: set[int], mesh: Mesh,
        leaves: list[Any], tree: Any, layouts: list[Layout | None],
    ) -> Program:  # fmt: skip
        paths = [
            _label(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(
                (dynamic, named), is_leaf=is_dtensor
            )[0]
        ]
        asked = [
            None if p is None else to_layout(p, mesh, _shape(x), what)
            for p, x, what in zip(
                self._in_prefix(dynamic, named, numbers), leaves, paths, strict=True
            )
        ]
        arrive = [
            known or wanted or to_layout("R", mesh, _shape(x))
            for known, wanted, x in zip(layouts, asked, leaves, strict=True)
        ]
        arrive = [
            w.resolve(_shape(x), what) for w, x, what in zip(arrive, leaves, paths, strict=True)
        ]
        wanted = [a or w for a, w in zip(asked, arrive, strict=True)]
        positions = dict(static)

        def flat(*xs: Any) -> Any:
            rest, keywords = jax.tree.unflatten(tree, xs)
            remaining, full = iter(rest), []
            for i in range(len(rest) + len(numbers)):
                full.append(positions[i] if i in numbers else next(remaining))
            named_static = {n: v for n, v in positions.items() if isinstance(n, str)}
            return self.fun(*full, **keywords, **named_static)

        avals = [_whole(x) for x in leaves]
        specs = [
            spec(w.joint, len(a.shape), mesh.axis_names) for w, a in zip(wanted, avals, strict=True)
        ]
        closed, out_shape = _jax.trace_whole(flat, mesh, avals, specs)
        out_leaves, out_tree = jax.tree.flatten(out_shape)
        out_wanted = self._out_layouts(out_shape, out_leaves, (dynamic, named), wanted, mesh)
        return self._finish(
            closed, mesh, arrive, wanted, out_wanted, out_tree, paths, len(dynamic), leaves, tree
        )

    def _finish(
        self, closed: Any, mesh: Mesh, arrive: list[Layout], wanted: list[Layout],
        out_wanted: tuple[list[Layout | None], list[bool], list[str]], out_tree: Any,
        paths: list[str], n_args: int, leaves: list[Any], tree: Any,
    ) -> Program:  # fmt: skip
        closed = _jax.without_dead_code(closed)
        out_layouts, out_asked, out_labels = out_wanted
        graph = build(
            closed,
            mesh,
            [w.joint for w in arrive],
            [w.joint for w in wanted],
            [w.joint if w else None for w in out_layouts],
            out_asked,
            out_labels,
            functools.partial(_constant_layout, mesh),
            asked_placements(mesh),
            paths,
        )
        try:
            plan = make_plan(graph, mesh, strict=self.options["redistribute"] == "never")
        except Infeasible as infeasible:
            raise explain_mismatch(infeasible.labels, mesh) from None
        given = [
            asked or Layout(mesh, (j := plan.rows[node].inputs[0]).placements, j.order)
            for asked, node in zip(out_layouts, graph.outputs, strict=True)
        ]
        donated = self._donated_leaves(tree, leaves, n_args)
        names = mesh.axis_names
        run = jax.jit(lower(plan), donate_argnums=donated)
        constants = [
            jax.device_put(
                _storage(x),
                NamedSharding(mesh, storage_spec(plan.rows[node].outputs[0], np.ndim(x), names)),
            )
            for x, node in zip(graph.constant_values, graph.constants, strict=True)
        ]
        return Program(plan, run, arrive, constants, given, out_tree, closed)

    def _donated_leaves(self, tree: Any, leaves: list[Any], n_args: int) -> tuple[int, ...]:
        if not self.donated:
            return ()
        dynamic, _ = jax.tree.unflatten(tree, range(len(leaves)))
        # numbers count all positional arguments, static ones too
        kept = [i for i in range(n_args + len(self.static_numbers)) if i not in self.static_numbers]
        chosen = [jax.tree.leaves(a) for i, a in zip(kept, dynamic) if i in self.donated]
        return tuple(sorted(i for group in chosen for i in group))

    def _in_prefix(self, dynamic: tuple, named: dict, numbers: set[int]) -> list[Any]:
        prefix = self.options["in_placements"]
        if not is_placements(prefix) and numbers and isinstance(prefix, list | tuple):
            if len(prefix) == len(dynamic) + len(numbers):
                prefix = type(prefix)(p for i, p in enumerate(prefix) if i not in numbers)
        if not is_placements(prefix) and isinstance(prefix, list | tuple):
            prefix = tuple(prefix)
        found = spread_prefix(prefix, dynamic, is_dtensor, "args")
        return found + [None] * len(jax.tree.leaves(named, is_leaf=is_dtensor))

    def _out_layouts(
        self, out_shape: Any, out_leaves: list[Any], args: tuple, wanted: list[Layout], mesh: Mesh
    ) -> tuple[list[Layout | None], list[bool], list[str]]:
        prefix = self.options["out_placements"]
        said = spread_prefix(prefix, out_shape, is_dtensor, "result")
        if any(p is None for p in said):
            like = _like_arguments(out_shape, args, wanted)
        else:
            like = [(None, "")] * len(said)
        found: list[Layout | None] = []
        for p, (same, _), leaf in zip(said, like, out_leaves, strict=True):
            if p is not None:
                found.append(to_layout(p, mesh, leaf.shape, "result"))
            elif same is not None:
                found.append(same)
            else:
                found.append(None if leaf.shape else to_layout("R", mesh, ()))
        labels = [
            "the result" if p is not None or same is None else f"the result (placed like {name})"
            for p, (same, name) in zip(said, like, strict=True)
        ]
        return found, [p is not None for p in said], labels

    # ---- what users call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program, leaves, wrap = self._prepare(args, kwargs)
        storages = [_store(x, layout) for x, layout in zip(leaves, program.in_layouts, strict=True)]
        if any(isinstance(s, _jax.Tracer) for s in storages):
            results = self._traced(program, storages)
        else:
            results = program.run(*storages, *program.constants)
        wrapped = [
            DTensor(x, layout) if wrap or layout.joint.partial_axes() else x
            for x, layout in zip(results, program.out_layouts, strict=True)
        ]
        return jax.tree.unflatten(program.out_tree, wrapped)

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs). Runs nothing."""
        return self._prepare(args, kwargs)[0].plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program for these arguments, as `jax.jit(fun).lower` gives it."""
        program, leaves, _ = self._prepare(args, kwargs)
        avals = [
            jax.ShapeDtypeStruct(
                _storage_shape(x, w), _dtype(x), sharding=sharding(w, len(_shape(x)))
            )
            for x, w in zip(leaves, program.in_layouts, strict=True)
        ]
        return program.run.lower(*avals, *program.constants)

    def _traced(self, program: Program, storages: list[Any]) -> list[Any]:
        """Under an outer transformation: derivatives are those of the whole program.

        (The transpose of a shard_map without replication types would sum a psum twice.)
        """

        @jax.custom_vjp
        def run(*xs: Any) -> list[Any]:
            return program.run(*xs, *program.constants)

        def forward(*xs: Any) -> Any:
            raise PlacementError(
                f"jax.grad outside dt.jit over {self._name()} is not supported yet: differentiate "
                "inside, dt.jit(jax.grad(fun))"
            )

        run.defvjp(forward, lambda res, g: g)
        return run(*storages)


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


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else tuple(np.shape(x))


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype


def _storage_shape(x: Any, layout: Layout) -> tuple[int, ...]:
    sizes = layout.sizes
    return (*(sizes[a] for a in layout.joint.partial_axes()), *_shape(x))


def _whole(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, DTensor):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _jax.whole_aval(x)


def _aval_key(x: Any) -> tuple:
    aval = _whole(x)
    return aval.shape, aval.dtype, aval.weak_type


def _layout(x: Any, mesh: Mesh) -> Layout | None:
    """Where an argument lies already; None for what comes from the host or one device."""
    if isinstance(x, DTensor):
        x._check()
        return x.layout
    if isinstance(x, _jax.Tracer):
        x = jax.typeof(x)
    found = getattr(x, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.axis_names != mesh.axis_names:
        return None
    if isinstance(found.mesh, Mesh) and found.mesh.devices.tolist() != mesh.devices.tolist():
        raise PlacementError(f"an argument lies on another mesh: {found.mesh} and {mesh}")
    found = NamedSharding(mesh, found.spec)
    if isinstance(x, jax.Array) or found.spec:
        return layout_of_sharding(found, len(x.shape))
    return None


def _storage(x: Any) -> Any:
    return x.storage if isinstance(x, DTensor) else x


def _store(x: Any, layout: Layout) -> Any:
    """The argument's storage in its layout; moves only what comes from the host or one device."""
    if isinstance(x, DTensor):
        return x.storage
    if isinstance(x, _jax.Tracer):
        return x
    target = sharding(layout, np.ndim(x))
    if isinstance(x, jax.Array) and x.sharding == target:
        return x
    return jax.device_put(x, target)


def _constant_layout(mesh: Mesh, x: Any) -> Any:
    layout = _layout(x, mesh)
    return (layout or to_layout("R", mesh, _shape(x))).joint


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
        known.append((structure, [(_shape(x), _dtype(x)) for x in leaves], layouts, name))

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
) -> Any:
    """Compile a whole-array function for placed arrays: one shard_map, with the plan's collectives.

    mesh: that of the arguments, or of `jax.set_mesh`, where none is given.
    in_placements, out_placements: a pytree prefix of the positional arguments, of the results;
        a leaf is `"S0,R"`, `["S0", "R"]`, a Layout, PartitionSpec, NamedSharding, `by_path({...})`
        or None (arguments: as they lie; results: like an argument of the same structure and shapes,
        else as it comes, never partial).
    redistribute: "auto" inserts what is cheapest for the whole program; "never" raises
        PlacementMismatchError where an equation's operands do not fit.

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
    options = dict(
        mesh=mesh, in_placements=in_placements, out_placements=out_placements,
        redistribute=redistribute, static_argnums=static_argnums, static_argnames=static_argnames,
        donate_argnums=donate_argnums,
    )  # fmt: skip
    if fun is None:
        return lambda f: Jitted(f, **options)
    if not callable(fun):
        raise TypeError(f"dt.jit takes a function, not {type(fun).__name__}")
    return Jitted(fun, **options)


def explain(fun: Callable, *args: Any, **options: Any) -> Plan:
    """The plan of `dt.jit(fun, **options)` for these arguments; shapes will do. Runs nothing."""
    return jit(fun, **options).explain(*args)


__all__ = ["Jitted", "distribute", "explain", "jit", "jnp"]
