"""Moves whole blocks: out to the host, in again, and from one place to another on the GPU.

On a GPU both directions of the bus share one stream beside the computation's. Events order them,
on the device and never through the host:

    computation  ── step n ──●(a)              wait(b) ── copies ──●(c)      wait(d) ── step n+1
    bus                       └ wait(a) ─ out ──●(b)                └ wait(c) ─ in ──●(d)

Nothing is read before the step that wrote it has ended (a), nothing is overwritten before it has
been read (b, c), and nothing is attended to before it has come (d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Protocol

import torch

from kernels import copy_blocks
from pagedsim.core.memory import Copies, Pairs
from pagedsim.engine.cache import Cache


class Moves(Protocol):
    """What moves in a step, as in `StepPlan`."""

    @property
    def swap_out(self) -> Pairs:
        """(GPU block, CPU block)."""

    @property
    def copies(self) -> Copies:
        """{target: source} on the GPU."""

    @property
    def swap_in(self) -> Pairs:
        """(CPU block, GPU block)."""


class Mover:
    """Carries out the moves of a step, in this order."""

    def __init__(self, cache: Cache, layout: str = "block") -> None:
        """`layout`: what one copy over the bus moves, as `LAYOUTS` has it."""
        self.cache = cache
        self.copy = LAYOUTS[layout]
        device = cache.gpu.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, moves: Moves) -> None:
        """All of them; what is queued on the computation's stream next sees them done."""
        if moves.swap_out:
            self._over_the_bus(self.cache.gpu, self.cache.cpu, moves.swap_out)
        if moves.copies:
            device = self.cache.gpu.device
            sources, targets = list(moves.copies.values()), list(moves.copies)
            copy_blocks(
                self.cache.gpu,
                torch.tensor(sources, device=device),
                torch.tensor(targets, device=device),
            )
        if moves.swap_in:
            self._over_the_bus(self.cache.cpu, self.cache.gpu, moves.swap_in)

    def _over_the_bus(self, source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
        if self.stream is None:
            self.copy(source, target, pairs)
            return
        here = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self.copy(source, target, pairs)
        here.wait_stream(self.stream)


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks, those that follow one another on both sides in one go."""
    for begin, end in runs(pairs):
        (origin, place), count = pairs[begin], end - begin
        target[place : place + count].copy_(source[origin : origin + count], non_blocking=True)


def copy_pieces(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks, the keys and the values of each layer by themselves.

    So many copies does it take where every layer has pools of its own, as in vLLM.
    """
    for origin, place in pairs:
        for piece, room in zip(
            source[origin].flatten(0, 1), target[place].flatten(0, 1), strict=True
        ):
            room.copy_(piece, non_blocking=True)


LAYOUTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, Pairs], None]] = {
    "block": copy_runs,
    "layer": copy_pieces,
}


def runs(pairs: Pairs) -> list[tuple[int, int]]:
    """Where pairs follow one another on both sides, as [begin, end).

    >>> runs([(4, 0), (5, 1), (9, 2), (3, 7)])
    [(0, 2), (2, 3), (3, 4)]
    """
    cuts = [
        i + 1
        for i, (one, other) in enumerate(pairwise(pairs))
        if (other[0] - one[0], other[1] - one[1]) != (1, 1)
    ]
    bounds = [0, *cuts, len(pairs)]
    return list(pairwise(bounds))
