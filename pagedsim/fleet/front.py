"""The door of a fleet: asks the router about everybody who comes, and lets them wait or in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from functools import cache, partial
from math import inf
from typing import Any, Literal

import simpy

from pagedsim.core import PagedsimError, Request, RequestId, State
from pagedsim.core.errors import AnswerError, RequestError, printed, require_flag
from pagedsim.core.memory.prefix_index import PrefixIndex
from pagedsim.core.source import Job
from pagedsim.fleet.apart import Apart
from pagedsim.fleet.chore import Chore
from pagedsim.fleet.handover import Handover
from pagedsim.fleet.member import Member
from pagedsim.fleet.roster import Roster, Standing
from pagedsim.fleet.view import Candidates, Seen, Stale
from pagedsim.sim.environment import NORMAL, Environment
from pagedsim.sim.server import Recorder
from policies.routing.router import Left, Move, Placed, Refusal, Router

Stage = Literal["prefill", "decode"]
MAX_RETRIES = 100
"""By default: where replicas die more often than a request takes, it would be tried for ever."""
STAGES: tuple[Stage, Stage] = ("prefill", "decode")


class Front:
    """Where the requests of a fleet come in."""

    def __init__(
        self,
        environment: Environment,
        members: Sequence[Member],
        router: Router,
        recorder: Recorder,
        staleness: float = 0.0,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """`max_retries`: a request that replicas which die have set back more often is rejected."""
        self.environment = environment
        self.members = members
        self.router = router
        for hook in ("holds", "blind"):
            require_flag(f"{type(router).__name__}.{hook}", getattr(router, hook))
        self.recorder = recorder
        self.done: dict[object, simpy.Event] = {}
        self.held: deque[Job] = deque()  # who waits for a replica
        self.here = 0  # requests that are in the fleet
        self.handover: Handover | None = None
        self._observing = type(router).observe is not Router.observe
        self._closed = False
        self._pumping = False
        self._changed = -inf  # when the router was last to be asked again
        self._renewal = inf  # when it is asked next, because counts are renewed
        self._staleness = staleness
        self._views = [Stale(one, staleness) if staleness else Seen(one) for one in members]
        self._roles = any(one.role != "both" for one in members)
        # What all prefix caches hold; kept from when a router first asks.
        self._index = cache(lambda: PrefixIndex([one.scheduler.memory for one in members]))
        self.roster = Roster(environment, members, self._open)
        self.retries: Counter[RequestId] = Counter()  # how often each was lost, and began anew
        self.max_retries = max_retries
        self._setbacks: Counter[RequestId] = Counter()  # with transfers that began again
        self.chores = 0  # events of `Chore`s that are still to happen
        self._came: dict[RequestId, tuple[int, int]] = {}
        """Of all requests that are here: their place in the order in which they came, and the
        lengths of their outputs."""
        self._arrivals = 0
        self._open()
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
        if self.apart is None:
            self._came[request.id] = self._arrivals, output_len
            self._arrivals += 1
        if self.held or not self._placed(request, output_len):
            self.held.append((request, output_len))
            self._await_renewal()
            idle = self.here == 1 and self._renewal == inf
            if idle and self._candidates["prefill"]:
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
            self.dismiss(request, State.REJECTED, answer.reason, self.recorder)
        elif answer is not None:
            try:
                answer.submit(request, output_len)
            except RequestError as error:
                if not request.generated:
                    raise
                # What it has said already is too long there.
                self.dismiss(request, State.REJECTED, str(error), self.recorder)
            if self.apart is not None:
                self.apart.came(answer)
        return answer is not None

    def asked(self, request: Request, role: Stage) -> Member | Refusal | None:
        """Whom the router names for what is to be done with a request."""
        now, candidates = self.environment.now, self._candidates[role]
        if self.apart is not None:
            self.apart.settle(now)
        if not candidates:
            return None
        answer = self.router.route(request, candidates, now)
        if answer is None and not self.router.holds:
            name = type(self.router).__name__
            raise PagedsimError(
                f"{name}.route gave None, nobody: a router after which requests may wait says so "
                "by holds = True"
            )
        if isinstance(answer, Refusal):
            why: object = answer.reason
            if not (isinstance(why, str) and why):
                name = f"{type(self.router).__name__}.route"
                raise AnswerError(
                    f"{name} gave {printed(answer)}: its reason must be a text that says why"
                )
            return answer
        if answer is None:
            return None
        if not (isinstance(answer, Seen) and self._takes(answer, role)):
            name = f"{type(self.router).__name__}.route"
            raise AnswerError(
                f"{name} gave {printed(answer)}: must be one of the replicas that it was given, "
                f"which may {'take prompts' if role == 'prefill' else 'decode'}, a Refusal, or None"
            )
        if self._observing:
            self.router.observe(Placed(request, self._views[answer.index], now))
        return self.members[answer.index]

    def dismiss(self, request: Request, state: State, reason: str, recorder: Recorder) -> None:
        """A request that is at no replica leaves for good."""
        request.state, request.finish_reason = state, reason
        request.finished_at = self.environment.now
        recorder.left(request)
        self._gone(request)
        if event := self.done.pop(request.id, None):
            event.succeed()
        self.pump()
        self._end_if_empty()

    def output_len(self, request: Request) -> int:
        """The length that its output is to have, of who is here; not for routers.

        A scheduler that it parts from may know of less, where less fits.
        """
        return self._came[request.id][1]

    def again(self, request: Request) -> None:
        """What a request had in memory was lost on its way: it computes all of it anew, before all
        that came after it."""
        self._put_back([request])
        self.pump()

    def _put_back(self, requests: Sequence[Request]) -> None:
        """Requests wait in front again, in the order in which all came."""
        jobs = [(request, self.output_len(request)) for request in requests]
        self.held = deque(sorted((*jobs, *self.held), key=lambda job: self._came[job[0].id]))

    def moves(self, every: float) -> Generator[simpy.Event, None, None]:
        """Ask the router now and then who should go on elsewhere."""
        handover = self.handover
        assert handover is not None
        chore = Chore(self)
        while not self.over:
            yield from chore.until(self.environment.now + every)
            moves = self.router.migrate(self._candidates["decode"], self.environment.now)
            for move in self._checked(moves):
                source, target = (self.members[one.index] for one in (move.source, move.target))
                handover.migrate(move.request, source, target)

    def _checked(self, moves: Any) -> Sequence[Move]:
        """Moves of running requests between replicas of ours; who has stopped running stays."""

        def fine(move: object) -> bool:
            if not isinstance(move, Move) or not isinstance(move.request, Request):
                return False
            source, target = move.source, move.target
            known = isinstance(source, Seen) and source in self._views
            return known and isinstance(target, Seen) and self._takes(target, "decode")

        if isinstance(moves, Sequence) and all(map(fine, moves)):
            checked: Sequence[Move] = moves
            return checked
        raise AnswerError(
            f"{type(self.router).__name__}.migrate gave {printed(moves)}: must be a list of "
            "Move(request, source, target), a request and two of the replicas that it was given"
        )

    @property
    def over(self) -> bool:
        """Whether nobody is here, and nobody will come."""
        return self._closed and not self.here

    def _left(self, member: Member, request: Request) -> None:
        """A request has left a replica for good."""
        self._gone(request)
        if self.handover is not None:
            self.handover.gone(request)
        if self._observing:
            self.router.observe(Left(request, self._views[member.index], self.environment.now))
        self.stop_if_drained(member)
        self.pump()
        self._end_if_empty()

    def _gone(self, request: Request) -> None:
        self.here -= 1
        self._came.pop(request.id, None)
        self._setbacks.pop(request.id, None)

    def pump(self) -> None:
        """Ask the router again about the requests that wait, in their order: something has
        changed."""
        self._changed = self.environment.now
        self._ask_again()

    def _ask_again(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        while self.held and self._placed(*self.held[0]):
            self.held.popleft()
        if self.handover is not None:
            self.handover.place()
        self._pumping = False
        self._await_renewal()

    def _await_renewal(self) -> None:
        """Have the router asked again when the counts that it sees show the last change: a router
        that holds a request back by old counts may be asked for no other reason."""
        if not (self._staleness and any(map(self.held_for, STAGES))):
            return
        up = map(self.view, self.roster.those(Standing.UP))
        times = [time for view in up if (time := view.renews(self._changed)) is not None]
        if (soonest := min(times, default=inf)) < self._renewal:
            self._renewal = soonest
            self.environment.at(soonest, NORMAL).callbacks.append(self._renewed)

    def _renewed(self, _: simpy.Event) -> None:
        if self.environment.now >= self._renewal:
            self._renewal = inf
            self._ask_again()

    def held_for(self, stage: Stage) -> int:
        """Requests that wait in front of all replicas of a stage."""
        if stage == "prefill":
            return len(self.held)
        return len(self.handover.waiting) if self.handover is not None else 0

    def _end_if_empty(self) -> None:
        if self.over:
            self._end()

    def _end(self) -> None:
        for member in self.members:
            member.close()

    def stuck(self) -> str:
        """Why nothing happens any more although somebody is here."""
        name, held = type(self.router).__name__, len(self.held)
        where = [
            f"{len(one.scheduler.requests)} at {one.name}"
            for one in self.members
            if one.scheduler.requests
        ]
        if self.handover is not None and self.handover.waiting:
            where.append(f"{len(self.handover.waiting)} to decode, for {name} names nobody")
        if held:
            up = self.roster.those(Standing.UP)
            where.insert(
                0, f"{held} in front, for {f'{name} names nobody' if up else 'none is up'}"
            )
        now = self.environment.now
        return f"nothing can run at {now:.6g} s: requests wait, {', '.join(where)}"

    # -- replicas come and go ----------------------------------------------------------------------

    def view(self, member: Member) -> Seen:
        """What the router sees of a member."""
        return self._views[member.index]

    def _open(self) -> None:
        """Others take requests than before."""
        up = [self.view(one) for one in self.roster.those(Standing.UP)]
        self._candidates = {
            role: Candidates(
                [view for view in up if view.role in (role, "both")],
                up,
                role if self._roles else "both",
                self._index,
            )
            for role in STAGES
        }

    def _takes(self, view: Seen, role: Stage) -> bool:
        """Whether a router may name it."""
        known = self._views[view.index] is view and view.role in (role, "both")
        return known and self.roster[self.members[view.index]] is Standing.UP

    def up(self, member: Member) -> None:
        """A replica takes requests from now on."""
        self.roster.put(member, Standing.UP)
        self.pump()

    def drain(self, member: Member) -> None:
        """A replica serves those that it has, and stops."""
        self.roster.put(member, Standing.DRAINING)
        self.stop_if_drained(member)

    def stop_if_drained(self, member: Member) -> None:
        """A replica that drains stops, if nobody is there. Whose scheduler is a step ahead may have
        to carry out one for nobody before that, so it has to be asked again."""
        here, scheduler = self.roster[member], member.scheduler
        if here is not Standing.DRAINING or scheduler.unfinished or scheduler.in_flight:
            return
        if not (scheduler.held or member.coming):  # for requests that come here, or leave
            scheduler.memory.forget()
            self.roster.put(member, Standing.OFF)

    def lose(self, member: Member, standing: Standing) -> None:
        """A replica dies with all that is on it, and is `standing` from now on; those who were
        there, or whose keys and values were, begin anew elsewhere, before all who came after them.
        """
        self.roster.put(member, standing)
        lost = member.crash()
        for request in lost:
            self.lost_at(member, request)
        recomputed: list[Request] = []
        if self.handover is not None:
            gone, recomputed = self.handover.lose(member)
            lost += gone
            for request in (*lost, *recomputed):
                self.handover.journeys.pop(request.id, None)
        back: list[Request] = []
        spent: list[Request] = []
        for request in (*(request.afresh() for request in lost), *recomputed):
            (spent if self.sets_back(request) else back).append(request)
        self.retries.update(request.id for request in back)
        self._put_back(back)
        for request in spent:
            reason = f"replicas died under it more than {self.max_retries} times"
            self.dismiss(request, State.REJECTED, f"{reason} (fleet.max_retries)", self.recorder)
        self.pump()

    def sets_back(self, request: Request) -> bool:
        """Count that a replica died under a request; whether that was once too often."""
        self._setbacks[request.id] += 1
        return self._setbacks[request.id] > self.max_retries

    def lost_at(self, member: Member, request: Request) -> None:
        """A request that the router placed at a replica is there no more, and not served."""
        if self._observing:
            self.router.observe(Left(request, self.view(member), self.environment.now))
