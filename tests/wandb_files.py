"""What offline runs of Weights & Biases leave on disk, read back record by record."""

from __future__ import annotations

import importlib
import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagedsim.tracking import Tracked


def records(folder: Path) -> list[Any]:
    """What a run's .wandb file holds, in order."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("*.wandb")
    return [proto.Record.FromString(data) for data in logged(path.read_bytes())]


def logged(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: parts in blocks, each with checksum, length and kind."""
    block, at, whole = 32768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # too little is left of the block for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def items(updates: Any) -> dict[str, Any]:
    return {
        update.key or "/".join(update.nested_key): json.loads(update.value_json)
        for update in updates
    }


def summary_of(found: list[Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            kept |= items(record.summary.update)
    return kept


def history_of(found: list[Any]) -> list[dict[str, Any]]:
    return [
        items(record.history.item)
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def steps_of_metrics(found: list[Any]) -> dict[str, str]:
    """What each group of metrics is drawn over."""
    return {
        record.metric.glob_name: record.metric.step_metric
        for record in found
        if record.WhichOneof("record_type") == "metric" and record.metric.step_metric
    }


def name_of(folder: Path) -> str:
    name: str = run_of(folder).display_name
    return name


def run_of(folder: Path) -> Any:
    return next(r.run for r in records(folder) if r.WhichOneof("record_type") == "run")


def config_of(folder: Path) -> dict[str, Any]:
    """With what was added once the run had begun."""
    kept = items(run_of(folder).config.update)
    for record in records(folder):
        if record.WhichOneof("record_type") == "config":
            kept |= items(record.config.update)
    return kept


def table_of(folder: Path, name: str) -> dict[str, Any]:
    """A table that was logged once, or last."""
    row = history_of(records(folder))[-1]
    table: dict[str, Any] = json.loads((folder / "files" / row[f"{name}/path"]).read_text())
    return table


def charts_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What each of W&B's own charts is, by its name."""
    start = "_wandb/visualize/"
    return {
        name.removeprefix(start): one["panel_config"]
        for name, one in config_of(folder).items()
        if name.startswith(start)
    }


def files_of(folder: Path) -> tuple[str, dict[str, Path]]:
    """The name of the artifact of a study, and where each of its files lies."""
    (artifact,) = (
        record.artifact
        for record in records(folder)
        if record.WhichOneof("record_type") == "artifact" and record.artifact.type == "study"
    )
    contents = artifact.manifest.contents
    return artifact.name, {one.path: Path(one.local_path) for one in contents}


def settle(folder: Path) -> None:
    """Wait until a run's file is whole: W&B writes it in a process of its own."""
    for _ in range(300):
        if any(record.WhichOneof("record_type") == "exit" for record in records(folder)):
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} was not written to its end")


def whole(tracked: Tracked) -> Sequence[Path]:
    """The folders, once all is in them."""
    assert tracked.failure is None
    for folder in tracked.folders:
        settle(folder)
    return tracked.folders


def by_name(folder: Path) -> dict[str, Path]:
    """The runs in a study's folder by their names, once all is in them."""
    found = {}
    for run in sorted((folder / "wandb").glob("offline-run-*")):
        settle(run)
        found[name_of(run)] = run
    return found
