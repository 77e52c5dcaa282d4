"""The FLOP and bytes of a step: arithmetic on a model's shape, before any hardware."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedsim.core import StepPlan
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica

if TYPE_CHECKING:
    from pagedsim.metrics.steps import Batches

_SUMMED = (
    "prefill_tokens",
    "prefill_context",
    "prefill_pairs",
    "sampled_prefills",
    "decode_seqs",
    "decode_context",
)


class Work(NamedTuple):
    """What one GPU has to do."""

    flop: float
    bytes: float
    """Read from memory."""

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        """The part of the peak FLOP rate that doing it in `seconds` takes."""
        return self.flop / seconds / hardware.flop_rate

    def mbu(self, seconds: float, hardware: Hardware) -> float:
        """The part of the peak memory bandwidth that doing it in `seconds` takes.

        >>> a2 = Hardware("two terabytes", 80, bandwidth_gb_s=2000, fp16_tflops=300, pcie_gb_s=32)
        >>> Work(flop=0, bytes=14e9).mbu(0.014, a2)
        0.5
        """
        return self.bytes / seconds / hardware.bandwidth


def step_work(replica: Replica, plan: StepPlan) -> Work:
    """All of a step's FLOP, and the bytes of weights, keys and values that it reads."""
    model, gpus = replica.model, replica.tensor_parallel
    tokens = plan.prefill_tokens + plan.decode_count
    if not tokens:
        return Work(0.0, 0.0)
    samples = sum(chunk.samples for chunk in plan.chunks) + plan.decode_count
    flop = tokens * model.flop_per_token + samples * model.flop_per_sample
    flop += plan.prefill_pairs * model.prefill_pair_flop
    flop += plan.decode_context * model.decode_pair_flop
    # Those of a chunk's own tokens have just been made, so they come from the caches.
    context = plan.prefill_context - plan.prefill_tokens + plan.decode_context
    return Work(
        flop=flop / gpus,
        bytes=model.read_bytes(tokens) / gpus + context * replica.kv_bytes_per_token,
    )


def total_work(replica: Replica, steps: Batches) -> Work:
    """The work of all recorded steps, from a table like `steps.parquet`."""
    model, gpus = replica.model, replica.tensor_parallel
    samples = pairs = decode_context = read = 0
    batches: Counter[int] = Counter()  # how often a step had so many tokens
    for part in steps.to_batches():
        total = {name: int(part[name].to_numpy().sum()) for name in _SUMMED}
        samples += total["sampled_prefills"] + total["decode_seqs"]
        pairs += total["prefill_pairs"]
        decode_context += total["decode_context"]
        read += total["prefill_context"] - total["prefill_tokens"]
        every = part["prefill_tokens"].to_numpy() + part["decode_seqs"].to_numpy()
        sizes, times = np.unique(every, return_counts=True)
        batches.update(dict(zip(sizes.tolist(), times.tolist(), strict=True)))
    flop = sum(size * times for size, times in batches.items()) * model.flop_per_token
    flop += samples * model.flop_per_sample
    flop += pairs * model.prefill_pair_flop
    flop += decode_context * model.decode_pair_flop
    # What is read of the weights depends on a step's tokens alone, and few numbers of them occur.
    weights = sum(times * model.read_bytes(size) for size, times in sorted(batches.items()) if size)
    read += decode_context
    return Work(flop / gpus, weights / gpus + read * replica.kv_bytes_per_token)
