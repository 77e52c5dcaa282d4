"""vLLM's offloading connector as its scheduler sees it: what to load, store, defer and wait for.

A *chunk* is one block or several, named by all tokens up to its end. What waiting requests find and
load is in `loads.py`. What a step computes is offered to the tier as chunks become whole. The
blocks of a request that ends are free at once, although a store may still read them: that is
flushed as soon as one of them is given to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import (
    ConfigError,
    IntegrityError,
    PlanError,
    require_flag,
    require_whole,
    unknown,
)
from pagedsim.core.memory import Memory
from pagedsim.core.offload.account import Account
from pagedsim.core.offload.chunks import Chunking
from pagedsim.core.offload.eviction import ORDERS, WRITING, ChunkEviction
from pagedsim.core.offload.fences import Fences
from pagedsim.core.offload.host import HostTier
from pagedsim.core.offload.jobs import Job, Jobs
from pagedsim.core.offload.loads import Loads
from pagedsim.core.offload.lower import LowerTier
from pagedsim.core.offload.prices import LoadPrices
from pagedsim.core.offload.promotions import LowerTiers
from pagedsim.core.offload.record import OffloadStep
from pagedsim.core.plan import StepPlan, sampled_in
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.reservations import Placeholder, pass_blocks
from pagedsim.core.transfers import Direction, Transfer

ROUNDS: Final = 1000
"""So many steps in a row that bring chunks up, and neither compute nor load, are for ever."""


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
        self._host_settings = capacity, eviction, threshold, tracked
        self._tiers = tuple(tiers)
        self._prices = prices
        self.oversized = 0
        """Offers of more chunks than the host tier has room for, of which nothing is stored."""
        self._jobs = Jobs()
        self.jobs: dict[int, Job] = self._jobs.in_flight

    def _reset(self) -> None:
        """Nothing is stored, and nothing in flight."""
        capacity, order, threshold, tracked = self._host_settings
        self.host = HostTier(capacity, order(), threshold, tracked)
        for tier in self._tiers:
            tier.clear()
        self.lower = LowerTiers(self._tiers, self.host, self._protecting)
        self.jobs.clear()
        self.loads = Loads(
            self.chunking, self.host, self.lower, self._jobs, self.sync_tokens, self._prices
        )
        self._ended: list[Account] = []  # since the last step was planned
        self._lingering: dict[int, Placeholder] = {}  # by load: blocks of requests that have ended
        self._in_steps: list[tuple[StepPlan, Placeholder]] = []  # blocks that a step still uses
        self._fences = Fences()
        self._refused: set[Account] = set()  # they repeat their offers
        self._rounds = 0  # steps that did nothing but bring chunks up, since others
        self.received: set[int] = set()
        """Blocks that were given to what comes from another server, since the last step."""

    def bind(
        self, memory: Memory, running: Mapping[Request, None], in_flight: Sequence[StepPlan]
    ) -> None:
        """Belong to a scheduler from now on."""
        self._memory = memory
        self._running = running
        self._in_flight = in_flight
        self.chunking = Chunking(memory, self.blocks_per_chunk)
        self._reset()

    @staticmethod
    def require_limits(request: Request) -> None:
        """Raise RequestError for limits of a request that are none."""
        if request._extra:
            Account(request)

    @property
    def step(self) -> OffloadStep:
        """What was decided with the last step."""
        return self.loads.step

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

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens of a request behind its `cached` ones that the host tier has, for routers."""
        chunking, ready = self.chunking, 0
        first = cached // chunking.size
        for key in chunking.names(request, first, chunking.known(request) // chunking.size):
            if (chunk := self.host.chunks.get(key)) is None or chunk.readers == WRITING:
                break
            ready += 1
        return max((first + ready) * chunking.size - cached, 0)

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
        self.loads.open(now)
        step, host = self.loads.step, self.host
        host.inserted, host.evicted, host.held_back = step.inserted, step.evicted, 0
        if self._in_flight or self.chunking.sampling:
            sampling = {request for plan in self._in_flight for request in sampled_in(plan)}
            self.chunking.sampling = sampling

    def close(self, plan: StepPlan) -> None:
        """The requests of a step are chosen: store what it will have computed."""
        received, self.received = self.received, set()
        if self._nothing_to_do(plan):
            return
        flushed: set[int] = set()
        for preemption in plan._preemptions:
            if (account := self.loads.accounts.get(preemption.request)) is not None:
                flushed.update(account.jobs)
        ended, self._ended = self._ended, []
        offering = any(account.final > account.mark for account in ended)
        taken = received | self._taken(plan) if offering or len(self._fences) else set()
        flushed |= self._fences.crossed(taken)
        stores = self._stores(plan)
        for account in ended:
            if (store := self._offer(account, account.final, account.table)) is not None:
                stores.append(store)
                self._fences.add(store.job, store.blocks)
                if not taken.isdisjoint(store.blocks):
                    flushed.add(store.job)
        for account in ended:
            self.host.order.finish(self.host.chunks, account)
            account.told = True
            self._refused.discard(account)
            self._forget_if_done(account)
        if self.lower.tiers:
            self.lower.promote(self._now, self.step)
            if plan._chunks or plan._decode_count or self.loads.started:
                self._rounds = 0
            elif self.step.promotions:
                self._rounds += 1
        self.step.held_back = self.host.held_back
        plan._transfers = [*self.loads.started, *stores]
        plan._flushed = [*sorted(flushed), *self.loads.waited_for]

    def _nothing_to_do(self, plan: StepPlan) -> bool:
        """Whether a step stores nothing and waits for nothing, as most steps that only decode."""
        news = plan._chunks or plan._preemptions or self._ended or self.loads.started
        return self.prompt_only and not (
            news or self._refused or len(self._fences) or self.lower.tiers
        )

    def _taken(self, plan: StepPlan) -> set[int]:
        """Blocks that were allocated in this step, and all those of requests admitted in it."""
        taken: set[int] = set()
        for request in self.loads.admitted:
            for table in request._tables:
                taken.update(table)
        for chunk in plan._chunks:
            for table in chunk._request._tables:
                taken.update(table[self._memory.blocks_for(chunk._start) :])
        for request in plan.decodes:
            if request.computed % self.chunking.block_size == 0:
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
            if (request._prompt_len + request.sampled_count - 1) % self.chunking.block_size == 0
            and request in self._running
        ]
        for request in sorted(full, key=lambda request: request._seat):
            self._memory.filled(request, request._prompt_len + request.sampled_count - 1)

    def uneventful(self, plan: StepPlan, limit: int, waiting: int) -> int:
        """After how many steps like `plan`, up to `limit`, there may be something to do."""
        if self._ended or self.loads.loaders or self._refused or self._in_steps:
            return 0
        if plan._transfers or plan._flushed or self._lingering or len(self._fences):
            return 0
        if self.jobs and (waiting or self._in_flight):
            return 0  # to stores alone that are under way nothing else pays attention
        if self.lower.tiers and (waiting or self.jobs or self.lower.jobs):
            return 0  # their answers change with time
        if not self.prompt_only:
            for request in plan.decodes:
                computed = request.computed  # of which this step, or the next, may offer the end
                boundary = ((computed - 1) // self.chunking.size + 1) * self.chunking.size
                limit = min(limit, boundary - computed - 2)
        return max(limit, 0)

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
            account = self.loads.account(request)
            count = self._chunks_before(account, ends[request], self.chunking.known(request))
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
        size = self.chunking.size
        return [request for request in plan.decodes if (request.computed + 1) % size <= 1]

    def _chunks_before(self, account: Account, computed: int, known: int) -> int:
        """How many of a request's chunks can be stored."""
        end = min(computed, known)
        if account.most_stored is not None:
            end = min(end, account.most_stored)
        if self.prompt_only:
            end = min(end, account.request._prompt_len)
        return end // self.chunking.size

    def _offer(self, account: Account, count: int, table: Sequence[int]) -> Transfer | None:
        """Offer a request's next chunks, up to `count` in all; None: nothing of it is stored."""
        mark = account.mark
        if count <= mark:
            return None
        request = account.request
        names = account.names if account.ended else self.chunking.names(request, mark, count)
        if self.lower.tiers:
            self.lower.collect(self._now, self.step)
        chunks = self.host.offer(names, mark, account)
        if chunks is None:
            self.step.refused.append(request._id)
            self.oversized += len(names) > self.host.capacity and account not in self._refused
            self._refused.add(account)
            return None
        self._refused.discard(account)
        account.mark = count
        if not chunks:
            return None
        blocks = [table[n] for n in self.chunking.blocks([chunk.index for chunk in chunks])]
        places = self.chunking.blocks([chunk.place for chunk in chunks])
        return self._jobs.begin(Job(account, Direction.STORE, chunks, blocks), places)

    # -- ends --------------------------------------------------------------------------------------

    def leave(self, request: Request, finished: bool, computed: int) -> None:
        """A request ends, or leaves with so many tokens computed; its memory is freed next."""
        account = self.loads.accounts.pop(request, None) or Account(request)
        self.lower.read(account)
        arrived = self.loads.loaders.pop(request, None)
        if request._num_seqs == 1 and request._state is State.RUNNING and request._tables:
            account.table = list(request._tables[0])
            known = request._prompt_len + request.sampled_count
            if not self._memory.with_tokens:
                known = request.num_tokens
            end = max(request._prompt_len, request.num_tokens - 1) if finished else computed
            account.final = self._chunks_before(account, end, known)
            account.final = min(account.final, len(account.table) // self.blocks_per_chunk)
            account.names = self.chunking.names(request, account.mark, account.final)
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
                self.loads.end(job)
                if (placeholder := self._lingering.pop(number, None)) is not None:
                    freed.append(placeholder)
                elif number in failed and not job.waited_for:
                    del self.loads.loaders[account.request]
                    unloaded.append(account.request)
                elif not job.waited_for:
                    self.loads.loaders[account.request] = True
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
        for account in self.loads.accounts.values():
            if any(number not in self.jobs for number in account.jobs):
                raise IntegrityError(f"{account.request!r} has transfers that are not in flight")
        for request, arrived in self.loads.loaders.items():
            numbers = self.loads.account(request).jobs
            if not arrived and all(
                self.jobs[number].direction is Direction.STORE for number in numbers
            ):
                raise IntegrityError(f"{request!r} waits for a load that does not exist")


def _schedules(plan: StepPlan, request: Request) -> bool:
    """Whether a step computes for a request."""
    return request in plan.decodes or any(chunk._request is request for chunk in plan._chunks)
