"""A replica whose scheduler is a step ahead: it plans a step while the one before runs."""

from __future__ import annotations

from collections.abc import Generator

import simpy

from pagedsim.core import Request, StepPlan, policy_validation
from pagedsim.core.policy_validation import LONGEST
from pagedsim.sim.environment import NORMAL
from pagedsim.sim.server import Server


class AheadServer(Server):
    """For a scheduler with `async_scheduling`.

        planned      n+1        n+2        n+3
        runs     ── n ───────┤── n+1 ────┤── n+2 ──
        told                 n          n+1

    Step n+1 is planned in the moment in which step n begins, so it knows who has come until then,
    and no token of step n. The first step after a pause, and every one while somebody looks back,
    is planned when all is told.
    """

    def _serve(self) -> Generator[simpy.Event, None, None]:
        scheduler, now = self.scheduler, self.environment.now
        current: StepPlan | None = None
        self._stuck = False
        while True:
            if current is None:
                if not scheduler.unfinished or self._stuck:
                    woken = yield from self._rest(now)
                    if woken is None:
                        break
                    now, self._stuck = woken, False
                    continue
                current = self._launched(now)
                self._stuck = current.idle
                refused = current.rejected
            else:
                refused = ()
            if self.fast_forward and not (scheduler.disturbed or scheduler.looks_back):
                now, ended = self._glide_ahead(current, now)
                if ended:
                    yield from self._part_with(ended, now)
            following = None
            works = current.decode_count or not current.empty
            if works and scheduler.runnable and not scheduler.looks_back:
                following = self._launched(now)
                refused = refused + following.rejected
            self._refused = refused
            now = yield from self._land(current, now)
            self._refused = ()
            if refused:
                yield from self._part_with([one.request for one in refused], now)
            if following is not None and following.empty:
                now = yield from self._land(following, now)
                following = None
            current = following
        self._refuse_leftovers(now)

    def _glide_ahead(self, plan: StepPlan, now: float) -> tuple[float, list[Request]]:
        """Repeat a step that begins now while nothing else happens.

        Returns when the last one begins, which stands in `plan` then, and who has ended with the
        one before; all before it have been told of.
        """
        ended: list[Request] = []
        if self.searching and self.scheduler.clock.wide:
            return now, ended
        scheduler, recorder = self.scheduler, self.recorder
        quiet, waiting = scheduler.uneventful(plan), -1
        until = self.environment.peek()
        while quiet and not scheduler.disturbed:
            # A seat comes free with the last step of a request, or when the one before it begins.
            if self.outside is not None and (plan.ending or scheduler.ends_next):
                break
            if (end := now + self._seconds(plan)) >= until or not scheduler.grow_ahead(plan, now):
                break
            if plan.waiting != waiting:  # as in the first of them, and where somebody has come
                recorder.step(plan, now, end, scheduler)
                waiting = plan.waiting
            else:
                recorder.again(end, plan.used_blocks)
            # An arrival finds the next step dispatched and this one not ended, as if planned.
            ending = scheduler.fast_forward_ahead(plan, end)
            if end >= self._next_at:
                self._let_in(end)
            ended = scheduler.complete_ahead(ending, end)
            quiet = scheduler.uneventful(plan) if plan.ending else quiet - 1
            now = end
        return now, ended

    def _seconds(self, plan: StepPlan) -> float:
        """How long a step takes."""
        took = self.asked.step_seconds(plan)
        if type(took) is not float or not 0.0 <= took <= LONGEST:
            took = policy_validation.seconds(self.cost, "step_seconds", took)
        return took

    def _launched(self, now: float) -> StepPlan:
        plan = self.scheduler.plan(now)
        self.scheduler.dispatch(plan)
        return plan

    def _land(self, plan: StepPlan, now: float) -> Generator[simpy.Event, None, float]:
        """Let the time of a step pass that begins now, and tell of it; returns its end."""
        end = now
        if not plan.decode_count and plan.empty:
            self._moved(plan, now, now, now)
        else:
            begin = now
            if plan.swap_out or plan.swap_in or plan.copies:
                begin = yield from self._begin(plan, now)
            end = begin + self._seconds(plan)
            if plan.moves:
                end = self._moved(plan, now, begin, end)
            if now < end >= self.environment.peek():
                yield self.environment.at(end, NORMAL)
            if now < end >= self._next_at:
                self._let_in(end)
        self.recorder.step(plan, now, end, self.scheduler)
        parents = self.beams.parents(plan) if self.searching else None
        ended = self.scheduler.complete(plan, end, None, None, parents)
        if ended:
            yield from self._part_with(ended, end)
        if self.outside is not None and self.outside.waits_for(plan):
            yield from self._catch_up(end)
            self.outside.committed(plan)
            yield self.environment.at(end, NORMAL)  # whoever waited goes first
        return end
