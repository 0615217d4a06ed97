"""`dtorchjax explain module:function`: the plan of a user's function, from shapes alone."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from dtorchjax.api import Jitted, jit
from dtorchjax.demo import UsageError
from dtorchjax.devices import init_device_mesh
from dtorchjax.errors import PlacementError
from dtorchjax.plan import Plan

SHORT = dict(f64="float64", f32="float32", f16="float16", bf16="bfloat16", c64="complex64",
             i64="int64", i32="int32", i16="int16", i8="int8", u32="uint32", u8="uint8",
             bool="bool")  # fmt: skip


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """`f32[8,128]`, `int32[4]`, `f32[]`: an array's dtype and shape.

    >>> parse_shape("bf16[8,128]")
    ShapeDtypeStruct(shape=(8, 128), dtype=bfloat16)
    """
    match = re.fullmatch(r"\s*([a-z]+\d*)\[([\d,\s]*)\]\s*", text)
    if match is None:
        raise UsageError(f"--shapes {text!r}: write an array as f32[8,128]")
    name, dims = match.groups()
    try:
        dtype = jnp.dtype(SHORT.get(name, name))
    except TypeError:
        raise UsageError(f"--shapes {text!r}: {name} is no dtype") from None
    return jax.ShapeDtypeStruct(tuple(int(d) for d in dims.split(",") if d.strip()), dtype)


def load(where: str) -> Any:
    """The function that `package.module:name` names."""
    module, _, name = where.partition(":")
    if not name:
        raise UsageError(f"{where!r}: write module:function")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{module!r} cannot be imported: {error}") from None
    finally:
        sys.path.remove("")
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def explain_function(
    where: str,
    axes: Sequence[tuple[str, int]],
    shapes: Sequence[str],
    placements: Sequence[str],
    out_placements: Sequence[str],
    memory_limit: float | None = None,
    arguments: str | None = None,
) -> Plan:
    """The plan of `module:function` for arguments of these shapes on a mesh of these axes.

    One placement per argument, such as `S0,R`; missing ones are R. `arguments` names a function
    that returns the arguments instead (pytrees, shapes will do). A function that `dt.jit` has
    compiled is explained as it is. Raises UsageError.
    """
    fun = load(where)
    args = load(arguments)() if arguments else [parse_shape(s) for s in shapes]
    if len(placements) > len(args):
        raise UsageError(f"{len(placements)} placements for {len(args)} shapes")

    def spread(text: str) -> list[str]:
        return text.split(",") if "," in text else [text] * len(axes)

    lie = [spread(p) for p in placements] + [spread("R")] * (len(args) - len(placements))
    out = tuple(spread(p) for p in out_placements)
    try:
        if isinstance(fun, Jitted):
            return fun.explain(*args)
        mesh = init_device_mesh([n for _, n in axes], [name for name, _ in axes])
        step = jit(
            fun, mesh=mesh, in_placements=tuple(lie), memory_limit=memory_limit,
            out_placements=(out[0] if len(out) == 1 else out) or None,
        )  # fmt: skip
        return step.explain(*args)
    except PlacementError as error:
        raise UsageError(str(error)) from None
    except TypeError as error:
        raise UsageError(f"{where} does not take these arguments: {error}") from None
