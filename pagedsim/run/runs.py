"""Run a study: compose its arms, run them in parallel under several seeds, gather the results."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from hydra import compose
from omegaconf import OmegaConf

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.metrics.study import Run, Study
from pagedsim.run.command import command
from pagedsim.run.failure import Failure
from pagedsim.run.job import Interrupted, Job, Outcome, Repeated
from pagedsim.run.parts import backend_of
from pagedsim.run.pool import inside_a_worker, run_jobs
from pagedsim.run.store import forget, recipe, store, stored
from pagedsim.user_error import line

Key = tuple[str, int]
"""An arm and a seed."""


@dataclass
class Runs:
    """What became of a study's jobs."""

    jobs: Sequence[Job]
    finished: dict[Key, Run] = field(default_factory=dict)
    failed: dict[Key, Failure] = field(default_factory=dict)
    kept: int = 0
    """How many were there already."""
    stopped: int = 0
    """How many were stopped on their way, and left what they had."""
    repeated: int = 0
    """How many were left out, since another seed would have changed nothing."""
    changed: set[str] = field(default_factory=set)
    """Arms whose code or files changed while they ran."""
    interrupted: bool = False

    @property
    def wanted(self) -> int:
        """How many runs make the study complete."""
        return len(self.jobs) - self.repeated

    @property
    def comparable(self) -> list[Run]:
        """Those that are complete under each seed that all arms have, arm by arm.

        Means over other seeds would hold one arm's luck against another's. An arm without any
        run, or seeds that no two arms share, hold back nobody.
        """
        seeds = [{seed for one, seed in self.finished if one == arm} for arm in self._arms]
        shared = set.intersection(*seeds) if seeds else set()
        runs = [self.finished[key] for arm in self._arms for key in self._keys(arm)]
        return [run for run in runs if run.seed in shared] or runs

    @property
    def _arms(self) -> list[str]:
        """The arms that have a run, in order."""
        there = {arm for arm, _ in self.finished}
        return [arm for arm in dict.fromkeys(job.arm for job in self.jobs) if arm in there]

    def _keys(self, arm: str) -> list[Key]:
        return sorted(key for key in self.finished if key[0] == arm)

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
        arms = {job.arm: {j.seed for j in self.jobs if j.arm == job.arm} for job in self.jobs}
        names = []
        for arm in dict.fromkeys(arm for arm, _ in keys):
            seeds = sorted(seed for one, seed in keys if one == arm)
            some = "" if set(seeds) == arms[arm] else f" (seed {', '.join(map(str, seeds))})"
            names.append(arm + some)
        return ", ".join(names)


def run_study(jobs: Sequence[Job], processes: int | None = None) -> Runs:
    """Run them all; what one of them does wrong is reported at the end and stops no other.

    `processes`: None for as many as there are cores.
    """
    runs = Runs(jobs)
    missing, recipes = [], {}
    for job in runs.jobs:
        made_of = recipes[job.arm, job.seed] = recipe(job)
        if run := stored(job, made_of):
            runs.finished[job.arm, job.seed] = run
        else:
            forget(job)
            missing.append(job)
    runs.kept = len(runs.finished)

    def done(job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, Run):
            if not store(job, recipes[job.arm, job.seed]):
                runs.changed.add(job.arm)
            runs.finished[job.arm, job.seed] = outcome
        elif isinstance(outcome, Failure):
            runs.failed[job.arm, job.seed] = outcome
        elif isinstance(outcome, Repeated):
            runs.repeated += 1
        elif isinstance(outcome, Interrupted):
            runs.stopped += outcome.folder is not None

    asked = run_jobs(missing, 1 if inside_a_worker() else processes or cores(), done)
    runs.interrupted = asked and len(runs.finished) + len(runs.failed) < runs.wanted
    return runs


def jobs_of(plan: Compare, overrides: Sequence[str], folder: Path) -> list[Job]:
    """Every arm under every seed, each with the configuration that its overrides give.

    Seed by seed, so that what an interrupted study has of its arms can be compared.
    """
    jobs = []
    for arm, changes in plan.arms.items():
        config = _composed(plan.key_of(arm), overrides, changes)
        place = folder / "runs" / _as_file_name(arm)
        first = config["seed"]
        for seed in range(first, first + config["seeds"]):
            jobs.append(Job(arm, seed, config, place / f"seed-{seed}", again=seed != first))
    return sorted(jobs, key=lambda job: job.seed)


def _composed(whose: str, overrides: Sequence[str], changes: Sequence[str]) -> dict[str, Any]:
    try:
        config = compose("config", overrides=[*overrides, *changes])
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except Exception as error:
        # What is wrong without the arm's changes is not the arm's fault.
        ours = any(change in str(error) or _key(change) in str(error) for change in changes)
        where = f"{whose}: " if ours else ""
        raise ConfigError(where + line(error, [*overrides, *changes])) from error
    return cast(dict[str, Any], plain)


def _key(change: str) -> str:
    return change.partition("=")[0].lstrip("+~").rpartition(".")[2]


def overruled(plan: Compare, overrides: Sequence[str]) -> list[str]:
    """What was typed and changes nothing, since every arm sets it."""
    set_by_arms = [{change.partition("=")[0] for change in arm} for arm in plan.arms.values()]
    return [
        override
        for override in overrides
        if all(override.partition("=")[0] in keys for keys in set_by_arms)
    ]


def unread(jobs: Sequence[Job], overrides: Sequence[str]) -> list[str]:
    """What was typed and changes nothing, since no arm's backend reads it."""
    groups = [set(backend_of(job.config).unread) for job in jobs if not job.again]
    everywhere = set.intersection(*groups) if groups else set()
    return [one for one in overrides if re.split(r"[.=@]", one.lstrip("+~"))[0] in everywhere]


def _as_file_name(arm: str) -> str:
    """An arm's name as that of a folder, whatever is in it."""
    return re.sub(r"^\.", "%2E", quote(arm, safe=" =,+@"))


def study_of(plan: Compare, runs: Runs, folder: Path, name: str, overrides: Sequence[str]) -> Study:
    """The results, in the shape that reports take."""
    study = Study(
        name=name,
        title=plan.title,
        question=plan.question,
        folder=folder,
        command=command(overrides),
        runs=runs.comparable,
        metrics=_metrics(plan, runs),
        baseline=plan.baseline or next(iter(plan.arms)),
        swept=plan.swept,
    )
    study.clients = tuple(dict.fromkeys(c for run in study.runs for c in _clients(run.summary)))
    study.failed = {whose or "all runs": str(failure) for whose, failure in runs.reasons.items()}
    if runs.interrupted:
        study.failed["interrupted"] = f"{len(runs.finished)} of {runs.wanted} runs are complete"
    if left_out := len(runs.finished) - len(study.runs):
        study.failed["left out"] = (
            f"{left_out} complete runs, under seeds that not every arm has completed"
        )
    return study


def _metrics(plan: Compare, runs: Runs) -> tuple[str, ...]:
    """Those that the study names, and goodput where an objective was set."""
    wants = any("goodput_per_s" in run.summary for run in runs.finished.values())
    return tuple(dict.fromkeys([*plan.metrics, *(["goodput_per_s"] if wants else [])]))


def _clients(summary: Mapping[str, Any]) -> Sequence[str]:
    return list(summary.get("clients", {}))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
