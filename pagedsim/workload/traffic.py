"""One kind of requests: what a synthetic workload is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.workload.arrivals import Arrivals, Gamma, Timed, make_arrivals
from pagedsim.workload.choices import SharedPrefixes, make_prefixes
from pagedsim.workload.labels import Labelled, Labels
from pagedsim.workload.lengths import Lengths, make_lengths
from pagedsim.workload.limits import LONGEST, MOST, Tokens, clip
from pagedsim.workload.merge import Source
from pagedsim.workload.streams import stream


@dataclass(frozen=True)
class Rows:
    """The columns of one kind of requests, in its own order of arrival."""

    prompt_len: Tokens
    output_len: Tokens
    prefix: NDArray[np.int32]  # -1 where there is none
    prefix_len: NDArray[np.int32]
    labels: Labelled
    clipped: int
    capped: int  # at the cut of the distribution that they were drawn from


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of requests: when they come, how long they are, what they are labelled.

    `requests` bounds their number where the workload does not, `start` is the second at which
    they begin; the other settings are those of `synthetic`.
    """

    name: str = ""
    arrivals: str | Arrivals = "poisson"
    rate: float | None = None
    cv: float | None = None
    users: int | None = None
    think_time: float | None = None
    requests: int | None = None
    start: float = 0.0
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt"
    max_len: int | None = None
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None
    priority: float | Mapping[float, float] = 0.0
    client: str | Mapping[str, float] = ""
    deadline: float | None = None
    n: int = 1
    beam: int | None = None

    def checked(self) -> Traffic:
        """The same with objects for names; raises ConfigError where a setting cannot work."""
        if self.max_len is not None:
            require_whole("max_len", self.max_len, 2, LONGEST)
        if self.requests is not None:
            require_whole("requests", self.requests, 1, MOST)
        require_number("start", self.start, low=0)
        _ = self.labels.params  # n and beam may contradict each other
        prefixes = make_prefixes(self.prefixes)
        if prefixes and self.max_len is not None and prefixes.tokens > self.max_len - 2:
            raise ConfigError(
                f"prefixes.tokens={prefixes.tokens}: must leave room for a prompt and an answer "
                f"in max_len={self.max_len}"
            )
        return replace(
            self,
            arrivals=self.process,
            lengths=make_lengths(self.lengths, self.max_len),
            prefixes=prefixes,
        )

    @property
    def process(self) -> Arrivals:
        """Its arrival process."""
        return make_arrivals(
            self.arrivals,
            rate=self.rate,
            cv=self.cv,
            users=self.users,
            think_time=self.think_time,
        )

    @property
    def drawn(self) -> bool:
        """Whether chance has a part in it; for traffic that is checked."""
        lengths = make_lengths(self.lengths, self.max_len)
        drawn = self.process.drawn or lengths.drawn or self.labels.drawn
        return drawn or self.prefixes is not None

    @property
    def labels(self) -> Labels:
        """How its requests are labelled."""
        return Labels(self.priority, self.client, self.deadline, self.n, self.beam)

    @property
    def requests_per_second(self) -> float:
        """Its mean rate; 0 where requests come at once or when users ask."""
        return self.process.rate if isinstance(self.process, Timed) else 0.0

    def source(self, seed: int) -> Source:
        """Its arrivals."""

        def times(count: int) -> NDArray[np.float64]:
            # From the beginning of the stream each time: more are then a continuation of fewer.
            return self.start + self.process.times(count, self._stream(seed, "arrivals"))

        cv = self.process.cv if isinstance(self.process, Gamma) else 1.0
        return Source(times, self.requests_per_second, cv, self.requests, self.name)

    def rows(self, arrival: NDArray[np.float64], seed: int) -> Rows:
        """The other columns of requests that arrive then."""
        count = len(arrival)
        lengths, prefixes = make_lengths(self.lengths, self.max_len), make_prefixes(self.prefixes)
        prompt, output = lengths.sample(count, self._stream(seed, "lengths"))
        capped = lengths.capped(prompt, output)
        prefix, prefix_len = np.array(-1, np.int32), np.array(0, np.int32)
        if prefixes:
            prefix = prefixes.sample(count, self._stream(seed, "prompts"))
            prefix_len = np.where(prefix >= 0, prefixes.tokens, 0).astype(np.int32)
            prompt = prompt + prefix_len
        prompt, output, clipped = clip(prompt, output, self.max_len)
        drawn = self.labels.draw(arrival, partial(self._stream, seed))
        return Rows(prompt, output, prefix, prefix_len, drawn, clipped, capped)

    def _stream(self, seed: int, name: str) -> np.random.Generator:
        return stream(seed, f"{self.name}/{name}" if self.name else name)
