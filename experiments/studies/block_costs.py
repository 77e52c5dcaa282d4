"""Costs of block sizes: unused slots, and the time of the attention kernel.

The kernel is timed directly, not by the forward passes of recorded steps: on a GPU those are
launched asynchronously, and consist mostly of matrix products, which do not depend on blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.metrics.arms import Run

if TYPE_CHECKING:
    import torch

    from pagedsim.sim.model import ModelShape


def require_sizes(key: str, sizes: Sequence[int], least: int = 1) -> None:
    """Raise ConfigError unless these are at least `least` distinct positive integers."""
    if not isinstance(sizes, (list, tuple)):
        raise ConfigError(f"{key}={sizes}: must be a list such as [8, 16]")
    for size in sizes:
        require_whole(key, size, 1)
    if len(sizes) < least or len(set(sizes)) < len(sizes):
        raise ConfigError(f"{key}={list(sizes)}: must be {least} or more that differ")


def unused_slots(run: Run, block_size: int) -> float:
    """Unused slots per sequence, over the time in which all requests in memory decode; NaN if none.

    Only then the number of tokens in memory is recorded. For sequences much longer than a block,
    (block_size - 1) / 2 is expected.
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


ROUNDS = 5
"""Rounds, of which the minimum is taken; sizes alternate, so that disturbances affect all alike."""
CALLS = 10
"""Consecutive calls per round."""


@dataclass(frozen=True)
class Decodes:
    """One layer's attention in a step of decodes."""

    shape: ModelShape
    sequences: int
    context: int
    """Context tokens of each sequence."""
    dtype: str
    device: str
    cache: str = "auto"
    """The KV-cache format, as `kv_cache_dtype`."""


def attention_seconds(
    decodes: Decodes, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> Mapping[int, float]:
    """Seconds per call by block size."""
    calls = {size: _call(decodes, size) for size in sizes}
    best = dict.fromkeys(sizes, float("inf"))
    for _ in range(ROUNDS + 1):  # one extra for warm-up and compilation
        for size, call in calls.items():
            best[size] = min(best[size], _timed(call, clock, decodes.device))
    return best


def _call(decodes: Decodes, size: int) -> Callable[[], object]:
    """The kernel over randomly scattered blocks."""
    import torch

    from pagedsim.kernels.float8 import FORMATS, rounded
    from pagedsim.kernels.ops import paged_decode

    shape, sequences = decodes.shape, decodes.sequences
    each = -(-decodes.context // size)
    kind = {"dtype": getattr(torch, decodes.dtype), "device": decodes.device}
    random = torch.Generator().manual_seed(0)
    kv = torch.zeros(sequences * each, 1, 2, size, shape.kv_heads, shape.head_dim, **kind)
    kv = rounded(kv.normal_(), FORMATS.get(decodes.cache, kv.dtype))
    q = torch.zeros(sequences, shape.heads, shape.head_dim, **kind).normal_()
    tables = torch.randperm(sequences * each, generator=random).to(torch.int32)
    lengths = torch.full((sequences,), decodes.context, dtype=torch.int32)
    place: torch.device = q.device
    tables, lengths = tables.view(sequences, each).to(place), lengths.to(place)
    scale = shape.head_dim**-0.5
    return lambda: paged_decode(q, kv[:, 0, 0], kv[:, 0, 1], tables, lengths, scale=scale)


def _timed(call: Callable[[], object], clock: Callable[[], float], device: str) -> float:
    import torch

    start = clock()
    for _ in range(CALLS):
        call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (clock() - start) / CALLS
