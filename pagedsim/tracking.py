"""Weights & Biases: one run an arm, and one of the comparison, in a group that is the study.

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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, NamedTuple, cast

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Result
from pagedsim.report.load import load_of
from pagedsim.report.table import Columns, columns_of, tables

SETTINGS = ("mode", "project", "entity", "tags")
"""The keys of the group `tracking`."""
MODES = ("offline", "online", "none")
LONGEST_TAG = 64
"""Characters of a tag, at most."""
FORBIDDEN = "/\\#?%:"
"""Characters that no name of a project has."""
POINTS = 4000
"""Points in time of all arms' series together; each has between 100 and 400."""
AT_ONCE = 16
"""Runs that are written at the same time: to begin and to end one is mostly waiting."""


class Tracked(NamedTuple):
    """What the tracker took."""

    folders: Sequence[Path] = ()
    failure: PagedsimError | None = None
    """Why it took no more; the study's results do not hang on it."""


def check_settings(
    mode: str, project: object = "pagedsim", entity: object = None, tags: object = ()
) -> None:
    """Raise ConfigError for settings that Weights & Biases would refuse after the runs."""
    if mode not in MODES:
        raise ConfigError(f"tracking.mode={mode}: must be one of {', '.join(MODES)}")
    for key, name in (("project", project), ("entity", entity)):
        if name is None and key == "entity":
            continue
        good = isinstance(name, str) and name.strip() and len(name) <= 128
        if not good or set(str(name)) & set(FORBIDDEN):
            raise ConfigError(
                f"tracking.{key}={name}: must be a name of 1 to 128 characters, none of them "
                f"{' '.join(FORBIDDEN)}"
            )
    fine = isinstance(tags, Sequence) and not isinstance(tags, str)
    if not fine or not all(
        isinstance(tag, str) and tag.strip() and len(tag) <= LONGEST_TAG for tag in cast(Any, tags)
    ):
        raise ConfigError(
            f"tracking.tags={tags}: must be a list of texts of 1 to {LONGEST_TAG} characters"
        )


