"""Probes that are there already: a file each, so that a search of hundreds stays small."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pagedsim.metrics.files import read_json, write_json
from pagedsim.metrics.study import Run
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs, run_study
from pagedsim.run.store import recipe, stored


def run_probes(jobs: Sequence[Job], processes: int | None) -> Runs:
    """Run those that are not there; of each remain a digest of what it is made of, and a summary.

    A job's folder is taken away again: what is in it comes back when the run is typed.
    """
    there = {(job.arm, job.seed): run for job in jobs if (run := _kept(job))}
    missing = [job for job in jobs if (job.arm, job.seed) not in there]
    runs = run_study(missing, processes)
    for job in missing:
        if run := runs.finished.get((job.arm, job.seed)):
            _keep(job, run)
    runs.kept += len(there)
    runs.finished |= there
    return runs


def _kept(job: Job) -> Run | None:
    """The probe as it was left, if it was made of the same."""
    try:
        record = read_json(_file(job))
    except (OSError, ValueError):  # not there, or not whole
        return None
    if record.get("made_of") != _digest(job):
        return None
    return Run(job.arm, job.seed, job.folder, job.config, record["summary"])


def _keep(job: Job, run: Run) -> None:
    """Put a file in the place of a run's folder, unless what it is made of has changed."""
    if stored(job, recipe(job)):
        write_json(_file(job), {"made_of": _digest(job), "summary": run.summary})
    shutil.rmtree(job.folder)


def _file(job: Job) -> Path:
    return job.folder.with_name(f"{job.folder.name}.json")


def _digest(job: Job) -> str:
    return hashlib.sha256(json.dumps(recipe(job), sort_keys=True).encode()).hexdigest()
