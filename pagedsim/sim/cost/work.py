"""The FLOP and bytes of a step: arithmetic on a model's shape, before any hardware."""

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
    """What one GPU has to do; where they differ, the average one."""

    flop: float
    bytes: float
    """Read from memory."""

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        """The part of the peak FLOP rate of 16 bits that doing it in `seconds` takes.

        Products of 8 bits are held against it as well, and may take more than all of it.
        """
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
    model, gpus = replica.model, replica.gpus
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
        bytes=replica.read_bytes(tokens) + context * replica.kv_read_bytes,
    )


def total_work(replica: Replica, steps: Batches) -> Work:
    """The work of all recorded steps, from a table like `steps.parquet`."""
    flop = read = 0.0
    for part in steps.to_batches():
        each = works(replica, part)
        flop += float(each[0].sum())
        read += float(each[1].sum())
    return Work(flop, read)


def works(replica: Replica, part: pa.RecordBatch) -> tuple[Floats, Floats]:
    """FLOP and bytes of each of some recorded steps."""
    model, gpus = replica.model, replica.gpus
    of = {name: part[name].to_numpy() for name in _COUNTED}
    tokens = of["prefill_tokens"] + of["decode_seqs"]
    flop = tokens * float(model.flop_per_token)  # whole numbers would not fit into 32 bits
    flop += (of["sampled_prefills"] + of["decode_seqs"]) * float(model.flop_per_sample)
    flop += of["prefill_pairs"] * float(model.prefill_pair_flop)
    flop += of["decode_context"] * float(model.decode_pair_flop)
    # What is read of the weights depends on a step's tokens alone, and few numbers of them occur.
    weights = np.zeros(int(tokens.max(initial=0)) + 1)
    for size in np.flatnonzero(np.bincount(tokens)).tolist():
        weights[size] = replica.read_bytes(size) if size else 0.0
    context = of["prefill_context"] - of["prefill_tokens"] + of["decode_context"]
    return flop / gpus, weights[tokens] + context * replica.kv_read_bytes
