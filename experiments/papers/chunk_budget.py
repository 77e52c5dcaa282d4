"""The token budget of a step (Sarathi-Serve): capacity, stalls, crossing latencies, fairness."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from experiments.papers.curves import Curve, at, crossing
from experiments.papers.panels import Panel, bar_figure, draw_panels
from experiments.papers.reproduction import arm, arrays, combined, nested, per_s
from experiments.papers.settings import Count, In, Names, Number, Positive, check_settings
from experiments.studies.bisection import Bisection
from experiments.studies.capacity import WITHOUT_RATE
from experiments.studies.compare import check_overrides
from pagedsim.core import ConfigError, Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, estimate, paired_ratio
from pagedsim.metrics.metric import token_gaps
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.run.backend import RunConfig
from pagedsim.run.job import Arm, Job
from pagedsim.run.runs import Key, Runs
from pagedsim.run.simulated import Simulated
from pagedsim.run.study import Analysis, BackendName, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Budget = Annotated[str, In("budgets")]
SEEDS = "Means, and between what seeds lie."


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One claim about budgets."""

    budgets: Names | None = None
    """Ways to compose a step, and the overrides that make them; None: those of the study."""

    @property
    def ways(self) -> Names:
        """The budgets, where the study has filled them in."""
        assert self.budgets is not None
        return self.budgets

    @abstractmethod
    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        """The next arms to run, as in a study."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError for what is wrong with the first arms of all parts."""

    @abstractmethod
    def analyse(self, runs: Runs) -> Analysis:
        """The analysis of its runs."""


def over_seeds(runs: Sequence[Run], key: str) -> list[float]:
    """A number of each seed's summary."""
    return [run.summary[key] for run in runs]


def mean(values: Sequence[float]) -> float:
    """Over the seeds that have a number."""
    return estimate(values).mean


def told(values: Sequence[float], unit: str = "s") -> str:
    """A mean, and the range of the seeds."""
    if math.isnan(middle := mean(values)):
        return "–"
    text = f"{middle:.3g} {unit}"
    low, high = min(values), max(values)
    return f"{text} ({low:.3g} to {high:.3g})" if high > low else text


# -- capacity --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The bound on gaps of a case, and the budget that the paper gives it."""

    gap: Positive
    """Seconds between two tokens of a request, at the 99th percentile."""
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class Case:
    """A server and its requests."""

    overrides: Sequence[str]
    start: Annotated[float, Number(1e-6)]
    """Requests/s at which a search begins."""
    objectives: Mapping[str, Objective]
    published: float | None = None
    """The largest published gain of a budget."""


class Search(Bisection):
    """The search for the capacity of one budget under one objective and seed."""

    def __init__(self, start: float, tolerance: float, name: str, gap: float, seed: int) -> None:
        super().__init__(start, tolerance)
        self.name, self.gap, self.seed = name, gap, seed

    def key(self, rate: float) -> Key:
        """Of the run at a rate, which searches under other objectives share."""
        return arm(self.name, per_s(rate)), self.seed


Where = tuple[str, str, str]
"""A case, a budget, and an objective."""
Gains = Mapping[tuple[str, str], Estimate]
"""By case and objective."""


