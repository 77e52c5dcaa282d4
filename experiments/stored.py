"""Runs that are there already: a study that is started again goes on where it ended.

A complete run keeps in run.json what it was made from. It is taken as it is where that is the
same: the configuration, the version, and the code and files that the configuration names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pagedsim
from experiments.arm import Job
from pagedsim.metrics.files import read_run
from pagedsim.metrics.study import Run

_NAME = "run.json"
_NO_MATTER = ("study", "tracking", "report", "jobs", "seed", "seeds")
"""Keys of the configuration that change no run, or are part of the job."""


def stored(job: Job) -> Run | None:
    """The run as it was left, if it is complete and what `job` would do again."""
    try:
        same = json.loads((job.folder / _NAME).read_text(encoding="utf-8")) == recipe(job)
        records = read_run(job.folder) if same else None
    except (OSError, ValueError):  # not there, or not whole
        return None
    return Run(job.arm, job.seed, job.folder, job.config, *records) if records else None


def forget(job: Job) -> None:
    """What is in the folder is about to be written over."""
    (job.folder / _NAME).unlink(missing_ok=True)


def store(job: Job) -> None:
    """Mark the run in the folder as complete."""
    text = json.dumps(recipe(job), indent=2, sort_keys=True)
    (job.folder / _NAME).write_text(text + "\n", encoding="utf-8")


def recipe(job: Job) -> dict[str, Any]:
    """All that decides what comes out of a run."""
    config = {key: value for key, value in job.config.items() if key not in _NO_MATTER}
    if isinstance(config.get("workload"), Mapping):
        config["workload"] = {k: v for k, v in config["workload"].items() if k != "seed"}
    made = {
        "version": pagedsim.__version__,
        "seed": job.seed,
        "config": config,
        "code": {target: _source(target) for target in sorted(set(_named(config, "_target_")))},
        "files": {path: _stamp(path) for path in sorted(set(_named(config, "path", "config")))},
    }
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return plain


def _named(value: Any, *keys: str) -> Iterator[str]:
    """The texts under `keys`, however deep."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in keys and isinstance(inner, str):
                yield inner
            yield from _named(inner, *keys)


def _source(target: str) -> str | None:
    """A digest of the module that a class or function comes from."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            spec = find_spec(".".join(parts[:cut]))
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]
    return None


def _stamp(path: str) -> list[int] | None:
    """Size and time of a file: whether it was changed."""
    try:
        state = Path(path).expanduser().stat()
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns]
