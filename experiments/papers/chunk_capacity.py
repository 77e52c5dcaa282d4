"""What a budget does to the rate that is sustained while tokens keep coming (Sarathi-Serve)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.papers.chunk_drawings import draw_capacity
from experiments.papers.chunk_part import Part
from experiments.studies.bisection import Bisection
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, estimate, paired_ratio
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.job import Arm
from pagedsim.run.objects import each_of, require_kinds
from pagedsim.run.runs import Key, Runs
from pagedsim.run.study import Reading

RATE = "workload.rate"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the tokens of a case must keep, and the budget that the paper gives it."""

    gap: float
    """Seconds between two tokens of a request, at the 99th percentile."""
    budget: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """A server and its requests."""

    overrides: Sequence[str]
    start: float
    """Requests/s at which a search begins."""
    objectives: Mapping[str, Mapping[str, Any]]
    """Settings of `Objective`."""
    published: float | None = None
    """The largest gain that a budget was found to give."""


class Search(Bisection):
    """That of one budget under one objective and seed."""

    def __init__(self, start: float, tolerance: float, name: str, gap: float, seed: int) -> None:
        super().__init__(start, tolerance)
        self.name, self.gap, self.seed = name, gap, seed

    def key(self, rate: float) -> Key:
        """Of the run at a rate, which searches under other objectives share."""
        return f"{self.name}, {rate:g} per s", self.seed


