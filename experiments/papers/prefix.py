"""Figure 16 of the PagedAttention paper: a beginning that all prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.papers.reproduction import Reproduction
from experiments.papers.sharing_case import (
    Case,
    Rates,
    draw_sustained,
    elsewhere,
    gain_of,
    listing_of,
    rates_of,
    savings_of,
)
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Reproduction):
    """How many more requests are sustained where their common beginning is kept once.

    Sustained rates are those of `sharing_case`; the gain is that of the first system over that of
    the second. Others show what part of it is due to what.
    """

    systems: Mapping[str, Sequence[str]]
    cases: Mapping[str, Mapping[str, Any]]
    """Settings of `Case`."""
    variants: Mapping[str, Mapping[str, Any]]
    """The same, of what else could have been assumed."""
    settled: float
    """Seconds after which runs count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("settled", self.settled, 0)
        if len(self.systems) < 2:
            raise ConfigError(f"systems: {len(self.systems)} of them: must be at least 2")

    @property
    def _every(self) -> dict[str, Case]:
        return {name: Case(**case) for name, case in {**self.cases, **self.variants}.items()}

    def arms(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, case in self._every.items():
            found |= case.arms(name, self.systems)
        return found

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        every = self._every
        rates = rates_of(every, runs, self.settled)
        saved = savings_of(every, runs, self.settled, next(iter(self.systems)))
        data = {"sustained": {name: rates[name] for name in self.cases}}
        return Reading(
            finding=self._finding(rates),
            rows=[
                Row(
                    f"gain, {name}",
                    gain_of(rates[name]),
                    every[name].gain,
                    "×",
                    f"with other assumptions {spread}"
                    if (spread := elsewhere(name, every, rates))
                    else "",
                )
                for name in self.cases
            ],
            listings=[listing_of(every, rates, saved)],
            data=data,
            drawings={
                "sustained": Drawing(
                    "Sustained rates",
                    "Requests served a second while others wait.",
                    partial(draw_sustained, data["sustained"]),
                )
            },
        )

    def _finding(self, rates: Rates) -> list[str]:
        first, second, *others = self.systems
        sentences = []
        for name in self.cases:
            told = self._every[name].gain
            parts = [
                f"{gain_of(rates[name]):.2f} times as many requests as {second}"
                + (f" (published: {told:g})" if told is not None else "")
            ]
            parts += [
                f"{rates[name][first] / rates[name][other]:.2f} times as many as {other}"
                for other in others
                if other in rates[name]
            ]
            spread = elsewhere(name, self._every, rates)
            more = f"; what is assumed moves the first of these from {spread}" if spread else ""
            sentences.append(f"With {name}, {first} sustains {', '.join(parts)}{more}.")
        return sentences
