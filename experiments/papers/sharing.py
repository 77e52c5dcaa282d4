"""Figures 14 to 16 of the PagedAttention paper: several outputs per prompt, and shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from experiments.papers.curves import normalized_latency, passes, sustained
from experiments.papers.panels import bar_figure, keyed
from experiments.papers.reproduction import ByArm, Floats, Reproduction, arm, arrays, mean, per_s
from experiments.papers.settings import Count, In, Names, Number
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import DECODE, MUTED, QUEUED, looks, new_figure, tidy
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--")
Rates = Mapping[str, Mapping[str, float]]
"""By case, then system."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of one kind, all of which arrive at once."""

    requests: Annotated[Mapping[str, int], In("systems")]
    """For each system that serves them, how many."""
    overrides: Sequence[str] = ()
    more: Annotated[Names, In("requests")] = field(default_factory=dict)
    """Further overrides of some systems."""
    gain: float | None = None
    """Published: the first system's sustained rate over the second's."""
    saved: float | None = None
    """Published: the blocks that sharing saves in the first system, in per cent."""
    why: str = ""
    """Why that differs."""
    of: Annotated[str | None, In("cases")] = None
    """The case of which it is a variant: other systems are as they are there."""


@dataclass(frozen=True, kw_only=True)
class Shared(Reproduction):
    """Cases of requests that share blocks, each under several systems.

    A sustained rate is that at which requests are served while others wait, in a run to which all
    come at once: what a long trace must stay below. The gain is that of the first system over that
    of the second.
    """

    systems: Names
    cases: Mapping[str, Case]
    variants: Mapping[str, Case]
    """Other assumptions."""
    settled: Annotated[float, Number(0)]
    """Seconds after which runs count."""

    @property
    def _every(self) -> dict[str, Case]:
        return {**self.cases, **self.variants}

    @property
    def _first(self) -> str:
        return next(iter(self.systems))

    def arms(self) -> dict[str, list[str]]:
        return {
            arm(name, system): [
                *self.systems[system],
                *case.overrides,
                *case.more.get(system, ()),
                "workload.arrivals=burst",
                f"workload.requests={count}",
            ]
            for name, case in self._every.items()
            for system, count in case.requests.items()
        }

    def _rates(self, runs: ByArm) -> Rates:
        """The sustained rates; a variant has those of its case where it is not run itself."""
        rates: dict[str, dict[str, float]] = {}
        for name, case in self._every.items():
            rates[name] = dict(rates[case.of]) if case.of else {}
            for system in case.requests:
                rates[name][system] = served_rate(runs[arm(name, system)], self.settled)
        return rates

    def _saved(self, runs: ByArm) -> dict[str, float]:
        """What sharing saves in the first system, in per cent."""
        return {
            name: saving(runs[arm(name, self._first)], self.settled)
            for name, case in self._every.items()
            if self._first in case.requests
        }

    def _gains(self, rates: Rates, names: Sequence[str]) -> list[Row]:
        rows = []
        for name in names:
            spread = self._spread(name, rates)
            why = f"with other assumptions {spread}" if spread else ""
            rows.append(Row(f"gain, {name}", gain_of(rates[name]), self.cases[name].gain, "×", why))
        return rows

    def _spread(self, name: str, rates: Rates) -> str:
        """The range of a case's gain over its variants; empty if it has none."""
        found = {one: gain_of(rates[one]) for one, case in self.variants.items() if case.of == name}
        if not found:
            return ""
        low, high = (pick(found, key=lambda one: found[one]) for pick in (min, max))
        short = {one: one.removeprefix(f"{name}, ") for one in found}
        return f"{found[low]:.2f} ({short[low]}) to {found[high]:.2f} ({short[high]})"

    def _listing(self, rates: Rates, saved: Mapping[str, float]) -> Listing:
        """All cases and variants; in brackets what a variant takes over from its case."""
        systems = list(dict.fromkeys(system for each in rates.values() for system in each))
        rows = []
        for name, case in self._every.items():
            cells = [name]
            for system in systems:
                rate = rates[name].get(system)
                text = "–" if rate is None else f"{rate:.3g}/s"
                cells.append(text if rate is None or system in case.requests else f"({text})")
            gain = gain_of(rates[name])
            cells.append("–" if math.isnan(gain) else f"{gain:.2f}")
            cells.append(f"{saved[name]:.1f} %" if name in saved else "–")
            rows.append(cells)
        title = "Rates that are sustained, and what else could have been assumed"
        return Listing(title, ["", *systems, "gain", "memory saved"], rows)


