"""What a study and its runs say of settings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import ConfigError, Policy
from pagedsim.metrics.arms import Run
from pagedsim.policies.aging import Aging
from pagedsim.policies.fairness import DRR, VTC
from pagedsim.policies.slo import SLO
from pagedsim.policies.victims import VictimRule
from pagedsim.run.job import Arm, Job, run_job
from pagedsim.run.parts import refuse_unmet, remarks
from pagedsim.run.publish import blocks_notes
from pagedsim.run.runs import Runs
from pagedsim.workload import Workload
from tests.run.studies import carried_out, command, settings_of

# -- one run of one arm: what its summary says to a reader -----------------------------------------


def test_costs_fitted_for_another_model_are_noted(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3", "cost=distserve-opt-13b-tp1"]
    words.append("+cost.limits.decode_count=1")
    said = [notice["what"] for notice in _summary(tmp_path, *words)["notices"]]
    assert "step times are fitted for model=opt-13b, but model=llama-2-7b is served" in said
    assert "some steps are larger than any that was fitted (decode_count 1)" in said


def test_a_policy_that_was_first_come_first_served_is_noted(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3", "policy=vtc"]
    said = [notice["what"] for notice in _summary(tmp_path, *words)["notices"]]
    assert said[0].startswith("VTC goes by clients, and all requests are of one: alone it is first")


@pytest.mark.parametrize("asked", ["beam", "n"])
def test_tokens_of_all_beams_are_noted(tmp_path: Path, asked: str) -> None:
    told = _summary(tmp_path, "experiment=single", "workload.requests=3", f"workload.{asked}=4")
    said = [notice["what"] for notice in told["notices"]]
    assert any(text.endswith("one beam is 1 of 4") for text in said) == (asked == "beam")


@pytest.mark.parametrize(("chunks", "told"), [(3, True), (5000, False)])
def test_a_host_tier_too_small_for_what_is_stored_at_once_is_noted(
    tmp_path: Path, chunks: int, told: bool
) -> None:
    words = ["experiment=single", "workload.requests=5", "batching=unified", "offload=vllm"]
    summary = _summary(tmp_path, *words, f"offload.chunks={chunks}")
    said = [notice["what"] for notice in summary["notices"]]
    line = "offers of blocks to the host tier were larger than it is, 3 blocks, and nothing"
    assert any(text.startswith(line) for text in said) == told


def test_notices_are_in_the_order_of_the_arms_whichever_run_ends_first(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.requests=3"]
    runs = Runs(command(tmp_path, *words))
    arms = [Arm("a", ["policy=vtc"]), Arm("b", ["policy=drr"])]
    runs.jobs = runs.jobs_of(arms, str)
    both = {(job.arm, job.number): run_job(job, StoppableRecorder()) for job in runs.jobs}
    lines = []
    for keys in (list(both), list(both)[::-1]):
        runs.finished = {key: run for key in keys if isinstance(run := both[key], Run)}
        lines.append(list(runs.notices()))
    assert lines[0] == lines[1] and len(lines[0]) > 1


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
def test_energy_is_absent_where_power_is_not_known(tmp_path: Path, word: str) -> None:
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


def _summary(folder: Path, *words: str) -> dict[str, Any]:
    run = run_job(Job("arm", 0, settings_of(*words), folder), StoppableRecorder())
    assert isinstance(run, Run)
    return run.summary


# -- what a policy goes by, and what is said where the requests lack it ----------------------------


CLIENTS: dict[str, Any] = {"client": [0, 1, 1], "clients": ("a", "b")}


def three(**columns: Any) -> Workload:
    return Workload.of([0.0, 1.0, 2.0], [8, 8, 8], [4, 4, 4], **columns)


@pytest.mark.parametrize(
    ("policy", "lacks", "columns"),
    [
        (VTC(), "VTC goes by clients, and all requests are of one", CLIENTS),
        (Aging(DRR()), "DRR goes by clients, and all requests are of one", CLIENTS),
        (SLO(), "SLO goes by priorities, and all requests have the same", {"priority": [0, 0, 1]}),
    ],
)
def test_a_policy_without_the_attributes_it_uses_is_noted(
    policy: Policy, lacks: str, columns: dict[str, Any]
) -> None:
    (line,) = remarks(policy, three())
    assert line.startswith(lacks) and ": alone it is first come, first served; set " in line
    assert list(remarks(policy, three(**columns))) == []


def test_requests_without_a_target_are_counted() -> None:
    around = Aging(SLO({0: 1.0, 1: 5.0}))
    assert list(remarks(around, three(priority=[0, 1, 2]))) == [
        "1 of 3 requests have no target, since their priority is beyond those of "
        "policy.of.targets (0, 1): they go last"
    ]
    assert list(remarks(around, three(priority=[0, 0.5, 1]))) == []


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (VictimRule(DRR(weights={"c": 2}), "last"), "policy"),
        (Aging(Aging(VTC(weights={"c": 2}))), "policy.of.of"),
    ],
)
def test_a_weight_of_an_unknown_client_is_refused(policy: Policy, key: str) -> None:
    for columns, there in (({}, "it has none with a name"), (CLIENTS, "choose from a, b")):
        with pytest.raises(ConfigError) as error:
            refuse_unmet(policy, three(**columns))
        assert str(error.value) == f"{key}.weights.c: no such client in the workload; {there}"


# -- what a study over block sizes says of simulated kernels ---------------------------------------


QUICK = ("workload.requests=10", "seeds=1", "report=false", "jobs=1")
SAME = "simulated kernels take the same time with any block size"
PRICED = "simulated attention takes as long to find a block as to read 3.68 tokens"


def notes(folder: Path, *words: str) -> list[str]:
    told = carried_out(folder, *words, *QUICK).get("notes", [])
    return [note for note in told if note.startswith((SAME, PRICED))]


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=sweep", "study.over=memory.block_size", "study.values=[8,16]"),
        ("experiment=compare", 'study.arms={a: [], b: ["memory.block_size=1"]}'),
    ],
)
def test_a_table_over_block_sizes_notes_that_kernels_do_not_depend_on_them(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    [note] = notes(tmp_path, *words)
    assert note.startswith(f"{SAME}; the engine") and "on an A100" in note
    assert "fewer than 16 tokens" in note


def test_a_study_with_and_without_a_price_of_blocks_notes_both(tmp_path: Path) -> None:
    sizes = "study.figures.preemption.values=[16,64]"
    same, priced = notes(tmp_path, "experiment=paper_fig19", sizes)
    assert same.startswith(f"{SAME} where cost.block_tokens=0;")
    assert priced.startswith(PRICED)


def test_a_price_of_blocks_is_noted_as_assumed(tmp_path: Path) -> None:
    over = ("study.over=memory.block_size", "study.values=[8,16]")
    [note] = notes(tmp_path, "experiment=sweep", *over, "cost.block_tokens=3.68")
    assert note.startswith(PRICED)


def test_blocks_of_other_sizes_are_noted() -> None:
    memories = [{"blocks": 40, "block_size": size} for size in (16, 1, 16)]
    others: list[dict[str, Any]] = [
        {"blocks": 30, "block_size": 8},
        {"blocks": None, "block_size": 2},
    ]
    assert list(blocks_notes([*memories, *others])) == [
        "memory.blocks=40 are different numbers of tokens: 40 with memory.block_size=1, 640 with "
        "memory.block_size=16"
    ]
