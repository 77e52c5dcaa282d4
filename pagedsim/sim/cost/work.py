"""FLOP and bytes of a step, from the shape of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.core import StepPlan
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica

if TYPE_CHECKING:
    from pagedsim.metrics.steps import Batches

Floats = NDArray[np.float64]

_COUNTED = (
    "prefill_tokens",
    "prefill_context",
    "prefill_pairs",
    "sampled_prefills",
    "decode_seqs",
    "decode_context",
)


class Work(NamedTuple):
    """The work of one GPU, averaged over GPUs."""

    flop: float
    bytes: float
    """Read from memory."""

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        """Achieved fraction of the 16-bit peak FLOP rate.

        8-bit products are related to the same rate, so it may exceed 1.
        """
        return self.flop / seconds / hardware.flop_rate

    def mbu(self, seconds: float, hardware: Hardware) -> float:
        """Achieved fraction of the peak memory bandwidth.

        >>> a2 = Hardware("two terabytes", 80, bandwidth_gb_s=2000, fp16_tflops=300, pcie_gb_s=32)
        >>> Work(flop=0, bytes=14e9).mbu(0.014, a2)
        0.5
        """
        return self.bytes / seconds / hardware.bandwidth


def step_work(replica: Replica, plan: StepPlan) -> Work:
    """FLOP of a step, and the bytes of weights and KV cache that it reads."""
    model, gpus = replica.model, replica.gpus
    tokens = plan.prefill_tokens + plan.decode_count
    if not tokens:
        return Work(0.0, 0.0)
    samples = sum(chunk.samples for chunk in plan.chunks) + plan.decode_count
    flop = tokens * model.flop_per_token + samples * model.flop_per_sample
    flop += plan.prefill_pairs * model.prefill_pair_flop
    flop += plan.decode_context * model.decode_pair_flop
    # A chunk's own keys and values are still in the GPU's caches.
    context = plan.prefill_context - plan.prefill_tokens + plan.decode_context
    return Work(
        flop=flop / gpus,
        bytes=replica.read_bytes(tokens) + context * replica.kv_read_bytes,
    )


def total_work(replica: Replica, steps: Batches) -> Work:
    """Total work of recorded steps, from a table like `steps.parquet`."""
    flop = read = 0.0
    for part in steps.to_batches():
        part_work = works(replica, part)
        flop += float(part_work[0].sum())
        read += float(part_work[1].sum())
    return Work(flop, read)


def works(replica: Replica, part: pa.RecordBatch) -> tuple[Floats, Floats]:
    """FLOP and bytes of each recorded step."""
    model, gpus = replica.model, replica.gpus
    of = {name: part[name].to_numpy() for name in _COUNTED}
    tokens = of["prefill_tokens"] + of["decode_seqs"]
    flop = tokens * float(model.flop_per_token)  # integers would overflow 32 bits
    flop += (of["sampled_prefills"] + of["decode_seqs"]) * float(model.flop_per_sample)
    flop += of["prefill_pairs"] * float(model.prefill_pair_flop)
    flop += of["decode_context"] * float(model.decode_pair_flop)
    # Bytes of weights depend only on the number of tokens, which takes few distinct values.
    weights = np.zeros(int(tokens.max(initial=0)) + 1)
    for size in np.flatnonzero(np.bincount(tokens)).tolist():
        weights[size] = replica.read_bytes(size) if size else 0.0
    context = of["prefill_context"] - of["prefill_tokens"] + of["decode_context"]
    return flop / gpus, weights[tokens] + context * replica.kv_read_bytes
