"""What a validation tells: the simulator beside the engine, in words, tables and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedsim.fidelity.validation import JUDGED, KEYS, SHOWN, Regime, Validation
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.result import Result
from pagedsim.report.numbers import signed
from tests.metrics.tables import run_of


@pytest.fixture
def validation(tmp_path: Path) -> Validation:
    """The engine has served twice what the simulator has served once, a little faster."""
    engine = [run_of("engine", seed, tmp_path) for seed in (0, 1)]
    simulator = run_of("simulator", 0, tmp_path, slower=1.3)
    regimes = [
        Regime(
            name=name,
            load=0.7,
            rate=2.0,
            tolerance=0.05,
            engine=[run.summary for run in engine],
            simulator=simulator.summary,
            pace=[0.01, -0.02],
            paced=[simulator.summary] * 2,
            engine_requests=[run.requests() for run in engine],
            simulator_requests=simulator.requests(),
        )
        for name in ("half load", "overload")
    ]
    machine = {"device": "a CPU", "model": "tiny", "dtype": "float32", "blocks": 8}
    return Validation(regimes, machine | {"block_size": 16}, 1234, {"all": [1.0]}, ["it was warm"])


def result_of(validation: Validation) -> Result:
    return Result(
        "validate",
        "Is it right?",
        "How far off?",
        "python -m pagedsim experiment=validate",
        validation.finding(),
        listings=list(validation.listings()),
        data=validation.data(),
    )


def test_every_load_has_its_verdicts_and_errors(validation: Validation) -> None:
    first, second, machine = validation.finding()
    regime = validation.regimes[0]
    found, verdicts = regime.agreements(), regime.verdicts()
    assert first.startswith("half load: ") and second.startswith("overload: ")
    for key in JUDGED:
        assert f"{label_of(key)} {signed(found[key].error)}, {verdicts[key]}" in first
    assert "a CPU, tiny, float32, 8 blocks of 16 tokens" in machine
    assert "1,234 steps" in machine


def test_rows_and_data_have_every_metric(validation: Validation) -> None:
    table = validation.table()
    assert [(row["load"], row["metric"]) for row in table] == [
        (name, key) for name in ("half load", "overload") for key in KEYS
    ]
    record = result_of(validation).record()["data"]
    assert record["replayed_steps"] == 1234
    for regime in validation.regimes:
        told = record["regimes"][regime.name]
        assert (told["runs"], told["requests"], told["pace"]) == (2, 40, [0.01, -0.02])
        assert set(told["metrics"]) == set(KEYS) and set(told["by_request"]) == set(SHOWN)
        for key, found in regime.agreements().items():
            assert told["metrics"][key]["error"] == pytest.approx(
                found.error, rel=1e-5, nan_ok=True
            )
            (row,) = (r for r in table if (r["load"], r["metric"]) == (regime.name, key))
            assert row["verdict"] == regime.verdicts().get(key, "")
            assert row["simulator"] == found.simulator
    assert json.dumps(record)  # nothing but plain values
