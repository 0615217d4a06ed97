"""dfunction: a function on one device's parts, with its rule and, if wanted, its own backward pass.

On plain arrays it is the function itself. In a program under `dt.jit`, and on DTensors, it runs on
every device's parts, and the rule says where operands, results and gradients lie.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.call_shape import CallShape, flatten_call, is_array
from dtorchjax.dtensor import DTensor
from dtorchjax.errors import PlacementError
from dtorchjax.flat_call import FlatCall
from dtorchjax.layout_rule import (
    LAYOUT_RULES,
    LayoutRule,
    find_layout_rule,
)
from dtorchjax.local_calls import Aval
from dtorchjax.notation import PlacementSignature

Rule = str | PlacementSignature | LayoutRule | None
MOST_CALLS = 256
"""Calls with different statics of one dfunction that are kept."""


class Dfunction:
    """What `dt.dfunction` makes of a function."""

    def __init__(
        self, fun: Callable[..., Any], rule: Rule = None, op_name: str | None = None,
        linear: str | None = None, extra: Sequence[str] = (),
        cotangents: Mapping[int | str, str] | None = None,
    ):  # fmt: skip
        functools.update_wrapper(self, fun)
        self.fun, self.given_rule, self.op_name = fun, rule, op_name
        self.linear, self.extra, self.cotangents = linear, tuple(extra), dict(cotangents or {})
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.parameters = inspect.signature(fun)
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None
        self.jvp: Callable[..., Any] | None = None
        self.calls: dict[Any, FlatCall] = {}
        self.of_arrays: dict[int, FlatCall] = {}
        for key, placement in self.cotangents.items():
            known = isinstance(key, int) or key == "return" or key in self.parameters.parameters
            if not known or placement not in ("R", "P"):
                raise PlacementError(
                    f"dfunction `{self.name}`: cotangents={{{key!r}: {placement!r}}}; it names a "
                    "parameter (or 'return') and says 'R' or 'P'"
                )

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Give the function a backward pass of its own, on local arrays.

        forward: takes what the function takes (statics by keyword); returns the result and
            residuals, any tree of arrays and static values. They stay on their device.
        backward: `(residuals, cotangent of the result) -> gradients`, a tuple with one entry for
            each argument that has arrays (or for each argument); None is zero. The cotangent of a
            result that is whole, or a partial sum, is the whole one on every device; the gradient
            of an operand that is whole is this device's term (see `cotangents` in `dfunction`).
        """
        if self.jvp is not None:
            raise PlacementError(f"dfunction `{self.name}` has a defjvp; it is one or the other")
        self.forward, self.backward = forward, backward
        self._forget()

    def defjvp(self, rule: Callable[..., Any]) -> None:
        """Give it a forward-mode rule, `rule(primals, tangents, **static)`, as jax.custom_jvp's."""
        if self.backward is not None:
            raise PlacementError(f"dfunction `{self.name}` has a defvjp; it is one or the other")
        self.jvp = rule
        self._forget()

    def _forget(self) -> None:
        self.calls.clear()
        self.of_arrays.clear()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A method: `self` is the first argument, static or a tree of arrays."""
        return self if owner is None else functools.partial(self, owner)

    def __repr__(self) -> str:
        return f"dfunction({self.name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.in_whole_trace():
            return self._in_program(args, kwargs)
        if not kwargs and all(type(x) is DTensor for x in args) and args:
            flat = self.of_arrays.get(len(args))
            if flat is not None:  # nothing to look for among the arguments
                return flat.on_dtensors(args)
            flat, operands = self.flat(args, kwargs)
            if len(operands) == len(args):  # no arrays among the defaults
                self.of_arrays[len(args)] = flat
            return flat.on_dtensors(operands)
        if _has_dtensor((args, kwargs)):
            flat, operands = self.flat(args, kwargs)
            return flat.on_dtensors(operands)
        return self.plain(*args, **kwargs)

    def _in_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, operands = self.flat(args, kwargs)
        operands = [jnp.asarray(x) for x in operands]
        return flat.result(flat.arrays_in_program(*operands), operands)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The function on whole arrays, or on one device's parts: no rule, no mesh."""
        if self.backward is None and self.jvp is None:
            return self.fun(*args, **kwargs)
        flat, operands = self.flat(args, kwargs)
        operands = [jnp.asarray(x) for x in operands]
        return flat.result(flat.plain(*operands), operands)

    def signature(self, *args: Any, **kwargs: Any) -> PlacementSignature:
        """The table for these arguments (arrays or ShapeDtypeStructs), one row per mesh axis.

        Raises PlacementError for a LayoutRule, which speaks of all axes of a mesh at once.
        """
        flat, operands = self.flat(args, kwargs)
        if isinstance(self.rule, LayoutRule):
            raise PlacementError(f"dfunction `{self.name}` has a LayoutRule: {self.rule!r}")
        of = tuple(Aval(tuple(x.shape), x.dtype) for x in operands)
        rows = flat.body.table(of, flat.body.info(of).results)
        return PlacementSignature(tuple(row.row for row in rows))

    @property
    def rule(self) -> str | PlacementSignature | LayoutRule:
        """The rule; a PlacementError for a function without one."""
        if self.given_rule is not None:
            return self.given_rule
        if self.op_name is not None:
            return find_layout_rule(self.op_name)
        raise PlacementError(
            f"dfunction `{self.name}` has no rule, so it cannot run on distributed arrays: give it "
            'one, such as @dt.dfunction(rule="b i, i o -> b o"), a PlacementSignature or a '
            "LayoutRule"
        )

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FlatCall, list[Any]]:
        """This call as a function of arrays (one object for equal statics), and the arrays."""
        arguments, names = self._arguments(args, kwargs)
        leaves, tree, key = flatten_call(arguments)
        try:
            found = self.calls.get((key, names))
        except TypeError:
            bad = next(x for x in leaves if not is_array(x) and x.__hash__ is None)
            raise TypeError(
                f"dfunction `{self.name}`: what is not an array is static and must be hashable, "
                f"got {type(bad).__name__}"
            ) from None
        if found is None:
            if len(self.calls) >= MOST_CALLS:
                del self.calls[next(iter(self.calls))]
            found = FlatCall(self, CallShape(self.parameters, tree, leaves, names))
            self.calls[key, names] = found
        return found, [x for x in leaves if is_array(x)]

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[str, ...] | None]:
        rule = self.given_rule or LAYOUT_RULES.get(self.op_name or "")
        if isinstance(rule, LayoutRule) and type(rule).preprocess is not LayoutRule.preprocess:
            arrays, static = rule.preprocess(args, kwargs)
            return (tuple(arrays), dict(static)), None
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values()), tuple(bound.arguments)

    # the class form tells its context more (see `DFunction`)

    def run_forward(self, shape: CallShape, operands: Sequence[Any], wrt: Sequence[int]) -> Any:
        assert self.forward is not None
        return shape.call_by_name(self.forward, operands)


