"""Figures 14 and 15 of the PagedAttention paper: several answers to a prompt, and shared blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.papers import load_curve
from experiments.papers.curves import keyed
from experiments.papers.reproduction import Reproduction
from experiments.papers.sharing_case import (
    Case,
    arm_of,
    draw_sustained,
    elsewhere,
    gain_of,
    label_bars,
    listing_of,
    rates_of,
    saving,
    savings_of,
)
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.report.style import DECODE, MUTED, QUEUED, key, looks, margins, new_figure, tidy
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--")


@dataclass(frozen=True, kw_only=True)
class Sharing(Reproduction):
    """What sharing saves of memory, and what that gains against a system that shares nothing.

    A sustained rate is that at which requests are served while others wait, in a run to which all
    come at once: what a long trace must stay below. The gain is that of the first system over that
    of the second. What sharing saves is told as the authors' own script does: of all blocks that
    sequences name, the share that need not be there, a mean over steps.
    """

    systems: Mapping[str, Sequence[str]]
    """Two of them."""
    cases: Mapping[str, Mapping[str, Any]]
    """Settings of `Case`."""
    variants: Mapping[str, Mapping[str, Any]]
    """The same, of what else could have been assumed."""
    settled: float
    """Seconds after which runs count."""
    turnover: float
    turnovers: Sequence[float]
    """How often a simulated beam is replaced, and other values of it."""
    beams: Sequence[str]
    """The cases that these are tried on."""
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    """Of some cases, each system's rates at which its latency is drawn."""
    traced: Sequence[str]
    """Overrides of those runs."""
    bounds: Sequence[float]
    """Seconds a token at which a gain is read off them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("settled", self.settled, 0)
        if len(self.systems) != 2:
            raise ConfigError(f"systems: {len(self.systems)} of them: must be 2")
        varied = [case.of for case in self._every.values() if case.of]
        for case in (*self.beams, *self.curves, *varied):
            if case not in self.cases:
                raise ConfigError(f"{case}: must be one of {', '.join(self.cases)}")

    @property
    def _every(self) -> dict[str, Case]:
        return {name: Case(**case) for name, case in {**self.cases, **self.variants}.items()}

    @property
    def _named(self) -> dict[str, Case]:
        return {name: Case(**case) for name, case in self.cases.items()}

    def arms(self) -> dict[str, list[str]]:
        first = next(iter(self.systems))
        found: dict[str, list[str]] = {}
        for name, case in self._every.items():
            found |= case.arms(name, self.systems)
        for name in self.beams:
            for turnover in self.turnovers:
                law = f"backend.beam_turnover={turnover:g}"
                found[_law(name, turnover)] = [*found[arm_of(name, first)], law]
        for name, systems in self.curves.items():
            case = self._named[name]
            for system, rates in systems.items():
                served = [*self.systems[system], *case.overrides, *case.more.get(system, ())]
                for rate in rates:
                    arm = [*served, *self.traced, f"workload.rate={rate:g}"]
                    found[_at(name, system, rate)] = arm
        return found

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        first = next(iter(self.systems))
        every = self._every
        rates = rates_of(every, runs, self.settled)
        saved = savings_of(every, runs, self.settled, first)
        laws = {
            name: {
                **{t: saving(runs[_law(name, t)], self.settled) for t in self.turnovers},
                self.turnover: saved[name],
            }
            for name in self.beams
        }
        data = self._data(runs, rates, saved)
        return Reading(
            finding=self._finding(rates, saved, laws, data),
            rows=[
                *self._savings(saved, laws),
                *self._gains(rates),
                *self._read_off(data["curves"]),
            ],
            listings=[self._laws(laws), listing_of(every, rates, saved)],
            notes=[
                "the default of backend.beam_turnover is a choice, made so that Alpaca's beams "
                "save about what was published: what they save is no prediction"
            ],
            data=data,
            drawings=self._drawings(data),
        )

    def _data(
        self,
        runs: Mapping[str, Sequence[Run]],
        rates: Mapping[str, Mapping[str, float]],
        saved: Mapping[str, float],
    ) -> dict[str, Any]:
        curves = {
            name: {
                system: {
                    "rate": list(tried),
                    "normalized_latency": [
                        float(
                            np.mean([load_curve.normalized_latency(r, 0.0, False) for r in found])
                        )
                        for found in (runs[_at(name, system, rate)] for rate in tried)
                    ],
                }
                for system, tried in systems.items()
            }
            for name, systems in self.curves.items()
        }
        told = {name: case.saved for name, case in self._named.items() if case.saved is not None}
        both = [name for name in self.cases if len(rates[name]) == len(self.systems)]
        return {
            "curves": curves,
            "sustained": {name: rates[name] for name in both},
            "saved": {"published": told, "ours": {name: saved[name] for name in told}},
        }

    # -- in numbers ------------------------------------------------------------------------------

    def _savings(
        self, saved: Mapping[str, float], laws: Mapping[str, Mapping[float, float]]
    ) -> list[Row]:
        rows = []
        for name, case in self._named.items():
            why = case.why
            if name in laws:
                met = _text(self._met(name, laws[name]))
                why = f"as published at a beam_turnover of {met}; here it is {self.turnover:g}"
            if case.saved is not None:
                rows.append(Row(f"memory saved, {name}", saved[name], case.saved, "%", why))
        return rows

    def _gains(self, rates: Mapping[str, Mapping[str, float]]) -> list[Row]:
        return [
            Row(
                f"gain, {name}",
                gain_of(rates[name]),
                case.gain,
                "×",
                _or_so(elsewhere(name, self._every, rates)),
            )
            for name, case in self._named.items()
            if len(case.requests) == len(self.systems)
        ]

    def _laws(self, laws: Mapping[str, Mapping[float, float]]) -> Listing:
        turnovers = sorted({turnover for law in laws.values() for turnover in law})
        head = ["", *(f"{turnover:g}" for turnover in turnovers), "as published at"]
        rows = [
            [
                name,
                *(f"{law[turnover]:.1f} %" for turnover in turnovers),
                _text(self._met(name, law)),
            ]
            for name, law in laws.items()
        ]
        return Listing("Memory saved, by how often a beam is replaced", head, rows)

    def _read_off(self, curves: Mapping[str, Any]) -> list[Row]:
        """The gain by another definition: the rates at which the latency passes a bound."""
        rows = []
        for name, systems in curves.items():
            for bound in self.bounds:
                first, second = (
                    load_curve.sustained(
                        dict(zip(curve["rate"], curve["normalized_latency"], strict=True)), bound
                    )
                    for curve in systems.values()
                )
                what = f"gain, {name}, by latency ({bound:g} s a token)"
                rows.append(Row(what, first / second, self._named[name].gain, "×"))
        return rows

    def _met(self, name: str, law: Mapping[float, float]) -> float:
        published = self._named[name].saved
        return math.nan if published is None else met_at(law, published)

    # -- in words --------------------------------------------------------------------------------

    def _finding(
        self,
        rates: Mapping[str, Mapping[str, float]],
        saved: Mapping[str, float],
        laws: Mapping[str, Mapping[float, float]],
        data: Mapping[str, Any],
    ) -> list[str]:
        told = {name: case.saved for name, case in self._named.items() if case.saved is not None}
        each = ", ".join(f"{saved[name]:.1f} % ({name})" for name in told)
        met = [_text(self._met(name, law)) for name, law in laws.items()]
        both = [name for name in self.cases if len(rates[name]) == len(self.systems)]
        low, high = both[0], both[-1]
        sentences = [f"Sharing saves so much of the blocks that sequences name: {each}."]
        if met:
            sentences.append(
                f"Which beam goes on is a law of one parameter, {self.turnover:g} here; what was "
                f"published asks for {', '.join(met)} ({', '.join(laws)})."
            )
        spread = elsewhere(high, self._every, rates)
        return [
            *sentences,
            f"The gain over {list(self.systems)[1]} goes from {self._gain(rates, low)} to "
            f"{self._gain(rates, high)}"
            + (f"; what is assumed moves the last from {spread}." if spread else "."),
            *(
                f"{row.what[0].upper()}{row.what[1:]}, is {row.ours:.2f}."
                for row in self._read_off(data["curves"])[-1:]
            ),
        ]

    def _gain(self, rates: Mapping[str, Mapping[str, float]], name: str) -> str:
        told = self._named[name].gain
        published = f", published: {told:g}" if told is not None else ""
        return f"{gain_of(rates[name]):.2f} ({name}{published})"

    # -- in pictures -----------------------------------------------------------------------------

    def _drawings(self, data: Mapping[str, Any]) -> dict[str, Drawing]:
        first, second = self.systems
        return {
            "sustained": Drawing(
                "Sustained rates",
                "Requests served a second while others wait.",
                partial(draw_sustained, data["sustained"]),
            ),
            "load": Drawing(
                "Normalized latency against rate",
                f"Solid: {first}; dashed: {second}. Poisson arrivals.",
                partial(draw_load, data["curves"]),
            ),
            "saved": Drawing(
                "Memory saved by sharing",
                "Of the blocks that sequences name, those that need not be there.",
                partial(draw_saved, data["saved"]),
            ),
        }


def _law(name: str, turnover: float) -> str:
    return f"{name}, turnover {turnover:g}"


def _at(name: str, system: str, rate: float) -> str:
    return f"{name}, {system}, {rate:g} per s"


def _text(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _or_so(spread: str) -> str:
    return spread and f"with other assumptions {spread}"


def met_at(law: Mapping[float, float], wanted: float) -> float:
    """The turnover that saves so much, on a line between two logarithms; NaN where none does.

    >>> round(met_at({0.01: 20.0, 0.1: 40.0, 1.0: 50.0}, 30.0), 4)
    0.0316
    """
    turnovers = sorted(turnover for turnover in law if turnover > 0)
    for low, high in pairwise(turnovers):
        if law[low] <= wanted <= law[high]:
            part = (wanted - law[low]) / ((law[high] - law[low]) or 1)
            return float(low * (high / low) ** part)
    return math.nan


def draw_load(curves: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Figure:
    """Latency against rate: a colour a case, dashes a system."""
    from matplotlib.lines import Line2D

    figure = new_figure(3.6)
    axes = figure.subplots()
    look = looks(list(curves))
    for name, systems in curves.items():
        for curve, dashes in zip(systems.values(), DASHES, strict=False):
            axes.plot(
                curve["rate"],
                curve["normalized_latency"],
                color=look[name].colour,
                ls=dashes,
                marker="o",
                ms=3,
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    tidy(axes, x="requests/s", y="normalized latency (s a token)")
    margins(figure)
    entries: dict[str, Any] = {
        name: Line2D([], [], color=one.colour, lw=2, label=name) for name, one in look.items()
    }
    for system, dashes in zip(next(iter(curves.values())), DASHES, strict=False):
        entries[system] = Line2D([], [], color=MUTED, ls=dashes, lw=2, label=system)
    key(figure, entries)
    return figure


def draw_saved(saved: Mapping[str, Mapping[str, float]]) -> Figure:
    """Two bars for each: what was published, and ours."""
    figure = new_figure(3.2)
    axes = figure.subplots()
    colours = {"published": QUEUED, "ours": DECODE}
    names = list(saved["ours"])
    for side, (whose, colour) in zip((-0.2, 0.2), colours.items(), strict=True):
        places = np.arange(len(names)) + side
        each = [saved[whose][name] for name in names]
        axes.bar(places, each, 0.38, color=colour)
        label_bars(axes, places, each, "{:.1f}")
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names])
    axes.grid(axis="x", visible=False)
    tidy(axes, y="memory saved (%)")
    return keyed(figure, {"the paper": QUEUED, "ours": DECODE})
