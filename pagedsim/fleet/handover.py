"""Requests that go on at another replica, their keys and values with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import simpy

from pagedsim.core import Request, RequestId, State, StepPlan
from pagedsim.core.errors import RequestError
from pagedsim.fleet.link import Fabric
from pagedsim.fleet.member import Member
from policies.routing.router import Refusal

if TYPE_CHECKING:
    from pagedsim.fleet.front import Front

STAGES = 3
"""Copies of a request that moves while it decodes, at most, the last of which it waits for."""
LAST_BLOCKS = 16
"""No more than so many blocks are left to the last one, if the copies before can bring it there."""

Wait = Generator[simpy.Event, None, None]


@dataclass
class Parted:
    """A request that waits for a replica that decodes."""

    request: Request
    source: Member
    since: float
    """When the step began that computed the end of its prompt."""
    left: float
    """When that was computed."""


@dataclass(frozen=True)
class Journey:
    """How a request came to where it decodes."""

    source: int
    left: float
    """When it could have gone on."""
    boarded: float
    """When it did."""


class Handover:
    """Brings requests from those that computed their prompts to those that decode."""

    def __init__(self, front: Front, fabric: Fabric) -> None:
        self.front = front
        self.environment = front.environment
        self.fabric = fabric
        self.waiting: deque[Parted] = deque()
        """Who waits for the router to name a replica."""
        self.journeys: dict[RequestId, Journey] = {}
        """Of every request, the last one."""
        self.migrations = 0
        self._moving: dict[RequestId, simpy.Process] = {}

    # -- from prefill to decode ------------------------------------------------------------------

    def takes(self, member: Member) -> Callable[[StepPlan], None]:
        """What is to be done when a step of a replica that only prefills has ended."""

        def sampled(plan: StepPlan) -> None:
            for chunk in plan.chunks:
                request = chunk.request
                if chunk.samples and request.state is State.RUNNING and request.decoding:
                    self._part(request, member, plan.now)

        return sampled

    def _part(self, request: Request, source: Member, since: float) -> None:
        now = self.environment.now
        source.scheduler.part(request, now)
        source.account.went(request)
        self.waiting.append(Parted(request, source, since, now))
        self.front.pump()

    def place(self) -> None:
        """Ask the router about those who wait, in their order, until it names nobody."""
        while self.waiting:
            first = self.waiting[0]
            target = self.front.asked(first.request, "decode")
            if target is None:
                break
            self.waiting.popleft()
            if isinstance(target, Refusal):
                first.source.let_go(first.request)
                self.front.dismiss(
                    first.request, State.REJECTED, target.reason, self.front.recorder
                )
            else:
                target.expect(first.request)
                self.environment.process(self._carry(first, target))

    def _carry(self, parted: Parted, target: Member) -> Wait:
        request, source = parted.request, parted.source
        try:
            yield from self._room(request, target)
        except RequestError:  # it is as long as it can be there
            target.expect_no_more(request)
            source.let_go(request)
            self.front.dismiss(request, State.FINISHED, "length", source.account.recorder)
            return
        target.makes_room(request)
        tokens = target.scheduler.parcel(request).tokens
        if not (yield from self._send(source, target, tokens, parted.since)):
            target.expect_no_more(request)
            target.let_go(request)
            source.let_go(request)
            self.front.again(request)
            return
        source.let_go(request)
        yield from self._board(request, target)
        self.journeys[request.id] = Journey(source.index, parted.left, self.environment.now)

    def _room(self, request: Request, target: Member) -> Wait:
        """Until there is memory for all that it has."""
        while not target.scheduler.reserve(request, self.environment.now):
            yield target.boundary(request)

    def _send(
        self, source: Member, target: Member, tokens: int, since: float | None = None
    ) -> Generator[simpy.Event, None, bool]:
        nbytes = tokens * max(source.unit.token_bytes, target.unit.token_bytes)
        arrived = yield from self.fabric.send(
            source.index, target.index, nbytes, since=since, layers=source.unit.layers
        )
        return arrived

    def _board(self, request: Request, target: Member) -> Wait:
        """Until it decodes there."""
        output_len = self.front.output_len(request)
        while not target.scheduler.board(request, self.environment.now, output_len):
            yield target.boundary(request)
        target.expect_no_more(request)
        target.account.boarded(request)
        target.server.wake()

    # -- while it decodes ------------------------------------------------------------------------

    def migrate(self, request: Request, source: Member, target: Member) -> None:
        """Somebody who decodes is to go on elsewhere, if there is room."""
        fine = self._decodes(request, source) and source is not target
        if fine and request.id not in self._moving:
            process = self.environment.process(self._move(request, source, target))
            self._moving[request.id] = process

    def gone(self, request: Request) -> None:
        """A request has left for good: nothing of it is copied any more."""
        if process := self._moving.pop(request.id, None):
            process.interrupt()

    def _decodes(self, request: Request, member: Member) -> bool:
        """Whether it decodes there, and its first token is told of: a step ahead, it may not be."""
        scheduler = member.scheduler
        here = scheduler.requests.get(request.id) is request
        decodes = here and request.state is State.RUNNING and request.decoding
        return decodes and request.generated > scheduler.queues.under_way(request)

    def _move(self, request: Request, source: Member, target: Member) -> Wait:
        """Copies while it goes on, then a last one for which it waits."""
        try:
            carried = yield from self._copy(request, source, target)
            if carried:
                yield source.boundary()
        except simpy.Interrupt:
            self._give_up(request, target)
            return
        self._moving.pop(request.id, None)
        if not carried or not self._decodes(request, source):
            self._give_up(request, target)
            return
        now = self.environment.now
        source.scheduler.part(request, now)
        source.account.went(request)
        if target.scheduler.reserve(request, now):
            tokens = target.scheduler.parcel(request, carried).tokens
            if (yield from self._send(source, target, tokens)):
                source.let_go(request)
                yield from self._board(request, target)
                self.migrations += 1
                self.journeys[request.id] = Journey(source.index, now, self.environment.now)
                return
        self._give_up(request, target)
        yield from self._board(request, source)

    def _copy(
        self, request: Request, source: Member, target: Member
    ) -> Generator[simpy.Event, None, int]:
        """All copies but the last; returns how many tokens they have carried, 0: it cannot move."""
        carried = 0
        for stage in range(STAGES):
            try:
                room = target.scheduler.reserve(request, self.environment.now)
            except RequestError:
                return 0
            if not room:
                return 0
            parcel = target.scheduler.parcel(request, carried)
            if stage == STAGES - 1 or (stage and parcel.blocks <= LAST_BLOCKS):
                break
            reached = request.computed
            if not (yield from self._send(source, target, parcel.tokens)):
                return 0
            carried = reached
            if not self._decodes(request, source):
                return 0
        return carried

    @staticmethod
    def _give_up(request: Request, target: Member) -> None:
        if any(one is request for one in target.scheduler.held):
            target.let_go(request)
