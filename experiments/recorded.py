"""Runs of the engine that an earlier study has left, as others take them up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import pagedsim
from experiments.backend import Settings
from pagedsim.core import ConfigError
from pagedsim.metrics.files import REQUESTS, STEPS, SUMMARY, read_json, read_table


@dataclass(frozen=True)
class Recorded:
    """One run: what it was made from, the machine, and its tables."""

    folder: Path
    name: str
    seed: int
    config: Settings
    machine: Settings
    steps: pa.Table
    requests: pa.Table


def recorded_runs(path: str) -> list[Recorded]:
    """Every complete run of the engine under a folder; raises ConfigError where there is none."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ConfigError(f"run={path}: no such folder")
    found = sorted(root.rglob("run.json"))
    if not found:
        raise ConfigError(f"run={path}: holds no complete run (a run.json beside its tables)")
    runs = [_read(file.parent, str(file.parent.relative_to(root))) for file in found]
    served = [run for run in runs if run is not None]
    if not served:
        raise ConfigError(
            f"run={path}: holds simulated runs only; experiment=record backend=engine makes others"
        )
    return served


def _read(folder: Path, name: str) -> Recorded | None:
    """A run; None for one that was simulated."""
    try:
        made: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        summary = read_json(folder / SUMMARY)
        if summary.get("machine", {}).get("backend") != "engine":
            return None
        version, config, seed = made["version"], made["config"], made["seed"]
        tables = [read_table(folder / file) for file in (STEPS, REQUESTS)]
    except (OSError, KeyError, ValueError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{folder}: cannot be read as a run: {error}") from error
    if version != pagedsim.__version__:
        raise ConfigError(
            f"{folder}: was recorded by pagedsim {version}, and this is {pagedsim.__version__}"
        )
    shown = name.removeprefix("runs/") if name != "." else folder.name
    return Recorded(folder, shown, seed, config, summary["machine"], *tables)