@dataclass(frozen=True, kw_only=True)
class Capacity(Part):
    """The highest rate at which the median wait and the gaps between tokens keep an objective."""

    cases: Mapping[str, Case]
    baseline: Budget
    queue_time: Annotated[float, Number(0)]
    """Seconds that half of all requests may wait before they are scheduled."""
    tolerance: Annotated[float, Number(0.001, 0.5)]

    @property
    def _objectives(self) -> list[tuple[str, str, Objective]]:
        return [
            (name, objective, its)
            for name, case in self.cases.items()
            for objective, its in case.objectives.items()
        ]

    def next_runs(self, runs: Runs) -> list[Arm]:
        seeds = runs.command.seeds
        wanted: dict[Key, Arm] = {}
        for (case, budget, _), searches in self._searches(runs).items():
            changes = [*self.cases[case].overrides, *self.ways[budget]]
            for search in searches:
                if (rate := search.next()) is None:
                    continue
                name, seed = search.key(rate)
                if (name, seed) not in runs.failed and (name, seed) not in runs.repeated:
                    sets = {"workload.rate": rate}
                    wanted[name, seed] = Arm(name, changes, sets, [seed], seeds[0])
        return list(wanted.values())

    def _searches(self, runs: Runs) -> dict[Where, list[Search]]:
        """For each case, budget and objective one search per seed, fed with all finished runs."""
        return {
            (name, budget, objective): [
                self._fed(runs, arm(name, budget), seed, case.start, its.gap)
                for seed in runs.command.seeds
            ]
            for name, case in self.cases.items()
            for budget in self.ways
            for objective, its in case.objectives.items()
        }

    def _fed(self, runs: Runs, name: str, seed: int, start: float, gap: float) -> Search:
        search = Search(start, self.tolerance, name, gap, seed)
        while (rate := search.next()) is not None:
            if (run := runs.finished.get(search.key(rate))) is None:
                break
            search.tell(rate, self._met(run, gap))
        return search

    def _met(self, run: Run, gap: float) -> bool:
        summary = run.summary
        if not summary["finished"]:
            return False
        return not (summary["itl_p99"] > gap or summary["queue_time_p50"] > self.queue_time)

    def analyse(self, runs: Runs) -> Analysis:
        found = {
            where: [search.low or math.nan for search in searches if search.answers]
            for where, searches in self._searches(runs).items()
        }
        means = {where: estimate(rates).mean for where, rates in found.items()}
        gains = {
            (name, objective): self._gain(found, name, its.budget, objective)
            for name, objective, its in self._objectives
        }
        shown = {
            arm(name, objective): {b: means[name, b, objective] for b in self.ways}
            for name, objective, _ in self._objectives
        }
        bars = {
            name: {b: None if math.isnan(rate) else rate for b, rate in each.items()}
            for name, each in shown.items()
        }
        caption = (
            "The highest rate at which the 99th percentile of the gaps between tokens "
            "and the median wait keep their bounds."
        )
        draw = partial(bar_figure, bars, "requests/s", None, "{:.2g}", wrapped=True)
        return Analysis(
            finding=[self._sentence(name, gains, means) for name in self.cases],
            rows=[row for name in self.cases for row in self._rows(name, gains, means)],
            listings=[self._listing(means)],
            data={"capacity": shown},
            drawings={
                "capacity": FigureSpec("Requests a second within an objective", caption, draw)
            },
            table=[
                {"case": case, "objective": objective, "budget": budget, "requests_per_s": rate}
                for (case, budget, objective), rates in found.items()
                for rate in rates
            ],
        )

    def _gain(
        self, found: Mapping[Where, Sequence[float]], case: str, budget: str, objective: str
    ) -> Estimate:
        ours, theirs = found[case, budget, objective], found[case, self.baseline, objective]
        pairs = [pair for pair in zip(ours, theirs, strict=True) if not math.isnan(sum(pair))]
        return paired_ratio([one for one, _ in pairs], [other for _, other in pairs])

    def _rows(self, name: str, gains: Gains, means: Mapping[Where, float]) -> list[Row]:
        case = self.cases[name]
        each = {one: gains[name, one].mean for one in case.objectives}
        rows = [
            Row(f"{name}, {one}: {its.budget} / {self.baseline}", each[one], None, "×")
            for one, its in case.objectives.items()
        ]
        known = {one: gain for one, gain in each.items() if not math.isnan(gain)}
        if not known:
            return rows
        most = max(known, key=lambda one: known[one])
        what = f"{name}: the largest gain of a budget"
        why = (
            f"{self.baseline} sustains {means[name, self.baseline, most]:.3g}/s, where one "
            f"gap in a hundred holds prompts that take {case.objectives[most].gap:g} s: how "
            "many do depends on the lengths, of which means and spreads are as published and the "
            "shape is assumed"
        )
        return [Row(what, known[most], case.published, "×", why if case.published else ""), *rows]

    def _sentence(self, name: str, gains: Gains, means: Mapping[Where, float]) -> str:
        case = self.cases[name]
        parts = []
        for objective, its in case.objectives.items():
            ours, theirs = (means[name, b, objective] for b in (its.budget, self.baseline))
            gain = gains[name, objective]
            sure = f", {gain.low:.2f} to {gain.high:.2f}" if gain.known else ""
            parts.append(
                f"{ours:.3g} requests/s with a budget of {its.budget} and {theirs:.3g} with "
                f"{self.baseline} ({gain.mean:.2f} times{sure}) where gaps keep {its.gap:g} s"
            )
        end = f"; published: up to {case.published:g} times" if case.published else ""
        return f"{name} sustains {', and '.join(parts)}{end}."

    def _listing(self, means: Mapping[Where, float]) -> Listing:
        rows = []
        for name, objective, its in self._objectives:
            cells = [means[name, budget, objective] for budget in self.ways]
            texts = ["–" if math.isnan(cell) else f"{cell:.3g}" for cell in cells]
            rows.append([f"{name}, {objective}: {its.gap:g} s", *texts])
        note = (
            f"With a median wait of at most {self.queue_time:g} s; each is known to "
            f"{100 * self.tolerance:g} %."
        )
        title = "Requests/s that are sustained, by the steps' budget"
        return Listing(title, ["", *self.ways], rows, note)


