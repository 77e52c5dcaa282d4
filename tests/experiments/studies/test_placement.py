"""Placement: the command, against the arithmetic of its own runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]

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
