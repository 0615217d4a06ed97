"""Operators: JAX primitives of ours with a decomposition, and a VJP rule where one is better.

>>> @op
... def doctest_softmax(x, *, axis=-1):
...     shifted = jnp.exp(x - jax.lax.stop_gradient(x.max(axis, keepdims=True)))
...     return shifted / shifted.sum(axis, keepdims=True)
>>> @doctest_softmax.vjp
... def _(out, g, *, axis):
...     return out * (g - (out * g).sum(axis, keepdims=True))
>>> jax.grad(lambda x: doctest_softmax(x)[0])(jnp.zeros(2)).tolist()
[0.25, -0.25]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.errors import OpError
from dtorchjax.op_primitives import make_primitives, set_kernel, trace, types_of
from dtorchjax.registry import OPS, RULES, caller, declare_op_rule

P = ParamSpec("P")
T = TypeVar("T")
HALVES = (jnp.float16, jnp.bfloat16)


class Op(Generic[P, T]):
    """An operator: call it on arrays, tracers or DTensors.

    Positional parameters are operands: arrays, pytrees of arrays, or None where absent.
    Keyword-only parameters are static: hashable, part of every cache key.
    """

    def __init__(self, body: Callable[P, Any], upcast: bool, saves: tuple[str, ...]):
        functools.update_wrapper(self, body)
        self.name = getattr(body, "__name__", "op")
        self.body, self.upcast, self.saves = body, upcast, saves
        self.place = caller(__file__)
        parameters = list(inspect.signature(body).parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.operands = [p.name for p in parameters if p.kind in positional]
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self.static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.required = sum(p.kind in positional and p.default is p.empty for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise OpError(f"op `{self.name}`: name its static arguments, **kwargs are not known")
        self.vjp_rule: Callable[..., Any] | None = None
        self.vjp_names: list[str] = []
        self.kernels: dict[str, Callable[..., Any]] = {}
        self.primitive, self.tangent = make_primitives(self.name)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # ---- declaration ----

    def vjp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the backward pass; the names of its arguments say what is saved.

        They may be operands, `out` (the results), what the op `saves`, `g` (the results'
        cotangents, in their structure; None for a result that has none) and static arguments. The
        rule returns a tuple of one gradient per operand (None: no gradient), or the gradient itself
        if there is one operand. It must be linear in `g`.
        Gradients are cast to their operand's dtype.

        Raises OpError for another name, or if there is a rule.
        """
        names = list(inspect.signature(rule).parameters)
        known = [*self.operands, *([self.rest] if self.rest else []), *self.saves, *self.static]
        known += ["out", "g"]
        unknown = [n for n in names if n not in known]
        if unknown:
            raise OpError(
                f"the VJP rule of `{self.name}` asks for {', '.join(unknown)}; it may name "
                f"{', '.join(known)}"
            )
        if "g" not in names:
            raise OpError(f"the VJP rule of `{self.name}` must take the cotangent, `g`")
        if self.vjp_rule is not None:
            raise OpError(f"op `{self.name}` has a VJP rule already")
        self.vjp_rule, self.vjp_names = rule, names
        return rule

    def rule(self, sentence: Any = None, /, **kinds: Any) -> Any:
        """Declare a placement table of its own, tried before that of the decomposition.

        `sentence(*dims, **static)` is written as for `dt.rule`, one `Dims` per array operand; each
        of its rows must hold for the operator on one device's parts.
        """
        if sentence is None:
            return functools.partial(self.rule, **kinds)
        declare_op_rule(self.name, sentence, kinds, caller(__file__))
        return sentence

    def kernel(self, platform: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare a platform's own program ("cpu", "gpu", "tpu") in place of the decomposition.

        It takes the same arguments and must return the same types (and what the op saves). The
        decomposition stays the reference, and what other platforms run; derivatives are those of
        the VJP rule, or of the decomposition. In a program under `dt.jit` a kernel runs on one
        device's parts where the operator has a table of its own (`rule`).
        """

        def declare(kernel: Callable[..., Any]) -> Callable[..., Any]:
            if platform in self.kernels:
                raise OpError(f"op `{self.name}` has a kernel for {platform} already")
            self.kernels[platform] = kernel
            set_kernel(self.primitive, platform, kernel)
            return kernel

        return declare

    # ---- calls ----

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        operands, static = self.bind(args, kwargs)
        leaves, tree = jax.tree.flatten(operands, is_leaf=_jax.runs_eagerly)
        for leaf in leaves:
            if _jax.runs_eagerly(leaf):
                return leaf.__run_eagerly__(self, *operands, **dict(static))
        xs = [self.array(x) for x in leaves]
        tree_of_results = trace(self, static, tree, types_of(xs)).tree
        results = self.primitive.bind(*xs, static=static, tree=tree, batch=(), op=self)
        return self.split(jax.tree.unflatten(tree_of_results, results))[0]

    def split(self, results: Any) -> tuple[Any, dict[str, Any]]:
        """(what a caller gets, what is kept for the VJP rule by name)."""
        if not self.saves:
            return results, {}
        return results[0], dict(zip(self.saves, results[1:], strict=True))

    def bind(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(operands in order, static arguments as sorted pairs), defaults filled in."""
        n = len(self.operands)
        if len(args) > n and self.rest is None:
            raise TypeError(
                f"{self.name}() takes {n} operands ({', '.join(self.operands)}), {len(args)} are "
                f"given; name the static arguments: {', '.join(self.static) or 'there are none'}"
            )
        given = dict(kwargs)
        operands = list(args[:n])
        for name in self.operands[len(operands) :]:
            if name in given:
                operands.append(given.pop(name))
            elif name in self.defaults:
                operands.append(self.defaults[name])
            else:
                raise TypeError(f"{self.name}() needs the operand `{name}`")
        static = []
        for name in sorted(self.static):
            if name in given:
                static.append((name, self._static(name, given.pop(name))))
            elif name in self.defaults:
                static.append((name, self._static(name, self.defaults[name])))
            else:
                raise TypeError(f"{self.name}() needs the static argument `{name}`")
        for name in given:
            problem = "is given twice" if name in self.operands else "is not known"
            raise TypeError(f"{self.name}(): `{name}` {problem}")
        return (*operands, *args[n:]), tuple(static)

    def _static(self, name: str, value: Any) -> Any:
        if isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{self.name}(): `{name}` is a static argument, a Python value; an array was given"
            )
        value = _frozen(value)
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{self.name}(): the static argument `{name}` cannot be hashed: {value!r}"
            ) from None
        return value

    def array(self, x: Any) -> Any:
        """An operand as an array; TypeError for what is none."""
        if isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            return jnp.asarray(x)
        raise TypeError(f"{self.name}(): an operand is {type(x).__name__}, not an array")

    # ---- what the primitives ask ----

    def run(self, *operands: Any, **static: Any) -> Any:
        """The decomposition, in float32 for half precision if `upcast`; the first result is cast
        back, further ones (statistics) stay as they are."""
        if not self.upcast:
            return self.body(*operands, **static)
        halves = {x.dtype for x in jax.tree.leaves(operands) if x.dtype in HALVES}
        if not halves:
            return self.body(*operands, **static)
        back = half_result(jax.tree.leaves(operands))
        results = self.body(*_widened(operands), **static)
        leaves, tree = jax.tree.flatten(results)
        if leaves[0].dtype == jnp.float32:
            leaves[0] = leaves[0].astype(back)
        return jax.tree.unflatten(tree, leaves)

    def pull(self, operands: Any, results: Any, g: Any, static: dict[str, Any]) -> list[Any]:
        """The VJP rule: one gradient (or None) per flat operand."""
        n = len(self.operands)
        out, saved = self.split(results)
        have = dict(zip(self.operands, operands, strict=False))
        if self.rest is not None:
            have[self.rest] = operands[n:]
        have |= {"out": out, "g": g, **saved}
        if self.upcast:
            have = {k: _widened(v) for k, v in have.items()}
        have |= static
        assert self.vjp_rule is not None
        found = self.vjp_rule(**{name: have[name] for name in self.vjp_names})
        if n == 1 and self.rest is None:
            found = (found,)
        if not isinstance(found, tuple | list) or len(found) != len(operands):
            raise OpError(
                f"the VJP rule of `{self.name}` must return {len(operands)} gradients in a tuple"
            )
        flat = []
        for operand, gradient in zip(operands, found, strict=True):
            tree = jax.tree.structure(operand)
            if gradient is None:
                flat += [None] * tree.num_leaves
            elif tree.num_leaves:
                flat += tree.flatten_up_to(gradient)
        return flat

    def value_names(self, tree: Any, results: int) -> list[str]:
        """The names of the flat operands, of `results` results and of what is saved, for people."""
        outs = ["out"] if results == 1 else [f"out[{i}]" for i in range(results)]
        return [*self.flat_names(tree), *outs, *self.saves]

    def flat_names(self, tree: Any) -> list[str]:
        """The names of the flat operands."""
        operands = jax.tree.unflatten(tree, range(tree.num_leaves))
        names = []
        for i, operand in enumerate(operands):
            name = self.operands[i] if i < len(self.operands) else f"{self.rest}[{i}]"
            paths = jax.tree_util.tree_leaves_with_path(operand)
            names += [name + jax.tree_util.keystr(path) for path, _ in paths]
        return names


