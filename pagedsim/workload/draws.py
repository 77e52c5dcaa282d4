"""Random draws of workloads: named streams, shared prefixes, distributions, request attributes.

The attributes beside times and lengths are priority, client, deadline and sampling parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite, log, nan
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.core.errors import is_number, refuse_settings, require_number, require_whole, unknown
from pagedsim.core.request import GREEDY
from pagedsim.workload.lengths import sigma_of
from pagedsim.workload.limits import LONGEST

Floats = NDArray[np.float64]


def stream(seed: int, name: str, owner: str = "") -> np.random.Generator:
    """The random stream `name` of a run with this seed, from its start; each `owner` has its own.

    A stream depends on the seed and its name alone: drawing more arrivals, or adding a predictor,
    leaves all lengths unchanged, so runs that differ in one setting stay comparable.

    >>> stream(1, "lengths").random() == stream(1, "lengths").random()
    True
    >>> stream(1, "lengths").random() == stream(1, "arrivals").random()
    False
    """
    require_whole("seed", seed, 0)
    name = f"{owner}/{name}" if owner else name
    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key])))


def weights_of(key: str, weights: Mapping[Any, Any]) -> NDArray[np.float64]:
    """Validated probabilities: non-negative, summing to 1."""
    if not weights:
        raise ConfigError(f"{key}: needs at least one value and its probability")
    shares = np.array([require_number(f"{key}.{value}", w, low=0) for value, w in weights.items()])
    if abs(shares.sum() - 1) > 1e-6:
        raise ConfigError(f"{key}: the probabilities sum to {shares.sum():g}: must sum to 1")
    return shares


def pick(weights: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """`count` indices drawn with probabilities `weights`."""
    edges = np.cumsum(weights)
    edges[-1] = np.inf  # rounding must not leave a gap at the end
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int32)


@dataclass(frozen=True)
class SharedPrefixes:
    """Shared system prompts: `share` of the requests start with one of `count` prefixes.

    Each has `tokens` tokens and is prepended to the prompt. The popularity of prefix k is
    proportional to 1 / k ** `skew`: 0 is uniform, 1 is Zipf's law.
    """

    tokens: int
    count: int = 1
    share: float = 1.0
    skew: float = 0.0

    def __post_init__(self) -> None:
        require_whole("prefixes.tokens", self.tokens, 1, LONGEST)
        require_whole("prefixes.count", self.count, 1, 1_000_000)
        require_number("prefixes.share", self.share, low=0, high=1)
        require_number("prefixes.skew", self.skew, low=0, high=10)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """The prefix of each request, -1 for none."""
        popularity = 1.0 / np.arange(1, self.count + 1) ** self.skew
        edges = np.cumsum(popularity) / popularity.sum() * self.share
        edges[-1] = self.share
        drawn = np.searchsorted(edges, rng.random(count), side="right").astype(np.int32)
        drawn[drawn == self.count] = -1
        return drawn


def make_prefixes(prefixes: Mapping[str, Any] | SharedPrefixes | None) -> SharedPrefixes | None:
    """Shared prefixes from settings; None and objects pass through."""
    if prefixes is None or isinstance(prefixes, SharedPrefixes):
        return prefixes
    if not isinstance(prefixes, Mapping):
        raise ConfigError(f"prefixes={prefixes!r}: must be tokens, count, share and skew")
    given = {str(key): value for key, value in prefixes.items()}
    refuse_settings("prefixes", given, SharedPrefixes, "prefixes")
    return SharedPrefixes(**given)


FEWEST, MOST = 1, 100_000
"""Bounds of an integer draw."""


class Draw(ABC):
    """A distribution of non-negative numbers."""

    drawn: ClassVar[bool] = True  # whether it is random

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` samples; a smaller count must give a prefix of a larger."""

    def counts(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Samples rounded to integers of at least 1."""
        return np.clip(np.rint(self.sample(count, rng)), FEWEST, MOST).astype(np.int64)


@dataclass(frozen=True)
class Fixed(Draw):
    """A constant."""

    value: float
    drawn = False

    def __post_init__(self) -> None:
        require_number("value", self.value, low=0)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        return np.full(count, float(self.value))


@dataclass(frozen=True)
class Uniform(Draw):
    """Uniform between `min` and `max`."""

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
    """Exponential, for memoryless durations in seconds."""

    mean: float

    def __post_init__(self) -> None:
        require_number("mean", self.mean, above=0)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.standard_exponential(count) * self.mean


@dataclass(frozen=True)
class Geometric(Draw):
    """Geometric, for conversations that end with constant probability after each turn."""

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
    """Log-normal with coefficient of variation `cv`."""

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
    """A distribution from a constant or `{"shape": name, ...}`; objects pass through.

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


EXACT = "exact"
MOST_SEQUENCES = 1024
"""Upper bound on sequences per request, to catch mistyped values."""


@dataclass(frozen=True)
class Labelled:
    """Attribute columns; a scalar array where all rows are equal."""

    priority: Floats
    client: NDArray[np.int32]
    clients: tuple[str, ...]
    deadline: Floats
    params: SamplingParams
    exact: bool
    """Whether each request asks for as many tokens as its answer has."""

    def asked(
        self, output_len: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], list[SamplingParams]]:
        """Distinct sampling parameters, and the index of those of each request."""
        if not self.exact:
            return np.array(0, np.int32), [self.params]
        lengths, index = np.unique(output_len, return_inverse=True)
        distinct = [replace(self.params, max_tokens=length) for length in lengths.tolist()]
        return index.astype(np.int32), distinct


