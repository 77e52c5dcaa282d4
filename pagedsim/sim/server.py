"""One replica: a SimPy process that plans, waits as long as the cost model says, and commits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any, Protocol

import simpy

from pagedsim.core import PagedsimError, Request, RequestId, Scheduler, StepPlan, policy_validation
from pagedsim.core.plan import Rejection
from pagedsim.core.policy_validation import LONGEST
from pagedsim.sim.arrivals import Arrivals
from pagedsim.sim.beams import Beams
from pagedsim.sim.environment import NORMAL, Environment
from pagedsim.sim.tiers import Tiers


class Costs(Protocol):
    """What a server asks of a cost model; all in seconds."""

    def step_seconds(self, plan: StepPlan) -> float:
        """Forward pass and host work of a step, swaps excluded."""

    def decode_seconds(self, sequences: int, context: int) -> float:
        """The same for a step of nothing but decodes."""

    def swap_seconds(self, blocks: int) -> float:
        """Moving blocks over the bus, one way."""


class Recorder(Protocol):
    """Who is told of every step and of every request that leaves."""

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed, or told of."""

    def again(self, end: float, used_blocks: int) -> None:
        """The step was repeated, each sequence a token longer, and ended at `end`."""

    def left(self, request: Request) -> None:
        """A request finished or was rejected."""


class Entrance(Protocol):
    """Where requests come in: a server, or what stands in front of several."""

    done: dict[object, simpy.Event]
    """Who waits for a request to leave."""

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""

    def close(self) -> None:
        """Nobody arrives any more."""


class Outside(Protocol):
    """Who acts from outside at the ends of steps."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Whether anything is to be done when this step has ended."""

    def committed(self, plan: StepPlan) -> None:
        """The step has ended, now, and the next one is not planned."""


