"""A simulated server: a SimPy process that plans, waits for the modelled time, and commits.

`AheadServer`, for async scheduling, plans a step while the one before runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any, Protocol

import simpy

from pagedsim.core import (
    ConfigError,
    PagedsimError,
    Request,
    RequestId,
    Scheduler,
    StepPlan,
    policy_validation,
)
from pagedsim.core.compiled import stopped
from pagedsim.core.plan import Rejection
from pagedsim.core.policy_validation import LONGEST
from pagedsim.sim.beams import Beams
from pagedsim.sim.environment import NORMAL, Environment
from pagedsim.sim.feed import Arrivals
from pagedsim.sim.storage import StorageJobs
from pagedsim.sim.transfers import Transfers


class Costs(Protocol):
    """The part of a cost model that a server calls; all times in seconds."""

    def step_seconds(self, plan: StepPlan) -> float:
        """Forward pass and host work of a step, swaps excluded."""

    def decode_seconds(self, sequences: int, context: int) -> float:
        """`step_seconds` of a step of decodes alone."""

    def swap_seconds(self, blocks: int) -> float:
        """Moving blocks over the bus, one way."""


class Recorder(Protocol):
    """Records every step and every departure."""

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed or completed."""

    def again(self, end: float, used_blocks: int) -> None:
        """The step was repeated, each sequence a token longer, and ended at `end`."""

    def left(self, request: Request) -> None:
        """A request finished or was rejected."""


class StepObserver(Protocol):
    """Acts at the ends of steps, such as the handle of a replica in a fleet."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Whether the end of this step has to be reported."""

    def committed(self, plan: StepPlan) -> None:
        """The step has ended now, and the next one is not planned yet."""


