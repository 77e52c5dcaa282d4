"""Tiers below the host tier of `offload=vllm` in simulated time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from pagedsim.core.offload import LowerTier, VLLMOffload
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.request import RequestId
from pagedsim.server import ServerSpec
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.cost.base import CostModel
from pagedsim.sim.replica import Replica
from pagedsim.sim.store import Store, StoreSettings


class Disk(LowerTier):
    """A store as one server sees it. It outlives a crash, but for what was being written."""

    def __init__(self, content: Store) -> None:
        self.content = content
        self._jobs: list[tuple[float, int]] = []  # a heap: when each ends, and its number
        self._writes: dict[int, Sequence[Hashable]] = {}

    @property
    def next_end(self) -> float:
        """When the next of its jobs ends; infinity: it has none."""
        return self._jobs[0][0] if self._jobs else inf

    def find(self, key: Hashable, request: RequestId, now: float) -> bool:
        return self.content.has(key, now)

    def store(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        self._writes[job] = keys = [chunk.key for chunk in chunks]
        heappush(self._jobs, (self.content.write(keys, now), job))

    def load(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        end = self.content.read([chunk.key for chunk in chunks], now)
        heappush(self._jobs, (end, job))

    def collect(self, now: float) -> list[int]:
        ended = []
        while self.next_end <= now:
            ended.append(heappop(self._jobs)[1])
            self._writes.pop(ended[-1], None)
        return ended

    def clear(self) -> None:
        for end, job in self._jobs:
            self.content.lose(self._writes.get(job, ()), end)
        self._jobs.clear()
        self._writes.clear()


class Prices:
    """Of computing tokens, and of loading chunks over idle links."""

    def __init__(
        self, cost: CostModel, copies: CopyTimes, disks: Sequence[Disk], blocks: int
    ) -> None:
        """`blocks` are those of a chunk."""
        self._computing = cost.prices()
        self._copies, self._disks, self._blocks = copies, disks, blocks

    def recompute_seconds(self, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens."""
        return self._computing.recompute_seconds(tokens)

    def load_seconds(self, chunks: Mapping[int, int]) -> float:
        """Seconds to read chunks from each tier below host memory, and to load all of them."""
        blocks = sum(chunks.values()) * self._blocks
        seconds = self._copies.seconds(blocks, self._copies.load_by(blocks))
        for number, disk in enumerate(self._disks):
            if count := chunks.get(number, 0):
                seconds += disk.content.read_seconds(count)
        return seconds


def with_tiers(
    server: ServerSpec, replica: Replica, cost: CostModel, stores: dict[str, Store]
) -> ServerSpec:
    """The server, whose sizes are known, with its prices and the tiers that it has below host
    memory, of which some are in `stores`, which servers that are alike share."""
    offload = server.offloading
    if not (isinstance(offload, VLLMOffload) and isinstance(offload.tiers, Mapping)):
        return server
    blocks = offload.blocks_per_chunk(server.block_size)
    size = replica.block_bytes * blocks
    disks = []
    for name, given in offload.tiers.items():
        where = f"tiers.{name}"
        if (settings := StoreSettings.of(where, given)) is not None:
            disks.append(Disk(settings.store(where, "chunk", size, server.groups, stores)))
    offload = replace(offload, tiers=tuple(disks))
    if offload.load == "cheaper":
        copies = CopyTimes.of(replica, cost.bus_efficiency)
        offload = replace(offload, load=Prices(cost, copies, disks, blocks))
    return replace(server, offload=offload)
