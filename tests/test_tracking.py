"""What an offline run leaves on disk, read back record by record."""

from __future__ import annotations

import importlib
import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedsim import report
from pagedsim.core import ConfigError
from pagedsim.metrics.study import Study
from pagedsim.report.comparison import comparison_rows
from pagedsim.tracking import track
from tests.metrics.tables import study_of


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


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[Path]]:
    study = study_of(tmp_path_factory.mktemp("tracked"), seeds=2)
    report.write(study)
    folders = track(study, "offline")
    for folder in folders:
        settle(folder)
    return study, folders


def settle(folder: Path) -> None:
    """Wait until a run's file is whole: W&B writes it in a process of its own."""
    for _ in range(300):
        if any(record.WhichOneof("record_type") == "exit" for record in records(folder)):
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} was not written to its end")


def test_one_run_an_arm_in_a_group(tracked: tuple[Study, list[Path]]) -> None:
    study, folders = tracked
    runs = [
        next(r.run for r in records(folder) if r.WhichOneof("record_type") == "run")
        for folder in folders
    ]
    assert [run.display_name for run in runs] == ["fcfs", "urgent", "comparison"]
    folder = study.folder
    assert {run.run_group for run in runs} == {f"small, {folder.parent.name}/{folder.name}"}
    assert all(folder.parent == study.folder / "wandb" for folder in folders)
    config = items(runs[1].config.update)
    assert config["arm"] == "urgent"
    assert config["policy"] == {"name": "urgent"}


def test_a_run_holds_its_summary_and_its_load(tracked: tuple[Study, list[Path]]) -> None:
    study, folders = tracked
    for arm, folder in zip(study.arms, folders, strict=False):
        first, second = study.of(arm)
        found = records(folder)
        kept = summary_of(found)
        for name, value in first.summary.items():
            if isinstance(value, float) and not math.isnan(value):
                assert kept[name] == pytest.approx((value + second.summary[name]) / 2)
        assert kept["seed_count"] == 2
        *history, last = history_of(found)
        assert len(history) == 210
        # Bins as long as a step hold each step's own value.
        used = [
            100 * blocks / 10 for blocks in first.steps("used_blocks")["used_blocks"].to_pylist()
        ]
        assert [row["load/kv"] for row in history] == pytest.approx(used)
        assert history[-1]["time"] == pytest.approx(21.0)
        table = json.loads((folder / "files" / last["seeds/path"]).read_text())
        column = table["columns"].index("clients/chat/ttft_p99")
        ttfts = [run.summary["clients"]["chat"]["ttft_p99"] for run in (first, second)]
        assert [row[column] for row in table["data"]] == ttfts
        assert [row[0] for row in table["data"]] == [0, 1]


def test_the_comparison_is_a_table_with_pictures(tracked: tuple[Study, list[Path]]) -> None:
    study, folders = tracked
    (row,) = history_of(records(folders[-1]))
    table = json.loads((folders[-1] / "files" / row["comparison/path"]).read_text())
    assert table["data"] == comparison_rows(study)
    assert table["columns"][:4] == ["client", "metric", "arm", "baseline"]
    for name in ("effect", "latency", "load", "requests"):
        picture = folders[-1] / "files" / row[f"plots/{name}/path"]
        assert picture.read_bytes() == (study.folder / "plots" / f"{name}.png").read_bytes()
    assert "cuts the chat TTFT" in summary_of(records(folders[-1]))["finding"]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(track(study_of(tmp_path, seeds=1, arms=("a",)))) == 2
    assert capfd.readouterr() == ("", "")


def test_a_study_that_goes_on_takes_the_place_of_its_runs(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("a",))
    first = track(study)
    more = track(study_of(tmp_path, seeds=1, arms=("a", "b")))
    assert [path.name[-8:] for path in first] == [more[0].name[-8:], more[-1].name[-8:]]
    assert len({path.name[-8:] for path in more}) == 3
    assert sorted((tmp_path / "wandb").glob("offline-run-*")) == sorted(more)


def test_tracking_can_be_left_out(tmp_path: Path) -> None:
    assert track(study_of(tmp_path, seeds=1), "none") == []
    assert not (tmp_path / "wandb").exists()


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.mode=of: must be one of offline, online"):
        track(study_of(tmp_path, seeds=1), "of")
