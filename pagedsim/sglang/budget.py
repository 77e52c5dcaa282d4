"""What a prefill batch of SGLang may still take: tokens of memory, of a step, and of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from pagedsim.core.memory import Memory
from pagedsim.core.request import Request

CLIP = 4096
"""Tokens of an answer that are reserved at most; it may be longer."""


class Verdict(Enum):
    """Whether a prefill batch takes another request."""

    OPEN = "open"
    NO_MEMORY = "no memory"
    FULL = "full"


class Budget:
    """The budgets of one prefill batch, all in tokens.

    Memory: what is free or can be evicted, less a reservation for what the batch and the admitted
    requests may still generate. Reserved is the new-token ratio of it, or all where requests ignore
    the end of sequence.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        tokens: int,
        chunk: int | None,
        beside: int,
        reserved: Sequence[float],
    ) -> None:
        """`tokens` and `chunk` bound what the step computes, `beside` decodes included; `reserved`
        is of the requests in the batch."""
        self._memory = memory
        self.page = memory.block_size
        self.tokens = tokens - beside
        self.chunk = None if chunk is None else chunk - beside
        kept = 0.0
        for one in reserved:  # as sum() does before Python 3.12, which rounds otherwise
            kept += one
        self.reserved: float = beside + kept
        self._taken = beside  # of it, what this step allocates

    @property
    def memory(self) -> float:
        """Tokens of memory that are neither in use nor reserved."""
        return self._memory.free * self.page - self.reserved

    @property
    def memory_now(self) -> int:
        """Tokens of memory that this step does not take."""
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

    def verdict(self) -> Verdict:
        """Whether there is room for another request."""
        if self.memory <= 0 or self.memory_now <= 0:
            return Verdict.NO_MEMORY
        if self.tokens <= 0 or (self.chunk is not None and self.chunk <= 0):
            return Verdict.FULL
        return Verdict.OPEN


class FixedLengths:
    """Whether the answers of all requests fit, where no cache is shared and answers do not end
    before their limit: memory is followed to the ends of all requests, the shortest first."""

    def __init__(
        self, answer_of: Callable[[Request], float], known: Callable[[Request], int]
    ) -> None:
        """`answer_of` gives the tokens of an answer that are expected, all of it, `known` those
        that are there."""
        self._answer_of, self._known = answer_of, known
        self._ends: list[tuple[float, int]] | None = None

    def fits(self, request: Request, others: Iterable[Request], budget: Budget) -> bool:
        """Whether it still does with `request`; `others` run or were admitted before."""
        if self._ends is None:
            ends = [self._end_of(one) for one in (request, *others)]
            self._ends = sorted([end for end in ends if end], key=lambda end: end[0])
        elif end := self._end_of(request):
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
