"""What an offline run leaves on disk, read back record by record."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from pagedsim import report
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import means_of
from pagedsim.metrics.files import read_summary
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.report.plots import drawings_of
from pagedsim.report.table import columns_of, comparison_of
from pagedsim.tracking import track
from tests.conftest import Call
from tests.metrics.tables import fleet_study, result_of, study_of
from tests.wandb_files import (
    by_name,
    charts_of,
    config_of,
    files_of,
    history_of,
    records,
    run_of,
    summary_of,
    table_of,
    whole,
)

ROOT = Path(__file__).resolve().parent.parent
MADE_BY = {"version": "1.2.3", "commit": "abc"}
LISTING = Listing("More", ["", "of it", ""], [["first", "1", "low"], ["second", "2", "high"]])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Arms, Sequence[Path]]:
    study = replace(study_of(tmp_path_factory.mktemp("tracked"), seeds=2), name="a study")
    result = replace(result_of(study), rows=[Row("ratio", 3.0, (2.7, 8), "×")], listings=[LISTING])
    report.write(result, drawings_of(study), study.folder, study)
    result = replace(result, made_by=MADE_BY)
    return study, whole(
        track(
            result,
            study.folder,
            study.runs,
            labels={arm: {"policy": arm, "blocks": 10} for arm in study.arms},
            comparison=comparison_of(study),
            drawings=drawings_of(study),
            bars=means_of(replace(study, metrics=("ttft_p99", "goodput_per_s", "session_time"))),
            tags=["nightly", "a"],
        )
    )


def test_a_run_a_seed_in_the_group_of_its_arm(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    runs = [run_of(folder) for folder in folders]
    seeds = [f"{arm} seed {seed}" for arm in study.arms for seed in (0, 1)]
    assert [run.display_name for run in runs] == [*seeds, "a study"]
    assert [run.job_type for run in runs] == ["run"] * 4 + ["study"]
    name = f"a study, {study.folder.parent.name}/{study.folder.name}"
    groups = [f"{name}: {arm}" for arm in study.arms for _ in range(2)]
    assert [run.run_group for run in runs] == [*groups, name]
    assert all(folder.parent == study.folder / "wandb" for folder in folders)
    assert [sorted(run.tags) for run in runs] == [["a", "nightly"]] * 5
    for folder in folders:
        config = config_of(folder)
        assert config["pagedsim"] == MADE_BY and config["blocks"] == 10
        assert (config["study"], config["experiment"]) == (name, "a study")


def test_settings_are_at_the_top_in_short_and_below_in_full(
    tracked: tuple[Arms, Sequence[Path]],
) -> None:
    study, folders = tracked
    for run, folder in zip(study.runs, folders, strict=False):
        config = config_of(folder)
        assert (config["arm"], config["policy"], config["seed"]) == (run.arm, run.arm, run.seed)
        assert config["settings"] == run.config
    config = config_of(folders[-1])
    assert "policy" not in config and "settings" not in config  # it is not the same in all arms
    assert config["command"] == study.command
    assert config["arms"] == ["fcfs", "urgent"]


def test_a_fleet_s_replicas_are_a_table(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, arms=["one"])
    (arm, *_) = whole(track(result_of(study), study.folder, study.runs))
    rows = study.runs[0].replicas
    table = table_of(arm, "replicas")
    assert table["columns"] == list(rows[0])
    assert [row[0] for row in table["data"]] == ["fast-0", "slow-0"]
    assert not any("replicas" in name for name in summary_of(records(arm)) if "/" not in name)


def test_a_run_holds_its_summary_and_its_load(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    for run, folder in zip(study.runs, folders, strict=False):
        found = records(folder)
        kept = summary_of(found)
        *history, metrics = history_of(found)
        for name, value in run.summary.items():
            if isinstance(value, float) and not math.isnan(value):
                assert kept[name] == metrics[name] == value
        ttft = run.summary["clients"]["chat"]["ttft_p99"]
        assert kept["clients/chat/ttft_p99"] == ttft and "clients/chat/ttft_p99" not in metrics
        assert len(history) == 200
        used = [100 * used / 10 for used in run.steps("used_blocks")["used_blocks"].to_pylist()]
        assert np.mean([row["load/kv"] for row in history]) == pytest.approx(np.mean(used))
        assert history[-1]["time"] == pytest.approx(21.0)


def test_latencies_of_requests_are_histograms(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    (*_, row) = history_of(records(folders[0]))
    names = {name.split("/")[1] for name in row if name.startswith("histograms/")}
    assert names == {"ttft", "tpot", "e2e", "queue_time", "normalized_latency"}
    requests = study.runs[0].requests().to_pydict()
    waits = np.subtract(requests["first_token"], requests["arrival"])
    counts, bins = np.histogram(waits, 32)
    assert row["histograms/ttft/values"] == counts.tolist()
    assert row["histograms/ttft/bins"] == pytest.approx(bins.tolist())


def test_small_tables_of_a_run_are_tables(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    table = table_of(folders[0], "tables/requests")
    rows = study.runs[0].requests().to_pylist()
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == rows
    assert "tables/steps/path" not in history_of(records(folders[0]))[-1]  # of too many rows


def test_a_study_has_charts_beside_its_pictures(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    charts = charts_of(folders[-1])
    # A bar an arm of what has a value; of what is drawn in lines a chart for each panel.
    assert {*charts} >= {"charts/ttft_p99", "charts/goodput_per_s"}
    assert not any("session" in name for name in charts)
    bars = table_of(folders[-1], "charts/ttft_p99_table")
    runs = ([run.summary["ttft_p99"] for run in study.of(arm)] for arm in study.arms)
    means = map(geometric_mean, runs)
    assert bars["data"] == [
        [arm, pytest.approx(m)] for arm, m in zip(study.arms, means, strict=True)
    ]
    data = drawings_of(study)["latency"].data
    assert data is not None
    panels = data().panels
    assert len([name for name in charts if name.startswith("charts/latency_")]) == len(panels)
    lines = table_of(folders[-1], "charts/latency_1_table")
    assert {row[1] for row in lines["data"]} == {"fcfs, chat", "urgent, chat"}
    assert max(row[2] for row in lines["data"]) == 100.0
    assert charts["charts/latency_1"]["panelDefId"] == "wandb/lineseries/v0"


def test_the_files_of_a_study_are_an_artifact_and_are_not_copied(
    tracked: tuple[Arms, Sequence[Path]],
) -> None:
    study, folders = tracked
    name, files = files_of(folders[-1])
    assert name == "a-study"
    assert all(path == study.folder / inside for inside, path in files.items())
    assert "report.html" in files
    for run in study.runs:
        place = run.folder.relative_to(study.folder)
        assert {f"{place}/{one}.parquet" for one in ("requests", "steps")} <= {*files}


def test_the_comparison_is_a_table_beside_pictures(tracked: tuple[Arms, Sequence[Path]]) -> None:
    study, folders = tracked
    (row,) = history_of(records(folders[-1]))
    table = table_of(folders[-1], "comparison")
    assert table["data"] == comparison_of(study)[1]
    assert table["columns"][:4] == ["client", "metric", "arm", "baseline"]
    for name in ("effect", "latency", "load", "requests"):
        picture = folders[-1] / "files" / row[f"plots/{name}/path"]
        assert picture.read_bytes() == (study.folder / "plots" / f"{name}.png").read_bytes()
    assert "cuts the chat TTFT" in summary_of(records(folders[-1]))["finding"]


def test_the_tables_of_a_result_are_tables_of_the_study(
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
    study = study_of(tmp_path, seeds=2, arms=("a",))
    first = track(SEARCH, tmp_path, study.runs).folders
    study = study_of(tmp_path, seeds=2, arms=("a", "b"))
    more = track(SEARCH, tmp_path, study.runs).folders
    assert [path.name[-8:] for path in first] == [path.name[-8:] for path in (*more[:2], more[-1])]
    assert len({path.name[-8:] for path in more}) == 5
    assert sorted((tmp_path / "wandb").glob("offline-run-*")) == sorted(more)


def test_a_single_run_is_one_run(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("a",))
    comparison = comparison_of(study)
    (folder,) = whole(track(SEARCH, tmp_path, study.runs, comparison=comparison))
    assert run_of(folder).job_type == "run" and run_of(folder).display_name == "search"
    summary, config = summary_of(records(folder)), config_of(folder)
    assert summary["finding"] == "Much." and summary["seed_count"] == 1
    assert summary["ttft_p99"] == study.runs[0].summary["ttft_p99"]
    assert config["settings"] == study.runs[0].config and config["command"] == SEARCH.command
    *history, last = history_of(records(folder))
    assert "load/kv" in history[0] and "histograms/ttft/bins" in last
    assert table_of(folder, "comparison")["data"] == comparison[1]


@pytest.mark.slow
def test_the_first_command_leaves_little(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = call("experiment=fcfs_vs_priority", "tracking=wandb", "hydra.run.dir=out")
    assert (code, errors) == (0, "")
    runs = by_name(Path("out"))
    assert len(runs) == 11
    kib = int(subprocess.check_output(["du", "-sk", "out/wandb"]).split()[0])
    with capsys.disabled():
        print(f"\n11 runs of the first command: {kib:,} KiB")
    assert kib <= 2048


# -- agents of a sweep -----------------------------------------------------------------------------


def agent_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **parameters: Any
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that `wandb agent` starts for a run "theirs" of the sweep in
    docs/examples, by its own code."""
    module: Any = importlib.import_module("wandb.wandb_agent")
    started: list[tuple[list[str], dict[str, str]]] = []

    def process(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        started.append((command, env))
        return SimpleNamespace()

    monkeypatch.setattr(module, "AgentProcess", process)
    for name, value in (("DIR", folder), ("SWEEP_ID", "sweep"), ("PROJECT", "a project")):
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    for name in ("RUN_ID", "SWEEP_PARAM_PATH"):  # which the agent is to set
        monkeypatch.setenv(f"WANDB_{name}", "")
    sweep = yaml.safe_load((ROOT / "docs/examples/wandb_sweep.yaml").read_text(encoding="utf-8"))
    typed = {name.replace(".", "_") for name in sweep["parameters"]}
    assert typed == parameters.keys() and sweep["metric"]["name"] == "ttft_p99"
    values = {name: parameters[name.replace(".", "_")] for name in sweep["parameters"]}
    for name, value in values.items():
        assert value in sweep["parameters"][name]["values"]
    agent = module.Agent(None, None, sweep_id="sweep")
    agent._sweep_command = sweep["command"]
    args = {name: {"value": value} for name, value in values.items()}
    agent._command_run({"run_id": "theirs", "program": sweep["program"], "args": args})
    ((command, env),) = started
    return command, env


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_process_of_an_agent_has_the_agent_s_run_alone(
    seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, env = agent_command(tmp_path, monkeypatch, policy="vtc", workload_rate=8)
    assert command[1:] == [
        *("python", "-m", "pagedsim", "experiment=single", "seeds=3", "tracking.mode=online"),
        *("policy=vtc", "workload.rate=8"),
    ]
    quick = ("tracking.mode=offline", "workload.requests=20", "jobs=1", "report=false")
    folder = tmp_path / "out"
    words = (*quick, f"seeds={seeds}", f"hydra.run.dir={folder}")
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT))))}
    env.pop("WANDB_SERVICE", None)  # as the agent's own class does
    done = subprocess.run([*command, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    ((_, run),) = by_name(folder).items()
    assert run_of(run).run_id == "theirs" and run_of(run).project == "a project"
    config, summary = config_of(run), summary_of(records(run))
    assert (config["policy"], config["rate"], config["workload.rate"]) == ("vtc", 8, 8)
    runs = [read_summary(folder / f"runs/run/seed-{seed}") for seed in range(seeds)]
    mean = geometric_mean([one["ttft_p99"] for one in runs])
    assert summary["ttft_p99"] == history_of(records(run))[-1]["ttft_p99"] == pytest.approx(mean)
    assert summary["seed_count"] == seeds


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_failure_of_the_tracker_leaves_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = importlib.import_module("wandb")
    init = wandb.init

    def full(**settings: Any) -> Any:
        if settings["job_type"] == "study":
            raise wandb.Error("no room is left")
        return init(**settings)

    monkeypatch.setattr(wandb, "init", full)
    study = study_of(tmp_path, seeds=2, arms=("a",))
    folders, failure = track(SEARCH, tmp_path, study.runs)
    assert [folder.parent for folder in folders] == [tmp_path / "wandb"] * 2
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
