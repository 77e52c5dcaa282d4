"""Outstanding work of a replica, kept as running sums for routers."""

from __future__ import annotations

from typing import Protocol

from pagedsim.core import Request, Scheduler, State, StepPlan
from pagedsim.core.request import RequestId
from pagedsim.sim.server import Recorder


class ReplicaRecorder(Recorder, Protocol):
    """A recorder of one replica, which may fail."""

    def undo(self) -> None:
        """Discard the last recorded step, which did not complete."""


class ReplicaLoad:
    """Recorder that updates the sums and forwards to the replica's own recorder.

    Summing over all waiting requests at each routing decision would be linear in the queue length.
    """

    def __init__(self, recorder: ReplicaRecorder) -> None:
        self.recorder = recorder
        self.again = recorder.again
        self.uncomputed = 0  # tokens of prompts, and of lost KV cache, not in any step so far
        self.arrivals = 0
        self._in_step = 0  # prefill tokens of the last step
        self._until = 0.0  # end of that step
        self._begun: set[RequestId] = set()  # requests with partly computed prompts
        self._again: set[RequestId] = set()  # preempted requests that wait for recomputation
        self._lost: dict[RequestId, int] = {}  # recomputed tokens of requests that are alive
        self.predicted_output = 0.0  # total predicted output tokens of requests that are alive

    def owed(self, now: float) -> int:
        """Prefill tokens still to be computed, those of the step in flight included."""
        return self.uncomputed + (self._in_step if now < self._until else 0)

    def arrived(self, request: Request) -> None:
        """A request arrives, none of it computed."""
        self.arrivals += 1
        self.uncomputed += request.num_tokens
        self.predicted_output += predicted(request)

    def migrated_in(self, request: Request) -> None:
        """A request arrives with its KV cache."""
        self.predicted_output += predicted(request)

    def migrated_out(self, request: Request) -> None:
        """A decoding request leaves for another replica."""
        self._lost.pop(request.id, None)
        self.predicted_output -= predicted(request)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step runs from `start` to `end`."""
        self._in_step = 0
        if plan.chunks:
            self._in_step, self._until = plan.prefill_tokens, end
            self.uncomputed -= plan.prefill_tokens + sum([cached for _, cached in plan.hits])
            for chunk in plan.chunks:
                if self._again and chunk.request.id in self._again:
                    self._again.discard(chunk.request.id)
                    self.uncomputed -= chunk.start  # was still in the prefix cache
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
            self.uncomputed += request.recomputed_tokens - before
            if request.recomputed_tokens > before:  # recomputed, not swapped out
                self._again.add(request.id)
                if request.id not in self._begun:
                    # It was decoding: its last sampled token is computed along with the others.
                    # A group of sequences is rebuilt without it.
                    self.uncomputed += request.width == 1
            self._begun.discard(request.id)

    def undo(self) -> None:
        """Discard the last step, which did not complete."""
        self.recorder.undo()

    def clear(self) -> None:
        """Reset after a failure of the replica."""
        self.uncomputed = self._in_step = 0
        self.predicted_output = 0.0
        for entries in (self._begun, self._again, self._lost):
            entries.clear()

    def left(self, request: Request) -> None:
        """A request has finished or was rejected."""
        self._lost.pop(request.id, None)
        self._begun.discard(request.id)
        self.predicted_output -= predicted(request)
        if request.state is not State.FINISHED:
            self.uncomputed -= request.num_tokens - request.computed
        self.recorder.left(request)


def predicted(request: Request) -> float:
    """Predicted output length, or else the request's limit; 0 if neither is given."""
    return request.predicted_len or request.max_tokens or 0.0
