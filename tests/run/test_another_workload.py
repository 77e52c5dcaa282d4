"""Every experiment under another workload, model or GPU than its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pagedsim.core import ConfigError
from pagedsim.run.runner import Execution
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import key_of
from tests.conftest import Call
from tests.run.studies import EXPERIMENTS, compose

NAMES = [one.name for one in EXPERIMENTS]
QUICK = ("fairness", "fcfs_vs_priority", "paper_fig16", "prefix_routing", "preemption", "truth")
"""Of lengths, rates, programs, stages, other models and no requests of their own."""
OF_ARMS = ("chunk_budget", "paper_fig14_15", "size_based")
"""Whose arms choose workloads, and which say for all of them how many requests there are."""
ROWS, GAP = 120, 0.25


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of four requests a second."""
    rows = (f"{row * GAP},{200 + row % 50},{20 + row % 9}" for row in range(ROWS))
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    return file


def study(*words: str) -> Execution:
    """The study of a command line, before its first question."""
    return Execution.of(StudySpec.of(words, Path("never")), quiet=True)


def first_arms(execution: Execution) -> list[tuple[Settings, set[str]]]:
    """The configurations of the first arms, each with the keys that the arm itself sets."""
    study, runs = execution.study, execution.runs
    arms = study.next_runs(runs)
    own = {
        arm.name: {*(key_of(change) for change in arm.overrides), *(arm.changes or ())}
        for arm in arms
    }
    jobs = runs.jobs_of(arms, study.key_of)
    return [(job.config, own[job.arm]) for job in jobs]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES],
)
def test_a_trace_a_model_and_a_gpu_keep_what_their_files_say(name: str, trace: Path) -> None:
    words = {
        "workload": ("workload=trace", f"workload.path={trace}"),
        "model": ("model=llama-3.1-70b",),
        "hardware": ("hardware=h200",),
    }
    try:
        execution = study(f"experiment={name}", "tracking=none", *sum(words.values(), ()))
    except ConfigError as error:
        assert "\n" not in str(error)  # it wants more words first
        return
    plain = compose("config", overrides=["experiment=single", *sum(words.values(), ())])
    for key in {*words} - ({"workload"} if name in OF_ARMS else set()):
        assert execution.spec.config[key] == OmegaConf.to_container(plain[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_arm_serves_a_trace_as_it_is_but_for_its_own_changes(name: str, trace: Path) -> None:
    try:
        execution = study(
            f"experiment={name}", "tracking=none", "workload=trace", f"workload.path={trace}"
        )
        arms = first_arms(execution)
    except ConfigError as error:
        assert "\n" not in str(error)  # it takes no trace
        return
    plain = execution.spec.config["workload"]
    as_it_is = []
    for config, own in arms:
        workload = config["workload"]
        if workload.get("path") == str(trace):
            changed = {
                f"workload.{key}" for key, value in workload.items() if value != plain.get(key)
            }
            assert changed <= own
            as_it_is += [config] if not changed else []
        else:
            assert any(key.partition(".")[0] == "workload" for key in own), "an arm's own"
    for config in as_it_is[:1]:
        made = RunSpec(config).workload()
        assert made.rate == pytest.approx(1 / GAP, rel=0.01)


def test_a_trace_keeps_its_own_settings_and_typed_ones_hold(trace: Path, call: Call) -> None:
    words = "experiment=preemption", "workload=trace", f"workload.path={trace}", "seeds=1"
    quick = "tracking=none", "report=false"
    code, told, errors = call(*words, *quick, "hydra.run.dir=own")
    assert (code, errors) == (0, "")
    assert requests_of(Path("own")) == ROWS
    more = "workload.rate=2", "workload.requests=50", "hydra.run.dir=asked"
    code, told, errors = call(*words, *quick, *more)
    assert (code, errors) == (0, "")
    assert requests_of(Path("asked")) == 50
    assert "the trace's 4 requests/s are served at 2 (rate=2)" in told
    assert "only the first 50 requests of the trace are served (requests=50)" in told


def requests_of(folder: Path, arm: str = "recompute") -> int:
    summary = json.loads((folder / "runs" / arm / "seed-0" / "summary.json").read_text())
    requests: int = summary["requests"]
    return requests


def test_options_fitted_for_another_model_are_refused() -> None:
    execution = study("experiment=placement", "model=llama-3.1-70b", "tracking=none")
    jobs = execution.runs.jobs_of(execution.study.next_runs(execution.runs), execution.study.key_of)
    with pytest.raises(ConfigError, match=r"study\.arms: must be given for model=llama-3.1-70b"):
        execution.study.check(jobs)


def test_own_options_bring_nothing_of_the_example() -> None:
    arms = 'study.arms={a: ["tensor_parallel=2"]}'
    execution = study("experiment=placement", "model=llama-3.1-70b", arms, "tracking=none")
    assert {arm.name.partition(",")[0] for arm in execution.study.next_runs(execution.runs)} == {
        *("prefill", "decode", "both"),
    }


def test_a_trace_that_an_arm_of_the_command_line_chooses_keeps_its_own_rate(
    trace: Path, call: Call
) -> None:
    one = f'"workload=trace", "workload.path={trace}"'
    arms = f'+study.arms={{a: [{one}], b: [{one}, "preemption=swap"], own: []}}'
    words = "experiment=preemption", "~study.arms", arms, "study.baseline=a", "seeds=1"
    code, told, errors = call(*words, "tracking=none", "report=false", "hydra.run.dir=out")
    assert (code, errors) == (0, "")
    assert requests_of(Path("out"), "a") == requests_of(Path("out"), "b") == ROWS
    assert requests_of(Path("out"), "own") == 1000
    assert "requests/s are served at" not in told


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("model=llama-2-7b",), 1),
        (("model=llama-2-7b", "memory=prefix"), 1),
        (("model=llama-2-7b", "memory.blocks=500"), 0),
        (("model=llama-2-7b", "memory={blocks: 500}"), 0),
    ],
)
def test_blocks_that_the_experiment_sets_for_its_own_model_and_gpu_are_noted(
    words: tuple[str, ...], notes: int
) -> None:
    lines = study("experiment=preemption", "tracking=none", *words).spec.notes
    assert len([line for line in lines if "sets memory.blocks=" in line]) == notes
