"""Recorded runs of the engine, and their steps as samples for a cost model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import pagedsim
from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.core.errors import require_whole
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.engine_model import replica_of
from pagedsim.metrics.files import REQUESTS, STEPS, SUMMARY, read_table
from pagedsim.run.job import Job
from pagedsim.run.store import Recipe, recipe_of
from pagedsim.sim.cost import CostModel, Sample
from pagedsim.sim.replica import Replica
from pagedsim.spec.run import Settings

_GROUPS = ("backend", "workload", "policy", "preemption", "batching", "memory")
"""Of the configuration: what a run cannot be repeated without."""
_WORDS = ("device", "clock", "model", "dtype")
_COUNTS = {
    **dict.fromkeys(("threads", "block_size", "blocks", "block_bytes", "vocab_size"), 1),
    **dict.fromkeys(("max_seqs", "max_batched_tokens", "max_model_len"), 1),
    **dict.fromkeys(("cpu_blocks", "failed_steps"), 0),
}
"""Whole numbers that the machine's facts must have, and the least that each may be."""


@dataclass(frozen=True)
class Recorded:
    """A recorded run: its configuration, the machine, and its tables."""

    folder: Path
    name: str
    made_of: Recipe
    machine: Settings
    steps: pa.Table
    requests: pa.Table

    @property
    def config(self) -> Settings:
        config: Settings = self.made_of["config"]
        return config

    @property
    def seed(self) -> int:
        seed: int = self.made_of["seed"]
        return seed

    @property
    def changed(self) -> list[str]:
        """Names of inputs of the run that have changed since."""
        now = recipe_of(Job(self.name, self.seed, self.config, self.folder))
        before = self.made_of
        changes = ["pagedsim's own code"] * (before.get("simulator") != now["simulator"])
        for kind in ("code", "files"):
            was = before.get(kind) or {}
            changes += [name for name, digest in now[kind].items() if was.get(name) != digest]
        return changes


def recorded_runs(path: str) -> list[Recorded]:
    """All complete engine runs under a folder; raises ConfigError without any."""
    root = Path(path).expanduser()
    if path and root.is_file():
        raise ConfigError(f"run={path}: is a file, must be a folder")
    if not path or not root.is_dir():
        raise ConfigError(f"run={path}: no such folder")
    files = sorted(root.rglob("run.json"))
    if not files:
        raise ConfigError(f"run={path}: holds no complete run (a run.json beside its tables)")
    runs = [_read(file.parent, str(file.parent.relative_to(root))) for file in files]
    served = [run for run in runs if run is not None]
    if not served:
        raise ConfigError(
            f"run={path}: holds simulated runs only; experiment=record backend=engine makes others"
        )
    return served


def numbers(path: Path, table: pa.Table, name: str) -> NDArray[Any]:
    """A column of a table in a file; raises ConfigError unless all are numbers of 0 or more."""
    if name not in table.column_names:
        raise ConfigError(f"{path}: has no column {name}")
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ConfigError(f"{path}: {name} is of type {column.type}: must be numbers")
    values: NDArray[Any] = column.to_numpy()  # NaN for null
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        row, value = wrong[0], column[int(wrong[0])].as_py()
        raise ConfigError(f"{path}: row {row}: {name}={value}: must be a number of at least 0")
    return values


def _read(folder: Path, name: str) -> Recorded | None:
    """Read a run; None if it was simulated."""
    made_of, summary = _object(folder / "run.json"), _object(folder / SUMMARY)
    machine = summary.get("machine")
    if machine is None and not _engines(made_of):
        return None
    if "version" not in made_of:
        raise ConfigError(f"{folder / 'run.json'}: has no version")
    if made_of["version"] != pagedsim.__version__:
        raise ConfigError(
            f"{folder}: was recorded by pagedsim {made_of['version']}, "
            f"and this is {pagedsim.__version__}"
        )
    seed: Any = made_of.get("seed")
    require_whole(f"{folder / 'run.json'}: seed", seed, 0)
    config = made_of.get("config")
    for group in _GROUPS:
        if not isinstance(config, dict) or not isinstance(config.get(group), dict):
            raise ConfigError(f"{folder / 'run.json'}: config has no settings of {group}")
    facts = _facts(folder / SUMMARY, machine)
    steps, requests = (_table(folder / file) for file in (STEPS, REQUESTS))
    _check_times(folder / STEPS, steps)
    shown = name.removeprefix("runs/") if name != "." else folder.name
    return Recorded(folder, shown, made_of, facts, steps, requests)


def _engines(made_of: Settings) -> bool:
    config = made_of.get("config")
    backend = config.get("backend") if isinstance(config, dict) else None
    target = backend.get("_target_") if isinstance(backend, dict) else None
    return target == "pagedsim.backends.engine.Engine"


