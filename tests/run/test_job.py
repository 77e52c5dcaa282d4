"""One run of one arm: what its summary says to a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose
from omegaconf import OmegaConf

from pagedsim.metrics.arms import Run
from pagedsim.run.backend import StoppableRecorder
from pagedsim.run.job import Job, run_job

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


ENERGY = ("energy_j", "mean_watts", "tokens_per_joule")


def test_energy_lies_between_what_idle_gpus_draw_and_their_tdp(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=5", "workload.rate=0.5", "tensor_parallel=2"]
    told = _summary(tmp_path, *words, "hardware=a100-80gb")
    joules, watts, tokens = (told[key] for key in ENERGY)
    assert 0.16 * 400 * 2 < watts < 400 * 2
    assert joules == pytest.approx(watts * told["makespan"])
    assert tokens == pytest.approx(told["output_tokens_per_s"] / watts)
    awake = _summary(tmp_path, *words, "hardware=a100-80gb", "backend.power.idle=0.3")
    between = (awake["energy_j"] - joules) / ((0.3 - 0.16) * 400 * 2)  # seconds between steps
    assert 0 < between < told["makespan"]


@pytest.mark.parametrize("word", ["hardware=ascend-910b", "backend.power=null"])
def test_energy_is_not_told_where_power_is_not_known(tmp_path: Path, word: str) -> None:
    told = _summary(tmp_path, "experiment=single", "workload.requests=3", word)
    assert "mfu" in told
    assert set(ENERGY).isdisjoint(told)


def test_a_phase_alone_takes_the_time_of_that_phase(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=20", "workload.rate=2", "hardware=a100-80gb"]
    told = {
        only: _summary(tmp_path, *words, f"backend.only={only}")
        for only in ("prefill", "decode", "null")
    }
    prefill, decode, both = told.values()
    assert prefill["e2e_mean"] == prefill["ttft_mean"] <= both["ttft_mean"]
    assert np.isnan(prefill["tpot_mean"])
    assert decode["tpot_mean"] < both["tpot_mean"]
    assert decode["ttft_mean"] < prefill["ttft_mean"]
    assert {"mfu", "energy_j"}.isdisjoint(decode)
    assert {"mfu", "energy_j"} <= prefill.keys()
    for summary, word in ((prefill, "its first token"), (decode, "prompts take no time")):
        assert any(word in notice["what"] for notice in summary["notices"])


def test_cost_is_that_of_all_gpus_over_the_makespan(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3", "hardware=h100"]
    one, two = (_summary(tmp_path, *words, f"tensor_parallel={n}") for n in (1, 2))
    assert two["cost_eur"] == pytest.approx(2 * 3.393 * two["makespan"] / 3600)
    assert one["cost_eur"] == pytest.approx(3.393 * one["makespan"] / 3600)
    assert "cost_eur" not in _summary(tmp_path, *words[:2], "hardware=a30")


def _summary(folder: Path, *words: str) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(compose("config", overrides=[*words]), resolve=True)
    run = run_job(Job("arm", 0, config, folder), StoppableRecorder())
    assert isinstance(run, Run)
    return run.summary
