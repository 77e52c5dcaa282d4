"""Studies carried out as the front door does, without a process of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import Scheduler, StepPlan
from pagedsim.metrics.arms import Run
from pagedsim.run.help import experiments
from pagedsim.run.job import Arm, Job, run_job
from pagedsim.run.runner import Execution
from pagedsim.run.runs import Runs
from pagedsim.run.store import Summaries, Tables
from pagedsim.run.study import Study
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import Conf
from pagedsim.spec.objects import make
from pagedsim.spec.study import StudySpec

EXPERIMENTS = experiments()
CONF = Conf()


def compose(root: str, overrides: Sequence[str]) -> DictConfig:
    """What these words come to."""
    conf = CONF if root == CONF.root else Conf(root=root)
    return OmegaConf.create(Composed.of(overrides, conf).resolved(missing=True))


def settings_of(*words: str) -> dict[str, Any]:
    """The same in plain values, under the root of studies."""
    settings: Any = OmegaConf.to_container(compose("config", words))
    return dict(settings)


def command(folder: Path, *words: str) -> StudySpec:
    """What typing these would be, with results in `folder`; nothing is tracked unless they say."""
    silent = not any(word.startswith("tracking") for word in words)
    typed = [*words, *(["tracking=none"] if silent else [])]
    return replace(StudySpec.of(typed, folder, CONF), words=list(words))


def carried_out(folder: Path, *words: str, study: Study | None = None) -> dict[str, Any]:
    """All of a study (default: what the words say); what it leaves in result.json.

    Raises what went wrong.
    """
    given = command(folder, *words)
    if study is None:
        study = make("study", given.config["study"], Study)
    Execution(study, given).execute()
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def served(study: Study, folder: Path, words: Sequence[str]) -> Runs:
    """The runs of a study, round after round in this process, and nothing made of them."""
    runs = Runs(command(folder, *words))
    store = Tables() if study.keeps_tables else Summaries()
    while jobs := runs.jobs_of(study.next_runs(runs), study.key_of):
        runs.serve(jobs, 1, store)
        if runs.interrupted:
            break
    return runs


def job_of(folder: Path, words: Sequence[str], overrides: Sequence[str] = ()) -> Job:
    """One arm with these overrides, under the first seed."""
    given = command(folder, *words)
    arm = Arm("arm", overrides, seeds=given.seeds[:1])
    (job,) = Runs(given).jobs_of([arm], str)
    return job


class Impatient(StoppableRecorder):
    """Stopped after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps_left = steps

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.steps_left -= 1
        if not self.steps_left:
            self.stop()


def run_of(folder: Path, words: Sequence[str], overrides: Sequence[str] = ()) -> Run:
    """Its run."""
    run = run_job(job_of(folder, words, overrides), StoppableRecorder())
    assert isinstance(run, Run), run
    return run
