"""Validated access to the keys of a config.json; errors name the file and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_whole


class Keys:
    """The keys of a config.json or of an object in it; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where

    def over(self, defaults: Mapping[str, Any]) -> Keys:
        """A copy with `defaults` for missing keys."""
        return Keys({**defaults, **self.values}, self.where)

    def part(self, name: str) -> Keys:
        """The keys of a nested object; empty if missing."""
        inside = self.values.get(name, {})
        if not isinstance(inside, Mapping):
            raise ConfigError(f"{self.where}: {name}={inside!r}: must be an object")
        return Keys(inside, f"{self.where}: {name}")

    def whole(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`, from the first of `names` that is present."""
        for name in names:
            if name not in self.values:
                continue
            value = self.values[name]
            return require_whole(f"{self.where}: {name}", value, low)
        if default is None:
            raise ConfigError(f"{self.where}: has no {' or '.join(names)}")
        return default

    def numbers(self, name: str) -> list[int]:
        """A list of integers; empty if missing."""
        found = self.values.get(name, [])
        if not isinstance(found, list) or not all(type(value) is int for value in found):
            raise ConfigError(f"{self.where}: {name}={found!r}: must be a list of whole numbers")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        return require_flag(f"{self.where}: {name}", self.values.get(name, default))
