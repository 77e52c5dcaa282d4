"""SGLang's batching: prefills before decodes, and decodes that are retracted where memory ends.

A step is a batch of prefills or of decodes; with `mixed_chunk` a batch of prefills has the decodes
beside it. Prefills are admitted in the order of the queue, until a budget is spent (`budget.py`) or
the batch has `max_seqs` requests. How much is reserved for answers is the *new-token ratio*, which
falls with each step of decodes, and rises where decodes did not fit: then the shortest answers are
*retracted*, that is preempted and queued again behind all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, SupportsFloat, cast

from pagedsim.core.batching.base import AdmissionChanges, Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, require_flag, require_number, require_whole
from pagedsim.core.memory import Memory
from pagedsim.core.memory.reserved import ReservedMemory
from pagedsim.core.plan import StepPlan, sampled_in
from pagedsim.core.policy import Policy, overrides
from pagedsim.core.queues import Queues
from pagedsim.core.request import Rank, Request
from pagedsim.sglang.budget import CLIP, AddResult, IgnoreEosCheck, PrefillBudget
from pagedsim.sglang.hicache import HiCache
from pagedsim.sglang.radix import RadixMemory
from pagedsim.sglang.storage import StoredHiCache

RATIO = 0.7
"""The new-token ratio at first, times the conservativeness."""
LOWEST = 0.14
"""The share of it to which it falls."""
DECAY_STEPS = 600
"""Steps of decodes in which it falls so far."""
STEPS_AFTER_RETRACTION = 20
"""Steps of decodes for which a retraction leaves memory."""
REFRESH_STEPS = 32
REFRESHED = 128
"""Every so many batches of prefills, the prefixes of the first requests in the queue count as used,
under policies that do not look them up."""
MORE_THAN_ANY = 1 << 30


@mypyc_attr(allow_interpreted_subclasses=True)
class SGLang(Batching):
    """Prefill batches before decodes, under SGLang's budgets, with retraction."""

    admission_changes: ClassVar[AdmissionChanges] = "never"
    displaces_by_default: ClassVar[bool] = True
    requeues_last: ClassVar[bool] = True
    joins_midway: ClassVar[bool] = False
    hands_transfers: ClassVar[bool] = True

    def __init__(
        self,
        chunked_prefill_size: int | None = 8192,
        mixed_chunk: bool = False,
        conservativeness: SupportsFloat = 1.0,
        prefill_max_requests: int | None = None,
        preemption_threshold: SupportsFloat = 10,
        retraction: Literal["length", "rank"] = "length",
        idle_reset: bool = True,
    ) -> None:
        """`chunked_prefill_size` are the tokens of a batch of prefills, None: no prompt is cut;
        `mixed_chunk` puts the decodes beside. `conservativeness` scales the new-token ratio;
        `prefill_max_requests` bounds the requests of a batch of prefills.

        Where the policy displaces, a waiting request preempts running ones whose ranks are behind
        its own by more than `preemption_threshold`. `retraction` takes the shortest answers first,
        or with "rank" the last in rank. `idle_reset`: after a time without requests the new-token
        ratio is what it was at first.
        """
        if chunked_prefill_size is not None:
            require_whole("chunked_prefill_size", chunked_prefill_size, 1)
        if prefill_max_requests is not None:
            require_whole("prefill_max_requests", prefill_max_requests, 1)
        if retraction not in ("length", "rank"):
            raise ConfigError(f"retraction={retraction}: must be length or rank")
        self.chunked_prefill_size = chunked_prefill_size
        self.mixed_chunk = require_flag("mixed_chunk", mixed_chunk)
        if mixed_chunk and chunked_prefill_size is None:
            raise ConfigError("mixed_chunk=true: needs chunked_prefill_size, the tokens of a step")
        self.prefill_max_requests = prefill_max_requests
        self.preemption_threshold = require_number("preemption_threshold", preemption_threshold, 0)
        self.retraction = retraction
        self.idle_reset = require_flag("idle_reset", idle_reset)
        scaled = RATIO * require_number("conservativeness", conservativeness, 0)
        self.first_ratio = min(scaled, 1.0)
        self.lowest_ratio = min(self.first_ratio * LOWEST, 1.0)
        self._decay = (self.first_ratio - self.lowest_ratio) / DECAY_STEPS
        self.ratio = self.first_ratio
        """The new-token ratio."""
        self.full = False
        """Whether no request is admitted until one leaves the batch."""
        self.chunked: Request | None = None
        """The request whose prompt goes on in the next step."""
        self._prefilled = False  # whether the last step had prefills
        self._decoding = 0  # requests that decoded, beside prefills or before them
        self._batch = 0  # requests in the batch after the last step was composed
        self._prefill_tokens = 0  # of the last batch of prefills
        self._founding_tokens = 0  # of the one with which the batch of decodes began
        self._refreshes = 0
        self._caches = False  # whether the memory has a prefix cache
        self._refreshing = False  # whether it evicts what was used least recently
        self._tiers: HiCache | None = None
        self._storage: StoredHiCache | None = None
        self._passed: list[Request] = []  # in this step, since they wait for the storage
        self._sampling: tuple[StepPlan | None, set[Request]] = (None, set())  # plan in flight
        self._matched: dict[Request, tuple[int, int]] = {}  # tokens, and cached: when last tried

    # -- limits ------------------------------------------------------------------------------------

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        return 16384

    def validate_limits(self, queues: Queues) -> None:
        if queues.preemption.swaps:
            raise ConfigError("batching=sglang retracts requests: choose preemption=recompute")
        if isinstance(queues.memory, ReservedMemory):
            raise ConfigError(
                f"batching=sglang takes memory page by page, which {type(queues.memory).__name__} "
                "does not: choose memory=radix, prefix or paged"
            )
        page = queues.memory.block_size
        if (chunk := self.chunked_prefill_size) is not None and chunk % page:
            raise ConfigError(
                f"chunked_prefill_size={chunk}: must be a multiple of block_size={page}"
            )
        self._caches = type(queues.memory).lookup is not Memory.lookup
        memory = queues.memory
        self._refreshing = not isinstance(memory, RadixMemory) or memory.is_lru
        self._tiers = memory if isinstance(memory, HiCache) else None
        self._storage = memory if isinstance(memory, StoredHiCache) else None

    def displacing(self, policy: Policy) -> bool:
        return overrides(policy, "rank") and super().displacing(policy)

    def sorts_late(self, policy: Policy) -> bool:
        return True

    def longest(self, queues: Queues, request: Request) -> int:
        return request.prompt_len + self._most_generated(queues, request)

    def never_fits(self, queues: Queues, request: Request) -> str | None:
        # An answer that is too long is cut, not refused.
        if request.num_seqs > 1:
            return f"{request.num_seqs} sequences: batching=sglang serves one of each request"
        if request.prompt_len > queues.max_model_len:
            return f"prompt of {request.prompt_len} tokens: max_model_len is {queues.max_model_len}"
        memory = queues.memory
        capacity = memory.total * memory.block_size
        if request.prompt_len + memory.block_size < capacity:
            return None
        return (
            f"prompt of {request.prompt_len} tokens: memory has {capacity}, of which a block of "
            f"{memory.block_size} stays free"
        )

    # -- a step ------------------------------------------------------------------------------------

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        if self._tiers is not None:
            self._tiers.begin_stores()
        if self._storage is not None:
            self._storage.poll(queues.waiting)
        self._open(queues)
        self._prefilled = self._prefill(queues, plan)
        if not self._prefilled:
            self._decode(queues, plan)
        self._batch = len(queues.running)
        if self._tiers is not None:
            plan._transfers, plan._flushed = self._tiers.take_transfers()
        if self._storage is not None:
            plan._lower_moves = self._storage.take_moves()

    def closed(self, plan: StepPlan) -> int | None:
        if self._storage is not None:
            return 0  # look-ups are sent again after a number of steps
        return MORE_THAN_ANY if self.full else 0

    def idle(self) -> None:
        if self.idle_reset:
            self.ratio = self.first_ratio

    def _open(self, queues: Queues) -> None:
        """Admission is open again if a request has left the batch, or the batch is a new one."""
        if self.chunked is not None and self.chunked not in queues.running:
            self.chunked = None  # aborted, or withdrawn
        founded = self._prefilled and not self._decoding
        if founded and len(queues.running) > (self.chunked is not None):
            self._founding_tokens = self._prefill_tokens
        left = len(queues.running) < self._batch
        if left or founded or (self._prefilled and self.chunked is not None):
            self.full = False
        if self.chunked is not None:
            queues.memory.filled(self.chunked, self.chunked.computed)

    def _running(self, queues: Queues, plan: StepPlan) -> list[Request]:
        """The batch without the prefills, and without the request whose prompt goes on."""
        prefilled = {self.chunked, *(chunk.request for chunk in plan.chunks)}
        return [request for request in queues.running if request not in prefilled]

    # -- prefills ----------------------------------------------------------------------------------

    def _prefill(self, queues: Queues, plan: StepPlan) -> bool:
        """Compose a batch of prefills; returns whether there is one."""
        displacing, chunked = queues.displacing, self.chunked
        running = len(queues.running) - (chunked is not None)
        self._decoding = running
        if displacing or not running:
            self.full = False
        if chunked is None:
            if self.full or not queues.waiting:
                return False
            if running >= queues.max_seqs and not displacing:
                self.full = True
                return False
        self._sort(queues)
        budget = self._budget(queues, plan)
        if chunked is not None:
            self._continue(queues, plan, budget, chunked)
        self._admit(queues, plan, budget)
        if self._passed:
            queues.waiting.pass_over(self._passed)
            self._passed = []
        if self._storage is not None:
            for victim in plan.preemptions:
                self._storage.queued(victim.request)
        if not plan.chunks:
            return False
        self._allocate(queues, plan)
        if self.mixed_chunk and self._decoding:
            self._mix(queues, plan)
        self._prefill_tokens = plan.prefill_tokens + plan.decode_count
        return True

    def _sort(self, queues: Queues) -> None:
        waiting, memory = queues.waiting, queues.memory
        before = queues.prefix_lookups
        waiting.arrange()
        if not waiting or queues.prefix_lookups != before or not self._caches:
            return  # the policy has looked up prefixes itself
        if not self._refreshing:
            return
        if self._refreshes % REFRESH_STEPS == 0:
            for request in reversed(list(waiting)[:REFRESHED]):
                memory.cached_tokens(request)
        self._refreshes += 1

    def _budget(self, queues: Queues, plan: StepPlan) -> PrefillBudget:
        running = self._running(queues, plan)
        mixed_decodes = len(running) if self.mixed_chunk else 0
        return PrefillBudget(
            queues.memory,
            tokens=queues.max_batched_tokens,
            chunk=self.chunked_prefill_size,
            mixed_decodes=mixed_decodes,
            reserved=self._reserved(queues, running),
        )

    def _known(self, queues: Queues, request: Request) -> int:
        """Tokens of an answer whose step has been completed."""
        return request.generated - (request in self._under_way(queues))

    def _under_way(self, queues: Queues) -> Collection[Request]:
        """The requests that sample in the step that is in flight."""
        if not queues.in_flight:
            return ()
        plan = queues.in_flight[-1]
        if self._sampling[0] is not plan:
            self._sampling = plan, set(sampled_in(plan))
        return self._sampling[1]

    def _reserved(self, queues: Queues, running: Sequence[Request]) -> list[float]:
        """Tokens that are reserved for the rest of the answer of each running request."""
        under_way, ratio = self._under_way(queues), self.ratio
        reserved: list[float] = []
        for request in running:
            left = self._answer(queues, request) - request.generated
            if request in under_way:
                left += 1
            share = 1.0 if request.params.ignore_eos else ratio
            reserved.append((left if left < CLIP else CLIP) * share)
        return reserved

    def _ratio_of(self, request: Request) -> float:
        return 1.0 if request.params.ignore_eos else self.ratio

    def _answer(self, queues: Queues, request: Request) -> int:
        """Tokens that a request may generate; 0 if it ends with its first."""
        most, asked = self._most_generated(queues, request), request.params.max_tokens
        return asked if asked and asked < most else most

    def _most_generated(self, queues: Queues, request: Request) -> int:
        """What an answer is cut to: what could ever be admitted, with a page and a token free."""
        memory, prompt = queues.memory, request.prompt_len
        page = memory.block_size
        capacity = memory.total * page
        longest = queues.max_model_len if queues.max_model_len < capacity else capacity
        most = longest - 2 - prompt
        room = capacity - -(-prompt // page) * page - page - 1
        return max(most if most < room else room, 0)

    def _continue(
        self, queues: Queues, plan: StepPlan, budget: PrefillBudget, request: Request
    ) -> None:
        """The next chunk of the prompt that was cut; it must advance, so that it ends and frees
        its memory."""
        assert budget.chunk is not None
        available = min(budget.chunk, int(budget.memory))
        left = request.num_tokens - request.computed
        count = min(left, available if available > 0 else budget.chunk)
        queues.advance(plan, request, count)
        whole = count == left
        budget.take(count, min(self._answer(queues, request), CLIP) if whole else 0)
        if whole:
            self.chunked = None

    def _admit(self, queues: Queues, plan: StepPlan, budget: PrefillBudget) -> None:
        """Admit requests in the order of the queue, until one does not fit."""
        fixed = IgnoreEosCheck(
            lambda one: self._answer(queues, one) * self._ratio_of(one),
            lambda one: self._known(queues, one),
        )
        candidates = len(queues.waiting)
        while candidates and budget.result() is not AddResult.FULL:
            candidates -= 1
            request = queues.waiting.head
            if reason := self.refused(queues, request):
                queues.reject(plan, reason)
                continue
            running = self._decoding
            if len(plan.chunks) >= queues.max_seqs - running:
                self.full = True
            if self.full and not (
                queues.displacing and self._displace(queues, plan, budget, request)
            ):
                return
            if self._waits_for_storage(queues, request):
                self._passed.append(queues.waiting.pop())
                continue
            result = self._admit_one(queues, plan, budget, request, fixed)
            if result is AddResult.OPEN:
                continue
            if result is AddResult.NO_MEMORY:
                self.full = bool(plan.chunks) or self._decoding > 0
            return

    def _waits_for_storage(self, queues: Queues, request: Request) -> bool:
        """Whether a request whose turn it is waits for what the storage may have of it."""
        storage = self._storage
        if storage is None:
            return False
        if not storage.ready(request, queues.now):
            return True
        matched = len(storage.touch(request)) * storage.block_size + storage.loadable(request)
        return storage.shrunk(request, matched)

    def _admit_one(
        self,
        queues: Queues,
        plan: StepPlan,
        budget: PrefillBudget,
        request: Request,
        fixed: IgnoreEosCheck,
    ) -> AddResult:
        """Admit a request if it fits; the result is on the next one."""
        memory, tiers = queues.memory, self._tiers
        hit = memory.touch(request)
        loadable = memory.loadable(request) if tiers is not None else 0
        if queues.displacing:
            self._matched[request] = (request.num_tokens, len(hit) * memory.block_size)
        if (most := self.prefill_max_requests) is not None and len(plan.chunks) >= most:
            return AddResult.FULL
        if request.params.ignore_eos and not self._caches:
            count = self._fixed(queues, plan, budget, request, fixed)
        else:
            count = self._fitting(queues, plan, budget, request, hit, loadable)
        if isinstance(count, AddResult):
            return count
        if not queues.admits(request):
            return AddResult.FULL
        if tiers is not None and loadable:
            if loaded := tiers.load(request):
                hit = [*hit, *loaded]
            else:
                count = self._fitting(queues, plan, budget, request, hit, 0)
                if isinstance(count, AddResult):
                    return count
        queues.start(plan, count, hit, allocate=False)
        if self._storage is not None:
            self._storage.admitted(request)
        whole = len(hit) * memory.block_size + count == request.num_tokens
        budget.take(count, min(self._answer(queues, request), CLIP) if whole else 0)
        if not whole:
            self.chunked = request
        return budget.result()

    def _fixed(
        self,
        queues: Queues,
        plan: StepPlan,
        budget: PrefillBudget,
        request: Request,
        fixed: IgnoreEosCheck,
    ) -> int | AddResult:
        """Tokens that a request computes now whose answer has a fixed length, without a cache."""
        left = request.num_tokens
        if budget.paged(left) + budget.page > min(budget.memory, budget.memory_now):
            return AddResult.NO_MEMORY
        others = [*self._running(queues, plan), *(chunk.request for chunk in plan.chunks)]
        if not fixed.fits(request, others, budget):
            return AddResult.NO_MEMORY
        return left if budget.chunk is None else min(left, budget.chunk)

    def _fitting(
        self,
        queues: Queues,
        plan: StepPlan,
        budget: PrefillBudget,
        request: Request,
        hit: Sequence[int],
        loadable: int,
    ) -> int | AddResult:
        """Tokens that a request computes now behind its hit and what can be loaded; loads take
        memory, too."""
        page = budget.page
        left = request.num_tokens - len(hit) * page
        answer = self._answer(queues, request) - request.generated
        wanted = left + min(max(answer, 0), CLIP) + page
        if wanted >= budget.memory - queues.memory.unheld(request, hit) * page:
            return AddResult.NO_MEMORY
        cached = len(hit) * page + loadable
        count = self._count(plan, budget, cached, request.num_tokens - cached)
        return count if count > 0 else AddResult.FULL

    def _count(self, plan: StepPlan, budget: PrefillBudget, cached: int, left: int) -> int:
        """Tokens that a request computes now, of those that are `left`; 0 if none."""
        paged, page = budget.paged(left), budget.page
        if budget.chunk is None:
            # The first prompt may be longer than a step.
            return 0 if plan.chunks and paged >= budget.tokens else left
        if paged <= budget.chunk:
            return left
        return (cached + budget.chunk // page * page) // page * page - cached

    def _allocate(self, queues: Queues, plan: StepPlan) -> None:
        """Allocate what the prefills compute. What is evicted for them is counted with a page more
        for each."""
        memory = queues.memory
        page = memory.block_size
        tokens = plan.prefill_tokens + (len(plan.chunks) * page if page > 1 else 0)
        memory.reclaim(memory.blocks_for(tokens))
        for chunk in plan.chunks:
            queues.allocate(plan, chunk.request, chunk.context)

    def _mix(self, queues: Queues, plan: StepPlan) -> None:
        """Put the decodes beside the prefills if they fit; the batch begins with the prefills
        then."""
        if queues.leaving:
            self.full = False
            self._decoding -= len(queues.leaving)
        if not self._decoding or not self._decodes_fit(queues):
            return
        self._grow(queues, plan)
        queues.decode(plan)
        chunks = [chunk.request for chunk in plan.chunks]
        queues.seat([*chunks, *(request for request in queues.running if request not in chunks)])
        self._decoding = 0

    # -- priorities --------------------------------------------------------------------------------

    def _displace(
        self, queues: Queues, plan: StepPlan, budget: PrefillBudget, request: Request
    ) -> bool:
        """Preempt running requests whose ranks are far behind, if that makes room for `request`."""
        rank = queues.order(request)[0]
        tokens, cached = self._matched.get(request, (0, 0))
        lacking = tokens - cached + min(self._answer(queues, request), CLIP) - budget.memory
        running = self._running(queues, plan)
        reserved = dict(zip(running, self._reserved(queues, running), strict=True))
        ranks = {victim: queues.order(victim)[0] for victim in running}
        victims: set[Request] = set()
        for victim in sorted(running, key=lambda other: (ranks[other], other._order), reverse=True):
            if not _behind(ranks[victim], rank, self.preemption_threshold):
                break
            victims.add(victim)
            lacking -= reserved[victim]
            if lacking <= 0:
                break
        if not victims or lacking > 0:
            return False
        count = 0
        for victim in running:
            if victim in victims:
                count += 1
                budget.reserved -= reserved[victim]
                self._preempt(queues, plan, victim, request, len(running) - count, displaced=True)
        self._decoding -= count
        return True

    def _preempt(
        self,
        queues: Queues,
        plan: StepPlan,
        victim: Request,
        by: Request,
        others: int,
        displaced: bool = False,
    ) -> None:
        """Preempt a request, and leave memory for the next steps of the others."""
        memory = queues.memory
        if queues.displacing:
            tokens, _ = self._matched.get(victim, (victim.num_tokens, 0))
            self._matched = {other: hit for other, hit in self._matched.items() if other.alive}
            self._matched[victim] = (tokens, 0)
        queues.preempt(plan, victim, by, displaced)
        queues.discard_tokens(victim)
        memory.reclaim(memory.blocks_for(others * STEPS_AFTER_RETRACTION))

    # -- decodes -----------------------------------------------------------------------------------

    def _decode(self, queues: Queues, plan: StepPlan) -> None:
        if queues.leaving:
            self.full = False  # their places are free when their last tokens have come
        if len(queues.running) == len(queues.leaving):
            return
        fits = self._decodes_fit(queues)
        if not fits and queues.leaving:
            return  # what leaves makes room
        if not fits:
            self._retract(queues, plan)
            if not self._decodes_fit(queues):
                return  # the last one's memory is locked by copies to the host, which end
        self._go_on(queues, plan, fits)
        queues.decode(plan)

    def grow(self, queues: Queues, plan: StepPlan) -> bool:
        if queues.leaving or self._writes_back(queues) or not self._decodes_fit(queues):
            return False
        return self._go_on(queues, plan, fits=True)

    def _writes_back(self, queues: Queues) -> bool:
        """Whether a step of decodes may evict what is written to the host for that: a plan that is
        repeated begins no copies."""
        tiers = self._tiers
        if tiers is None or not tiers.writes_back:
            return False
        return tiers.free - tiers.cached < queues.clock.requests

    def _go_on(self, queues: Queues, plan: StepPlan, fits: bool) -> bool:
        """Allocate a step of decodes alone; where all fitted, less is reserved from now on."""
        if fits:
            self.ratio = max(self.ratio - self._decay, self.lowest_ratio)
        # SGLang 0.5.23 counts with each such step, too, what the prefill computed with which the
        # batch began: an order by tokens (hrrn) depends on it.
        queues.prefill_tokens += self._founding_tokens
        return self._grow(queues, plan)

    def _decodes_fit(self, queues: Queues) -> bool:
        due = len(queues.clock.memory.get(queues.clock.tick, ()))
        queues.memory.reclaim(due)
        return due <= queues.memory.free

    def _grow(self, queues: Queues, plan: StepPlan) -> bool:
        queues.memory.reclaim(queues.clock.requests)  # as if each needed a page
        return queues.grow(plan, 0)

    def _retract(self, queues: Queues, plan: StepPlan) -> None:
        """Retract requests until the others fit."""
        kept = self._by_retraction(queues, list(queues.running))
        while len(kept) > 1:
            self._preempt(queues, plan, kept.pop(), kept[0], len(kept))
            if self._decodes_fit(queues):
                break
        queues.seat(kept)
        if self._storage is not None:
            for victim in plan.preemptions:
                self._storage.queued(victim.request)
        generated = sum(self._known(queues, request) for request in kept)
        answers = sum(self._answer(queues, request) for request in kept)
        self.ratio = min(1.0, (generated + STEPS_AFTER_RETRACTION * len(kept)) / (answers + 1))
        self.full = False

    def _by_retraction(self, queues: Queues, running: list[Request]) -> list[Request]:
        """Running requests, those last that are retracted first."""

        def length(request: Request) -> tuple[int, int]:
            return (self._known(queues, request), -request.prompt_len)

        if self.retraction == "length":
            return sorted(running, key=length, reverse=True)
        ranks = {request: queues.order(request)[0] for request in running}
        return sorted(sorted(running, key=length, reverse=True), key=ranks.__getitem__)


def _behind(rank: Rank, other: Rank, threshold: float) -> bool:
    """Whether a rank is behind another by more than the threshold, which goes for numbers.

    Raises TypeError for a number and a tuple, which cannot be compared.
    """
    if isinstance(rank, tuple) and isinstance(other, tuple):
        return rank > other
    return float(cast(float, rank)) - float(cast(float, other)) > threshold
