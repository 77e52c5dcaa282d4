"""What a policy may know of the server when it decides."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

from pagedsim.core.places import BatchState
from pagedsim.core.prefill import stored
from pagedsim.core.request import Request


class ServerState:
    """A live, read-only view of the queues and the memory: one object in a server's life."""

    __slots__ = ("_places",)

    def __init__(self, places: BatchState) -> None:
        self._places = places

    @property
    def now(self) -> float:
        """The time: of the step that is being planned, or of the request that arrives."""
        return self._places.now

    @property
    def step(self) -> int:
        """The number of the step that is being planned, or of the next one; the first is 0."""
        return self._places.step

    @property
    def waiting(self) -> int:
        """How many wait for their first, or for a new, admission."""
        return len(self._places.waiting)

    @property
    def running(self) -> Collection[Request]:
        """The batch, in its order."""
        return self._places.running.keys()

    @property
    def batch_size(self) -> int:
        """How many requests run."""
        return len(self._places.running)

    @property
    def sequences(self) -> int:
        """How many sequences these have; each takes a seat."""
        return self._places.seats

    def generated_by(self, client: str) -> int:
        """Tokens that those of a client who run have generated, all together."""
        return self._places.generated_by(client)

    @property
    def swapped(self) -> Collection[Request]:
        """Those whose memory is on the CPU."""
        return tuple(self._places.swapped)

    @property
    def max_seqs(self) -> int:
        """Sequences that may run at once."""
        return self._places.max_seqs

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        return self._places.max_model_len

    @property
    def block_size(self) -> int:
        """Token slots a block."""
        return self._places.memory.block_size

    @property
    def total_blocks(self) -> int:
        """GPU blocks, free and used."""
        return self._places.memory.total

    @property
    def free_blocks(self) -> int:
        """GPU blocks that can be handed out."""
        return self._places.memory.free

    @property
    def free_cpu_blocks(self) -> int:
        """CPU blocks that can be handed out."""
        return self._places.memory.cpu_free

    def longest_output(self, request: Request) -> int:
        """Tokens after which the output of `request` ends at the latest."""
        return self._places.limit_of(request) - request.prompt_len

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting `request` that the prefix cache has; 0 without one."""
        return len(self._places.memory.lookup(request)) * self.block_size

    @property
    def cache_changes(self) -> int:
        """How often the prefix cache has learned or forgotten a block; 0 without one."""
        return self._places.memory.cache_changes

    def stored_tokens(self, request: Request) -> int:
        """Tokens of `request` in memory: what it would have to compute again, were they lost.

        A prefix cache may still know some of them then.
        """
        return stored(request, self._places.memory)

    def stored_blocks(self, request: Request) -> int:
        """Different blocks that hold them: what a swap would move."""
        return self._places.memory.filled_blocks(request)

    def draw(self, request: Request, seed: int = 0) -> float:
        """A random number in [0, 1) that is fixed by the seed, the request and the step.

        A question that is asked again in a step gets the same answer with it, which it would not
        with a generator of random numbers.
        """
        key = repr((seed, request.id, self._places.step)).encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest()) >> 11) * 2.0**-53

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return self._places.memory.blocks_for(tokens)
