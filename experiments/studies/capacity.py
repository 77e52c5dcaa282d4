"""Capacity: the highest rate of arrivals at which each arm still meets an objective."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.studies.bisection import Search
from experiments.studies.compare import Compare
from experiments.studies.objective import Bound, bounds_of, missed, refuse_strangers
from experiments.studies.probe import Probes
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.notice import added_up
from pagedsim.metrics.study import Run
from pagedsim.report import capacity as report
from pagedsim.report.percent import percent
from pagedsim.run.check import check_arms, processes_of
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.failure import Failure, complaint_of
from pagedsim.run.folder import kept_configuration
from pagedsim.run.job import Job
from pagedsim.run.parts import backend_of
from pagedsim.run.runs import Key
from pagedsim.run.summaries import run_probes
from pagedsim.user_error import Interruption, shown


@dataclass(frozen=True)
class Capacity(Errand):
    """A search for each arm under each seed, in rounds: each asks every search for one run.

    `arms` are named overrides as in a comparison (None: `usual`); `bounds` maps latencies to
    seconds, or clients to such mappings; `tolerance` is how near the ends of an edge must be.
    """

    title: str
    question: str
    bounds: Mapping[str, object]
    usual: Mapping[str, Sequence[str]]
    arms: Mapping[str, Sequence[str]] | None = None
    baseline: str | None = None
    start: float | None = None
    tolerance: float = 0.02
    seed: int = 0
    jobs: int | None = None
    report: bool = True

    def __post_init__(self) -> None:
        require_number("tolerance", self.tolerance, 0.001, 0.5)
        if self.start is not None:
            require_number("start", self.start, 1e-6)
        bounds_of(self.bounds)
        self.plan()

    def plan(self) -> Compare:
        """The arms."""
        arms = self.usual if self.arms is None else self.arms
        return Compare(self.title, self.question, arms, self.baseline)

    def perform(self, folder: Path) -> None:
        config = kept_configuration(folder)
        if backend_of(config).alone:
            raise ConfigError(
                "backend=engine: a search takes hundreds of runs; experiment=capacity takes "
                "backend=sim, and experiment=compare the engine at a rate"
            )
        start = self.start or config["workload"].get("rate")
        if start is None:
            start = backend_of(config).workload(config["workload"], self.seed).rate
        probes = Probes(self.plan(), typed(), folder)
        jobs = probes.first(start)
        if refused := check_arms(probes.plan, jobs):
            raise complaint_of(refused)
        bounds = bounds_of(self.bounds)
        if any(bound.client is not None for bound in bounds):
            for job in (job for job in jobs if not job.again):
                asked = backend_of(job.config).workload(job.config["workload"], job.seed)
                refuse_strangers(bounds, asked.clients)
        rounds = Rounds(jobs, probes, bounds, start, self.tolerance)
        try:
            rounds.run(processes_of(self.jobs, jobs))
        except KeyboardInterrupt:
            rounds.interrupted = True
        self._tell(rounds, folder)

    def _tell(self, rounds: Rounds, folder: Path) -> None:
        """Show, write and complain."""
        plan = self.plan()
        baseline = plan.baseline or next(iter(plan.arms))
        done = rounds.found(plan, baseline, self.tolerance)
        if rounds.kept:
            print(f"{rounds.kept} of {rounds.runs} runs were there already, and the same: kept")
        report.show_capacity(done)
        page = report.write_capacity(done, folder, self.report)
        print(f"results   {shown(folder / 'result.json')}")
        if page is not None:
            print(f"report    {shown(page)}")
        if rounds.interrupted:
            over, total = len(done.arms), len(plan.arms)
            raise Interruption(
                f"{over} of {total} arms are searched to the end, after {rounds.runs} runs; the "
                f"same command with hydra.run.dir={shown(folder)} goes on from there"
            )
        if rounds.failed:
            raise complaint_of(rounds.failed)


@dataclass
class Rounds:
    """All searches, and what their probes gave."""

    jobs: Sequence[Job]
    """One for each arm and seed."""
    probes: Probes
    bounds: list[Bound]
    start: float
    tolerance: float
    searches: dict[Key, Search] = field(default_factory=dict)
    found_runs: dict[Key, dict[float, Run]] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    """By arm."""
    changed: set[str] = field(default_factory=set)
    runs: int = 0
    kept: int = 0
    repeated: bool = False
    interrupted: bool = False

    def run(self, processes: int | None) -> None:
        """Rounds of runs until no search has anything to ask."""
        for job in self.jobs:
            self.searches[job.arm, job.seed] = Search(self.start, self.tolerance)
            self.found_runs[job.arm, job.seed] = {}
        number = 0
        while not self.interrupted and (asked := self._asked()):
            number += 1
            print(f"round {number}: {len(asked)} runs", file=sys.stderr, flush=True)
            self._round(asked, processes)

    def _asked(self) -> list[Job]:
        """The next probe of every search that has one."""
        jobs = []
        for job in self.jobs:
            search = self.searches.get((job.arm, job.seed))
            if search is None or job.arm in self.failed:
                continue
            if (rate := search.next()) is not None:
                jobs.append(self.probes.at(job, rate))
        return jobs

    def _round(self, asked: Sequence[Job], processes: int | None) -> None:
        runs = run_probes(asked, processes)
        self.interrupted = runs.interrupted
        self.changed |= runs.changed
        self.kept += runs.kept
        self.runs += len(runs.finished)
        for (arm, _), failure in runs.failed.items():
            self.failed.setdefault(arm, failure)
        for job in asked:
            key, rate = (job.arm, job.seed), job.config["workload"]["rate"]
            if run := runs.finished.get(key):
                self.found_runs[key][rate] = run
                self.searches[key].tell(rate, self._met(run))
            elif key not in runs.failed and not runs.interrupted:
                del self.searches[key]  # under every seed the workload is the same
                self.repeated = True

    def _met(self, run: Run) -> bool:
        return bool(run.summary["finished"]) and not missed(self.bounds, run.summary)

    # -- what came of it ---------------------------------------------------------------------------

    def found(self, plan: Compare, baseline: str, tolerance: float) -> report.Capacity:
        """Everything, for a report."""
        whole = [arm for arm in plan.arms if arm not in self.failed and self._over(arm)]
        failed = {arm: str(failure) for arm, failure in self.failed.items()}
        left = [arm for arm in plan.arms if arm not in failed and arm not in whole]
        failed |= dict.fromkeys(left, "the search was interrupted")
        return report.Capacity(
            title=plan.title,
            question=plan.question,
            command=command(typed("tracking", "jobs", "hydra")),
            bounds=[report.Bounded(b.name, b.key, b.seconds) for b in self.bounds],
            tolerance=tolerance,
            arms=[self._arm(arm) for arm in whole],
            baseline=baseline,
            failed=failed,
            notes=self._notes(whole),
        )

    def _keys(self, arm: str) -> list[Key]:
        return [key for key in self.searches if key[0] == arm]

    def _over(self, arm: str) -> bool:
        return all(self.searches[key].next() is None for key in self._keys(arm))

    def _arm(self, arm: str) -> report.Arm:
        keys = self._keys(arm)
        first = next(job for job in self.jobs if (job.arm, job.seed) == keys[0])
        low = self.searches[keys[0]].low
        edges = tuple(self._edge(key) for key in keys)
        return report.Arm(arm, edges, self.probes.typed(self.probes.at(first, low)) if low else "")

    def _edge(self, key: Key) -> report.Edge:
        search, runs = self.searches[key], self.found_runs[key]
        probes = {rate: self._probe(rate, runs[rate]) for rate in sorted(runs)}
        return report.Edge(
            seed=key[1],
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
        if self.repeated:
            notes.append("under every seed the workload is the same, so each arm has one search")
        if self.changed:
            names = ", ".join(sorted(self.changed))
            notes.append(f"the code or a file of {names} changed on the way: run it again")
        edges = [(arm, key) for arm in arms for key in self._keys(arm)]
        for arm, key in edges:
            if rates := self.searches[key].contradictions:
                high = self.searches[key].high
                met = ", ".join(f"{rate:g}" for rate in rates)
                notes.append(
                    f"{arm}, seed {key[1]}: missed at {high:g}/s, and yet met at {met}/s: there "
                    "chance decides"
                )
        return [*notes, *self._hidden(edges), *self._of_requests(arms)]

    def _hidden(self, edges: Sequence[tuple[str, Key]]) -> list[str]:
        """Whether the runs are too short to show an overload that lasts."""
        bounds = [bound.seconds for bound in self.bounds if bound.key.startswith("ttft")]
        hidden: dict[str, float] = {}
        for arm, key in edges:
            if bounds and (low := self.searches[key].low):
                lasted = self.found_runs[key][low].summary["requests"] / low
                hidden[arm] = max(hidden.get(arm, 0.0), min(bounds) / lasted)
        over = {arm: share for arm, share in hidden.items() if share > self.tolerance}
        if not over:
            return []
        arm = max(over, key=lambda one: over[one])
        return [
            f"the runs are short: in those of {arm} an overload of up to {percent(over[arm])} "
            "stays within the bound of TTFT; more requests would show it"
        ]

    def _of_requests(self, arms: Sequence[str]) -> list[str]:
        """What the runs at the rates found say of their requests, each line once."""
        whose: dict[str, list[str]] = {}
        for arm in arms:
            keys = [(key, low) for key in self._keys(arm) if (low := self.searches[key].low)]
            for text in added_up([self.found_runs[key][low].summary for key, low in keys]):
                whose.setdefault(text, []).append(arm)
        return [text if who == arms else f"{', '.join(who)}: {text}" for text, who in whose.items()]
