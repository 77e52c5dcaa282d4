"""One run of one arm: what its summary says to a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pagedsim.metrics.arms import Run
from pagedsim.run.job import Job, run_job
from pagedsim.run.stoppable import StoppableRecorder

pytestmark = pytest.mark.usefixtures("hydra")


def test_times_that_were_fitted_for_another_model_are_noticed(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3", "cost=distserve-opt-13b-tp1"]
    words.append("+cost.limits.decode_count=1")
    config: Any = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    run = run_job(Job("arm", 0, config, tmp_path), StoppableRecorder())
    assert isinstance(run, Run)
    said = [notice["what"] for notice in run.summary["notices"]]
    assert "step times are fitted for model=opt-13b, but model=llama-2-7b is served" in said
    assert "some steps are larger than any that was fitted (decode_count 1)" in said


def test_a_policy_that_was_first_come_first_served_says_so(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3", "policy=vtc"]
    config: Any = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    run = run_job(Job("arm", 0, config, tmp_path), StoppableRecorder())
    assert isinstance(run, Run)
    said = [notice["what"] for notice in run.summary["notices"]]
    assert said[0].startswith("VTC goes by clients, and all requests are of one: alone it is first")
