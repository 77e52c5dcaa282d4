"""The token budget of a step (Sarathi-Serve): the rate that each budget sustains, and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.comparison import unsure
from pagedsim.experiments.papers.panels import draw_bar_panels
from pagedsim.experiments.papers.reproduction import Names, arm
from pagedsim.experiments.papers.study import Figures
from pagedsim.experiments.studies.bisection import Bisection
from pagedsim.experiments.studies.capacity import WITHOUT_RATE
from pagedsim.experiments.studies.compare import check_overrides
from pagedsim.metrics.compare import NO_ESTIMATE, Column, Estimate
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import number
from pagedsim.run.job import Arm, Job
from pagedsim.run.runs import Key, Runs
from pagedsim.run.study import Analysis
from pagedsim.spec.check import In, Number, Positive

Budget = Annotated[str, In("budgets")]
Where = tuple[str, str, str]
"""A case, a budget, and an objective."""


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


def run_at(case: str, budget: str, rate: float) -> str:
    """The name of the run at a rate, which searches under other objectives share."""
    return arm(case, budget, f"{rate:g} per s")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The highest rate at which the median wait and the gaps between tokens keep an objective."""

    budgets: Names
    """Ways to compose a step, and the overrides that make them."""
    cases: Mapping[str, Case]
    baseline: Budget
    queue_time: Annotated[float, Number(0)]
    """Seconds that half of all requests may wait before they are scheduled."""
    tolerance: Annotated[float, Number(0.001, 0.5)]

    def next_runs(self, runs: Runs) -> list[Arm]:
        """One run for each search that has not ended."""
        seeds = runs.spec.seeds
        wanted: dict[Key, Arm] = {}
        for (case, budget, _), searches in self._searches(runs).items():
            changes = [*self.cases[case].overrides, *self.budgets[budget]]
            for seed, search in zip(seeds, searches, strict=True):
                if (rate := search.next()) is None:
                    continue
                name = run_at(case, budget, rate)
                if (name, seed) not in runs.failed and (name, seed) not in runs.repeated:
                    sets = {"workload.rate": rate}
                    wanted[name, seed] = Arm(name, changes, sets, [seed], seeds[0])
        return list(wanted.values())

    def _searches(self, runs: Runs) -> dict[Where, list[Bisection]]:
        """For each case, budget and objective one search per seed, fed with all finished runs."""
        return {
            (name, budget, objective): [
                self._fed(runs, (name, budget, objective), seed) for seed in runs.spec.seeds
            ]
            for name, case in self.cases.items()
            for budget in self.budgets
            for objective in case.objectives
        }

    def _fed(self, runs: Runs, where: Where, seed: int) -> Bisection:
        case, budget, objective = where
        gap = self.cases[case].objectives[objective].gap
        search = Bisection(self.cases[case].start, self.tolerance)
        while (rate := search.next()) is not None:
            if (run := runs.finished.get((run_at(case, budget, rate), seed))) is None:
                break
            summary = run.summary
            met = summary["finished"] and not (
                summary["itl_p99"] > gap or summary["queue_time_p50"] > self.queue_time
            )
            search.tell(rate, bool(met))
        return search

    def analyse(self, runs: Runs) -> Analysis:
        """Sustained rates, and each published budget's over the baseline's."""
        capacities = {
            where: [search.low or math.nan for search in searches if search.answers]
            for where, searches in self._searches(runs).items()
        }
        objectives = {
            arm(name, objective): (name, objective)
            for name, case in self.cases.items()
            for objective in case.objectives
        }
        columns = {at: self._column(capacities, *at) for at in objectives.values()}
        rates = {
            what: {budget: columns[at].mean(budget) for budget in self.budgets}
            for what, at in objectives.items()
        }
        bars = {
            what: {b: None if math.isnan(rate) else rate for b, rate in by_budget.items()}
            for what, by_budget in rates.items()
        }
        title = "Requests a second within an objective"
        caption = (
            "The highest rate at which the 99th percentile of the gaps between tokens and the "
            "median wait keep their bounds"
        )
        caption += "; geometric mean over seeds." if len(runs.spec.seeds) > 1 else "."
        cells = [[what, *map(number, by_budget.values())] for what, by_budget in rates.items()]
        gains = {name: self._gains(columns, name) for name in self.cases}
        return Analysis(
            finding=[self._sentence(name, its) for name, its in gains.items()],
            rows=[row for name, its in gains.items() for row in self._rows(name, its)],
            listings=[Listing(title, ["", *self.budgets], cells, caption)],
            data={"capacity": rates},
            drawings={
                "capacity": FigureSpec(
                    title, caption, partial(draw_bar_panels, {"requests/s": bars}, "{:.2g}")
                )
            },
            table=[
                {"case": case, "objective": objective, "budget": budget, "requests_per_s": rate}
                for (case, budget, objective), seeds in capacities.items()
                for rate in seeds
            ],
        )

    def _column(
        self, capacities: Mapping[Where, Sequence[float]], case: str, objective: str
    ) -> Column:
        """The rates of every budget within an objective."""
        seeds = {
            budget: dict(enumerate(capacities[case, budget, objective]))
            for budget in dict.fromkeys([self.baseline, *self.budgets])
        }
        return Column(
            {
                budget: {seed: rate for seed, rate in rates.items() if not math.isnan(rate)}
                for budget, rates in seeds.items()
            }
        )

    def _gains(self, columns: Mapping[tuple[str, str], Column], case: str) -> dict[str, Estimate]:
        """By objective, what the paper's budget gains over the baseline."""
        gains = {}
        for objective, its in self.cases[case].objectives.items():
            gain = columns[case, objective].compare(its.budget, self.baseline)
            gains[objective] = gain.ratio if gain is not None else NO_ESTIMATE
        return gains

    def _sentence(self, name: str, gains: Mapping[str, Estimate]) -> str:
        case = self.cases[name]
        parts = [
            f"{number(gain.mean, '×')} with {case.objectives[objective].budget} ({objective}"
            + (", no sure difference)" if unsure(gain) else ")")
            for objective, gain in gains.items()
        ]
        claim = case.published
        published = "" if claim is None else f"; published: up to {number(claim, '×')}"
        return (
            f"Rate within the objective for {name}, compared with {self.baseline}: "
            f"{', '.join(parts)}{published}."
        )

    def _rows(self, name: str, gains: Mapping[str, Estimate]) -> list[Row]:
        case = self.cases[name]
        rows = [
            Row(
                f"{name}, {objective}: {case.objectives[objective].budget} / {self.baseline}",
                gain.mean,
                unit="×",
                why=f"{gain.low:.2f} to {gain.high:.2f} with 95 % confidence" if gain.known else "",
            )
            for objective, gain in gains.items()
        ]
        known = [gain.mean for gain in gains.values() if not math.isnan(gain.mean)]
        if not known:
            return rows
        what, claim = f"{name}: largest gain of a budget", case.published
        return [Row(what, max(known), claim, "×", up_to=claim is not None), *rows]


@dataclass(frozen=True, kw_only=True)
class ChunkBudget(Figures):
    """The search for capacities, and figures; each may be left out."""

    capacity: Capacity | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity is not None:
            check_overrides(self.capacity.budgets)
        elif not self.figures:
            raise ConfigError("study: capacity or one of figures must be given")

    def next_runs(self, runs: Runs) -> list[Arm]:
        searched = self.capacity.next_runs(runs) if self.capacity is not None else []
        return [*searched, *super().next_runs(runs)]

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if (arrivals := job.config["workload"].get("arrivals")) in WITHOUT_RATE:
                raise ConfigError(
                    f"workload.arrivals={arrivals}: has no rate, which every part sets: must be "
                    "one of poisson, gamma, fixed"
                )

    def analyse(self, runs: Runs) -> Analysis:
        figures = super().analyse(runs)
        if self.capacity is None:
            return figures
        searched = self.capacity.analyse(runs)
        return replace(
            figures,
            finding=[*searched.finding, *figures.finding],
            rows=[*searched.rows, *figures.rows],
            listings=[*searched.listings, *figures.listings],
            data={**searched.data, **figures.data},
            drawings={**searched.drawings, **figures.drawings},
            table=searched.table,
        )
