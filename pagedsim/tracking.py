"""Weights & Biases: a run for each seed of each arm, and one of the study.

The seeds of an arm are a group, of which W&B shows mean and spread. A study of a single run is one
run. So is every study under `wandb agent`: its process has the agent's run alone.

Offline by default: the runs lie in the study's folder, need no account and no network, and go up
later with `wandb sync`. Nothing is printed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import label_of, latency_of
from pagedsim.metrics.compare import average
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.result import Listing, Result
from pagedsim.report.figures import FigureSpec, Panel
from pagedsim.report.load import load_of
from pagedsim.report.table import Columns, columns_of, tables

SETTINGS = ("mode", "project", "entity", "tags")
"""The keys of the group `tracking`."""
MODES = ("offline", "online", "none")
LONGEST_TAG = 64
"""Characters of a tag, at most."""
FORBIDDEN = "/\\#?%:"
"""Characters that no name of a project has."""
POINTS = 800
"""Points in time of all runs' series together; each has between 40 and 400."""
ROWS = 500
"""Rows of all runs' requests together, or of their steps; more are in the files alone."""
CHARTS, CHART_POINTS, BINS = 24, 100, 32
"""Panels of figures, points of a line in them, and bins of a histogram."""
LARGEST = 64 << 20
"""Bytes of the study's files, from the smallest on; the rest stays where it lies."""
AGENT = "WANDB_SWEEP_ID"
"""What `wandb agent` sets; W&B then gives each run of a process the id of the agent's."""
AT_ONCE = 16
"""Runs that are written at the same time: to begin and to end one is mostly waiting."""