# -- stalls ----------------------------------------------------------------------------------------

METRICS = {"ttft": ("ttft_p50", "P50 TTFT"), "gap": ("itl_p99", "P99 gap")}
"""What was published of an arm: the key of a summary, and its name."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """An arm of the paper's ablation, in seconds."""

    budget: Budget | None
    """The corresponding one here; None: nothing here composes steps so."""
    ttft: float
    gap: float


@dataclass(frozen=True)
class Stall:
    """The longest gap of some runs, and the largest cost of a step that fills the budget."""

    gap: float
    cost: float
    """NaN where a step has no budget that prompts are cut to."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Stall:
        """Over all seeds."""
        unified = runs[0].config["batching"]["_target_"].endswith("Unified")
        cost = max(full_budget(run) for run in runs) if unified else math.nan
        return cls(max(longest_gap(run) for run in runs), cost)


@dataclass(frozen=True, kw_only=True)
class Stalls(Part):
    """Gaps between tokens at one rate of arrivals under every budget."""

    name: str
    overrides: Sequence[str]
    published: Mapping[str, Published]

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [
            Arm(arm(self.name, budget), [*self.overrides, *changes])
            for budget, changes in self.ways.items()
        ]

    def analyse(self, runs: Runs) -> Analysis:
        by_budget = {budget: runs.of(arm(self.name, budget)) for budget in self.ways}
        stalls = {budget: Stall.of(these) for budget, these in by_budget.items()}
        data = {b: {"longest_gap": one.gap, "full_budget": one.cost} for b, one in stalls.items()}
        return Analysis(
            finding=list(self._finding(by_budget, stalls)),
            rows=list(self._rows(by_budget)),
            listings=[self._listing(by_budget, stalls)],
            data={"stalls": data},
        )

    def _rows(self, by_budget: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
        for name, one in self.published.items():
            for what, (key, label) in METRICS.items():
                ours, why = math.nan, "nothing here computes chunks in steps of their own"
                if one.budget is not None:
                    values = over_seeds(by_budget[one.budget], key)
                    ours = mean(values)
                    why = f"seeds give {min(values):.3g} to {max(values):.3g} s"
                yield Row(f"{self.name}, {name}: {label}", ours, getattr(one, what), "s", why)

    def _finding(
        self, by_budget: Mapping[str, Sequence[Run]], stalls: Mapping[str, Stall]
    ) -> Iterator[str]:
        parts = []
        for name, one in self.published.items():
            if one.budget is not None:
                runs = by_budget[one.budget]
                ttft, gap = (mean(over_seeds(runs, key)) for key, _ in METRICS.values())
                parts.append(
                    f"{ttft:.2f} and {gap:.2f} s with {name} (published: {one.ttft:g} and "
                    f"{one.gap:g})"
                )
        if parts:
            yield f"{self.name}, P50 TTFT and P99 gap: {', '.join(parts)}."
        shares = {b: one.gap / one.cost for b, one in stalls.items() if not math.isnan(one.cost)}
        if shares:
            most = max(shares, key=lambda budget: shares[budget])
            yield (
                f"Where chunks run beside decodes, no gap was longer than {shares[most]:.2f} of "
                f"what a step costs that fills the budget ({most})."
            )

    def _listing(
        self, by_budget: Mapping[str, Sequence[Run]], stalls: Mapping[str, Stall]
    ) -> Listing:
        rows = []
        for budget, runs in by_budget.items():
            one = stalls[budget]
            bound = ["–", "–"]
            if not math.isnan(one.cost):
                bound = [f"{one.cost:.3g} s", f"{one.gap / one.cost:.2f}"]
            cells = [told(over_seeds(runs, key)) for key in ("ttft_p50", "ttft_p99", "itl_p99")]
            rows.append([budget, *cells, f"{one.gap:.3g} s", *bound])
        head = ["", "P50 TTFT", "P99 TTFT", "P99 gap", "longest gap", "full budget costs", "share"]
        note = (
            f"{SEEDS} A full budget costs what a step takes that computes so many tokens at the "
            "end of the longest request, beside the largest batch there was."
        )
        return Listing(f"{self.name}: gaps between tokens, by the steps' budget", head, rows, note)


def longest_gap(run: Run) -> float:
    """Between two tokens of a request that was never preempted."""
    end, decodes = arrays(run.steps("end", "decode_seqs"))
    table = run.requests("first_token", "finished", "output_tokens", "preemptions")
    first, last, tokens, preempted = arrays(table)
    plain = (tokens > 1) & (preempted == 0) & ~np.isnan(last)
    requests = (column[plain] for column in (first, last, tokens, preempted))
    gaps, _ = token_gaps(end[decodes > 0], *requests)
    return float(gaps.max(initial=0.0))


def full_budget(run: Run) -> float:
    """Seconds of a step that computes all of its budget at the end of the longest request."""
    config = RunConfig(run.config, run.seed)
    backend = config.backend
    assert isinstance(backend, Simulated)
    stage = backend.simulation(config)
    prompt, output = arrays(run.requests("prompt_tokens", "output_tokens"))
    longest = int((prompt + output).max())
    plan = StepPlan(number=0, now=0.0)
    any_request = Request(0, 1, SamplingParams(max_tokens=1))
    left = stage.scheduler.max_batched_tokens
    while left > 0:
        length = min(left, longest)
        plan.add_chunk(Chunk(any_request, longest - length, length, samples=True))
        left -= length
    batch = arrays(run.steps("decode_seqs", "decode_context"))
    plan.decode_count, plan.decode_context = (int(column.max()) for column in batch)
    return stage.cost.step_seconds(plan)


# -- crossing --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mean latencies that were published, in seconds, at a rate."""

    rate: Positive
    seconds: Annotated[Mapping[str, float], In("budgets")]
    """By budget."""


