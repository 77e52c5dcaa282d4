"""Request attributes beside times and lengths: priority, client, deadline, sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.core.errors import require_number, require_whole
from pagedsim.core.request import GREEDY
from pagedsim.workload.draws import pick, weights_of

Floats = NDArray[np.float64]

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


@dataclass(frozen=True)
class Labels:
    """Distribution of request attributes.

    `priority` and `client` are a constant or a mapping of values to probabilities; `deadline` is in
    seconds after arrival. Each prompt has `n` output sequences, or a beam search of width `beam`.
    """

    priority: float | Mapping[float, float] = 0.0
    client: str | Mapping[str, float] = ""
    deadline: float | None = None
    n: int = 1
    beam: int | None = None

    @property
    def drawn(self) -> bool:
        """Whether any attribute is random."""
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
        return Labelled(priority, client, clients, deadline, self.params)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of each request."""
        n = require_whole("n", self.n, 1, MOST_SEQUENCES)
        if self.beam is None:
            return GREEDY if n == 1 else SamplingParams(n=n, temperature=0.0)
        if n > 1:
            raise ConfigError(f"n={n} and beam={self.beam}: set one of them")
        width = require_whole("beam", self.beam, 1, MOST_SEQUENCES)
        return SamplingParams(n=width, beam_search=True, temperature=0.0)

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
