"""Weights & Biases: one run an arm, in a group that is the study.

Offline by default: the runs lie in the study's folder, need no account and no network, and go up
later with `wandb sync`. Nothing is printed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.finding import finding
from pagedsim.metrics.study import Run, Study
from pagedsim.report.comparison import COLUMNS, comparison_rows
from pagedsim.report.load import load_of

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ("mode", "project", "entity")
"""The keys of the group `tracking`."""
MODES = ("offline", "online", "none")
POINTS = 4000
"""Points in time of all arms' series together; each has between 100 and 400."""


def check_mode(mode: str) -> None:
    """Raise ConfigError unless `mode` is one of `MODES`."""
    if mode not in MODES:
        raise ConfigError(f"tracking.mode={mode}: must be one of {', '.join(MODES)}")


def track(
    study: Study,
    mode: str = "offline",
    *,
    project: str = "pagedsim",
    entity: str | None = None,
    plots: Sequence[Path] | None = None,
) -> list[Path]:
    """Hand the study to Weights & Biases; returns the runs' folders (none: nothing tracked).

    Each run has its arm's configuration, the load over time under its first seed, the summary
    as means over its seeds, and a table of every seed's summary; one more, "comparison", has the
    comparison as a table and `plots` (default: what is in the study's plots/). Online, an account
    must be set up (`wandb login`). A study that goes on takes the place of its earlier runs.
    """
    check_mode(mode)
    if mode == "none" or not study.runs:
        return []
    # Offline means that nothing is sent, not even how W&B itself fares.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    ids = _ids(study)
    common: dict[str, Any] = {
        "mode": mode,
        "project": project,
        "entity": entity,
        "group": _group(study),
        "dir": str(study.folder),
        "reinit": "create_new",
        "settings": _settings(),
    }
    folders = []
    try:
        for arm in study.arms:
            config = study.of(arm)[0].config | {"arm": arm}
            own = {"name": arm, "id": ids[arm], "job_type": "arm", "config": config}
            with wandb.init(**common | own) as tracked:
                _log_arm(tracked, study.of(arm), max(100, min(400, POINTS // len(study.arms))))
                folders.append(_folder(tracked))
        own = {"name": "comparison", "id": ids[""], "job_type": "comparison"}
        with wandb.init(**common | own) as tracked:
            if plots is None:
                plots = sorted((study.folder / "plots").glob("*.png"))
            _log_study(tracked, study, plots)
            folders.append(_folder(tracked))
    except wandb.Error as error:
        raise PagedsimError(f"tracking.mode={mode}: Weights & Biases says: {error}") from error
    return folders


def _group(study: Study) -> str:
    """The study's name and folder, of which the last two parts tell the day and the time."""
    return f"{study.name}, {'/'.join(study.folder.resolve().parts[-2:])}"


def _ids(study: Study) -> dict[str, str]:
    """An id for each arm and, under "", for the comparison, kept in the study's folder.

    Offline runs of an earlier time are removed: they are part of those to come.
    """
    path = study.folder / "wandb" / "ids.json"
    ids = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for left in ids.values():
        for folder in path.parent.glob(f"offline-run-*-{left}"):
            shutil.rmtree(folder)
    ids |= {arm: secrets.token_hex(4) for arm in ("", *study.arms) if arm not in ids}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return ids


def _settings() -> Any:
    """Only what the study says: no code, no machine, no console."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def _folder(tracked: Any) -> Path:
    from pathlib import Path

    return Path(tracked.dir).parent


def _log_arm(tracked: Any, runs: Sequence[Run], points: int) -> None:
    import wandb

    tracked.define_metric("time")
    tracked.define_metric("load/*", step_metric="time")
    first = runs[0]
    edges, series = load_of(first, min(points, max(first.steps("end").num_rows, 1)))
    columns = {f"load/{name}": values.tolist() for name, values in series.items()}
    seeds = [{"seed": run.seed} | dict(_flat(run.summary)) for run in runs]
    numbers = [name for name, value in seeds[0].items() if _is_number(value)]
    for i, time in enumerate(edges[1:].tolist()):
        tracked.log({"time": time} | {name: values[i] for name, values in columns.items()})
    rows = [[one.get(name) for name in numbers] for one in seeds]
    tracked.log({"seeds": wandb.Table(columns=numbers, data=rows)})
    tracked.summary.update(_means(seeds))


def _means(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each number's mean over the seeds that have it; the rest as under the first seed."""
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in seeds for name in one if name != "seed"):
        values = [one[name] for one in seeds if name in one]
        means[name] = fmean(values) if all(map(_is_number, values)) else values[0]
    return means | {"seed_count": len(seeds)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _log_study(tracked: Any, study: Study, plots: Sequence[Path]) -> None:
    import wandb

    # A single log call: what belongs together has one step.
    tracked.log(
        {
            "comparison": wandb.Table(columns=list(COLUMNS), data=comparison_rows(study)),
            **{f"plots/{path.stem}": wandb.Image(str(path)) for path in plots},
        }
    )
    tracked.summary.update(
        {"title": study.title, "question": study.question, "finding": " ".join(finding(study))}
    )
    tracked.config.update({"command": study.command, "arms": study.arms})


def _flat(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by slashes; what was not measured is left out."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif not (isinstance(value, float) and math.isnan(value)):
            yield f"{prefix}{name}", value
