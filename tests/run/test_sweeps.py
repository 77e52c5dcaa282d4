"""Many studies in one command: launchers, folders of other studies, and the table at the end."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagedsim.run.help import Experiment
from pagedsim.run.multirun import _tables
from tests.conftest import Call
from tests.run.studies import CONF, EXPERIMENTS

# -- sweeps (`-m`) under each launcher: what fails is listed, what is done is kept -----------------


ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_others_and_is_listed(tmp_path: Path) -> None:
    done = sweep(tmp_path, "joblib", "workload.rate=10,-1,20")
    assert done.returncode == 1
    assert "pagedsim: job 1 (workload.rate=-1): workload.rate=-1: must be" in done.stderr
    assert [row["workload.rate"] for row in rows(tmp_path)] == ["10", "20"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="the cluster extra is not installed",
)
def test_a_job_that_dies_leaves_the_others_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "mortal.py").write_text(POLICY)
    (tmp_path / "deadly").touch()
    words = ("policy._target_=pagedsim.policies.ordering.FCFS,mortal.Mortal", "workload.rate=10")
    done = sweep(tmp_path, "submitit_local", *words)
    assert done.returncode == 1
    assert "pagedsim: job 1: its process died before it had a result\n" in done.stderr
    assert "1 job had ended; the same command with hydra.sweep.dir=out goes on" in done.stderr
    assert len(rows(tmp_path)) == 1
    (tmp_path / "deadly").unlink()
    assert sweep(tmp_path, "submitit_local", *words).returncode == 0
    assert len(rows(tmp_path)) == 2


# -- the table at the end of a sweep, on terminals of any width ------------------------------------


METRICS = ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "output_tokens_per_s")
ROWS: list[dict[str, Any]] = [
    {
        **{"job": job, "server.max_seqs": str(8 << job), "workload.rate": "1.25"},
        **dict.fromkeys(METRICS, 1234.5678 * (job + 1)),
    }
    for job in range(3)
]


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in _tables(ROWS, ["server.max_seqs", "workload.rate"], width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_no_cell_is_cut_and_no_metric_left_out(width: int) -> None:
    wide, here = printed(300), printed(width)
    assert "…" not in here
    assert max(map(len, here.splitlines())) <= width
    cells = {word for word in wide.split() if any(sign.isalnum() for sign in word)}
    assert cells <= set(here.split())
    assert here.count("rate") == here.count("max_seqs") >= 1  # each part says whose rows they are


# -- at the front door: folders of other studies, and many studies in one command ------------------


QUICK = ("experiment=single", "workload.requests=10", "workload.rate=20", "seeds=1", "jobs=1")


def test_a_sweep_without_tables_prints_each_finding(call: Call) -> None:
    words = ("experiment=estimate", "model=tiny", "hardware=a10,h100", "hydra.sweep.dir=out")
    code, out, _ = call("-m", *words, "hydra/launcher=basic")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("job ")]
    assert lines[0].startswith("job 0 (hardware=a10): tiny on a10: ")
    assert lines[1].startswith("job 1 (hardware=h100): tiny on h100: ")
    assert "results   out" in out


def test_a_resumed_study_writes_the_same_bytes(call: Call) -> None:
    words = ("experiment=fcfs_vs_priority", "workload.requests=60", "seeds=2", "report=false")
    call(*words, "tracking=none", "hydra.run.dir=out")
    first = Path("out/comparison.csv").read_bytes()
    code, out, _ = call(*words, "tracking=none", "hydra.run.dir=out")
    assert code == 0 and "4 of 4 runs were there already" in out
    assert Path("out/comparison.csv").read_bytes() == first


def test_a_percentile_that_is_named_later_is_in_the_table(call: Call) -> None:
    words = (*QUICK, "tracking=none", "report=false", "hydra.run.dir=out")
    assert call(*words, "study.metrics=[ttft]")[0] == 0
    more = "study.metrics=[ttft,ttft_p95,e2e_p99.9]"
    for there in (False, True):
        code, out, _ = call(*words, more)
        assert code == 0
        assert ("there already" in out) == there
        with Path("out/comparison.csv").open() as file:
            found = {row["metric"]: float(row["mean"]) for row in csv.DictReader(file)}
        assert found["ttft_mean"] < found["ttft_p95"] <= found["ttft_p99"]
        assert found["e2e_p99_9"] > found["ttft_p99"]


# -- every experiment in conf/ says which backends serve it, and is refused with that on another---


ONE_SIDED = {
    experiment.kind.backends: experiment
    for experiment in EXPERIMENTS
    if len(experiment.kind.backends) == 1
}


@pytest.mark.parametrize("experiment", ONE_SIDED.values(), ids=attrgetter("name"))
def test_another_backend_than_an_experiment_takes_is_refused(
    experiment: Experiment, call: Call
) -> None:
    name, kind = experiment
    (takes,) = kind.backends
    other = "engine" if takes == "sim" else "sim"
    code, out, errors = call(f"experiment={name}", f"backend={other}", "tracking=none")
    assert (code, out) == (1, "")
    assert errors == (
        f"pagedsim: backend={other}: experiment={name} takes backend={takes}: {kind.why}\n"
    )


def test_the_manual_page_lists_each_with_its_backends(call: Call) -> None:
    _, page, _ = call("--help")
    lines = page.split("\nEXPERIMENTS", 1)[1].split("\nSETTINGS", 1)[0].splitlines()
    told = {line.split()[0]: line for line in lines if line.startswith("  ") and line[2] != " "}
    assert list(told) == [one.name for one in EXPERIMENTS]
    for one in EXPERIMENTS:
        assert ", ".join(one.kind.backends) in told[one.name]
        assert one.kind.why or len(one.kind.backends) > 1
        assert CONF.option("experiment", one.name).settings["study"].get("title") or (
            one.name == "parity"
        )


# -- replicas that differ: what a pool sets is composed, and made for each of its replicas ---------


FEW = (
    *("experiment=single", "workload.requests=30", "workload.rate=4", "seeds=1", "jobs=1"),
    *("report=false", "tracking=none", "hydra.run.dir=out", "study.metrics=[ttft_p50,cost_eur]"),
)


@pytest.mark.parametrize(("more", "priced"), [("set: []", False), ("set: ['hardware=h100']", True)])
def test_each_pool_has_what_it_sets(call: Call, more: str, priced: bool) -> None:
    """An A30 has no price, so a fleet with one has none."""
    pools = "{fast: {set: ['hardware=h100', 'policy=priority']}, slow: {replicas: 2, " + more + "}}"
    code, text, errors = call(*FEW, "hardware=a30", "model=qwen3-0.6b", f"fleet.pools={pools}")
    assert (code, errors) == (0, ""), text
    assert ("no run has a value of Cost" in text) != priced
    assert "Priority goes by priorities" in " ".join(text.split())
