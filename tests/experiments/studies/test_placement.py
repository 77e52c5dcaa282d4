"""Placement: the command, against the arithmetic of its own runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedsim.experiments.studies.hit_rate import ideal
from pagedsim.workload import trace
from tests.conftest import Call

ARMS = 'study.arms={TP 1: ["tensor_parallel=1", "cost=distserve-own-opt-13b-tp1"]}'
FEW = (
    *("experiment=placement", "workload=fixed", "workload.requests=60", "seeds=1"),
    *("workload.arrivals=fixed", "workload.lengths.prompt=1000", "workload.lengths.output=101"),
    *(
        "study.tolerance=0.1",
        "study.baseline=null",
        "study.wholes={}",
        "report=false",
        "tracking=none",
    ),
    "hydra.run.dir=out",
)

ONE = ("server.max_model_len=1200", "server.max_batched_tokens=1200")
"""Room for one prompt a step."""


def test_each_phase_is_searched_alone_and_placed_by_that(call: Call) -> None:
    code, text, errors = call(*FEW, ARMS, "study.target=40", *ONE)
    assert (code, errors) == (0, ""), text
    found = json.loads(Path("out/result.json").read_text())["data"]["placement"]
    rates = {
        phase: {name: each["requests_per_s"] for name, each in options.items()}
        for phase, options in found["options"].items()
    }
    # One prompt a step and evenly spaced: no faster than a + b 1000 + c 1000², in ms.
    most = 1e3 / (21.10 + 102.0 + 7.12)
    assert most * 0.9 < rates["prefill"]["TP 1"] < most * 1.5
    assert rates["decode"]["TP 1"] > rates["both"]["TP 1"] > 0
    assert sum(each["servers"] for each in found["apart"]["shares"]) == found["apart"]["gpus"]
    assert found["apart"]["a_gpu"] == pytest.approx(40 / found["apart"]["gpus"], rel=1e-5)
    # 2.79 dollars for each A100-80GB.
    euros = 2.372 * found["apart"]["gpus"]
    assert found["apart"]["euros_per_hour"] == pytest.approx(euros, rel=1e-5)
    assert f"40 requests/s take {found['apart']['gpus']} GPUs for {euros:,.2f} €" in text


def test_servers_without_a_known_link_are_not_apart(call: Call) -> None:
    arms = 'study.arms={L4: ["hardware=l4"], A100: []}'
    wholes = 'study.wholes={L4s: ["hardware=l4", "fleet=prefill_decode"]}'
    small = "model=llama-3.1-8b", "study.tolerance=0.5", *ONE
    words = [word for word in FEW if not word.startswith("study.wholes")]
    code, text, errors = call(*words, *small, arms, wholes)
    assert (code, errors) == (0, ""), text
    told = " ".join(text.split())
    assert "left out: prefill, L4; decode, L4; apart, L4s: fleet.link.bandwidth_gb_s=null" in told
    found = json.loads(Path("out/result.json").read_text())["data"]["placement"]
    phases = {phase: set(options) for phase, options in found["options"].items()}
    assert phases == {"prefill": {"A100"}, "decode": {"A100"}, "both": {"L4", "A100"}}


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("study.node=1", "node=1: must be a whole number of at least 2"),
        ("study.target=0", "target=0: must be a number above 0"),
        ("study.arms={a: ['workload.rate=3']}", "arms.prefill, a: workload.rate=3: is what"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(call: Call, word: str, complaint: str) -> None:
    code, text, errors = call(*FEW, word)
    assert code == 1, text
    assert len(errors.splitlines()) == 1
    assert complaint in errors


# -- hit rate: a cache with room for everything finds what there is to find ------------------------


STUDY = ("experiment=hit_rate", "hydra.run.dir=out")
# Of 13 blocks, 2 + 3 were there: the third prompt goes on with a block that stands elsewhere.
PROMPTS = [[0, 1, 2], [0, 1, 3], [4, 1], [0, 1, 2, 5, 6]]


def written(folder: Path) -> Path:
    """A trace of prompts that share blocks, one served after another."""
    rows = [
        {"timestamp": 60_000 * at, "input_length": 512 * len(ids), "output_length": 4}
        | {"hash_ids": ids}
        for at, ids in enumerate(PROMPTS)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("out/result.json").read_text())["data"]
    return record


def test_the_ideal_counts_what_began_alike(tmp_path: Path) -> None:
    workload = trace(path=str(written(tmp_path)), format="mooncake")
    assert ideal(workload, 512) == (13, 5, 13 * 512, 5 * 512)
    assert ideal(workload, 256)[:2] == (26, 10)


def test_with_room_for_everything_the_ideal_comes_out(call: Call, tmp_path: Path) -> None:
    path = f"workload.path={written(tmp_path)}"
    code, out, _ = call(*STUDY, path, "memory.blocks=1000")
    assert code == 0
    assert "The cache finds 38.46 % of the blocks" in out
    assert found()["cached_tokens"] == 5 * 512


def shared(folder: Path) -> Path:
    """A trace in blocks of 16 tokens, of prompts too short for a block of 512."""
    rows = [
        {"chat_id": at, "parent_chat_id": -1, "timestamp": 60 * at}
        | {"input_length": 16 * len(ids), "output_length": 4, "hash_ids": ids}
        for at, ids in enumerate(PROMPTS)
    ]
    path = folder / "bailian.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_blocks_are_as_large_as_the_trace_has_them(call: Call, tmp_path: Path) -> None:
    code, _, _ = call(*STUDY, f"workload.path={shared(tmp_path)}", "workload=bailian")
    assert (code, found()["block_size"], found()["cached_tokens"]) == (0, 16, 5 * 16)
    assert found()["ideal"]["found"] == 5


def test_what_larger_blocks_hide_is_noted(call: Call, tmp_path: Path) -> None:
    words = (f"workload.path={shared(tmp_path)}", "workload=bailian", "memory.block_size=512")
    code, text, _ = call(*STUDY, *words)
    assert (code, found()["ideal"]["found"]) == (0, 0)
    assert "memory.block_size=512 leaves 0.00 %" in text


def test_workloads_without_blocks_have_small_ones(call: Call) -> None:
    """A prefix of 200 tokens is no block of 512."""
    words = ("workload.requests=50", "workload.prefixes={tokens: 200, count: 1}")
    assert call(*STUDY, "workload=sharegpt", *words, "memory.blocks=9000")[0] == 0
    assert found()["ideal_share_of_tokens"] > 0.2


def test_workloads_without_prefixes_are_refused_in_a_line(call: Call, tmp_path: Path) -> None:
    code, out, errors = call(*STUDY, "workload=sharegpt")
    assert (code, out) == (1, "")
    assert errors.startswith("pagedsim: workload: says nothing of what is in its prompts")
    _, _, errors = call(*STUDY, "workload=sharegpt", "memory=paged")
    assert errors.startswith("pagedsim: memory=paged: must be prefix")
