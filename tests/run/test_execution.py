"""The life of a study: rounds, Ctrl-C at bad moments, and what is left of an earlier part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.run import pool
from pagedsim.run.job import Arm
from pagedsim.run.runner import Execution
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.user_error import UserError
from tests.run.studies import carried_out, command

pytestmark = pytest.mark.usefixtures("hydra")

QUICK = ("experiment=single", "workload.requests=10", "workload.rate=20", "seeds=1", "jobs=1")


@dataclass(frozen=True, kw_only=True)
class Steps(Study):
    """One arm a round."""

    title: str = "Steps"
    question: str = "How many?"
    rounds: Sequence[Sequence[str]] = ((), ("server.max_seqs=4",), ("server.max_seqs=8",))
    whole = False

    def next_runs(self, runs: Runs) -> list[Arm]:
        known = {job.arm for job in runs.jobs if runs.settled(job)}
        left = [n for n in range(len(self.rounds)) if f"round {n}" not in known]
        return [Arm(f"round {n}", self.rounds[n]) for n in left[:1]]

    def analyse(self, runs: Runs) -> Analysis:
        return Analysis(finding=[f"{len(runs.finished)} runs."])


def test_rounds_go_on_until_nothing_is_asked_for(tmp_path: Path) -> None:
    assert carried_out(tmp_path, *QUICK, study=Steps())["finding"] == ["3 runs."]


def test_a_stop_at_the_end_of_a_round_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, served = pool.StopSignal.run, []

    def asked_late(self: pool.StopSignal, *args: Any) -> Any:
        outcome = run(self, *args)
        served.append(outcome)
        self.asked = len(served) == 2  # while the second is being written
        return outcome

    monkeypatch.setattr(pool.StopSignal, "run", asked_late)
    with pytest.raises(KeyboardInterrupt, match=r"2 of 2 runs are complete, .*goes on from there"):
        Execution(Steps(), command(tmp_path, *QUICK)).execute()
    assert len(served) == 2
    found = carried_out(tmp_path, *QUICK, study=Steps())
    assert found["finding"] == ["3 runs."] and len(served) == 3


def test_a_run_whose_marking_is_stopped_is_not_lost(tmp_path: Path) -> None:
    """In a pool the parent may be stopped between a run's end and its mark."""
    from pagedsim.run.store import Tables

    store = Tables.store
    stopped: list[object] = []

    def once(self: Tables, *args: Any) -> bool:
        if not stopped:
            stopped.append(args)
            raise KeyboardInterrupt
        return store(self, *args)

    arms = {name: [f"server.max_seqs={4 + n}"] for n, name in enumerate("abc")}
    words = (*QUICK[:-1], "jobs=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "store", once)
        try:
            carried_out(tmp_path, *words, study=Compare("t", "q", arms))
        except KeyboardInterrupt as error:
            assert "goes on from there" in str(error)
    found = carried_out(tmp_path, *words, study=Compare("t", "q", arms))
    assert set(found["data"]["means"]) == set("abc")


def test_an_arm_that_cannot_be_configured_later_leaves_the_others(tmp_path: Path) -> None:
    study = Steps(rounds=((), ("memory.blok=1",), ("server.max_seqs=8",)))
    with pytest.raises(UserError, match=r"round 1: .*memory\.blok: no such key"):
        carried_out(tmp_path, *QUICK, study=study)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["finding"] == ["2 runs."] and "round 1" in found["failed"]


def test_the_first_arms_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory\.blok: no such key"):
        carried_out(tmp_path, *QUICK, study=Steps(rounds=(("memory.blok=1",),)))
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_other_arms_is_left_when_a_study_goes_on(tmp_path: Path) -> None:
    two = Compare("t", "q", {"a": [], "b": ["server.max_seqs=4"]})
    carried_out(tmp_path, *QUICK, study=two)
    assert (tmp_path / "plots/effect.png").exists()
    carried_out(tmp_path, *QUICK, "report=false", study=Compare("t", "q", {"a": []}))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"runs", "config.yaml", "result.json", "comparison.csv", "plots"}
    assert list((tmp_path / "plots").iterdir()) == []
    assert "b" not in (tmp_path / "comparison.csv").read_text().replace("batch", "")[:60]