def gain_of(rates: Mapping[str, float]) -> float:
    """The first system's rate over the second's; NaN if only one was run."""
    values = list(rates.values())
    return values[0] / values[1] if len(values) > 1 else math.nan


def _sustained_drawing(rates: Rates) -> FigureSpec:
    caption = "Requests served a second while others wait."
    return FigureSpec("Sustained rates", caption, partial(bar_figure, rates, "requests/s"))


# -- Figure 16 -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Shared):
    """How many more requests are sustained where a prefix that all share is kept once.

    Further systems show the contribution of each part.
    """

    systems: Annotated[Names, Count(2)]

    def read_arms(self, runs: ByArm) -> Analysis:
        rates = self._rates(runs)
        data = {"sustained": {name: rates[name] for name in self.cases}}
        return Analysis(
            finding=list(self._finding(rates)),
            rows=self._gains(rates, list(self.cases)),
            listings=[self._listing(rates, self._saved(runs))],
            data=data,
            drawings={"sustained": _sustained_drawing(data["sustained"])},
        )

    def _finding(self, rates: Rates) -> Iterator[str]:
        first, second, *others = self.systems
        for name, case in self.cases.items():
            told = f" (published: {case.gain:g})" if case.gain is not None else ""
            parts = [f"{gain_of(rates[name]):.2f} times as many requests as {second}{told}"]
            parts += [
                f"{rates[name][first] / rates[name][other]:.2f} times as many as {other}"
                for other in others
                if other in rates[name]
            ]
            spread = self._spread(name, rates)
            more = f"; what is assumed moves the first of these from {spread}" if spread else ""
            yield f"With {name}, {first} sustains {', '.join(parts)}{more}."


