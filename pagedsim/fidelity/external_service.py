"""What each client got of a server, from when its requests came, began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.external_log import Latencies, Log
from pagedsim.metrics.service import ServiceOverTime, service_of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClientService:
    """A log's requests with these latencies, as its clients saw them; times in seconds."""

    log: Log
    latencies: Latencies

    @property
    def clients(self) -> Sequence[str]:
        """Their names, in order."""
        return sorted(set(self.log.client))

    @property
    def light(self) -> str:
        """Who asks for the least service."""
        asked = service_of(self.log.prompt, self.log.output, np.zeros(len(self.log)))
        return min(self.clients, key=lambda client: float(asked[self._of(client)].sum()))

    def ttft(self, client: str) -> float:
        """The mean time to a client's first tokens."""
        return float(self.latencies.ttft[self._of(client)].mean())

    @property
    def tpot(self) -> float:
        """The mean time between tokens."""
        return float(np.nanmean(self.latencies.tpot))

    @property
    def gap(self) -> float:
        """The largest difference in service since the beginning, until the last arrival."""
        return self._over_time.gap_since_start(self._span) or 0.0

    @property
    def gap_waiting(self) -> float | None:
        """The largest within any time in which two clients had requests waiting, if there is."""
        return self._over_time.gap_while_waiting()

    @property
    def rate(self) -> float:
        """Tokens of answers a second, until the last arrival."""
        out = np.clip((self._span - self._first) / (self._last - self._first), 0.0, 1.0)
        return float((self.log.output * out).sum() / self._span)

    @property
    def rate_to_the_end(self) -> float:
        """Tokens of answers a second, until the last of them."""
        return float(self.log.output.sum() / self._last.max())

    @property
    def at_once(self) -> float:
        """Requests that are being answered at a time, on average until the last arrival."""
        inside = np.minimum(self._last, self._span) - np.minimum(self._first, self._span)
        return float(inside.sum() / self._span)

    def gaps(self, times: Floats) -> Floats:
        """The difference in service since the beginning at each of some times."""
        clients = np.arange(len(self.clients))
        return np.ptp(self._over_time.at(clients[:, None], times[None, :]), axis=0)

    def _of(self, client: str) -> NDArray[np.bool_]:
        return np.array(self.log.client) == client

    @property
    def _span(self) -> float:
        return float(self.log.arrived[-1])

    @property
    def _first(self) -> Floats:
        return self.log.arrived + self.latencies.ttft

    @property
    def _last(self) -> Floats:
        # An answer of one token begins and ends at once.
        return np.maximum(self.log.arrived + self.latencies.e2e, self._first + 1e-9)

    @cached_property
    def _over_time(self) -> ServiceOverTime:
        number = {client: place for place, client in enumerate(self.clients)}
        log = self.log
        return ServiceOverTime(
            np.array([number[client] for client in log.client]),
            log.arrived,
            self._first,
            self._last,
            log.prompt,
            log.output,
        )
