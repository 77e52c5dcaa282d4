"""The runs of a study: what is wanted, what there is, and why some are missing."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from urllib.parse import quote

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Notice, of_one_kind
from pagedsim.run.job import Arm, Failure, Job, Outcome, Repeated, failure_of
from pagedsim.run.parts import Parts, build
from pagedsim.run.pool import inside_a_worker, run_jobs, way_to_begin
from pagedsim.run.store import Store, recipe_of
from pagedsim.spec.objects import needs_this_process
from pagedsim.spec.run import Settings
from pagedsim.spec.study import StudySpec
from pagedsim.user_error import shown

Key = tuple[str, int]
"""An arm and a seed; what is served again under the same seed is counted on from it."""
_NAMED = 3
"""Of many runs, so many are named."""


@dataclass
class Runs:
    """What became of everything that a study has asked for so far."""

    spec: StudySpec
    asked: dict[str, Arm] = field(default_factory=dict, repr=False)
    """By name."""
    jobs: list[Job] = field(default_factory=list)
    finished: dict[Key, Run] = field(default_factory=dict)
    failed: dict[Key, Failure] = field(default_factory=dict)
    repeated: set[Key] = field(default_factory=set)
    """Left out, since another seed would have changed nothing."""
    kept: int = 0
    """How many were there already."""
    stopped: int = 0
    """How many were stopped on their way, and left what they had."""
    changed: set[str] = field(default_factory=set)
    """Arms whose code or files changed while they ran."""
    built: dict[Key, Parts] = field(default_factory=dict, repr=False)
    """What was built to check runs, for this process to run."""
    interrupted: bool = False
    quiet: bool = False
    """Whether nothing is to be printed on the way."""
    stored: bool = False
    """Whether all of them must be in the folder already."""
    noted: list[str] = field(default_factory=list)
    """What was noted before the first run."""

    @property
    def config(self) -> Settings:
        """That of the study, without any arm's changes."""
        return self.spec.config

    @property
    def wanted(self) -> int:
        """How many runs were asked for."""
        return len(self.jobs) - len(self.repeated)

    @property
    def progress(self) -> str:
        """How many of them are there."""
        done = len(self.finished)
        return f"{done or 'none'} of {self.wanted} runs {'is' if done == 1 else 'are'} complete"

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            print(text, flush=True)

    def note(self, line: str) -> None:
        """Tell what the results belong to, and keep it for them."""
        self.noted.append(line)
        self.say(f"note: {line}")

    # -- asking ------------------------------------------------------------------------------------

    def jobs_of(self, arms: Sequence[Arm], key_of: Callable[[str], str]) -> list[Job]:
        """Every arm under every seed of which nothing is known, each with its configuration.

        Where seeds are the study's own: seed by seed, so that what an interrupted study has of its
        arms can be compared. Else in the order in which they are asked for. An arm that cannot be
        configured raises ConfigError if nothing has run yet; later it is one that failed.
        """
        jobs: list[Job] = []
        for arm in arms:
            self.asked[arm.name] = arm
            if not any(self._unknown(arm)):  # it is not configured again
                continue
            try:
                config = self.spec.configured(key_of(arm.name), arm.overrides, arm.changes)
            except ConfigError as error:
                if not self.jobs:
                    raise
                self._fail(arm, error)
                continue
            jobs += self._jobs(arm, config)
        study_seeds = all(arm.seeds is None for arm in arms)
        return sorted(jobs, key=lambda job: job.seed) if study_seeds else jobs

    def _seeds(self, arm: Arm) -> Sequence[int]:
        """The seeds of an arm, its own or the study's."""
        return self.spec.seeds if arm.seeds is None else arm.seeds

    def _unknown(self, arm: Arm) -> Iterator[tuple[int, int]]:
        """The seeds and repeats of an arm of which nothing is known."""
        for seed, repeat in product(self._seeds(arm), arm.repeats):
            if not self.settled(arm.name, seed + repeat):
                yield seed, repeat

    def _jobs(self, arm: Arm, config: Settings) -> Iterator[Job]:
        """The jobs of an arm of which nothing is known."""
        name = re.sub(r"^\.", "%2E", quote(arm.name, safe=" =,+@"))  # whatever is in it
        folder = self.spec.folder / "runs" / name
        first = self._seeds(arm)[0] if arm.first is None else arm.first
        for seed, repeat in self._unknown(arm):
            place = folder / f"seed-{seed + repeat}"
            yield Job(arm.name, seed, config, place, seed != first, repeat)

    def _fail(self, arm: Arm, error: ConfigError) -> None:
        for job in [*self._jobs(arm, self.config)]:
            self.jobs.append(job)
            self.failed[job.arm, job.number] = failure_of(error, job.config, None)

    def serve(self, jobs: Sequence[Job], processes: int | None, store: Store) -> bool:
        """Run what is not there; what one of them does wrong stops no other.

        `processes`: None for as many as there are cores. Returns whether it was asked to stop;
        `interrupted` says whether anything is missing by that.
        """
        self.jobs += jobs
        missing, recipes = [], {}
        for job in jobs:
            recipe = recipe_of(job)
            if run := store.stored(job, recipe):
                self.finished[job.arm, job.number] = run
                self.kept += 1
            else:
                recipes[job.arm, job.number] = recipe
                missing.append(job)
        if self.stored:
            self._refuse_missing(missing)
        for job in missing:
            store.forget(job)

        def done(job: Job, outcome: Outcome) -> None:
            key = job.arm, job.number
            if isinstance(outcome, Run):
                if not store.store(job, recipes[key], outcome):
                    self.changed.add(job.arm)
                self.finished[key] = outcome
            elif isinstance(outcome, Failure):
                self.failed[key] = outcome
            elif isinstance(outcome, Repeated):
                self.repeated.add(key)
            else:
                self.stopped += outcome.folder is not None

        several, kept = self._processes(missing, processes), len(jobs) - len(missing)
        asked = run_jobs(missing, several, done, self.built, kept)
        self.built.clear()
        self.interrupted = asked and not all(self.settled(j.arm, j.number) for j in missing)
        return asked

    def _refuse_missing(self, missing: Sequence[Job]) -> None:
        """Raise ConfigError if runs are not stored, but for those that seeds do not change, which
        never are."""
        lost = [job for job in missing if not job.again or build(job.config, job.seed).drawn]
        if lost:
            folder = self.spec.folder
            raise ConfigError(
                f"{shown(folder)}: lacks {len(lost)} of {len(self.jobs)} runs, or has them of "
                f"other code; {goes_on(folder)}"
            )

    def _processes(self, jobs: Sequence[Job], wanted: int | None) -> int:
        """How many processes take the jobs; says why where it is one, against what was asked."""
        several = wanted or cores()
        if inside_a_worker() or len(jobs) <= 1 or several <= 1:
            return 1
        reasons = (needs_this_process(job.config) for job in jobs)
        alone = "" if way_to_begin() == "fork" else next(filter(None, reasons), "")
        if alone and (line := f"runs took turns in one process: {alone}") not in self.noted:
            self.note(line)
        return 1 if alone else several

    def settled(self, arm: str, number: int) -> bool:
        """Whether it is known what became of a run: its arm, and its seed and repeat."""
        key = arm, number
        return key in self.finished or key in self.failed or key in self.repeated

    # -- reading -----------------------------------------------------------------------------------

    def of(self, arm: str) -> list[Run]:
        """The complete runs of an arm, seed by seed."""
        return [self.finished[key] for key in sorted(self.finished) if key[0] == arm]

    @property
    def comparable(self) -> list[Run]:
        """Those that are complete under each seed that all arms have, arm by arm.

        Means over other seeds would hold one arm's luck against another's. An arm without any
        run, or seeds that no two arms share, exclude no other.
        """
        seeds = [{seed for name, seed in self.finished if name == arm} for arm in self._arms]
        shared = set.intersection(*seeds) if seeds else set()
        runs = [run for arm in self._arms for run in self.of(arm)]
        return [run for run in runs if run.seed in shared] or runs

    @property
    def in_order(self) -> list[Run]:
        """All that are complete, in the order in which they were asked for."""
        keys = [(job.arm, job.number) for job in self.jobs]
        return [self.finished[key] for key in keys if key in self.finished]

    @property
    def _arms(self) -> list[str]:
        """The arms that have a run, in order."""
        with_runs = {arm for arm, _ in self.finished}
        return [arm for arm in dict.fromkeys(job.arm for job in self.jobs) if arm in with_runs]

    @property
    def reasons(self) -> dict[str, Failure]:
        """What failed and why, each reason once; "" where it is all there is to say."""
        by_reason: dict[str, list[Key]] = {}
        for key, failure in self.failed.items():
            by_reason.setdefault(failure.reason, []).append(key)
        return {self._whose(keys): self.failed[keys[0]] for keys in by_reason.values()}

    def _whose(self, keys: Sequence[Key]) -> str:
        """Names for some of the runs: arms, and seeds where it is not all of them."""
        if len(keys) == len(self.jobs):
            return ""
        arms = {job.arm: {j.number for j in self.jobs if j.arm == job.arm} for job in self.jobs}
        names = []
        for arm in dict.fromkeys(arm for arm, _ in keys):
            seeds = sorted(seed for name, seed in keys if name == arm)
            some = "" if set(seeds) == arms[arm] else f" (seed {', '.join(map(str, seeds))})"
            names.append(arm + some)
        return ", ".join(names)

    def notices(self) -> Iterator[str]:
        """What a reader must know of the runs, each line once, with in how many it is so."""
        every = self.in_order
        noticed = [Notice(**notice) for run in every for notice in run.summary.get("notices", ())]
        counts = Counter(notice.what for notice in of_one_kind(noticed))
        for what, count in counts.items():
            yield what if count == len(every) else f"in {count} of {len(every)} runs {what}"
        if self.changed:
            yield changed_note(self.changed)

    def only(self, prefix: str) -> Runs:
        """Those of the arms whose names begin so, without that beginning."""
        jobs = [
            replace(job, arm=job.arm.removeprefix(prefix))
            for job in self.jobs
            if job.arm.startswith(prefix)
        ]
        cut = len(prefix)
        return replace(
            self,
            jobs=jobs,
            finished={
                (a[cut:], n): replace(run, arm=a[cut:])
                for (a, n), run in self.finished.items()
                if a.startswith(prefix)
            },
            failed={(a[cut:], n): f for (a, n), f in self.failed.items() if a.startswith(prefix)},
            repeated={(a[cut:], n) for a, n in self.repeated if a.startswith(prefix)},
        )


def changed_note(arms: set[str]) -> str:
    """That these were not kept."""
    return (
        f"the code or a file of {some(sorted(arms))} changed on the way: not kept, to be run again"
    )


def some(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def goes_on(folder: Path) -> str:
    """How a study that was stopped is taken up."""
    return f"the same command with hydra.run.dir={shown(folder)} goes on from there"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
