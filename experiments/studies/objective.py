"""Latency bounds of a capacity search, for all requests or one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.catalogue import label_of, metric_of, text_of
from pagedsim.metrics.compare import value_of


@dataclass(frozen=True)
class Bound:
    """One latency, such as `ttft_p99`, that must not be above `seconds`."""

    key: str
    seconds: float
    client: str | None = None
    """The client; None for all requests."""

    @property
    def name(self) -> str:
        return label_of(self.key) if self.client is None else f"{self.client}: {label_of(self.key)}"

    @property
    def text(self) -> str:
        return f"{self.name} {text_of(self.key, self.seconds)}"

    def of(self, summary: Mapping[str, Any]) -> float:
        """The value in a run's summary; NaN where nothing was measured."""
        return value_of(dict(summary), self.key, self.client)


def bounds_of(settings: object) -> list[Bound]:
    """The bounds that a mapping describes, whose values may be mappings for single clients."""
    found = list(_read(settings, "bounds", None))
    if not found:
        raise ConfigError("bounds: must have at least one, such as {ttft_p99: 2.0}")
    return found


def _read(settings: object, where: str, client: str | None) -> list[Bound]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}={settings}: must be a mapping such as {{ttft_p99: 2.0}}")
    found: list[Bound] = []
    for name, value in settings.items():
        key = f"{where}.{name}"
        if isinstance(value, Mapping) and client is None:
            found += _read(value, key, str(name))
        elif value is not None:
            try:
                metric = metric_of(str(name))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
            if not metric.latency or name == metric.name:
                raise ConfigError(f"{key}: must be a latency with its statistic, such as ttft_p99")
            require_number(key, value, 0)
            found.append(Bound(str(name), float(value), client))
    return found


def missed(bounds: list[Bound], summary: Mapping[str, Any]) -> list[Bound]:
    """The bounds that a run did not meet; what was not measured, such as a TPOT of answers of one
    token, misses none.
    """
    return [bound for bound in bounds if bound.of(summary) > bound.seconds]


def refuse_strangers(bounds: list[Bound], clients: Sequence[str]) -> None:
    """Raise ConfigError for a client that the workload lacks."""
    for bound in bounds:
        if bound.client is not None and bound.client not in clients:
            there = ", ".join(filter(None, clients)) or "none with a name"
            raise ConfigError(
                f"study.bounds.{bound.client}: no such client in the workload; it has {there}"
            )
