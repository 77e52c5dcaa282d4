"""Learning to rank."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from pagedsim.core import Admitted, Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_flag, require_whole
from pagedsim.core.policy import Arrived, RankChanges
from pagedsim.policies.mlfq import Due


class LTR(Policy):
    """The lowest predicted rank goes first; after a long idle time a request is first for a while.

    Waiting, running and swapped requests are one order. A request that was in no step for `starve`
    steps is urgent until it has generated `period` more tokens. A prediction need only order
    requests rightly.
    """

    paper = "Fu et al., Efficient LLM Scheduling by Learning to Rank, NeurIPS 2024 (2408.15792)"
    needs = ("predictor",)
    rank_changes: RankChanges = "when stale"

    def __init__(self, starve: int = 256, period: int = 32, displace: bool = True) -> None:
        self.starve = require_whole("starve", starve, 1)
        self.period = require_whole("period", period, 1)
        self.displacing = require_flag("displace", displace)
        self._idle: dict[Request, int] = {}  # by request not in a plan: since which step
        self._urgent: dict[Request, int] = {}  # by urgent request: up to how many tokens
        self._due = Due()  # by the number of the step
        self._step = 0

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        self._step = state.step
        guess = request.predicted_len
        return (-1 if self._is_urgent(request) else 0, inf if guess is None else guess)

    def _is_urgent(self, request: Request) -> bool:
        return self._urgent.get(request, 0) > request.generated

    def stale(self, state: ServerState) -> Collection[Request]:
        self._step = step = state.step
        moved = []
        for _, request in self._due.take(step):
            urgent = self._is_urgent(request)
            if (since := self._idle.get(request)) is not None:
                if since + self.starve <= step and not urgent:
                    self._urgent[request] = request.generated + self.period
                    moved.append(request)
            elif urgent:
                self._due.note(request, step + self._urgent[request] - request.generated)
            elif self._urgent.pop(request, None) is not None:
                moved.append(request)
        return moved

    def observe(self, event: Event) -> None:
        request = event.request
        match event:
            case Arrived() | Preempted():
                self._idle[request] = self._step
                self._due.note(request, self._step + self.starve)
            case Admitted():
                self._idle.pop(request, None)
                if self._is_urgent(request):
                    self._due.note(request, self._step + 1)
            case Left():
                for of in (self._idle, self._urgent):
                    of.pop(request, None)