def _has_dtensor(arguments: Any) -> bool:
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, DTensor))
    return any(isinstance(x, DTensor) for x in leaves)


# ---- what users call -----------------------------------------------------------------------------


def dfunction(
    fun: Callable[..., Any] | None = None, *, rule: Rule = None, op_name: str | None = None,
    linear: str | None = None, extra: Sequence[str] = (),
    cotangents: Mapping[int | str, str] | None = None,
) -> Any:  # fmt: skip
    """A function on one device's parts: `@dt.dfunction(rule="b i, i o -> b o", linear="each")`.

    On plain arrays it is the function. On DTensors, and in programs under `dt.jit`, it runs on each
    device's parts of its operands. What is not an array is static. Inside, `dt.psum`, `dt.axes_of`
    and the other collectives speak to the devices that share the call's work.

    rule: where operands and results may lie, one row for each mesh axis:
        a sentence, in which a letter of operands and results may be sharded, and one that is
        missing on the right is needed whole; `...` leading dims, `(g r)` a dim of two factors,
        `[b]` an optional operand, `-` one without dims, `k!` a dim that is needed whole;
        a `PlacementSignature`; or a `LayoutRule`.
    op_name: the name of a registered LayoutRule.
    linear: for a sentence, where the body is linear ("each" operand, "jointly", or numbers of
        operands): a letter that is missing on the right may then be sharded, and the result is
        a partial sum.
    extra: more rows as text, `"k: S1, S0 -> R"` if they shard the letter k.
    cotangents: `{"w": "R"}` where the backward pass gives the whole gradient of an operand that is
        whole, not this device's term; `{"return": "P"}` where it takes the cotangent of a whole
        result in terms.

    Raises PlacementError (a ValueError): for a distributed call without a rule, for placements the
    rule does not take, for local results that contradict it. After HyperParallel's DFunction.

    >>> @dfunction(rule="b i, i o -> b o")
    ... def linear(x, w):
    ...     return x @ w
    >>> linear(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    >>> print(linear.signature(jnp.ones((2, 3)), jnp.ones((3, 4))))
    R, R -> R
    S0, R -> S0
    R, S1 -> S1
    """
    if fun is None:
        return functools.partial(
            dfunction, rule=rule, op_name=op_name, linear=linear, extra=extra, cotangents=cotangents
        )
    if not callable(fun):
        raise TypeError(f"dt.dfunction takes a function, not {type(fun).__name__}")
    return Dfunction(fun, rule, op_name, linear, extra, cotangents)


__all__ = ["Dfunction", "dfunction"]
