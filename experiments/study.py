"""Run a study: compose its arms, run them in parallel under several seeds, gather and report."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.arm import Job, run_job
from experiments.compare import Compare
from pagedsim.core import PagedsimError
from pagedsim.metrics.study import Run, Study


def jobs_of(plan: Compare, overrides: Sequence[str], folder: Path) -> list[Job]:
    """Every arm under every seed, each with the configuration that its overrides give."""
    jobs = []
    for arm, changes in plan.arms.items():
        config = compose("config", overrides=[*overrides, *changes])
        plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
        for seed in range(config.seed, config.seed + config.seeds):
            jobs.append(Job(arm, seed, plain, folder / "runs" / arm / f"seed-{seed}"))
    return jobs


def run_study(plan: Compare, config: DictConfig, overrides: Sequence[str], folder: Path) -> Study:
    """Run all arms; what one arm does wrong is reported at the end and stops no other."""
    if plan.baseline is not None and plan.baseline not in plan.arms:
        raise PagedsimError(
            f"study.baseline={plan.baseline}: must be one of the arms {', '.join(plan.arms)}"
        )
    study = Study(
        name=folder.name.split("-", 3)[-1],
        title=plan.title,
        question=plan.question,
        folder=folder,
        command="python -m pagedsim " + " ".join(sys.argv[1:]),
        metrics=tuple(plan.metrics),
        baseline=plan.baseline or next(iter(plan.arms)),
        swept=plan.swept,
    )
    jobs = jobs_of(plan, overrides, folder)
    finished: dict[tuple[str, int], Run] = {}
    try:
        for job, result in _each(jobs, config.jobs):
            if isinstance(result, Run):
                finished[job.arm, job.seed] = result
            else:
                study.failed[f"{job.arm}, seed {job.seed}"] = result
    except KeyboardInterrupt:
        study.failed["interrupted"] = f"{len(finished)} of {len(jobs)} runs are complete"
    study.runs = [finished[j.arm, j.seed] for j in jobs if (j.arm, j.seed) in finished]
    clients = dict.fromkeys(c for run in study.runs for c in run.summary.get("clients", {}))
    study.clients = tuple(clients)
    return study


def _each(jobs: Sequence[Job], processes: int | None) -> Iterator[tuple[Job, Run | str]]:
    """Results as they come, with a progress bar."""
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("runs", total=len(jobs))
        for job, result in _in_processes(jobs, processes):
            progress.advance(task)
            yield job, result


def _in_processes(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Run | str]]:
    if processes == 1:
        for job in jobs:
            yield job, run_job(job)
        return
    # A fork shares what is imported already; elsewhere each process imports it anew.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(processes, multiprocessing.get_context(method)) as pool:
        futures: dict[Future[Run | str], Job] = {pool.submit(run_job, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(cancel_futures=True)
            raise
