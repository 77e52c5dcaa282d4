"""What SGLang's threads do with a simulated storage, one for each kind of job."""

from __future__ import annotations

from collections import deque
from math import inf

from pagedsim.server import ServerSpec
from pagedsim.sglang import HiCacheOffload
from pagedsim.sglang.storage import Backup, Prefetch, StoredHiCache
from pagedsim.sim.replica import Replica
from pagedsim.sim.store import Store, StoreSettings

PART = 128
"""Pages that are read or written in one go; a fetch that is cut ends with its part."""


class StorageJobs:
    """The look-ups, fetches and backups of one server: each kind is served one after another.

    No events are needed: whoever asks what has ended by now has all go on until then.
    """

    def __init__(self, store: Store, memory: StoredHiCache) -> None:
        self.store = store
        self.memory = memory
        self._clear()

    def _clear(self) -> None:
        self._look_ups: deque[Prefetch] = deque()
        self._fetches: deque[Prefetch] = deque()
        self._backups: deque[Backup] = deque()
        self._answer = self._read = self._written = inf  # when what is under way of each kind ends
        self._pages_read = self._pages_written = 0  # of the first job, the part under way included

    def crash(self, now: float) -> None:
        """Lose all jobs that have not ended by now; a part that is being written gets there."""
        self._go_on(now)
        self._clear()

    @property
    def next_end(self) -> float:
        """When the next look-up or part of another job ends; infinity: none is under way."""
        return min(self._answer, self._read, self._written)

    def begin(self, now: float) -> None:
        """Report what has ended by now, and take the jobs that are new."""
        self._go_on(now)
        look_ups, fetches, backups = self.memory.take_jobs()
        self._look_ups += look_ups
        self._fetches += fetches
        self._backups += backups
        self._begin_next(now)

    def _go_on(self, now: float) -> None:
        while (end := self.next_end) <= now:
            if end == self._answer:
                look_up = self._look_ups.popleft()
                self.memory.found(look_up, self._stored_pages(look_up, end))
                self._answer = inf
            elif end == self._read:
                self.memory.arrived(self._fetches[0], self._pages_read, False)
                self._read = inf
            else:
                if self._pages_written == len(self._backups[0].keys):
                    self.memory.backed_up(self._backups.popleft())
                    self._pages_written = 0
                self._written = inf
            self._begin_next(end)

    def _stored_pages(self, look_up: Prefetch, now: float) -> int:
        """How many of its pages the store has, in a row from the first."""
        return len(look_up.keys) if look_up.assumed else self.store.count(look_up.keys, now)

    def _begin_next(self, now: float) -> None:
        """Begin what comes next of each kind of which nothing is under way."""
        if self._answer == inf and self._look_ups:
            self._answer = self.store.link.look_up(now)
        while self._read == inf and self._fetches:
            self._read_part(self._fetches[0], now)
        if self._written == inf and self._backups:
            part = self._backups[0].keys[self._pages_written : self._pages_written + PART]
            self._pages_written += len(part)
            self._written = self.store.write(part, now)

    def _read_part(self, fetch: Prefetch, now: float) -> None:
        """Begin the next part of a fetch, or end it if there is none or it is not wanted."""
        part = fetch.keys[self._pages_read : self._pages_read + PART]
        if count := 0 if fetch.cut else self.store.count(part, now):
            self._read = self.store.read(part[:count], now)
            self._pages_read += count
        else:
            self.memory.arrived(fetch, self._pages_read, True)
            self._fetches.popleft()
            self._pages_read = 0


def storage_of(server: ServerSpec, replica: Replica, stores: dict[str, Store]) -> Store | None:
    """What a server has below SGLang's host tier, if anything; perhaps in `stores`, which servers
    that are alike share."""
    offload, where = server.offloading, "storage"
    if not isinstance(offload, HiCacheOffload):
        return None
    if (settings := StoreSettings.of(where, offload.storage)) is None:
        return None
    return settings.store(where, "page", replica.block_bytes, server.groups, stores)
