"""Numbers that people write down, checked before anything is computed with them.

NaN and infinity are refused, too: they would make every result NaN, or nothing at all.
"""

from __future__ import annotations

from math import isfinite
from typing import TypeGuard

from pagedsim.core import ConfigError


def positive(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a number above 0."""
    if not (_is_number(value) and value > 0):
        raise ConfigError(f"{key}={value}: must be a number above 0")


def not_negative(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a number, 0 or above."""
    if not (_is_number(value) and value >= 0):
        raise ConfigError(f"{key}={value}: must be a number, at least 0")


def share(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a number above 0 and at most 1."""
    if not (_is_number(value) and 0 < value <= 1):
        raise ConfigError(f"{key}={value}: must be above 0 and at most 1")


def whole(key: str, value: object, low: int = 1) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value}: must be a whole number")
    if value < low:
        raise ConfigError(f"{key}={value}: must be at least {low}")


def truth(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is true or false: a word such as "no" would be true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value}: must be true or false")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
