"""Slots that a sequence holds and does not use: what the size of a block costs in memory."""

from __future__ import annotations

import math

import numpy as np

from pagedsim.metrics.arms import Run


def unused_slots(run: Run, block_size: int) -> float:
    """For each sequence, over the time in which all who hold memory decode; NaN for no such time.

    Only then is it recorded how many tokens are in memory. Where lengths are long beside a block,
    (block_size - 1) / 2 is to be expected.
    """
    table = run.steps("start", "end", "used_blocks", "decode_seqs", "decode_context", "running")
    start, end, used, decodes, context, running = (
        np.asarray(column.to_numpy(), dtype=np.float64) for column in table.columns
    )
    plain = (decodes > 0) & (decodes == running)
    if not plain.any():
        return math.nan
    unused = (used[plain] * block_size - context[plain]) / decodes[plain]
    return float(np.average(unused, weights=(end - start)[plain]))
