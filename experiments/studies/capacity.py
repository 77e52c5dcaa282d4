"""Capacity: the highest rate of arrivals at which each arm still meets an objective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

from pagedsim.core import ConfigError
from pagedsim.experiments.studies.bisection import (
    Bisection,
    Bound,
    bounds_of,
    missed,
    validate_clients,
)
from pagedsim.experiments.studies.capacity_figures import draw_capacity
from pagedsim.experiments.studies.compare import check_baseline, check_overrides, ordinary
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import scale_of
from pagedsim.metrics.compare import NO_ESTIMATE, Estimate, average, paired_ratio
from pagedsim.metrics.result import Listing, added_up, of_whom
from pagedsim.metrics.stability import mean_backlogs, overload_of
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.table import margin_of
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.launch import launch_of
from pagedsim.run.runs import Key, Runs, changed_note
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.check import Number, check_settings
from pagedsim.spec.run import RunSpec
from pagedsim.spec.words import key_of

RATE = "workload.rate"
WITHOUT_RATE = ("closed", "burst")
OVERLOAD = "overload"
"""What misses any objective: the backlog grows for as long as requests come."""
SHORT = "too short to tell"
"""What misses it, too: runs in which the backlog grew, perhaps only as batches filled up, or left
many requests waiting."""


@dataclass(frozen=True)
class Capacity(Study):
    """A search for each arm under each seed, in rounds: each asks every search for one run.

    A rate that overloads the server misses the objective, whatever its bounds.
    `arms` are named overrides as in a comparison (None: `usual`); `bounds` maps latencies to
    seconds, or clients to such mappings; `tolerance` is how near the ends of an edge must be.
    """

    backends = ("sim",)
    why = "a search takes hundreds of runs; experiment=compare takes the engine at a rate"
    whole = False
    keeps_tables = False

    title: str
    question: str
    bounds: Mapping[str, object]
    usual: Mapping[str, Sequence[str]]
    arms: Mapping[str, Sequence[str]] | None = None
    baseline: str | None = None
    start: Annotated[float | None, Number(1e-6)] = None
    tolerance: Annotated[float, Number(0.001, 0.5)] = 0.02
    _own: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self)
        bounds_of(self.bounds)
        check_overrides(self.searched)
        for arm, changes in self.searched.items():
            for change in changes:
                if key_of(change) == RATE:
                    raise ConfigError(f"arms.{arm}: {change}: is what the search varies")
        check_baseline(self.baseline, self.searched)

    @property
    def searched(self) -> Mapping[str, Sequence[str]]:
        return self.usual if self.arms is None else self.arms

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [
            self.probe(search, rate, runs.spec.seeds[0])
            for search in Searches(self, runs).open
            if (rate := search.next()) is not None
        ]

    def started(self, runs: Runs) -> float:
        """The first rate to try: that of a trace is looked up once."""
        config = runs.config
        rate: float | None = self.start or config["workload"].get("rate")
        if rate is None and not self._own:
            workload = RunSpec(config, config["seed"]).workload()
            self._own.append(workload.rate)
        return self._own[0] if rate is None else rate

    def probe(self, search: Search, rate: float, first: int) -> Arm:
        """An ordinary run at a rate; left out where seeds after the first change nothing."""
        changes = self.searched[search.arm]
        return Arm(probe_name(search.arm, rate), changes, {RATE: rate}, [search.seed], first)

    def check(self, jobs: Sequence[Job]) -> None:
        bounds = bounds_of(self.bounds)
        for job in jobs:
            require_rate(job, "a search needs")
            if any(bound.client is not None for bound in bounds):
                asked = RunSpec(job.config, job.seed).workload()
                validate_clients(bounds, asked.clients)

    def analyse(self, runs: Runs) -> Analysis | None:
        return Searches(self, runs).reading() if runs.finished else None

    def key_of(self, arm: str) -> str:
        return f"study.arms.{arm.rpartition(' at ')[0]}"

    def progress(self, runs: Runs) -> str:
        over = len(Searches(self, runs).over)
        return (
            f"{over} of {len(self.searched)} arms are searched to the end, after "
            f"{len(runs.finished)} runs"
        )


def require_rate(job: Job, why: str) -> None:
    """Raise ConfigError for arrivals without a rate."""
    if (arrivals := job.config["workload"].get("arrivals")) in WITHOUT_RATE:
        raise ConfigError(
            f"workload.arrivals={arrivals}: has no rate; {why} one of poisson, gamma, fixed, or a "
            "trace's own"
        )


def probe_name(arm: str, rate: float) -> str:
    """Name of a probe's run."""
    return f"{arm} at {rate:g} per s"


