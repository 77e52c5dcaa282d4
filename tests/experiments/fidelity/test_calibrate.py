"""Calibration finds the coefficients that made a step log, and says how far to trust them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pagedsim
from pagedsim.core import ConfigError
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.recorded import StepLog, log_of, recorded_runs
from pagedsim.sim.cost import Fitted, Sample
from tests.run.studies import carried_out
from tests.sim.shapes import plan, replica

MACHINE: dict[str, Any] = {
    "backend": "engine",
    "device": "CPU",
    "clock": "wall",
    "cuda": None,
    "threads": 1,
    "model": "tiny",
    "dtype": "float32",
    "blocks": 64,
    "block_size": 16,
    "cpu_blocks": 64,
    "block_bytes": 65536,
    "vocab_size": 512,
    "max_seqs": 64,
    "max_batched_tokens": 2048,
    "max_model_len": 1024,
    "failed_steps": 0,
}
CONFIG: dict[str, Any] = {
    "backend": {"_target_": "pagedsim.backends.engine.Engine", "model": "tiny"},
    "memory": {"kind": "paged"},
    "hardware": {"_target_": "pagedsim.sim.hardware.Hardware", "name": "mine"}
    | {"memory_gib": 8, "fp16_tflops": 1, "bandwidth_gb_s": 10, "pcie_gb_s": 10},
    **{group: {} for group in ("workload", "policy", "preemption", "batching")},
}


def row(random: Random, number: int, stall: float) -> dict[str, float]:
    """A step that takes what the coefficients below say, or now and then much longer."""
    made = dict.fromkeys(
        ("prefill_tokens", "prefill_attention", "prefill_context", "prefill_pairs"), 0.0
    )
    made |= {"prefill_requests": 0, "decode_seqs": 0, "decode_context": 0}
    made |= {"swap_out": 0, "swap_in": 0}
    if number % 3:
        made["decode_seqs"] = random.randint(1, 64)
        made["decode_context"] = made["decode_seqs"] * random.randint(10, 900)
        seconds = 4e-3 + 5e-5 * made["decode_seqs"] + 2e-7 * made["decode_context"]
    else:
        made["prefill_tokens"] = made["prefill_context"] = random.randint(8, 900)
        made["prefill_attention"] = made["prefill_tokens"] ** 2
        made["prefill_requests"] = 1
        seconds = 6e-3 + 1e-4 * made["prefill_tokens"] + 3e-9 * made["prefill_attention"]
    if number % 7 == 0:
        made["swap_out" if number % 2 else "swap_in"] = random.randint(1, 40)
        seconds += 1e-3 + 2e-4 * (made["swap_out"] + made["swap_in"])
    return made | {"seconds": seconds * (stall if random.random() < 0.03 else 1.0)}


def recorded(folder: Path, count: int, stall: float = 1.0, **machine: Any) -> Path:
    """A run as the engine leaves it."""
    random, rows, now = Random(count), [], 0.0
    for number in range(count):
        made = row(random, number, stall)
        made |= {"step": number, "start": now, "end": now + made.pop("seconds")}
        now = made["end"]
        rows.append(made)
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "steps.parquet")
    pq.write_table(pa.table({"request": [0]}), folder / "requests.parquet")
    made_of = {"version": pagedsim.__version__, "seed": 0, "config": CONFIG}
    (folder / "run.json").write_text(json.dumps(made_of))
    (folder / "summary.json").write_text(json.dumps({"machine": MACHINE | machine}))
    return folder


def calibrated(run: Path, out: Path) -> Fitted:
    carried_out(out, "experiment=calibrate", f"run={run}", "report=false")
    return Fitted.load(out / "cost.json", replica("tiny", "cpu"))


def test_the_coefficients_of_a_log_are_recovered_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = calibrated(recorded(tmp_path / "run", 600), tmp_path / "out")
    assert cost.notices == []
    decode = cost.decode_seconds(32, 32 * 500)
    assert decode == pytest.approx(4e-3 + 32 * 5e-5 + 16_000 * 2e-7)
    assert cost.recompute_seconds(500) == pytest.approx(6e-3 + 0.05 + 7.5e-4)
    assert cost.swap_seconds(20) == pytest.approx(1e-3 + 20 * 2e-4)
    assert cost.swap_seconds(0) == 0
    told = capsys.readouterr().out
    assert all(words in " ".join(told.split()) for words in ("600 steps of 1 run", "1,000 µs"))
    assert f"cost=fitted cost.path={tmp_path / 'out' / 'cost.json'}" in told
    found = json.loads((tmp_path / "out/result.json").read_text())["data"]
    assert found["leave_one_out"]["decode"] < 1e-9
    assert found["residuals"]["swap"]["steps"] == 86
    assert found["roofline"].keys() == found["residuals"].keys()
    cost.step_seconds(plan(2000))
    assert "larger than any that was fitted" in cost.notices[0]


@pytest.mark.parametrize(
    ("counts", "machine", "message"),
    [
        ((5,), {}, "too short to fit: 5 samples: need at least 4 of one kind of step"),
        ((20, 20), {"threads": 2}, "run-1: threads=2, but "),
        ((20,), {"failed_steps": 2}, "2 of its steps failed"),
    ],
)
def test_logs_that_cannot_be_fitted(
    counts: tuple[int, ...], machine: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for number, count in enumerate(counts):
        facts = machine if number == len(counts) - 1 else {}
        recorded(tmp_path / f"run-{number}", count, **facts)
    with pytest.raises(ConfigError, match=message):
        fitted(log_of(recorded_runs(str(tmp_path)), "a log"))


def with_column(name: str, change: Callable[[list[Any]], list[Any] | None]) -> Callable[..., Any]:
    """A change of steps.parquet: other values in a column, or None for the column left out."""

    def changed(table: pa.Table) -> pa.Table:
        values, place = change(table[name].to_pylist()), table.column_names.index(name)
        if values is None:
            return table.drop([name])
        return table.set_column(place, name, pa.array(values))

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_column("end", lambda v: [*v[:2], math.nan, *v[3:]]), "row 2: end=nan: must be a num"),
        (with_column("end", lambda v: [*v[:2], 0.0, *v[3:]]), "row 2: step 2 from "),
        (with_column("start", lambda v: None), "has no column start"),
        (with_column("step", lambda v: [0, 0, *v[2:]]), "row 1: step 0 from "),
        (with_column("decode_seqs", lambda v: [-1, *v[1:]]), "row 0: decode_seqs=-1: must be a nu"),
        (lambda table: table.slice(0, 0), "holds no steps"),
    ],
)
def test_impossible_steps_are_refused(
    change: Callable[[pa.Table], pa.Table], message: str, tmp_path: Path
) -> None:
    file = recorded(tmp_path / "run", 20) / "steps.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(ConfigError) as error:
        log_of(recorded_runs(str(tmp_path)), "one")
    assert str(error.value).startswith(f"{file}: {message}")


def test_the_configured_hardware_stands_for_an_unknown_device(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 200, device="Something New", cuda="12.8")
    log = log_of(recorded_runs(str(run)), "one")
    cost = fitted(log)
    assert log.replica.hardware.name == "mine"
    (note,) = (note for note in Calibration(log, cost).notes() if "data sheet of" in note)
    assert note.startswith("there is no data sheet of Something New: hardware=mine")


def test_a_rare_kind_of_step_is_taken_from_mixed_ones() -> None:
    samples = [
        Sample(1e-3 * (2 + n % 7), prefill_tokens=8 * (1 + n % 7), decode_count=1 + n % 3)
        for n in range(40)
    ]
    log = StepLog(samples, replica("tiny", "cpu"), MACHINE, "a log")
    notes = Calibration(log, fitted(log)).notes()
    assert [note for note in notes if "too few steps to fit" in note] == [
        f"{kind}: too few steps to fit: they take what the same work takes in mixed ones"
        for kind in ("prefill", "decode")
    ]
