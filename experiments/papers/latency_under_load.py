"""Figure 12 of the PagedAttention paper: latency against rate, and the sustained rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from experiments.papers.curves import Curve, gain, normalized_latency, sustained
from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import ByArm, Reproduction, arm, mean, pair, per_s
from experiments.papers.settings import In, Names, Number, check_settings
from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import signed
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Mapping[str, Curve]]
"""By load, then system."""
Bound = Annotated[float, Number(1e-3)]
_EARLY = "if an answer is returned when it ends itself"


@dataclass(frozen=True, kw_only=True)
class Load:
    """A workload at many rates."""

    overrides: Sequence[str]
    rates: Annotated[Mapping[str, Sequence[float]], In("systems")]
    """Requests/s at which each system is run."""
    more: Names = field(default_factory=dict)
    """Further overrides of some systems."""
    knees: Mapping[str, float] = field(default_factory=dict)
    """Sustained rates of the paper, where they can be read off."""
    ratios: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The best system's sustained rate over that of others: from, to."""


@dataclass(frozen=True, kw_only=True)
class LatencyUnderLoad(Reproduction):
    """Mean normalized latency of each system at each rate.

    The normalized latency of a request is its end-to-end latency over its output tokens. The
    sustained rate is the first at which the mean passes `bound`, on a line between two rates that
    were run, in the logarithm of the latency.
    """

    systems: Names
    best: Annotated[str, In("systems")]
    """The system that is compared with the others."""
    together: Annotated[Sequence[str], In("systems")]
    """Systems that return the answers of a batch when its last one ends."""
    loads: Mapping[str, Load]
    bound: Bound
    bounds: Sequence[Bound]
    """Alternatives to it."""
    variants: Mapping[str, Annotated[Mapping[str, Mapping[str, Any]], In("loads")]] | None
    """Alternatives where the paper leaves a choice open: other settings of some loads."""
    slower: Annotated[float, Number(1)]
    """How much longer steps may have taken on the paper's GPU."""
    warm_up: Annotated[float, Number(0)]
    """Seconds whose arrivals are not counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, load in self._every_load():
            check_settings(load, name, (self,))
            if self.best not in load.rates:
                raise ConfigError(f"rates of {name}: lack {self.best}, the best")

    def arms(self) -> dict[str, list[str]]:
        return {
            arm(name, system, per_s(rate)): [
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
        for name, load in self.loads.items():
            yield name, load
            for variant, loads in (self.variants or {}).items():
                if name in loads:
                    given = {**vars(load), **loads[name]}
                    refuse_settings(name, given, Load, f"variants.{variant}.{name}")
                    yield arm(name, variant), Load(**given)

    @property
    def _others(self) -> list[str]:
        return [system for system in self.systems if system != self.best]

    def read_arms(self, runs: ByArm) -> Analysis:
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
        caption = (
            "Means over requests. The line across is the bound that a sustained rate "
            f"keeps: {self.bound:g} s a token."
        )
        drawing = FigureSpec("Normalized latency against rate", caption, partial(draw, data))
        return Analysis(
            finding=[*self._finding(curves), *self._moved(curves)],
            rows=[*self._ratios(curves, singly), *self._knees(curves, singly)],
            listings=[self._listing(curves)],
            data=data,
            drawings={"load": drawing},
        )

    def _curves(self, runs: ByArm, together: Sequence[str]) -> Curves:
        """The latencies, where `together` return a batch when its last answer ends."""

        def curve(name: str, system: str, rates: Sequence[float]) -> Curve:
            latency = partial(normalized_latency, warm_up=self.warm_up, together=system in together)
            return {rate: mean(runs[arm(name, system, per_s(rate))], latency) for rate in rates}

        return {
            name: {system: curve(name, system, rates) for system, rates in load.rates.items()}
            for name, load in self._every_load()
        }

    def _ratio(self, curves: Mapping[str, Curve], other: str, bound: float | None = None) -> float:
        return gain(curves, self.best, other, bound or self.bound)

    def _ratios(self, curves: Curves, singly: Curves) -> Iterator[Row]:
        for name, load in self.loads.items():
            for system in curves[name]:
                if system == self.best:
                    continue
                what, ours = f"{name}: {self.best} / {system}", self._ratio(curves[name], system)
                row = Row(what, ours, pair(load.ratios.get(system)), "×")
                if row.published is not None and row.difference:
                    # What it would be if what the paper leaves open were decided otherwise.
                    others = [
                        (bound, self._ratio(curves[name], system, bound)) for bound in self.bounds
                    ]
                    why = [f"{_cell(one)} × at {bound:g} s a token" for bound, one in others]
                    if system in self.together:
                        why.append(f"{_cell(self._ratio(singly[name], system))} × {_EARLY}")
                    row = replace(row, why="; ".join(why))
                yield row

    def _knees(self, curves: Curves, singly: Curves) -> Iterator[Row]:
        for name, load in self.loads.items():
            for system, curve in curves[name].items():
                printed = load.knees.get(system)
                # Steps that all take f times as long stretch time, and with it rate and latency.
                slow = sustained(curve, self.bound / self.slower) / self.slower
                early = sustained(singly[name][system], self.bound)
                why = []
                if not math.isnan(slow):
                    why.append(f"{slow:.3g}/s if steps take {self.slower:g} times as long")
                if system in self.together and not math.isnan(early):
                    why.append(f"{early:.3g}/s {_EARLY}")
                text = "" if printed is None else "; ".join(why)
                yield Row(f"{name}: {system}", sustained(curve, self.bound), printed, "/s", text)

    def _listing(self, curves: Curves) -> Listing:
        """The ratios by the choice of the bound, and with other assumptions."""
        rows = []
        for name, systems in curves.items():
            bounds = [self.bound] if name not in self.loads else sorted({self.bound, *self.bounds})
            for bound in bounds:
                cells = [
                    _cell(self._ratio(systems, other, bound)) if other in systems else "–"
                    for other in self._others
                ]
                rate = sustained(systems[self.best], bound)
                most = "–" if math.isnan(rate) else f"{rate:.3g}/s"
                rows.append([f"{name}, {bound:g} s a token", most, *cells])
        head = ["", f"{self.best} sustains", *(f"× {other}" for other in self._others)]
        return Listing("The same by other bounds, and with other assumptions", head, rows)

    def _finding(self, curves: Curves) -> Iterator[str]:
        for name in self.loads:
            rates = {system: sustained(curve, self.bound) for system, curve in curves[name].items()}
            unknown = [system for system, rate in rates.items() if math.isnan(rate)]
            if self.best not in unknown:
                each = ", ".join(
                    f"{_cell(rates[self.best] / rates[other])} times that of {other}"
                    for other in self._others
                    if other in rates and other not in unknown
                )
                yield (
                    f"On {name} {self.best} sustains {rates[self.best]:.3g} requests/s at "
                    f"{self.bound:g} s a token{each and ': '}{each}."
                )
            if unknown:
                yield (
                    f"On {name} the rates that were tried do not tell what {', '.join(unknown)} "
                    f"sustain{'s' * (len(unknown) == 1)} at {self.bound:g} s a token."
                )

    def _moved(self, curves: Curves) -> Iterator[str]:
        """How far the ratios move with the bound and with what is assumed."""
        kinds = {
            "requests join step by step": [s for s in self._others if s not in self.together],
            "a batch is answered as a whole": list(self.together),
        }
        moved = [
            f"by {signed(min(moves))} to {signed(max(moves))} where {what}"
            for what, systems in kinds.items()
            if (moves := list(self._moves(curves, systems)))
        ]
        if moved:
            how = " or ".join(["other bounds", *(self.variants or ())])
            yield f"With {how} these ratios differ {', and '.join(moved)}."

    def _moves(self, curves: Curves, systems: Sequence[str]) -> Iterator[float]:
        for system in systems:
            for name in self.loads:
                if system not in curves[name]:
                    continue
                others = [self._ratio(curves[name], system, bound) for bound in self.bounds]
                for variant in self.variants or ():
                    varied = curves.get(arm(name, variant), {})
                    if system in varied:
                        others.append(self._ratio(varied, system))
                base = self._ratio(curves[name], system)
                yield from (
                    change for other in others if not math.isnan(change := other / base - 1)
                )


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each workload, a line for each system."""
    panels = [
        Panel(
            lines={s: (curve["rate"], curve["normalized_latency"]) for s, curve in systems.items()},
            bounds=[data["bound"]],
            top=4 * data["bound"],
            title=name,
            x="requests/s",
            y="normalized latency (s a token)" if number == 0 else None,
        )
        for number, (name, systems) in enumerate(data["loads"].items())
    ]
    return draw_panels([panels], 3.6, wspace=0.16)
