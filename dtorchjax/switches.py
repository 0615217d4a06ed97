"""Which operators are taken apart, and which use their own VJP rule: contexts and environment.

`DTORCHJAX_DECOMPOSE` and `DTORCHJAX_VJP` are "all", "none" or names separated by commas; with
`_DENY` at the end, names that are excluded. A denial wins over everything.
`DTORCHJAX_LOG=decompose:debug,vjp:debug` prints what is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from dtorchjax import _jax
from dtorchjax.errors import OpError
from dtorchjax.registry import OPS

LOGGERS = ("decompose", "vjp")


class Choice(NamedTuple):
    """Names: those in `allow` (None: nothing is said, so all) that are not in `deny`."""

    allow: frozenset[str] | None = None
    deny: frozenset[str] = frozenset()

    def takes(self, name: str) -> bool:
        return name not in self.deny and (self.allow is None or name in self.allow)

    def narrowed(self, allow: Any, deny: Any) -> Choice:
        """Inside a context: its own allowed names, and all denied ones."""
        inner = self.allow if allow is None else named(allow)
        return Choice(inner, self.deny | named(deny))


_decompose = _jax.user_context()
_vjp = _jax.user_context()


def named(names: str | Collection[str]) -> frozenset[str]:
    """A set of names; `"a"` is one name. TypeError for what holds no names."""
    if isinstance(names, str):
        return frozenset([names])
    if not isinstance(names, list | tuple | set | frozenset):
        raise TypeError(f"operator names are a str, list, tuple or set, not {type(names).__name__}")
    found = frozenset(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"operator names are strings, not {type(name).__name__}")
    return found


def from_environment(name: str) -> Choice:
    allow = os.environ.get(name, "").strip()
    chosen = {"": None, "all": None, "none": frozenset()}.get(allow, _split(allow))
    return Choice(chosen, _split(os.environ.get(f"{name}_DENY", "")))


def _split(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.replace(";", ",").split(",") if word.strip())


def decompositions() -> Choice:
    """Which operators `dt.decompose` takes apart here."""
    return _decompose.value or from_environment("DTORCHJAX_DECOMPOSE")


def vjp_rules() -> Choice:
    """Which operators use their own VJP rule here; the others that of their decomposition."""
    return _vjp.value or from_environment("DTORCHJAX_VJP")


def uses_kernel(name: str) -> bool:
    """A platform's own program runs unless the decomposition was asked for by name (or "all")."""
    chosen = decompositions()
    asked = chosen.allow is not None or os.environ.get("DTORCHJAX_DECOMPOSE", "").strip() == "all"
    return not (asked and chosen.takes(name))


def has_vjp(op: Any) -> bool:
    return op.vjp_rule is not None and vjp_rules().takes(op.name)


def state() -> tuple[Any, ...]:
    """What the tracing of an operator depends on."""
    return decompositions(), vjp_rules()


@contextlib.contextmanager
def decomposing(allow: Any = None, deny: Any = ()) -> Iterator[None]:
    """Inside, `dt.decompose` takes apart only the operators `allow` (None: as outside), and none of
    `deny`; an operator that is named in `allow` does not use a platform's own program.

    >>> with decomposing(deny="softmax"):
    ...     decompositions().takes("softmax"), decompositions().takes("gelu")
    (False, True)
    """
    with _decompose(decompositions().narrowed(allow, deny)):
        yield


@contextlib.contextmanager
def custom_vjps(allow: Any = None, deny: Any = ()) -> Iterator[None]:
    """Inside, only the operators `allow` (None: as outside) and none of `deny` use their own VJP
    rule; the others are differentiated through their decomposition.

    >>> with custom_vjps(deny=["softmax"]):
    ...     vjp_rules().takes("softmax")
    False
    """
    with _vjp(vjp_rules().narrowed(allow, deny)):
        yield


def check_names(names: Collection[str]) -> None:
    """OpError for a name that is no operator."""
    for name in sorted(names):
        if name not in OPS:
            raise OpError(f"there is no op `{name}`")


def set_loggers(text: str | None = None) -> None:
    """Apply `DTORCHJAX_LOG`: `decompose:debug,vjp:info`; OpError for another logger or level."""
    text = os.environ.get("DTORCHJAX_LOG", "") if text is None else text
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, level = part.partition(":")
        number = logging.getLevelNamesMapping().get((level or "debug").upper())
        if name not in LOGGERS or number is None:
            raise OpError(
                f"DTORCHJAX_LOG={text!r}: {part!r} is not one of {', '.join(LOGGERS)} with a level "
                "(decompose:debug)"
            )
        logger = logging.getLogger(f"dtorchjax.{name}")
        logger.setLevel(number)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
