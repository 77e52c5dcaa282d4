"""What a validation tells: the simulator beside the engine, in words, tables and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedsim.fidelity.validation import JUDGED, KEYS, SHOWN, Regime, data, doubts, finding, table
from pagedsim.metrics.catalogue import label_of
from pagedsim.report.numbers import signed
from tests.metrics.tables import run_of


@pytest.fixture
def regimes(tmp_path: Path) -> list[Regime]:
    """The engine has served twice what the simulator has served once, a little faster."""
    engine = [run_of("engine", seed, tmp_path) for seed in (0, 1)]
    simulator = run_of("simulator", 0, tmp_path, slower=1.3)
    return [
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


MACHINE = {
    **{"device": "a CPU", "model": "tiny", "dtype": "float32", "blocks": 8},
    "block_size": 16,
}


def test_every_load_has_its_verdicts_and_errors(regimes: list[Regime]) -> None:
    first, second, machine = finding(regimes, MACHINE, 1234)
    regime = regimes[0]
    found, verdicts = regime.agreements, regime.verdicts
    assert first.startswith("half load: ") and second.startswith("overload: ")
    for key in JUDGED:
        assert f"{label_of(key)} {signed(found[key].error)}, {verdicts[key]}" in first
    assert "a CPU, tiny, float32, 8 blocks of 16 tokens" in machine
    assert "1,234 steps" in machine


def test_rows_and_data_have_every_metric(regimes: list[Regime]) -> None:
    rows = table(regimes)
    assert [(row["load"], row["metric"]) for row in rows] == [
        (name, key) for name in ("half load", "overload") for key in KEYS
    ]
    for regime in regimes:
        told = data(regime)
        assert json.dumps(told)  # nothing but plain values
        assert (told["runs"], told["requests"], told["pace"]) == (2, 40, [0.01, -0.02])
        assert set(told["metrics"]) == set(KEYS) and set(told["by_request"]) == set(SHOWN)
        for key, found in regime.agreements.items():
            assert told["metrics"][key] == found._asdict()
            (row,) = (r for r in rows if (r["load"], r["metric"]) == (regime.name, key))
            assert row["verdict"] == regime.verdicts.get(key, "")
            assert row["simulator"] == found.simulator


def test_an_engine_whose_runs_differ_much_is_doubted(regimes: list[Regime]) -> None:
    runs = [
        {**summary, "ttft_mean": ttft, "preemptions": 0}
        for summary, ttft in zip(regimes[0].engine, (1.0, 3.0), strict=True)
    ]
    regime = replace(regimes[0], engine=runs)
    spreads = [regime.agreements[key].spread for key in ("ttft_mean", "preemptions")]
    assert spreads == pytest.approx([0.5**0.5, 0])
    small, uneven = doubts([regime])
    assert small.startswith("no request was preempted under half load")
    assert "TTFT mean of its runs differs by ± 71 %" in uneven
