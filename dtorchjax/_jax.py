"""The only file that knows JAX's internals and the differences between its versions."""

from __future__ import annotations

import ast
import functools
import glob
import linecache
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core as jax_core
import numpy as np
from jax import numpy as jnp
from jax._src import core as jax_core_source
from jax._src import source_info_util, traceback_util
from jax._src.lax import lax as lax_source
from jax.extend import core
from jax.extend import random as extend_random
from jax.interpreters import ad, partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

HERE = os.path.dirname(os.path.abspath(__file__))
# our own frames are nobody's program, those of the demo are
for _own in (*glob.glob(os.path.join(HERE, "*.py")), *glob.glob(os.path.join(HERE, "*_rules"))):
    for _frames_of in (source_info_util, traceback_util):
        _frames_of.register_exclusion(_own)

Literal = core.Literal
Tracer = jax_core.Tracer
ShapedArray = jax_core.ShapedArray

# ---- tracing -----------------------------------------------------------------------------------


def settings() -> tuple[Any, ...]:
    """The configuration that changes what a function traces to or computes."""
    names = (
        "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable",
        "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_prng_impl",
    )  # fmt: skip
    return *(getattr(jax.config, name) for name in names), is_checking()


_checks = jax.make_user_context(default_value=None)
_checks_by_default = False


def check_context(on: bool) -> Any:
    """A context in which programs check what dfunctions claim, or do not."""
    return _checks(on)


def check_by_default(on: bool) -> None:
    global _checks_by_default
    _checks_by_default = on


def is_checking() -> bool:
    return _checks_by_default if _checks.value is None else bool(_checks.value)


# part of the key of jax's own caches: what is traced inside differs from what is traced outside
_whole_trace = jax.make_user_context(default_value=False)


def in_whole_trace() -> bool:
    """True while `trace_whole` runs a user's function."""
    return bool(_whole_trace.value)


def not_whole_trace() -> Any:
    """A context in which functions run as they would outside of `trace_whole`."""
    return _whole_trace(False)


def user_context() -> Any:
    """A thread-local value that is part of the key of jax's caches; None at first."""
    return jax.make_user_context(default_value=None)


def trace_key() -> tuple[Any, ...]:
    """What a cached trace depends on besides its arguments' types."""
    return settings(), in_whole_trace(), jax.sharding.get_abstract_mesh()


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """An argument of `jax.make_jaxpr` of exactly this type, its Explicit sharding and the mesh axes
    of a shard_map along which it varies included."""
    kinds = _kinds_of(aval)
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
        kinds["sharding"] = sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **kinds)


def varies(x: Any) -> bool:
    """True inside a shard_map of the user's, where a value differs along its axes."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return kind is not None and not kind.empty


def of_shape(aval: Any, shape: Sequence[Any]) -> Any:
    """The type with another shape, Explicit sharding lost."""
    return ShapedArray(tuple(shape), aval.dtype, **_kinds_of(aval, len(shape)))


def _kinds_of(aval: Any, rank: int | None = None) -> dict[str, Any]:
    kinds: dict[str, Any] = {"weak_type": bool(getattr(aval, "weak_type", False))}
    varies = getattr(aval, "manual_axis_type", None)
    if varies is not None and not varies.empty:
        spec = PartitionSpec(*(None,) * (len(aval.shape) if rank is None else rank))
        kinds["manual_axis_type"] = varies
        kinds["sharding"] = NamedSharding(aval.sharding.mesh, spec)
    return kinds


def runs_eagerly(x: Any) -> bool:
    """True for a DTensor, which runs operations by placements."""
    return hasattr(type(x), "__run_eagerly__")


def axis_size(name: str) -> int:
    return int(jax.lax.axis_size(name))


def axis_is_bound(name: str) -> bool:
    """True inside a shard_map or vmap over an axis of this name."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def whole_aval(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument, without its sharding."""
    t = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=bool(getattr(t, "weak_type", False)))


def with_weak_type(x: Any) -> Any:
    """The same value, of a type that gives way in operations with others, as a Python number's."""
    return lax_source._convert_element_type(x, x.dtype, weak_type=True)


def mesh_of_type(mesh: Mesh, axis_type: AxisType) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(mesh.axis_names))


