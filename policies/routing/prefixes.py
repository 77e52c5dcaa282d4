"""Prefixes at the replicas of a router: read from their caches, or tracked from sent requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from pagedsim.core import Request
from pagedsim.core.errors import unknown
from pagedsim.core.memory.prefix import depths
from pagedsim.policies.routing.router import Replica, Replicas

BLOCK = 64
"""Tokens that are compared at once where the router remembers what it sent."""


class Prefixes(ABC):
    """The cached prefix of a prompt by replica."""

    @abstractmethod
    def tokens(self, request: Request, replicas: Replicas) -> Sequence[int]:
        """Leading tokens of a request that each is taken to have."""

    def sent(self, request: Request, replica: Replica) -> None:
        """It was sent there."""


class Cached(Prefixes):
    """Exactly what prefix caches hold."""

    def tokens(self, request: Request, replicas: Replicas) -> Sequence[int]:
        return replicas.cached_tokens(request)


class Sent(Prefixes):
    """What the router remembers of prompts that it sent; as many tokens as a replica's memory has.

    It does not hear of what caches forget, nor of answers. A prompt is looked up at all replicas
    at once: by block, a number whose bits are the replicas that got it.
    """

    def __init__(self) -> None:
        self._where: dict[int, int] = {}
        self._blocks: dict[int, OrderedDict[int, None]] = {}  # by replica, the stalest first
        self._present = 0
        self._keys: tuple[Request | None, list[int]] = (None, [])  # of the last request

    def size(self, replica: Replica) -> int:
        """Blocks that are taken to be at a replica."""
        return len(self._blocks.get(replica.index, ()))

    def overflow(self, replica: Replica, more: int) -> int:
        """Blocks that would be forgotten there for `more` new ones."""
        return max(self.size(replica) + more - _room(replica), 0)

    def tokens(self, request: Request, replicas: Replicas) -> Sequence[int]:
        self._forget_the_absent(replicas)
        cached = dict(depths(self.keys(request), self._where, self._present))
        return [BLOCK * cached.get(replica.index, 0) for replica in replicas]

    def sent(self, request: Request, replica: Replica) -> None:
        blocks = self._blocks.setdefault(replica.index, OrderedDict())
        bit, where = 1 << replica.index, self._where
        # The beginning last: it is what others share, and is to be forgotten last.
        for key in reversed(self.keys(request)):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                where[key] = where.get(key, 0) | bit
        for _ in range(len(blocks) - _room(replica)):
            self._drop(blocks.popitem(last=False)[0], bit)

    def keys(self, request: Request) -> list[int]:
        """The keys of a prompt's full blocks, each chained to the one before."""
        if self._keys[0] is not request:
            self._keys = (request, list(_chain(request.prompt or ())))
        return self._keys[1]

    def _forget_the_absent(self, replicas: Replicas) -> None:
        """A replica that was gone comes back with an empty memory; one of another role is not
        gone."""
        present = 0
        for replica in replicas.all_replicas:
            present |= 1 << replica.index
        for index in [index for index in self._blocks if not present >> index & 1]:
            for key in self._blocks.pop(index):
                self._drop(key, 1 << index)
        self._present = present

    def _drop(self, key: int, bit: int) -> None:
        left = self._where[key] & ~bit
        if left:
            self._where[key] = left
        else:
            del self._where[key]


KNOWN = {"cached": Cached, "sent": Sent}
"""The sources of a router's prefixes."""


def prefixes(known: object) -> Prefixes:
    """By name; ConfigError where there is none such."""
    if not isinstance(known, str) or known not in KNOWN:
        raise unknown("known", str(known), KNOWN)
    return KNOWN[known]()


def _chain(prompt: Sequence[Hashable]) -> Sequence[int]:
    keys, key = [], 0
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        key = hash((key, *prompt[end - BLOCK : end]))
        keys.append(key)
    return keys


def _room(replica: Replica) -> int:
    return max(replica.total_blocks * replica.block_size // BLOCK, 1)
