"""Checks on what a configuration says, each failing with one line that names the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown

T = TypeVar("T")


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
