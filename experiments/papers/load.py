"""Figure 12 of the PagedAttention paper: latency against rate, and the rate that is sustained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.papers.curves import joined, keyed
from experiments.papers.load_curve import Curve, normalized_latency, ratio, sustained
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import signed
from pagedsim.report.pictures import Drawing
from pagedsim.report.style import MUTED, looks, new_figure, tidy
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Load:
    """A workload at many rates."""

    overrides: Sequence[str]
    rates: Mapping[str, Sequence[float]]
    """Requests/s at which each system is tried."""
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further overrides of some systems."""
    knees: Mapping[str, float] = field(default_factory=dict)
    """Sustained rates of the paper, where they can be read."""
    ratios: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of the best system's sustained rate to that of others: from, to."""


_SETTINGS = [one.name for one in fields(Load)]


@dataclass(frozen=True, kw_only=True)
class LatencyUnderLoad(Reproduction):
    """Mean normalized latency of each system at each rate.

    The normalized latency of a request is its end-to-end latency over its output tokens. The
    sustained rate is the first at which the mean passes `bound`, on a line between two rates that
    were tried, in the logarithm of the latency.
    """

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    best: str
    """The one that the others are held against."""
    together: Sequence[str]
    """Systems that return the answers of a batch when its last one ends."""
    loads: Mapping[str, Mapping[str, Any]]
    """Settings of `Load`."""
    bound: float
    bounds: Sequence[float]
    """Others that could have been chosen."""
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] | None
    """What the paper leaves open, decided otherwise: other settings of some loads."""
    slower: float
    """How much longer steps may have taken on the paper's GPU."""
    warm_up: float
    """Seconds whose arrivals do not count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("warm_up", self.warm_up, 0)
        require_number("slower", self.slower, 1)
        for bound in (self.bound, *self.bounds):
            require_number("bound", bound, 1e-3)
        if self.best not in self.systems:
            raise ConfigError(f"best={self.best}: must be one of {', '.join(self.systems)}")
        for system in self.together:
            if system not in self.systems:
                raise unknown("system of together", system, self.systems)
        varied = [one for loads in (self.variants or {}).values() for one in loads.items()]
        for name, _ in varied:
            if name not in self.loads:
                raise unknown("load of variants", name, self.loads)
        for name, settings in [*self.loads.items(), *varied]:
            for setting in settings:
                if setting not in _SETTINGS:
                    raise unknown(f"setting of {name}", setting, _SETTINGS)
            for system in settings.get("rates", ()):
                if system not in self.systems:
                    raise unknown(f"system of {name}", system, self.systems)
            if self.best not in settings.get("rates", ()):
                raise ConfigError(f"rates of {name}: lack {self.best}, the best")

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(name, system, rate): [
                *load.overrides,
                *self.systems[system],
                *load.more.get(system, ()),
                f"workload.rate={rate:g}",
            ]
            for name, load in self._every_load()
            for system, rates in load.rates.items()
            for rate in rates
        }

    def _every_load(self) -> Iterator[tuple[str, Load]]:
        for name, settings in self.loads.items():
            yield name, Load(**settings)
            for variant, loads in (self.variants or {}).items():
                if name in loads:
                    yield _varied(name, variant), Load(**{**settings, **loads[name]})

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        curves, singly = self._curves(runs, self.together), self._curves(runs, ())
        data = {
            "bound": self.bound,
            "loads": {
                name: {
                    system: {"rate": list(curve), "normalized_latency": list(curve.values())}
                    for system, curve in curves[name].items()
                }
                for name in self.loads
            },
        }
        return Reading(
            finding=self._finding(curves),
            rows=[*self._ratios(curves, singly), *self._knees(curves, singly)],
            listings=[self._listing(curves)],
            data=data,
            drawings={
                "load": Drawing(
                    "Normalized latency against rate",
                    "Means over requests. The line across is the bound that a sustained rate "
                    f"keeps: {self.bound:g} s a token.",
                    partial(draw_load, data),
                )
            },
        )

    def _curves(
        self, runs: Mapping[str, Sequence[Run]], together: Sequence[str]
    ) -> dict[str, dict[str, dict[float, float]]]:
        """Of each load and system, where `together` answer a batch when its last one ends."""

        def latency(name: str, system: str, rate: float) -> float:
            batches = system in together
            these = runs[_arm(name, system, rate)]
            return float(np.mean([normalized_latency(run, self.warm_up, batches) for run in these]))

        return {
            name: {
                system: {rate: latency(name, system, rate) for rate in rates}
                for system, rates in load.rates.items()
            }
            for name, load in self._every_load()
        }

    def _ratios(
        self, curves: Mapping[str, Mapping[str, Curve]], singly: Mapping[str, Mapping[str, Curve]]
    ) -> list[Row]:
        rows = []
        for name, systems in curves.items():
            if name not in self.loads:
                continue
            printed = self.loads[name].get("ratios", {})
            for system in systems:
                if system == self.best:
                    continue
                row = Row(
                    f"{name}: {self.best} / {system}",
                    ratio(systems, self.best, system, self.bound),
                    _range(printed.get(system)),
                    "×",
                )
                if row.published is not None and row.difference:
                    row = replace(row, why=self._other_ratios(systems, singly[name], system))
                rows.append(row)
        return rows

    def _other_ratios(
        self, curves: Mapping[str, Curve], singly: Mapping[str, Curve], system: str
    ) -> str:
        """What a ratio would be if what the paper leaves open were decided otherwise."""
        others = [
            f"{_cell(ratio(curves, self.best, system, bound))} × at {bound:g} s a token"
            for bound in self.bounds
        ]
        if system in self.together:
            early = ratio(singly, self.best, system, self.bound)
            others.append(f"{_cell(early)} × if an answer is returned when it ends itself")
        return "; ".join(others)

    def _knees(
        self, curves: Mapping[str, Mapping[str, Curve]], singly: Mapping[str, Mapping[str, Curve]]
    ) -> list[Row]:
        rows = []
        for name in self.loads:
            for system, curve in curves[name].items():
                printed = self.loads[name].get("knees", {}).get(system)
                # Steps that all take f times as long stretch time, and with it rate and latency.
                slow = sustained(curve, self.bound / self.slower) / self.slower
                why = [f"{slow:.3g}/s if steps take {self.slower:g} times as long"]
                if math.isnan(slow):
                    why = []
                if system in self.together:
                    early = sustained(singly[name][system], self.bound)
                    if not math.isnan(early):
                        why.append(f"{early:.3g}/s if an answer is returned when it ends itself")
                rows.append(
                    Row(
                        f"{name}: {system}",
                        sustained(curve, self.bound),
                        printed,
                        "/s",
                        "" if printed is None else "; ".join(why),
                    )
                )
        return rows

    def _listing(self, curves: Mapping[str, Mapping[str, Curve]]) -> Listing:
        """What the choice of the bound, and what is assumed, do to the ratios."""
        others = [system for system in self.systems if system != self.best]
        rows = []
        for name, systems in curves.items():
            bounds = [self.bound] if name not in self.loads else sorted({self.bound, *self.bounds})
            for bound in bounds:
                cells = [
                    _cell(ratio(systems, self.best, other, bound)) if other in systems else "–"
                    for other in others
                ]
                rate = sustained(systems[self.best], bound)
                most = "–" if math.isnan(rate) else f"{rate:.3g}/s"
                rows.append([f"{name}, {bound:g} s a token", most, *cells])
        head = ["", f"{self.best} sustains", *(f"× {other}" for other in others)]
        return Listing("The same by other bounds, and with other assumptions", head, rows)

    def _finding(self, curves: Mapping[str, Mapping[str, Curve]]) -> list[str]:
        others = [system for system in self.systems if system != self.best]
        sentences = []
        for name in self.loads:
            rates = {system: sustained(curve, self.bound) for system, curve in curves[name].items()}
            untold = [system for system, rate in rates.items() if math.isnan(rate)]
            if self.best not in untold:
                each = ", ".join(
                    f"{_cell(rates[self.best] / rates[other])} times that of {other}"
                    for other in others
                    if other in rates and other not in untold
                )
                sentences.append(
                    f"On {name} {self.best} sustains {rates[self.best]:.3g} requests/s at "
                    f"{self.bound:g} s a token{each and ': '}{each}."
                )
            if untold:
                sentences.append(
                    f"On {name} the rates that were tried do not tell what {', '.join(untold)} "
                    f"sustain{'s' * (len(untold) == 1)} at {self.bound:g} s a token."
                )
        moved = [
            f"by {signed(least)} to {signed(most)} where {what}"
            for what, systems in (
                ("requests join step by step", [s for s in others if s not in self.together]),
                ("a batch is answered as a whole", [s for s in others if s in self.together]),
            )
            for least, most in [self._moves(curves, systems)]
            if not math.isnan(least)
        ]
        how = f"With {' or '.join(['other bounds', *(self.variants or ())])} these ratios differ"
        return [*sentences, *([f"{how} {', and '.join(moved)}."] if moved else [])]

    def _moves(
        self, curves: Mapping[str, Mapping[str, Curve]], systems: Sequence[str]
    ) -> tuple[float, float]:
        """How far the ratios to some systems move with the bound and with what is assumed; NaN
        where nothing tells.
        """
        moves = []
        for system in systems:
            for name in self.loads:
                base = ratio(curves[name], self.best, system, self.bound)
                others = [ratio(curves[name], self.best, system, bound) for bound in self.bounds]
                for variant in self.variants or ():
                    varied = curves.get(_varied(name, variant), {})
                    if system in varied:
                        others.append(ratio(varied, self.best, system, self.bound))
                changes = [other / base - 1 for other in others]
                moves += [change for change in changes if not math.isnan(change)]
        return min(moves, default=math.nan), max(moves, default=math.nan)


def _arm(load: str, system: str, rate: float) -> str:
    return f"{load}, {system}, {rate:g} per s"


def _varied(load: str, variant: str) -> str:
    return f"{load}, {variant}"


def _range(pair: Sequence[float] | None) -> tuple[float, float] | None:
    return None if pair is None else (pair[0], pair[1])


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def draw_load(data: Mapping[str, Any]) -> Figure:
    """A panel for each workload, a line for each system."""
    figure = new_figure(3.6)
    panels = figure.subplots(1, len(data["loads"]), squeeze=False)[0]
    for axes, (name, systems) in zip(panels, data["loads"].items(), strict=True):
        look = looks(list(systems))
        for system, curve in systems.items():
            joined(axes, curve["rate"], curve["normalized_latency"], look[system])
        axes.axhline(data["bound"], color=MUTED, lw=0.9)
        axes.set_ylim(0, 4 * data["bound"])
        axes.set_xlim(left=0)
        axes.set_title(name)
        tidy(axes, x="requests/s")
    tidy(panels[0], y="normalized latency (s a token)")
    return keyed(figure, look, wspace=0.16)
