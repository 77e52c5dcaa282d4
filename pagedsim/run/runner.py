"""What one command does: build the study, run it, write and show what came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.files import write_json
from pagedsim.metrics.result import result_of
from pagedsim.metrics.study import Study
from pagedsim.report import show, write
from pagedsim.report.comparison import write_comparison
from pagedsim.report.result import RESULT
from pagedsim.run.check import check_arms, check_base, processes_of
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.failure import complaint_of
from pagedsim.run.folder import claimed, keep_configuration
from pagedsim.run.multirun import record_job
from pagedsim.run.objects import make
from pagedsim.run.runs import Runs, jobs_of, overruled, run_study, study_of, unread
from pagedsim.tracking import track
from pagedsim.user_error import Interruption, UserError, shown


def run_experiment(config: DictConfig) -> None:
    """Run `config.study`; everything that it leaves is in Hydra's output folder.

    As one job of several it prints nothing, and what came out or went wrong is left for the end.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode != RunMode.MULTIRUN:
        own = any(one.startswith("hydra.run.dir=") for one in hydra.overrides.hydra)
        with claimed(folder, own) as folder:
            _run(config, folder, hydra, quiet=False)
        return
    study: Study | None = None
    error: Exception | None = None
    try:
        with claimed(folder, own=True):
            study = _run(config, folder, hydra, quiet=True)
    except UserError as complaint:
        study, error = complaint.study, complaint
    except Exception as other:
        error = other
    record_job(folder, list(hydra.overrides.task), study, error)


def _run(config: DictConfig, folder: Path, hydra: Any, quiet: bool) -> Study | None:
    check_base(config)
    plan = make("study", OmegaConf.to_container(config.study, resolve=True), object)
    if isinstance(plan, Errand):
        for missing in sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{missing}: must be given: {missing}=...")
        keep_configuration(config, folder)
        for override in _idle(plan, list(hydra.overrides.task)):
            print(f"note: {override} changes nothing: the settings are those of run={config.run}")
        plan.perform(folder)
        return None
    if not isinstance(plan, Compare):
        raise ConfigError(f"study._target_={config.study._target_}: must make a Compare or Errand")
    overrides = list(hydra.overrides.task)
    jobs = jobs_of(plan, overrides, folder)
    processes = processes_of(config.jobs, jobs)
    if refused := check_arms(plan, jobs):
        raise complaint_of(refused)
    keep_configuration(config, folder)
    runs = run_study(jobs, processes)
    name = str(hydra.runtime.choices.get("experiment") or "study")
    study = study_of(plan, runs, folder, name, overrides)
    if runs.kept and not quiet:
        print(f"{runs.kept} of {runs.wanted} runs were there already, and the same: kept")
    if runs.repeated and not quiet:
        print("note: under every seed the workload is the same, so each arm is run once")
    if runs.changed and not quiet:
        arms = ", ".join(sorted(runs.changed))
        print(f"note: the code or a file of {arms} changed on the way: not kept, to be run again")
    if not quiet:
        for override in overruled(plan, overrides):
            print(f"note: {override} changes nothing: every arm of experiment={name} sets it")
        for override in unread(jobs, overrides):
            print(f"note: {override} changes nothing: times are measured, not modelled")
    if study.runs:
        _report(study, runs, config, quiet)
    _complain(study, runs)
    return study


def _idle(errand: Errand, overrides: Sequence[str]) -> Iterator[str]:
    """The words of the command that an errand has no use for."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if errand.reads is not None and key not in ("experiment", *errand.reads):
            yield override


def _report(study: Study, runs: Runs, config: DictConfig, quiet: bool) -> None:
    """On the terminal, as files, and to the tracker."""
    try:
        if not quiet:
            show(study)
            for note in study.notes:
                print(f"note: {note}")
        write_comparison(study, study.folder / "comparison.csv")
        again = command(typed("tracking", "jobs", "hydra"))
        write_json(study.folder / RESULT, result_of(study, again).record())
        report = write(study) if config.report else None
        tracked, failure = _tracked(study, runs, config)
    except KeyboardInterrupt:
        raise Interruption(f"while reporting; {_all_there(study, runs)}") from None
    if not quiet:
        _say_where(study.folder, report, len(tracked), config.tracking.mode)
    if failure is not None:
        raise failure


def _tracked(
    study: Study, runs: Runs, config: DictConfig
) -> tuple[Sequence[Path], PagedsimError | None]:
    """What the tracker was given, or why it took nothing, which hides no result."""
    mode = "none" if runs.interrupted else cast(str, config.tracking.mode)
    try:
        given = track(study, mode, project=config.tracking.project, entity=config.tracking.entity)
    except PagedsimError as error:
        return [], error
    return given, None


def _say_where(folder: Path, report: Path | None, tracked: int, mode: str) -> None:
    """Where to look."""
    print(f"results   {shown(folder)}")
    if report is not None:
        print(f"report    {shown(report)}")
        print(f"timeline  {shown(folder / 'timeline.json')}  (open it at ui.perfetto.dev)")
    if tracked:
        later = "; `wandb sync` uploads them" if mode == "offline" else ""
        print(f"tracking  {shown(folder / 'wandb')}  ({tracked} runs{later})")


def _complain(study: Study, runs: Runs) -> None:
    """Say what is missing, if anything is."""
    if runs.interrupted:
        raise Interruption(_all_there(study, runs), study=study)
    if runs.failed:
        raise complaint_of(runs.reasons, study if study.runs else None)
    if not study.finished:
        raise UserError([": ".join(["no request finished", *study.notes[:1]])], study=study)


def _all_there(study: Study, runs: Runs) -> str:
    """What there is of an interrupted study, and how to go on."""
    done, total = len(runs.finished), runs.wanted
    folder = shown(study.folder)
    what = f"{done or 'none'} of {total} runs {'is' if done == 1 else 'are'} complete"
    if runs.interrupted and done:
        some = "and" if len(study.runs) == done else f"{len(study.runs)} of them"
        what += f", {some} in the report"
    if runs.stopped:
        what += f"; {runs.stopped} more left the tables of what they had simulated"
    return f"{what}; the same command with hydra.run.dir={folder} goes on from there"
