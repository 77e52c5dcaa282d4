"""Checks on what a configuration says, each failing with one line that names the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, unknown

T = TypeVar("T")


def make(kind: str, name: str, known: Mapping[str, Callable[..., T]], given: dict[str, Any]) -> T:
    """Call what `name` stands for with the settings `given`; every key must be one it takes."""
    if name not in known:
        raise unknown(kind, name, known)
    where = kind.rpartition(".")[0]
    refuse_settings(f"{kind}={name}", given, known[name], where, hidden=("max_len",))
    return known[name](**given)


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where` before the text of a ConfigError raised inside; nothing if it is empty."""
    try:
        yield
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError(f"{where}: {error}") from None
