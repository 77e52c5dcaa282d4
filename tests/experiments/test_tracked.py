"""What studies leave for Weights & Biases: both sides, their names, their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedsim.experiments.fidelity import validate
from pagedsim.fidelity.regime_report import KEYS
from pagedsim.metrics.files import read_summary
from tests.experiments.fidelity.test_validate import OWN, WORDS, small_study
from tests.run.studies import carried_out
from tests.wandb_files import (
    by_name,
    config_of,
    history_of,
    records,
    run_of,
    steps_of_metrics,
    summary_of,
    table_of,
)

OFFLINE = ("tracking=wandb", "jobs=1")
CAPACITY = (
    *("experiment=capacity", "study.arms={fcfs: [], small: ['server.max_seqs=4']}", "seeds=1"),
    *("workload.requests=40", "study.tolerance=0.2", *OFFLINE),
)


def compared(folder: Path, found: dict[str, Any]) -> dict[str, Path]:
    """The runs, all of one study, whose own run has the result as its summary."""
    runs = by_name(folder)
    (study,) = {config_of(run)["study"] for run in runs.values()}
    assert run_of(runs[found["experiment"]]).run_group == study
    assert all(run_of(run).run_group.startswith(study) for run in runs.values())
    summary = summary_of(records(runs[found["experiment"]]))
    assert summary["title"] == found["title"] and summary["finding"] == " ".join(found["finding"])
    for name, value in found["data"].items():
        if isinstance(value, (int, str)):
            assert summary[name] == value
    return runs


def test_a_validation_is_a_run_of_each_side_for_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_small_model: None
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(validate, "FEWEST", 4)
    found = carried_out(tmp_path, *WORDS, *OWN, *OFFLINE, study=small_study())
    runs = compared(tmp_path, found)
    loads = ("half load", "overload")
    sides = {f"{load}, {side}" for load in loads for side in ("engine", "simulator")}
    stored = [path.parts[-2:] for path in tmp_path.glob("runs/*/seed-*")]
    assert set(runs) == {"validate", *(f"{arm} {seed.replace('-', ' ')}" for arm, seed in stored)}
    assert {arm for arm, _ in stored} == {"calibration-all", *sides}
    for load in loads:
        engine, simulator = (records(runs[f"{load}, {s} seed 0"]) for s in ("engine", "simulator"))
        for one in (engine, simulator):
            assert steps_of_metrics(one)["load/*"] == "time"
            *history, _ = history_of(one)
            names = {name for name in history[0] if not name.startswith("_")}
            assert names == {"time", "load/waiting", "load/running", "load/kv"}
        ours, theirs = summary_of(simulator), summary_of(engine)
        for key in KEYS:
            stored = read_summary(tmp_path / "runs" / f"{load}, simulator" / "seed-0")[key]
            assert ours[key] == pytest.approx(stored) and key in theirs
        summary = summary_of(records(runs["validate"]))
        error = found["data"]["regimes"][load]["metrics"]["ttft_mean"]["error"]
        assert summary[f"regimes/{load}/metrics/ttft_mean/error"] == pytest.approx(error)
    table = table_of(runs["validate"], "comparison")
    assert table["columns"][:2] == ["load", "metric"] and "error" in table["columns"]
    assert len(table["data"]) == len(loads) * len(KEYS)
    assert "plots/validation/path" in history_of(records(runs["validate"]))[-1]


def test_probes_are_runs_to_plot_by_rate(tmp_path: Path) -> None:
    found = carried_out(tmp_path, *CAPACITY)
    runs = compared(tmp_path, found)
    for arm, one in found["data"]["arms"].items():
        for probe in one["seeds"]["0"]["probes"]:
            run = runs[f"{arm} at {probe['rate']:g} per s seed 0"]
            config = config_of(run)
            assert config["settings"]["workload"]["rate"] == config["rate"] == probe["rate"]
            assert config["max_seqs"] == (4 if arm == "small" else 256)
            summary = summary_of(records(run))
            assert summary["ttft_p99"] == pytest.approx(probe["values"]["TTFT P99"], rel=1e-5)
            assert not [row for row in history_of(records(run)) if "time" in row]
    table = table_of(runs["capacity"], "comparison")
    assert [row[0] for row in table["data"]] == ["fcfs", "small"]
    assert json.loads((tmp_path / "result.json").read_text())["pictures"] == ["capacity"]