class Server:
    """Drives one scheduler through simulated time."""

    def __init__(
        self,
        environment: Environment,
        scheduler: Scheduler,
        cost: Costs,
        recorder: Recorder,
        *,
        overlap: bool = False,
        copy_seconds: float = 0.0,
        beams: Beams | None = None,
        fast_forward: bool = True,
        tiers: Tiers | None = None,
    ) -> None:
        """`overlap`: swaps out go on beside the computation, over one bus.

        `copy_seconds` is what a step takes longer for each block that it copies on the GPU.
        `beams` says which beams of a search go on; without it every beam does. Without
        `fast_forward` every step is planned and committed by itself; what comes out is the same.
        `tiers` says how long moves between the memory's tiers take; without it they take no time.
        """
        self.environment = environment
        self.scheduler = scheduler
        scheduler.lasting_plans = False  # nobody here looks at one that is over
        self.cost = cost
        self.asked: Any = cost  # whose answers are checked before they are believed
        self.recorder = recorder
        self.bus = simpy.Resource(environment, capacity=1) if overlap else None
        self.copy_seconds = copy_seconds
        self.tiers = tiers
        self.beams = beams or Beams(0.0)
        self.searching = 0  # requests here that are beam searches
        # A recording knows steps by their number, not by what is in them.
        self.fast_forward = fast_forward and getattr(cost, "by_totals", True)
        self.expecting = True  # whether requests may still arrive
        self.done: dict[object, simpy.Event] = {}  # who waits for a request to leave
        self.heard: Callable[[Request], None] | None = None  # who is to hear of all who leave
        self.outside: Outside | None = None
        self.undo: Callable[[], None] | None = None  # who is to hear that a step did not end
        self._refused: Sequence[Rejection] = ()  # in the step under way
        self._coming: Arrivals | None = None
        self._next_at = inf  # when the next of these comes
        self._stuck = False  # whether nothing can be done until somebody comes or acts
        self._wake = environment.event()
        self.process = environment.process(self._live())

    def expect(self, arrivals: Arrivals) -> None:
        """All who will ever come are these: none of them is waited for, each is looked up."""
        self._coming, self._next_at = arrivals, arrivals.at
        if arrivals.at == inf:
            self.close()

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""
        self.scheduler.add(request, self.environment.now, output_len)
        self.searching += request.params.beam_search
        self.wake()

    def abort(self, request_id: RequestId) -> None:
        """End a request wherever it is, now; of a step that is under way its part is lost."""
        self._leave(self.scheduler.abort(request_id, self.environment.now))

    def crash(self) -> list[Request]:
        """Lose everything that is here, now, and rest until somebody comes; returns who was here.

        The step under way does not end. Of those who are lost nobody is told; who was refused in
        that step leaves as usual.
        """
        for rejection in self._refused:
            self._leave(rejection.request)
        self._refused = ()
        lost = self.scheduler.crash(self.environment.now)
        for request in lost:
            self._forget(request)
        self.process.interrupt()
        return lost

    def wake(self) -> None:
        """Plan a step, if it rests, or is about to, since nobody was there or could be served."""
        self._stuck = False
        if not self._wake.triggered:
            self._wake.succeed()

    def close(self) -> None:
        """Nobody arrives any more."""
        self.expecting = False
        self.wake()

    def _live(self) -> Generator[simpy.Event, None, None]:
        """Serve, and begin anew after each crash."""
        while True:
            try:
                yield from self._serve()
            except simpy.Interrupt:
                continue
            return

    def _serve(self) -> Generator[simpy.Event, None, None]:
        environment, scheduler, here = self.environment, self.scheduler, self.scheduler.requests
        now = environment.now
        self._stuck = False
        while True:
            if not here or self._stuck:
                woken = yield from self._rest(now)
                if woken is None:
                    break
                now, self._stuck = woken, False
                continue
            plan = scheduler.plan(now)
            if not plan.decode_count and plan.empty:
                self._moved(plan, now, now, now)
                self.recorder.step(plan, now, now, scheduler)
                self._stuck = plan.idle
            else:
                self._refused = plan.rejected
                now = yield from self._carry_out(plan, now)
                self._refused = ()
            if plan.rejected:
                yield from self._part_with([one.request for one in plan.rejected], now)
            if scheduler.pending is plan:
                parents = self.beams.parents(plan) if self.searching else None
                ended = scheduler.commit(plan, now, None, None, parents)
                if ended:
                    yield from self._part_with(ended, now)
                if self.outside is not None and self.outside.waits_for(plan):
                    yield from self._catch_up(now)
                    self.outside.committed(plan)
                    yield self.environment.at(now, NORMAL)  # whoever waited goes first
        self._refuse_leftovers(now)

    def _rest(self, now: float) -> Generator[simpy.Event, None, float | None]:
        """Wait until somebody arrives; returns when that was, None if nobody will."""
        if (at := self._next_at) < inf:
            self._let_in(at)
            return at
        if not self.expecting:
            yield from self._catch_up(now)
            return None
        self._wake = self.environment.event()
        yield self._wake
        return self.environment.now

    def _refuse_leftovers(self, now: float) -> None:
        """Raise PagedsimError if somebody is left when nothing more can happen."""
        scheduler = self.scheduler
        if scheduler.unfinished:
            raise PagedsimError(
                f"nothing can run at {now:.6g} s: {len(scheduler.waiting)} requests wait, "
                f"{len(scheduler.swapped)} are swapped out; "
                f"{type(scheduler.policy).__name__} admits none of them"
            )

    def _carry_out(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Let a step's time pass, and that of the quiet steps after it; returns the last one's end.

        The environment stays behind where nothing else happens until then. If the last step was
        committed on the way, because another like it could not follow, it is no longer in flight.
        """
        environment, begin = self.environment, now
        if plan.swap_out or plan.swap_in or plan.copies:
            begin = yield from self._begin(plan, now)
        if plan.chunks or not self.fast_forward:
            hook, took = "step_seconds", self.asked.step_seconds(plan)
        else:
            took = self.asked.decode_seconds(plan.decode_count, plan.decode_context)
            hook = "decode_seconds"
        if type(took) is not float or not 0.0 <= took <= LONGEST:
            took = policy_validation.seconds(self.cost, hook, took)
        end = begin + took
        if plan.moves:
            end = self._moved(plan, now, begin, end)
        self.recorder.step(plan, now, end, self.scheduler)
        quiet = self._quiet(plan)
        while True:
            due = environment.peek() <= end
            if now < end:
                if due:
                    yield from self._wait_out(end)
                if end >= self._next_at:
                    self._let_in(end)
            if not quiet or self.scheduler.disturbed or (due and self._awaited(plan)):
                return end
            now, end, quiet = self._glide(plan, end, quiet)

    def _quiet(self, plan: StepPlan) -> int:
        """How many steps after this one are known to be the same."""
        # In a beam search no step is like the one before it.
        if plan.chunks or not self.fast_forward or (self.searching and self.scheduler.clock.wide):
            return 0
        return self.scheduler.uneventful(plan)

    def _glide(self, plan: StepPlan, end: float, quiet: int) -> tuple[float, float, int]:
        """Repeat a step that ends at `end` up to `quiet` times, until anything else may happen.

        Returns when the last one begins and ends, and how many are left.
        """
        scheduler, recorder, seconds = self.scheduler, self.recorder, self.asked.decode_seconds
        sequences, start = plan.decode_count, end
        waiting = len(scheduler.waiting)  # somebody may have come who changes nothing else
        until = self.environment.peek()
        if self._next_at < until:
            until = self._next_at  # nothing happens before
        while quiet:
            if not scheduler.fast_forward(plan, end):
                return end, end, 0
            quiet -= 1
            took = seconds(sequences, plan.decode_context)
            if type(took) is not float or not 0.0 <= took <= LONGEST:
                took = policy_validation.seconds(self.cost, "decode_seconds", took)
            start, end = end, end + took
            if plan.moves:  # nothing but what makes room: the step itself takes no longer
                self._moved(plan, start, start, end)
            if plan.moves or plan.waiting != waiting:
                plan.waiting = waiting
                recorder.step(plan, start, end, scheduler)
            else:
                recorder.again(end, plan.used_blocks)
            if end >= until:
                break
        return start, end, quiet

    def _let_in(self, now: float) -> None:
        """All come who are known to come by now."""
        while (at := self._next_at) <= now:
            assert self._coming is not None
            request, output_len = self._coming.take()
            self._next_at = self._coming.at
            self.scheduler.add(request, at, output_len)
            self.searching += request.params.beam_search
        if self._next_at == inf and self._coming is not None:
            self.expecting = False

    def _wait_out(self, end: float) -> Generator[simpy.Event, None, None]:
        """Let time pass until a step ends of which the recorder has been told."""
        try:
            yield self.environment.at(end, NORMAL)
        except simpy.Interrupt:
            if self.undo is not None:
                self.undo()
            raise

    def _begin(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Move the blocks that a step moves; returns when the forward pass may begin."""
        begin = now
        if plan.swap_out or plan.swap_in:
            begin = yield from self._swap(plan, now)
            if self.tiers:
                place = self.scheduler.memory.place
                out = [place(cpu) for _, cpu in plan.swap_out]
                back = [place(cpu) for cpu, _ in plan.swap_in]
                begin = max(begin, self.tiers.spilled(out, back, now))
        return begin + len(plan.copies) * self.copy_seconds

    def _moved(self, plan: StepPlan, now: float, begin: float, end: float) -> float:
        """When a step from `begin` to `end` is over that moves blocks between tiers from `now`."""
        if self.tiers is None or not plan.moves:
            return end
        return self.tiers.end(plan, now, begin, end)

    def _swap(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Move blocks over the bus; returns when the forward pass may begin."""
        out, back = self._way(len(plan.swap_out)), self._way(len(plan.swap_in))
        if self.bus is None:
            return now + out + back
        yield from self._catch_up(now)
        if out:
            self.environment.process(self._transfer(out))
        if back:
            yield from self._transfer(back)
        return self.environment.now

    def _way(self, blocks: int) -> float:
        """How long so many blocks take over the bus."""
        if not blocks:
            return 0.0
        return policy_validation.seconds(self.cost, "swap_seconds", self.asked.swap_seconds(blocks))

    def _awaited(self, plan: StepPlan) -> bool:
        """Whether somebody acts when this step has ended."""
        return self.outside is not None and self.outside.waits_for(plan)

    def _catch_up(self, now: float) -> Generator[simpy.Event, None, None]:
        if now > self.environment.now:
            yield self.environment.at(now, NORMAL)

    def _transfer(self, seconds: float) -> Generator[simpy.Event, None, None]:
        assert self.bus is not None
        with self.bus.request() as turn:
            yield turn
            yield self.environment.timeout(seconds)

    def _part_with(self, some: Sequence[Request], now: float) -> Generator[simpy.Event, None, None]:
        """Some leave, now."""
        if self.done or self.heard:
            yield from self._catch_up(now)
        for request in some:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self.recorder.left(request)
        if self.searching:
            self._forget(request)
        if self.done and (event := self.done.pop(request.id, None)):
            event.succeed()
        if self.heard:
            self.heard(request)

    def _forget(self, request: Request) -> None:
        """No more beams are drawn for it."""
        if request.params.beam_search:
            self.searching -= 1
            self.beams.left(request)
