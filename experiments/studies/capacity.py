"""Capacity: the highest rate of arrivals at which each arm still meets an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from experiments.studies import capacity_figures as report
from experiments.studies.bisection import Bisection
from experiments.studies.compare import check_overrides, ordinary
from experiments.studies.objective import bounds_of, missed, refuse_strangers
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import added_up
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.run.backend import RunConfig
from pagedsim.run.compose import key_of
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.runs import Key, Runs
from pagedsim.run.study import Analysis, Study

RATE = "workload.rate"
WITHOUT_RATE = ("closed", "burst")
"""Arrival processes without a rate."""


@dataclass(frozen=True)
class Capacity(Study):
    """A search for each arm under each seed, in rounds: each asks every search for one run.

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
    start: float | None = None
    tolerance: float = 0.02
    _own: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_number("tolerance", self.tolerance, 0.001, 0.5)
        if self.start is not None:
            require_number("start", self.start, 1e-6)
        bounds_of(self.bounds)
        check_overrides(self.searched)
        for arm, changes in self.searched.items():
            for change in changes:
                if key_of(change) == RATE:
                    raise ConfigError(f"arms.{arm}: {change}: is what the search varies")
        if self.baseline is not None and self.baseline not in self.searched:
            known = ", ".join(self.searched)
            raise ConfigError(f"baseline={self.baseline}: must be one of the arms {known}")

    @property
    def searched(self) -> Mapping[str, Sequence[str]]:
        return self.usual if self.arms is None else self.arms

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [
            self.probe(search, rate, runs.command.seeds[0])
            for search in Searches(self, runs).open
            if (rate := search.next()) is not None
        ]

    def started(self, runs: Runs) -> float:
        """The first rate to be tried: a trace's own is looked up once."""
        config = runs.config
        rate: float | None = self.start or config["workload"].get("rate")
        if rate is None and not self._own:
            workload = RunConfig(config, config["seed"]).workload()
            self._own.append(workload.rate)
        return self._own[0] if rate is None else rate

    def probe(self, search: Search, rate: float, first: int) -> Arm:
        """An ordinary run at a rate; left out where seeds after the first change nothing."""
        changes = self.searched[search.arm]
        return Arm(probe_name(search.arm, rate), changes, {RATE: rate}, [search.seed], first)

    def check(self, jobs: Sequence[Job]) -> None:
        bounds = bounds_of(self.bounds)
        for job in jobs:
            if (arrivals := job.config["workload"].get("arrivals")) in WITHOUT_RATE:
                raise ConfigError(
                    f"workload.arrivals={arrivals}: has no rate; a search needs one of "
                    "poisson, gamma, fixed, or a trace's own"
                )
            if any(bound.client is not None for bound in bounds):
                asked = RunConfig(job.config, job.seed).workload()
                refuse_strangers(bounds, asked.clients)

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


def probe_name(arm: str, rate: float) -> str:
    """Name of a probe's run."""
    return f"{arm} at {rate:g} per s"


class Search(Bisection):
    """That of one arm under one seed."""

    def __init__(self, arm: str, seed: int, start: float, tolerance: float) -> None:
        super().__init__(start, tolerance)
        self.arm, self.seed = arm, seed
        self.runs: dict[float, Run] = {}


