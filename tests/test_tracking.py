"""What an offline run leaves on disk, read back record by record."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedsim import report
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.report.plots import drawings_of
from pagedsim.report.table import columns_of, comparison_of
from pagedsim.tracking import track
from tests.conftest import Call
from tests.metrics.tables import fleet_study, result_of, study_of
from tests.wandb_files import (
    config_of,
    history_of,
    records,
    run_of,
    summary_of,
    table_of,
    whole,
)

MADE_BY = {"version": "1.2.3", "commit": "abc"}
LISTING = Listing("More", ["", "of it", ""], [["first", "1", "low"], ["second", "2", "high"]])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Arms, Sequence[Path]]:
    study = study_of(tmp_path_factory.mktemp("tracked"), seeds=2)
    result = replace(result_of(study), rows=[Row("ratio", 3.0, (2.7, 8), "×")], listings=[LISTING])
    report.write(result, drawings_of(study), study.folder, study)
    result = replace(result, made_by=MADE_BY)
    against = comparison_of(study)
    return study, whole(
        track(result, study.folder, study.runs, comparison=against, tags=["nightly", "a"])
    )


def test_one_run_an_arm_in_a_group(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    runs = [run_of(folder) for folder in folders]
    assert [run.display_name for run in runs] == ["fcfs", "urgent", "comparison"]
    folder = study.folder
    assert {run.run_group for run in runs} == {f"small, {folder.parent.name}/{folder.name}"}
    assert all(folder.parent == study.folder / "wandb" for folder in folders)
    config = config_of(folders[1])
    assert config["arm"] == "urgent"
    assert config["policy"] == {"name": "urgent"}
    assert config["seed"] == 0
    assert [sorted(run.tags) for run in runs] == [["a", "nightly"]] * 3
    assert config["pagedsim"] == MADE_BY
    config = config_of(folders[2])
    assert config["pagedsim"] == MADE_BY
    assert config["command"] == study.command
    assert config["arms"] == ["fcfs", "urgent"]


def test_a_fleet_s_replicas_are_a_table(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, arms=["one"])
    (arm, _) = whole(track(result_of(study), study.folder, study.runs))
    rows = study.runs[0].replicas
    table = table_of(arm, "replicas")
    assert table["columns"] == list(rows[0])
    assert [row[0] for row in table["data"]] == ["fast-0", "slow-0"]
    assert not any("replicas" in name for name in summary_of(records(arm)) if "/" not in name)


def test_a_run_holds_its_summary_and_its_load(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    for arm, folder in zip(study.arms, folders, strict=False):
        first, second = study.of(arm)
        found = records(folder)
        kept = summary_of(found)
        for name, value in first.summary.items():
            if isinstance(value, float) and not math.isnan(value):
                assert kept[name] == pytest.approx((value + second.summary[name]) / 2)
        assert kept["seed_count"] == 2
        *history, _ = history_of(found)
        assert len(history) == 210
        # Bins as long as a step hold each step's own value.
        used = [
            100 * blocks / 10 for blocks in first.steps("used_blocks")["used_blocks"].to_pylist()
        ]
        assert [row["load/kv"] for row in history] == pytest.approx(used)
        assert history[-1]["time"] == pytest.approx(21.0)
        table = table_of(folder, "seeds")
        column = table["columns"].index("clients/chat/ttft_p99")
        ttfts = [run.summary["clients"]["chat"]["ttft_p99"] for run in (first, second)]
        assert [row[column] for row in table["data"]] == ttfts
        assert [row[0] for row in table["data"]] == [0, 1]


def test_the_comparison_is_a_table_with_pictures(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    (row,) = history_of(records(folders[-1]))
    table = table_of(folders[-1], "comparison")
    assert table["data"] == comparison_of(study)[1]
    assert table["columns"][:4] == ["client", "metric", "arm", "baseline"]
    for name in ("effect", "latency", "load", "requests"):
        picture = folders[-1] / "files" / row[f"plots/{name}/path"]
        assert picture.read_bytes() == (study.folder / "plots" / f"{name}.png").read_bytes()
    assert "cuts the chat TTFT" in summary_of(records(folders[-1]))["finding"]


def test_the_tables_of_a_result_are_tables_of_the_comparison(
    tracked: tuple[Arms, Sequence[Path]],
) -> None:
    _, folders = tracked
    first, second = (table_of(folders[-1], f"tables/{number}") for number in range(2))
    assert first["data"] == [["ratio", "2.7 to 8 ×", "3 ×", "within"]]
    assert first["columns"][1:] == ["published", "ours", "difference"]
    assert second["data"] == LISTING.rows
    assert second["columns"] == ["More", "of it", "column 3"]
    assert "tables/2/path" not in history_of(records(folders[-1]))[-1]


SEARCH = Result(
    name="search",
    title="How much?",
    question="At which rate?",
    command="python -m pagedsim",
    finding=["Much."],
)


def test_rows_of_the_study_s_own_are_the_comparison(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    table: list[dict[str, object]] = [
        {"arm": "fcfs", "requests_per_s": 2.5, "binds": "ttft"},
        {"arm": "urgent", "requests_per_s": math.nan, "binds": 3, "seeds": 1},
    ]
    *_, comparison = whole(track(SEARCH, tmp_path, study.runs, comparison=columns_of(table)))
    found = table_of(comparison, "comparison")
    assert found["columns"] == ["arm", "requests_per_s", "binds", "seeds"]
    assert found["data"] == [["fcfs", 2.5, "ttft", None], ["urgent", None, 3, 1]]


def test_a_study_that_goes_on_takes_the_place_of_its_runs(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("a",))
    first = track(SEARCH, tmp_path, study.runs).folders
    study = study_of(tmp_path, seeds=1, arms=("a", "b"))
    more = track(SEARCH, tmp_path, study.runs).folders
    assert [path.name[-8:] for path in first] == [more[0].name[-8:], more[-1].name[-8:]]
    assert len({path.name[-8:] for path in more}) == 3
    assert sorted((tmp_path / "wandb").glob("offline-run-*")) == sorted(more)


def test_a_failure_of_the_tracker_leaves_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = importlib.import_module("wandb")
    init = wandb.init

    def full(**settings: Any) -> Any:
        if settings["job_type"] == "comparison":
            raise wandb.Error("no room is left")
        return init(**settings)

    monkeypatch.setattr(wandb, "init", full)
    study = study_of(tmp_path, seeds=1, arms=("a",))
    folders, failure = track(SEARCH, tmp_path, study.runs)
    assert [folder.parent for folder in folders] == [tmp_path / "wandb"]
    told = f"tracking.mode=offline: Weights & Biases {wandb.__version__} says: no room is left"
    assert str(failure) == told


def test_a_run_that_could_not_be_tracked_is_tracked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    words = ("experiment=single", "seeds=1", "workload.requests=5", "report=false")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        code, out, errors = call(*words)
    (line,) = errors.splitlines()
    (folder,) = (tmp_path / "outputs").glob("*/*")
    where = f"hydra.run.dir={folder.relative_to(tmp_path)}"
    assert code == 1 and str(folder.relative_to(tmp_path)) in out
    assert line.startswith("pagedsim: tracking.mode=offline: Weights & Biases cannot be imported: ")
    assert f"the same command with {where} tracks them without new runs" in line
    made = (folder / "runs/run/seed-0/run.json").stat().st_mtime_ns
    code, out, errors = call(*words, where)
    assert (code, errors) == (0, "") and "`wandb sync` uploads them" in out
    assert (folder / "runs/run/seed-0/run.json").stat().st_mtime_ns == made


def test_launch_is_neither_imported_nor_missing_afterwards(tmp_path: Path) -> None:
    def there() -> set[str]:
        heavy = ("wandb.sdk.launch", "wandb.apis.public")
        return {name for name in sys.modules if name.startswith(heavy)}

    before = there()
    whole(track(SEARCH, tmp_path))
    assert there() == before
    assert importlib.util.find_spec("wandb.sdk.launch") is not None
