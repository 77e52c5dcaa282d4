"""Llumnix: requests go to the freest replica, and migrate away from crowded ones."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from pagedsim.core import Request
from pagedsim.core.errors import require_flag, require_number
from pagedsim.policies.routing.router import Move, Replica, Replicas, Router


class Llumnix(Router):
    """The freest replica: the most free blocks, less those that the queue wants, a request.

    Every `every` seconds those with less than `crowded` blocks a request are paired with those
    that have more, the most crowded with the freest, and each gives its shortest running request
    away, unless the other has no room for it or would be the more crowded then. The authors'
    paper speaks of virtual usage; this is their load metric remaining_steps and their pairing
    defrag, with their defaults.
    """

    paper = "Sun et al., Llumnix, OSDI 2024 (2406.03243)"

    def __init__(self, crowded: float = 3.0, every: float = 0.05, migration: bool = True) -> None:
        self.crowded = require_number("crowded", crowded)
        every = require_number("every", every, above=0)
        self.migrates_every = every if require_flag("migration", migration) else None

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return max(replicas, key=freeness)

    def migrate(self, replicas: Replicas, now: float) -> Sequence[Move]:
        known = [
            (freeness(replica), replica.index, replica)
            for replica in replicas
            if replica.role != "prefill"
        ]
        known.sort(key=itemgetter(0, 1))
        sources = [(free, replica) for free, _, replica in known if free < self.crowded]
        targets = [replica for free, _, replica in reversed(known) if free > self.crowded]
        return [
            Move(request, source, target)
            for (free, source), target in zip(sources, targets, strict=False)
            if (request := _shortest(source)) is not None and _takes(target, request, free)
        ]


def freeness(replica: Replica) -> float:
    """Blocks that are left for each request, and for one more."""
    return (replica.free_blocks - replica.wanted_blocks) / (replica.running + 1)


def _shortest(replica: Replica) -> Request | None:
    """The request with the fewest tokens of those that decode."""
    decoding = (request for request in replica.batch if request.decoding)
    return min(decoding, key=lambda request: request.num_tokens, default=None)


def _takes(target: Replica, request: Request, source: float) -> bool:
    """Whether it has room for a request, and is freer with it than the source is now."""
    need = -(-request.num_tokens // target.block_size)
    left = target.free_blocks - target.wanted_blocks - need
    return left >= 0 and left / (target.running + 2) > source
