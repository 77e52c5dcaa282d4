"""Checks on what a configuration says, each failing with one line that names the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from sys import float_info
from typing import Any, TypeVar

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown

T = TypeVar("T")


def number(
    key: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> float:
    """`value` as a finite float, at least `low` (and at most `high`) or more than `above`."""
    allowed = "a number"
    if low is not None:
        allowed += f", {low:g} or more" if high is None else f" from {low:g} to {high:g}"
    elif above is not None:
        allowed += f" above {above:g}" + ("" if high is None else f", at most {high:g}")
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    fine = fine and abs(value) <= float_info.max  # neither infinite, nor not a number
    if fine and low is not None:
        fine = value >= low
    if fine and above is not None:
        fine = value > above
    if fine and high is not None:
        fine = value <= high
    if not fine:
        raise ConfigError(f"{key}={value!r}: must be {allowed}")
    return float(value)


def whole(key: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int of at least `low` (and at most `high`)."""
    fine = isinstance(value, int) and not isinstance(value, bool)
    if not fine or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{key}={value!r}: must be a whole number, {allowed}")
    return int(value)


def flag(key: str, value: Any) -> bool:
    """`value` as true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: must be true or false")
    return value


def make(kind: str, name: str, known: Mapping[str, Callable[..., T]], given: dict[str, Any]) -> T:
    """Call what `name` stands for with the settings `given`; every key must be one it takes."""
    if name not in known:
        raise unknown(kind, name, known)
    refuse_unknown(f"{kind}={name}", given, known[name])
    return known[name](**given)


def refuse_unknown(
    what: str,
    given: Mapping[str, Any],
    maker: Callable[..., Any],
    hidden: tuple[str, ...] = ("max_len",),
) -> None:
    """Raise ConfigError for a setting that does not exist, or one that is missing.

    `hidden` names parameters that are set elsewhere, so that no message offers them.
    """
    allowed = signature(maker).parameters
    offered = [key for key in allowed if key not in hidden]
    for key in given:
        if key not in allowed:
            if not offered:
                raise ConfigError(f"{what}: takes no settings, {key!r} was given")
            raise unknown(f"setting of {what}", str(key), offered)
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in given:
            raise ConfigError(f"{what}: needs {key}=")


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where` before the text of a ConfigError raised inside; nothing if it is empty."""
    try:
        yield
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError(f"{where}: {error}") from None
