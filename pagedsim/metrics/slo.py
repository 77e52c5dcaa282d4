"""Service level objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import ConfigError, choices, require_number, unknown_client

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
        for client, own in self.clients.items():
            some = of_client(client)
            met[some] = own._within({name: values[some] for name, values in latencies.items()})
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
    own = {
        str(client): _own(f"slo.clients.{client}", bounds, whole)
        for client, bounds in settings.get("clients", {}).items()
    }
    slo = replace(whole, clients=own)
    bounded = any(
        getattr(one, name) is not None for one in (slo, *own.values()) for name in BOUNDED
    )
    return slo if bounded else None


def refuse_strangers(slo: Slo, clients: Iterable[str]) -> None:
    """Raise ConfigError for bounds of a client that the workload lacks."""
    there = set(clients)
    for client in slo.clients:
        if not client or client not in there:
            raise unknown_client(f"slo.clients.{client}", client, there)


def _own(where: str, bounds: object, whole: Slo) -> Slo:
    """The bounds of one client."""
    if not isinstance(bounds, Mapping):
        raise ConfigError(f"{where}={bounds}: must be bounds such as {{ttft: 0.5}}")
    for name, bound in bounds.items():
        if name not in BOUNDED:
            raise ConfigError(f"{where}.{name}: no such bound; {choices(str(name), BOUNDED)}")
        if bound is not None:
            require_number(f"{where}.{name}", bound, 0)
    return replace(whole, **{str(name): bound for name, bound in bounds.items()})
