"""One whole-array function for given shapes and layouts: traced, planned, lowered, compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dtorchjax import _jax
from dtorchjax.annotate import asked_placements
from dtorchjax.arguments import layout_of_sharding, to_layout
from dtorchjax.checking import raise_found
from dtorchjax.dtensor import DTensor, put, sharding, stored
from dtorchjax.errors import PlacementError
from dtorchjax.graph import Graph, build
from dtorchjax.limit import plan_within
from dtorchjax.lower import lower, spec, storage_spec
from dtorchjax.placements import Layout, kinds_of
from dtorchjax.plan import Infeasible, Plan
from dtorchjax.registry import LOCALS, RULES
from dtorchjax.strict import explain_mismatch


class Wanted(NamedTuple):
    """Where a result should lie: None if the plan may choose; whether the user said so; a name.

    `partial`: the plan may choose a partial result; `array`: it must lie as a jax.Array can.
    """

    layout: Layout | None
    asked: bool = False
    label: str = "the result"
    partial: bool = False
    array: bool = False


@dataclasses.dataclass(eq=False)
class Program:
    """A function of whole arrays, ready to run on storages (see `DTensor`)."""

    fun: Callable[..., Any]  # whole arrays, flat -> a pytree
    plan: Plan
    run: Callable[..., list[Any]]  # jitted: storages and constants in, storages out
    in_layouts: list[Layout]
    out_layouts: list[Layout]
    out_tree: Any
    avals: list[Any]
    out_avals: list[Any]
    constants: list[Any]
    memory_limit: float | None
    eager: bool = False
    reduce_dtype: Any = None

    def __call__(self, *storages: Any) -> list[Any]:
        if any(isinstance(s, _jax.Tracer) for s in storages):
            return self.differentiable(*storages)
        results = self.run(*storages, *self.constants)
        if _jax.is_checking():
            raise_found(results)
        return results

    @functools.cached_property
    def differentiable(self) -> Callable[..., list[Any]]:
        """The program under an outer transformation: its derivative is that of the whole function.

        (The transpose of a shard_map without replication types would sum a psum once more.) A
        gradient has its primal's layout.
        """

        @jax.custom_vjp
        def run(*storages: Any) -> list[Any]:
            return self.run(*storages, *self.constants)

        def forward(*storages: Any) -> tuple[list[Any], list[Any]]:
            results = self._derivative.forward(*storages)  # traced again by a second derivative
            n = len(self.out_layouts)
            return results[:n], results[n:]

        def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            d = self._derivative
            inexact = [cotangents[i] for i in d.outputs]
            gradients = d.backward(*residuals, *inexact)
            found: list[Any] = [None] * len(self.avals)
            for i, g in zip(d.inputs, gradients, strict=True):
                found[i] = g
            return tuple(found)

        run.defvjp(forward, backward)
        return run

    @functools.cached_property
    def _derivative(self) -> _Derivative:
        inputs = [i for i, a in enumerate(self.avals) if _inexact(a)]
        outputs = [i for i, a in enumerate(self.out_avals) if _inexact(a)]
        pull: list[Any] = []
        found = [self.in_layouts[i] for i in inputs] + [self.out_layouts[i] for i in outputs]
        for layout in found:
            for op in kinds_of(layout.placements) - {"sum"}:
                raise PlacementError(
                    f"a partial {op} {layout} has no gradient: its terms cannot hold one. Make and "
                    "reduce it in one program under dt.jit, or of what is not sharded there"
                )

        def forward(*xs: Any) -> list[Any]:
            def of_inexact(*ds: Any) -> list[Any]:
                full = list(xs)
                for i, d in zip(inputs, ds, strict=True):
                    full[i] = d
                return jax.tree.leaves(self.fun(*full))

            results, vjp = jax.vjp(of_inexact, *(xs[i] for i in inputs))
            residuals, structure = jax.tree.flatten(vjp)
            pull[:] = [structure]
            return [*results, *residuals]

        known = [Wanted(layout) for layout in self.out_layouts]

        def lie(result: Any) -> list[Wanted]:
            return known + [Wanted(None, partial=self.eager)] * (len(result) - len(known))

        mesh, n = self.plan.mesh, len(self.out_layouts)
        options: dict[str, Any] = dict(
            memory_limit=self.memory_limit, eager=self.eager, reduce_dtype=self.reduce_dtype
        )
        ahead = make_program(
            forward, mesh, self.avals, self.in_layouts, self.in_layouts, lie, **options
        )

        def backward(*xs: Any) -> list[Any]:
            count = len(xs) - len(outputs)
            vjp = jax.tree.unflatten(pull[0], xs[:count])
            cotangents = [np.zeros(a.shape, jax.dtypes.float0) for a in self.out_avals]
            for i, g in zip(outputs, xs[count:], strict=True):
                cotangents[i] = g
            return list(vjp(cotangents))

        layouts = ahead.out_layouts[n:] + [self.out_layouts[i] for i in outputs]
        avals = ahead.out_avals[n:] + [self.out_avals[i] for i in outputs]
        back = make_program(
            backward, mesh, avals, layouts, layouts,
            lambda _: [Wanted(self.in_layouts[i]) for i in inputs], **options,
        )  # fmt: skip
        return _Derivative(ahead, back, inputs, outputs)


class _Derivative(NamedTuple):
    """`forward` gives results and residuals, `backward` the gradients of inexact `inputs`."""

    forward: Program
    backward: Program
    inputs: list[int]
    outputs: list[int]


def _inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def make_program(
    fun: Callable[..., Any],
    mesh: Mesh,
    avals: list[Any],
    arrive: list[Layout],
    wanted: list[Layout],
    out_layouts: Callable[[Any], list[Wanted]],
    labels: Sequence[str] = (),
    strict: bool = False,
    donated: tuple[int, ...] = (),
    memory_limit: float | None = None,
    eager: bool = False,
    reduce_dtype: Any = None,
) -> Program:
    """Trace, plan and lower a function of flat whole arrays.

    Arguments lie in `arrive` and are redistributed to `wanted`; `out_layouts` gets the result's
    shapes (a pytree) and says where its leaves go. Raises PlacementError. With a `memory_limit`
    the plan holds at most so many bytes on one device, if there is one. `eager` and `reduce_dtype`:
    see `Graph`.
    """
    specs = [
        spec(w.joint, len(a.shape), mesh.axis_names) for w, a in zip(wanted, avals, strict=True)
    ]
    closed, shapes = _jax.trace_whole(fun, mesh, avals, specs)
    out_avals, out_tree = jax.tree.flatten(shapes)
    results = out_layouts(shapes)
    live = _jax.without_dead_code(closed)
    options = arrive, wanted, results, labels, strict, donated, memory_limit, eager, reduce_dtype
    key = _plan_key(live, mesh, *options)
    found = _plans.get(key)
    if found is None:
        plan = _planned(live, mesh, *options)
        found = plan, jax.jit(lower(plan), donate_argnums=donated)
        if key is not None:
            _plans[key] = found
            if len(_plans) > MOST_PLANS:
                del _plans[next(iter(_plans))]
    plan, run = found
    graph = plan.graph
    given = [
        result.layout or Layout(mesh, (j := plan.rows[node].inputs[0]).placements, j.order)
        for result, node in zip(results, graph.outputs, strict=True)
    ]
    constants = []
    with jax.ensure_compile_time_eval():  # an outer trace must not get hold of them
        for x, node in zip(graph.constant_values, graph.constants, strict=True):
            storage = storage_spec(plan.rows[node].outputs[0], np.ndim(x), mesh.axis_names)
            constants.append(put(x, NamedSharding(mesh, storage)))
    return Program(
        fun,
        plan,
        run,
        arrive,
        given,
        out_tree,
        avals,
        out_avals,
        constants,
        memory_limit,
        eager,
        reduce_dtype,
    )


MOST_PLANS = 64
_plans: dict[Hashable, tuple[Plan, Any]] = {}
"""Plans of the programs made last; a program made anew from the same equations takes its plan."""


def _plan_key(closed: Any, *rest: Any) -> Hashable:
    """What a plan depends on; None if it cannot be compared."""
    try:
        program = _jax.fingerprint(closed.jaxpr, lambda name: (RULES.get(name), LOCALS.get(name)))
        # the plan keeps its constants, so that their ids stay theirs
        options = [tuple(x) if isinstance(x, list) else x for x in rest]
        key = (program, tuple(map(id, closed.consts)), *options, _jax.settings())
        hash(key)
    except TypeError:
        return None
    return key


def _planned(
    closed: Any, mesh: Mesh, arrive: list[Layout], wanted: list[Layout], results: list[Wanted],
    labels: Sequence[str], strict: bool, donated: tuple[int, ...], memory_limit: float | None,
    eager: bool, reduce_dtype: Any,
) -> Plan:  # fmt: skip
    make = functools.partial(
        build,
        closed,
        mesh,
        [w.joint for w in arrive],
        [w.joint for w in wanted],
        results,
        functools.partial(_constant_layout, mesh),
        asked_placements(mesh),
        labels or [f"args[{i}]" for i in range(len(arrive))],
        _jax.where_called() if eager else None,
        strict,
    )
    graph = make()

    def planned(graph: Graph) -> Plan:
        graph.donated, graph.eager, graph.reduce_dtype = donated, eager, reduce_dtype
        return plan_within(graph, mesh, memory_limit, strict)

    try:
        if not graph.has_own_tables():
            return planned(graph)
        return _cheaper(planned, graph, make(own_tables=False))
    except Infeasible as infeasible:
        if strict:
            raise explain_mismatch(infeasible.labels, mesh) from None
        asked = [str(r.layout) for r in results if r.layout and r.layout.joint.partial_axes()]
        raise PlacementError(
            f"no operation of the program leaves the partial result that is asked for: {asked}"
        ) from None


def _cheaper(planned: Callable[[Graph], Plan], by_rules: Graph, taken_apart: Graph) -> Plan:
    """The plan by the operators' own tables, unless that of their decompositions costs less."""
    try:
        first = planned(by_rules)
    except Infeasible as infeasible:
        try:
            return planned(taken_apart)
        except Infeasible:
            raise infeasible from None
    try:
        second = planned(taken_apart)
    except (Infeasible, PlacementError):
        return first
    return second if second.cost < first.cost else first


