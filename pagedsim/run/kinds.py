"""Whether a study's settings are of the kinds that its fields say, before anything reads them.

pydantic does this, too. Its import takes 0.07 s, which most commands need not pay, and each of its
errors would have to be worded anew to be one line that names the key, the value and what it must
be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number, is_whole, refuse_settings

T = TypeVar("T")


def each_of(
    maker: Callable[..., T], given: Mapping[str, Mapping[str, Any]], where: str
) -> dict[str, T]:
    """What `maker` makes of each name's settings, which stand under `where`."""
    for name, settings in given.items():
        refuse_settings(name, settings, maker, f"{where}.{name}")
    return {name: maker(**settings) for name, settings in given.items()}


def require_kinds(study: Any, where: str = "") -> None:
    """Raise ConfigError for a field of a dataclass that holds what its annotation rules out.

    Numbers, texts, lists, mappings, and what is in them; other annotations allow everything.
    `where` is the place of a dataclass within a study's settings.
    """
    before = f"{where}." if where else ""
    hints = get_type_hints(type(study))
    for field in fields(study):
        _require(before + field.name, getattr(study, field.name), hints[field.name])


def _require(where: str, value: object, hint: Any) -> None:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if NoneType in get_args(hint):  # None, or one of the others
        if value is not None and len(kinds) == 1:
            _require(where, value, kinds[0])
        return
    if wanted := _wanted(value, get_origin(hint) or hint):
        raise ConfigError(f"{where}={value!r}: must be {wanted}")
    if isinstance(value, Mapping) and len(kinds) == 2:
        for key, inner in value.items():
            _require(f"{where}.{key}", inner, kinds[1])
    elif isinstance(value, (list, tuple)) and len(kinds) == 1:
        for inner in value:
            _require(where, inner, kinds[0])


def _wanted(value: object, kind: Any) -> str:
    """What it must be and is not; empty if it is, or may be anything."""
    if kind is Mapping:
        return "" if isinstance(value, Mapping) else "a mapping of names to settings"
    if kind is Sequence:
        return "" if isinstance(value, (list, tuple)) else "a list"
    if kind is int:
        return "" if is_whole(value) else "a whole number"
    if kind is float:
        return "" if is_number(value) else "a number"
    if kind is str:
        return "" if isinstance(value, str) else "a text"
    return ""
