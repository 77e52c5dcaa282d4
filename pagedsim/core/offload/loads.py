"""What waiting requests find in the tiers, and the loads of that.

A request is looked up in the host tier after the GPU's prefix cache. What is found there is loaded
while steps go on; until then the request is *holding*: it owns blocks and no seat.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from pagedsim.core.offload.account import Account
from pagedsim.core.offload.chunks import Chunking
from pagedsim.core.offload.eviction import WRITING
from pagedsim.core.offload.host import HostTier
from pagedsim.core.offload.jobs import Job, Jobs
from pagedsim.core.offload.prices import HOST, LoadPrices, worth_loading
from pagedsim.core.offload.promotions import MISS, UNKNOWN, LowerTiers
from pagedsim.core.offload.record import Found, Lookup, OffloadStep
from pagedsim.core.request import Request
from pagedsim.core.transfers import Direction, Transfer

DEFERRED: Final = -1


class Loads:
    """The accounts of one server's requests, their lookups and their loads."""

    def __init__(
        self,
        chunking: Chunking,
        host: HostTier,
        lower: LowerTiers,
        jobs: Jobs,
        sync_tokens: int,
        prices: LoadPrices | None,
    ) -> None:
        self._chunking = chunking
        self._host = host
        self._lower = lower
        self._jobs = jobs
        self._sync_tokens = sync_tokens
        self._prices = prices
        self.accounts: dict[Request, Account] = {}
        self.loaders: dict[Request, bool] = {}
        """Requests that have not been scheduled since their load began: whether it has ended."""
        self._loading: set[Hashable] = set()  # chunks that others should find on the GPU soon
        self.open(0.0)

    def open(self, now: float) -> None:
        """A step is being planned."""
        self.step = OffloadStep()
        """What is decided with it."""
        self._now = now
        self._sync_left = self._sync_tokens
        self.admitted: list[Request] = []
        """Requests that have joined the batch in this step, or whose load has begun."""
        self.started: list[Transfer] = []
        self.waited_for: list[int] = []
        """Those that the step waits for."""

    def account(self, request: Request) -> Account:
        account = self.accounts.get(request)
        if account is None:
            account = self.accounts[request] = Account(request)
        return account

    # -- lookups ---------------------------------------------------------------------------------

    def lookup(self, request: Request, hit: int) -> int:
        """Tokens after a `hit` on the GPU that can be loaded, or `DEFERRED`: ask again later."""
        if request._num_seqs > 1:
            return 0
        tokens, why = self._lookup(self.account(request), hit)
        self.step.lookups.append(Lookup(request._id, hit, tokens, why))
        return tokens

    def _lookup(self, account: Account, hit: int) -> tuple[int, str]:
        account.mark = 0
        if account.jobs:
            return DEFERRED, "own"
        account.hit, size = hit, self._chunking.size
        last = self._chunking.known(account.request)
        if account.most_loaded is not None:
            last = min(last, hit + account.most_loaded)
        last //= size
        if last * size - hit < size:
            return 0, ""
        first = hit // size
        names = self._chunking.names(account.request, first, last)
        if self._prices is not None:
            sources = [*self._sources(names, account)]
            names = names[: worth_loading(self._prices, sources, size, hit - first * size)]
        count = self._find(names, first, account)
        if count == DEFERRED:
            return DEFERRED, "pending"
        end = (first + count) * size
        if not count or end - hit < size:
            return 0, ""
        if self._chunking.caching and not self._loading.isdisjoint(names[:count]):
            return DEFERRED, "loading"
        return end - hit, ""

    def _sources(self, names: Sequence[Hashable], account: Account) -> Iterator[int]:
        """The tiers of a request's chunks, up to the first that none has."""
        for key in names:
            if key in self._host.chunks:
                yield HOST
            elif (tier := self._lower.holder(key, account, self._now)) is not None:
                yield tier
            else:
                return

    def _find(self, names: Sequence[Hashable], first: int, account: Account) -> int:
        """How many chunks can be loaded from the first one on, or `DEFERRED`."""
        count, deferred = 0, False
        if names and self._lower.tiers:
            self._lower.collect_once(self._now, self.step)
        for place, key in enumerate(names, first):
            chunk = self._host.chunks.get(key)
            if chunk is not None:
                deferred |= chunk.readers == WRITING
            elif (answer := self._lower.find(key, place, account, self._now)) == MISS:
                break
            else:
                deferred = True
                if answer == UNKNOWN:
                    continue
            count += 1
        return DEFERRED if deferred else count

    # -- loads -----------------------------------------------------------------------------------

    def waits_for(self, request: Request, tokens: int) -> bool:
        """Whether the step waits for a load of so many tokens, and the request runs in it."""
        if tokens > self._sync_left or self.account(request).hit + tokens >= request.num_tokens:
            return False
        self._sync_left -= tokens
        return True

    def begin(self, request: Request, tokens: int, wait: bool) -> None:
        """A request that was looked up has its blocks now; the load of so many tokens begins.

        `wait`: it runs in the same step; else it is holding.
        """
        if request._num_seqs > 1:
            return
        account, chunking = self.account(request), self._chunking
        self._lower.read(account)
        first, end = account.hit // chunking.size, (account.hit + tokens) // chunking.size
        names = chunking.names(request, first, end) if tokens else []
        self._note_sources(account, names, first)
        if not tokens:
            return
        chunks = [self._host.chunks[key] for key in names]
        self._host.pin(chunks)
        self._host.access(chunks, account)
        account.mark = end
        blocks, places = request._tables[0], chunking.blocks([chunk.place for chunk in chunks])
        blocks = blocks[account.hit // chunking.block_size : end * chunking.per]
        job = Job(account, Direction.LOAD, chunks, blocks, wait)
        load = self._jobs.begin(job, places[-len(blocks) :])
        self.started.append(load)
        if wait:
            self.waited_for.append(load.job)
            return
        self.loaders[request] = False
        self.admitted.append(request)
        if chunking.caching:
            self._loading.update(names)

    def _note_sources(self, account: Account, names: Sequence[Hashable], first: int) -> None:
        """Record where the tokens of a request come from."""
        size, lower = self._chunking.size, [0] * len(self._lower.tiers)
        loaded = (first + len(names)) * size - account.hit if names else 0
        if account.lower:
            for place, key in enumerate(names, first):
                if (number := account.lower.get(key)) is not None:
                    lower[number] += size - max(account.hit - place * size, 0)
        below = sum(lower)
        self.step.found.append(Found(account.request._id, account.hit, loaded - below, lower))
        account.request._loaded, account.request._stored = loaded, below

    def arrived(self, request: Request) -> bool:
        """Whether the load of a holding request has ended; if so, it is a loader no more."""
        if self.loaders.get(request) is False:
            return False
        self.loaders.pop(request, None)
        return True

    def end(self, job: Job) -> None:
        """A load has ended."""
        self._host.unpin(job.chunks)
        self._loading.difference_update([chunk.key for chunk in job.chunks])
