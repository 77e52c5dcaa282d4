"""What a connector decided with one step, for whoever wants to look at it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pagedsim.core.request import RequestId


class Lookup(NamedTuple):
    """A question for a waiting request, and the answer."""

    request: RequestId
    hit: int
    """Tokens that the GPU has."""
    tokens: int
    """Tokens beyond these that can be loaded; -1: deferred."""
    why: str
    """Why it was deferred: `own` transfers are in flight; `pending`: a chunk is still written, or a
    tier does not know yet; `loading`: another request loads a chunk now."""


class Found(NamedTuple):
    """Tokens by where they come from, at an admission or when a load begins."""

    request: RequestId
    gpu: int
    host: int
    lower: Sequence[int]
    """By tier below the host tier."""


class Moved(NamedTuple):
    """A job of a tier below the host tier."""

    request: RequestId
    keys: Sequence[Hashable]
    tier: int
    job: int
    """Of a counter of its own."""


class OffloadStep:
    """What was decided with one step; cascades come when it ends."""

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self.found: list[Found] = []
        self.refused: list[RequestId] = []
        """Requests whose offer found no room."""
        self.inserted: list[Hashable] = []
        """Keys of chunks that the host tier got a place for, in order."""
        self.evicted: list[Hashable] = []
        self.held_back = 0
        """Chunks that were not offered often enough."""
        self.promotions: list[Moved] = []
        self.cascades: list[Moved] = []
        self.collected: list[int] = []
        """Jobs of lower tiers that have ended."""