def trace_whole(
    fun: Callable, mesh: Mesh, avals: Sequence[Any], specs: Sequence[PartitionSpec]
) -> tuple[Any, Any]:
    """`fun(*avals)` as a closed jaxpr on whole arrays, and the shapes of its results as a tree.

    The program sees a mesh with Auto axes, so no sharding types arise; a program that was written
    for Explicit axes (`out_sharding=`, `reshard`) is traced again with types.
    """
    # of a real mesh: a hand-made AbstractMesh lacks the device kind, so equals none
    untyped = mesh_of_type(mesh, AxisType.Auto).abstract_mesh
    try:
        with _whole_trace(True), jax.sharding.use_abstract_mesh(untyped):
            return jax.make_jaxpr(fun, return_shape=True)(*avals)
    except (ValueError, AssertionError, TypeError):
        if AxisType.Explicit not in mesh.axis_types:
            raise
        typed = mesh_of_type(mesh, AxisType.Explicit).abstract_mesh
        with _whole_trace(True), jax.sharding.use_abstract_mesh(typed):
            return jax.make_jaxpr(fun, return_shape=True)(*(
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(typed, s))
                for a, s in zip(avals, specs, strict=True)
            ))  # fmt: skip


def without_dead_code(closed: Any) -> Any:
    """The same program without equations whose results nobody uses (inputs stay)."""
    jaxpr, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return closed.replace(jaxpr=jaxpr)


def fresh_variable(like: Any) -> Any:
    """A variable of the same type."""
    return jax_core_source.Var(like.aval)


