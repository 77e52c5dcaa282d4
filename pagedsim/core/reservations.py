"""KV blocks reserved on this server for requests in migration.

A request may continue at another scheduler with its keys and values. Its blocks stay allocated at
the source until they are copied, and the target must have room before they arrive. So for a while
the request has memory in two places, of which one at most is in its own tables: at the other a
placeholder owns the blocks.
"""

from __future__ import annotations

from pagedsim.core.memory import Memory
from pagedsim.core.request import Request, RequestId


class Placeholder(Request):
    """Owns blocks for a request, and equals it for the memory. It is in no queue."""

    __slots__ = ("kept", "request")

    def __init__(self, request: Request, order: int, kept: bool = False) -> None:
        """`kept`: the blocks are those that the request had here."""
        super().__init__(
            request.id,
            request.prompt_len,
            request.params,
            priority=request.priority,
            session=request.session,
            turn=request.turn,
            extra=request.extra,
            answer=request._answer,
        )
        self.request = request
        self.kept = kept
        self._prompt = request.prompt
        self._order = order
        self._mark = request._mark = request._mark or object()
        self.follow()

    def follow(self) -> None:
        """Take over the request's current length."""
        self._generated = self.request.generated
        self._outputs = self.request._outputs


class MigrationReservations:
    """The placeholders of one scheduler."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.placeholders: dict[RequestId, Placeholder] = {}
        self.awaiting_memory: dict[RequestId, Placeholder] = {}
        self.awaiting_seat: dict[RequestId, Placeholder] = {}  # with all of their memory

    def keep(self, request: Request) -> Placeholder:
        """Keep the blocks of a request that is detached."""
        placeholder = Placeholder(request, request._order, kept=True)
        placeholder._prefilled = request.computed
        pass_blocks(request, placeholder)
        self.placeholders[request.id] = placeholder
        return placeholder

    def expect(self, request: Request, order: int) -> Placeholder:
        """A placeholder without blocks for a request that is to be attached."""
        placeholder = self.placeholders[request.id] = Placeholder(request, order)
        return placeholder

    def covers(self, placeholder: Placeholder, tokens: int) -> bool:
        """Whether it has blocks for so many tokens."""
        return sum(map(len, placeholder._tables)) >= self.memory.blocks_for(tokens)

    def fill(self, placeholder: Placeholder, tokens: int, margin: int) -> bool:
        """Allocate blocks for `tokens` tokens if that leaves `margin` blocks free."""
        memory = self.memory
        hit = () if placeholder._tables else memory.lookup(placeholder)[: memory.blocks_for(tokens)]
        if not memory.holds(placeholder, tokens, margin, hit):
            return False
        if not placeholder._tables:
            placeholder._prefilled = len(hit) * memory.block_size
        memory.hold(placeholder, tokens, hit)
        self.awaiting_memory.pop(placeholder.id, None)
        return True

    def hand_over(self, placeholder: Placeholder) -> None:
        """Pass the blocks to the request, which is attached."""
        self._forget(placeholder)
        pass_blocks(placeholder, placeholder.request)

    def drop(self, placeholder: Placeholder) -> None:
        """Free the blocks held for a request."""
        self._forget(placeholder)
        self.memory.release(placeholder)

    def _forget(self, placeholder: Placeholder) -> None:
        del self.placeholders[placeholder.id]
        self.awaiting_memory.pop(placeholder.id, None)
        self.awaiting_seat.pop(placeholder.id, None)


def pass_blocks(giver: Request, taker: Request) -> None:
    """Move all state that a memory keeps in a request to another."""
    taker._tables, giver._tables = giver._tables, ()
    taker._hashes, giver._hashes = giver._hashes, []
    taker._hashed_by = giver._hashed_by
    taker._registered, giver._registered = giver._registered, 0
    taker._order = giver._order
