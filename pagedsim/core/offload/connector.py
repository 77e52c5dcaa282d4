"""vLLM's offloading connector as its scheduler sees it: what to load, store, defer and wait for.

A *chunk* is one block or several, named by all tokens up to its end. A waiting request is looked up
in the host tier after the GPU's prefix cache. What is found there is loaded while steps go on;
until then the request is *holding*: it owns blocks and no seat. What a step computes is offered to
the tier as chunks become whole. The blocks of a request that ends are free at once, although a
store may still read them: that is flushed as soon as one of them is given to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import (
    ConfigError,
    IntegrityError,
    PlanError,
    require_flag,
    require_whole,
    unknown,
)
from pagedsim.core.memory import Memory, PrefixMemory
from pagedsim.core.memory.prefix import page_keys
from pagedsim.core.offload.account import Account
from pagedsim.core.offload.eviction import ORDERS, WRITING, ChunkEviction, HostChunk
from pagedsim.core.offload.fences import Fences
from pagedsim.core.offload.host import HostTier
from pagedsim.core.offload.lower import LowerTier
from pagedsim.core.offload.prices import HOST, LoadPrices, worth_loading
from pagedsim.core.offload.promotions import MISS, UNKNOWN, LowerTiers
from pagedsim.core.offload.record import Found, Lookup, OffloadStep
from pagedsim.core.plan import StepPlan, sampled_in
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.reservations import Placeholder, pass_blocks
from pagedsim.core.transfers import Direction, Transfer

DEFERRED: Final = -1
ROUNDS: Final = 1000
"""So many steps in a row that bring chunks up, and neither compute nor load, are for ever."""


def _host_tier(
    capacity: int, order: Callable[[], ChunkEviction], threshold: int, tracked: int
) -> HostTier:
    return HostTier(capacity, order(), threshold, tracked)


class Job(NamedTuple):
    """A transfer in flight between the GPU and the host tier."""

    account: Account
    direction: Direction
    chunks: Sequence[HostChunk]
    blocks: Sequence[int]
    waited_for: bool
    """Whether its request runs in the step that begins it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class OffloadConnector:
    """One server's host tier, and the transfers from and to it."""

    def __init__(
        self,
        chunks: SupportsIndex,
        *,
        blocks_per_chunk: SupportsIndex = 1,
        eviction: str | Callable[[], ChunkEviction] = "lru",
        store_threshold: SupportsIndex = 0,
        tracked_chunks: SupportsIndex = 64_000,
        prompt_only: object = True,
        sync_tokens: SupportsIndex = 0,
        tiers: Sequence[LowerTier] = (),
        protect_promoted: object = False,
        prices: LoadPrices | None = None,
    ) -> None:
        """`chunks` is the capacity of the host tier, in chunks of `blocks_per_chunk` GPU blocks.

        A chunk is stored at its offer number `store_threshold`, or at once below 2; offers of
        `tracked_chunks` chunks are counted. `prompt_only`: what requests generate is not stored. A
        step waits for loads of `sync_tokens` tokens in all, and computes with them; the others are
        waited for by their requests alone. `tiers` are below the host tier; `protect_promoted`:
        what came up from them is not evicted for more of it before its request has been loaded.
        With `prices`, what is cheaper to compute is not loaded.
        """
        capacity = require_whole("chunks", chunks, 1)
        self.blocks_per_chunk = require_whole("blocks_per_chunk", blocks_per_chunk, 1)
        threshold = require_whole("store_threshold", store_threshold, 0)
        tracked = require_whole("tracked_chunks", tracked_chunks, 1)
        self.prompt_only = require_flag("prompt_only", prompt_only)
        self.sync_tokens = require_whole("sync_tokens", sync_tokens, 0)
        self._protecting = require_flag("protect_promoted", protect_promoted)
        if isinstance(eviction, str):
            if eviction not in ORDERS:
                raise unknown("eviction", eviction, tuple(ORDERS))
            eviction = ORDERS[eviction]
        if threshold > 1 and tiers:
            raise ConfigError(
                f"store_threshold={threshold}: must be 0 or 1 with tiers below the host tier, "
                "whose chunks get a place in it when they are first looked up"
            )
        self._make_host = partial(_host_tier, capacity, eviction, threshold, tracked)
        self._tiers = tuple(tiers)
        self._prices = prices
        self._number = 0  # of the next job
        self._reset()

    def _reset(self) -> None:
        """Nothing is stored, and nothing in flight."""
        self.host: HostTier = self._make_host()
        for tier in self._tiers:
            tier.clear()
        self.lower = LowerTiers(self._tiers, self.host, self._protecting)
        self.jobs: dict[int, Job] = {}
        self.loaders: dict[Request, bool] = {}
        """Requests that have not been scheduled since their load began: whether it has ended."""
        self._accounts: dict[Request, Account] = {}
        self._ended: list[Account] = []  # since the last step was planned
        self._lingering: dict[int, Placeholder] = {}  # by load: blocks of requests that have ended
        self._in_steps: list[tuple[StepPlan, Placeholder]] = []  # blocks that a step still uses
        self._fences = Fences()
        self._loading: set[Hashable] = set()  # chunks that others should find on the GPU soon
        self._refused: set[Account] = set()  # they repeat their offers
        self._rounds = 0  # steps that did nothing but bring chunks up, since others
        self.received: set[int] = set()
        """Blocks that were given to what comes from another server, since the last step."""
        # Of the step that is being planned:
        self.step = OffloadStep()
        self._now = 0.0
        self._sync_left = 0
        self._sampling: set[Request] = set()  # they have a token in flight
        self._admitted: list[Request] = []
        self._loads: list[Transfer] = []
        self._waited_for: list[int] = []

    def bind(
        self, memory: Memory, running: Mapping[Request, None], in_flight: Sequence[StepPlan]
    ) -> None:
        """Belong to a scheduler from now on."""
        self._memory = memory
        self._running = running
        self._in_flight = in_flight
        self._caching = isinstance(memory, PrefixMemory)
        self.block_size = memory.block_size
        self.chunk_size = memory.block_size * self.blocks_per_chunk

    @property
    def transferring(self) -> bool:
        """Whether a transfer is in flight, or the end of a request has not been noted by a step."""
        return bool(self.jobs or self._ended or self.lower.jobs)

    @property
    def unbegun(self) -> bool:
        """Whether the next step, though empty, stores what a request has left or notes its end."""
        return bool(self._ended)

    @property
    def host_total(self) -> int:
        """Blocks that the host tier has room for."""
        return self.host.capacity * self.blocks_per_chunk

    @property
    def promotes_for_ever(self) -> bool:
        """Whether requests wait for chunks that come up and evict one another, and will do so."""
        return self._rounds >= ROUNDS

    def protect_promoted(self) -> None:
        """From now on what comes up for a request is kept until it is loaded."""
        self._rounds = 0
        self.lower.protecting = True

    @property
    def kept(self) -> Sequence[Placeholder]:
        """Owners of the blocks that are in use though their requests have ended."""
        return [*self._lingering.values(), *(placeholder for _, placeholder in self._in_steps)]

    @property
    def lingering(self) -> Sequence[RequestId]:
        """Requests that have ended, and whose load still writes their blocks."""
        return [placeholder.request._id for placeholder in self._lingering.values()]

    # -- a step --------------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """A step is being planned."""
        self._now = now
        self.step = OffloadStep()
        self.host.inserted, self.host.evicted = self.step.inserted, self.step.evicted
        self.host.held_back = 0
        self._sync_left = self.sync_tokens
        self._sampling = {request for plan in self._in_flight for request in sampled_in(plan)}
        self._admitted = []
        self._loads = []
        self._waited_for = []

    def close(self, plan: StepPlan) -> None:
        """The requests of a step are chosen: store what it will have computed."""
        received, self.received = self.received, set()
        if self._nothing_to_do(plan):
            return
        flushed: set[int] = set()
        for preemption in plan._preemptions:
            if (account := self._accounts.get(preemption.request)) is not None:
                flushed.update(account.jobs)
        ended, self._ended = self._ended, []
        taken = received | self._taken(plan) if ended or len(self._fences) else set()
        flushed |= self._fences.crossed(taken)
        stores = self._stores(plan)
        for account in ended:
            if (store := self._offer(account, account.final, account.table)) is not None:
                stores.append(store)
                self._fences.add(store.job, store.blocks)
                if not taken.isdisjoint(store.blocks):
                    flushed.add(store.job)
        for account in ended:
            self.host.finish(account)
            account.told = True
            self._refused.discard(account)
            self._forget_if_done(account)
        if self.lower.tiers:
            self.lower.promote(self._now, self.step)
            if plan._chunks or plan._decode_count or self._loads:
                self._rounds = 0
            elif self.step.promotions:
                self._rounds += 1
        self.step.held_back = self.host.held_back
        plan._transfers = [*self._loads, *stores]
        plan._flushed = [*sorted(flushed), *self._waited_for]

    def _nothing_to_do(self, plan: StepPlan) -> bool:
        """Whether a step stores nothing and waits for nothing, as most steps that only decode."""
        news = plan._chunks or plan._preemptions or self._ended or self._loads
        return self.prompt_only and not (
            news or self._refused or len(self._fences) or self.lower.tiers
        )

    def _taken(self, plan: StepPlan) -> set[int]:
        """Blocks that were allocated in this step, and all those of requests admitted in it."""
        taken: set[int] = set()
        for request in self._admitted:
            for table in request._tables:
                taken.update(table)
        for chunk in plan._chunks:
            for table in chunk._request._tables:
                taken.update(table[self._memory.blocks_for(chunk._start) :])
        for request in plan.decodes:
            if request.computed % self.block_size == 0:
                taken.update(table[-1] for table in request._tables)
        return taken

    def settled(self, plan: StepPlan) -> bool:
        """A step that was in flight has been carried out; returns whether that frees blocks."""
        frees = False
        while self._in_steps and self._in_steps[0][0] is plan:
            self._memory.release(self._in_steps.pop(0)[1])
            frees = True
        return frees

    def sampled(self, requests: Iterable[Request]) -> None:
        """Their tokens of a step that was planned ahead are known: its blocks can be found, though
        a request may not be in the next step."""
        full = [
            request
            for request in requests
            if (request._prompt_len + request.sampled_count - 1) % self.block_size == 0
            and request in self._running
        ]
        for request in sorted(full, key=lambda request: request._seat):
            self._memory.filled(request, request._prompt_len + request.sampled_count - 1)

    def uneventful(self, plan: StepPlan, limit: int, waiting: int) -> int:
        """After how many steps like `plan`, up to `limit`, there may be something to do."""
        if self.transferring or self.loaders or self._refused or self._in_steps:
            return 0
        if waiting and self.lower.tiers:
            return 0  # their answers change with time
        if not self.prompt_only:
            for request in plan.decodes:
                computed = request.computed  # of which this step, or the next, may offer the end
                boundary = ((computed - 1) // self.chunk_size + 1) * self.chunk_size
                limit = min(limit, boundary - computed - 2)
        return max(limit, 0)

    # -- lookups and loads -----------------------------------------------------------------------

    def lookup(self, request: Request, hit: int) -> int:
        """Tokens after a `hit` on the GPU that can be loaded, or `DEFERRED`: ask again later."""
        if request._num_seqs > 1:
            return 0
        tokens, why = self._lookup(self._account(request), hit)
        self.step.lookups.append(Lookup(request._id, hit, tokens, why))
        return tokens

    @staticmethod
    def require_limits(request: Request) -> None:
        """Raise RequestError for limits of a request that are none."""
        if request._extra:
            Account(request)

    def _account(self, request: Request) -> Account:
        account = self._accounts.get(request)
        if account is None:
            account = self._accounts[request] = Account(request)
        return account

    def _lookup(self, account: Account, hit: int) -> tuple[int, str]:
        account.mark = 0
        if account.jobs:
            return DEFERRED, "own"
        account.hit, size = hit, self.chunk_size
        last = self._known(account.request)
        if account.most_loaded is not None:
            last = min(last, hit + account.most_loaded)
        last //= size
        if last * size - hit < size:
            return 0, ""
        first = hit // size
        names = self._names(account.request, last)[first:]
        if self._prices is not None:
            sources = [*self._sources(names, account)]
            names = names[: worth_loading(self._prices, sources, size, hit - first * size)]
        found = self._find(names, first, account)
        if found == DEFERRED:
            return DEFERRED, "pending"
        end = (first + found) * size
        if not found or end - hit < size:
            return 0, ""
        if self._caching and not self._loading.isdisjoint(names[:found]):
            return DEFERRED, "loading"
        return end - hit, ""

    def _sources(self, names: Sequence[Hashable], account: Account) -> Iterator[int]:
        """The tiers of a request's chunks, up to the first that none has."""
        for key in names:
            if key in self.host.chunks:
                yield HOST
            elif (tier := self.lower.holder(key, account, self._now)) is not None:
                yield tier
            else:
                return

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens of a request behind its `cached` ones that the host tier has, for routers."""
        first = cached // self.chunk_size
        names = self._names(request, self._known(request) // self.chunk_size)[first:]
        ready = 0
        for key in names:
            if (chunk := self.host.chunks.get(key)) is None or chunk.readers == WRITING:
                break
            ready += 1
        return max((first + ready) * self.chunk_size - cached, 0)

    def _known(self, request: Request) -> int:
        """Its tokens whose ids are known when the step is planned."""
        if self._memory.with_tokens:
            return request._prompt_len + request.sampled_count
        return request.num_tokens - (request in self._sampling)

    def _names(self, request: Request, count: int) -> list[Hashable]:
        """The keys of its first chunks: those of the last block of each."""
        per = self.blocks_per_chunk
        keys = page_keys(request, count * per, self.block_size, self._memory.with_tokens)
        return keys[per - 1 : count * per : per]

    def _find(self, names: Sequence[Hashable], first: int, account: Account) -> int:
        """How many chunks can be loaded from the first one on, or `DEFERRED`."""
        found, deferred = 0, False
        for place, key in enumerate(names, first):
            if self.lower.tiers:
                self.lower.collect_once(self._now, self.step)
            chunk = self.host.chunks.get(key)
            if chunk is not None:
                deferred |= chunk.readers == WRITING
            elif (answer := self.lower.find(key, place, account, self._now)) == MISS:
                break
            else:
                deferred = True
                if answer == UNKNOWN:
                    continue
            found += 1
        return DEFERRED if deferred else found

    def waits_for(self, request: Request, tokens: int) -> bool:
        """Whether the step waits for a load of so many tokens, and the request runs in it."""
        if tokens > self._sync_left or self._account(request).hit + tokens >= request.num_tokens:
            return False
        self._sync_left -= tokens
        return True

    def admitted(self, request: Request) -> None:
        """A request joins the batch; if it was looked up, with a hit on the GPU alone."""
        self._admitted.append(request)

    def found(self, request: Request, tokens: int, wait: bool) -> None:
        """A request that was looked up has its blocks now; the load of so many tokens begins.

        `wait`: it runs in the same step; else it is holding.
        """
        if request._num_seqs > 1:
            return
        account = self._account(request)
        self.lower.read(account)
        first, end = account.hit // self.chunk_size, (account.hit + tokens) // self.chunk_size
        names = self._names(request, end)[first:] if tokens else []
        self._note_sources(account, names, first)
        if not tokens:
            return
        chunks = [self.host.chunks[key] for key in names]
        for chunk in chunks:
            self.host.pin(chunk)
        self.host.access(dict(zip(names, range(first, end), strict=True)), names, account)
        account.mark = end
        at = account.hit // self.block_size
        blocks = request._tables[0][at : end * self.blocks_per_chunk]
        places = self._blocks([chunk.place for chunk in chunks])
        places = places[at - first * self.blocks_per_chunk :]
        load = self._begin(account, Direction.LOAD, chunks, blocks, places, wait)
        self._loads.append(load)
        if wait:
            self._waited_for.append(load.job)
            return
        self.loaders[request] = False
        self._admitted.append(request)
        if self._caching:
            self._loading.update(names)

    def _note_sources(self, account: Account, names: Sequence[Hashable], first: int) -> None:
        """Record where the tokens of a request come from."""
        size, lower = self.chunk_size, [0] * len(self.lower.tiers)
        loaded = (first + len(names)) * size - account.hit if names else 0
        if account.lower:
            for place, key in enumerate(names, first):
                if (number := account.lower.get(key)) is not None:
                    lower[number] += size - max(account.hit - place * size, 0)
        below = sum(lower)
        self.step.found.append(Found(account.request._id, account.hit, loaded - below, lower))
        account.request._loaded, account.request._stored = loaded, below

    def _blocks(self, numbers: list[int]) -> list[int]:
        """The blocks of chunks by their numbers, in host memory or in a request."""
        per = self.blocks_per_chunk
        if per == 1:
            return numbers
        return [number * per + block for number in numbers for block in range(per)]

    def _begin(
        self,
        account: Account,
        direction: Direction,
        chunks: Sequence[HostChunk],
        blocks: Sequence[int],
        places: Sequence[int],
        wait: bool = False,
    ) -> Transfer:
        number, self._number = self._number, self._number + 1
        self.jobs[number] = Job(account, direction, chunks, blocks, wait)
        account.jobs[number] = None
        return Transfer(number, direction, account.request, blocks, places)

    def arrived(self, request: Request) -> bool:
        """Whether the load of a holding request has ended; if so, it is a loader no more."""
        if self.loaders.get(request) is False:
            return False
        self.loaders.pop(request, None)
        return True

    # -- stores ------------------------------------------------------------------------------------

    def _stores(self, plan: StepPlan) -> list[Transfer]:
        """The stores of what a step will have computed, in the order of the batch."""
        ends = {chunk._request: chunk.context for chunk in plan._chunks}
        order: Iterable[Request] = ends
        if decodes := self._offering(plan):
            ends |= {request: request.computed + 1 for request in decodes}
            order = [request for request in self._running if request in ends]
        stores = []
        for request in order:
            if request._num_seqs > 1:
                continue
            account = self._account(request)
            count = self._chunks_before(account, ends[request], self._known(request))
            if (store := self._offer(account, count, request._tables[0])) is not None:
                stores.append(store)
        return stores

    def _offering(self, plan: StepPlan) -> Sequence[Request]:
        """The decoding requests that may have something to offer."""
        if self._refused:
            return plan.decodes
        if self.prompt_only:
            return ()
        # The last token of a chunk is known in the step that computes it, or one later.
        size = self.chunk_size
        return [request for request in plan.decodes if (request.computed + 1) % size <= 1]

    def _chunks_before(self, account: Account, computed: int, known: int) -> int:
        """How many of a request's chunks can be stored."""
        end = min(computed, known)
        if account.most_stored is not None:
            end = min(end, account.most_stored)
        if self.prompt_only:
            end = min(end, account.request._prompt_len)
        return end // self.chunk_size

    def _offer(self, account: Account, count: int, table: Sequence[int]) -> Transfer | None:
        """Offer a request's next chunks, up to `count` in all; None: nothing of it is stored."""
        mark = account.mark
        if count <= mark:
            return None
        names = account.names if account.ended else self._names(account.request, count)
        if self.lower.tiers:
            self.lower.collect(self._now, self.step)
        offered = dict(zip(names[mark:count], range(mark, count), strict=True))
        chunks = self.host.offer(offered, account)
        if chunks is None:
            self.step.refused.append(account.request._id)
            self._refused.add(account)
            return None
        self._refused.discard(account)
        account.mark = count
        if not chunks:
            return None
        blocks = [table[n] for n in self._blocks([offered[chunk.key] for chunk in chunks])]
        places = self._blocks([chunk.place for chunk in chunks])
        return self._begin(account, Direction.STORE, chunks, blocks, places)

    # -- ends --------------------------------------------------------------------------------------

    def leave(self, request: Request, finished: bool, computed: int) -> None:
        """A request ends, or leaves with so many tokens computed; its memory is freed next."""
        account = self._accounts.pop(request, None) or Account(request)
        self.lower.read(account)
        arrived = self.loaders.pop(request, None)
        if request._num_seqs == 1 and request._state is State.RUNNING and request._tables:
            account.table = list(request._tables[0])
            known = request._prompt_len + request.sampled_count
            if not self._memory.with_tokens:
                known = request.num_tokens
            end = max(request._prompt_len, request.num_tokens - 1) if finished else computed
            account.final = self._chunks_before(account, end, known)
            account.final = min(account.final, len(account.table) // self.blocks_per_chunk)
            account.names = self._names(request, account.final)
        account.ended = True
        self._ended.append(account)
        for number in account.jobs:
            self._fences.add(number, self._stored_from(self.jobs[number]))
        if arrived is not None:
            # Others find what it has loaded from its turn on, not before.
            request._prefilled = request._found = 0
        if arrived is False:
            (load,) = (
                number for number in account.jobs if self.jobs[number].direction is Direction.LOAD
            )
            self._lingering[load] = self._keep(request, 0)
        elif self.in_flight(request):
            last = self._in_flight[-1]
            self._in_steps.append((last, self._keep(request, request.computed)))

    @staticmethod
    def _stored_from(job: Job) -> Sequence[int]:
        return job.blocks if job.direction is Direction.STORE else ()

    @staticmethod
    def _keep(request: Request, computed: int) -> Placeholder:
        """Take over the blocks of a request, of which so many tokens may be registered."""
        placeholder = Placeholder(request, request._order, kept=True)
        placeholder._prefilled = computed
        pass_blocks(request, placeholder)
        return placeholder

    def in_flight(self, request: Request) -> bool:
        """Whether a step that is under way computes for a request."""
        return any(_schedules(plan, request) for plan in self._in_flight)

    def transferred(
        self, numbers: Iterable[int], now: float, failed: Collection[int] = ()
    ) -> list[Request]:
        """Transfers have ended, in this order, and of those that `failed` nothing was copied.

        Returns the holding requests that cannot be loaded.
        """
        numbers = [*numbers]
        if wrong := [number for number in numbers if number not in self.jobs]:
            raise PlanError(f"transfers {wrong} have ended that are not in flight")
        freed: list[Placeholder] = []
        unloaded: list[Request] = []
        for number in numbers:
            job = self.jobs.pop(number)
            account = job.account
            if job.direction is Direction.STORE:
                self.host.written(job.chunks)
                if number not in failed:
                    self.step.cascades += self.lower.cascade(account, job.chunks, now)
                self._fences.remove(number, job.blocks)
            else:
                self.host.unpin(job.chunks)
                self._loading.difference_update(chunk.key for chunk in job.chunks)
                if (placeholder := self._lingering.pop(number, None)) is not None:
                    freed.append(placeholder)
                elif number in failed and not job.waited_for:
                    del self.loaders[account.request]
                    unloaded.append(account.request)
                elif not job.waited_for:
                    self.loaders[account.request] = True
            if number in failed:
                for chunk in job.chunks:
                    self.host.drop(chunk)
            del account.jobs[number]
            self._forget_if_done(account)
        for placeholder in sorted(freed, key=lambda kept: (isinstance(kept._id, str), kept._id)):
            self._memory.release(placeholder)
        return unloaded

    def distrust(self) -> None:
        """A step has failed: nothing is stored of the requests that have ended with it."""
        for account in self._ended:
            account.final = 0

    def _forget_if_done(self, account: Account) -> None:
        if account.told and not account.jobs:
            self.lower.forget(account)

    def crash(self, now: float) -> None:
        """Lose all tiers with all that is in flight, after the requests have left."""
        for placeholder in self.kept:
            self._memory.release(placeholder)
        for tier in self._tiers:
            tier.collect(now)  # what has ended by now is not lost
        self._reset()

    def check(self) -> None:
        """Raise IntegrityError if chunks are lost, or pinned for no transfer."""
        readers: Counter[Hashable] = Counter()
        written = [chunk.key for chunk in self.lower.promised()]
        jobs = [(job.chunks, job.direction is Direction.STORE) for job in self.jobs.values()]
        for chunks, writes in (*jobs, *self.lower.jobs.values()):
            if writes:
                written += [chunk.key for chunk in chunks]
            else:
                readers.update(chunk.key for chunk in chunks)
        self.host.check(readers, written)
        for account in self._accounts.values():
            if any(number not in self.jobs for number in account.jobs):
                raise IntegrityError(f"{account.request!r} has transfers that are not in flight")
        for request, arrived in self.loaders.items():
            numbers = self._account(request).jobs
            if not arrived and all(
                self.jobs[number].direction is Direction.STORE for number in numbers
            ):
                raise IntegrityError(f"{request!r} waits for a load that does not exist")


def _schedules(plan: StepPlan, request: Request) -> bool:
    """Whether a step computes for a request."""
    return request in plan.decodes or any(chunk._request is request for chunk in plan._chunks)