def dead_operands(closed: Any, instantiate: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The program without the operands that it does not read, and which it reads.

    Those to `instantiate` stay in any case.
    """
    outs = [True] * len(closed.jaxpr.outvars)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, outs, instantiate=list(instantiate))
    return closed.replace(jaxpr=jaxpr), list(used)


def dead_code_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    """`rule(used results, equation) -> (used operands, equation or None)` for `primitive`."""
    # between the two, jax 0.12 passes which operands are alive (references)
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


def zero_tangent(x: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


# ---- equations that contain programs -------------------------------------------------------------


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, constants) of a closed or an open jaxpr."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "bwd",
}

HIGH = "call_hi_primitive"
"""A call of newer jax (`jnp.nonzero(size=)`) that tells its program only if it is asked."""

IN_PLACE = frozenset({*INLINED, HIGH})


def inner_program(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The program of a call-like equation that can run in place, else None."""
    name = eqn.primitive.name
    if name == HIGH:
        run = functools.partial(eqn.primitive.to_lojax, **eqn.params)
        return open_jaxpr(jax.make_jaxpr(run)(*(v.aval for v in eqn.invars)))
    return open_jaxpr(eqn.params[INLINED[name]]) if name in INLINED else None


def linear_solve(eqn: Any) -> tuple[tuple[Any, Sequence[Any]], list[int]]:
    """The program of `custom_linear_solve` that solves, and which operands it takes."""
    lengths = eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    taken = [*range(before, before + lengths.solve), *range(sum(lengths), len(eqn.invars))]
    return open_jaxpr(eqn.params["jaxprs"].solve), taken


def device_target(params: dict[str, Any]) -> list[NamedSharding | None]:
    """Where a device_put lays each operand on a mesh; None for a device or a kind of memory."""
    return [d if isinstance(d, NamedSharding) else None for d in params["devices"]]


UNTYPED = {"pvary": None, "pcast": None, "psum_invariant": jax.lax.psum, "psum2": jax.lax.psum}
"""Primitives of a shard_map that checks its types, and what they are where nothing is checked."""


def run_manual(jaxpr: Any, *operands: Any) -> list[Any]:
    """The body of a shard_map on one device's parts, without its types of varying values."""
    body, constants = jaxpr if isinstance(jaxpr, tuple) else open_jaxpr(jaxpr)
    values: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
    values.update(zip(body.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in body.eqns:
        given, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        if name in UNTYPED:
            reduction = UNTYPED[name]
            found = [x if reduction is None else reduction(x, eqn.params["axes"]) for x in given]
        elif (inner := inner_program(eqn)) is not None:
            found = run_manual(inner, *given)
        elif name in MANUAL_LOOPS:
            found = MANUAL_LOOPS[name](eqn, given)
        else:
            found = eqn.primitive.bind(*given, **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in body.outvars]


def _manual_scan(eqn: Any, given: Sequence[Any]) -> list[Any]:
    parts = scan_parts(eqn)
    consts = given[: parts.n_consts]
    split = parts.n_consts + parts.n_carries

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = run_manual((parts.body, parts.constants), *consts, *carry, *xs)
        return found[: parts.n_carries], found[parts.n_carries :]

    last, stacked = jax.lax.scan(
        step, list(given[parts.n_consts : split]), list(given[split:]), length=parts.length,
        reverse=parts.reverse, unroll=parts.unroll,
    )  # fmt: skip
    return [*last, *stacked]


def _manual_while(eqn: Any, given: Sequence[Any]) -> list[Any]:
    p = eqn.params
    nt, nb = p["cond_nconsts"], p["body_nconsts"]
    return list(
        jax.lax.while_loop(
            lambda carry: run_manual(p["cond_jaxpr"], *given[:nt], *carry)[0],
            lambda carry: run_manual(p["body_jaxpr"], *given[nt : nt + nb], *carry),
            list(given[nt + nb :]),
        )
    )


def _manual_cond(eqn: Any, given: Sequence[Any]) -> list[Any]:
    branches = [functools.partial(run_manual, branch) for branch in eqn.params["branches"]]
    return list(jax.lax.switch(given[0], branches, *given[1:]))


MANUAL_LOOPS = {"scan": _manual_scan, "while": _manual_while, "cond": _manual_cond}


def inner_jaxprs(eqn: Any) -> list[Any]:
    """All programs among an equation's parameters, whatever they are for."""
    found = []
    for p in eqn.params.values():
        for item in p if isinstance(p, list | tuple) else (p,):
            jaxpr = open_jaxpr(item)[0]
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def recomputes(eqn: Any) -> bool:
    """True for the backward part of `jax.checkpoint`, which must not be merged with the forward."""
    return (
        eqn.primitive.name in ("remat", "remat2", "checkpoint")
        and bool(eqn.params.get("differentiated"))
        and bool(eqn.params.get("prevent_cse", True))
    )


class ScanParts(NamedTuple):
    body: Any
    constants: Sequence[Any]
    n_consts: int
    n_carries: int
    length: int
    reverse: bool
    unroll: Any


def scan_parts(eqn: Any) -> ScanParts:
    p = eqn.params
    body, constants = open_jaxpr(p["jaxpr"])
    if "num_consts" in p:
        n_consts, n_carries = p["num_consts"], p["num_carry"]
    else:  # jax 0.12: the three groups of inputs as one flat tree
        groups = [len(list(group)) for group in p["ft_in"].unpack()]
        n_consts, n_carries = groups[0], groups[1]
    return ScanParts(body, constants, n_consts, n_carries, p["length"], p["reverse"], p["unroll"])


# ---- binding on local shapes ---------------------------------------------------------------------


def clean_params(eqn: Any) -> dict[str, Any]:
    """Parameters without whole-array shardings, which mean nothing for one device's part."""
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
    return {**_left_out(eqn.primitive.name), **params}


@functools.cache
def _left_out(name: str) -> dict[str, Any]:
    """Shardings that a program may leave out when it binds a reduction itself, but not inside."""
    usual = {"reduce_max": jnp.max, "reduce_min": jnp.min}.get(name)
    if usual is None:
        return {}
    traced = jax.make_jaxpr(usual)(jax.ShapeDtypeStruct((1,), "float32"))
    return {k: v for k, v in traced.eqns[-1].params.items() if k == "out_sharding"}


def platform_branch(eqn: Any, mesh: Any) -> int | None:
    """Which branch of `lax.platform_dependent` the devices of a mesh take; None for a real cond.

    Also for the equation that asks which one it is.
    """
    platforms = eqn.params.get("branches_platforms", eqn.params.get("platforms"))
    if platforms is None:
        return None
    from jax._src.xla_bridge import expand_platform_alias

    mine = mesh.devices.flat[0].platform
    names = {mine, *expand_platform_alias(mine)}
    return next(i for i, some in enumerate(platforms) if some is None or names & set(some))


def optimization_barrier(values: Sequence[Any]) -> Sequence[Any]:
    return jax.lax.optimization_barrier(list(values))


# ---- random bits ---------------------------------------------------------------------------------


def is_threefry(dtype: Any) -> bool:
    """True if keys of this dtype count in a way that a part of the bits can be drawn alone."""
    name = str(dtype)
    return name == "key<fry>" and bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009


def key_impl(dtype: Any) -> str:
    """The name of the generator whose keys have this dtype, where there is no key to ask."""
    return dtype._impl.name


def threefry_bits(
    keys: Any, bit_width: int, part: Sequence[int], full: Sequence[int], starts: Sequence[Any]
) -> Any:
    """The bits that `jax.random.bits` draws for the block `part` at `starts` of an array `full`.

    `keys` is an array of threefry keys, the result has shape `(*keys.shape, *part)`. Each element's
    counter is its flat index in the full array (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011), split into two 32-bit words.
    """
    data = jax.random.key_data(keys)
    high, low = _counters(part, full, starts)
    shape = data.shape[:-1] + (1,) * len(part)
    first, second = data[..., 0].reshape(shape), data[..., 1].reshape(shape)
    target = data.shape[:-1] + tuple(part)
    words = [jnp.broadcast_to(w, target) for w in (first, second, high, low)]
    one, two = extend_random.threefry2x32_p.bind(*words)
    dtype = np.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return (one.astype(dtype) << np.uint64(32)) | two.astype(dtype)
    return (one ^ two).astype(dtype)


def _counters(part: Sequence[int], full: Sequence[int], starts: Sequence[Any]) -> tuple[Any, Any]:
    """Flat global indices of a block as (high, low) 32-bit words."""
    low = jnp.zeros(tuple(part), jnp.uint32)
    high = jnp.zeros(tuple(part), jnp.uint32)
    for d, (size, start) in enumerate(zip(part, starts, strict=True)):
        stride = math.prod(full[d + 1 :])
        index = jax.lax.broadcasted_iota(jnp.uint32, tuple(part), d) + jnp.asarray(
            start, jnp.uint32
        )
        # index * stride in 64 bits, from 16-bit halves of index (x64 may be disabled)
        for shift, half in ((0, index & 0xFFFF), (16, index >> 16)):
            step_low, step_high = stride & 0xFFFFFFFF, stride >> 32
            a = half * np.uint32(step_low & 0xFFFF)
            b = half * np.uint32(step_low >> 16)
            term_low = a + (b << 16)
            term_high = (b >> 16) + (term_low < a).astype(jnp.uint32) + half * np.uint32(step_high)
            if shift:
                term_high = (term_high << 16) | (term_low >> 16)
                term_low = term_low << 16
            total = low + term_low
            high = high + term_high + (total < low).astype(jnp.uint32)
            low = total
        del size
    return high, low


# ---- where in the user's file --------------------------------------------------------------------

_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[k]) + os.sep for k in ("stdlib", "purelib", "platlib")}
)


