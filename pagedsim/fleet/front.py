"""The door of a fleet: asks the router about everybody who comes, and lets them wait or in."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from functools import cached_property, partial
from typing import Literal

import simpy

from pagedsim.core import PagedsimError, Request, State
from pagedsim.core.memory.prefix_index import PrefixIndex
from pagedsim.core.source import Job
from pagedsim.fleet.apart import Apart
from pagedsim.fleet.handover import Handover
from pagedsim.fleet.member import Member
from pagedsim.fleet.view import Candidates, Seen, Stale
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Recorder
from policies.routing.router import Fetch, Left, Placed, Refusal, Router

Stage = Literal["prefill", "decode"]


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
        self.handover: Handover | None = None
        self._observing = type(router).observe is not Router.observe
        self._closed = False
        views = [Stale(one, staleness) if staleness else Seen(one) for one in members]
        self._views = views
        apart = any(one.role != "both" for one in members)
        self._candidates = {
            role: Candidates(
                [view for view in views if view.role in (role, "both")],
                views,
                role if apart else "both",
                self._index,
            )
            for role in ("prefill", "decode")
        }
        apart_in_time = any(member.own is not environment for member in members)
        self.apart = (
            Apart(members, shown=not (staleness or router.blind)) if apart_in_time else None
        )
        if self.apart is None:
            for member in members:
                member.server.done = self.done
                member.server.heard = partial(self._left, member)

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""
        self.here += 1
        if request.arrival is None:
            request.arrival = self.environment.now
        if self.held or not self._placed(request, output_len):
            self.held.append((request, output_len))
            if self.here == 1:
                raise PagedsimError(
                    f"{type(self.router).__name__}.route gave None, nobody, although all are idle"
                )

    def close(self) -> None:
        """Nobody arrives any more."""
        self._closed = True
        if self.apart is not None:
            self._end()
        else:
            self._end_if_empty()

    def _placed(self, request: Request, output_len: int) -> bool:
        """Whether somebody takes it, or it was refused; else it has to wait."""
        answer = self.asked(request, "prefill")
        if isinstance(answer, Refusal):
            self.refuse(request, answer.reason)
        elif answer is not None:
            answer.submit(request, output_len)
            if self.apart is not None:
                self.apart.came(answer)
        return answer is not None

    def asked(self, request: Request, role: Stage) -> Member | Refusal | None:
        """Whom the router names for what is to be done with a request."""
        now, candidates = self.environment.now, self._candidates[role]
        if self.apart is not None:
            self.apart.settle(now)
        answer = self.router.route(request, candidates, now)
        if answer is None and not self.router.holds:
            name = type(self.router).__name__
            raise PagedsimError(
                f"{name}.route gave None, nobody: a router after which requests may wait says so "
                "by holds = True"
            )
        if answer is None or isinstance(answer, Refusal):
            return answer
        if isinstance(answer, Fetch) or not (isinstance(answer, Seen) and answer in candidates):
            name = f"{type(self.router).__name__}.route"
            raise PagedsimError(
                f"{name} gave {answer!r}: must be one of the replicas that it was given, a "
                "Refusal, or None"
            )
        if self._observing:
            self.router.observe(Placed(request, self._views[answer.index], now))
        return self.members[answer.index]

    def refuse(self, request: Request, reason: str) -> None:
        """A request is not served."""
        request.state = State.REJECTED
        request.finish_reason = reason
        request.finished_at = self.environment.now
        self.recorder.left(request)
        self.here -= 1
        if event := self.done.pop(request.id, None):
            event.succeed()
        self._end_if_empty()

    def again(self, request: Request, output_len: int) -> None:
        """What a request had in memory was lost on its way: it computes all of it anew."""
        if self.held or not self._placed(request, output_len):
            self.held.append((request, output_len))

    @cached_property
    def _caches(self) -> PrefixIndex:
        return PrefixIndex([member.scheduler.memory for member in self.members])

    def _index(self) -> PrefixIndex:
        """What the prefix caches of all replicas hold; kept from when a router first asks."""
        return self._caches

    def moves(self, every: float) -> Generator[simpy.Event, None, None]:
        """Ask the router now and then who should go on elsewhere."""
        handover = self.handover
        assert handover is not None
        while not self.over:
            yield self.environment.timeout(every)
            for move in self.router.migrate(self._candidates["decode"], self.environment.now):
                source, target = (self.members[one.index] for one in (move.source, move.target))
                handover.migrate(move.request, source, target)

    @property
    def over(self) -> bool:
        """Whether nobody is here, and nobody will come."""
        return self._closed and not self.here

    def _left(self, member: Member, request: Request) -> None:
        """A request has left a replica for good."""
        self.here -= 1
        if self.handover is not None:
            self.handover.gone(request)
        if self._observing:
            self.router.observe(Left(request, self._views[member.index], self.environment.now))
        while self.held and self._placed(*self.held[0]):
            self.held.popleft()
        if self.handover is not None:
            self.handover.place()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self.over:
            self._end()

    def _end(self) -> None:
        for member in self.members:
            member.close()