# -- Figures 14 and 15 -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sharing(Shared):
    """What sharing saves of memory, and what that gains over a system that shares nothing.

    The saving is computed as in the authors' script: of all blocks that sequences name, the share
    that need not be stored, a mean over steps.
    """

    systems: Annotated[Names, Count(2, 2)]
    turnover: float
    turnovers: Sequence[float]
    """How often a simulated beam is replaced, and alternatives to it."""
    beams: Annotated[Sequence[str], In("cases")]
    """The cases in which these are run."""
    curves: Annotated[Mapping[str, Mapping[str, Sequence[float]]], In("cases")]
    """Of some cases, each system's rates at which its latency is drawn."""
    traced: Sequence[str]
    """Overrides of those runs."""
    bounds: Sequence[float]
    """Seconds a token at which a gain is read off them."""

    def arms(self) -> dict[str, list[str]]:
        found = super().arms()
        for name in self.beams:
            for turnover in self.turnovers:
                law = f"backend.beam_turnover={turnover:g}"
                found[_law(name, turnover)] = [*found[arm(name, self._first)], law]
        for name, systems in self.curves.items():
            case = self.cases[name]
            for system, rates in systems.items():
                own = [*self.systems[system], *case.overrides, *case.more.get(system, ())]
                for rate in rates:
                    made = [*own, *self.traced, f"workload.rate={rate:g}"]
                    found[arm(name, system, per_s(rate))] = made
        return found

    def read_arms(self, runs: ByArm) -> Analysis:
        rates, saved = self._rates(runs), self._saved(runs)
        laws = {
            name: {
                **{t: saving(runs[_law(name, t)], self.settled) for t in self.turnovers},
                self.turnover: saved[name],
            }
            for name in self.beams
        }
        told = {name: case.saved for name, case in self.cases.items() if case.saved is not None}
        both = [name for name in self.cases if len(rates[name]) == len(self.systems)]
        data: dict[str, Any] = {
            "curves": self._curves(runs),
            "sustained": {name: rates[name] for name in both},
            "saved": {"published": told, "ours": {name: saved[name] for name in told}},
        }
        read_off = list(self._read_off(data["curves"]))
        gains = [name for name, case in self.cases.items() if len(case.requests) == 2]
        return Analysis(
            finding=list(self._finding(rates, data, laws, read_off)),
            rows=[*self._savings(saved, laws), *self._gains(rates, gains), *read_off],
            listings=[self._laws(laws), self._listing(rates, saved)],
            notes=[
                "the default of backend.beam_turnover is a choice, made so that Alpaca's beams "
                "save about what was published: what they save is no prediction"
            ],
            data=data,
            drawings=self._drawings(data),
        )

    def _curves(self, runs: ByArm) -> dict[str, Any]:
        def curve(name: str, system: str, tried: Sequence[float]) -> dict[str, list[float]]:
            arms = [runs[arm(name, system, per_s(rate))] for rate in tried]
            return {
                "rate": list(tried),
                "normalized_latency": [mean(own, normalized_latency) for own in arms],
            }

        return {
            name: {system: curve(name, system, tried) for system, tried in systems.items()}
            for name, systems in self.curves.items()
        }

    def _savings(
        self, saved: Mapping[str, float], laws: Mapping[str, Mapping[float, float]]
    ) -> Iterator[Row]:
        for name, case in self.cases.items():
            why = case.why
            if name in laws:
                met = self._met(name, laws[name])
                why = f"as published at a beam_turnover of {met}; here it is {self.turnover:g}"
            if case.saved is not None:
                yield Row(f"memory saved, {name}", saved[name], case.saved, "%", why)

    def _laws(self, laws: Mapping[str, Mapping[float, float]]) -> Listing:
        turnovers = sorted({turnover for law in laws.values() for turnover in law})
        head = ["", *(f"{turnover:g}" for turnover in turnovers), "as published at"]
        rows = [
            [name, *(f"{law[turnover]:.1f} %" for turnover in turnovers), self._met(name, law)]
            for name, law in laws.items()
        ]
        return Listing("Memory saved, by how often a beam is replaced", head, rows)

    def _read_off(self, curves: Mapping[str, Any]) -> Iterator[Row]:
        """The gain by another definition: the rates at which the latency passes a bound."""
        for name, systems in curves.items():
            first, second = (
                dict(zip(curve["rate"], curve["normalized_latency"], strict=True))
                for curve in systems.values()
            )
            for bound in self.bounds:
                ours = sustained(first, bound) / sustained(second, bound)
                what = f"gain, {name}, by latency ({bound:g} s a token)"
                yield Row(what, ours, self.cases[name].gain, "×")

    def _met(self, name: str, law: Mapping[float, float]) -> str:
        """The turnover that saves as much as was published."""
        published = self.cases[name].saved
        met = math.nan if published is None else met_at(law, published)
        return "–" if math.isnan(met) else f"{met:.3g}"

    def _finding(
        self,
        rates: Rates,
        data: Mapping[str, Any],
        laws: Mapping[str, Mapping[float, float]],
        read_off: Sequence[Row],
    ) -> Iterator[str]:
        each = ", ".join(f"{share:.1f} % ({name})" for name, share in data["saved"]["ours"].items())
        yield f"Sharing saves so much of the blocks that sequences name: {each}."
        if laws:
            yield (
                f"Which beam goes on is a law of one parameter, {self.turnover:g} here; what was "
                f"published asks for {', '.join(self._met(*one) for one in laws.items())} "
                f"({', '.join(laws)})."
            )
        low, *_, high = data["sustained"]
        spread = self._spread(high, rates)
        yield (
            f"The gain over {list(self.systems)[1]} goes from {self._gain(rates, low)} to "
            f"{self._gain(rates, high)}"
            + (f"; what is assumed moves the last from {spread}." if spread else ".")
        )
        for row in read_off[-1:]:
            yield f"{row.what[0].upper()}{row.what[1:]}, is {row.ours:.2f}."

    def _gain(self, rates: Rates, name: str) -> str:
        told = self.cases[name].gain
        published = f", published: {told:g}" if told is not None else ""
        return f"{gain_of(rates[name]):.2f} ({name}{published})"

    def _drawings(self, data: Mapping[str, Any]) -> dict[str, FigureSpec]:
        first, second = self.systems
        saved = {
            name.replace(", ", "\n"): {"the paper": told, "ours": data["saved"]["ours"][name]}
            for name, told in data["saved"]["published"].items()
        }
        colours = {"the paper": QUEUED, "ours": DECODE}
        return {
            "sustained": _sustained_drawing(data["sustained"]),
            "load": FigureSpec(
                "Normalized latency against rate",
                f"Solid: {first}; dashed: {second}. Poisson arrivals.",
                partial(draw_load, data["curves"]),
            ),
            "saved": FigureSpec(
                "Memory saved by sharing",
                "Of the blocks that sequences name, those that need not be there.",
                partial(bar_figure, saved, "memory saved (%)", colours, "{:.1f}"),
            ),
        }


