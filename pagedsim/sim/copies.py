"""How long copies of KV blocks between a GPU and its host take, by their pieces.

A copy of blocks moves pieces, each contiguous on both sides: the whole block where a cache keeps
all layers of a block together, or the keys or values of one layer. A copy engine (DMA) gets a
batch of pieces from the driver, and pieces below some 28 KiB cost it more than their bytes; a
kernel reads and writes over the bus at the same rate whatever their size, and costs a launch and a
few of the GPU's multiprocessors.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log
from typing import Final, Literal

from pagedsim.sim.replica import Replica

By = Literal["dma", "kernel"]
"""What carries a copy out."""

KIB = 1 << 10
PIECES: Final = (10_000, 50_000, 100_000)
GB_S: Final = {
    4 * KIB: (6.8, 4.0, 3.8),
    8 * KIB: (6.8, 5.2, 5.3),
    16 * KIB: (7.1, 6.3, 6.3),
    24 * KIB: (25.8, 6.7, 6.9),
    28 * KIB: (27.5, 39.9, 44.1),
    64 * KIB: (38.8, 51.4, 51.8),
}
"""GB/s from the host to an H100 (PCIe 5) of one batch of so many pieces of a size by DMA (vLLM's
pull request 42212)."""
WHOLE: Final = 2 << 20
"""Bytes of a piece from which on the bus alone counts: with 2 MB each, an H100's 64 GB/s give about
50 by DMA and by kernel alike (vLLM's blog, 2026-01-08)."""
BOTH_WAYS: Final[dict[By, float]] = {"dma": 83.4 / 100, "kernel": 68.5 / 100}
"""The share of its rate that each direction has while the other copies, too (the same)."""
LAUNCH: Final[dict[By, float]] = {"dma": 10e-6, "kernel": 40e-6}
"""Seconds before the first byte; chosen with vLLM's ratios of DMA to kernel on an A30 in sight
(issue 57555; `python -m tests.experiments.fidelity.kv_copies`)."""
KERNEL_BELOW: Final = 28 * KIB
KERNEL_FROM: Final = 16
"""vLLM 0.33 loads pieces below that size by a kernel, if there are so many."""


def dma_rate(piece: float, pieces: int, bus: float) -> float:
    """Bytes/s of a batch of pieces by DMA over a bus that has `bus` bytes/s at best.

    Between the measured sizes in logarithms. The driver's time for small pieces is taken to be the
    same on all machines, and pieces of `WHOLE` bytes to get all of the bus.
    """
    sizes = [*GB_S, WHOLE]
    if piece >= WHOLE:
        return bus
    measured = [1e9 * _of_batch(row, pieces) for row in GB_S.values()] + [bus]
    upper = min(max(bisect_right(sizes, piece), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    share = max(0.0, log(piece / low) / log(high / low))
    rate = exp((1 - share) * log(measured[upper - 1]) + share * log(measured[upper]))
    return min(rate, bus)


def _of_batch(row: tuple[float, ...], pieces: int) -> float:
    """A row's GB/s for a batch of so many pieces, between the measured numbers of them."""
    last = len(PIECES) - 1
    upper = min(max(bisect_right(PIECES, pieces), 1), last)
    low, high = PIECES[upper - 1], PIECES[upper]
    share = min(max((pieces - low) / (high - low), 0.0), 1.0)
    return (1 - share) * row[upper - 1] + share * row[upper]


@dataclass(frozen=True)
class CopyTimes:
    """Copies of a replica's blocks over the bus of each of its GPUs, all at once."""

    piece_bytes: float
    pieces_per_block: int
    bus: float
    """Bytes/s of one direction that large pieces get."""

    @classmethod
    def of(cls, replica: Replica, bus_efficiency: float) -> CopyTimes:
        pieces = replica.copies_per_block
        rate = replica.hardware.pcie * bus_efficiency
        return cls(replica.block_bytes / pieces, pieces, rate)

    @property
    def block_bytes(self) -> float:
        return self.piece_bytes * self.pieces_per_block

    def load_by(self, blocks: int) -> By:
        """What loads so many blocks to the GPU; stores to the host are by DMA (vLLM 0.33)."""
        small = self.piece_bytes < KERNEL_BELOW
        return "kernel" if small and blocks * self.pieces_per_block >= KERNEL_FROM else "dma"

    def seconds(self, blocks: int, by: By) -> float:
        """Seconds of one copy of so many blocks while the other direction is idle."""
        pieces = blocks * self.pieces_per_block
        rate = self.bus if by == "kernel" else dma_rate(self.piece_bytes, pieces, self.bus)
        return LAUNCH[by] + pieces * self.piece_bytes / rate


class Lane:
    """One direction of the bus: copies follow one another, each at the end of the one before.

    The end of a copy is known when it is submitted, so that no events are needed: while the other
    direction is busy by then, the copy has what both leave it, so that the two together move what
    they would at half speed each.
    """

    def __init__(self) -> None:
        self.until = 0.0
        """When the last copy ends."""

    def submit(self, now: float, seconds: float, by: By, other: Lane) -> float:
        """Submit a copy that takes `seconds` alone; returns when it ends."""
        begin = max(now, self.until)
        self.until = begin + _beside(begin, seconds, by, other)
        return self.until

    def overtake(self, now: float, seconds: float, by: By, other: Lane) -> float:
        """Let a copy begin now, before those that were submitted; returns how long it takes, by
        which they end later."""
        took = _beside(now, seconds, by, other)
        self.until = max(now, self.until) + took
        return took


def _beside(begin: float, seconds: float, by: By, other: Lane) -> float:
    """How long a copy takes that would take `seconds` alone."""
    slowed = 2 * BOTH_WAYS[by] - 1  # what is left of its rate beside a copy at full speed
    overlap = min(max(0.0, other.until - begin), seconds / slowed)
    return overlap + seconds - overlap * slowed
