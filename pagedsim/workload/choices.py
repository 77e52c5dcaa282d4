"""Attributes that requests have by chance: priorities, clients, shared prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole
from pagedsim.workload.limits import LONGEST


def weights_of(key: str, weights: Mapping[Any, Any]) -> NDArray[np.float64]:
    """Checked probabilities: each 0 or more, together 1."""
    if not weights:
        raise ConfigError(f"{key}: needs at least one value and its probability")
    found = np.array([require_number(f"{key}.{value}", w, low=0) for value, w in weights.items()])
    if abs(found.sum() - 1) > 1e-6:
        raise ConfigError(f"{key}: the probabilities sum to {found.sum():g}: must sum to 1")
    return found


def pick(weights: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """`count` indices into `weights`, drawn by them."""
    edges = np.cumsum(weights)
    edges[-1] = np.inf  # rounding must not leave a gap at the end
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int32)


@dataclass(frozen=True)
class SharedPrefixes:
    """System prompts: `share` of the requests begin with one of `count`, each of `tokens` tokens.

    The prefix comes before the prompt that the lengths give. Prefix k is used in proportion to
    1 / k ** `skew`: 0 is evenly, 1 is Zipf's law.
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
    """Shared prefixes from their settings; None and an object are passed through."""
    if prefixes is None or isinstance(prefixes, SharedPrefixes):
        return prefixes
    if not isinstance(prefixes, Mapping):
        raise ConfigError(f"prefixes={prefixes!r}: must be tokens, count, share and skew")
    given = {str(key): value for key, value in prefixes.items()}
    refuse_settings("prefixes", given, SharedPrefixes, "prefixes")
    return SharedPrefixes(**given)
