"""A job of Hydra's: the study that its words describe, alone or as one of a sweep.

With `-m` there are many in one command: each leaves a line, and the end is a table of them all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from time import time
from typing import Any, ClassVar, cast

from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag
from pagedsim.metrics.catalogue import keys_of, label_of, scale_of
from pagedsim.metrics.compare import means_of
from pagedsim.metrics.result import Listing, Notice, of_one_kind
from pagedsim.report.console import listings
from pagedsim.report.table import columns_of, write_columns
from pagedsim.run.folder import claimed
from pagedsim.run.pool import TextOf, on_terminal
from pagedsim.run.publish import Published, block_size_notes
from pagedsim.run.runner import Execution
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import ROOT, Conf
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import swept
from pagedsim.user_error import Interruption, UserError, line, shown

_NAME = "job.json"
JobRecord = dict[str, Any]


def run_experiment(config: DictConfig) -> None:
    """Run the study that Hydra has composed; everything that it leaves is in Hydra's output folder.

    As one job of several it prints nothing: its result or its error is kept for the end.
    """
    hydra = HydraConfig.get()
    require_flag("hydra.verbose", hydra.verbose)
    folder = Path(hydra.runtime.output_dir)
    words = cast(list[str], OmegaConf.to_container(hydra.overrides.task))
    conf = Conf(_folders(hydra), str(hydra.job.config_name or ROOT).removesuffix(".yaml"))
    composed = Composed.from_hydra(config, hydra.runtime.choices, words, conf)
    many = hydra.mode == RunMode.MULTIRUN
    chosen = many or any(word.startswith("hydra.run.dir=") for word in hydra.overrides.hydra)
    execution: Execution | None = None
    error: Exception | None = None
    try:
        with claimed(folder, chosen) as place:
            execution = Execution.of(StudySpec.from_composed(words, composed, place), quiet=many)
            execution.execute()
    except Exception as raised:
        if not many:
            raise
        error = raised
    if many:
        record_job(folder, words, execution.published if execution else None, error)


def _folders(hydra: HydraConf) -> list[Traversable]:
    """The folders beside `conf/` that Hydra composes of: --config-dir and hydra.searchpath add
    to them."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders: list[Traversable] = []
    for path in [*(source.full_path() for source in sources), *hydra.searchpath]:
        kind, _, place = path.partition("://")
        if kind == "file":
            folders.append(Path(place))
        elif kind == "pkg" and place not in ("hydra.conf", "pagedsim.conf"):
            folders.append(files(place))
    return folders


def refuse_sweep(words: Sequence[str], folders: Sequence[Path]) -> None:
    """Raise ConfigError for a value of a sweep that no job could have, before any begins."""
    values = {word: list(swept(word)) for word in words}
    if any(word.startswith("experiment=") and not values[word] for word in words):
        return  # experiments that Hydra finds by a pattern
    for word, changes in values.items():
        if len(changes) > 1 and any(c.key == "server" and c.value is None for c in changes):
            raise ConfigError(
                f"{word}: -m tries options, and server=null is none: it is the command without it"
            )
    experiments = [c for some in values.values() for c in some if c.key == "experiment"]
    others = [some for some in values.values() if some and some[0].key != "experiment"]
    for chosen in [[experiment] for experiment in experiments] or [[]]:
        base = Composed.of([*chosen, *(some[0] for some in others)], Conf(folders))
        base.resolved(missing=True)
        for change in (change for some in others for change in some[1:]):
            if change.kind == "add" and base.conf.is_group(change.key):
                base.conf.refuse_unknown(change.key, str(change.value))
                continue
            kind = "force" if change.kind == "add" else change.kind
            base.changed([replace(change, kind=kind)]).resolved(missing=True)


# -- a sweep ---------------------------------------------------------------------------------------


class Multirun(Callback):
    """Where Hydra tells of a sweep; the end of the program asks for it.

    What it notes belongs to the class, since Hydra sends its callbacks on to every job.
    """

    folder: ClassVar[Path | None] = None
    bar: ClassVar[Progress | None] = None
    started_at: ClassVar[float] = 0.0
    """When, by the clock that files are dated with."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The sweep begins."""
        Multirun.folder = folder = Path(str(config.hydra.sweep.dir))
        Multirun.started_at = time()
        for left in folder.glob(f"*/{_NAME}"):  # by another sweep, or this one as it was
            left.unlink()
        # A joblib that is interrupted tells of each semaphore that it cleans away, from a process
        # of its own, which only the environment reaches.
        filters = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))
        os.environ["PYTHONWARNINGS"] = ",".join(filters)
        if on_terminal():
            ended = TextOf(lambda _: f"{sum(1 for _ in folder.glob(f'*/{_NAME}'))} jobs done")
            Multirun.bar = Progress(
                *(ended, TimeElapsedColumn()),
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=2,
            )
            Multirun.bar.add_task("jobs", total=None)
            Multirun.bar.start()


def over() -> None:
    """Take down what a sweep shows while it runs."""
    if Multirun.bar is not None:
        Multirun.bar.stop()
        Multirun.bar = None


