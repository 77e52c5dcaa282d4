"""How waiting requests are served where some of their tokens may come from a host tier.

Holding requests come first: they own blocks. A request whose answer is deferred, or whose load has
begun, keeps its place, and those behind it are tried; any other reason not to admit one ends the
admissions of the step.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedsim.core.memory import Fit
from pagedsim.core.offload.loads import DEFERRED, Loads
from pagedsim.core.plan import StepPlan, prefill_left, prefill_tokens, span
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request


class LoadingAdmission:
    """The admissions of one step."""

    def __init__(
        self,
        queues: Queues,
        loads: Loads,
        plan: StepPlan,
        longest_chunk: int,
        refused: Callable[[Queues, Request], str | None],
    ) -> None:
        """`longest_chunk`: of a prompt in one step, if not 0; `refused`: see `Batching`."""
        self._queues = queues
        self._refused = refused
        self._memory = queues.memory
        self._loads = loads
        self._plan = plan
        self._longest_chunk = longest_chunk
        self._holding: list[Request] = []  # they go back to the front of their queue, in this order
        self._deferred: list[Request] = []  # and these

    def admit(self, budget: int) -> int:
        """Admit the next request; returns the tokens that it gets, 0 if none is admitted."""
        queues = self._queues
        while len(queues.holding):
            request = queues.holding.head
            if self._loads.arrived(request):
                return self._join(request, budget)
            self._holding.append(queues.holding.pop())
        while len(queues.waiting):
            request = queues.waiting.head
            if reason := self._refused(queues, request):
                queues.reject(self._plan, reason)
            elif queues.seats + request._num_seqs > queues.max_seqs:
                break
            elif (count := self._admit_waiting(request, budget)) is not None:
                return count
        return 0

    def end(self) -> None:
        """Put back what keeps its place."""
        for request in reversed(self._holding):
            self._queues.holding.put_back(request)
        for request in reversed(self._deferred):
            self._queues.waiting.put_back(request)

    def _chunk(self, left: int, budget: int) -> int:
        return min(left, self._longest_chunk or left, budget)

    def _join(self, request: Request, budget: int) -> int:
        """Admit the head of holding, whose load has ended."""
        queues, memory = self._queues, self._memory
        queues.loaded(request)
        if memory.blocks_needed(request, span(request)) > memory.free:
            return 0
        count = self._chunk(prefill_left(request, memory), budget)
        queues.join(self._plan, count)
        self._loads.admitted.append(request)
        return count

    def _admit_waiting(self, request: Request, budget: int) -> int | None:
        """Admit the head of waiting; returns the tokens that it gets, 0 if it does not fit, and
        None if the next one is to be tried."""
        queues, memory, loads = self._queues, self._memory, self._loads
        hit = memory.lookup(request)
        cached = len(hit) * memory.block_size
        loaded = loads.lookup(request, cached)
        if loaded == DEFERRED:
            self._deferred.append(queues.waiting.pop())
            return None
        waits = loaded > 0 and loads.waits_for(request, loaded)
        if memory.fit(request, span(request), queues.guarded(hit), hit) is not Fit.NOW:
            return 0
        if loaded and not waits:
            if memory.fit(request, cached + loaded, self._claimed(), hit) is not Fit.NOW:
                return 0
            if not queues.admits(request):
                return 0
            self._holding.append(queues.hold_for_load(cached + loaded, hit))
            loads.begin(request, loaded, wait=False)
            return None
        if not queues.admits(request):
            return 0
        left = prefill_tokens(request, memory) - cached - loaded
        count = self._chunk(left, budget)
        queues.start(self._plan, count, hit, loaded=loaded)
        loads.begin(request, loaded, wait=waits)
        loads.admitted.append(request)
        return count

    def _claimed(self) -> int:
        """Blocks that prompts in progress still lack."""
        queues, memory = self._queues, self._memory
        unfinished = (*queues.prefilling, *queues.holding, *self._holding)
        return sum([memory.blocks_needed(request, span(request)) for request in unfinished])
