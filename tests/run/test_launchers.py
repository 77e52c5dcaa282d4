"""Sweeps (`-m`) under each launcher: what fails is listed, what is done is kept."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBMITIT = pytest.param(
    "submitit_local",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None,
            reason="the cluster extra is not installed",
        ),
    ],
)
POLICY = """
import os
import signal
from pathlib import Path

from pagedsim.core import Policy


class Mortal(Policy):
    def rank(self, request, state):
        if state.now > 1 and Path("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return state.now
"""


def sweep(folder: Path, launcher: str, *words: str) -> subprocess.CompletedProcess[str]:
    quick = ("experiment=single", "tracking=none", "report=false", "seeds=1")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pagedsim", "-m", f"hydra/launcher={launcher}", *quick),
            *("workload.requests=30", "hydra.sweep.dir=out", *words),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("launcher", [pytest.param("joblib", marks=pytest.mark.slow), SUBMITIT])
def test_a_job_that_fails_leaves_the_others_and_is_listed(tmp_path: Path, launcher: str) -> None:
    done = sweep(tmp_path, launcher, "workload.rate=10,-1,20")
    assert done.returncode == 1
    assert "pagedsim: job 1 (workload.rate=-1): workload.rate=-1: must be" in done.stderr
    assert [row["workload.rate"] for row in rows(tmp_path)] == ["10", "20"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", SUBMITIT])
def test_a_sweep_goes_on_and_keeps_what_is_done(tmp_path: Path, launcher: str) -> None:
    words = ("workload.rate=10,20",)
    assert sweep(tmp_path, launcher, *words).returncode == 0
    marks = sorted((tmp_path / "out").glob("*/runs/run/seed-0/run.json"))
    assert len(marks) == 2
    marks[1].unlink()  # as if it had been stopped before this run was whole
    times = [mark.stat().st_mtime_ns for mark in marks[:1]]
    assert sweep(tmp_path, launcher, *words).returncode == 0
    assert marks[1].exists()
    assert [mark.stat().st_mtime_ns for mark in marks[:1]] == times
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize("launcher", [SUBMITIT])
def test_a_job_that_dies_leaves_the_others_and_comes_back(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mortal.py").write_text(POLICY)
    (tmp_path / "deadly").touch()
    words = ("policy._target_=policies.ordering.FCFS,mortal.Mortal", "workload.rate=10")
    done = sweep(tmp_path, launcher, *words)
    assert done.returncode == 1
    assert "pagedsim: job 1: its process died before it had a result\n" in done.stderr
    assert "1 job had ended; the same command with hydra.sweep.dir=out goes on" in done.stderr
    assert len(rows(tmp_path)) == 1
    (tmp_path / "deadly").unlink()
    assert sweep(tmp_path, launcher, *words).returncode == 0
    assert len(rows(tmp_path)) == 2
