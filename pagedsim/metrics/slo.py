"""Service level objectives, and quality of experience of streamed output (Andes, 2404.16283).

Andes compares the times at which a user digests each token with the ideal times: the first at the
expected TTFT, the others at reading speed. Of the total time until each token, summed over tokens,
QoE is the share that was not delay.

A token is digested not before it arrives, not before its ideal time, and not faster than reading
speed, so tokens that arrive early compensate for later gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import ConfigError, choices, require_number, unknown_client
from pagedsim.metrics.token_times import Stretches, highest

Latencies = Mapping[str, NDArray[np.float64]]
Mask = NDArray[np.bool_]

BOUNDED = ("ttft", "tpot", "e2e")
"""Latencies that can have a bound."""


@dataclass(frozen=True)
class Slo:
    """Latency bounds in seconds, all of which a request must meet.

    `clients` override bounds; bounds they omit are inherited.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    clients: Mapping[str, Slo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in BOUNDED:
            if (bound := getattr(self, name)) is not None:
                require_number(f"slo.{name}", bound, 0)

    def met(self, latencies: Latencies, of_client: Callable[[str], Mask]) -> Mask:
        """Which requests met it; a request without a TPOT cannot miss that bound. `of_client`
        returns the mask of a client's requests."""
        met = self._within(latencies)
        for client, slo in self.clients.items():
            some = of_client(client)
            met[some] = slo._within({name: values[some] for name, values in latencies.items()})
        return met

    def _within(self, latencies: Latencies) -> Mask:
        met = ~np.isnan(latencies["e2e"])
        for name in BOUNDED:
            if (bound := getattr(self, name)) is not None:
                met &= ~(latencies[name] > bound)
        return met


def slo_of(settings: Mapping[str, Any]) -> Slo | None:
    """The objective from settings; None without bounds."""
    whole = Slo(**{name: settings[name] for name in BOUNDED})
    per_client = {
        str(client): _own(f"slo.clients.{client}", bounds, whole)
        for client, bounds in settings.get("clients", {}).items()
    }
    slo = replace(whole, clients=per_client)
    bounded = any(
        getattr(objective, name) is not None
        for objective in (slo, *per_client.values())
        for name in BOUNDED
    )
    return slo if bounded else None


def validate_clients(slo: Slo, clients: Iterable[str]) -> None:
    """Raise ConfigError for bounds of a client that the workload lacks."""
    known = set(clients)
    for client in slo.clients:
        if not client or client not in known:
            raise unknown_client(f"slo.clients.{client}", client, known)


def _own(where: str, bounds: object, whole: Slo) -> Slo:
    if not isinstance(bounds, Mapping):
        raise ConfigError(f"{where}={bounds}: must be bounds such as {{ttft: 0.5}}")
    for name, bound in bounds.items():
        if name not in BOUNDED:
            raise ConfigError(f"{where}.{name}: no such bound; {choices(str(name), BOUNDED)}")
        if bound is not None:
            require_number(f"{where}.{name}", bound, 0)
    return replace(whole, **{str(name): bound for name, bound in bounds.items()})


Floats = NDArray[np.float64]
Counts = NDArray[Any]

_AT_ONCE = 1 << 13
"""Tokens per vectorised chunk."""


@dataclass(frozen=True)
class Reader:
    """Expected TTFT in seconds and reading speed in tokens per second.

    The defaults are those of Andes for text chat: the acceptable load time of a web page (1.3 s)
    and the mean reading speed (4.8 tokens/s).
    """

    ttft: float = 1.3
    tokens_per_s: float = 4.8

    def __post_init__(self) -> None:
        require_number("qoe.ttft", self.ttft, 0)
        require_number("qoe.tokens_per_s", self.tokens_per_s, above=0)

    def qoe(
        self, arrival: Floats, tokens: Counts, stretches: Stretches, requests: Counts
    ) -> Floats:
        """QoE of these requests, by their stretches of tokens."""
        first = stretches.offsets[requests]
        several = stretches.offsets[requests + 1] - first > 1
        best, pace = arrival + self.ttft, 1 / self.tokens_per_s
        delay = np.maximum(stretches.start[first] - best, 0)
        total = tokens * delay
        # In one stretch, a token's delay is the end of its step against reading speed; only
        # requests with a step beyond the delay so far need the token-by-token computation.
        ends = stretches.ends
        ahead = np.arange(len(ends) + 1.0)
        ahead *= pace
        np.subtract(ends, ahead[:-1], out=ahead[:-1])
        ahead[-1] = -np.inf  # sentinel: an end may be one past the last
        begin = stretches.begin[first]
        due = best + pace - begin * pace
        steps = np.where(several | (begin < 0), 0, tokens - 1)
        odd = (steps != tokens - 1) | (highest(ahead, begin, steps) - due > delay)
        for alike in (odd & ~several, odd & several):  # the times of the first are looked up faster
            some = np.flatnonzero(alike & (tokens > 1))
            some = some[np.argsort(-tokens[some], kind="stable")]
            if len(some):
                subset = (column[some] for column in (requests, tokens, best, delay))
                total[some] = _delays(subset, pace, stretches)
        return self._share(total, tokens)

    def qoe_of_times(self, arrival: Floats, tokens: Counts, came: Sequence[Floats]) -> Floats:
        """QoE of requests with known arrival times of their output chunks.

        If there are more tokens than chunks, they are spread evenly over the chunks.
        """
        pace, late = 1 / self.tokens_per_s, np.zeros(len(arrival))
        for row, (times, count) in enumerate(zip(came, tokens.tolist(), strict=True)):
            if count and len(times):
                arrivals = times[np.arange(count) * len(times) // count]
                best = arrival[row] + self.ttft + np.arange(count) * pace
                late[row] = np.maximum(np.maximum.accumulate(arrivals - best), 0).sum()
        return self._share(late, tokens)

    def _share(self, late: Floats, tokens: Counts) -> Floats:
        """QoE of requests with these delays in seconds, summed over their tokens."""
        reading = tokens * (tokens - 1.0) / (2 * self.tokens_per_s)
        whole = tokens * self.ttft + reading + late
        return 1 - np.divide(late, whole, out=np.zeros(len(late)), where=whole > 0)


def _delays(columns: Iterable[Counts], pace: float, stretches: Stretches) -> Floats:
    """The delays of requests, longest first, summed over their tokens in chunks."""
    requests, tokens, best, delay = columns
    sums = delay.copy()
    most, number = int(tokens[0]), 1
    longer = np.searchsorted(-tokens, -np.arange(1, most), side="left")
    while number < most:
        some = int(longer[number - 1])
        end = min(number + max(_AT_ONCE // some, 1), most)
        numbers = np.arange(number, end)[:, None]
        late = stretches.at(requests[:some], numbers) - best[:some] - numbers * pace
        late[0] = np.maximum(late[0], delay[:some])
        np.maximum.accumulate(late, axis=0, out=late)
        delay[:some] = late[-1]
        late[numbers >= tokens[:some]] = 0.0
        late[0] += sums[:some]
        sums[:some] = np.add.accumulate(late, axis=0)[-1]
        number = end
    return sums
