"""Recorded steps, as a cost model takes them: what was to be done, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.engine_model import replica_of
from pagedsim.fidelity.recorded import Recorded, numbers
from pagedsim.metrics.files import STEPS
from pagedsim.run.backend import Settings
from pagedsim.sim.cost import CostModel, Sample
from pagedsim.sim.replica import Replica

_SAME = (
    *("device", "clock", "threads", "model", "model_impl", "dtype"),
    *("block_size", "block_bytes", "kv_cache_dtype", "quantization"),
    *("tensor_parallel", "async_scheduling"),
)
"""Of the machine: where these differ, so do the times of the same step."""
_REQUEST = Request("", 1)
_COLUMNS = {
    "prefill_tokens": "prefill_tokens",
    "prefill_attention": "prefill_attention",
    "prefill_context": "prefill_context",
    "decode_count": "decode_seqs",
    "decode_context": "decode_context",
    "swap_out": "swap_out",
    "swap_in": "swap_in",
    "prefill_pairs": "prefill_pairs",
    "prefill_chunks": "prefill_requests",
}
"""What a sample is made of, and what steps.parquet calls it."""


@dataclass(frozen=True)
class StepLog:
    """Steps of one machine with one model."""

    samples: list[Sample]
    replica: Replica
    machine: Settings
    source: str
    """Where they come from, for a reader."""


def samples_of(steps: pa.Table) -> list[Sample]:
    """Every step that took any time; it holds its swaps and the host's work."""
    seconds = (steps["end"].to_numpy() - steps["start"].to_numpy()).tolist()
    values = zip(*(steps[name].to_pylist() for name in _COLUMNS.values()), strict=True)
    return [
        Sample(took, **dict(zip(_COLUMNS, row, strict=True)))
        for took, row in zip(seconds, values, strict=True)
        if took > 0
    ]


def log_of(runs: Iterable[Recorded], source: str) -> StepLog:
    """The steps of several runs; raises ConfigError unless they are of one machine."""
    runs = list(runs)
    first = runs[0]
    for run in runs:
        if failed := run.machine["failed_steps"]:
            raise ConfigError(f"{run.folder}: {failed} of its steps failed: no fit is made of it")
        for name in _COLUMNS.values():
            numbers(run.folder / STEPS, run.steps, name)
        for key in _SAME:
            mine, its = run.machine.get(key), first.machine.get(key)
            if mine != its:
                raise ConfigError(
                    f"{run.folder}: {key}={mine}, but {first.folder} has {its}: a fit "
                    "is of one machine, one model and one block size"
                )
    samples = [sample for run in runs for sample in samples_of(run.steps)]
    return StepLog(samples, replica_of(first.config, first.machine), first.machine, source)


def predicted(cost: CostModel, sample: Sample) -> float:
    """What a cost model says that a recorded step takes, swaps included."""
    plan = StepPlan(number=0, now=0.0)
    plan.prefill_tokens = sample.prefill_tokens
    plan.prefill_context = sample.prefill_context
    plan.prefill_attention = sample.prefill_attention
    plan.prefill_pairs = sample.prefill_pairs
    plan.decode_count = sample.decode_count
    plan.decode_context = sample.decode_context
    plan.chunks = [Chunk(_REQUEST, 0, 0, True)] * sample.prefill_chunks
    moved = sum(cost.swap_seconds(blocks) for blocks in (sample.swap_out, sample.swap_in) if blocks)
    computes = sample.prefill_tokens or sample.decode_count
    return moved + (cost.step_seconds(plan) if computes else 0.0)
