"""The same requests on the engine and in the simulator, held against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from pagedsim.fidelity.engine_model import ModelledEngine
from pagedsim.fidelity.recorded import Recorded
from pagedsim.fidelity.steplog import predicted, samples_of
from pagedsim.metrics.agreement import JUDGED, Regime
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.run.backend import RunConfig, Settings
from pagedsim.run.job import Job
from pagedsim.sim.cost import Fitted


def measured(
    name: str,
    load: float,
    tolerance: float,
    engine: list[Recorded],
    simulated: Run,
    cost: Fitted,
) -> Regime:
    """A load with everything that was measured under it; `cost` is what the simulator's run had."""
    pace = [_pace(run, cost) for run in engine]
    first = engine[0]
    return Regime(
        name,
        load,
        first.config["workload"]["rate"],
        tolerance,
        [_summary(run.requests, run.steps, run.machine) for run in engine],
        simulated.summary,
        pace,
        [_simulated(first.config, first.machine, first.seed, cost.slowed(1 + p)) for p in pace],
        [run.requests for run in engine],
        simulated.requests(),
    )


def requests_per_s(job: Job, machine: Settings, cost: Fitted) -> float:
    """How many requests the simulator serves in a second."""
    rate: float = _simulated(job.config, machine, job.seed, cost)["requests_per_s"]
    return rate


def _simulated(config: Settings, machine: Settings, seed: int, cost: Fitted) -> dict[str, Any]:
    """The summary of a run of the engine, as the simulator has it; nothing is kept of it."""
    recorder = Recorder()
    workload = RunConfig(config, seed).workload()
    ModelledEngine(config, machine, cost).run(workload, recorder)
    return _summary(recorder.requests_table(), recorder.steps_table(), machine)


def _summary(requests: pa.Table, steps: pa.Table, machine: Settings) -> dict[str, Any]:
    return summarise(
        requests,
        steps,
        total_blocks=machine["blocks"],
        block_size=machine["block_size"],
        max_seqs=machine["max_seqs"],
    )


def _pace(run: Recorded, cost: Fitted) -> float:
    """How much longer than the model says the engine took for its steps."""
    samples = samples_of(run.steps)
    taken = sum(sample.seconds for sample in samples)
    return taken / sum(predicted(cost, sample) for sample in samples) - 1


UNEVEN = 0.1
"""A spread of the engine's own runs that takes the meaning from a comparison with them."""


def doubts(regimes: Sequence[Regime]) -> Iterator[str]:
    """What a reader must know before believing a validation."""
    last = max(regimes, key=lambda regime: regime.load)
    if not any(summary["preemptions"] for summary in last.engine):
        yield f"no request was preempted under {last.name}: memory.blocks is too large"
    spreads = {
        (regime.name, key): found.spread
        for regime in regimes
        for key, found in regime.agreements().items()
        if key in JUDGED and found.spread > UNEVEN
    }
    if spreads:
        (name, key), most = max(spreads.items(), key=lambda item: item[1])
        yield (
            f"the engine is far from itself: under {name} the {label_of(key)} of its runs differs "
            f"by ± {100 * most:.0f} %, with which little can be shown; let nothing else run here"
        )