@dataclass(frozen=True, kw_only=True)
class Capacity(Part):
    """The highest rate at which the median wait and the gaps between tokens keep an objective."""

    cases: Mapping[str, Mapping[str, Any]]
    """Settings of `Case`."""
    baseline: str
    queue_time: float
    """Seconds that half of all requests may wait before they are begun."""
    tolerance: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("study.capacity.queue_time", self.queue_time, 0)
        require_number("study.capacity.tolerance", self.tolerance, 0.001, 0.5)
        self.require_budget("study.capacity.baseline", self.baseline)
        for name, case in self._cases.items():
            require_kinds(case, f"study.capacity.cases.{name}")
            require_number(f"study.capacity.cases.{name}.start", case.start, 1e-6)
            for objective in self._objectives(name).values():
                require_kinds(objective)
                require_number(f"study.capacity.cases.{name}: gap", objective.gap, above=0)
                self.require_budget(f"study.capacity.cases.{name}", objective.budget)

    @property
    def _cases(self) -> dict[str, Case]:
        return each_of(Case, self.cases, "study.capacity.cases")

    def _objectives(self, name: str) -> dict[str, Objective]:
        given = Case(**self.cases[name]).objectives
        return each_of(Objective, given, f"study.capacity.cases.{name}.objectives")

    # -- searching ---------------------------------------------------------------------------------

    def ask(self, runs: Runs) -> list[Arm]:
        seeds, cases = runs.command.seeds, self._cases
        wanted: dict[Key, Arm] = {}
        for (case, budget, _), searches in self._searches(runs).items():
            changes = [*cases[case].overrides, *self.budgets[budget]]
            for search in searches:
                if (rate := search.next()) is None:
                    continue
                name, seed = search.key(rate)
                if (name, seed) not in runs.failed and (name, seed) not in runs.repeated:
                    wanted[name, seed] = Arm(name, changes, {RATE: rate}, [seed], seeds[0])
        return list(wanted.values())

    def _searches(self, runs: Runs) -> dict[tuple[str, str, str], list[Search]]:
        """Of each case, budget and objective, one a seed, told of all that has run."""
        return {
            (name, budget, objective): list(self._of(runs, name, case.start, budget, its.gap))
            for name, case in self._cases.items()
            for budget in self.budgets
            for objective, its in self._objectives(name).items()
        }

    def _of(self, runs: Runs, case: str, start: float, budget: str, gap: float) -> Iterator[Search]:
        for seed in runs.command.seeds:
            search = Search(start, self.tolerance, f"{case}, {budget}", gap, seed)
            while (rate := search.next()) is not None:
                if (run := runs.finished.get(search.key(rate))) is None:
                    break
                search.tell(rate, self._met(run, gap))
            yield search

    def _met(self, run: Run, gap: float) -> bool:
        summary = run.summary
        if not summary["finished"]:
            return False
        return not (summary["itl_p99"] > gap or summary["queue_time_p50"] > self.queue_time)

    # -- reading -----------------------------------------------------------------------------------

    def read(self, runs: Runs) -> Reading:
        found = {
            where: [search.low or math.nan for search in searches if search.answers]
            for where, searches in self._searches(runs).items()
        }
        means = {where: estimate(rates) for where, rates in found.items()}
        gains = {
            (name, objective): self._gain(found, name, its.budget, objective)
            for name in self.cases
            for objective, its in self._objectives(name).items()
        }
        shown = {
            f"{name}, {objective}": {b: means[name, b, objective].mean for b in self.budgets}
            for name in self.cases
            for objective in self._objectives(name)
        }
        return Reading(
            finding=[self._told(name, gains, means) for name in self.cases],
            rows=[row for name in self.cases for row in self._rows(name, gains, means)],
            listings=[self._listing(means)],
            data={"capacity": shown},
            drawings={
                "capacity": Drawing(
                    "Requests a second within an objective",
                    "The highest rate at which the 99th percentile of the gaps between tokens "
                    "and the median wait keep their bounds.",
                    partial(draw_capacity, shown),
                )
            },
            table=[
                {"case": case, "objective": objective, "budget": budget, "requests_per_s": rate}
                for (case, budget, objective), rates in found.items()
                for rate in rates
            ],
        )

    def _gain(
        self,
        found: Mapping[tuple[str, str, str], Sequence[float]],
        case: str,
        budget: str,
        objective: str,
    ) -> Estimate:
        pairs = zip(
            found[case, budget, objective], found[case, self.baseline, objective], strict=True
        )
        there = [pair for pair in pairs if not math.isnan(sum(pair))]
        return paired_ratio([ours for ours, _ in there], [theirs for _, theirs in there])

    def _rows(
        self,
        name: str,
        gains: Mapping[tuple[str, str], Estimate],
        means: Mapping[tuple[str, str, str], Estimate],
    ) -> list[Row]:
        objectives = self._objectives(name)
        each = {one: gains[name, one].mean for one in objectives}
        rows = [
            Row(f"{name}, {one}: {its.budget} / {self.baseline}", each[one], None, "×")
            for one, its in objectives.items()
        ]
        there = {one: gain for one, gain in each.items() if not math.isnan(gain)}
        if not there:
            return rows
        most = max(there, key=lambda one: there[one])
        published = self._cases[name].published
        what = f"{name}: the largest gain of a budget"
        why = self._why(objectives[most], means[name, self.baseline, most]) if published else ""
        return [Row(what, there[most], published, "×", why), *rows]

    def _why(self, objective: Objective, rate: Estimate) -> str:
        """What the baseline's rate is bound by."""
        return (
            f"{self.baseline} sustains {rate.mean:.3g}/s, where one gap in a hundred holds prompts "
            f"that take {objective.gap:g} s: how many do depends on the lengths, of which means "
            "and spreads are as published and the shape is assumed"
        )

    def _told(
        self,
        name: str,
        gains: Mapping[tuple[str, str], Estimate],
        means: Mapping[tuple[str, str, str], Estimate],
    ) -> str:
        parts = []
        for objective, its in self._objectives(name).items():
            ours, theirs = (means[name, b, objective].mean for b in (its.budget, self.baseline))
            gain = gains[name, objective]
            sure = f", {gain.low:.2f} to {gain.high:.2f}" if gain.known else ""
            parts.append(
                f"{ours:.3g} requests/s with a budget of {its.budget} and {theirs:.3g} with "
                f"{self.baseline} ({gain.mean:.2f} times{sure}) where gaps keep {its.gap:g} s"
            )
        published = self._cases[name].published
        end = f"; published: up to {published:g} times" if published else ""
        return f"{name} sustains {', and '.join(parts)}{end}."

    def _listing(self, means: Mapping[tuple[str, str, str], Estimate]) -> Listing:
        rows = []
        for name in self.cases:
            for objective, its in self._objectives(name).items():
                cells = [means[name, budget, objective].mean for budget in self.budgets]
                texts = ["–" if math.isnan(cell) else f"{cell:.3g}" for cell in cells]
                rows.append([f"{name}, {objective}: {its.gap:g} s", *texts])
        return Listing(
            "Requests/s that are sustained, by the steps' budget",
            ["", *self.budgets],
            rows,
            f"With a median wait of at most {self.queue_time:g} s; each is known to "
            f"{100 * self.tolerance:g} %.",
        )