class Where(NamedTuple):
    """A place in the user's program; columns count from 0, `end_line` may differ from `line`."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def expression(self) -> str:
        """The source of the expression that made the equation, "" if unknown."""
        lines = [linecache.getline(self.file, n) for n in range(self.line, self.end_line + 1)]
        if not lines or not lines[-1] or not self.end_column:
            return ""
        joined = "".join(lines).encode()
        tail = len(lines[-1].encode()) - self.end_column
        return joined[self.column : len(joined) - tail].decode()


@functools.lru_cache(maxsize=4096)
def _where(traceback: Any) -> Where | None:
    first = None
    for frame in source_info_util.user_frames(traceback):
        place = Where(
            frame.file_name, frame.start_line, frame.start_column, frame.end_line, frame.end_column
        )
        first = first or place
        if not os.path.realpath(frame.file_name).startswith(_LIBRARIES):
            return place
    return first


def is_library_program(jaxpr: Any) -> bool:
    """True if the traced function of an inner program lies in an installed library."""
    source = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    return os.path.realpath(source.rpartition(" at ")[2]).startswith(_LIBRARIES)


@functools.lru_cache(maxsize=64)
def _syntax(file: str) -> ast.Module:
    """The parsed file; an empty module if it cannot be read (a notebook's cell with magics)."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def imported_names(file: str) -> frozenset[str]:
    """The names that a file's import statements bind anywhere in it."""
    return frozenset(
        (alias.asname or alias.name).split(".")[0]
        for statement in ast.walk(_syntax(file))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    )


def function_names(file: str) -> frozenset[str]:
    """The names that a file gives to functions and classes."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(d.name for d in ast.walk(_syntax(file)) if isinstance(d, kinds))


def where(eqn: Any) -> Where | None:
    """The innermost line outside installed libraries that made this equation."""
    return _where(eqn.source_info.traceback)


def where_called() -> Where | None:
    """The innermost line outside installed libraries that is running now."""
    return _where(source_info_util.current().traceback)


def fingerprint(jaxpr: Any, rule_of: Callable[[str], Any]) -> Hashable:
    """A key that equal programs share: equations, parameters, the user's lines, their rules.

    Raises TypeError where a parameter cannot be compared.
    """
    numbers: dict[Any, int] = {}

    def variable(v: Any) -> int:
        return numbers.setdefault(v, len(numbers))

    def atom(v: Any) -> Hashable:
        if not isinstance(v, Literal):
            return variable(v)
        value = np.asarray(v.val)
        return str(value.dtype), value.shape, value.tobytes()

    def parameter(p: Any) -> Hashable:
        if hasattr(p, "eqns"):
            constants = tuple(map(id, getattr(p, "consts", ())))
            return fingerprint(open_jaxpr(p)[0], rule_of), constants
        if isinstance(p, list | tuple):
            return type(p).__name__, *map(parameter, p)
        hash(p)
        return p

    def equation(eqn: Any) -> Hashable:
        name, inner = eqn.primitive.name, INLINED.get(eqn.primitive.name)
        params = {inner: eqn.params[inner]} if inner else eqn.params
        return (
            name, rule_of(name), where(eqn), tuple(map(atom, eqn.invars)),
            tuple((variable(v), v.aval.shape, v.aval.dtype) for v in eqn.outvars),
            tuple((k, parameter(params[k])) for k in sorted(params)), recomputes(eqn),
        )  # fmt: skip

    inputs = tuple((variable(v), v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(equation(eqn) for eqn in jaxpr.eqns)
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


# ---- backends and meshes -------------------------------------------------------------------------


def started() -> bool:
    """True once jax has made its devices."""
    from jax._src import xla_bridge

    return bool(xla_bridge._backends)


def in_a_cluster() -> bool:
    """True if something that JAX knows (SLURM, Open MPI, ...) has started this process."""
    from jax._src.clusters import ClusterEnv

    known = [c for c in ClusterEnv._cluster_types if not c.opt_in_only_method]
    return any(c.is_env_present() for c in known)


def current_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`, None if there is none."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside jit
        from jax._src import mesh as mesh_lib

        mesh = mesh_lib.get_concrete_mesh()
    return mesh if mesh is not None and not mesh.empty else None


# ---- primitives by name --------------------------------------------------------------------------


def ways_to_call(name: str) -> list[Callable[..., Any]]:
    """Functions that make an equation of the primitive `name`, the most direct first."""
    found: list[Callable[..., Any]] = []
    plain = name.replace("-", "_")
    primitive = next(
        (
            p
            for p in vars(core.primitives).values()
            if isinstance(p, core.Primitive) and p.name == name
        ),
        None,
    )
    if primitive is not None:
        found.append(lambda *xs, **params: primitive.bind(*xs, **params))
    for module in (jax.lax, jnp, jax.random):
        if hasattr(module, plain):
            found.append(getattr(module, plain))
    return found


@functools.cache
def primitive_names() -> frozenset[str]:
    """The names of JAX's public primitives."""
    return frozenset(
        p.name for p in vars(core.primitives).values() if isinstance(p, core.Primitive)
    )


def equations(jaxpr: Any) -> Sequence[Any]:
    """All equations of a program, those of inner programs included."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        inner = inner_program(eqn)
        if inner is not None:
            found += equations(inner[0])
    return found


def short_type(aval: Any) -> str:
    """`f32[8,512]`"""
    return ShapedArray(aval.shape, aval.dtype).str_short(short_dtypes=True)


def asked_by_an_operator() -> bool:
    """True if an operator of a jax.Array called the `__jax_array__` that calls this.

    It asks before it lets the other operand's reflected operator have the call.
    """
    return sys._getframe(2).f_code.co_name.startswith("_operator_")
