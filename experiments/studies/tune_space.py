"""What may be tuned: settings, and the values that each may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.studies.compare import refuse_of_an_arm
from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number, is_whole

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_RANGE = ("low", "high", "log")


@dataclass(frozen=True)
class Choice:
    """A setting that takes one of some values."""

    key: str
    values: tuple[str, ...]
    """As one would type them."""

    @property
    def telling(self) -> Sequence[str]:
        """Values of which it is to be known beforehand whether they can be."""
        return self.values

    def distribution(self) -> BaseDistribution:
        """For Optuna."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def override(self, value: Any) -> str:
        """What sets it."""
        return f"{self.key}={value}"


@dataclass(frozen=True)
class Range:
    """A setting that takes a number; a whole one, where both ends are."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def telling(self) -> Sequence[float]:
        """Values of which it is to be known beforehand whether they can be."""
        return self.low, self.high

    def distribution(self) -> BaseDistribution:
        """For Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if is_whole(self.low) and is_whole(self.high):
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def override(self, value: Any) -> str:
        """What sets it, with four digits."""
        return f"{self.key}={value if is_whole(value) else f'{value:.4g}'}"


Setting = Choice | Range


def space_of(settings: object) -> list[Setting]:
    """The settings that a mapping of keys to lists or ranges describes; null leaves one out."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"space={settings}: must be a mapping of settings to values")
    found = [_setting(str(key), value) for key, value in settings.items() if value is not None]
    if not found:
        raise ConfigError("space: must have at least one setting")
    return found


def _setting(key: str, value: object) -> Setting:
    where = f"space.{key}"
    refuse_of_an_arm(where, key)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
        return Choice(key, tuple(map(_typed, value)))
    if isinstance(value, Mapping) and set(value) <= set(_RANGE) and {"low", "high"} <= set(value):
        low, high, log = value["low"], value["high"], value.get("log", False)
        if is_number(low) and is_number(high) and low < high and isinstance(log, bool):
            if log and low <= 0:
                raise ConfigError(f"{where}.low={low}: must be above 0 with log: true")
            return Range(key, low, high, log)
    raise ConfigError(
        f"{where}={value}: must be a list of values, or {{low: ..., high: ..., log: true}} with "
        "low below high"
    )


def _typed(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