def track(
    result: Result,
    folder: Path,
    runs: Sequence[Run] = (),
    *,
    comparison: Columns = ((), []),
    series: bool = True,
    mode: str = "offline",
    project: str = "pagedsim",
    entity: str | None = None,
    tags: Sequence[str] = (),
) -> Tracked:
    """Hand a study to Weights & Biases.

    Each arm of `runs` is a run: its configuration, with `series` the load over time under its first
    seed, the summary as means over its seeds, and a table of every seed's summary. One more,
    "comparison", has the columns and rows of that, if there are any, all tables of the result, the
    pictures in the folder's plots/, and the result itself as its summary. Online, an account must
    be set up (`wandb login`). A study that goes on replaces its earlier runs.
    """
    check_settings(mode, project, entity, tags)
    if mode == "none":
        return Tracked()
    # Offline means that nothing is sent, not even how W&B itself fares.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        with _without_pages():
            import wandb
    except Exception as error:  # of this version beside those of what it requires
        reason = _line(error, type(error).__name__)
        message = f"tracking.mode={mode}: Weights & Biases cannot be imported: {reason}"
        return Tracked([], PagedsimError(message))

    logging.getLogger("wandb").setLevel(logging.ERROR)
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    for arm_runs in by_arm.values():
        arm_runs.sort(key=lambda run: run.seed)  # they may come as they were completed
    points = max(100, min(400, POINTS // max(len(by_arm), 1))) if series else 0
    folders: list[Path] = []
    try:
        wandb.setup(_settings(mode=mode))  # offline, it loads nothing of what would send
        account = {"mode": mode, "project": project, "entity": entity, "tags": [*tags] or None}
        begin = _begin(result, folder, by_arm, account)
        # To log is computing, and threads that compute at once hinder each other.
        logging_lock = Lock()

        def arm(name: str) -> Path:
            first = by_arm[name][0]
            config = first.config | {"arm": name, "seed": first.seed, **_made_by(result)}
            with begin(name, "arm", config=config) as tracked:
                with logging_lock:
                    _log_arm(tracked, by_arm[name], points)
                return _folder(tracked)

        with _without_launch():
            with ThreadPoolExecutor(AT_ONCE) as pool:
                folders += pool.map(arm, by_arm)
            with begin("comparison", "comparison") as tracked:
                _log_result(tracked, result, folder, comparison, list(by_arm))
                folders.append(_folder(tracked))
    except Exception as error:  # whatever a version of it raises
        kind = "" if isinstance(error, (wandb.Error, OSError, ValueError)) else type(error).__name__
        reason = _line(error, kind)
        message = f"tracking.mode={mode}: Weights & Biases {wandb.__version__} says: {reason}"
        return Tracked(folders, PagedsimError(message))
    return Tracked(folders)


def _line(error: Exception, kind: str) -> str:
    """What an error says, in one line after its kind, if that is given."""
    return ": ".join(filter(None, (kind, " ".join(str(error).split()))))


@contextmanager
def _without_pages() -> Iterator[None]:
    """W&B's classes are made without reading their source for what it says of each field, which
    takes a third of an import and is for pages that are not used here."""
    try:
        fields: Any = import_module("pydantic._internal._fields")
        read = fields._update_fields_from_docstrings
    except (ImportError, AttributeError):  # another pydantic
        yield
        return
    fields._update_fields_from_docstrings = lambda *_, **__: None
    try:
        yield
    finally:
        fields._update_fields_from_docstrings = read


@contextmanager
def _without_launch() -> Iterator[None]:
    """W&B Launch, which starts jobs on other machines, is a package without contents meanwhile.

    `wandb.init` asks one of its modules for inputs of such a job. There is none, and the package
    would import all of W&B's public API, which takes longer than a run does.
    """
    package = "wandb.sdk.launch"
    spec = None if package in sys.modules else find_spec(package)
    if spec is None:
        yield
        return
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    finally:
        for name in [module for module in sys.modules if f"{module}.".startswith(f"{package}.")]:
            del sys.modules[name]


def _begin(
    result: Result, folder: Path, arms: Iterable[str], account: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function that begins a run of this study by name, kind and configuration."""
    import wandb

    ids = _ids(folder, arms)
    common: dict[str, Any] = {
        **account,
        "group": _group(result.name, folder),
        "dir": str(folder),
        "reinit": "create_new",
    }

    def begin(name: str, kind: str, **more: Any) -> Any:
        settings = {"name": name, "id": ids[name if kind == "arm" else ""], "job_type": kind}
        return wandb.init(**common | settings | more, settings=_settings())

    return begin


def _group(name: str, folder: Path) -> str:
    """The study's name and folder, of which the last two parts tell the day and the time."""
    return f"{name}, {'/'.join(folder.resolve().parts[-2:])}"


def _ids(folder: Path, arms: Iterable[str]) -> dict[str, str]:
    """An id for each arm and, under "", for the comparison, kept in the study's folder.

    Offline runs of an earlier time are removed: they are part of those to come.
    """
    path = folder / "wandb" / "ids.json"
    ids = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for left in ids.values():
        for old in path.parent.glob(f"offline-run-*-{left}"):
            shutil.rmtree(old)
    ids |= {arm: secrets.token_hex(4) for arm in ("", *arms) if arm not in ids}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
    return ids


def _settings(**more: str) -> Any:
    """Only what the study says: no code, no machine, no console; each run takes its own."""
    import wandb

    settings: dict[str, Any] = dict(more)
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
        **settings,
    )


def _folder(tracked: Any) -> Path:
    return Path(tracked.dir).parent


def _log_arm(tracked: Any, runs: Sequence[Run], points: int) -> None:
    """`points`: so many of the load over time, at most; 0 where no tables are kept."""
    import wandb

    seeds = [{"seed": run.seed} | dict(_flat(run.summary)) for run in runs]
    pairs = [pair for summary in seeds for pair in summary.items()]
    numbers = list(dict.fromkeys(name for name, value in pairs if _is_number(value)))
    if points:
        _log_load(tracked, runs[0], points)
    if len(seeds) > 1 or points:
        rows = [[summary.get(name) for name in numbers] for summary in seeds]
        logged = {"seeds": wandb.Table(columns=numbers, data=rows)}
        if replicas := runs[0].replicas:
            columns, cells = columns_of(replicas)
            logged["replicas"] = wandb.Table(columns=[*columns], data=cells)
        tracked.log(logged)
    tracked.summary.update(_means(seeds))


def _log_load(tracked: Any, run: Run, points: int) -> None:
    """What waits, runs and is in use, along the time of the run: the same axis for every run."""
    tracked.define_metric("time")
    tracked.define_metric("load/*", step_metric="time")
    most = run.steps("end").num_rows if run.inside else points
    edges, series = load_of(run, min(points, max(most, 1)))
    columns = {f"load/{name}": values.tolist() for name, values in series.items()}
    for i, time in enumerate(edges[1:].tolist()):
        tracked.log({"time": time} | {name: values[i] for name, values in columns.items()})


def _means(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each number's mean over the seeds that have it; the rest as under the first seed."""
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for summary in seeds for name in summary if name != "seed"):
        values = [summary[name] for summary in seeds if name in summary]
        means[name] = fmean(values) if all(map(_is_number, values)) else values[0]
    return means | {"seed_count": len(seeds)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _log_result(
    tracked: Any, result: Result, folder: Path, comparison: Columns, names: Sequence[str]
) -> None:
    import wandb

    logged: dict[str, Any] = {
        f"plots/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("plots/*.png"))
    }
    columns, rows = comparison
    if columns:
        logged["comparison"] = wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)
    for number, listing in enumerate(tables(result)):
        logged[f"tables/{number}"] = _listing(listing)
    # A single log call: what belongs together has one step.
    tracked.log(logged)
    record = result.record()
    words = {"question": result.question, "finding": " ".join(result.finding)}
    tracked.summary.update({**dict(_flat(record["data"])), "title": result.title, **words})
    tracked.config.update({"command": result.command, "arms": list(names), **_made_by(result)})


def _made_by(result: Result) -> dict[str, Any]:
    return {"pagedsim": dict(result.made_by)} if result.made_by else {}


def _listing(listing: Listing) -> Any:
    import wandb

    names = [listing.title or "what", *(f"column {n}" for n in range(2, len(listing.head) + 1))]
    columns: list[str | int] = [
        head or name for head, name in zip(listing.head, names, strict=True)
    ]
    return wandb.Table(columns=columns, data=[list(row) for row in listing.rows])


def _flat(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by slashes; what was not measured is left out, and what is a table."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif not (name == "replicas" or (isinstance(value, float) and math.isnan(value))):
            yield f"{prefix}{name}", value
