"""Numbers drawn one by one: turns of a conversation, seconds of a tool, calls at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number, refuse_settings, require_number, unknown
from pagedsim.workload.lognormal import sigma_of

Floats = NDArray[np.float64]

FEWEST, MOST = 1, 100_000
"""Bounds of a count."""


class Draw(ABC):
    """A distribution of numbers of at least 0."""

    drawn: ClassVar[bool] = True  # whether chance has a part in it

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """So many of them; fewer are the beginning of more."""

    def counts(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The same as whole numbers of at least 1."""
        return np.clip(np.rint(self.sample(count, rng)), FEWEST, MOST).astype(np.int64)


@dataclass(frozen=True)
class Fixed(Draw):
    """Always the same."""

    value: float
    drawn = False

    def __post_init__(self) -> None:
        require_number("value", self.value, low=0)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        return np.full(count, float(self.value))


@dataclass(frozen=True)
class Uniform(Draw):
    """Every number from `min` to `max` equally often."""

    min: float
    max: float

    def __post_init__(self) -> None:
        require_number("min", self.min, low=0)
        require_number("max", self.max, low=self.min)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        return self.min + rng.random(count) * (self.max - self.min)

    def counts(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = np.floor(self.min + rng.random(count) * (self.max + 1 - self.min))
        return np.clip(np.minimum(drawn, self.max), FEWEST, MOST).astype(np.int64)


@dataclass(frozen=True)
class Exponential(Draw):
    """Seconds of things that end at any moment with the same chance."""

    mean: float

    def __post_init__(self) -> None:
        require_number("mean", self.mean, above=0)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.standard_exponential(count) * self.mean


@dataclass(frozen=True)
class Geometric(Draw):
    """Turns of conversations of which each turn is the last with the same chance."""

    mean: float

    def __post_init__(self) -> None:
        require_number("mean", self.mean, low=1)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        if self.mean == 1:
            return np.ones(count)
        ends = log(1 - 1 / self.mean)
        return np.floor(np.log1p(-rng.random(count)) / ends) + 1


@dataclass(frozen=True)
class LogNormal(Draw):
    """Mostly small, now and then large; `cv` is the coefficient of variation."""

    mean: float
    cv: float

    def __post_init__(self) -> None:
        require_number("mean", self.mean, above=0)
        require_number("cv", self.cv, low=0.001, high=1000)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        sigma = sigma_of(self.cv)
        drawn: Floats = np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2) * self.mean
        return drawn


SHAPES: Mapping[str, Callable[..., Draw]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "exponential": Exponential,
    "geometric": Geometric,
    "lognormal": LogNormal,
}


def make_draw(key: str, given: object) -> Draw:
    """A number for always the same, or `{"shape": name, ...}`; a Draw is passed through.

    >>> make_draw("turns", {"shape": "geometric", "mean": 4})
    Geometric(mean=4)
    """
    if isinstance(given, Draw):
        return given
    if is_number(given):
        given = {"shape": "fixed", "value": given}
    if not isinstance(given, Mapping) or "shape" not in given:
        raise ConfigError(f"{key}={given}: must be a number, or shape: and its settings")
    settings: dict[str, Any] = {str(name): value for name, value in given.items()}
    shape = str(settings.pop("shape"))
    if shape not in SHAPES:
        raise unknown(f"{key}.shape", shape, SHAPES)
    refuse_settings(f"{key}.shape={shape}", settings, SHAPES[shape], key)
    try:
        return SHAPES[shape](**settings)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from None