# -- the search ------------------------------------------------------------------------------------


class Search(Bisection):
    """The search for one arm under one seed, with its runs."""

    def __init__(
        self, arm: str, seed: int, bounds: Sequence[Bound], start: float, tolerance: float
    ) -> None:
        super().__init__(start, tolerance)
        self.arm, self.seed, self.bounds = arm, seed, bounds
        self.runs: dict[float, Run] = {}

    def answer(self, rate: float, run: Run) -> None:
        self.runs[rate] = run
        self.tell(rate, not self.missed(rate))

    def missed(self, rate: float) -> list[str]:
        summary = self.runs[rate].summary
        if not summary["finished"]:
            return ["every bound: nothing was served"]
        names = [bound.name for bound in missed(self.bounds, summary)]
        judged = mean_backlogs([summary])
        if overload_of(judged) is not None:
            return [*names, OVERLOAD]
        return [*names, SHORT] if any(backlog.unsure for backlog in judged) else names


@dataclass(frozen=True)
class ArmCapacity:
    """The result of an arm's searches, one per seed."""

    name: str
    searches: Sequence[Search]

    @property
    def rate(self) -> Estimate:
        """Geometric mean over seeds of the highest rate that met the objective; NaN if a search has
        no edge."""
        if any(search.low is None or search.high is None for search in self.searches):
            return NO_ESTIMATE
        return average(list(self.lows.values()))

    @property
    def lows(self) -> dict[int, float]:
        """The highest rate that met the objective, by seed, where there is one."""
        return {search.seed: low for search in self.searches if (low := search.low) is not None}

    @property
    def lowest_runs(self) -> list[Run]:
        """The runs at these rates."""
        return [search.runs[low] for search in self.searches if (low := search.low) is not None]

    @property
    def missed_from(self) -> float:
        """Mean rate from which on all probes missed the objective: the other end of the bracket."""
        rates = [search.missed_from or math.nan for search in self.searches]
        return math.nan if any(map(math.isnan, rates)) else average(rates).mean

    @property
    def output_tokens_per_s(self) -> float:
        return average([run.summary["output_tokens_per_s"] for run in self.lowest_runs]).mean

    @property
    def binds(self) -> str:
        """The bounds violated just above, with the number of seeds if not all."""
        highs = [(search, high) for search in self.searches if (high := search.high) is not None]
        every = Counter(name for search, high in highs for name in search.missed(high))
        seeds = len(self.searches)
        return ", ".join(
            name if count == seeds else f"{name} ({count} of {seeds})"
            for name, count in every.most_common()
        )

    @cached_property
    def hidden(self) -> float:
        """Share of the arrivals at this rate that may exceed what can be completed without being
        detected: the backlog grows as much by chance, or that much was left at the last arrival."""
        summaries = [run.summary for run in self.lowest_runs]
        stages = mean_backlogs(summaries)
        if not stages:
            return math.nan
        left = max(stage.present for stage in stages) / stages[0].requests
        chance = 2 / math.sqrt(len(summaries) * stages[0].requests)
        return min(left + chance, max(stage.growth.high for stage in stages))

    @property
    def nowhere(self) -> str:
        """Why a search has no edge; empty if all have one."""
        for search in self.searches:
            if search.low is None:
                least = min(search.runs)
                missed = ", ".join(search.missed(least))
                return f"no rate meets it: at {least:g}/s it misses {missed}"
            if search.high is None:
                most = max(search.runs)
                return f"no rate misses it, even {most:g}/s: more requests would overload it"
        return ""

    def ratio_to(self, other: ArmCapacity) -> Estimate:
        """Geometric mean over seeds of the ratios to another arm."""
        if math.isnan(self.rate.mean) or math.isnan(other.rate.mean):
            return NO_ESTIMATE
        ours, theirs = self.lows, other.lows
        seeds = [seed for seed in ours if seed in theirs]
        return paired_ratio([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


class Searches:
    """All searches with their runs so far, and the results."""

    def __init__(self, study: Capacity, runs: Runs) -> None:
        self.study, self.runs = study, runs
        self.bounds = bounds_of(study.bounds)
        start = study.started(runs)
        self.searches: dict[Key, Search] = {}
        self.failed: dict[str, Failure] = {}
        """By arm."""
        for seed in runs.spec.seeds:
            for arm in study.searched:
                search = Search(arm, seed, self.bounds, start, study.tolerance)
                if self._replay(search):
                    self.searches[arm, seed] = search

    def _replay(self, search: Search) -> bool:
        while (rate := search.next()) is not None:
            key = probe_name(search.arm, rate), search.seed
            if key in self.runs.repeated:
                return False
            if failure := self.runs.failed.get(key):
                self.failed.setdefault(search.arm, failure)
            if (run := self.runs.finished.get(key)) is None:
                break
            search.answer(rate, run)
        return True

    @property
    def open(self) -> list[Search]:
        every = self.searches.values()
        return [s for s in every if s.arm not in self.failed and s.next() is not None]

    @property
    def over(self) -> list[str]:
        open_arms = {search.arm for search in self.open} | self.failed.keys()
        return [arm for arm in self.study.searched if arm not in open_arms]

    # -- what came of it ---------------------------------------------------------------------------

    @cached_property
    def arms(self) -> list[ArmCapacity]:
        every = self.searches.values()
        return [
            ArmCapacity(arm, [search for search in every if search.arm == arm]) for arm in self.over
        ]

    @property
    def baseline(self) -> str:
        return self.study.baseline or next(iter(self.study.searched))

    @property
    def missing(self) -> dict[str, str]:
        """The other arms, with the reasons."""
        reasons = {arm: str(failure) for arm, failure in self.failed.items()}
        stopped = [arm for arm in self.study.searched if arm not in {*reasons, *self.over}]
        return reasons | dict.fromkeys(stopped, "the search was interrupted")

    def reading(self) -> Analysis:
        data = self._data()
        scales = {bound.name: scale_of(bound.key, [bound.seconds]) for bound in self.bounds}
        caption = (
            "The rate found for each arm; in its colour below every probe under seed "
            f"{self.runs.spec.seeds[0]} is a point, hollow where it missed any bound; dashed: "
            "this bound. On the grey front nothing serves more requests a second at a lower "
            "latency."
        )
        picture = FigureSpec("Rate against latency", caption, partial(draw_capacity, data, scales))
        arms = [arm for arm in self.arms if not arm.nowhere]
        return Analysis(
            finding=self._finding(),
            listings=[self._listing()] if self.arms else [],
            notes=list(self._notes()),
            data=data,
            drawings={"capacity": picture} if self.arms else {},
            table=list(map(self._row, self.arms)),
            again={
                f"The run at the rate found, first seed: {arm.name}": self._command(arm)
                for arm in arms
            },
            launch=self._launch(),
            failed=self.missing,
            wrong=self.failed,
        )

    def _launch(self) -> str:
        """What starts the server of the arm that serves most; empty where none serves any."""
        if not (feasible := [arm for arm in self.arms if not math.isnan(arm.rate.mean)]):
            return ""
        best = max(feasible, key=lambda arm: arm.rate.mean)
        changes = self.study.searched[best.name]
        return launch_of(self.runs.spec.configured(f"study.arms.{best.name}", changes))

    def _change(self, arm: ArmCapacity) -> Estimate:
        """Ratio of an arm to the baseline; NaN for the baseline itself or if it is missing."""
        for other in self.arms:
            if other.name == self.baseline and other is not arm:
                return arm.ratio_to(other)
        return NO_ESTIMATE

    def _command(self, arm: ArmCapacity) -> str:
        """The command that repeats the run at the rate found under the first seed; empty without a
        rate."""
        first = arm.searches[0]
        if first.low is None:
            return ""
        probe = self.study.probe(first, first.low, first.seed)
        return ordinary(self.runs.spec, self.study.key_of(probe.name), probe, first.seed)

    def _finding(self) -> list[str]:
        objective = ", ".join(bound.text for bound in self.bounds)
        if not self.arms:
            return ["No arm was searched to the end."]
        feasible = [arm for arm in self.arms if not math.isnan(arm.rate.mean)]
        if not feasible:
            return [f"No arm has a highest rate that meets {objective}."]
        best, worst = (pick(feasible, key=lambda arm: arm.rate.mean) for pick in (max, min))
        lines = [
            f"Within {objective}, {best.name} serves most, {best.rate.mean:.3g} requests/s"
            + (f", and {worst.name} least, {worst.rate.mean:.3g}." if worst is not best else ".")
        ]
        sure = [(arm, change) for arm in feasible if _sure(change := self._change(arm))]
        if sure:
            changes = ", ".join(f"{arm.name} ({signed(change.mean - 1)})" for arm, change in sure)
            lines.append(f"Surely other than {self.baseline} are {changes}.")
        elif len(feasible) > 1:
            lines.append(f"No arm is surely other than {self.baseline}.")
        return lines

    def _data(self) -> dict[str, Any]:
        return {
            "objective": {bound.name: bound.seconds for bound in self.bounds},
            "tolerance": self.study.tolerance,
            "baseline": self.baseline,
            "arms": {
                arm.name: {
                    "requests_per_s": arm.rate._asdict(),
                    "missed_from": arm.missed_from,
                    "output_tokens_per_s": arm.output_tokens_per_s,
                    "hidden_overload": arm.hidden,
                    "binds": arm.binds,
                    "nowhere": arm.nowhere,
                    "against_baseline": self._change(arm)._asdict(),
                    "command": self._command(arm),
                    "seeds": {search.seed: self._of_seed(search) for search in arm.searches},
                }
                for arm in self.arms
            },
            "failed": self.missing,
        }

    def _of_seed(self, search: Search) -> dict[str, Any]:
        return {
            "met_up_to": search.low,
            "missed_from": search.missed_from,
            "contradictions": search.contradictions,
            "probes": [
                {
                    "rate": rate,
                    "values": {bound.name: bound.of(run.summary) for bound in self.bounds},
                    "missed": search.missed(rate),
                    "output_tokens_per_s": run.summary["output_tokens_per_s"],
                }
                for rate, run in sorted(search.runs.items())
            ],
        }

    def _row(self, arm: ArmCapacity) -> dict[str, object]:
        rate, change = arm.rate, self._change(arm)
        return {
            "arm": arm.name,
            "requests_per_s": rate.mean,
            "requests_per_s_low": rate.low,
            "requests_per_s_high": rate.high,
            "missed_from": arm.missed_from,
            "output_tokens_per_s": arm.output_tokens_per_s,
            "ratio": change.mean,
            "ratio_low": change.low,
            "ratio_high": change.high,
            "binds": arm.nowhere or arm.binds,
        }

    def _listing(self) -> Listing:
        against = f"against {self.baseline}"
        head = ["", "requests/s", "missed from", "output tokens/s", against, "binds"]
        rows = [
            [arm.name, "–", "–", "–", "–", arm.nowhere]
            if arm.nowhere
            else [
                arm.name,
                _with_margin(arm.rate),
                f"{arm.missed_from:.3g}",
                f"{arm.output_tokens_per_s:,.0f}",
                "" if arm.name == self.baseline else _in_brackets(self._change(arm)),
                arm.binds,
            ]
            for arm in self.arms
        ]
        seeds = max(len(arm.searches) for arm in self.arms)
        over, sure = "", ", of one seed: not known how sure"
        if seeds > 1:
            over = f"geometric mean over {seeds} seeds with the 95 % confidence interval; "
            sure = ", in brackets where not sure"
        note = (
            f"Requests/s: the highest rate that met the objective, {over}each edge is searched to "
            f"{percent(self.study.tolerance, 0)}; binds: what fails just above. Against "
            f"{self.baseline}: the ratio of the means{sure}."
        )
        return Listing("Within the objective", head, rows, note)

    def _notes(self) -> Iterator[str]:
        if self.runs.repeated:
            yield "under every seed the workload is the same, so each arm has one search"
        if self.runs.changed:
            yield changed_note(self.runs.changed)
        for search in (search for arm in self.arms for search in arm.searches):
            if rates := search.contradictions:
                met = ", ".join(f"{rate:g}" for rate in rates)
                yield (
                    f"{search.arm}, seed {search.seed}: missed at {search.high:g}/s, and yet met "
                    f"at {met}/s: there chance decides"
                )
        yield from self._hidden()
        lows = {arm.name: [run.summary for run in arm.lowest_runs] for arm in self.arms}
        yield from of_whom({arm: added_up(summaries) for arm, summaries in lows.items()})

    def _hidden(self) -> Iterator[str]:
        """Whether the runs are too short to show sustained overload."""
        shares = {arm.name: arm.hidden for arm in self.arms if not math.isnan(arm.hidden)}
        arm = max(shares, key=shares.__getitem__, default=None)
        if arm is not None and shares[arm] > self.study.tolerance:
            yield (
                f"the runs are short: in those of {arm} an overload of up to "
                f"{percent(shares[arm])} would not be seen; more requests would show it"
            )


def _with_margin(value: Estimate) -> str:
    margin = margin_of(value, lambda reach: f"{reach:,.0f}" if reach >= 10 else f"{reach:.2g}")
    return f"{value.mean:.3g} {margin}".rstrip()


def _in_brackets(ratio: Estimate) -> str:
    text = signed(ratio.mean - 1)
    return text if _sure(ratio) else f"({text})"


def _sure(ratio: Estimate) -> bool:
    return ratio.known and not ratio.low <= 1 <= ratio.high