_NONE: Mapping[str, Any] = {}


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
    labels: Mapping[str, Mapping[str, object]] = _NONE,
    comparison: Columns = ((), []),
    drawings: Mapping[str, FigureSpec] = _NONE,
    bars: Mapping[str, Mapping[str, float]] = _NONE,
    series: bool = True,
    mode: str = "offline",
    project: str = "pagedsim",
    entity: str | None = None,
    tags: Sequence[str] = (),
) -> Tracked:
    """Hand a study to Weights & Biases.

    Each of `runs` is a run: the settings of its arm in short, from `labels`, and in full, its
    summary, and with `series` the load over time and the latencies of its requests. One more, of
    the study, has `comparison`, all tables of the result, the pictures in the folder's plots/, the
    lines of `drawings` and `bars`, by arm and metric, as charts, the files, and the result itself;
    of a single arm also the means over its seeds. Online, an account must be set up (`wandb
    login`). A study that goes on replaces its earlier runs.
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
    study = _Study(result, folder, runs, labels, series)
    account = {"mode": mode, "project": project, "entity": entity, "tags": [*tags] or None}
    folders: list[Path] = []
    try:
        wandb.setup(_settings(mode=mode))  # offline, it loads nothing of what would send
        begin = _begin(folder, list(map(_name, study.apart)), account)
        with _without_launch(), _staged_in(folder):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                folders += pool.map(partial(_track_run, begin, study, Lock()), study.apart)
            folders.append(_track_study(begin, study, comparison, drawings, bars))
    except Exception as error:  # whatever a version of it raises
        kind = "" if isinstance(error, (wandb.Error, OSError, ValueError)) else type(error).__name__
        reason = _line(error, kind)
        message = f"tracking.mode={mode}: Weights & Biases {wandb.__version__} says: {reason}"
        return Tracked(folders, PagedsimError(message))
    return Tracked(folders)


class _Study:
    """A study, as far as it has runs of Weights & Biases."""

    def __init__(
        self,
        result: Result,
        folder: Path,
        runs: Sequence[Run],
        labels: Mapping[str, Mapping[str, object]],
        tables: bool,
    ) -> None:
        self.result, self.folder, self.labels = result, folder, labels
        self.arms: dict[str, list[Run]] = {run.arm: [] for run in runs}
        for run in sorted(runs, key=lambda run: run.seed):  # they may come as they were completed
            self.arms[run.arm].append(run)
        self.runs = [run for runs in self.arms.values() for run in runs]
        self.single = self.runs[0] if len(self.runs) == 1 else None
        self.apart = [] if self.single or AGENT in os.environ else self.runs
        """Those that are runs of their own."""
        self.room = max(len(self.runs), 1) if tables else 0
        """A run has this part of the points and rows that there are; 0 where none are kept."""
        self.name = f"{result.name}, {'/'.join(folder.resolve().parts[-2:])}"
        """With the day and the time."""

    def config(self, run: Run | None) -> dict[str, Any]:
        """The configuration of a run; None: what all runs have."""
        arms = self.arms if run is None else [run.arm]
        first, *others = [self.labels.get(arm, _NONE) for arm in arms] or [_NONE]
        config: dict[str, Any] = {
            key: value
            for key, value in first.items()
            if all(key in other and other[key] == value for other in others)
        }
        config |= {"study": self.name, "experiment": self.result.name}
        if self.result.made_by:
            config["pagedsim"] = dict(self.result.made_by)
        own = {"arm": run.arm, "seed": run.seed, "settings": run.config} if run else {}
        return config | own


def _name(run: Run) -> str:
    return f"{run.arm} seed {run.seed}"


def _track_run(begin: Callable[..., Any], study: _Study, lock: Lock, run: Run) -> Path:
    with begin(_name(run), "run", f"{study.name}: {run.arm}", study.config(run)) as tracked:
        with lock:  # to log is computing, and threads that compute at once hinder each other
            _log(tracked, dict(_flat(run.summary)), _of_run(tracked, run, study.room))
        return _folder(tracked)


def _track_study(
    begin: Callable[..., Any],
    study: _Study,
    comparison: Columns,
    drawings: Mapping[str, FigureSpec],
    bars: Mapping[str, Mapping[str, float]],
) -> Path:
    kind = "run" if study.single else "study"
    config = study.config(study.single)
    config |= {"command": study.result.command, "arms": list(study.arms)}
    with begin(study.result.name, kind, study.name, config) as tracked:
        logged = _of_run(tracked, study.single, study.room) if study.single else {}
        logged |= _pictures(study.folder, drawings) | _tables(study.result, comparison)
        logged |= _bars(bars)
        summaries = [dict(_flat(run.summary)) for run in study.runs]
        of_one = _means(summaries) if len(study.arms) == 1 else {}
        _log(tracked, {**dict(_of_result(study.result)), **of_one}, logged)
        tracked.log_artifact(_files(study))
        return _folder(tracked)


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


@contextmanager
def _staged_in(folder: Path) -> Iterator[None]:
    """Copies of tables that wait for their upload lie beside the runs, not in the home folder."""
    name = "WANDB_DATA_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(folder.resolve() / "wandb")
    try:
        yield
    finally:
        del os.environ[name]


def _begin(folder: Path, names: Sequence[str], account: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that begins a run of this study by name, kind, group and configuration."""
    import wandb

    ids = _ids(folder, names)

    def begin(name: str, kind: str, group: str, config: Mapping[str, Any]) -> Any:
        own: dict[str, Any] = {"name": name, "id": ids[name if name in names else ""]}
        own |= {**account, "group": group}
        if AGENT in os.environ:  # the sweep says all of it
            own = {"mode": account["mode"], "tags": account["tags"]}
        return wandb.init(
            **own,
            job_type=kind,
            config=dict(config),
            dir=str(folder),
            reinit="create_new",
            settings=_settings(),
        )

    return begin


