"""Copies of KV blocks between GPU and host, as measured by others and as simulated.

    python -m tests.experiments.fidelity.kv_copies

vLLM's authors timed batches of pieces: on an A30 (PCIe 4) by DMA against a kernel (issue 57555),
and on an H100 both ways at once (blog, 2026-01-08). The rates of DMA by size of a piece are the
model itself (`pagedsim/sim/copies.py`); its launches were chosen with the first of these in sight.
"""

from __future__ import annotations

from pagedsim.experiments.benchmarks.harness import table
from pagedsim.fidelity.sheets import hardware_named
from pagedsim.report.numbers import signed
from pagedsim.sim.copies import KIB, By, CopyTimes, Lane
from pagedsim.sim.cost.base import BUS_EFFICIENCY

A30 = {
    8: {16: 0.68, 64: 1.48, 256: 3.09, 4096: 4.17},
    28: {16: 0.57, 64: 0.94, 256: 1.29},
}
"""The time by DMA over that by a kernel, by KiB of a piece and pieces."""
TOGETHER: dict[By, float] = {"dma": 83.4, "kernel": 68.5}
"""GB/s of both directions at once, in pieces of 2 MB, on an H100."""


def copies(hardware: str, piece: float) -> CopyTimes:
    """Copies of pieces of so many bytes, one a block."""
    return CopyTimes(piece, 1, hardware_named(hardware).pcie * BUS_EFFICIENCY)


def ratio(kib: int, pieces: int) -> float:
    """The simulated time by DMA over that by a kernel, on an A30."""
    times = copies("a30", kib * KIB)
    return times.seconds(pieces, "dma") / times.seconds(pieces, "kernel")


def together(by: By) -> float:
    """Simulated GB/s of both directions at once, on an H100."""
    times, blocks = copies("h100", 2e6), 1000
    out, back = Lane(), Lane()
    for _ in range(20):
        for lane, other in ((out, back), (back, out)):
            lane.submit(0.0, times.seconds(blocks, by), by, other)
    return 2 * 20 * blocks * times.piece_bytes / max(out.until, back.until) / 1e9


def rows() -> list[list[str]]:
    """Each published number beside ours."""
    compared = [
        (f"A30, {pieces:,} pieces of {kib} KiB: DMA / kernel", measured, ratio(kib, pieces))
        for kib, cells in A30.items()
        for pieces, measured in cells.items()
    ]
    compared += [
        (f"H100, both ways by {by}, GB/s", measured, together(by))
        for by, measured in TOGETHER.items()
    ]
    return [
        [what, f"{measured:g}", f"{ours:.3g}", signed(ours / measured - 1, 0)]
        for what, measured, ours in compared
    ]


if __name__ == "__main__":
    print(table(["copies", "published", "simulated", "off"], rows()))
