"""Conversations whose KV cache is kept in tiers below the GPU, compared with CachedAttention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from experiments.papers.panels import keyed
from experiments.papers.reproduction import ByArm, Reproduction, arm, arrays, nested
from experiments.papers.settings import Count, In, Names, Number
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import new_figure, tidy
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHY = "published: at most, of several models and loads that are not ours"


@dataclass(frozen=True)
class Kept:
    """The effect of keeping the KV cache; means over seeds."""

    ttft: float
    """Seconds on average."""
    hits: float
    """The share of prompt tokens found in the cache."""
    prefill: float
    """Prompt tokens, found ones included, per second of steps that compute prompts."""
    loaded: Mapping[str, float]
    """The share of prompt tokens loaded from each tier."""


@dataclass(frozen=True, kw_only=True)
class KvTiers(Reproduction):
    """Every system in every case, and in the first case tiers of several sizes."""

    systems: Names
    base: Annotated[str, In("systems")]
    """The system that keeps nothing, the baseline."""
    ours: Annotated[str, In("systems")]
    """The system that is compared with the published numbers."""
    cases: Annotated[Names, Count()]
    published: Mapping[str, float]
    """`ttft`: the relative change of the time to the first token; `prefill`: the speed-up."""
    sizes: Annotated[Mapping[str, Sequence[float]], Number(above=0)]
    """`gib` of the CPU's tier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ttft", "prefill"):
            require_number(f"published.{name}", self.published.get(name))

    def arms(self) -> dict[str, list[str]]:
        found = {
            arm(case, system): [*settings, *changes]
            for case, settings in self.cases.items()
            for system, changes in self.systems.items()
        }
        first = next(iter(self.cases.values()))
        for size in self.sizes.get("gib", ()):
            found[_sized(size)] = [*first, "memory=tiered", f"memory.tiers.cpu.gib={size:g}"]
        return found

    def read_arms(self, runs: ByArm) -> Analysis:
        kept = nested(
            lambda case, system: kept_of(runs[arm(case, system)]), self.cases, self.systems
        )
        curve = {size: kept_of(runs[_sized(size)]) for size in self.sizes.get("gib", ())}
        cases = nested(lambda case, system: asdict(kept[case][system]), self.cases, self.systems)
        sizes = {
            "gib": list(curve),
            "hits": [one.hits for one in curve.values()],
            "ttft": [one.ttft for one in curve.values()],
        }
        drawing = FigureSpec(
            "Size of the CPU's tier",
            f"{next(iter(self.cases))}: prompt tokens that are found, and the time to the first "
            "token.",
            partial(draw, sizes),
        )
        return Analysis(
            finding=[self._sentence(case, each) for case, each in kept.items()] + _grows(curve),
            rows=[row for case, each in kept.items() for row in self._rows(case, each)],
            listings=[self._listing(case, each) for case, each in kept.items()],
            data={"cases": cases, "sizes": sizes},
            drawings={"sizes": drawing} if curve else {},
            headline=["sizes"] if curve else [],
        )

    def _sentence(self, case: str, each: Mapping[str, Kept]) -> str:
        base = each[self.base]
        parts = []
        for name, one in each.items():
            if name != self.base:
                change = signed(one.ttft / base.ttft - 1, 0)
                parts.append(f"{name} {change} ({percent(one.hits)} found)")
        return (
            f"{case}: the mean time to the first token, {base.ttft * 1e3:,.0f} ms with "
            f"{self.base}, changes with {', '.join(parts)}."
        )

    def _rows(self, case: str, each: Mapping[str, Kept]) -> list[Row]:
        base, ours = each[self.base], each[self.ours]
        ttft, prefill = 100 * (ours.ttft / base.ttft - 1), ours.prefill / base.prefill
        whose = f"{self.ours} against {self.base}"
        why = f"{WHY}; HTTP and tokenising count here"
        return [
            Row(f"{case}: TTFT, {whose}", ttft, 100 * self.published["ttft"], "%", why),
            Row(f"{case}: prefill rate, {whose}", prefill, self.published["prefill"], "×", WHY),
        ]

    def _listing(self, case: str, each: Mapping[str, Kept]) -> Listing:
        tiers = list(dict.fromkeys(name for one in each.values() for name in one.loaded))
        head = ["system", "TTFT mean", "found", *(f"loaded from {t}" for t in tiers), "prefill"]
        rows = [
            [
                name,
                f"{one.ttft * 1e3:,.1f} ms",
                percent(one.hits),
                *(percent(one.loaded[t]) if t in one.loaded else "–" for t in tiers),
                f"{one.prefill:,.0f} /s",
            ]
            for name, one in each.items()
        ]
        note = (
            "Found and loaded: of all prompt tokens. Prefill: prompt tokens, found ones included, "
            "a second of steps that compute prompts."
        )
        return Listing(case, head, rows, note)


def kept_of(runs: Sequence[Run]) -> Kept:
    """Means over the seeds."""
    each = [_kept(run) for run in runs]
    ttft, hits, prefill = (
        fmean(getattr(one, name) for one in each) for name in ("ttft", "hits", "prefill")
    )
    tiers = each[0].loaded
    return Kept(ttft, hits, prefill, {t: fmean(one.loaded[t] for one in each) for t in tiers})


def _kept(run: Run) -> Kept:
    prompts = float(arrays(run.requests("prompt_tokens"))[0].sum())
    start, end, tokens = arrays(run.steps("start", "end", "prefill_tokens"))
    return Kept(
        run.summary["ttft_mean"],
        run.summary["hit_rate"],
        prompts / float((end - start)[tokens > 0].sum()),
        {t: use["loaded_tokens"] / prompts for t, use in run.summary.get("tiers", {}).items()},
    )


def _sized(size: float) -> str:
    return f"CPU of {size:g} GiB"


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
    return keyed(figure, {}, wspace=0.25)
