"""Tune: the settings under which a goal comes out best, searched by Optuna."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.studies.compare import Compare
from experiments.studies.tune_space import Setting, space_of
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.metrics.catalogue import metric_of
from pagedsim.metrics.compare import value_of
from pagedsim.report import tune as report
from pagedsim.run.check import check_arms, processes_of
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.failure import Failure, complaint_of
from pagedsim.run.folder import kept_configuration
from pagedsim.run.job import Job
from pagedsim.run.parts import backend_of
from pagedsim.run.runs import jobs_of
from pagedsim.run.summaries import run_probes
from pagedsim.run.typed import single
from pagedsim.user_error import Interruption, shown

if TYPE_CHECKING:
    import optuna

DEFAULT = "as it stands"
"""The name of the arm that changes nothing."""
_OTHER_SEEDS = 1000
"""So far from the seeds of the search are those that the best is confirmed under."""

Values = Mapping[int, float]
"""The goal by seed."""


@dataclass(frozen=True)
class Tune(Errand):
    """`trials` settings out of `space`, each run under every seed, for the best mean of `goal`.

    They are asked for `batch` at a time, so that the search does not depend on how many
    processes there are. What has been run is kept, and since the sampler is seeded, the same
    command asks for the same settings again: so it goes on where it ended.
    """

    title: str
    question: str
    space: Mapping[str, object]
    goal: str = "goodput_per_s"
    trials: int = 40
    batch: int = 4
    seed: int = 0
    jobs: int | None = None
    report: bool = True

    def __post_init__(self) -> None:
        if find_spec("optuna") is None:
            raise ConfigError(
                "experiment=tune: needs Optuna, which is not installed: "
                "pip install -c constraints.txt '.[tune]'"
            )
        for name in ("trials", "batch"):
            require_whole(name, getattr(self, name), 1)
        try:
            better = metric_of(self.goal).better
        except ConfigError as error:
            raise ConfigError(f"goal: {error}") from error
        if not better:
            raise ConfigError(f"goal={self.goal}: neither more nor less of it is better")
        space_of(self.space)

    def perform(self, folder: Path) -> None:
        config = kept_configuration(folder)
        if backend_of(config).alone:
            raise ConfigError("backend=engine: a search takes many runs; tune takes backend=sim")
        runs = Runs(self, folder)
        search = Search(self, runs)
        try:
            search.run()
        except KeyboardInterrupt:
            search.interrupted = True
        if not search.values:
            raise Interruption("") if search.interrupted else complaint_of(search.failed)
        done = search.found()
        report.show_tuning(done)
        page = report.write_tuning(done, folder, self.report)
        print(f"results   {shown(folder / 'result.json')}")
        if page is not None:
            print(f"report    {shown(page)}")
        if search.interrupted:
            raise Interruption(
                f"{len(search.told)} of {self.trials} trials are complete; the same command with "
                f"hydra.run.dir={shown(folder)} goes on from there"
            )
        if search.failed:
            raise complaint_of(search.failed)


class Runs:
    """Runs lists of overrides under every seed."""

    def __init__(self, tune: Tune, folder: Path) -> None:
        self._tune, self._folder = tune, folder
        self._overrides = typed()
        self.processes: int | None = None
        self.check()

    def check(self) -> None:
        """Raise for what is wrong whatever is tuned, and for keys that are not there."""
        try:
            for setting in space_of(self._tune.space):
                for value in setting.telling:
                    self.jobs({setting.key: [setting.override(value)]})
        except ConfigError as error:
            raise ConfigError(str(error).replace("study.arms.", "study.space.", 1)) from error
        jobs = self.jobs({DEFAULT: []})
        self.processes = processes_of(self._tune.jobs, jobs)
        plan = Compare("", "", {DEFAULT: []}, metrics=[self._tune.goal])
        if refused := check_arms(plan, jobs):
            raise complaint_of(refused)

    def jobs(self, arms: Mapping[str, Sequence[str]], seeds_on: int = 0) -> list[Job]:
        """Every arm under every seed, or under as many seeds so far on."""
        jobs = jobs_of(Compare("", "", arms), self._overrides, self._folder)
        return [
            replace(
                job,
                seed=job.seed + seeds_on,
                folder=job.folder.with_name(f"seed-{job.seed + seeds_on}"),
            )
            for job in jobs
        ]

    def goals(self, jobs: Sequence[Job]) -> tuple[dict[str, Values], dict[str, Failure], bool]:
        """The goal of each arm by seed, what failed, and whether it was interrupted."""
        runs = run_probes(jobs, self.processes)
        found: dict[str, dict[int, float]] = {}
        for (arm, seed), run in sorted(runs.finished.items()):
            found.setdefault(arm, {})[seed] = value_of(run.summary, self._tune.goal)
        failed = {arm: failure for (arm, _), failure in runs.failed.items()}
        whole = {arm: values for arm, values in found.items() if arm not in failed}
        return ({} if runs.interrupted else dict(whole)), failed, runs.interrupted

    def single(self, changes: Sequence[str], job: Job) -> str:
        """The command that runs the same again."""
        return single([*self._overrides, *changes], job)


class Search:
    """Trials, batch after batch, and what came of them."""

    def __init__(self, tune: Tune, runs: Runs) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.tune, self._runs = tune, runs
        self.space: list[Setting] = space_of(tune.space)
        self.more = metric_of(tune.goal).better > 0
        sampler = optuna.samplers.TPESampler(seed=tune.seed)
        self.study = optuna.create_study(
            direction="maximize" if self.more else "minimize", sampler=sampler
        )
        self.values: dict[str, Values] = {}
        """By arm, the default among them."""
        self.changes: dict[str, list[str]] = {DEFAULT: []}
        self.told: list[str] = []
        """The arm of each trial, in order."""
        self.failed: dict[str, Failure] = {}
        self.confirmed: dict[str, Values] = {}
        self.interrupted = False

    def run(self) -> None:
        """All trials, and then the best and the default under other seeds."""
        self._serve([DEFAULT])
        while not self.interrupted and len(self.study.trials) < self.tune.trials:
            left = self.tune.trials - len(self.study.trials)
            asked = [self._ask() for _ in range(min(self.tune.batch, left))]
            self._serve([arm for _, arm in asked])
            if not self.interrupted:
                self._tell(asked)
                last = len(self.study.trials)
                print(f"{last} of {self.tune.trials} trials", file=sys.stderr, flush=True)
        if not self.interrupted and self.values:
            arms = {arm: self.changes[arm] for arm in dict.fromkeys([DEFAULT, self.best])}
            jobs = self._runs.jobs(arms, seeds_on=_OTHER_SEEDS)
            self.confirmed, _, self.interrupted = self._runs.goals(jobs)

    def _ask(self) -> tuple[optuna.Trial, str]:
        trial = self.study.ask({setting.key: setting.distribution() for setting in self.space})
        changes = [setting.override(trial.params[setting.key]) for setting in self.space]
        name = " ".join(changes)
        self.changes[name] = changes
        return trial, name

    def _serve(self, arms: Sequence[str]) -> None:
        """Run those of the arms that were not run before."""
        new = {arm: self.changes[arm] for arm in arms if arm not in {*self.values, *self.failed}}
        if new:
            values, failed, self.interrupted = self._runs.goals(self._runs.jobs(new))
            self.values |= values
            self.failed |= failed

    def _tell(self, asked: Sequence[tuple[optuna.Trial, str]]) -> None:
        import optuna

        for trial, arm in asked:
            if arm in self.values:
                self.study.tell(trial, report.mean(self.values[arm]))
                self.told.append(arm)
            else:
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)

    @property
    def best(self) -> str:
        """The arm with the best mean, the first of those that are alike."""
        pick: Any = max if self.more else min
        return str(pick(self.values, key=lambda arm: report.mean(self.values[arm])))

    def found(self) -> report.Tuning:
        """Everything, for a report."""
        tune, best = self.tune, self.best
        jobs = self._runs.jobs({best: self.changes[best]})
        return report.Tuning(
            title=tune.title,
            question=tune.question,
            command=command(typed("tracking", "jobs", "hydra")),
            goal=tune.goal,
            default=self.values.get(DEFAULT, {}),
            trials=tuple((tuple(self.changes[arm]), self.values[arm]) for arm in self.told),
            best=tuple(self.changes[best]),
            best_command=self._runs.single(self.changes[best], jobs[0]),
            confirmed_default=self.confirmed.get(DEFAULT, {}),
            confirmed_best=self.confirmed.get(best, {}),
            importance=dict(self._importance()),
            failed={arm: str(failure) for arm, failure in self.failed.items()},
        )

    def _importance(self) -> Iterator[tuple[str, float]]:
        """Which share of what the goal varies each setting explains, the largest first."""
        import optuna

        means = {report.mean(self.values[arm]) for arm in self.told}
        if len(means) > 1 and len(self.space) > 1:
            yield from optuna.importance.get_param_importances(self.study).items()
