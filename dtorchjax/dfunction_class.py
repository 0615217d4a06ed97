"""DFunction: a dfunction as a class with `forward` and `backward`, as PyTorch has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dtorchjax.call_shape import CallShape
from dtorchjax.dfunction import Dfunction


class Context:
    """What `forward` leaves for `backward`: saved arrays, and any attributes that it sets.

    `needs_input_grad` has one truth value per argument: whether its gradient is wanted. Under
    `jax.grad` outside of `dt.jit` on DTensors it is True for every argument with a gradient.
    """

    def __init__(self, needs_input_grad: Sequence[bool] = ()):
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class DFunction:
    """Subclass it with `forward(ctx, ...)` and `backward(ctx, grad, ...)`, call it by `apply`.

    `op_name` names a registered LayoutRule; `rule`, `linear`, `extra` and `cotangents` are those of
    `dt.dfunction`. `backward` returns one gradient per argument of `forward`, None where there is
    none; without it JAX differentiates `forward`.

    >>> class Double(DFunction):
    ...     rule = "n -> n"
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     def backward(ctx, grad):
    ...         return 2 * grad
    >>> float(Double.apply(jnp.ones(())[None])[0])
    2.0
    """

    op_name: str | None = None
    rule: Any = None
    linear: str | None = None
    extra: Sequence[str] = ()
    cotangents: Any = None
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call it: on plain arrays, DTensors, or in a program under `dt.jit`."""
        return cls.dfunction()(*args, **kwargs)

    @classmethod
    def dfunction(cls) -> Dfunction:
        """The dfunction that this class stands for."""
        if "_made" not in cls.__dict__:
            cls._made = _OfClass(cls)
        return cls._made  # type: ignore[attr-defined]


class _OfClass(Dfunction):
    def __init__(self, cls: type[DFunction]):
        if not callable(getattr(cls, "forward", None)):
            raise TypeError(f"{cls.__name__} needs forward(ctx, ...)")
        self.cls = cls

        @functools.wraps(cls.forward, assigned=("__doc__",))
        def fun(*args: Any, **kwargs: Any) -> Any:
            return cls.forward(Context(), *args, **kwargs)

        fun.__name__ = cls.__name__
        signature = inspect.signature(cls.forward)
        fun.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        super().__init__(fun, cls.rule, cls.op_name, cls.linear, cls.extra, cls.cotangents)
        if cls.backward is not None:
            self.defvjp(cls.forward, self._backward)

    def run_forward(self, shape: CallShape, operands: Sequence[Any], wrt: Sequence[int]) -> Any:
        context = Context(shape.needs(wrt))
        result = shape.call(functools.partial(self.cls.forward, context), operands)
        return result, vars(context)

    def _backward(self, saved: dict[str, Any], cotangent: Any) -> Any:
        assert self.cls.backward is not None
        context = Context()
        vars(context).update(saved)
        several = isinstance(cotangent, tuple | list)
        return self.cls.backward(context, *(cotangent if several else (cotangent,)))


__all__ = ["Context", "DFunction"]
