"""The budgets of one prefill batch of SGLang, which has them in its `PrefillAdder`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from pagedsim.core.memory import Memory
from pagedsim.core.request import Request

CLIP = 4096
"""Cap on the output tokens that are reserved for a request, whose answer may be longer."""


class AddResult(Enum):
    """Whether a prefill batch takes another request."""

    OPEN = "open"
    NO_MEMORY = "no memory"
    FULL = "full"


class PrefillBudget:
    """Tokens that a prefill batch may still take: of memory, of the step, and of a chunk.

    Memory is what is free or can be evicted, less reservations: for each running request a share of
    its remaining output, which the caller computes (the new-token ratio, or all where requests
    ignore the end of sequence); for each one admitted here its full output, up to `CLIP`.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        tokens: int,
        chunk: int | None,
        mixed_decodes: int,
        reserved: Sequence[float],
    ) -> None:
        """`tokens` and `chunk` bound what the step computes, with the decode tokens that are mixed
        into it; `reserved` has the reservation of each running request."""
        self._memory = memory
        self.page = memory.block_size
        self.tokens = tokens - mixed_decodes
        self.chunk = None if chunk is None else chunk - mixed_decodes
        total = 0.0
        for reservation in reserved:  # sum() rounds otherwise from Python 3.12 on
            total += reservation
        self.reserved: float = mixed_decodes + total
        self._taken = mixed_decodes  # the part of `reserved` that this step allocates

    @property
    def memory(self) -> float:
        """Tokens of memory that are neither in use nor reserved."""
        return self._memory.free * self.page - self.reserved

    @property
    def memory_now(self) -> int:
        """Tokens of memory that are still free after this step's allocations."""
        return self._memory.free * self.page - self._taken

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self.page) * self.page

    def take(self, count: int, answer: int) -> None:
        """Charge a request that computes `count` tokens and then generates up to `answer`."""
        paged = self.paged(count)
        self.reserved += paged + self.page + answer
        self._taken += paged + self.page
        self.tokens -= paged
        if self.chunk is not None:
            self.chunk -= paged

    def result(self) -> AddResult:
        """Whether there is room for another request."""
        if self.memory <= 0 or self.memory_now <= 0:
            return AddResult.NO_MEMORY
        if self.tokens <= 0 or (self.chunk is not None and self.chunk <= 0):
            return AddResult.FULL
        return AddResult.OPEN


class IgnoreEosCheck:
    """Whether the answers of all requests fit, where there is no prefix cache and answers do not
    end before their limit: memory is followed to the ends of all requests, the shortest first.
    An object serves one prefill batch."""

    def __init__(
        self, answer_of: Callable[[Request], float], known: Callable[[Request], int]
    ) -> None:
        """`answer_of` gives the expected output length of a request, `known` the number of output
        tokens that it has."""
        self._answer_of, self._known = answer_of, known
        self._ends: list[tuple[float, int]] | None = None

    def fits(self, request: Request, others: Iterable[Request], budget: PrefillBudget) -> bool:
        """Whether they still fit with `request`; `others`, which run or were admitted before, are
        read by the first call alone."""
        if self._ends is None:
            ends = [self._end_of(member) for member in (request, *others)]
            self._ends = sorted([end for end in ends if end], key=lambda end: end[0])
        elif end := self._end_of(request):
            # As in SGLang: the longest goes before the last.
            places = [place for place, other in enumerate(self._ends) if end[0] <= other[0]]
            self._ends.insert(places[0] if places else max(len(self._ends) - 1, 0), end)
        left = budget.memory_now - budget.paged(request.num_tokens) - budget.page
        freed = 0
        for place, (tokens, occupied) in enumerate(self._ends):
            alive = len(self._ends) - place
            if left + freed - tokens * alive <= alive:
                return False
            freed += occupied
        return True

    def _end_of(self, request: Request) -> tuple[float, int] | None:
        known = self._known(request)
        left = self._answer_of(request) - known
        return (left, request.prompt_len + known) if left > 0 else None