class Searches:
    """The state of all searches."""

    def __init__(self, study: Capacity, runs: Runs) -> None:
        self.study, self.runs = study, runs
        self.bounds = bounds_of(study.bounds)
        start = study.started(runs)
        self.searches: dict[Key, Search] = {}
        self.failed: dict[str, Failure] = {}
        """By arm."""
        for seed in runs.command.seeds:
            for arm in study.searched:
                search = Search(arm, seed, start, study.tolerance)
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
            search.runs[rate] = run
            met = bool(run.summary["finished"]) and not missed(self.bounds, run.summary)
            search.tell(rate, met)
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

    def reading(self) -> Analysis:
        study, whole = self.study, self.over
        failed = {arm: str(failure) for arm, failure in self.failed.items()}
        left = [arm for arm in study.searched if arm not in failed and arm not in whole]
        failed |= dict.fromkeys(left, "the search was interrupted")
        done = report.Capacity(
            bounds=self.bounds,
            tolerance=study.tolerance,
            arms=[self._arm(arm) for arm in whole],
            baseline=study.baseline or next(iter(study.searched)),
            failed=failed,
        )
        commands = {arm.name: arm.command for arm in done.arms if not arm.nowhere}
        first = self.runs.command.seeds[0]
        caption = (
            "The rate found for each arm; in its colour below every probe under seed "
            f"{first} is a point, hollow where it missed any bound; dashed: this "
            "bound. On the grey front nothing serves more requests a second at a lower latency."
        )
        draw = partial(report.draw_capacity, done)
        picture = FigureSpec("Rate against latency", caption, draw)
        return Analysis(
            finding=done.lines(),
            listings=[done.listing()] if done.arms else [],
            notes=self._notes(whole),
            data=done.data(),
            drawings={"capacity": picture} if done.arms else {},
            table=done.table(),
            again={f"The run at the rate found, first seed: {a}": c for a, c in commands.items()},
            failed=failed,
            wrong=self.failed,
        )

    def _of(self, arm: str) -> list[Search]:
        return [search for search in self.searches.values() if search.arm == arm]

    def _arm(self, arm: str) -> report.Arm:
        first, *_ = searches = self._of(arm)
        edges = tuple(map(self._edge, searches))
        if not first.low:
            return report.Arm(arm, edges, "")
        probe = self.study.probe(first, first.low, first.seed)
        command = ordinary(self.runs.command, self.study.key_of(probe.name), probe, first.seed)
        return report.Arm(arm, edges, command)

    def _edge(self, search: Search) -> report.Edge:
        probes = {rate: self._probe(rate, search.runs[rate]) for rate in sorted(search.runs)}
        return report.Edge(
            seed=search.seed,
            probes=tuple(probes.values()),
            low=None if search.low is None else probes[search.low],
            high=None if search.high is None else probes[search.high],
            missed_from=search.surely_missed,
            contradictions=tuple(search.contradictions),
        )

    def _probe(self, rate: float, run: Run) -> report.Probe:
        summary = run.summary
        names = [bound.name for bound in missed(self.bounds, summary)]
        return report.Probe(
            rate=rate,
            values=tuple(bound.of(summary) for bound in self.bounds),
            missed=tuple(names if summary["finished"] else ["every bound: nothing was served"]),
            output_tokens_per_s=summary["output_tokens_per_s"],
        )

    def _notes(self, arms: Sequence[str]) -> list[str]:
        notes = []
        if self.runs.repeated:
            notes.append("under every seed the workload is the same, so each arm has one search")
        if self.runs.changed:
            names = ", ".join(sorted(self.runs.changed))
            notes.append(f"the code or a file of {names} changed on the way: run it again")
        searches = [search for arm in arms for search in self._of(arm)]
        for search in searches:
            if rates := search.contradictions:
                met = ", ".join(f"{rate:g}" for rate in rates)
                notes.append(
                    f"{search.arm}, seed {search.seed}: missed at {search.high:g}/s, and yet met "
                    f"at {met}/s: there chance decides"
                )
        notes += self._hidden(searches)
        whose: dict[str, list[str]] = {}
        for arm in arms:
            lows = [search.runs[low] for search in self._of(arm) if (low := search.low)]
            for text in added_up([run.summary for run in lows]):
                whose.setdefault(text, []).append(arm)
        return notes + [
            text if own == arms else f"{', '.join(own)}: {text}" for text, own in whose.items()
        ]

    def _hidden(self, searches: Sequence[Search]) -> list[str]:
        """Whether the runs are too short to show sustained overload."""
        bounds = [bound.seconds for bound in self.bounds if bound.key.startswith("ttft")]
        hidden: dict[str, float] = {}
        for search in searches:
            if bounds and (low := search.low):
                lasted = search.runs[low].summary["requests"] / low
                hidden[search.arm] = max(hidden.get(search.arm, 0.0), min(bounds) / lasted)
        over = {arm: share for arm, share in hidden.items() if share > self.study.tolerance}
        if not over:
            return []
        arm = max(over, key=lambda one: over[one])
        return [
            f"the runs are short: in those of {arm} an overload of up to {percent(over[arm])} "
            "stays within the bound of TTFT; more requests would show it"
        ]
