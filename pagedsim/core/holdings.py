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


class KVTransfer(NamedTuple):
    """Keys and values that are to be brought to a scheduler."""

    tokens: int
    blocks: int
    """Of the scheduler to which they come, the last one perhaps filled in part."""


class Placeholder(Request):
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


class MigrationReservations:
    """The stand-ins of one scheduler."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.placeholders: dict[RequestId, Placeholder] = {}
        self.asking: dict[RequestId, Placeholder] = {}  # of these, who lacks memory
        self.standing: dict[RequestId, Placeholder] = {}  # who has all of it, and lacks a seat

    def keep(self, request: Request) -> Placeholder:
        """A request goes, and its blocks stay."""
        placeholder = Placeholder(request, request._order, kept=True)
        placeholder._prefilled = request.computed
        _pass_blocks(request, placeholder)
        self.placeholders[request.id] = placeholder
        return placeholder

    def expect(self, request: Request, order: int) -> Placeholder:
        """A request is to come; whoever stands in for it has no blocks yet."""
        placeholder = self.placeholders[request.id] = Placeholder(request, order)
        return placeholder

    def covers(self, placeholder: Placeholder, tokens: int) -> bool:
        """Whether it has blocks for so many tokens."""
        return sum(map(len, placeholder.tables)) >= self.memory.blocks_for(tokens)

    def fill(self, placeholder: Placeholder, tokens: int, margin: int) -> bool:
        """Give it blocks for `tokens` tokens if that leaves `margin` of them free."""
        memory = self.memory
        hit = () if placeholder.tables else memory.lookup(placeholder)[: memory.blocks_for(tokens)]
        if not memory.holds(placeholder, tokens, margin, hit):
            return False
        if not placeholder.tables:
            placeholder._prefilled = len(hit) * memory.block_size
        memory.hold(placeholder, tokens, hit)
        self.asking.pop(placeholder.id, None)
        return True

    def hand_out(self, placeholder: Placeholder) -> None:
        """The request has come, or is back: the blocks are its own."""
        self._forget(placeholder)
        _pass_blocks(placeholder, placeholder.of)

    def drop(self, placeholder: Placeholder) -> None:
        """Nothing is held for the request any more."""
        self._forget(placeholder)
        self.memory.release(placeholder)

    def _forget(self, placeholder: Placeholder) -> None:
        del self.placeholders[placeholder.id]
        self.asking.pop(placeholder.id, None)
        self.standing.pop(placeholder.id, None)


def _pass_blocks(giver: Request, taker: Request) -> None:
    """All that a memory knows of a request goes over to another."""
    taker.tables, giver.tables = giver.tables, ()
    taker._hashes, giver._hashes = giver._hashes, []
    taker._hashed_by = giver._hashed_by
    taker._registered, giver._registered = giver._registered, 0
    taker._order = giver._order
