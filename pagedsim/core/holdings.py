"""Blocks that are held here for requests that are elsewhere.

A request may go on at another scheduler with its keys and values. Its blocks stay where they were
until they have been read, and there must be room where it goes before they come. So for a while
it has memory in two places, of which one at most is in its own tables: elsewhere a stand-in owns
what is held for it.
"""

from __future__ import annotations

from typing import NamedTuple

from pagedsim.core.memory import Memory
from pagedsim.core.request import Request, RequestId


class Parcel(NamedTuple):
    """Keys and values that are to be brought to a scheduler."""

    tokens: int
    blocks: int
    """Of the scheduler to which they come, the last one perhaps filled in part."""


class StandIn(Request):
    """Owns blocks for a request, and looks like it to the memory. It is in no queue."""

    __slots__ = ("kept", "of")

    def __init__(self, of: Request, order: int, kept: bool = False) -> None:
        """`kept`: the blocks are those that the request had here."""
        super().__init__(of.id, of.prompt_len, of.params, answer=of._answer)
        self.of = of
        self.kept = kept
        self.prompt = of.prompt
        self._order = order
        self._mark = of._mark = of._mark or object()  # its own blocks are the same everywhere
        self.follow()

    def follow(self) -> None:
        """Be as long as the request is by now."""
        self._generated = self.of.generated
        self.outputs = self.of.outputs


class Holdings:
    """The stand-ins of one scheduler."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.stand_ins: dict[RequestId, StandIn] = {}
        self.asking: dict[RequestId, StandIn] = {}  # of these, who lacks memory
        self.standing: dict[RequestId, StandIn] = {}  # who has all of it, and lacks a seat

    def keep(self, request: Request) -> StandIn:
        """A request goes, and its blocks stay."""
        stand_in = StandIn(request, request._order, kept=True)
        stand_in._prefilled = request.computed
        _pass_blocks(request, stand_in)
        self.stand_ins[request.id] = stand_in
        return stand_in

    def expect(self, request: Request, order: int) -> StandIn:
        """A request is to come; whoever stands in for it has no blocks yet."""
        stand_in = self.stand_ins[request.id] = StandIn(request, order)
        return stand_in

    def covers(self, stand_in: StandIn, tokens: int) -> bool:
        """Whether it has blocks for so many tokens."""
        return sum(map(len, stand_in.tables)) >= self.memory.blocks_for(tokens)

    def fill(self, stand_in: StandIn, tokens: int, margin: int) -> bool:
        """Give it blocks for `tokens` tokens if that leaves `margin` of them free."""
        memory = self.memory
        hit = () if stand_in.tables else memory.lookup(stand_in)[: memory.blocks_for(tokens)]
        if not memory.holds(stand_in, tokens, margin, hit):
            return False
        if not stand_in.tables:
            stand_in._prefilled = len(hit) * memory.block_size
        memory.hold(stand_in, tokens, hit)
        self.asking.pop(stand_in.id, None)
        return True

    def hand_out(self, stand_in: StandIn) -> None:
        """The request has come, or is back: the blocks are its own."""
        self._forget(stand_in)
        _pass_blocks(stand_in, stand_in.of)

    def drop(self, stand_in: StandIn) -> None:
        """Nothing is held for the request any more."""
        self._forget(stand_in)
        self.memory.release(stand_in)

    def _forget(self, stand_in: StandIn) -> None:
        del self.stand_ins[stand_in.id]
        self.asking.pop(stand_in.id, None)
        self.standing.pop(stand_in.id, None)


def _pass_blocks(giver: Request, taker: Request) -> None:
    """All that a memory knows of a request goes over to another."""
    taker.tables, giver.tables = giver.tables, ()
    taker._hashes, giver._hashes = giver._hashes, []
    taker._hashed_by = giver._hashed_by
    taker._registered, giver._registered = giver._registered, 0
    taker._order = giver._order
