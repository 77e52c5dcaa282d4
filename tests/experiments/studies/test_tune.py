"""Tune: the space, the search, and that it goes on and is confirmed."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from pagedsim.experiments.studies import tune
from pagedsim.experiments.studies.tune import Setting, space_of
from pagedsim.run.runs import Runs
from tests.conftest import Call

HAS_OPTUNA = importlib.util.find_spec("optuna") is not None
needs_optuna = pytest.mark.skipif(not HAS_OPTUNA, reason="the tune extra is not installed")
QUICK = (
    *("experiment=tune", "tracking=none", "seeds=2", "jobs=1", "hydra.run.dir=out"),
    *("workload.requests=30", "workload.rate=6", "study.trials=6", "study.batch=3"),
)


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/result.json").read_text())["data"]
    return found


def test_a_space_is_of_choices_and_ranges() -> None:
    rate = {"low": 1, "high": 8, "log": True}
    space = space_of({"policy": ["fcfs"], "rate": rate, "c": [None, True], "d": None})
    policy, c = Setting("policy", ("fcfs",)), Setting("c", ("null", "true"))
    assert space == [policy, Setting("rate", (1, 8), log=True), c]
    assert space[1].override(4) == "rate=4"
    assert Setting("x", (0.5, 1.0), log=False).override(0.123456) == "x=0.1235"


def test_a_missing_optuna_is_reported(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda _: None)
    code, out, errors = call(*QUICK)
    assert (code, out) == (1, "")
    assert errors.startswith("pagedsim: experiment=tune: needs Optuna") and errors.count("\n") == 1


@needs_optuna
def test_a_search_ends_with_the_best_and_its_command(call: Call) -> None:
    code, out, _ = call(*QUICK)
    assert code == 0
    again = "experiment=single workload=tune hardware=a100-40gb model=opt-13b"
    assert f"again     python -m pagedsim {again}" in out
    assert Path("out/plots/tune.png").stat().st_size > 0 and Path("out/report.html").exists()
    found = result()
    means = [trial["mean"] for trial in found["trials"]]
    assert len(means) == 6
    most = max(*means, geometric_mean(found["default"].values()))
    assert found["best"]["mean"] == pytest.approx(most, rel=1e-5)
    assert set(found["confirmed"]["best"]) == {"1000", "1001"}
    words = shlex.split(found["best"]["command"])[3:]
    call(*words, "tracking=none", "report=false", "jobs=1", "hydra.run.dir=again")
    summary = json.loads(Path("again/runs/run/seed-0/summary.json").read_text())
    [best] = [t for t in found["trials"] if t["changes"] == found["best"]["changes"]][:1] or [
        {"seeds": found["default"]}
    ]
    assert summary["goodput_per_s"] == pytest.approx(best["seeds"]["0"], rel=1e-5)


@pytest.mark.slow
@needs_optuna
def test_a_search_goes_on_and_is_the_same_whatever_the_processes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, rounds = Runs.serve, 0

    def interrupted(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise KeyboardInterrupt
        return serve(*args)

    monkeypatch.setattr(Runs, "serve", interrupted)
    code, _, errors = call(*QUICK, "report=false")
    assert code == 130
    assert "3 of 6 trials are complete; the same command with hydra.run.dir=out" in errors
    monkeypatch.setattr(Runs, "serve", serve)
    there = {path: path.stat().st_mtime_ns for path in Path("out/runs").glob("*/*.json")}
    assert len(there) >= 8
    assert call(*QUICK, "report=false")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in there} == there
    first = result()
    code, _, _ = call(*QUICK, "report=false", "hydra.run.dir=other", "jobs=2")
    assert json.loads(Path("other/result.json").read_text())["data"]["trials"] == first["trials"]
