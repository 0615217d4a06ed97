"""A call of a dfunction as a function of flat arrays, with its body and its rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from dtorchjax.call_shape import CallShape, Static, is_array
from dtorchjax.errors import PlacementError
from dtorchjax.layout_rule import LayoutRule, accepted, layouts_of
from dtorchjax.local_calls import Aval, Body, run_backward, run_forward
from dtorchjax.local_primitives import call
from dtorchjax.local_rules import BodyRow, checked_table, sentence_table, signature_table
from dtorchjax.notation import PlacementSignature
from dtorchjax.operators import run_eagerly

if TYPE_CHECKING:
    from dtorchjax.dfunction import Dfunction

ONE_ARRAY = jax.tree.structure(0), (None,)


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


__all__ = ["FlatCall"]
