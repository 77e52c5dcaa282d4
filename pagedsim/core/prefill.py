"""What a request that does not decode has still to compute before it can.

A new request computes its prompt and samples at its end. So does one that lost its memory, with
what it had generated as part of its prompt. Only a *group* of several sequences differs: it is
rebuilt without sampling, sequence after sequence, all but the last token of each (what they share
once), and then goes on with an ordinary decode.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagedsim.core.memory import Memory
from pagedsim.core.plan import Chunk
from pagedsim.core.request import Request


def rebuilds(request: Request) -> bool:
    """Whether it is a group that computes again what its sequences had generated."""
    return request.width > 1 and request.generated > 0


def prefill_tokens(request: Request, memory: Memory) -> int:
    """Tokens to compute in all, if nothing is cached."""
    if request.width == 1 or not rebuilds(request):
        return request.num_tokens
    alone = request.num_tokens - 1
    return alone + (request.width - 1) * (alone - memory.common(request))


def prefill_left(request: Request, memory: Memory) -> int:
    """Of these, the tokens still to be computed."""
    done = request._rebuilt if rebuilds(request) else request._prefilled
    return prefill_tokens(request, memory) - done


def stored(request: Request, memory: Memory) -> int:
    """Tokens in memory that it would have to compute again, were they lost."""
    if not rebuilds(request):
        return request.computed
    alone = request.computed
    return alone + (request.width - 1) * max(alone - memory.common(request), 0)


def span(request: Request) -> int:
    """Tokens that each of its sequences has in memory when the work is done."""
    if request.width == 1 or not rebuilds(request):
        return request.num_tokens
    return request.num_tokens - 1


def next_chunk(request: Request, count: int) -> Chunk:
    """The next `count` tokens of the work of one sequence."""
    start = request._prefilled
    return Chunk(request, start, count, start + count == request.num_tokens)


def rebuilding(request: Request, count: int, memory: Memory) -> Iterator[Chunk]:
    """The next `count` tokens of the work of a group that is rebuilt."""
    last, common = request.num_tokens - 1, memory.common(request)
    begin = 0  # of this sequence's share in the work
    for sequence in range(request.width):
        first = common if sequence else 0
        low = max(request._rebuilt - begin, 0)
        high = min(request._rebuilt + count - begin, last - first)
        if low < high:
            yield Chunk(request, first + low, high - low, samples=False, sequence=sequence)
        begin += last - first