def _ids(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """An id for each run and, under "", for the study, kept in the study's folder.

    Offline runs of an earlier time are removed: they are part of those to come.
    """
    path = folder / "wandb" / "ids.json"
    ids = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for left in ids.values():
        for old in path.parent.glob(f"offline-run-*-{left}"):
            shutil.rmtree(old)
    shutil.rmtree(path.parent / "artifacts", ignore_errors=True)
    ids |= {name: secrets.token_hex(4) for name in ("", *names) if name not in ids}
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


def _log(tracked: Any, values: Mapping[str, Any], logged: Mapping[str, Any]) -> None:
    """Log values as one step; of metrics, those of all requests, so that each has a panel of its
    own and `wandb agent` knows it. The rest is in the run's summary."""
    panels = {
        name: value for name, value in values.items() if "/" not in name and _is_number(value)
    }
    tracked.log({**panels, **logged})
    tracked.summary.update({name: value for name, value in values.items() if name not in panels})


def _of_run(tracked: Any, run: Run, room: int) -> dict[str, Any]:
    """Histograms and tables of a run, once its load over time is logged; `room` is the study's."""
    import wandb

    logged: dict[str, Any] = {}
    if replicas := run.replicas:
        columns, cells = columns_of(replicas)
        logged["replicas"] = wandb.Table(columns=[*columns], data=cells)
    if not room:
        return logged
    _log_load(tracked, run, max(40, min(400, POINTS // room)))
    requests = run.by_column()
    for name in (name for name, metric in METRICS.items() if metric.kind == "latency"):
        times = latency_of(name, requests)
        if len(known := times[np.isfinite(times)]):
            bins = np.histogram(known, BINS)
            logged[f"histograms/{name}"] = wandb.Histogram(np_histogram=bins)
    for name, read, key in (("requests", run.requests, "request"), ("steps", run.steps, "step")):
        if 0 < read(key).num_rows <= ROWS // room:
            table = read()
            plain = [f.name for f in table.schema if not pa.types.is_nested(f.type)]
            columns, cells = columns_of(table.select(plain).to_pylist())
            logged[f"tables/{name}"] = wandb.Table(columns=[*columns], data=cells)
    return logged


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
    for name in dict.fromkeys(name for summary in seeds for name in summary):
        values = [summary[name] for summary in seeds if name in summary]
        means[name] = average(values).mean if all(map(_is_number, values)) else values[0]
    return means | {"seed_count": len(seeds)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pictures(folder: Path, drawings: Mapping[str, FigureSpec]) -> dict[str, Any]:
    """The pictures in plots/, and the panels of figures that consist of lines as charts."""
    import wandb

    logged: dict[str, Any] = {
        f"plots/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("plots/*.png"))
    }
    panels = [
        (f"charts/{name}_{number}", panel)
        for name, figure in drawings.items()
        if figure.data is not None and name != "load"  # which each run has
        for number, panel in enumerate(figure.data().panels, 1)
    ]
    return logged | {name: _chart(panel) for name, panel in panels[:CHARTS]}


def _tables(result: Result, comparison: Columns) -> dict[str, Any]:
    import wandb

    logged: dict[str, Any] = {}
    columns, rows = comparison
    if columns:
        logged["comparison"] = wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)
    for number, listing in enumerate(tables(result)):
        logged[f"tables/{number}"] = _listing(listing)
    return logged


def _chart(panel: Panel) -> Any:
    """A panel's lines, thinned out where they are fine."""
    import wandb

    xs, ys, names = [], [], []
    for line in panel.series:
        known = np.flatnonzero(np.isfinite(line.x) & np.isfinite(line.y))
        some = known[np.unique(np.linspace(0, len(known) - 1, CHART_POINTS).astype(int))]
        xs.append(line.x[some].tolist())
        ys.append(line.y[some].tolist())
        names.append(", ".join(filter(None, (line.arm, line.client))) or panel.y.label)
    label, text = panel.y.label, panel.y.text
    title = panel.title.replace(label, text) if label in panel.title else f"{panel.title}: {text}"
    return wandb.plot.line_series(xs, ys, names, title, panel.x.text)


def _bars(means: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A chart for each metric, with a bar for each arm that has it."""
    import wandb

    charts = {}
    for key in dict.fromkeys(key for of in means.values() for key in of):
        rows = [[arm, of[key]] for arm, of in means.items() if key in of]
        table = wandb.Table(columns=["arm", key], data=rows)
        charts[f"charts/{key}"] = wandb.plot.bar(table, "arm", key, label_of(key))
    return charts


def _files(study: _Study) -> Any:
    """An artifact of the study's files as they lie; they are not copied."""
    import wandb

    places = [study.folder, *(run.folder for run in study.runs)]
    paths = [path for place in places if place.is_dir() for path in place.iterdir()]
    sizes = {path: path.stat().st_size for path in sorted(paths) if path.is_file()}
    name = re.sub(r"[^\w.-]", "-", study.result.name)
    artifact, total = wandb.Artifact(name, "study", study.result.title), 0
    for path in sorted(sizes, key=lambda path: sizes[path]):
        if (total := total + sizes[path]) <= LARGEST:
            inside = str(path.relative_to(study.folder))
            artifact.add_file(str(path), inside, skip_cache=True, policy="immutable")
    return artifact


def _of_result(result: Result) -> Iterator[tuple[str, Any]]:
    """The result in numbers and words."""
    yield from _flat(result.record()["data"])
    yield "title", result.title
    yield "question", result.question
    yield "finding", " ".join(result.finding)


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