class Server:
    """Drives one scheduler in simulated time."""

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
        transfers: Transfers | None = None,
        storage: StorageJobs | None = None,
    ) -> None:
        """`overlap`: swap-outs overlap with computation, over one bus.

        `copy_seconds` is added to a step for each block that it copies on the GPU. `beams` draws
        the parents of beams; without it every beam continues. Without `fast_forward` every step is
        planned and committed individually, with the same results. `transfers` has the times of
        copies from and to a host tier, which a scheduler that begins some needs, and `storage` the
        jobs of one below that.
        """
        self.environment = environment
        self.scheduler = scheduler
        scheduler.lasting_plans = False  # plans are not read after their step
        self.cost = cost
        self.raw_cost: Any = cost  # its answers are validated inline
        self.recorder = recorder
        self.bus = simpy.Resource(environment, capacity=1) if overlap else None
        self.copy_seconds = copy_seconds
        self.transfers = transfers
        self.storage = storage
        self.source = scheduler.transfer_source
        self.connector = scheduler.queues.connector
        self.memory = scheduler.memory
        if scheduler.offloads and transfers is None:
            raise ConfigError("offload: a simulated server needs transfers")
        if scheduler.memory.lower_tiers and (storage is None or storage.memory is not self.memory):
            raise ConfigError("offload: a simulated server needs the jobs of its storage")
        self.beams = beams or Beams(0.0)
        self.searching = 0  # number of beam searches
        # A recording is indexed by step number, not by the totals of a step.
        self.fast_forward = fast_forward and getattr(cost, "by_totals", True)
        self.expecting = True  # whether requests may still arrive
        self.done: dict[object, simpy.Event] = {}  # departures that are waited for
        self.on_departure: Callable[[Request], None] | None = None  # callback for departures
        self.observer: StepObserver | None = None
        self.undo: Callable[[], None] | None = None  # callback for a step cut off by a crash
        self._refused: Sequence[Rejection] = ()  # in the current step
        self._coming: Arrivals | None = None
        self._next_at = inf  # time of the next of these
        self._stuck = False  # whether only an arrival or external action can help
        self._wake = environment.event()
        self.process = environment.process(self._serve_with_restarts())

    def expect(self, arrivals: Arrivals) -> None:
        """Take all arrivals from this sequence, without simulation events."""
        self._coming, self._next_at = arrivals, arrivals.at
        if arrivals.at == inf:
            self.close()

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""
        self.scheduler.add(request, self.environment.now, output_len)
        self.searching += request.params.beam_search
        self.wake()

    def abort(self, request_id: RequestId) -> None:
        """Abort a request now; its part of the current step is lost."""
        self._leave(self.scheduler.abort(request_id, self.environment.now))

    def crash(self) -> list[Request]:
        """Drop all requests now and sleep until the next arrival; returns the dropped requests.

        The current step does not end. Departures of dropped requests are not recorded; requests
        rejected in that step depart as usual.
        """
        for rejection in self._refused:
            self._leave(rejection.request)
        self._refused = ()
        lost = self.lose_state()
        for request in lost:
            self._forget(request)
        self.process.interrupt()
        return lost

    def lose_state(self) -> list[Request]:
        """Lose all requests, which are returned, all memory, and all copies in flight."""
        if self.storage is not None:
            self.storage.crash(self.environment.now)
        lost = self.scheduler.crash(self.environment.now)
        if self.transfers is not None:
            self.transfers.clear()
        return lost

    def wake(self) -> None:
        """Wake the process if it sleeps, or is about to, for lack of runnable requests."""
        self._stuck = False
        if not self._wake.triggered:
            self._wake.succeed()

    def close(self) -> None:
        """Declare that no further requests arrive."""
        self.expecting = False
        self.wake()

    def _serve_with_restarts(self) -> Generator[simpy.Event, None, None]:
        """Serve, restarting after each crash."""
        while True:
            try:
                yield from self._serve()
            except simpy.Interrupt:
                continue
            return

    def _serve(self) -> Generator[simpy.Event, None, None]:
        try:
            environment, scheduler = self.environment, self.scheduler
            requests = scheduler.requests
            now = environment.now
            self._stuck = False
            while True:
                if (self._stuck or not requests) and not self.source.unbegun:
                    woken = yield from self._sleep(now)
                    if woken is None:
                        break
                    now, self._stuck = woken, False
                    continue
                plan = self._plan(now)
                if not plan._decode_count and plan.empty:
                    if self.transfers is not None:
                        self.transfers.begin(plan, now)
                        self.transfers.computed(plan, now)
                    self.recorder.step(plan, now, now, scheduler)
                    self._stuck = plan.idle
                else:
                    self._refused = plan._rejected
                    now = yield from self._run_step(plan, now)
                    self._refused = ()
                if plan._rejected:
                    rejected = [rejection.request for rejection in plan._rejected]
                    yield from self._depart(rejected, now)
                if scheduler.pending is plan:
                    parents = self.beams.parents(plan) if self.searching else None
                    ended = scheduler.commit(plan, now, None, None, parents)
                    if ended:
                        yield from self._depart(ended, now)
                    if self.transfers is not None:
                        self._report(self.transfers, now)
                    if self.observer is not None and self.observer.waits_for(plan):
                        yield from self._catch_up(now)
                        self.observer.committed(plan)
                        yield self.environment.at(now, NORMAL)  # waiters run first
            self.scheduler.raise_if_deadlocked(now)
        except StopIteration as error:
            raise stopped(error) from error

    def _plan(self, now: float) -> StepPlan:
        """The next step; what it, and the arrivals before it, ask of the storage begins now."""
        plan = self.scheduler.plan(now)
        if self.storage is not None:
            self.storage.begin(now)
        if self.connector is not None and self.connector.promotes_for_ever:
            raise PagedsimError(
                f"nothing can run at {now:.6g} s: {self.scheduler.num_waiting} requests wait, and "
                "what comes up for them from below host memory is evicted before it is loaded, for "
                "ever, as vLLM does it; set offload.protect_promoted=true, or more offload.gib"
            )
        return plan

    def _report(self, transfers: Transfers, now: float) -> None:
        """Tell the scheduler of transfers that have ended, and its memory of the storage's jobs."""
        if jobs := transfers.ended(now):
            self.scheduler.transferred(jobs, now)
            self._stuck = False
        if (storage := self.storage) is None:
            return
        storage.begin(now)
        if storage.memory.reported:
            self._stuck = False
            if not self.scheduler.unfinished:
                storage.memory.settle()
                self.scheduler.transferred((), now)

    def _sleep(self, now: float) -> Generator[simpy.Event, None, float | None]:
        """Wait for an arrival, or for the end of a transfer; returns its time, None after the
        last."""
        try:
            transfers = self.transfers
            if transfers is None:
                return (yield from self._sleep_until_arrival(now))
            end = transfers.next_end(bool(self.scheduler.unfinished))
            if (storage := self.storage) is not None:
                end = min(end, storage.next_end, storage.memory.next_timeout(now))
            if end < inf:
                woken: float | None = yield from self._sleep_until(min(end, self._next_at), now)
            else:
                woken = yield from self._sleep_until_arrival(now)
            if woken is not None:
                self._report(transfers, woken)
            return woken
        except StopIteration as error:
            raise stopped(error) from error

    def _sleep_until(self, at: float, now: float) -> Generator[simpy.Event, None, float]:
        """Wait until then, or until the process is woken."""
        try:
            if self.environment.peek() <= at:
                yield from self._catch_up(now)
                self._wake = self.environment.event()
                yield simpy.AnyOf(self.environment, [self._wake, self.environment.at(at, NORMAL)])
                at = max(self.environment.now, now)
            if at >= self._next_at:
                self._add_arrivals(at)
            return at
        except StopIteration as error:
            raise stopped(error) from error

    def _sleep_until_arrival(self, now: float) -> Generator[simpy.Event, None, float | None]:
        """Wait for an arrival; returns its time, None after the last."""
        try:
            if (at := self._next_at) < inf:
                self._add_arrivals(at)
                return at
            if not self.expecting:
                yield from self._catch_up(now)
                return None
            self._wake = self.environment.event()
            yield self._wake
            return self.environment.now
        except StopIteration as error:
            raise stopped(error) from error

    def _run_step(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Run a step and the uneventful ones after it; returns the end of the last one.

        The environment is not advanced while there are no other events. If the last step was
        committed because it could not be repeated, it is no longer in flight.
        """
        try:
            environment, begin = self.environment, now
            if plan._swap_out or plan._swap_in or plan._copies:
                begin = yield from self._move_blocks(plan, now)
            if self.transfers is not None:
                begin = self.transfers.begin(plan, begin)
            if plan._chunks or not self.fast_forward:
                hook, took = "step_seconds", self.raw_cost.step_seconds(plan)
            else:
                took = self.raw_cost.decode_seconds(plan._decode_count, plan._decode_context)
                hook = "decode_seconds"
            if type(took) is not float or not 0.0 <= took <= LONGEST:
                took = policy_validation.seconds(self.cost, hook, took)
            end = begin + took
            if self.transfers is not None:
                end = self.transfers.end(begin, end)
                self.transfers.computed(plan, end)
            self.recorder.step(plan, now, end, self.scheduler)
            repeats = self._repeats(plan)
            while True:
                due = environment.peek() <= end
                if now < end:
                    if due:
                        yield from self._wait_until(end)
                    if end >= self._next_at:
                        self._add_arrivals(end)
                if not repeats or self.scheduler.disturbed or (due and self._observed(plan)):
                    return end
                now, end, repeats = self._fast_forward(plan, end, repeats)
        except StopIteration as error:
            raise stopped(error) from error

    def _repeats(self, plan: StepPlan) -> int:
        """The number of times that this step can be repeated."""
        # Steps of a beam search differ.
        if plan._chunks or not self.fast_forward or (self.searching and self.scheduler.clock.wide):
            return 0
        return self.scheduler.uneventful(plan)

    def _fast_forward(self, plan: StepPlan, end: float, repeats: int) -> tuple[float, float, int]:
        """Repeat a step that ends at `end` up to `repeats` times, until the next event.

        Returns the begin and end of the last one, and the number of repeats left.
        """
        scheduler, recorder, seconds = self.scheduler, self.recorder, self.raw_cost.decode_seconds
        sequences, start = plan._decode_count, end
        waiting = len(scheduler.waiting)  # an arrival may change nothing else
        until = self.environment.peek()
        if self._next_at < until:
            until = self._next_at  # no event before
        copied = inf if self.transfers is None else self.transfers.next_end()
        while repeats:
            repeated = scheduler.fast_forward(plan, end)
            if end >= copied and self.transfers is not None:
                self._report(self.transfers, end)
                copied = self.transfers.next_end()
            if not repeated:
                return end, end, 0
            repeats -= 1
            took = seconds(sequences, plan._decode_context)
            if type(took) is not float or not 0.0 <= took <= LONGEST:
                took = policy_validation.seconds(self.cost, "decode_seconds", took)
            start, end = end, end + took
            if plan._waiting != waiting:
                plan._waiting = waiting
                recorder.step(plan, start, end, scheduler)
            else:
                recorder.again(end, plan._used_blocks)
            if end >= until:
                break
        return start, end, repeats

    def _add_arrivals(self, now: float) -> None:
        """Add all arrivals up to now."""
        while (at := self._next_at) <= now:
            assert self._coming is not None
            request, output_len = self._coming.take()
            self._next_at = self._coming.at
            self.scheduler.add(request, at, output_len)
            self.searching += request.params.beam_search
        if self._next_at == inf and self._coming is not None:
            self.expecting = False

    def _wait_until(self, end: float) -> Generator[simpy.Event, None, None]:
        """Advance to the end of a recorded step."""
        try:
            yield self.environment.at(end, NORMAL)
        except simpy.Interrupt:
            if self.undo is not None:
                self.undo()
            raise

    def _move_blocks(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Swap and copy the blocks of a step; returns when its forward pass may begin."""
        try:
            begin = now
            if plan._swap_out or plan._swap_in:
                begin = yield from self._swap(plan, now)
            return begin + len(plan._copies) * self.copy_seconds
        except StopIteration as error:
            raise stopped(error) from error

    def _swap(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Move blocks over the bus; returns when the forward pass may begin."""
        try:
            out, back = (
                self._bus_seconds(len(plan._swap_out)),
                self._bus_seconds(len(plan._swap_in)),
            )
            if self.bus is None:
                return now + out + back
            yield from self._catch_up(now)
            if out:
                self.environment.process(self._transfer(out))
            if back:
                yield from self._transfer(back)
            return self.environment.now
        except StopIteration as error:
            raise stopped(error) from error

    def _bus_seconds(self, blocks: int) -> float:
        """Seconds to move blocks over the bus."""
        if not blocks:
            return 0.0
        return policy_validation.seconds(
            self.cost, "swap_seconds", self.raw_cost.swap_seconds(blocks)
        )

    def _observed(self, plan: StepPlan) -> bool:
        """Whether the end of this step has to be reported."""
        return self.observer is not None and self.observer.waits_for(plan)

    def _catch_up(self, now: float) -> Generator[simpy.Event, None, None]:
        if now > self.environment.now:
            yield self.environment.at(now, NORMAL)

    def _transfer(self, seconds: float) -> Generator[simpy.Event, None, None]:
        assert self.bus is not None
        with self.bus.request() as turn:
            yield turn
            yield self.environment.timeout(seconds)

    def _depart(self, some: Sequence[Request], now: float) -> Generator[simpy.Event, None, None]:
        """Requests depart now."""
        try:
            if self.done or self.on_departure:
                yield from self._catch_up(now)
            for request in some:
                self._leave(request)
        except StopIteration as error:
            raise stopped(error) from error

    def _leave(self, request: Request) -> None:
        self.recorder.left(request)
        if self.searching:
            self._forget(request)
        if self.done and (event := self.done.pop(request.id, None)):
            event.succeed()
        if self.on_departure:
            self.on_departure(request)

    def _forget(self, request: Request) -> None:
        """Discard the beam-search state of a request."""
        if request.params.beam_search:
            self.searching -= 1
            self.beams.left(request)


class AheadServer(Server):
    """Drives a scheduler with `async_scheduling`.

        planned      n+1        n+2        n+3
        runs     ── n ───────┤── n+1 ────┤── n+2 ──
        completed            n          n+1

    Step n+1 is planned when step n begins: it sees all arrivals up to then, but no token of step n.
    The first step after a pause, and every step while a request depends on its last tokens, is
    planned after the one before has completed.
    """

    def _serve(self) -> Generator[simpy.Event, None, None]:
        try:
            scheduler, now = self.scheduler, self.environment.now
            current: StepPlan | None = None
            self._stuck = False
            while True:
                if current is None:
                    if (self._stuck or not scheduler.unfinished) and not self.source.unbegun:
                        woken = yield from self._sleep(now)
                        if woken is None:
                            break
                        now, self._stuck = woken, False
                        continue
                    current = self._dispatched(now)
                    self._stuck = current.idle
                    refused = current.rejected
                else:
                    refused = ()
                if self.fast_forward and not (scheduler.disturbed or scheduler.looks_back):
                    now, ended = self._fast_forward_ahead(current, now)
                    if ended:
                        yield from self._depart(ended, now)
                following = None
                works = current.decode_count or not current.empty
                if works and scheduler.runnable and not scheduler.looks_back:
                    following = self._dispatched(now)
                    refused = refused + following.rejected
                self._refused = refused
                now = yield from self._finish_step(current, now)
                self._refused = ()
                if refused:
                    yield from self._depart([rejection.request for rejection in refused], now)
                if following is not None and following.empty:
                    now = yield from self._finish_step(following, now)
                    following = None
                current = following
            self.scheduler.raise_if_deadlocked(now)
        except StopIteration as error:
            raise stopped(error) from error

    def _fast_forward_ahead(self, plan: StepPlan, now: float) -> tuple[float, list[Request]]:
        """Repeat a step that begins now while there are no other events.

        Returns when the last one begins, which `plan` then describes, and the requests that
        finished in the one before; all earlier steps have completed.
        """
        ended: list[Request] = []
        if self.searching and self.scheduler.clock.wide:
            return now, ended
        scheduler, recorder = self.scheduler, self.recorder
        repeats, recorded = scheduler.uneventful(plan), (-1, -1)
        until = self.environment.peek()
        while repeats and not scheduler.disturbed:
            if self.observer is not None and plan._ending:
                break
            if (end := now + self._seconds(plan)) >= until or not scheduler.grow_ahead(plan, now):
                break
            if (plan._waiting, plan._shared_blocks) != recorded:  # the first, and after an arrival
                recorder.step(plan, now, end, scheduler)
                recorded = plan._waiting, plan._shared_blocks
            else:
                recorder.again(end, plan._used_blocks)
            # An arrival sees the next step dispatched and this one in flight, as if planned.
            ending = scheduler.fast_forward_ahead(plan, end)
            if end >= self._next_at:
                self._add_arrivals(end)
            ended = scheduler.complete_ahead(ending, end)
            repeats = scheduler.uneventful(plan) if plan._ending else repeats - 1
            now = end
        return now, ended

    def _seconds(self, plan: StepPlan) -> float:
        """The validated duration of a step."""
        took = self.raw_cost.step_seconds(plan)
        if type(took) is not float or not 0.0 <= took <= LONGEST:
            took = policy_validation.seconds(self.cost, "step_seconds", took)
        return took

    def _dispatched(self, now: float) -> StepPlan:
        plan = self._plan(now)
        self.scheduler.dispatch(plan)
        return plan

    def _finish_step(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Advance to the end of a step that begins now, and complete it; returns its end."""
        try:
            end = now
            if not plan._decode_count and plan.empty:
                if self.transfers is not None:
                    self.transfers.begin(plan, now)
            else:
                begin = now
                if plan._swap_out or plan._swap_in or plan._copies:
                    begin = yield from self._move_blocks(plan, now)
                if self.transfers is not None:
                    begin = self.transfers.begin(plan, begin)
                end = begin + self._seconds(plan)
                if self.transfers is not None:
                    end = self.transfers.end(begin, end)
                if now < end >= self.environment.peek():
                    yield self.environment.at(end, NORMAL)
                if now < end >= self._next_at:
                    self._add_arrivals(end)
            if self.transfers is not None:
                self.transfers.computed(plan, end)
            self.recorder.step(plan, now, end, self.scheduler)
            parents = self.beams.parents(plan) if self.searching else None
            ended = self.scheduler.complete(plan, end, None, None, parents)
            if ended:
                yield from self._depart(ended, end)
            if self.transfers is not None:
                self._report(self.transfers, end)
            if self.observer is not None and self.observer.waits_for(plan):
                yield from self._catch_up(end)
                self.observer.committed(plan)
                yield self.environment.at(end, NORMAL)  # waiters run first
            return end
        except StopIteration as error:
            raise stopped(error) from error
