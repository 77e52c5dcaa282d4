"""Weights & Biases: one run an arm, in a group that is the study.

Offline by default: the runs lie in the study's folder, need no account and no network, and go up
later with `wandb sync`. Nothing is printed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.compare import compare
from pagedsim.metrics.finding import finding
from pagedsim.metrics.study import Run, Study
from pagedsim.report.load import load_of

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ("mode", "project", "entity")
"""The keys of the group `tracking`."""
MODES = ("offline", "online", "none")
POINTS = 4000
"""Points in time of all arms' series together; each has between 100 and 400."""
_COMPARISON = (
    *("client", "metric", "arm", "baseline", "seeds", "ours", "theirs"),
    *("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
    "sure",
)


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
    must be set up (`wandb login`).
    """
    check_mode(mode)
    if mode == "none" or not study.runs:
        return []
    # Offline means that nothing is sent, not even how W&B itself fares.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    study.folder.mkdir(parents=True, exist_ok=True)
    common = {
        "mode": mode,
        "project": project,
        "entity": entity,
        "group": study.name,
        "dir": str(study.folder),
        "reinit": "create_new",
        "settings": _settings(),
    }
    folders = []
    try:
        for arm in study.arms:
            config = study.of(arm)[0].config | {"arm": arm}
            with wandb.init(name=arm, config=config, job_type="arm", **common) as tracked:
                _log_arm(tracked, study.of(arm), max(100, min(400, POINTS // len(study.arms))))
                folders.append(_folder(tracked))
        with wandb.init(name="comparison", job_type="comparison", **common) as tracked:
            if plots is None:
                plots = sorted((study.folder / "plots").glob("*.png"))
            _log_study(tracked, study, plots)
            folders.append(_folder(tracked))
    except wandb.Error as error:
        raise PagedsimError(f"tracking.mode={mode}: Weights & Biases says: {error}") from error
    return folders


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
    edges, series = load_of(first, min(points, max(first.steps.num_rows, 1)))
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
            "comparison": wandb.Table(columns=list(_COMPARISON), data=comparison_rows(study)),
            **{f"plots/{path.stem}": wandb.Image(str(path)) for path in plots},
        }
    )
    tracked.summary.update(
        {"title": study.title, "question": study.question, "finding": " ".join(finding(study))}
    )
    tracked.config.update({"command": study.command, "arms": study.arms})


def comparison_rows(study: Study) -> list[list[Any]]:
    """Rows of the comparison table: every arm against the baseline."""
    return [
        [
            *(one.client or "all", label_of(one.key), one.arm, one.baseline, one.seeds),
            *map(_number, (one.ours, one.theirs, *one.difference, *one.ratio)),
            one.sure,
        ]
        for one in compare(study)
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _flat(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by slashes; what was not measured is left out."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif not (isinstance(value, float) and math.isnan(value)):
            yield f"{prefix}{name}", value
