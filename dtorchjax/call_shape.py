"""How one call of a dfunction looks: which of its arguments are arrays, and what the rest is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from dtorchjax import _jax
from dtorchjax.dtensor import DTensor


def is_array(x: Any) -> bool:
    """True for what is an operand; all else is static."""
    return isinstance(x, jax.Array | np.ndarray | DTensor | jax.ShapeDtypeStruct | _jax.Tracer)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, DTensor)


class Static:
    """A value that is no array, in a tree of arrays; equal to one of the same type and value."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> Any:
        return type(self.value), self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class CallShape:
    """The arguments of a call without its arrays: calls with equal statics share one.

    `places` are the numbers of the leaves that are arrays, `slots` of the arrays and Nones.
    `names` are those of the arguments; None where a rule prepares arguments itself, and the
    function is called `fun(*arrays, **static)`.
    """

    def __init__(
        self, parameters: inspect.Signature, tree: Any, leaves: Sequence[Any],
        names: tuple[str, ...] | None,
    ):  # fmt: skip
        self.parameters, self.tree, self.names = parameters, tree, names
        self.template = [None if is_array(x) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if is_array(x)]
        self.slots = [i for i, x in enumerate(leaves) if is_array(x) or x is None]
        numbers = self.named(range(len(self.places)), Static)
        count = {
            k: [x for x in jax.tree.leaves(v) if isinstance(x, Static)] for k, v in numbers.items()
        }
        self.operands = {name: [x.value for x in found] for name, found in count.items()}
        """The numbers of the operands in each argument."""
        self.dynamic = [name for name, found in self.operands.items() if found]

    def arguments(self, operands: Sequence[Any]) -> Any:
        leaves = list(self.template)
        for i, x in zip(self.places, operands, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(self.tree, leaves)

    def named(self, operands: Sequence[Any], wrap: Callable[[Any], Any]) -> dict[str, Any]:
        """Arguments by name (or by number as text), with `wrap` around every array."""
        found = self.arguments([wrap(x) for x in operands])
        if self.names is None:
            return {str(i): x for i, x in enumerate(found[0])}
        return dict(zip(self.names, found, strict=True))

    @property
    def static(self) -> dict[str, Any]:
        """The arguments without arrays, by name."""
        found = self.arguments([None] * len(self.places))
        if self.names is None:
            return found[1]
        named = zip(self.names, found, strict=True)
        return {name: value for name, value in named if name not in self.dynamic}

    def call(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """`fun` as the user called the function, on these arrays."""
        found = self.arguments(operands)
        if self.names is None:
            return fun(*found[0], **found[1])
        named = dict(zip(self.names, found, strict=True))
        bound = inspect.BoundArguments(self.parameters, named)  # type: ignore[arg-type]
        return fun(*bound.args, **bound.kwargs)

    def call_by_name(self, fun: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """`fun` with statics, and all that comes after the first of them, by keyword."""
        kinds = {p.kind for p in self.parameters.parameters.values()}
        fixed = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
        if self.names is None or kinds & fixed:
            return self.call(fun, operands)
        positional, named = [], {}
        for name, value in zip(self.names, self.arguments(operands), strict=True):
            kind = self.parameters.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif name in self.dynamic and not named and kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(value)
            else:
                named[name] = value
        return fun(*positional, **named)

    def gradients(self, found: Any, wrt: Sequence[int], name: str) -> list[Any]:
        """What a backward pass returned, as one gradient (None: zero) for each operand of `wrt`.

        It returns one entry for each argument with arrays, or for each argument.
        """
        numbers = self.named(range(len(self.places)), Static)
        entries = found if isinstance(found, tuple) else (found,)
        order = next((o for o in (self.dynamic, list(numbers)) if len(o) == len(entries)), None)
        if order is None:
            raise TypeError(
                f"the backward pass of dfunction `{name}` returned {len(entries)} gradients for "
                f"the arguments {', '.join(self.dynamic)}"
            )
        gradients: dict[int, Any] = {}
        for argument, gradient in zip(order, entries, strict=True):
            if gradient is None or argument not in self.dynamic:
                continue
            leaves, tree = jax.tree.flatten(numbers[argument])
            for number, leaf in zip(leaves, tree.flatten_up_to(gradient), strict=True):
                if isinstance(number, Static):
                    gradients[number.value] = leaf
        return [gradients.get(i) for i in wrt]

    def needs(self, wrt: Sequence[int]) -> tuple[bool, ...]:
        """Which arguments are differentiated."""
        return tuple(any(i in wrt for i in found) for found in self.operands.values())


def flatten_call(arguments: Any) -> tuple[list[Any], Any, Hashable]:
    """Leaves and structure of a call's arguments, and the key of its statics."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_leaf)
    kinds = tuple("array" if is_array(x) else "none" if x is None else (type(x), x) for x in leaves)
    return leaves, tree, (tree, kinds)


__all__ = ["CallShape", "Static", "flatten_call", "is_array"]
