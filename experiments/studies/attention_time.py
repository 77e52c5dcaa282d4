"""How long the engine's attention takes by block size: the kernel itself, timed here.

Not the forward pass of recorded steps: on a GPU that is launched long before it runs, and most of
it are matrix products, which know nothing of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pagedsim.sim.model import ModelShape

ROUNDS = 5
"""The least of so many is taken; all sizes take turns, so that a slow moment befalls all alike."""
CALLS = 10
"""In a row each time."""


@dataclass(frozen=True)
class Decodes:
    """One layer's attention in a step of decodes."""

    shape: ModelShape
    sequences: int
    context: int
    """Tokens of each sequence."""
    dtype: str
    device: str
    cache: str = "auto"
    """What the cache holds, as `kv_cache_dtype` names it."""


def attention_seconds(
    decodes: Decodes, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> Mapping[int, float]:
    """Seconds of one call by block size."""
    calls = {size: _call(decodes, size) for size in sizes}
    best = dict.fromkeys(sizes, float("inf"))
    for _ in range(ROUNDS + 1):  # one to warm up, and to compile
        for size, call in calls.items():
            best[size] = min(best[size], _timed(call, clock, decodes.device))
    return best


def _call(decodes: Decodes, size: int) -> Callable[[], object]:
    """The kernel over blocks that lie anywhere in the cache."""
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
