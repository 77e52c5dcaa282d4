"""One kind of requests, served by several systems: what each sustains, and what sharing saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.papers.curves import keyed
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing
from pagedsim.report.style import MUTED, looks, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of one kind, all of them there from the beginning."""

    requests: Mapping[str, int]
    """For each system that serves them, how many."""
    overrides: Sequence[str] = ()
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further overrides of some systems."""
    gain: float | None = None
    """What was published: the first system's sustained rate over the second's."""
    saved: float | None = None
    """The same: the blocks that sharing saves in the first system, in per cent."""
    why: str = ""
    """Why that differs."""
    of: str | None = None
    """The case of which it is a variant: systems that it does not serve are as they are there."""

    def arms(self, name: str, systems: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Names of runs, and the overrides that make them."""
        for system in (*self.requests, *self.more):
            if system not in systems or system not in self.requests:
                known = ", ".join(systems)
                raise ConfigError(f"{name}: {system}: must be one of {known}, with requests")
        return {
            arm_of(name, system): [
                *systems[system],
                *self.overrides,
                *self.more.get(system, ()),
                "workload.arrivals=burst",
                f"workload.requests={count}",
            ]
            for system, count in self.requests.items()
        }


Rates = Mapping[str, Mapping[str, float]]
"""Of each case, what each system sustains."""


def rates_of(
    cases: Mapping[str, Case], runs: Mapping[str, Sequence[Run]], settled: float
) -> dict[str, dict[str, float]]:
    """What is sustained, in the variants of a case by all who serve the case."""
    rates: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        rates[name] = dict(rates[case.of]) if case.of else {}
        for system in case.requests:
            rates[name][system] = sustained(runs[arm_of(name, system)], settled)
    return rates


def savings_of(
    cases: Mapping[str, Case], runs: Mapping[str, Sequence[Run]], settled: float, system: str
) -> dict[str, float]:
    """What sharing saves in one system, in per cent."""
    return {
        name: saving(runs[arm_of(name, system)], settled)
        for name, case in cases.items()
        if system in case.requests
    }


def gain_of(rates: Mapping[str, float]) -> float:
    """The first system's over the second's; NaN if only one was tried."""
    values = list(rates.values())
    return values[0] / values[1] if len(values) > 1 else math.nan


def elsewhere(name: str, cases: Mapping[str, Case], rates: Rates) -> str:
    """What the gain of a case is in its variants; empty if it has none."""
    found = {one: gain_of(rates[one]) for one, case in cases.items() if case.of == name}
    if not found:
        return ""
    low, high = (pick(found, key=lambda one: found[one]) for pick in (min, max))
    return f"{found[low]:.2f} ({_own(low, name)}) to {found[high]:.2f} ({_own(high, name)})"


def _own(variant: str, case: str) -> str:
    return variant.removeprefix(f"{case}, ")


def listing_of(cases: Mapping[str, Case], rates: Rates, saved: Mapping[str, float]) -> Listing:
    """All of it; in brackets what a variant takes over from its case."""
    systems = list(dict.fromkeys(system for each in rates.values() for system in each))
    rows = []
    for name, case in cases.items():
        cells = [name]
        for system in systems:
            rate = rates[name].get(system)
            text = "–" if rate is None else f"{rate:.3g}/s"
            cells.append(text if rate is None or system in case.requests else f"({text})")
        gain = gain_of(rates[name])
        cells.append("–" if math.isnan(gain) else f"{gain:.2f}")
        cells.append(f"{saved[name]:.1f} %" if name in saved else "–")
        rows.append(cells)
    head = ["", *systems, "gain", "memory saved"]
    return Listing("Rates that are sustained, and what else could have been assumed", head, rows)


def arm_of(case: str, system: str) -> str:
    """The name of a run."""
    return f"{case}, {system}"


def sustained(runs: Sequence[Run], settled: float) -> float:
    """Requests/s: tokens a second while others wait, over those of a mean request.

    From `settled` seconds on. Counted in tokens, since a few long requests would move a count of
    requests.
    """
    return float(np.mean([_rate(run, settled) for run in runs]))


def _rate(run: Run, settled: float) -> float:
    requests = run.requests("output_tokens", "sequences")
    length, width = (float(np.mean(requests[name].to_numpy())) for name in requests.column_names)
    table = run.steps("start", "end", "decode_seqs", "sampled_prefills")
    start, end, decoded, begun = (np.asarray(table[name].to_numpy()) for name in table.column_names)
    counted = _counted(run, start, settled)
    tokens = decoded[counted].sum() / width + begun[counted].sum()
    return float(tokens / (end[counted][-1] - start[counted][0]) / length)


def saving(runs: Sequence[Run], settled: float) -> float:
    """Per cent: 1 - 1 / r, r being blocks that sequences name over blocks used, a mean over steps.

    Counted are the same steps as for `sustained`.
    """
    return 100 * float(np.mean([_saved(run, settled) for run in runs]))


def _saved(run: Run, settled: float) -> float:
    table = run.steps("start", "used_blocks", "shared_blocks")
    start, used, shared = (np.asarray(table[name].to_numpy()) for name in table.column_names)
    counted = _counted(run, start, settled) & (used > 0)
    return 1 - 1 / float(np.mean(1 + shared[counted] / used[counted]))


def _counted(run: Run, start: Floats, settled: float) -> NDArray[np.bool_]:
    """The steps that are looked at: until nobody waits any more."""
    last = float(np.nanmax(np.asarray(run.requests("scheduled")["scheduled"].to_numpy())))
    if last <= settled:
        raise ConfigError(
            f"settled={settled:g}: {run.arm}: nobody waits after {last:.3g} s: must be shorter, or "
            "its requests more"
        )
    return (start > settled) & (start <= last)


def draw_sustained(rates: Mapping[str, Mapping[str, float]]) -> Figure:
    """A group of bars a case, a bar a system, and above it its rate."""
    look = looks(list(next(iter(rates.values()))))
    figure = new_figure(3.2)
    axes = figure.subplots()
    width = 0.8 / len(look)
    for number, (system, its) in enumerate(look.items()):
        places = np.arange(len(rates)) + (number - (len(look) - 1) / 2) * width
        values = [rates[case][system] for case in rates]
        axes.bar(places, values, 0.94 * width, color=its.colour)
        label_bars(axes, places, values, "{:.3g}")
    axes.set_xticks(range(len(rates)), list(rates))
    axes.grid(axis="x", visible=False)
    tidy(axes, y="requests/s")
    return keyed(figure, {system: its.colour for system, its in look.items()})


def label_bars(axes: Axes, places: Any, values: Sequence[float | None], text: str) -> None:
    """Each bar's value above it."""
    for place, value in zip(places, values, strict=True):
        if value is not None:
            axes.annotate(
                text.format(value),
                (place, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color=MUTED,
            )
