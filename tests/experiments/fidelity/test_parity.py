"""A grid of validations: every combination, what is kept of each, and what one's failure stops."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from experiments.fidelity import parity
from experiments.fidelity.parity import Parity
from experiments.fidelity.validate import Validate
from pagedsim.core import ConfigError
from pagedsim.run.folder import keep_configuration
from pagedsim.user_error import UserError

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("hydra", "a_small_model")

WORDS = ("experiment=parity", "backend=engine", "backend.cache_tokens=128")
OVER = ("policy=fcfs,priority", "memory.block_size=8,16")
FOUR = [
    f"policy={one},memory.block_size={size}" for one in ("fcfs", "priority") for size in (8, 16)
]


@pytest.fixture(autouse=True)
def as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "typed", lambda: list(WORDS))


def result(error: float) -> dict[str, Any]:
    """As a validation leaves it, under one load."""
    metric = {"engine": 3.0, "simulator": 4.0, "error": error, "spread": 0.01, "at_pace": 0.0}
    keys = ("ttft_mean", "tpot_mean", "output_tokens_per_s")
    regime = {
        "metrics": dict.fromkeys((*keys, "preemptions"), metric),
        "verdicts": dict.fromkeys(keys, "beyond" if error > 0.1 else "within 5 %"),
    }
    return {"replayed_steps": 10, "notes": ["it is uneven"], "regimes": {"knee": regime}}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A validation leaves a result and runs nothing; returns where each was to be."""
    places: list[str] = []

    def perform(self: Validate, folder: Path) -> None:
        places.append(folder.name)
        if folder.name == FOUR[1]:
            raise ConfigError("the engine has blocks=7, not 8")
        error = 0.5 if "priority" in folder.name else 0.01
        (folder / "validate.json").write_text(json.dumps(result(error)))

    monkeypatch.setattr(Validate, "perform", perform)
    return places


def study(over: Any = OVER) -> Parity:
    regimes = {"knee": {"load": 0.8, "tolerance": 0.05}}
    return Parity(calibration={"all": {}}, regimes=regimes, seconds=1.0, repeats=1, over=over)


def test_one_that_fails_leaves_the_others(
    no_engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as error:
        study().perform(tmp_path)
    assert str(error.value) == "policy=fcfs memory.block_size=16: the engine has blocks=7, not 8"
    assert no_engine == FOUR
    told = capsys.readouterr().out
    assert "4 of 4: policy=priority memory.block_size=16" in told
    assert "+50.0 %*" in told and "+1.0 %*" not in told
    assert "all 30 steps of 3 validations were planned alike" in told
    assert "note: policy=fcfs memory.block_size=8: it is uneven" in told
    with (tmp_path / "parity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["memory.block_size"] for row in rows] == ["8", "8", "16"]
    assert rows[1]["ttft_mean_error"] == "0.5" and rows[1]["preemptions_engine"] == "3.0"
    assert len(json.loads((tmp_path / "parity.json").read_text())["validations"]) == 3


def test_each_has_a_configuration_of_its_own(no_engine: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        study().perform(tmp_path)
    text = (tmp_path / FOUR[3] / "config.yaml").read_text()
    assert "policies.priority.Priority" in text and "block_size: 16" in text
    with pytest.raises(ConfigError, match="block_size=16, not 8; choose another folder"):
        keep_configuration(
            compose("config", overrides=[*WORDS, "policy=priority", "memory.block_size=8"]),
            tmp_path / FOUR[3],
        )


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ([], "over=[]: must be a list such as"),
        ("policy=fcfs", "over=policy=fcfs: must be a list such as"),
        (["policy"], "over: policy: must be of the form key=value,value"),
        (["policy=fcfs,"], "over: policy=fcfs,: must be of the form key=value,value"),
        (["policy=fcfs,fifo"], "policy=fifo: policy=fifo: unknown; "),
        (["memory.kind=paged,reserved_max"], "memory.kind=reserved_max: memory.kind=reserved_max:"),
        (["backend=sim"], "backend=sim: backend=sim: experiment=parity needs backend=engine"),
        (["backend.clock=cpu,moon"], "backend.clock=moon: backend.clock=moon: unknown; "),
    ],
)
def test_all_is_refused_before_anything_runs(
    over: Any, line: str, no_engine: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        study(over).perform(tmp_path)
    assert str(error.value).startswith(line)
    assert no_engine == []
