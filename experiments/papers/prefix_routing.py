"""Prefix-aware routing against round robin where prompts share long prefixes (llm-d)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import ByArm, Reproduction, arm, averaged
from experiments.papers.settings import Count, In, Names, Number
from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.run.study import Analysis
from pagedsim.workload.generated import stages_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {
    "tokens": ("/s", "output tokens a second", "tokens/s"),
    "ttft_mean": ("s", "mean time to the first token", "mean TTFT"),
    "ttft_p50": ("s", "P50 time to the first token", "P50"),
    "ttft_p90": ("s", "P90 time to the first token", "P90"),
    "ntpot_p50": ("ms", "P50 latency a token", "ms a token"),
}
"""What load generators report: the unit, the name, and the head of a column."""


@dataclass(frozen=True)
class Measured:
    """One stage, from its first arrival to its last answer."""

    tokens: float
    """Output tokens/s."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ntpot_p50: float
    """Milliseconds from the arrival to the last token, per output token."""
    cached: float
    """The share of prompt tokens found in caches."""
    preemptions: float
    """Per request."""


Rates = Mapping[float, Measured]
ByMeasure = Mapping[str, Mapping[float, float]]
"""By measure, then rate."""


@dataclass(frozen=True, kw_only=True)
class PrefixRouting(Reproduction):
    """Two routers at all rates; others, and other assumptions, at the highest rate only."""

    one_server: ClassVar[bool] = False

    routers: Annotated[Names, Count(2, 2)]
    """The base, and the one that is compared with it."""
    others: Names
    """Further routers."""
    variants: Names
    """Other assumptions."""
    stages: Annotated[Sequence[Mapping[str, float]], Count(2)]
    """Of `workload.stages`: the first warms caches and is not counted."""
    published: Annotated[
        Mapping[str, Annotated[Mapping[str, ByMeasure], In("routers")]], Count(), Number(above=0)
    ]
    """By source, then router; ours is compared with the first."""
    blocks: float
    """Published tokens in the cache of a replica."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._rates) != len(self.stages) - 1:
            raise ConfigError("stages: must be a warm-up and at least one other, each once")
        for source, routers in self.published.items():
            for measure in {one for measures in routers.values() for one in measures}:
                if measure not in MEASURES:
                    raise unknown(f"measure of study.published.{source}", measure, MEASURES)
        for name in self.routers:
            if not self._told(name, "tokens"):
                raise ConfigError(f"published: its first source lacks tokens of {name}")

    @property
    def _rates(self) -> list[float]:
        return list(dict.fromkeys(stage.rate for stage in stages_of(list(self.stages))[1:]))

    @property
    def _last(self) -> float:
        return self._rates[-1]

    def _told(self, name: str, measure: str) -> Mapping[float, float]:
        """By rate, what the first source has of a router."""
        return next(iter(self.published.values())).get(name, {}).get(measure, {})

    def arms(self) -> dict[str, list[str]]:
        last = _stages([self.stages[0], self.stages[-1]])
        made = {name: [*own, _stages(self.stages)] for name, own in self.routers.items()}
        made |= {name: [*own, last] for name, own in self.others.items()}
        for variant, changes in self.variants.items():
            for name, own in self.routers.items():
                made[arm(name, variant)] = [*own, last, *changes]
        return made

    def read_arms(self, runs: ByArm) -> Analysis:
        found = {arm: by_rate(own) for arm, own in runs.items()}
        source, first = next(iter(self.published.items()))
        data = {
            "ours": {
                name: _named({rate: asdict(one) for rate, one in found[name].items()})
                for name in self.routers
            },
            "published": {
                name: {measure: _named(values) for measure, values in measures.items()}
                for name, measures in first.items()
            },
            "at the highest rate": {arm: asdict(final(rates)) for arm, rates in found.items()},
        }
        summary = runs[next(iter(self.routers))][0].summary
        cache = summary["total_blocks"] * summary["block_size"] / len(summary["replicas"])
        caption = f"Lines are ours, hollow points those of {source}."
        return Analysis(
            finding=list(self._finding(found)),
            rows=[*self._rows(found), Row("tokens in the cache of a replica", cache, self.blocks)],
            listings=[self._all_rates(found), self._last_rate(found), self._elsewhere(found)],
            data=data,
            drawings={"routing": FigureSpec("By prefix or in turn", caption, partial(draw, data))},
        )

    def _rows(self, found: Mapping[str, Rates]) -> Iterator[Row]:
        base, best = self.routers
        ours, theirs = {}, {}
        for name in self.routers:
            printed = self._told(name, "tokens")
            at = max(found[name], key=lambda rate: found[name][rate].tokens)
            ours[name], theirs[name] = found[name][at].tokens, max(printed.values())
            why = (
                f"ours at {at:g}/s, theirs at {max(printed, key=printed.__getitem__):g}/s; "
                f"{self._otherwise(found, name, 'tokens')}"
            )
            yield Row(f"{name}: most output tokens", ours[name], theirs[name], "/s", why)
        ratios = ours[best] / ours[base], theirs[best] / theirs[base]
        yield Row(f"{best} / {base}: most output tokens", *ratios, "×")
        for measure, (unit, words, _) in MEASURES.items():
            for name in self.routers if measure != "tokens" else ():
                if (told := self._told(name, measure).get(self._last)) is not None:
                    one, why = found[name][self._last], self._otherwise(found, name, measure)
                    what = f"{name}, {self._last:g}/s: {words}"
                    yield Row(what, getattr(one, measure), told, unit, why)

    def _otherwise(self, found: Mapping[str, Rates], name: str, measure: str) -> str:
        """The highest rate under other assumptions, and as others measured it."""
        last = self._last
        ours = [
            f"{_cell(measure, final(found[arm(name, variant)]))} ({variant})"
            for variant in self.variants
        ]
        theirs = [
            f"{_text(measure, values[last])} in {source}"
            for source, routers in list(self.published.items())[1:]
            if last in (values := routers.get(name, {}).get(measure, {}))
        ]
        return f"at {last:g}/s {'; '.join([', '.join(ours), *theirs])}"

    def _all_rates(self, found: Mapping[str, Rates]) -> Listing:
        head = ["requests/s"]
        rows = [[f"{rate:g}"] for rate in self._rates]
        for measure in ("tokens", "ttft_p50", "ttft_p90"):
            for name in self.routers:
                head += [f"{name}: {MEASURES[measure][2]}", "published"]
                for row, rate in zip(rows, self._rates, strict=True):
                    printed = self._told(name, measure).get(rate)
                    row.append(_cell(measure, found[name][rate]))
                    row.append("–" if printed is None else _text(measure, printed))
        note = "Output tokens a second, and seconds to the first token."
        return Listing("Every rate", head, rows, note)

    def _last_rate(self, found: Mapping[str, Rates]) -> Listing:
        measures = ("tokens", "ttft_p50", "ttft_p90", "ntpot_p50")
        rows = [
            [
                arm,
                *(_cell(measure, one) for measure in measures),
                percent(one.cached, 0),
                f"{one.preemptions:.2f}",
            ]
            for arm, rates in found.items()
            for one in [final(rates)]
        ]
        head = ["", *(MEASURES[measure][2] for measure in measures), "cached", "preempted"]
        title = f"Other routers and assumptions, {self._last:g} requests/s"
        return Listing(title, head, rows, "Shares of prompt tokens, and preemptions a request.")

    def _elsewhere(self, found: Mapping[str, Rates]) -> Listing:
        """The same stages as measured by other sources."""
        rows = [
            [
                f"{source}: {name}, {rate:g}/s, {MEASURES[measure][1]}",
                _text(measure, value),
                _cell(measure, found[name][rate]),
            ]
            for source, routers in list(self.published.items())[1:]
            for name, measures in routers.items()
            for measure, values in measures.items()
            for rate, value in values.items()
            if rate in found[name]
        ]
        return Listing("Other runs of the same stages", ["", "published", "ours"], rows)

    def _finding(self, found: Mapping[str, Rates]) -> Iterator[str]:
        base, best = self.routers
        most = {name: max(one.tokens for one in found[name].values()) for name in self.routers}
        printed = {name: max(self._told(name, "tokens").values()) for name in self.routers}
        yield (
            f"By prefix the fleet gives at most {most[best]:,.0f} output tokens/s and in turn "
            f"{most[base]:,.0f}, {most[best] / most[base]:.2f} times as many (published: "
            f"{printed[best]:,.0f} and {printed[base]:,.0f}, {printed[best] / printed[base]:.2f} "
            "times)."
        )
        last = {arm: final(rates) for arm, rates in found.items()}
        waits = [
            f"{self._beside(last, name, 'ttft_p50')} and {self._beside(last, name, 'ttft_p90')} "
            f"{how}"
            for name, how in ((base, "in turn"), (best, "by prefix"))
        ]
        yield (
            f"At {self._last:g} requests/s the P50 and P90 of the time to the first token are "
            f"{', '.join(waits)}: {percent(last[base].cached, 0)} of prompt tokens are "
            f"cached in turn and {percent(last[best].cached, 0)} by prefix."
        )
        each = ", ".join(f"{last[name].tokens:,.0f} with {name}" for name in self.others)
        yield f"Others at that rate, in output tokens/s: {each}."

    def _beside(self, last: Mapping[str, Measured], name: str, measure: str) -> str:
        """At the highest rate: ours, and what was published."""
        printed = self._told(name, measure).get(self._last)
        told = "" if printed is None else f" (published: {printed:g})"
        return f"{_cell(measure, last[name])} {MEASURES[measure][0]}{told}"


def final(rates: Rates) -> Measured:
    """The last stage."""
    return list(rates.values())[-1]


def by_rate(runs: Sequence[Run]) -> dict[float, Measured]:
    """Each stage after the first, which warms caches; means over seeds."""
    seeds = [_by_rate(run) for run in runs]
    return {rate: averaged(each[rate] for each in seeds) for rate in seeds[0]}


def _by_rate(run: Run) -> dict[float, Measured]:
    stages = stages_of(run.config["workload"]["stages"])
    ends = accumulate((stage.requests for stage in stages), initial=0)
    rows = [slice(begin, end) for begin, end in pairwise(ends)]
    return {s.rate: _measured(run, own) for s, own in zip(stages[1:], rows[1:], strict=True)}


def _measured(run: Run, rows: slice) -> Measured:
    table = run.by_column()
    names = (
        *("arrival", "first_token", "finished", "output_tokens"),
        *("prompt_tokens", "cached_tokens", "preemptions"),
    )
    arrival, first, finished, tokens, prompt, cached, preempted = (table[n][rows] for n in names)
    return Measured(
        tokens=float(tokens.sum() / (finished.max() - arrival.min())),
        ttft_mean=float(np.mean(first - arrival)),
        ttft_p50=float(np.median(first - arrival)),
        ttft_p90=float(np.quantile(first - arrival, 0.9)),
        ntpot_p50=float(1e3 * np.median((finished - arrival) / tokens)),
        cached=float(cached.sum() / prompt.sum()),
        preemptions=float(preempted.mean()),
    )


def _named(by_rate: Mapping[float, Any]) -> dict[str, Any]:
    return {f"{rate:g}": value for rate, value in by_rate.items()}


def _cell(measure: str, one: Measured) -> str:
    return _text(measure, getattr(one, measure))


def _text(measure: str, value: float) -> str:
    return f"{value:,.0f}" if measure == "tokens" else f"{value:.3g}"


def _stages(stages: Sequence[Mapping[str, float]]) -> str:
    each = (f"{{rate: {stage['rate']:g}, seconds: {stage['seconds']:g}}}" for stage in stages)
    return f"workload.stages=[{', '.join(each)}]"


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each measure, a line for each router; hollow points were published."""

    def panel(measure: str, label: str, log: bool) -> Panel:
        lines = {
            name: ([float(rate) for rate in its], [one[measure] for one in its.values()])
            for name, its in data["ours"].items()
        }
        told = {
            name: ([float(rate) for rate in its[measure]], list(its[measure].values()))
            for name, its in data["published"].items()
            if measure in its
        }
        return Panel(lines=lines, published=told, log=log, x="requests/s", y=label)

    panels = [
        panel("tokens", "output tokens/s", log=False),
        panel("ttft_p90", "P90 TTFT (s)", log=True),
    ]
    return draw_panels([panels], 3.6, left=0.8, wspace=0.22)