@contextmanager
def _whole(path: Path, otherwise: str) -> Iterator[None]:
    """Convert errors of reading the file inside to ConfigError."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing, so the run is not whole") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: is {otherwise}, or not whole: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    with _whole(path, "not JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold an object, not {content!r:.20}")
    return content


def _table(path: Path) -> pa.Table:
    with _whole(path, "no parquet file"):
        return read_table(path)


def _facts(path: Path, machine: object) -> Settings:
    """The facts of the machine, if they are whole."""
    if not isinstance(machine, dict) or machine.get("backend") != "engine":
        raise ConfigError(f"{path}: has no facts of the machine that the engine ran on")
    for name in _WORDS:
        if not isinstance(machine.get(name), str):
            raise ConfigError(f"{path}: machine.{name}={machine.get(name)!r}: must be a text")
    for name, least in _COUNTS.items():
        require_whole(f"{path}: machine.{name}", machine.get(name), least)
    return machine


def _check_times(path: Path, steps: pa.Table) -> None:
    """Check that steps follow one another, and that none ends before it begins."""
    number, start, end = (numbers(path, steps, name) for name in ("step", "start", "end"))
    if not len(number):
        raise ConfigError(f"{path}: holds no steps")
    late = np.concatenate([[False], (start[1:] < end[:-1]) | (number[1:] <= number[:-1])])
    wrong = np.flatnonzero(late | (end < start))
    if len(wrong):
        row = wrong[0]
        raise ConfigError(
            f"{path}: row {row}: step {number[row]} from {start[row]:g} to {end[row]:g} s: must "
            "end after it begins, and begin after the step before it"
        )


# -- steps -----------------------------------------------------------------------------------------

_SAME = (
    *("device", "clock", "threads", "model", "model_impl", "dtype"),
    *("block_size", "block_bytes", "kv_cache_dtype", "quantization"),
    *("tensor_parallel", "async_scheduling"),
)
"""Of the machine: where these differ, so do the times of the same step."""
_REQUEST = Request("", 1)
_TOTALS = (
    *("prefill_tokens", "prefill_attention", "prefill_context", "prefill_pairs"),
    *("decode_count", "decode_context"),
)
"""Of a plan and of a sample."""
_COLUMNS = {
    **{name: name for name in (*_TOTALS, "swap_out", "swap_in")},
    "decode_count": "decode_seqs",
    "prefill_chunks": "prefill_requests",
}
"""Columns of steps.parquet by the fields of a sample."""


@dataclass(frozen=True)
class StepLog:
    """Steps of one machine with one model."""

    samples: list[Sample]
    replica: Replica
    machine: Settings
    source: str
    """A description of their origin, for readers."""


def samples_of(steps: pa.Table) -> list[Sample]:
    """All steps that took time; their swaps and the host's work are included."""
    seconds = (steps["end"].to_numpy() - steps["start"].to_numpy()).tolist()
    values = zip(*(steps[name].to_pylist() for name in _COLUMNS.values()), strict=True)
    return [
        Sample(took, **dict(zip(_COLUMNS, row, strict=True)))
        for took, row in zip(seconds, values, strict=True)
        if took > 0
    ]


def log_of(runs: Iterable[Recorded], source: str) -> StepLog:
    """The steps of several runs; raises ConfigError unless they are of one machine."""
    runs = list(runs)
    first = runs[0]
    for run in runs:
        if failed := run.machine["failed_steps"]:
            raise ConfigError(f"{run.folder}: {failed} of its steps failed: no fit is made of it")
        for name in _COLUMNS.values():
            numbers(run.folder / STEPS, run.steps, name)
        for key in _SAME:
            mine, its = run.machine.get(key), first.machine.get(key)
            if mine != its:
                raise ConfigError(
                    f"{run.folder}: {key}={mine}, but {first.folder} has {its}: a fit "
                    "is of one machine, one model and one block size"
                )
    samples = [sample for run in runs for sample in samples_of(run.steps)]
    return StepLog(samples, replica_of(first.config, first.machine), first.machine, source)


def predicted(cost: CostModel, sample: Sample) -> float:
    """The time that a cost model predicts for a recorded step, swaps included."""
    plan = StepPlan(number=0, now=0.0)
    for name in _TOTALS:
        setattr(plan, f"_{name}", getattr(sample, name))
    plan._chunks = [Chunk(_REQUEST, 0, 0, True)] * sample.prefill_chunks
    moved = sum(cost.swap_seconds(blocks) for blocks in (sample.swap_out, sample.swap_in) if blocks)
    computes = sample.prefill_tokens or sample.decode_count
    return moved + (cost.step_seconds(plan) if computes else 0.0)
