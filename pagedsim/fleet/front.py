"""The door of a fleet: asks the router about everybody who comes, and lets them wait or in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import simpy

from pagedsim.core import PagedsimError, Request, State
from pagedsim.core.source import Job
from pagedsim.fleet.member import Member
from pagedsim.fleet.view import Candidates, Seen, Stale
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Recorder
from policies.routing.router import Left, Placed, Refusal, Router


class Front:
    """Where the requests of a fleet come in."""

    def __init__(
        self,
        environment: Environment,
        members: Sequence[Member],
        router: Router,
        recorder: Recorder,
        staleness: float = 0.0,
    ) -> None:
        self.environment = environment
        self.members = members
        self.router = router
        self.recorder = recorder
        self.done: dict[object, simpy.Event] = {}
        self.held: deque[Job] = deque()  # who waits for a replica
        self.here = 0  # requests that are in the fleet
        self._observing = type(router).observe is not Router.observe
        self._closed = False
        self._views = [Stale(one, staleness) if staleness else Seen(one) for one in members]
        self._candidates = Candidates(self._views, self._views)
        for member in members:
            member.server.done = self.done
            member.server.heard = lambda request, member=member: self._left(request, member)

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""
        self.here += 1
        if request.arrival is None:
            request.arrival = self.environment.now
        if self.held or not self._placed(request, output_len):
            self.held.append((request, output_len))

    def close(self) -> None:
        """Nobody arrives any more."""
        self._closed = True
        self._end_if_empty()

    def _placed(self, request: Request, output_len: int) -> bool:
        """Whether somebody takes it, or it was refused; else it has to wait."""
        now = self.environment.now
        answer = self.router.route(request, self._candidates, now)
        if answer is None:
            return False
        if isinstance(answer, Refusal):
            self._refuse(request, answer.reason)
            return True
        member = self._member(answer)
        if self._observing:
            self.router.observe(Placed(request, self._views[member.index], now))
        member.submit(request, output_len)
        return True

    def _member(self, answer: object) -> Member:
        if isinstance(answer, Seen) and answer in self._views:
            return self.members[answer.index]
        name = f"{type(self.router).__name__}.route"
        raise PagedsimError(
            f"{name} gave {answer!r}: must be one of the replicas that it was given, a Refusal, "
            "or None"
        )

    def _refuse(self, request: Request, reason: str) -> None:
        request.state = State.REJECTED
        request.finish_reason = reason
        request.finished_at = self.environment.now
        self.recorder.left(request)
        self.here -= 1
        if event := self.done.pop(request.id, None):
            event.succeed()
        self._end_if_empty()

    def _left(self, request: Request, member: Member) -> None:
        """A request has left a replica for good."""
        self.here -= 1
        if self._observing:
            self.router.observe(Left(request, self._views[member.index], self.environment.now))
        while self.held and self._placed(*self.held[0]):
            self.held.popleft()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._closed and not self.here:
            for member in self.members:
                member.server.close()
