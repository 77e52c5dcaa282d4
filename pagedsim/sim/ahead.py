"""A server with async scheduling: it plans a step while the one before runs."""

from __future__ import annotations

from collections.abc import Generator

import simpy

from pagedsim.core import Request, StepPlan, policy_validation
from pagedsim.core.policy_validation import LONGEST
from pagedsim.sim.environment import NORMAL
from pagedsim.sim.server import Server


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
        scheduler, now = self.scheduler, self.environment.now
        current: StepPlan | None = None
        self._stuck = False
        while True:
            if current is None:
                if not scheduler.unfinished or self._stuck:
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
                yield from self._depart([one.request for one in refused], now)
            if following is not None and following.empty:
                now = yield from self._finish_step(following, now)
                following = None
            current = following
        self._raise_if_deadlocked(now)

    def _fast_forward_ahead(self, plan: StepPlan, now: float) -> tuple[float, list[Request]]:
        """Repeat a step that begins now while there are no other events.

        Returns when the last one begins, which `plan` then describes, and the requests that
        finished in the one before; all earlier steps have completed.
        """
        ended: list[Request] = []
        if self.searching and self.scheduler.clock.wide:
            return now, ended
        scheduler, recorder = self.scheduler, self.recorder
        repeats, waiting = scheduler.uneventful(plan), -1
        until = self.environment.peek()
        while repeats and not scheduler.disturbed:
            # A finishing request frees its seat at the end of its last step, or at its beginning.
            if self.observer is not None and (plan.ending or scheduler.ends_next):
                break
            if (end := now + self._seconds(plan)) >= until or not scheduler.grow_ahead(plan, now):
                break
            if plan.waiting != waiting:  # the first step, and after an arrival
                recorder.step(plan, now, end, scheduler)
                waiting = plan.waiting
            else:
                recorder.again(end, plan.used_blocks)
            # An arrival sees the next step dispatched and this one in flight, as if planned.
            ending = scheduler.fast_forward_ahead(plan, end)
            if end >= self._next_at:
                self._add_arrivals(end)
            ended = scheduler.complete_ahead(ending, end)
            repeats = scheduler.uneventful(plan) if plan.ending else repeats - 1
            now = end
        return now, ended

    def _seconds(self, plan: StepPlan) -> float:
        """The validated duration of a step."""
        took = self.raw_cost.step_seconds(plan)
        if type(took) is not float or not 0.0 <= took <= LONGEST:
            took = policy_validation.seconds(self.cost, "step_seconds", took)
        return took

    def _dispatched(self, now: float) -> StepPlan:
        plan = self.scheduler.plan(now)
        self.scheduler.dispatch(plan)
        return plan

    def _finish_step(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Advance to the end of a step that begins now, and complete it; returns its end."""
        end = now
        if not plan.decode_count and plan.empty:
            self._end_of_moves(plan, now, now, now)
        else:
            begin = now
            if plan.swap_out or plan.swap_in or plan.copies:
                begin = yield from self._move_blocks(plan, now)
            end = begin + self._seconds(plan)
            if plan.moves:
                end = self._end_of_moves(plan, now, begin, end)
            if now < end >= self.environment.peek():
                yield self.environment.at(end, NORMAL)
            if now < end >= self._next_at:
                self._add_arrivals(end)
        self.recorder.step(plan, now, end, self.scheduler)
        parents = self.beams.parents(plan) if self.searching else None
        ended = self.scheduler.complete(plan, end, None, None, parents)
        if ended:
            yield from self._depart(ended, end)
        if self.observer is not None and self.observer.waits_for(plan):
            yield from self._catch_up(end)
            self.observer.committed(plan)
            yield self.environment.at(end, NORMAL)  # waiters run first
        return end
