"""What a replica owes: sums that a router may ask for at any time, kept as steps go by."""

from __future__ import annotations

from typing import Protocol

from pagedsim.core import Request, Scheduler, State, StepPlan
from pagedsim.core.request import RequestId
from pagedsim.sim.server import Recorder


class Track(Recorder, Protocol):
    """A recorder of one replica, which may die."""

    def undo(self) -> None:
        """The step that was told of last did not end, and is not to be recorded."""


class Account:
    """Stands between a server and its recorder.

    A walk over all who wait, for each request that is routed, would make long queues longer.
    """

    def __init__(self, recorder: Track) -> None:
        self.recorder = recorder
        self.again = recorder.again
        self.wanted = 0  # tokens of prompts, and of what was lost, that no step has computed
        self.arrivals = 0
        self._under_way = 0  # of those computed, the ones of the last step
        self._until = 0.0  # when that ends
        self._begun: set[RequestId] = set()  # of whose prompts a part is computed
        self._again: set[RequestId] = set()  # who lost its memory and waits
        self._lost: dict[RequestId, int] = {}  # what was lost of who is alive
        self.promised = 0.0  # tokens that answers of all who are alive will have, as predicted

    def owed(self, now: float) -> int:
        """Tokens that are still to be computed before those who wait can decode."""
        return self.wanted + (self._under_way if now < self._until else 0)

    def came(self, request: Request) -> None:
        """A request arrives; all of it is to be computed."""
        self.arrivals += 1
        self.wanted += request.num_tokens
        self.promised += predicted(request)

    def boarded(self, request: Request) -> None:
        """One comes with its keys and values."""
        self.promised += predicted(request)

    def went(self, request: Request) -> None:
        """One that decodes goes on elsewhere."""
        self._lost.pop(request.id, None)
        self.promised -= predicted(request)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step is carried out."""
        self._under_way = 0
        if plan.chunks:
            self._under_way, self._until = plan.prefill_tokens, end
            self.wanted -= plan.prefill_tokens + sum([cached for _, cached in plan.hits])
            for chunk in plan.chunks:
                if self._again and chunk.request.id in self._again:
                    self._again.discard(chunk.request.id)
                    self.wanted -= chunk.start  # was still in the cache
                if not chunk.samples:
                    self._begun.add(chunk.request.id)
                elif self._begun:
                    self._begun.discard(chunk.request.id)
        if plan.preemptions:
            self._lose(plan)
        self.recorder.step(plan, start, end, scheduler)

    def _lose(self, plan: StepPlan) -> None:
        for request, *_ in plan.preemptions:
            before = self._lost.get(request.id, 0)
            self._lost[request.id] = request.recomputed_tokens
            self.wanted += request.recomputed_tokens - before
            if request.recomputed_tokens > before:  # and not swapped out
                self._again.add(request.id)
                if request.id not in self._begun:
                    # It had decoded: the token that was sampled last is computed with the others.
                    # A group is rebuilt without it.
                    self.wanted += request.width == 1
            self._begun.discard(request.id)

    def undo(self) -> None:
        """The last step did not end."""
        self.recorder.undo()

    def clear(self) -> None:
        """All who were here are lost."""
        self.wanted = self._under_way = 0
        self.promised = 0.0
        for those in (self._begun, self._again, self._lost):
            those.clear()

    def left(self, request: Request) -> None:
        """A request leaves for good."""
        self._lost.pop(request.id, None)
        self._begun.discard(request.id)
        self.promised -= predicted(request)
        if request.state is not State.FINISHED:
            self.wanted -= request.num_tokens - request.computed
        self.recorder.left(request)


def predicted(request: Request) -> float:
    """Tokens of its answer, as far as anybody says."""
    return request.predicted_len or request.max_tokens or 0.0
