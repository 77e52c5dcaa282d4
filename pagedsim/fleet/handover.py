"""Requests that go on at another replica, their keys and values with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from operator import attrgetter
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

RESEND = "resend"
AFTER_DEATH = (RESEND, "recompute")
"""What becomes of keys and values whose receiver died: they are sent to another replica from where
they still are, or computed again."""

Wait = Generator[simpy.Event, None, None]


@dataclass(eq=False)
class Parted:
    """A request that waits for a replica that decodes; its keys and values are at the source."""

    request: Request
    source: Member
    since: float | None
    """When the step began that computed the end of its prompt; None: it is sent once more."""
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


@dataclass(eq=False)
class Way:
    """A request between two replicas.

        source has all          reserved at the target      target has all
        ── waits for room ──────── is sent ───────────────── waits for a seat ── decodes there
        ── decodes, copied ─────── parted, sent ────────────      (live migration)

    A replica that dies takes with it what it has. If it was the one that had all, the request
    begins anew; if it was the target, the source has all of it still.
    """

    request: Request
    source: Member | None
    """The replica that has its keys and values; None: the target has all of them."""
    target: Member
    left: float
    decodes: bool = False
    """Whether it decodes at the source still, and only copies are on their way."""
    moves: bool = False
    """Whether it had decoded at the source, and may go on there."""
    process: simpy.Process | None = None
    cut: bool = False
    """Whether it has ended otherwise, so that its process is to do nothing more."""


class _Cut(Exception):
    """The process of a way that was cut goes on no more."""


class Handover:
    """Brings requests from those that computed their prompts to those that decode."""

    def __init__(self, front: Front, fabric: Fabric, resends: bool = True) -> None:
        """`resends`: what was on its way to a replica that died is sent to another one; or else it
        is computed again."""
        self.front = front
        self.environment = front.environment
        self.fabric = fabric
        self.resends = resends
        self.waiting: deque[Parted] = deque()
        """Who waits for the router to name a replica."""
        self.journeys: dict[RequestId, Journey] = {}
        """Of every request, the last one."""
        self.migrations = 0
        self._ways: dict[RequestId, Way] = {}

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
        source.scheduler.detach(request, now)
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
                self._free(first.request, first.source)
                self.front.dismiss(
                    first.request, State.REJECTED, target.reason, self.front.recorder
                )
            else:
                target.expect(first.request)
                way = Way(first.request, first.source, target, first.left)
                self._begin(way, self._carry(way, first.since))

    def _carry(self, way: Way, since: float | None) -> Wait:
        request, source, target = way.request, way.source, way.target
        assert source is not None
        try:
            yield from self._room(way)
        except RequestError:  # it is as long as it can be there
            self._end(way)
            target.expect_no_more(request)
            self._free(request, source)
            self.front.dismiss(request, State.FINISHED, "length", source.account.recorder)
            return
        target.makes_room(request)
        tokens = target.scheduler.kv_transfer(request).tokens
        if not (yield from self._send(way, tokens, since)):
            self._end(way)
            target.expect_no_more(request)
            target.let_go(request)
            self._free(request, source)
            self.front.lost_at(target, request)
            self.front.again(request)
            return
        yield from self._arrive(way)

    def _arrive(self, way: Way) -> Wait:
        """The target has all: the source is rid of it, and it decodes as soon as a seat is free."""
        source, request = way.source, way.request
        assert source is not None
        way.source = None
        self._free(request, source)
        yield from self._board(way)
        self._end(way)
        self.journeys[request.id] = Journey(source.index, way.left, self.environment.now)

    def _room(self, way: Way) -> Wait:
        """Until there is memory for all that it has."""
        while not way.target.scheduler.reserve(way.request, self.environment.now):
            yield from self._wait(way, way.target.boundary(way.request))

    def _send(
        self, way: Way, tokens: int, since: float | None = None
    ) -> Generator[simpy.Event, None, bool]:
        source, target = way.source, way.target
        assert source is not None
        nbytes = tokens * max(source.unit.token_bytes, target.unit.token_bytes)
        arrived = yield from self.fabric.send(
            source.index, target.index, nbytes, since=since, layers=source.unit.layers
        )
        if way.cut:
            raise _Cut
        return arrived

    def _board(self, way: Way) -> Wait:
        """Until it decodes at the target."""
        request, target = way.request, way.target
        output_len = self.front.output_len(request)
        while not target.scheduler.attach(request, self.environment.now, output_len):
            yield from self._wait(way, target.boundary(request))
        target.expect_no_more(request)
        target.account.boarded(request)
        target.server.wake()

    def _free(self, request: Request, source: Member) -> None:
        """The source has no use for it any more, and may have been waiting for that to stop."""
        source.let_go(request)
        self.front.stop_if_drained(source)

    # -- ways, and what ends them ------------------------------------------------------------------

    def _begin(self, way: Way, process: Wait) -> None:
        self._ways[way.request.id] = way
        way.process = self.environment.process(self._until_cut(process))

    def _end(self, way: Way) -> None:
        del self._ways[way.request.id]

    @staticmethod
    def _until_cut(process: Wait) -> Wait:
        try:
            yield from process
        except (simpy.Interrupt, _Cut):
            return

    @staticmethod
    def _wait(way: Way, event: simpy.Event) -> Wait:
        yield event
        if way.cut:  # by what else happened at that moment
            raise _Cut

    def _cut(self, way: Way) -> None:
        """End a way from outside, and let go of what the target holds for it."""
        self._end(way)
        way.cut = True
        if way.process is not None and way.process.is_alive:
            way.process.interrupt()
        way.target.bell.drop(way.request)
        if way.source is not None:
            self._give_up(way)

    def lose(self, member: Member) -> tuple[list[Request], list[Request]]:
        """A replica has died. Returns the requests that it had, and those that it was to receive
        and that are not sent again: they are computed again with the tokens they have."""
        lost, waiting = [], []
        for parted in self.waiting:
            if parted.source is not member:
                waiting.append(parted)
                continue
            lost.append(parted.request)
            if parted.since is not None:  # else it was placed elsewhere since, and lost there
                self.front.lost_at(member, parted.request)
        recomputed: list[Request] = []
        for way in list(self._ways.values()):
            source, request = way.source, way.request
            if member is not source and member is not way.target:
                continue
            self._cut(way)
            if way.decodes:
                continue  # at the source, if that is alive
            if not way.moves or source is None:
                self.front.lost_at(way.target, request)
            elif source is member:
                self.front.lost_at(member, request)
            if source is None or source is member:
                lost.append(request)
            elif way.moves:
                self._return(request, source, way.left)
            elif self.resends and not self.front.sets_back(request):
                waiting.append(Parted(request, source, None, way.left))
            else:
                self._free(request, source)
                recomputed.append(request)
        self.waiting = deque(sorted(waiting, key=attrgetter("left")))
        return lost, recomputed

    # -- while it decodes ------------------------------------------------------------------------

    def migrate(self, request: Request, source: Member, target: Member) -> None:
        """Somebody who decodes is to go on elsewhere, if there is room."""
        fine = self._decodes(request, source) and source is not target
        if fine and request.id not in self._ways:
            way = Way(request, source, target, 0.0, decodes=True, moves=True)
            self._begin(way, self._move(way))

    def gone(self, request: Request) -> None:
        """A request has left for good: nothing of it is copied any more."""
        if way := self._ways.get(request.id):
            self._cut(way)

    def _decodes(self, request: Request, member: Member) -> bool:
        """Whether it decodes there, and its first token is told of: a step ahead, it may not be."""
        scheduler = member.scheduler
        here = scheduler.requests.get(request.id) is request
        decodes = here and request.state is State.RUNNING and request.decoding
        return decodes and request.generated > scheduler.queues.under_way(request)

    def _move(self, way: Way) -> Wait:
        """Copies while it goes on, then a last one for which it waits."""
        request, source, target = way.request, way.source, way.target
        assert source is not None
        carried = yield from self._copy(way)
        if carried:
            yield from self._wait(way, source.boundary())
        if not carried or not self._decodes(request, source):
            self._end(way)
            self._give_up(way)
            return
        way.left, way.decodes = self.environment.now, False
        source.scheduler.detach(request, way.left)
        source.account.went(request)
        if self._has_room(way):
            tokens = target.scheduler.kv_transfer(request, carried).tokens
            if (yield from self._send(way, tokens)):
                yield from self._arrive(way)
                self.migrations += 1
                return
        self._end(way)
        self._give_up(way)
        self._return(request, source, way.left)

    def _return(self, request: Request, source: Member, left: float) -> None:
        """A request that has parted goes on where its keys and values still are."""
        back = Way(request, None, source, left)
        self._begin(back, self._come_back(back))

    def _come_back(self, way: Way) -> Wait:
        yield from self._board(way)
        self._end(way)

    def _copy(self, way: Way) -> Generator[simpy.Event, None, int]:
        """All copies but the last; returns how many tokens they have carried, 0: it cannot move."""
        request, source, target = way.request, way.source, way.target
        assert source is not None
        carried = 0
        for stage in range(STAGES):
            if not self._has_room(way):
                return 0
            parcel = target.scheduler.kv_transfer(request, carried)
            if stage == STAGES - 1 or (stage and parcel.blocks <= LAST_BLOCKS):
                break
            reached = request.computed
            if not (yield from self._send(way, parcel.tokens)):
                return 0
            carried = reached
            if not self._decodes(request, source):
                return 0
        return carried

    def _has_room(self, way: Way) -> bool:
        """Whether the target reserves memory for all that a request has by now."""
        try:
            return way.target.scheduler.reserve(way.request, self.environment.now)
        except RequestError:  # it is as long as it can be there
            return False

    def _give_up(self, way: Way) -> None:
        """The target holds nothing for the request any more, and expects it no more."""
        target, request = way.target, way.request
        target.expect_no_more(request)
        if any(one is request for one in target.scheduler.held):
            target.let_go(request)
        self.front.stop_if_drained(target)
