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
import numpy as np
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from dtorchjax import _jax
from dtorchjax.call_shape import CallShape, Static, flatten_call, is_array
from dtorchjax.dtensor import DTensor
from dtorchjax.errors import PlacementError
from dtorchjax.layout_rule import (
    LAYOUT_RULES,
    LayoutRule,
    accepted,
    find_layout_rule,
    layouts_of,
)
from dtorchjax.local_calls import Aval, Body, run_backward, run_forward
from dtorchjax.local_primitives import call
from dtorchjax.local_rules import BodyRow, checked_table, sentence_table, signature_table
from dtorchjax.notation import PlacementSignature
from dtorchjax.operators import run_eagerly

Rule = str | PlacementSignature | LayoutRule | None
ONE_ARRAY = jax.tree.structure(0), (None,)
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


class FlatCall:
    """A dfunction of flat arrays, for calls with the same statics."""

    def __init__(self, owner: Dfunction, shape: CallShape):
        self.owner, self.shape = owner, shape
        self.structures: dict[Any, Any] = {}
        self.rows: dict[tuple[int, ...], list[BodyRow]] = {}
        self.result_ranks: dict[tuple[int, ...], list[int] | None] = {}
        by_hand = owner.backward is not None
        self.body = Body(
            owner.name, self.run, self._table, source=owner.fun,
            forward=self.forward if by_hand else None,
            backward=self.backward if by_hand else None,
            cotangents={n: p for k, p in owner.cotangents.items() for n in self._numbers(k)},
        )  # fmt: skip
        self.settled = False

    def _numbers(self, key: int | str) -> list[int | str]:
        if isinstance(key, int) or key == "return":
            return [key]
        return list(self.shape.operands.get(key, ()))

    # ---- results as trees

    def _flatten(self, out: Any) -> tuple[list[Any], tuple[Any, tuple[Any, ...]]]:
        """The arrays of a result, and its structure with what else there is."""
        leaves, tree = jax.tree.flatten(out)
        kinds = tuple(None if is_array(x) else Static(x) for x in leaves)
        return [x for x in leaves if is_array(x)], (tree, kinds)

    def _unflatten(self, arrays: Sequence[Any], structure: tuple[Any, tuple[Any, ...]]) -> Any:
        tree, kinds = structure
        rest = iter(arrays)
        return jax.tree.unflatten(tree, [next(rest) if k is None else k.value for k in kinds])

    def _remember(self, out: Any, operands: Sequence[Any]) -> list[Any]:
        arrays, structure = self._flatten(out)
        self.structures[_shapes(operands)] = structure
        return arrays

    def result(self, arrays: Sequence[Any], operands: Sequence[Any]) -> Any:
        return self._unflatten(arrays, self.structures[_shapes(operands)])

    # ---- the body's functions

    def run(self, *operands: Any) -> list[Any]:
        if self.owner.jvp is None:
            return self._remember(self.shape.call(self.owner.fun, operands), operands)
        rule, shape = self.owner.jvp, self.shape
        static = shape.static

        @jax.custom_jvp
        def fun(*operands: Any) -> Any:
            return shape.call(self.owner.fun, operands)

        fun.defjvp(lambda primals, tangents: rule(primals, tangents, **static))
        return self._remember(fun(*operands), operands)

    def forward(self, operands: Sequence[Any], wrt: Sequence[int]) -> tuple[list[Any], Any]:
        found = self.owner.run_forward(self.shape, operands, wrt)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"the forward pass of dfunction `{self.owner.name}` returns a pair, the result and "
                "residuals"
            )
        arrays, structure = self._flatten(found[0])
        self.structures[_shapes(operands)] = structure
        return arrays, (found[1], Static(structure))

    def backward(self, residuals: Any, cotangents: list[Any], wrt: Sequence[int]) -> list[Any]:
        assert self.owner.backward is not None
        kept, structure = residuals
        given = self._unflatten(cotangents, structure.value)
        found = self.owner.backward(kept, given)
        return self.shape.gradients(found, wrt, self.owner.name)

    # ---- the rule

    def _rows(self, ranks: tuple[int, ...]) -> list[BodyRow]:
        """The rows that the rule has for operands of these ranks."""
        if ranks not in self.rows:
            owner, rule = self.owner, self.owner.rule
            try:
                if isinstance(rule, str):
                    given = self._with_absent(ranks, rule.split("->")[0].count(",") + 1)
                    table = sentence_table(rule, given, owner.linear, owner.extra)
                else:
                    assert isinstance(rule, PlacementSignature)
                    wanted = len(rule.rows[0].inputs) if rule.rows else 0
                    table = signature_table(rule, self._with_absent(ranks, wanted)), (), None
            except PlacementError as error:
                raise PlacementError(f"dfunction `{owner.name}`: {error}") from None
            self.rows[ranks], self.body.letters = table[:2]
            self.result_ranks[ranks] = table[2]
        return self.rows[ranks]

    def _table(self, of: Sequence[Aval], results: Sequence[Aval]) -> list[BodyRow]:
        ranks, found = tuple(len(a.shape) for a in of), [len(a.shape) for a in results]
        rows, said = self._rows(ranks), self.result_ranks[ranks]
        if said is not None and len(said) == len(found) and said != found:
            raise PlacementError(
                f"dfunction `{self.owner.name}` returns arrays of {found} dims, its rule "
                f"`{self.owner.rule}` says {said}"
            )
        return checked_table(rows, ranks, found, self.owner.name)

    def _with_absent(self, items: Sequence[Any], wanted: int | None = None) -> list[Any]:
        """One entry per operand of the rule; None for one that is absent."""
        if len(items) == wanted or self.shape.names is None:
            return list(items)
        rest = iter(items)
        return [next(rest) if i in self.shape.places else None for i in self.shape.slots]

    def settle(self) -> None:
        """Find the rule; only calls on distributed arrays need one."""
        if self.settled:
            return
        rule = self.owner.rule
        if isinstance(rule, LayoutRule):
            self.body.layouts = functools.partial(self._layouts, rule)
            if type(rule).get_expand_impl is not LayoutRule.get_expand_impl:
                self.body.expand = functools.partial(self._expand, rule)
        self.settled = True

    def _layouts(self, rule: LayoutRule, mesh: Any, of: Any, results: Any) -> Any:
        shapes = self._with_absent([a.shape for a in of])
        return layouts_of(rule, mesh, self._static(), shapes, [a.shape for a in results])

    def _static(self) -> dict[str, Any]:
        """What a LayoutRule gets by name; an absent operand is a None among the layouts."""
        return {name: value for name, value in self.shape.static.items() if value is not None}

    def _expand(self, rule: LayoutRule, outs: list[Any], ins: list[Any]) -> Any:
        found = rule.get_expand_impl(
            self.owner.plain, outs[0] if len(outs) == 1 else tuple(outs),
            tuple(self._with_absent(ins)), **accepted(rule.get_expand_impl, self._static()),
        )  # fmt: skip
        if found is None:
            return None
        return lambda *operands: self._remember(self.shape.call(found, operands), operands)

    # ---- calls

    def on_dtensors(self, operands: Sequence[Any]) -> Any:
        """Eagerly: the arrays of the result are DTensors."""
        out = run_eagerly(self.eager, *operands)
        return self.result(out, operands) if type(out) is list else out

    def eager(self, *operands: Any) -> Any:
        """A result that is one array as such: nothing has to be put together."""
        arrays = self.arrays_in_program(*operands)
        one = self.structures[_shapes(operands)] == ONE_ARRAY
        return arrays[0] if one else arrays

    def arrays_in_program(self, *operands: Any) -> list[Any]:
        """An equation of the program that is being traced; see `result`."""
        self.settle()
        if self.body.layouts is None:
            self._rows(tuple(x.ndim for x in operands))  # wrong operands: before the body sees them
        return call(self.body, operands)

    @functools.cached_property
    def plain(self) -> Callable[..., list[Any]]:
        """On whole arrays or on one device's parts: jax's custom derivatives."""
        if self.owner.backward is None:
            return self.run
        body = self.body

        @jax.custom_vjp
        def fun(*operands: Any) -> list[Any]:
            return self.run(*operands)

        def forward(*given: Any) -> tuple[list[Any], Any]:
            operands = [p.value for p in given]
            wrt = [i for i, p in enumerate(given) if p.perturbed and _inexact(p.value)]
            results, kept = run_forward(body, body.fun, operands, range(len(operands)), wrt)
            needed = {i for kind, i in kept.sources if kind == "operand"}
            return results, (kept, [x if i in needed else None for i, x in enumerate(operands)])

        def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            kept, operands = residuals
            of = kept.avals
            gradients = run_backward(
                body, body.fun, of, dict(enumerate(operands)), kept,
                [_materialised(c) for c in cotangents], kept.wrt,
            )  # fmt: skip
            found = dict(zip(kept.wrt, gradients, strict=True))
            return tuple(found.get(i) for i in range(len(of)))

        fun.defvjp(forward, backward, symbolic_zeros=True)
        return fun


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _materialised(cotangent: Any) -> Any:
    """The zeros that JAX only speaks of."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jnp.zeros(aval.shape, aval.dtype)


def _shapes(operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in operands)


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