def record_job(
    folder: Path,
    overrides: Sequence[str],
    published: Published | None,
    error: Exception | None,
) -> None:
    """Leave what came out of one job, for the table at the end."""
    arms = published.arms if published else None
    record = {
        "overrides": list(overrides),
        "error": None if error is None else line(error),
        "finding": list(published.result.finding) if published else [],
        "notes": list(published.result.notes) if published else [],
        "block_sizes": list(published.block_sizes.items()) if published else [],
        "metrics": keys_of(arms.metrics) if arms else [],
        "arms": means_of(arms) if arms else {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def conclude(interrupted: bool = False, died: Exception | None = None) -> None:
    """Print the table of the sweep that ran, if one did; complain of the jobs that failed.

    `died`: what the launcher says of a job whose process ended before its result was there. What
    it says where no job had begun is for the caller to tell.
    """
    over()
    if (folder := Multirun.folder) is None or not folder.is_dir():
        return
    jobs = read_jobs(folder)
    lost = [] if died is None else _lost(folder, jobs)
    if died is not None and not lost:
        return
    _show(folder, jobs)
    if interrupted:
        runs = sum(1 for _ in folder.glob("*/runs/*/*/run.json"))
        raise Interruption(
            f"{_many(len(jobs), 'job')} had ended, with {_many(runs, 'complete run')} in all; the "
            f"same command with hydra.sweep.dir={shown(folder)} goes on from there"
        )
    varying = _varying(jobs)
    failed = [
        f"job {number} ({_words(job, varying)}): {job['error']}"
        for number, job in jobs.items()
        if job["error"]
    ]
    failed += [f"job {n}: its process died before it had a result" for n in lost]
    if lost:
        failed.append(
            f"{_many(len(jobs), 'job')} had ended; the same command with "
            f"hydra.sweep.dir={shown(folder)} goes on from there"
        )
    if failed:
        raise UserError(failed)


def _lost(folder: Path, jobs: Mapping[int, JobRecord]) -> list[int]:
    """Jobs that this sweep began, and that have left nothing."""
    numbers = (
        int(path.parent.name)
        for path in folder.glob("*/config.yaml")
        if path.parent.name.isdigit() and path.stat().st_mtime >= Multirun.started_at
    )
    return sorted(set(numbers) - jobs.keys())


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def _show(folder: Path, jobs: Mapping[int, JobRecord]) -> None:
    """The table, and where it lies."""
    varying = _varying(jobs)
    console = Console()
    rows = _rows(jobs, varying)
    if rows:
        write_columns(columns_of(rows), folder / "sweep.csv")
        console.print()
        for table in _tables(rows, varying, console.width):
            console.print(table)
    for number, job in jobs.items():
        if job["finding"] and not job["arms"]:  # no table says what it found
            print(f"job {number} ({_words(job, varying)}): {job['finding'][0]}")
    for note in _notes(jobs):
        print(f"note: {note}")
    if rows or any(job["finding"] for job in jobs.values()):
        print(f"results   {shown(folder)}")
    if rows:
        print(f"table     {shown(folder / 'sweep.csv')}")


def _notes(jobs: Mapping[int, JobRecord]) -> list[str]:
    """What is to be known of the jobs, each once, with those of which it is true if not of all."""
    whose: dict[str, list[int]] = {}
    sizes: dict[float, set[int]] = {}
    for number, job in jobs.items():
        for note in dict.fromkeys(job["notes"]):
            whose.setdefault(note, []).append(number)
        for blocks, some in job["block_sizes"]:
            sizes.setdefault(blocks, set()).update(some)
    of_all = block_size_notes({blocks: sorted(some) for blocks, some in sizes.items()})
    whose |= {note: list(jobs) for note in of_all}
    kinds: dict[str, set[int]] = {}
    for note, same in zip(whose, of_one_kind(map(Notice, whose)), strict=True):
        kinds.setdefault(same.what, set()).update(whose[note])
    return [
        note if len(some) == len(jobs) else f"job {', '.join(map(str, sorted(some)))}: {note}"
        for note, some in kinds.items()
    ]


def read_jobs(folder: Path) -> dict[int, JobRecord]:
    """The jobs of a sweep that have ended, by number."""
    jobs = {}
    for path in folder.glob(f"*/{_NAME}"):
        if path.parent.name.isdigit():
            jobs[int(path.parent.name)] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(jobs.items()))


def _settings(job: JobRecord) -> dict[str, str]:
    pairs = (override.partition("=") for override in job["overrides"])
    return {key: value for key, _, value in pairs}


def _varying(jobs: Mapping[int, JobRecord]) -> list[str]:
    """The settings in which the jobs differ."""
    every = [_settings(job) for job in jobs.values()]
    keys = dict.fromkeys(key for settings in every for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in every}) > 1]


def _words(job: JobRecord, varying: Sequence[str]) -> str:
    settings = _settings(job)
    return ", ".join(f"{key}={settings[key]}" for key in varying or settings if key in settings)


def _rows(jobs: Mapping[int, JobRecord], varying: Sequence[str]) -> list[dict[str, Any]]:
    """One row an arm of a job."""
    rows = []
    several = any(len(job["arms"]) > 1 for job in jobs.values())
    for number, job in jobs.items():
        settings = _settings(job)
        for arm, means in job["arms"].items():
            row: dict[str, Any] = {"job": number}
            row |= {key: settings.get(key, "") for key in varying}
            row |= {"arm": arm} if several else {}
            rows.append(row | {key: means.get(key) for key in job["metrics"]})
    return rows


def _tables(
    rows: Sequence[Mapping[str, Any]], varying: Sequence[str], width: int
) -> Iterator[Table]:
    """One table, or several with some of the metrics each where the terminal is narrow."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    names = [column for column in columns if column in ("job", *varying, "arm")]
    metrics = [column for column in columns if column not in names]
    head = [*(name.rpartition(".")[2] for name in names), *map(label_of, metrics)]
    cells = [[str(row.get(name, "")) for row in rows] for name in names]
    for metric in metrics:
        values = [math.nan if row.get(metric) is None else row[metric] for row in rows]
        cells.append(list(map(scale_of(metric, values).text, values)))
    listing = Listing("", head, list(zip(*cells, strict=True)))
    return listings(listing, width, names=len(names))
