"""Chunks on their way between the host tier and the tiers below it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from pagedsim.core.offload.account import Account
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.offload.host import HostTier
from pagedsim.core.offload.lower import LowerTier
from pagedsim.core.offload.record import Moved, OffloadStep

MISS: Final = 0
PROMOTED: Final = 1
UNKNOWN: Final = 2


class TierJob(NamedTuple):
    """A copy from the host tier, or to it."""

    chunks: Sequence[HostChunk]
    up: bool


class LowerTiers:
    """What is stored in the host tier is copied to every tier below it (a *cascade*). What they
    alone have gets a place in the host tier as soon as it is looked up, and is copied there (a
    *promotion*); so a request that is looked up again finds it some steps later."""

    def __init__(self, tiers: Sequence[LowerTier], host: HostTier, protecting: bool) -> None:
        """`protecting`: no promotion evicts what another was for, before it has been read."""
        self.tiers = tiers
        self.jobs: dict[int, TierJob] = {}
        self.protecting = protecting
        self._unread: dict[Hashable, None] = {}
        self._host = host
        self._number = 0  # of the next job
        self._collected = False  # whether jobs have been collected in this step
        self._promised: dict[int, dict[Account, list[HostChunk]]] = {}  # by tier

    def promised(self) -> Iterable[HostChunk]:
        """Chunks that have a place, and whose promotion begins with this step."""
        return [
            chunk
            for accounts in self._promised.values()
            for chunks in accounts.values()
            for chunk in chunks
        ]

    def find(self, key: Hashable, place: int, account: Account, now: float) -> int:
        """Look a chunk up that the host tier lacks, and give it a place there."""
        unknown = False
        for number, tier in enumerate(self.tiers):
            found = tier.find(key, account.request._id, now)
            if found is None:
                unknown = True
            elif found:
                chunks = self._host.offer((key,), place, account, self._unread)
                if not chunks:
                    return MISS
                account.lower[key] = number
                if self.protecting:
                    self._unread[key] = None
                self._promised.setdefault(number, {}).setdefault(account, []).extend(chunks)
                return PROMOTED
        return UNKNOWN if unknown else MISS

    def read(self, account: Account) -> None:
        """A request needs what was promoted for it no more: it is loaded from now on, or computed,
        or the request is gone."""
        if self._unread:
            for key in account.lower:
                self._unread.pop(key, None)

    def holder(self, key: Hashable, account: Account, now: float) -> int | None:
        """The first tier that has a chunk, or may have it."""
        for number, tier in enumerate(self.tiers):
            if tier.find(key, account.request._id, now) is not False:
                return number
        return None

    def collect_once(self, now: float, step: OffloadStep) -> None:
        """Collect jobs, if that has not been done in this step."""
        if not self._collected:
            self.collect(now, step)

    def collect(self, now: float, step: OffloadStep) -> None:
        """Note the jobs that have ended."""
        self._collected = True
        for tier in self.tiers:
            for number in tier.collect(now):
                step.collected.append(number)
                job = self.jobs.pop(number)
                lost = job.up and tier.failed(number)
                (self._host.written if job.up else self._host.unpin)(job.chunks)
                if lost:
                    for chunk in job.chunks:
                        self._host.drop(chunk)

    def promote(self, now: float, step: OffloadStep) -> None:
        """At the end of a step: begin its promotions, a job for each tier and request."""
        self.collect_once(now, step)
        self._collected = False
        for number, accounts in self._promised.items():
            for account, chunks in accounts.items():
                moved = self._begin(number, account, chunks, True)
                step.promotions.append(moved)
                self.tiers[number].load(moved.job, chunks, now)
        self._promised.clear()

    def cascade(self, account: Account, chunks: Sequence[HostChunk], now: float) -> Sequence[Moved]:
        """Copy chunks that were stored to every tier."""
        jobs = []
        for number, tier in enumerate(self.tiers):
            self._host.pin(chunks)
            moved = self._begin(number, account, chunks, False)
            jobs.append(moved)
            tier.store(moved.job, chunks, now)
        return jobs

    def _begin(self, tier: int, account: Account, chunks: Sequence[HostChunk], up: bool) -> Moved:
        job, self._number = self._number, self._number + 1
        self.jobs[job] = TierJob(chunks, up)
        return Moved(account.request._id, [chunk.key for chunk in chunks], tier, job)

    def forget(self, account: Account) -> None:
        """A request has ended, and with it all its transfers."""
        for tier in self.tiers:
            tier.forget(account.request._id)
