"""A grid of validations: every combination, what is kept of each, and what one's failure stops."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from experiments.fidelity import validate
from experiments.fidelity.validate import Parity, Validated
from pagedsim.core import ConfigError
from pagedsim.run.job import Arm
from pagedsim.run.study import Analysis
from pagedsim.user_error import UserError
from tests.experiments.fidelity.test_validate import LENGTHS, OWN
from tests.experiments.fidelity.test_validate import WORDS as SMALL
from tests.run.studies import carried_out

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("hydra", "a_small_model")

WORDS = ("experiment=parity", "backend=engine", "backend.cache_tokens=128")
OVER = ("policy=fcfs,priority", "memory.block_size=8,16")
FOUR = [
    f"policy={one} memory.block_size={size}" for one in ("fcfs", "priority") for size in (8, 16)
]


def result(error: float) -> dict[str, Any]:
    """As a validation leaves it, under one load."""
    metric = {"engine": 3.0, "simulator": 4.0, "error": error, "spread": 0.01, "at_pace": 0.0}
    keys = ("ttft_mean", "tpot_mean", "output_tokens_per_s")
    regime = {
        "metrics": dict.fromkeys((*keys, "preemptions"), metric),
        "verdicts": dict.fromkeys(keys, "beyond" if error > 0.1 else "within 5 %"),
    }
    return {"replayed_steps": 10, "regimes": {"knee": regime}}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A validation reads a result and runs nothing; returns which were to run."""
    asked: list[str] = []

    def next_runs(self: Validated) -> list[Arm]:
        asked.append(" ".join(self.overrides))
        if asked[-1] == FOUR[1]:
            raise ConfigError("the engine has blocks=7, not 8")
        return []

    def analyse(self: Validated) -> Analysis:
        error = 0.5 if "policy=priority" in self.overrides else 0.01
        return Analysis(finding=[], notes=["it is uneven"], data=result(error))

    monkeypatch.setattr(Validated, "complete", True)
    monkeypatch.setattr(Validated, "next_runs", next_runs)
    monkeypatch.setattr(Validated, "analyse", analyse)
    return asked


def study(over: Any = OVER) -> Parity:
    regimes = {"knee": {"load": 0.8, "tolerance": 0.05}}
    more: dict[str, Any] = {"title": "t", "question": "q", "calibration": {"all": {}}}
    return Parity(**more, regimes=regimes, seconds=1.0, repeats=1, over=over)


def test_one_that_fails_leaves_the_others(
    no_engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as error:
        carried_out(tmp_path, *WORDS, study=study())
    assert str(error.value) == "policy=fcfs memory.block_size=16: the engine has blocks=7, not 8"
    assert no_engine == FOUR
    told = capsys.readouterr().out
    assert "4 of 4: policy=priority memory.block_size=16" in told
    assert "+50.0 %*" in told and "+1.0 %*" not in told
    assert "All 30 steps of 3 validations were planned alike" in told
    assert "note: policy=fcfs memory.block_size=8: it is uneven" in told
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["memory.block_size"] for row in rows] == ["8", "8", "16"]
    assert rows[1]["ttft_mean_error"] == "0.5" and rows[1]["preemptions_engine"] == "3.0"


def test_each_is_a_validation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate, "FEWEST", 4)
    workload = {"arrivals": "burst", "requests": 12, "lengths": LENGTHS}
    made = Parity(
        title="t",
        question="q",
        calibration={"all": {"workload": workload}},
        regimes={"knee": {"load": 0.8, "tolerance": 0.05}},
        seconds=0.1,
        repeats=1,
        over=["policy=fcfs,priority"],
    )
    found = carried_out(tmp_path, *SMALL, *OWN, "report=false", study=made)["data"]
    assert set(found["validations"]) == {"policy=fcfs", "policy=priority"}
    served = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert served == sorted(
        f"{policy}%3A {run}"
        for policy in ("policy=fcfs", "policy=priority")
        for run in ("calibration-all", "knee, engine", "knee, simulator")
    )
    assert (tmp_path / "policy=priority/cost.json").is_file()


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ([], "over=[]: must be a list such as"),
        ("policy=fcfs", "over=policy=fcfs: must be a list such as"),
        (["policy"], "over: policy: must be of the form key=value,value"),
        (["policy=fcfs,"], "over: policy=fcfs,: must be of the form key=value,value"),
        (["policy=fcfs,fifo"], "policy=fifo: policy=fifo: unknown; "),
        (
            ["memory.kind=paged,reserved_max"],
            "memory.kind=reserved_max: backend=engine has paged and prefix",
        ),
        (["backend=sim"], "backend=sim: must be engine, which is validated"),
        (["backend.clock=cpu,moon"], "backend.clock=moon: unknown; choose from"),
    ],
)
def test_all_is_refused_before_anything_runs(
    over: Any, line: str, no_engine: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        carried_out(tmp_path, *WORDS, study=study(over))
    assert str(error.value).startswith(line)
    assert no_engine == []
