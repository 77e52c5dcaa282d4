"""Runs that are there already: a study that is started again goes on where it ended.

A complete run keeps what it was made from. It is taken as it is where that is the same: the
configuration, the simulator's code, and the code and files that the configuration names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pagedsim
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import lacks_percentiles
from pagedsim.metrics.files import read_summary
from pagedsim.metrics.jsons import read_json, write_json
from pagedsim.run import code
from pagedsim.run.job import Job

_NAME = "run.json"
_NO_MATTER = ("study", "tracking", "report", "jobs", "seed", "seeds")
"""Keys of the configuration that change no run, or are part of the job."""

Recipe = dict[str, Any]
"""All that decides what comes out of a run."""


class Store(ABC):
    """What remains of a run."""

    @abstractmethod
    def stored(self, job: Job, made_of: Recipe) -> Run | None:
        """The run as it was left, if it is complete and made of the same."""

    def forget(self, job: Job) -> None:
        """What is in the folder is about to be written over."""
        (job.folder / _NAME).unlink(missing_ok=True)

    @abstractmethod
    def store(self, job: Job, made_of: Recipe, run: Run) -> bool:
        """Mark the run as complete, unless what it was made of has changed meanwhile.

        `made_of` is the recipe from before the run. Which code ran is not known where it was
        edited since, so such a run is made again by whoever goes on with the study.
        """


class Tables(Store):
    """A folder a run: its tables, its summary, and in run.json what it was made from."""

    def stored(self, job: Job, made_of: Recipe) -> Run | None:
        try:
            same = json.loads((job.folder / _NAME).read_text(encoding="utf-8")) == made_of
            summary = read_summary(job.folder) if same else None
        except (OSError, ValueError):  # not there, or not whole
            return None
        if summary is None or _lacks(summary, job):
            return None
        return Run(job.arm, job.number, job.folder, job.config, summary)

    def store(self, job: Job, made_of: Recipe, run: Run) -> bool:
        if recipe(job) != made_of:
            return False
        text = json.dumps(made_of, indent=2, sort_keys=True)
        (job.folder / _NAME).write_text(text + "\n", encoding="utf-8")
        return True


class Summaries(Store):
    """A file a run, so that a search of hundreds stays small: its summary, and a digest."""

    def stored(self, job: Job, made_of: Recipe) -> Run | None:
        try:
            record = read_json(_file(job))
        except (OSError, ValueError):  # not there, or not whole
            return None
        if record.get("made_of") != _digest(made_of):
            return None
        if _lacks(record["summary"], job):
            return None
        return Run(job.arm, job.number, job.folder, job.config, record["summary"])

    def store(self, job: Job, made_of: Recipe, run: Run) -> bool:
        """Put a file in the place of the folder, whose tables come back when the run is typed."""
        same = recipe(job) == made_of
        if same:
            kept = {"made_of": _digest(made_of), "summary": run.summary}
            write_json(_file(job), kept, ordered=True)
        shutil.rmtree(job.folder, ignore_errors=True)  # it may be asked twice
        return same


def _lacks(summary: Mapping[str, Any], job: Job) -> bool:
    """Whether the study names percentiles by now that a summary has not."""
    return lacks_percentiles(summary, job.config.get("study"))


def recipe(job: Job) -> Recipe:
    """What `job` is made of, as it is now."""
    config = {key: value for key, value in job.config.items() if key not in _NO_MATTER}
    made = {
        "version": pagedsim.__version__,
        "seed": job.seed,
        "config": config,
        "simulator": code.of_the_simulator(),
        "code": {path: code.of_target(path) for path in sorted(set(_paths(config)))},
        "files": {path: _stamp(path) for path in sorted(set(_named(config, "path", "config")))},
    }
    plain: Recipe = json.loads(json.dumps(made, default=str))
    return plain


def _paths(config: Any) -> Iterator[str]:
    """Where its classes are: what a policy stands around may be named by its path alone."""
    yield from _named(config, "_target_")
    yield from (of for of in _named(config, "of") if "." in of)


def _named(value: Any, *keys: str) -> Iterator[str]:
    """The texts under `keys`, however deep."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in keys and isinstance(inner, str):
                yield inner
            yield from _named(inner, *keys)


def _stamp(path: str) -> list[int] | None:
    """Size and time of a file: whether it was changed."""
    try:
        state = Path(path).expanduser().stat()
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns]


def _file(job: Job) -> Path:
    return job.folder.with_name(f"{job.folder.name}.json")


def _digest(made_of: Recipe) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