LATENCY = "e2e_mean"


@dataclass(frozen=True, kw_only=True)
class Crossing(Part):
    """Mean latency over rates, for a small and a large budget."""

    overrides: Sequence[str]
    rates: Annotated[Sequence[float], Number(above=0)]
    arrivals: Annotated[Names, Count()]
    """Arrival processes, and the overrides that make them; the first is assumed."""
    published: Sequence[Point]
    """The lowest load first; these rates are run as well."""

    def check_parts(self) -> None:
        """Raise ConfigError for budgets and rates that make no crossing."""
        if len(self.ways) != 2:
            raise ConfigError(f"crossing.budgets: {len(self.ways)} of them: must be 2")
        if len(self._rates) < 2:
            raise ConfigError("crossing.rates: must be at least 2")
        for point in self.published:
            for budget in self.ways:
                if budget not in point.seconds:
                    raise ConfigError(f"crossing.published at {point.rate:g}: lacks {budget}")

    @property
    def _rates(self) -> list[float]:
        return sorted({*self.rates, *(point.rate for point in self.published)})

    @property
    def _assumed(self) -> str:
        return next(iter(self.arrivals))

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [
            Arm(
                arm(how, budget, per_s(rate)),
                [*self.overrides, *changes, *self.ways[budget], f"workload.rate={rate:g}"],
            )
            for how, changes in self.arrivals.items()
            for budget in self.ways
            for rate in self._rates
        ]

    def analyse(self, runs: Runs) -> Analysis:
        latencies = nested(
            lambda how, budget, rate: over_seeds(runs.of(arm(how, budget, per_s(rate))), LATENCY),
            *(self.arrivals, self.ways, self._rates),
        )
        curves = nested(
            lambda how, budget, rate: mean(latencies[how][budget][rate]),
            *(self.arrivals, self.ways, self._rates),
        )
        data: dict[str, Any] = {
            "curves": nested(
                lambda how, budget: {
                    "rate": self._rates,
                    "latency": list(curves[how][budget].values()),
                },
                *(self.arrivals, self.ways),
            ),
            "published": [{"rate": p.rate, "latency": dict(p.seconds)} for p in self.published],
        }
        title, caption = (
            "Mean latency by the steps' budget",
            "Lines are ours, hollow points as published.",
        )
        rows = [
            [f"{how}, {rate:g}/s", *(told(each[budget][rate]) for budget in self.ways)]
            for how, each in latencies.items()
            for rate in self._rates
        ]
        return Analysis(
            finding=list(self._finding(curves)),
            rows=list(self._rows(runs, curves[self._assumed])),
            listings=[Listing(title, ["", *self.ways], rows, SEEDS)],
            data={"crossing": data},
            drawings={"crossing": FigureSpec(title, caption, partial(draw_crossing, data))},
            table=[
                {"arrivals": how, "budget": budget, "rate": rate, LATENCY: seconds}
                for how, each in latencies.items()
                for budget, its in each.items()
                for rate, seeds in its.items()
                for seconds in seeds
            ],
        )

    def _rows(self, runs: Runs, curves: Mapping[str, Curve]) -> Iterator[Row]:
        small, large = self.ways
        points = self.published
        for point in points:
            low = point is points[0]
            load = "low load" if low else f"{point.rate:g}/s"
            for budget in self.ways:
                if not low:
                    why = self._why_loaded(curves, budget, point)
                else:
                    why = self._why_alone(runs, point) if budget == large else ""
                ours = curves[budget][point.rate]
                yield Row(f"{load}: {budget}", ours, point.seconds[budget], "s", why)
            ours = curves[small][point.rate] / curves[large][point.rate]
            theirs = point.seconds[small] / point.seconds[large]
            why = self._why_further(runs, curves, point) if low else self._why_queues(point)
            yield Row(f"{load}: {small} / {large}", ours, theirs, "×", why)
        if len(points) > 1:
            between = points[0].rate, points[-1].rate
            yield Row("the curves cross at", crossing(curves), between, "/s")

    def _first_run(self, runs: Runs, budget: str, rate: float) -> Run:
        return runs.of(arm(self._assumed, budget, per_s(rate)))[0]

    def _why_alone(self, runs: Runs, low: Point) -> str:
        mfu = self._first_run(runs, list(self.ways)[1], low.rate).summary.get("mfu", math.nan)
        return (
            "ours are step times worked out from a data sheet, of whose FLOP/s they reach "
            f"{100 * mfu:.0f} %, and nothing outside the GPU's steps; theirs are measured"
        )

    def _why_further(self, runs: Runs, curves: Mapping[str, Curve], low: Point) -> str:
        """The cost of each further chunk, theirs and ours."""
        small, large = self.ways
        counts = []
        for budget in (small, large):
            run = self._first_run(runs, budget, low.rate)
            prompt = float(np.mean(arrays(run.requests("prompt_tokens"))[0]))
            counts.append(math.ceil(prompt / run.config["server"]["max_batched_tokens"]))
        more = counts[0] - counts[1]
        if more <= 0:
            return ""
        theirs = (low.seconds[small] - low.seconds[large]) / more
        ours = (curves[small][low.rate] - curves[large][low.rate]) / more
        return (
            f"a prompt takes {counts[0]} chunks instead of {counts[1]}, and each further one costs "
            f"{1e3 * theirs:.0f} ms there and {1e3 * ours:.1f} ms here: a step of ours costs the "
            "host's time more, and computes small chunks as fast as large ones"
        )

    def _why_loaded(self, curves: Mapping[str, Curve], budget: str, point: Point) -> str:
        """Our latency if every step took longer by the factor of a single request."""
        low, large = self.published[0], list(self.ways)[1]
        slower = low.seconds[large] / curves[large][low.rate]
        stretched = at(curves[budget], point.rate * slower) * slower
        if math.isnan(stretched):
            return ""
        return (
            f"{stretched:.3g} s if all steps took {slower:.2f} times as long, as one request alone "
            "does there"
        )

    def _why_queues(self, point: Point) -> str:
        """Whether a published rate can be served at the published latency at low load."""
        alone = min(self.published[0].seconds.values())
        load = point.rate * alone
        if load < 1:
            return ""
        return (
            f"at {point.rate:g}/s requests of {alone:g} s are {load:.2f} times what can be served "
            "one after another, so that part of these is not the server's time; which part "
            "decides how long requests queue"
        )

    def _finding(self, curves: Mapping[str, Mapping[str, Curve]]) -> Iterator[str]:
        small, large = self.ways
        points = self.published
        rates = [point.rate for point in points] or [self._rates[0], self._rates[-1]]
        for how, each in curves.items():
            shares = [each[small][rate] / each[large][rate] for rate in rates]
            times = [f"{s:.3g} times at {rate:g}/s" for s, rate in zip(shares, rates, strict=True)]
            times[0] = times[0].replace(" at ", f" as long as one of {large} at ")
            where = crossing(each)
            cross = (
                "the curves do not cross at the rates that were tried"
                if math.isnan(where)
                else f"the curves cross at {where:.2g}/s"
            )
            yield f"With {how}, a budget of {small} takes {' and '.join(times)}; {cross}."
        if points:
            each_told = (
                f"{point.seconds[small] / point.seconds[large]:.3g} at {point.rate:g}/s"
                for point in points
            )
            yield f"Published: {' and '.join(each_told)}."


