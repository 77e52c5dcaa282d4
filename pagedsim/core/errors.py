"""What can go wrong in the core, as types that a caller may want to tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from math import isfinite
from numbers import Integral, Real


class PagedsimError(Exception):
    """Base of every error that pagedsim raises on purpose; its text is one clear line."""


class ConfigError(PagedsimError, ValueError):
    """A setting that cannot work, found when the object is built."""


class RequestError(PagedsimError, ValueError):
    """A request that is malformed, added twice, or not known."""


class PolicyError(PagedsimError, ValueError):
    """A policy's hook gave an answer that is none."""


class PlanError(PagedsimError, RuntimeError):
    """A plan committed out of turn, or a commit that does not answer its plan."""


class IntegrityError(PagedsimError, AssertionError):
    """`check()` found an invariant broken: a bug of ours or of a policy, never of the input."""


def require(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ConfigError unless `low <= value` (and `<= high`, where given)."""
    # So that NaN, which is neither, is refused.
    if not low <= value or (high is not None and not value <= high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name}={value}: must be {allowed}")


def require_number(name: str, value: float, low: float, high: float | None = None) -> None:
    """The same for what may be no finite number at all, as a text from a file."""
    if not is_number(value):
        raise ConfigError(f"{name}={value!r}: must be a number")
    require(name, value, low, high)


def require_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `low` (and up to `high`)."""
    if not is_whole(value):
        raise ConfigError(f"{name}={value!r}: must be a whole number")
    require(name, int(value), low, high)


def is_number(value: object) -> bool:
    """Whether it is a finite number; true and false are none."""
    return type(value) is not bool and isinstance(value, Real) and isfinite(value)


def is_whole(value: object) -> bool:
    """Whether it is a whole number; true and false are none."""
    return type(value) is not bool and isinstance(value, Integral)


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist; lists what does, nearest first guess included."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"unknown {kind} {name!r}: choose from {', '.join(names)}{hint}")