def half_result(leaves: list[Any]) -> Any:
    """The dtype of a result of these operands, as JAX promotes."""
    inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.result_type(*inexact)


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in HALVES else x, tree)


def _frozen(value: Any) -> Any:
    """A static value in a form that can be hashed: lists are tuples, numpy numbers Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, np.generic):
        return value.item()
    return value


@overload
def op(body: Callable[P, T], /) -> Op[P, T]: ...
@overload
def op(
    *, upcast: bool = True, saves: Sequence[str] = ()
) -> Callable[[Callable[P, Any]], Op[P, Any]]: ...
def op(body: Any = None, /, *, upcast: bool = True, saves: Sequence[str] = ()) -> Any:
    """Declare an operator; its body is the decomposition.

    Positional parameters are operands (arrays, pytrees, None where absent), keyword-only ones are
    static. With `upcast`, half precision is computed in float32 and the first result cast back.
    With `saves`, the body returns a tuple of the result and one more value per name, which callers
    do not get and the VJP rule may ask for.

    Raises OpError if there is an operator or a JAX primitive of this name.
    """
    if body is None:
        return functools.partial(op, upcast=upcast, saves=saves)
    made = Op(body, upcast, tuple(saves))
    if made.name in OPS:
        raise OpError(f"op `{made.name}` is declared already ({OPS[made.name].place})")
    if made.name in RULES or made.name in _jax.primitive_names():
        raise OpError(f"`{made.name}` is one of JAX's primitives: give the op another name")
    OPS[made.name] = made
    return made


class Elementary(Generic[P, T]):
    """A function that is primitives of JAX already, under a name of `dt.ops`: it takes DTensors."""

    def __init__(self, name: str, fun: Callable[P, T]):
        functools.update_wrapper(self, fun)
        self.name = self.__name__ = name
        self.fun, self.place = fun, caller(__file__)

    def __repr__(self) -> str:
        return f"<op {self.name}, JAX's own>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=_jax.runs_eagerly):
            if _jax.runs_eagerly(leaf):
                return leaf.__run_eagerly__(self.fun, *args, **kwargs)
        return self.fun(*args, **kwargs)


def elementary(name: str, fun: Callable[P, T]) -> Elementary[P, T]:
    """Give a function of JAX a name in `dt.ops`; it has no decomposition and JAX's own VJP."""
    if name in OPS:
        raise OpError(f"op `{name}` is declared already")
    OPS[name] = made = Elementary(name, fun)
    return made