# ---- arguments -----------------------------------------------------------------------------------


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else tuple(np.shape(x))


def dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype


def whole_aval(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, DTensor):
        weak = _jax.whole_aval(x.storage).weak_type
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
    return _jax.whole_aval(x)


def layout_as_it_lies(x: Any, mesh: Mesh) -> Layout | None:
    """Where an argument lies already; None for what comes from the host or one device."""
    if isinstance(x, DTensor):
        x._check()
        return x.layout
    if isinstance(x, _jax.Tracer):
        x = jax.typeof(x)
    found = getattr(x, "sharding", None)
    if not isinstance(found, NamedSharding):
        return None
    return _layout_on(found, mesh, len(x.shape), isinstance(x, jax.Array))


@functools.lru_cache(maxsize=4096)
def _layout_on(found: NamedSharding, mesh: Mesh, rank: int, is_array: bool) -> Layout | None:
    if found.mesh.axis_names != mesh.axis_names:
        if is_array and not found.is_fully_replicated:
            raise PlacementError(
                f"an argument lies on another mesh, with axes {found.mesh.axis_names}, not "
                f"{mesh.axis_names}"
            )
        return None
    if isinstance(found.mesh, Mesh) and found.mesh.devices.tolist() != mesh.devices.tolist():
        raise PlacementError(
            f"an argument lies on a mesh with other devices: {found.mesh.devices.tolist()} and "
            f"{mesh.devices.tolist()}"
        )
    found = NamedSharding(mesh, found.spec)
    return layout_of_sharding(found, rank) if is_array or found.spec else None


def storage_of(x: Any, layout: Layout) -> Any:
    """The argument's storage in its layout; moves only what comes from the host or one device."""
    if isinstance(x, DTensor):
        return x.storage
    if isinstance(x, _jax.Tracer):
        return x
    target = sharding(layout, np.ndim(x))
    if isinstance(x, jax.Array) and x.sharding == target:
        return x
    return put(stored(x, layout), target)


def _constant_layout(mesh: Mesh, x: Any) -> Any:
    if isinstance(x, _jax.Tracer):
        raise PlacementError(
            f"the function closes over a traced array, {_jax.short_type(x.aval)}: pass it to the "
            "compiled function as an argument"
        )
    layout = layout_as_it_lies(x, mesh)
    return (layout or to_layout("R", mesh, shape_of(x))).joint