def _law(name: str, turnover: float) -> str:
    return f"{name}, turnover {turnover:g}"


def met_at(law: Mapping[float, float], wanted: float) -> float:
    """The turnover that saves so much, on a line between two logarithms; NaN where none does.

    >>> round(met_at({0.01: 20.0, 0.1: 40.0, 1.0: 50.0}, 30.0), 4)
    0.0316
    """
    return math.exp(passes({math.log(t): saved for t, saved in law.items() if t > 0}, wanted))


# -- runs to which all requests come at once -------------------------------------------------------


def served_rate(runs: Sequence[Run], settled: float) -> float:
    """Requests/s: tokens a second while others wait, over those of a mean request.

    From `settled` seconds on. Counted in tokens, since a few long requests would move a count of
    requests.
    """
    return mean(runs, lambda run: _rate(run, settled))


def _rate(run: Run, settled: float) -> float:
    lengths, widths = arrays(run.requests("output_tokens", "sequences"))
    length, width = float(np.mean(lengths)), float(np.mean(widths))
    table = run.steps("start", "end", "decode_seqs", "sampled_prefills")
    start, end, decoded, begun = arrays(table)
    counted = _counted(run, start, settled)
    tokens = decoded[counted].sum() / width + begun[counted].sum()
    return float(tokens / (end[counted][-1] - start[counted][0]) / length)


def saving(runs: Sequence[Run], settled: float) -> float:
    """Per cent: 1 - 1 / r, r being blocks that sequences name over blocks used, a mean over steps.

    Counted are the same steps as for `served_rate`.
    """
    return 100 * mean(runs, lambda run: _saved_share(run, settled))


def _saved_share(run: Run, settled: float) -> float:
    start, used, shared = arrays(run.steps("start", "used_blocks", "shared_blocks"))
    counted = _counted(run, start, settled) & (used > 0)
    return 1 - 1 / float(np.mean(1 + shared[counted] / used[counted]))


def _counted(run: Run, start: Floats, settled: float) -> NDArray[np.bool_]:
    """The steps that count: while requests wait."""
    last = float(np.nanmax(arrays(run.requests("scheduled"))[0]))
    if last <= settled:
        raise ConfigError(
            f"settled={settled:g}: {run.arm}: no request waits after {last:.3g} s: must be "
            "shorter, or its requests more"
        )
    return (start > settled) & (start <= last)


def draw_load(curves: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Figure:
    """Latency against rate: a colour a case, dashes a system."""
    from matplotlib.lines import Line2D

    figure = new_figure(3.6)
    axes = figure.subplots()
    look = looks(list(curves))
    for name, systems in curves.items():
        for curve, dashes in zip(systems.values(), DASHES, strict=False):
            line = curve["rate"], curve["normalized_latency"]
            axes.plot(*line, color=look[name].colour, ls=dashes, marker="o", ms=3)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    tidy(axes, x="requests/s", y="normalized latency (s a token)")
    entries: dict[str, Any] = {
        name: Line2D([], [], color=one.colour, lw=2, label=name) for name, one in look.items()
    }
    for system, dashes in zip(next(iter(curves.values())), DASHES, strict=False):
        entries[system] = Line2D([], [], color=MUTED, ls=dashes, lw=2, label=system)
    return keyed(figure, entries)