@dataclass(frozen=True)
class Labels:
    """Distribution of request attributes.

    `priority` and `client` are a constant or a mapping of values to probabilities; `deadline` is in
    seconds after arrival. Each prompt has `n` output sequences, or a beam search of width `beam`.
    `max_tokens` is what a request asks for at most: a number, "exact" (the length of its answer),
    or None.
    """

    priority: float | Mapping[float, float] = 0.0
    client: str | Mapping[str, float] = ""
    deadline: float | None = None
    n: int = 1
    beam: int | None = None
    max_tokens: int | str | None = None

    @property
    def drawn(self) -> bool:
        return isinstance(self.priority, Mapping) or isinstance(self.client, Mapping)

    def draw(
        self,
        arrival: Floats,
        stream: Callable[[str], np.random.Generator],
    ) -> Labelled:
        """Attributes for requests with these arrivals; `stream` returns a named random stream."""
        rows = len(arrival)
        deadline = np.array(np.nan)
        if self.deadline is not None:
            deadline = arrival + require_number("deadline", self.deadline, above=0)
        client, clients = self._clients(rows, stream)
        priority = self._priorities(rows, stream)
        exact = self.max_tokens == EXACT
        return Labelled(priority, client, clients, deadline, self.params, exact)

    def cut(self, output_len: NDArray[Any]) -> NDArray[Any]:
        """Output lengths, cut to what requests ask for."""
        most = self.params.max_tokens
        return output_len if most is None else np.minimum(output_len, most)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of each request."""
        n, most = require_whole("n", self.n, 1, MOST_SEQUENCES), self.max_tokens
        if isinstance(most, str):
            if most != EXACT:
                raise ConfigError(f"max_tokens={most}: must be a number, {EXACT}, or null")
            most = None
        elif most is not None:
            require_whole("max_tokens", most, 1, LONGEST)
        if self.beam is None:
            if n == 1 and most is None:
                return GREEDY
            return SamplingParams(n=n, temperature=0.0, max_tokens=most)
        if n > 1:
            raise ConfigError(f"n={n} and beam={self.beam}: set one of them")
        width = require_whole("beam", self.beam, 1, MOST_SEQUENCES)
        return SamplingParams(n=width, beam_search=True, temperature=0.0, max_tokens=most)

    def _priorities(self, rows: int, stream: Callable[[str], np.random.Generator]) -> Floats:
        if not isinstance(self.priority, Mapping):
            return np.array(require_number("priority", self.priority))
        weights = weights_of("priority", self.priority)
        levels = [_level(level) for level in self.priority]
        return np.array(levels)[pick(weights, rows, stream("priorities"))]

    def _clients(
        self, rows: int, stream: Callable[[str], np.random.Generator]
    ) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        if not isinstance(self.client, (Mapping, str, int, float)):
            raise ConfigError(
                f"client={self.client}: must be a name, or shares by name that sum to 1, "
                "such as {a: 0.8, b: 0.2}"
            )
        if not isinstance(self.client, Mapping):
            return np.array(0, np.int32), (str(self.client),)
        weights = weights_of("client", self.client)
        return pick(weights, rows, stream("clients")), tuple(map(str, self.client))


def _level(level: object) -> float:
    # Mapping keys from a command line are strings.
    try:
        value = float(level)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = nan
    if not isfinite(value):
        raise ConfigError(f"priority.{level}: a priority must be a finite number")
    return value
