"""Validation, alone and in a grid: the simulator against the engine, and what stops it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity import validate
from pagedsim.experiments.fidelity.validate import Parity, Validate, ValidationRounds
from pagedsim.fidelity import step_grid as profile
from pagedsim.fidelity.recorded import recorded_runs
from pagedsim.fidelity.replay import Difference
from pagedsim.fidelity.step_grid import Cell, profiled
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.user_error import UserError
from tests.run.studies import carried_out, settings_of

pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("a_small_model")


@pytest.fixture(autouse=True)
def little_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "FEWEST", 4)
    monkeypatch.setattr(profile, "ROUNDS", 1)


OWN = ("backend=engine", "backend.clock=cpu", "backend.cache_tokens=128", "backend.shrink=1")
WORDS = (
    *("experiment=validate", "workload.max_len=40", "workload.lengths.shape=uniform"),
    *("+workload.lengths.prompt_min=1", "+workload.lengths.prompt_max=24"),
    *("+workload.lengths.output_min=2", "+workload.lengths.output_max=8"),
)
"""A small server."""


LENGTHS = {"shape": "uniform", "prompt_min": 1, "prompt_max": 30, "output_min": 2, "output_max": 10}


def small_study(**more: Any) -> Validate:
    workload = {"arrivals": "burst", "requests": 12, "lengths": LENGTHS}
    regimes = {
        "half load": {"load": 0.5, "tolerance": 0.05},
        "overload": {"load": 3.0, "tolerance": 0.1, "blocks": 0.5},
    }
    settings: dict[str, Any] = {"calibration": {"all": {"workload": workload}}}
    settings |= {"regimes": regimes, "seconds": 0.1, "repeats": 2} | more
    return Validate("t", "q", **settings)


def validated(folder: Path, study: Validate | None = None, *words: str) -> dict[str, Any]:
    """What a small validation leaves."""
    found: dict[str, Any] = carried_out(folder, *WORDS, *OWN, *words, study=study or small_study())
    return found


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, rounds = Runs.serve, [0]

    def two_rounds(*args: Any) -> None:
        rounds[0] += 1
        if rounds[0] == 3:
            raise KeyboardInterrupt
        serve(*args)

    monkeypatch.setattr(Runs, "serve", two_rounds)
    with pytest.raises(KeyboardInterrupt, match=r"3 of 8 runs are complete; .* goes on from there"):
        validated(tmp_path, None, "report=false")
    first = [line for line in capsys.readouterr().out.splitlines() if "planned alike" in line]
    monkeypatch.setattr(Runs, "serve", serve)
    validated(tmp_path, None, "report=false")
    told = capsys.readouterr().out.splitlines()
    again = [line for line in told if "all planned alike" in line]
    assert len(first) == 3 and again[:3] == first and len(again) == 6
    assert "3 of 8 runs were there already, and the same: kept" in told


def test_two_classes_are_calibrated_on_one_workload_of_their_own(tmp_path: Path) -> None:
    drawn = ("prompt_mean", "prompt_cv", "output_mean", "output_cv")
    own = [f"~workload.classes.batch.lengths.{name}" for name in drawn]
    for name in ("interactive", "batch"):
        own += [f"++workload.classes.{name}.lengths.{key}={LENGTHS[key]}" for key in LENGTHS]
    words = ("experiment=validate", "workload=chat_and_batch", "workload.max_len=40", *OWN, *own)
    carried_out(tmp_path, *words, "report=false", study=small_study(repeats=1))
    for name, clients in (
        ("half load, engine", {"interactive", "batch"}),
        ("calibration-all", {""}),
    ):
        (run,) = recorded_runs(str(tmp_path / "runs" / name))
        assert set(run.requests["client"].to_pylist()) == clients


def test_a_run_that_is_planned_otherwise_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "replayed", lambda run: Difference(3, "decodes 1", "decodes 2"))
    with pytest.raises(UserError, match=r"step 3 of .* differs, so there is nothing to compare"):
        validated(tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_other_blocks_than_before_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fewer(path: str) -> Any:
        (run,) = recorded_runs(path)
        if "half load" in path:
            run.machine["blocks"] -= 1
        return [run]

    monkeypatch.setattr(validate, "recorded_runs", fewer)
    with pytest.raises(ConfigError, match="the engine has blocks=7, not 8 as before"):
        validated(tmp_path)


def test_a_profile_goes_through_the_grid() -> None:
    words = ["experiment=calibrate", "backend=engine", "backend.cache_tokens=256"]
    words += ["batching=unified", "preemption=swap", "memory.cpu_blocks=9"]
    words += ["server.max_seqs=3", "server.max_model_len=64"]
    log = profiled(settings_of(*words), 0)
    assert {sample.kind for sample in log.samples} == {"prefill", "decode", "mixed", "swap"}
    swaps = sorted(s.swap_out for s in log.samples if s.kind == "swap" and s.swap_out)
    assert swaps == [1, 2, 4, 8, 9]
    assert max(sample.decode_count for sample in log.samples) == 3
    assert log.replica.hardware.name == "cpu"
    assert Cell(2, 8) in {Cell(s.prefill_chunks, s.prefill_tokens // 2) for s in log.samples}


def test_a_profile_notices_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedsim.engine.runner import Runner

    carry_out, left = Runner.carry_out, [40]

    def failing(self: Runner, *args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory")
        return carry_out(self, *args)

    monkeypatch.setattr(Runner, "carry_out", failing)
    words = ["experiment=calibrate", "backend=engine", "server.max_model_len=64"]
    config = settings_of(*words)
    with pytest.raises(ConfigError, match=r"a step of \d+ × \d+ tokens: .*out of memory"):
        profiled(config, 0)


# -- a grid of validations -------------------------------------------------------------------------

GRID = ("experiment=parity", "backend=engine", "backend.cache_tokens=128")
OVER = ("policy=fcfs,priority", "memory.block_size=8,16")
FOUR = [
    f"policy={one} memory.block_size={size}" for one in ("fcfs", "priority") for size in (8, 16)
]


def grid_result(error: float) -> dict[str, Any]:
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

    def next_runs(self: ValidationRounds) -> list[Arm]:
        asked.append(" ".join(self.overrides))
        if asked[-1] == FOUR[1]:
            raise ConfigError("the engine has blocks=7, not 8")
        return []

    def analyse(self: ValidationRounds) -> Analysis:
        error = 0.5 if "policy=priority" in self.overrides else 0.01
        return Analysis(finding=[], notes=["it is uneven"], data=grid_result(error))

    monkeypatch.setattr(ValidationRounds, "complete", True)
    monkeypatch.setattr(ValidationRounds, "next_runs", next_runs)
    monkeypatch.setattr(ValidationRounds, "analyse", analyse)
    return asked


def grid(over: Any = OVER, calibration: Any = None) -> Parity:
    regimes = {"knee": {"load": 0.8, "tolerance": 0.05}}
    more: dict[str, Any] = {"calibration": {"all": calibration or {}}, "regimes": regimes}
    return Parity(title="t", question="q", seconds=0.1, repeats=1, over=over, **more)


def test_each_is_a_validation_of_its_own(tmp_path: Path) -> None:
    workload = {"arrivals": "burst", "requests": 12, "lengths": LENGTHS}
    made = grid(["policy=fcfs,priority"], {"workload": workload})
    found = carried_out(tmp_path, *WORDS, *OWN, "report=false", study=made)["data"]
    both = ("policy=fcfs", "policy=priority")
    assert tuple(found["validations"]) == both
    names = ("calibration-all", "knee, engine", "knee, simulator")
    served = {path.name for path in (tmp_path / "runs").iterdir()}
    assert served == {f"{policy}%3A {run}" for policy in both for run in names}
    assert (tmp_path / "policy=priority/cost.json").is_file()


def test_a_failed_validation_leaves_the_others(
    no_engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as error:
        carried_out(tmp_path, *GRID, study=grid())
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


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ([], "over=[]: must be a list such as"),
        ("policy=fcfs", "over=policy=fcfs: must be a list such as"),
        (["policy"], "over: policy: must be of the form key=value,value"),
        (["policy=fcfs,"], "over: policy=fcfs,: must be of the form key=value,value"),
        (["policy=fcfs,fifo"], "policy=fifo: policy=fifo: unknown; "),
        (
            ["memory=paged,reserved_max"],
            "memory=reserved_max: backend=engine has paged, prefix, radix",
        ),
        (["backend=sim"], "backend=sim: must be engine, which is validated"),
        (["backend.clock=cpu,moon"], "backend.clock=moon: unknown; choose from"),
    ],
)
def test_invalid_grids_are_refused_before_the_first_run(
    over: Any, line: str, no_engine: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        carried_out(tmp_path, *GRID, study=grid(over))
    assert str(error.value).startswith(line)
    assert no_engine == []
