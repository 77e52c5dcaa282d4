"""What one request has to do with the host tier."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedsim.core.errors import RequestError, is_whole
from pagedsim.core.request import Request

LOAD_LIMIT = "max_load_tokens"
STORE_LIMIT = "max_offload_tokens"


class Account:
    """The chunks of one request: how far they are offered, and which it has used."""

    __slots__ = (
        "accessed",
        "ended",
        "final",
        "hit",
        "inserted",
        "jobs",
        "lower",
        "mark",
        "most_loaded",
        "most_stored",
        "names",
        "number",
        "offered_before",
        "request",
        "reused",
        "table",
        "told",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.most_loaded = _limit(request, LOAD_LIMIT)
        self.most_stored = _limit(request, STORE_LIMIT)
        self.mark = 0  # chunks before it have been offered, or loaded
        self.hit = 0  # tokens found on the GPU when it was last looked up
        self.jobs: dict[int, None] = {}  # its transfers in flight
        # How it has used the tier, for the order of eviction.
        self.number = 0  # the time of its first access; 0: none yet
        self.accessed: dict[int, Hashable] = {}  # by their numbers
        self.inserted: set[Hashable] = set()  # this and the next two are ARC's
        self.reused: set[Hashable] = set()  # they were ready when it met them, and not its own
        self.offered_before: set[Hashable] = set()  # when they were not in the tier
        self.lower: dict[Hashable, int] = {}  # the number of the tier below that each came from
        # Once it has ended:
        self.ended = False
        self.told = False
        self.final = 0  # chunks to offer in all
        self.names: Sequence[Hashable] = ()  # of those from `mark` on
        self.table: Sequence[int] = ()


def _limit(request: Request, name: str) -> int | None:
    """A bound in tokens that the client has set in `Request.extra`."""
    value = request._extra.get(name)
    if value is None:
        return None
    if not is_whole(value) or value < 0:
        raise RequestError(f"request {request._id!r}: {name}={value!r}: must be a whole number")
    return int(value)