def draw_crossing(data: Mapping[str, Any]) -> Figure:
    """A panel for each arrival process, a line for each budget."""
    points = data["published"]
    most = max((max(one["latency"].values()) for one in points), default=None)
    panels = [
        Panel(
            lines={budget: (curve["rate"], curve["latency"]) for budget, curve in each.items()},
            published={
                budget: ([p["rate"] for p in points], [p["latency"][budget] for p in points])
                for budget in each
            },
            floor=most is not None,
            top=2 * most if most is not None else None,
            title=how,
            x="requests/s",
            y=None if number else "mean latency (s)",
        )
        for number, (how, each) in enumerate(data["curves"].items())
    ]
    return draw_panels([panels], 3.6, share={"sharey": True}, wspace=0.08)


# -- short requests beside long prompts ------------------------------------------------------------

COLUMNS = {
    "ttft_p50": "P50 TTFT",
    "ttft_p99": "P99 TTFT",
    "itl_p99": "P99 gap",
    "e2e_mean": "mean E2E",
}
BESIDE = "beside long prompts"


@dataclass(frozen=True, kw_only=True)
class Beside(Part):
    """Two classes of clients under every bound on a prompt's chunk; the first of `budgets` has
    none."""

    overrides: Sequence[str]
    short: str
    """The client whose requests are short."""
    long: str

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [
            Arm(arm(BESIDE, bound), [*self.overrides, *changes])
            for bound, changes in self.ways.items()
        ]

    def check(self, jobs: Sequence[Job]) -> None:
        arms = [arm(BESIDE, bound) for bound in self.ways]
        for job in jobs:
            if job.arm not in arms:
                continue
            there = RunConfig(job.config, job.seed).workload().clients
            for client in (self.short, self.long):
                if client not in there:
                    names = ", ".join(filter(None, there)) or "none with a name"
                    raise ConfigError(
                        f"study.beside: {client}: no such client in the workload; it has {names}"
                    )

    def analyse(self, runs: Runs) -> Analysis:
        found = nested(
            lambda bound, client, key: [
                run.summary["clients"][client][key] for run in runs.of(arm(BESIDE, bound))
            ],
            *(self.ways, (self.short, self.long), COLUMNS),
        )
        rows = [
            [f"{bound}: {client}", *map(told, values.values())]
            for bound, each in found.items()
            for client, values in each.items()
        ]
        data = nested(
            lambda bound, client, key: mean(found[bound][client][key]),
            *(self.ways, (self.short, self.long), COLUMNS),
        )
        head = ["", *COLUMNS.values()]
        return Analysis(
            finding=list(self._finding(data)),
            listings=[Listing("Short requests beside long prompts", head, rows, SEEDS)],
            data={BESIDE: data},
        )

    def _finding(self, means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
        first, *others = means
        if others:
            best = min(others, key=lambda bound: means[bound][self.short]["ttft_p99"])
            tail, its_tail = (means[bound][self.short]["ttft_p99"] for bound in (first, best))
            half, its_half = (means[bound][self.long]["ttft_p50"] for bound in (first, best))
            yield (
                f"Beside long prompts, {best} instead of {first} take the P99 TTFT of {self.short} "
                f"from {tail:.3g} to {its_tail:.3g} s, and the P50 TTFT of {self.long} from "
                f"{half:.3g} to {its_half:.3g} s."
            )


# -- the study -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChunkBudget(Study):
    """Four parts, each with settings of its own; one that is null is left out.

    `budgets` are the ways to compose a step that parts compare unless they have their own.
    """

    backends: ClassVar[Sequence[BackendName]] = ("sim",)
    one_server = True
    why = "what was published is simulated here"

    title: str
    question: str
    source: str
    budgets: Names
    capacity: Capacity | None
    stalls: Stalls | None
    crossing: Crossing | None
    beside: Beside | None

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("capacity", "stalls", "crossing", "beside"):
            part = getattr(self, name)
            if part is not None and part.budgets is None:
                object.__setattr__(self, name, replace(part, budgets=self.budgets))
        if not self.parts:
            raise ConfigError("study: one of capacity, stalls, crossing, beside must be given")
        if self.crossing is not None:
            self.crossing.check_parts()
        for part in self.parts:
            check_overrides(part.ways)

    @property
    def parts(self) -> list[Part]:
        """Those that are given, the most telling first."""
        every = (self.capacity, self.stalls, self.crossing, self.beside)
        return [part for part in every if part is not None]

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [arm for part in self.parts for arm in part.next_runs(runs)]

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if (arrivals := job.config["workload"].get("arrivals")) in WITHOUT_RATE:
                raise ConfigError(
                    f"workload.arrivals={arrivals}: has no rate, which every part sets: must be "
                    "one of poisson, gamma, fixed"
                )
        for part in self.parts:
            part.check(jobs)

    def analyse(self, runs: Runs) -> Analysis:
        reading = combined(part.analyse(runs) for part in self.parts)
        return replace(reading, notes=[*reading.notes, *runs.notices()], table=reading.table or ())
