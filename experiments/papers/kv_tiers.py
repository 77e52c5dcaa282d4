"""Conversations whose keys and values are kept below the GPU, beside CachedAttention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.report.style import margins, new_figure, tidy
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = ("ttft", "prefill")
WHY = "published: at most, of several models and loads that are not ours"


class Kept(NamedTuple):
    """What came of keeping keys and values, over the seeds."""

    ttft: float
    """Seconds on average."""
    hits: float
    """The share of prompt tokens that was found."""
    prefill: float
    """Prompt tokens, found ones included, for each second of steps that compute prompts."""
    loaded: Mapping[str, float]
    """The share of prompt tokens that was loaded from each tier."""


@dataclass(frozen=True, kw_only=True)
class KvTiers(Reproduction):
    """Every system in every case, and in the first case tiers of several sizes."""

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    base: str
    """The one that keeps nothing, against which the others are held."""
    ours: str
    """The one that is held against what was published."""
    cases: Mapping[str, Sequence[str]]
    published: Mapping[str, float]
    """By how much the time to the first token changes, and how many times as fast prompts are."""
    sizes: Mapping[str, Sequence[float]]
    """`gib` of the CPU's tier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.base, self.ours):
            if name not in self.systems:
                raise unknown("system", name, self.systems)
        if not self.cases:
            raise ConfigError("study.cases: must name at least one")
        for name in PUBLISHED:
            require_number(f"study.published.{name}", self.published.get(name))
        for size in self._sizes:
            require_number("study.sizes.gib", size, above=0)

    @property
    def _sizes(self) -> Sequence[float]:
        return self.sizes.get("gib", ())

    def arms(self) -> dict[str, list[str]]:
        found = {
            _arm(case, system): [*settings, *changes]
            for case, settings in self.cases.items()
            for system, changes in self.systems.items()
        }
        first = next(iter(self.cases.values()))
        for size in self._sizes:
            found[_sized(size)] = [*first, "memory=tiered", f"memory.tiers.cpu.gib={size:g}"]
        return found

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        kept = {
            case: {system: kept_of(runs[_arm(case, system)]) for system in self.systems}
            for case in self.cases
        }
        curve = {size: kept_of(runs[_sized(size)]) for size in self._sizes}
        cases = {
            case: {system: one._asdict() for system, one in each.items()}
            for case, each in kept.items()
        }
        sizes = {
            "gib": list(curve),
            "hits": [one.hits for one in curve.values()],
            "ttft": [one.ttft for one in curve.values()],
        }
        drawing = Drawing(
            "Size of the CPU's tier",
            f"{next(iter(self.cases))}: prompt tokens that are found, and the time to the first "
            "token.",
            partial(draw, sizes),
        )
        return Reading(
            finding=[self._told(case, each) for case, each in kept.items()] + _grows(curve),
            rows=[row for case, each in kept.items() for row in self._rows(case, each)],
            listings=[self._listing(case, each) for case, each in kept.items()],
            data={"cases": cases, "sizes": sizes},
            drawings={"sizes": drawing} if curve else {},
            headline=["sizes"] if curve else [],
        )

    def _told(self, case: str, each: Mapping[str, Kept]) -> str:
        base, gpu = each[self.base], [name for name in each if name != self.base]
        parts = [
            f"{name} {_change(each[name].ttft / base.ttft)} ({percent(each[name].hits)} found)"
            for name in gpu
        ]
        return (
            f"{case}: the mean time to the first token, {base.ttft * 1e3:,.0f} ms with "
            f"{self.base}, changes with " + ", ".join(parts) + "."
        )

    def _rows(self, case: str, each: Mapping[str, Kept]) -> list[Row]:
        base, ours = each[self.base], each[self.ours]
        return [
            Row(
                f"{case}: TTFT, {self.ours} against {self.base}",
                100 * (ours.ttft / base.ttft - 1),
                100 * self.published["ttft"],
                "%",
                f"{WHY}; HTTP and tokenising count here",
            ),
            Row(
                f"{case}: prefill rate, {self.ours} against {self.base}",
                ours.prefill / base.prefill,
                self.published["prefill"],
                "×",
                WHY,
            ),
        ]

    def _listing(self, case: str, each: Mapping[str, Kept]) -> Listing:
        tiers = list(dict.fromkeys(name for one in each.values() for name in one.loaded))
        return Listing(
            case,
            ["system", "TTFT mean", "found", *(f"loaded from {name}" for name in tiers), "prefill"],
            [
                [
                    name,
                    f"{one.ttft * 1e3:,.1f} ms",
                    percent(one.hits),
                    *(percent(one.loaded[t]) if t in one.loaded else "–" for t in tiers),
                    f"{one.prefill:,.0f} /s",
                ]
                for name, one in each.items()
            ],
            "Found and loaded: of all prompt tokens. Prefill: prompt tokens, found ones included, "
            "a second of steps that compute prompts.",
        )


def kept_of(runs: Sequence[Run]) -> Kept:
    """Means over the seeds."""
    each = [_kept(run) for run in runs]
    tiers = each[0].loaded
    return Kept(
        fmean(one.ttft for one in each),
        fmean(one.hits for one in each),
        fmean(one.prefill for one in each),
        {name: fmean(one.loaded[name] for one in each) for name in tiers},
    )


def _kept(run: Run) -> Kept:
    prompts = float(np.asarray(run.requests("prompt_tokens")["prompt_tokens"].to_numpy()).sum())
    steps = run.steps("start", "end", "prefill_tokens")
    start, end, tokens = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    seconds = float((end - start)[tokens > 0].sum())
    tiers = run.summary.get("tiers", {})
    return Kept(
        run.summary["ttft_mean"],
        run.summary["hit_rate"],
        prompts / seconds,
        {name: use["loaded_tokens"] / prompts for name, use in tiers.items()},
    )


def _arm(case: str, system: str) -> str:
    return f"{case}, {system}"


def _sized(size: float) -> str:
    return f"CPU of {size:g} GiB"


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %".replace("-", "−")


def _grows(curve: Mapping[float, Kept]) -> list[str]:
    if len(curve) < 2:
        return []
    (small, few), *_, (large, most) = curve.items()
    return [
        f"From {small:g} to {large:g} GiB of the CPU's tier, what is found grows from "
        f"{percent(few.hits)} to {percent(most.hits)} of the prompts."
    ]


def draw(sizes: Mapping[str, Sequence[float]]) -> Figure:
    """Hits and time to the first token over the size of the tier."""
    figure = new_figure(3.4)
    left, right = figure.subplots(1, 2, sharex=True)
    left.plot(sizes["gib"], [100 * one for one in sizes["hits"]], marker="o", ms=3.2)
    right.plot(sizes["gib"], [1e3 * one for one in sizes["ttft"]], marker="o", ms=3.2)
    for axes, what in ((left, "% of prompt tokens found"), (right, "TTFT mean, ms")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes["gib"], [f"{size:g}" for size in sizes["gib"]])
        axes.set_ylim(bottom=0)
        tidy(axes, x="GiB on the CPU", y=what)
    margins(figure)
    figure.subplots_adjust(wspace=0.25)
    return figure
