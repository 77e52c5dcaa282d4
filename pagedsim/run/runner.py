"""The life of a study: check it, run what it asks for until it knows enough, tell what it found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pagedsim.core import ConfigError
from pagedsim.run.check import (
    check_arms,
    check_backend,
    check_base,
    doubtful_bounds,
    processes_of,
    unused_words,
)
from pagedsim.run.compose import Command
from pagedsim.run.folder import claimed, keep_configuration
from pagedsim.run.job import Job, error_of, lines_of
from pagedsim.run.multirun import record_job
from pagedsim.run.objects import make
from pagedsim.run.publish import Published, publish
from pagedsim.run.runs import Runs, goes_on
from pagedsim.run.store import Store, Summaries, Tables
from pagedsim.run.study import Study
from pagedsim.user_error import Interruption, UserError


def run_experiment(config: DictConfig) -> None:
    """Run `config.study`; everything that it leaves is in Hydra's output folder.

    As one job of several it prints nothing, and what came out or went wrong is left for the end.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode != RunMode.MULTIRUN:
        own = any(one.startswith("hydra.run.dir=") for one in hydra.overrides.hydra)
        with claimed(folder, own) as folder:
            begun(config, folder).execute()
        return
    life: Execution | None = None
    error: Exception | None = None
    try:
        with claimed(folder, own=True):
            life = begun(config, folder, quiet=True)
            life.execute()
    except Exception as other:
        error = other
    record_job(folder, list(hydra.overrides.task), life.published if life else None, error)


def begun(config: DictConfig, folder: Path, quiet: bool = False) -> Execution:
    """The study that a configuration describes; raises ConfigError for what is wrong with it."""
    check_base(config)
    settings = OmegaConf.to_container(config.study, resolve=True)
    study: Study = make("study", settings, Study)
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing}: must be given: {missing}=...")
    return Execution(study, Command.given(config, folder), quiet)


class Execution:
    """One study, from its first question to what it leaves."""

    def __init__(self, study: Study, command: Command, quiet: bool = False) -> None:
        self.study, self.command = study, command
        self.runs = Runs(command, quiet=quiet)
        self.published: Published | None = None

    def execute(self) -> None:
        """All of it; raises errors of runs once the results of the others are published."""
        check_backend(self.study, self.command)
        jobs = self._begin()
        self._run(jobs)
        if self._readable():
            self.published = publish(self.study, self.runs)
        self._complain()

    def _begin(self) -> list[Job]:
        """The first jobs, once all of them are known to make sense."""
        arms = self.study.next_runs(self.runs)
        jobs = self.runs.jobs_of(arms, self.study.key_of)
        self._processes = processes_of(self.command.config["jobs"], jobs)
        if refused := check_arms(self.study, jobs):
            raise error_of(refused)
        keep_configuration(self.command.config, self.command.folder)
        for line in [*self.command.notes, *doubtful_bounds(self.command.config)]:
            self.runs.note(line)
        for line in unused_words(self.study, self.command, arms, jobs):
            self.runs.note(line)
        return jobs

    def _run(self, jobs: Sequence[Job]) -> None:
        """Rounds, until the study asks for nothing more."""
        store: Store = Tables() if self.study.keeps_tables else Summaries()
        try:
            while jobs:
                asked_to_stop = self.runs.serve(jobs, self._processes, store)
                if self.runs.interrupted:
                    return
                jobs = self._next()
                if asked_to_stop and jobs:
                    self.runs.interrupted = True
                    return
        except KeyboardInterrupt:  # between two runs
            self.runs.interrupted = True

    def _next(self) -> list[Job]:
        """The next jobs; arms that cannot be configured count as failed."""
        while True:
            failed = len(self.runs.failed)
            arms = self.study.next_runs(self.runs)
            jobs = self.runs.jobs_of(arms, self.study.key_of)
            if jobs or len(self.runs.failed) == failed:
                return jobs

    def _readable(self) -> bool:
        return not (self.study.whole and (self.runs.interrupted or self.runs.failed))

    def _complain(self) -> None:
        """Say what is missing, if anything is."""
        runs, folder = self.runs, self.command.folder
        if runs.interrupted:
            raise Interruption(f"{self._told(runs)}; {goes_on(folder)}")
        if self.published and self.published.wrong:
            raise error_of(self.published.wrong)
        if runs.failed:
            raise error_of(runs.reasons)
        arms = self.published.arms if self.published else None
        if arms is not None and arms.runs and not arms.finished:
            raise UserError([": ".join(["no request finished", *arms.notes[:1]])])

    def _told(self, runs: Runs) -> str:
        """How far a study came that was stopped."""
        told = self.study.progress(runs)
        if self.published and self.published.arms and self.published.arms.runs:
            shown = len(self.published.arms.runs)
            some = "and" if shown == len(runs.finished) else f"{shown} of them"
            told += f", {some} in the report"
        if runs.stopped:
            told += f"; {runs.stopped} more left the tables of what they had so far"
        return "; failed: ".join([told, *lines_of(runs.reasons)])
