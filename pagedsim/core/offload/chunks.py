"""The chunks of requests: their names and their blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedsim.core.memory import Memory, PrefixMemory
from pagedsim.core.memory.prefix import page_keys
from pagedsim.core.request import Request


class Chunking:
    """How the tokens of one server's requests are divided into chunks."""

    def __init__(self, memory: Memory, blocks_per_chunk: int) -> None:
        self._memory = memory
        self.per = blocks_per_chunk
        self.block_size = memory.block_size
        self.size = memory.block_size * blocks_per_chunk
        """Tokens of a chunk."""
        self.caching = isinstance(memory, PrefixMemory)
        """Whether requests find chunks on the GPU that others have computed."""
        self.sampling: set[Request] = set()
        """Requests that have a token in flight."""

    def known(self, request: Request) -> int:
        """Its tokens whose ids are known when the step is planned."""
        if self._memory.with_tokens:
            return request._prompt_len + request.sampled_count
        return request.num_tokens - (request in self.sampling)

    def names(self, request: Request, first: int, end: int) -> Sequence[Hashable]:
        """The keys of chunks `first` to `end` of a request: those of the last block of each."""
        per = self.per
        keys = page_keys(request, end * per, self.block_size, self._memory.with_tokens)
        return keys[(first + 1) * per - 1 : end * per : per]

    def blocks(self, numbers: list[int]) -> list[int]:
        """The blocks of chunks by their numbers, in host memory or in a request."""
        per = self.per
        if per == 1:
            return numbers
        return [number * per + block for number in numbers for block in range(per)]
