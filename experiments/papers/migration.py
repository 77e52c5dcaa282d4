"""Requests that move between replicas while they decode: whose first tokens come sooner by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from experiments.papers.migration_drawing import draw
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading


@dataclass(frozen=True, kw_only=True)
class Served:
    """One system at one rate; means over seeds."""

    ttft_mean: float
    ttft_p99: float
    tpot_p99: float
    preemptions: float
    """A request."""
    recomputed: float
    """Tokens a request that were computed again after it."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Served:
        """Of the runs of an arm."""

        def mean(key: str) -> float:
            return float(np.mean([run.summary[key] for run in runs]))

        def each(key: str) -> float:
            return float(np.mean([run.summary[key] / run.summary["requests"] for run in runs]))

        return cls(
            ttft_mean=mean("ttft_mean"),
            ttft_p99=mean("ttft_p99"),
            tpot_p99=mean("tpot_p99"),
            preemptions=each("preemptions"),
            recomputed=each("recomputed_tokens"),
        )


Found = Mapping[float, Mapping[str, Served]]
"""By rate and system."""


@dataclass(frozen=True, kw_only=True)
class Migration(Reproduction):
    """Systems over the rate; at one rate with other assumptions, too."""

    one_server: ClassVar[bool] = False

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them; the last is held against the others."""
    rates: Sequence[float]
    """Requests/s."""
    at: float
    """The rate at which assumptions are varied."""
    variants: Mapping[str, Sequence[str]]
    """What is assumed, decided otherwise."""
    most: float
    """How many times as long the P99 to the first token is elsewhere, at most, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("study.most", self.most, 1)
        if len(self.systems) < 2:
            raise ConfigError("study.systems: must be at least two")
        for rate in self.rates:
            require_number("study.rates", rate, above=0)
        if self.at not in self.rates:
            rates = ", ".join(f"{rate:g}" for rate in self.rates)
            raise ConfigError(f"study.at={self.at:g}: must be one of study.rates: {rates}")

    @property
    def _last(self) -> str:
        return list(self.systems)[-1]

    @property
    def _others(self) -> list[str]:
        return list(self.systems)[:-1]

    def arms(self) -> dict[str, list[str]]:
        made = {
            _arm(name, rate): [*own, f"workload.rate={rate:g}"]
            for rate in self.rates
            for name, own in self.systems.items()
        }
        for variant, changes in self.variants.items():
            for name, own in self.systems.items():
                made[_varied(name, variant)] = [*own, f"workload.rate={self.at:g}", *changes]
        return made

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            rate: {name: Served.of(runs[_arm(name, rate)]) for name in self.systems}
            for rate in self.rates
        }
        varied = {
            variant: {name: Served.of(runs[_varied(name, variant)]) for name in self.systems}
            for variant in self.variants
        }
        data = {
            name: {f"{rate:g}": asdict(found[rate][name]) for rate in self.rates}
            for name in self.systems
        }
        return Reading(
            finding=list(self._finding(found)),
            rows=list(self._rows(found, varied)),
            listings=[self._listing(found, varied)],
            data={"systems": data},
            drawings={
                "migration": Drawing(
                    "First tokens and preemptions over the rate",
                    "Left the P99 time to the first token, right preemptions a request.",
                    partial(draw, data),
                )
            },
        )

    def _rows(self, found: Found, varied: Mapping[str, Mapping[str, Served]]) -> Iterator[Row]:
        for other in self._others:
            gains = {rate: _gain(each, other, self._last) for rate, each in found.items()}
            best = max(gains, key=gains.__getitem__)
            parts = [f"{value:.3g} × at {rate:g}/s" for rate, value in gains.items()]
            parts += [
                f"{_gain(each, other, self._last):.3g} × at {self.at:g}/s with {variant}"
                for variant, each in varied.items()
            ]
            what = f"{other} / {self._last}: P99 to the first token, at most"
            yield Row(what, gains[best], self.most, "×", ", ".join(parts))
        for name in self.systems:
            one = found[self.at][name]
            yield Row(f"{name}, {self.at:g}/s: preemptions a request", one.preemptions)
            yield Row(f"{name}, {self.at:g}/s: tokens computed again a request", one.recomputed)

    def _listing(self, found: Found, varied: Mapping[str, Mapping[str, Served]]) -> Listing:
        every = {f"{rate:g}/s": each for rate, each in found.items()}
        every |= {f"{self.at:g}/s, {variant}": each for variant, each in varied.items()}
        rows = [
            [
                f"{where}: {name}",
                *(f"{value:.3g}" for value in (one.ttft_mean, one.ttft_p99, one.tpot_p99)),
                *(f"{value:.3g}" for value in (one.preemptions, one.recomputed)),
            ]
            for where, each in every.items()
            for name, one in each.items()
        ]
        head = ["", "mean TTFT", "P99 TTFT", "P99 TPOT", "preemptions", "computed again"]
        note = "Seconds; preemptions and tokens a request."
        return Listing("Every rate, and other assumptions", head, rows, note)

    def _finding(self, found: Found) -> Iterator[str]:
        each = found[self.at]
        tails = ", ".join(f"{one.ttft_p99:.3g} s with {name}" for name, one in each.items())
        yield f"At {self.at:g} requests/s the P99 time to the first token is {tails}."
        most = ", ".join(
            f"{max(_gain(one, other, self._last) for one in found.values()):.3g} times ({other})"
            for other in self._others
        )
        yield (
            f"Without {self._last} it is at most so much longer: {most}; published: up to "
            f"{self.most:g} times."
        )
        lost = ", ".join(
            f"{' and '.join(f'{one.preemptions:.3g}' for one in each.values())} at {rate:g}/s"
            for rate, each in found.items()
        )
        yield f"Preemptions a request with {', '.join(self.systems)}: {lost}."


def _gain(each: Mapping[str, Served], other: str, ours: str) -> float:
    return each[other].ttft_p99 / each[ours].ttft_p99


def _arm(name: str, rate: float) -> str:
    return f"{name}, {rate:g} per s"


def _varied(name: str, variant: str) -> str:
    return f"{name}, {variant}"
