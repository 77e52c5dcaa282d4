"""Runs a case with steps that are planned while the one before is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagedsim.core import Continuation, Request, RequestId, State, StepPlan
from tests.core.cases import Case
from tests.core.run import Known, Run


class Flight(NamedTuple):
    """A step under way, and what the device has sampled in it."""

    plan: StepPlan
    answers: Mapping[RequestId, int | Continuation]
    parents: Mapping[RequestId, Sequence[int]] | None
    finished: Mapping[RequestId, str]


class AheadRun(Run):
    """The device computes and samples at once; the scheduler gets its tokens late."""

    ahead = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.tells_tokens:
            self.scheduler.expect_tokens()
        self.flight: Flight | None = None
        self.ended: set[RequestId] = set()
        """At their end with a step that was told of: no later plan may have them."""

    def go(self) -> Run:
        super().go()
        if self.flight is not None:  # with it a request was computed that had ended
            self._tell(self.flight)
        return self

    def _step(self) -> None:
        scheduler = self.scheduler
        current, self.flight = self.flight or self._launch(), None
        following = None
        if scheduler.runnable and not scheduler.looks_back:
            following = self._launch()
            self.seen["ahead"] += 1
        self._abort(2 * self.steps)
        self.now += 1
        self._land(current)
        self._abort(2 * self.steps + 1)
        self.shadow.scrub(scheduler.requests.values(), scheduler.queues.copies)
        if following is not None and following.plan.empty:
            self._land(following)
        else:
            self.flight = following

    def _launch(self) -> Flight:
        """Plan a step, carry it out, and say no more than that."""
        scheduler = self.scheduler
        waiting = set(scheduler.waiting)
        plan = scheduler.plan(self.now)
        self._carry_out(plan, waiting)
        planned = {*plan.decodes, *(chunk.request for chunk in plan.chunks)}
        assert not self.ended & {request.id for request in planned}, "computed after their end"
        for request in plan.decodes:
            assert not self._full(request), f"{request!r} cannot go on, as was known"
        answers = {r.id: self._continue(r) for r in self._sampling(plan)}
        finished = self._finished(plan)
        parents = None
        if not self.case.tells_tokens:
            answers, parents = self._untold(plan, answers)
        scheduler.dispatch(plan)
        self._audit_queues()
        for name, answer in answers.items():
            self._store(self.known[name], answer)
        return Flight(plan, answers, parents, finished)

    def _full(self, request: Request) -> bool:
        job = self.known[request.id].job
        room = max(self.scheduler.max_model_len - job.prompt, 1)
        limit = min(job.output, room) if job.limited else room
        return job.width == 1 and request.generated >= limit

    def _land(self, flight: Flight) -> None:
        scheduler = self.scheduler
        given = [name for name in flight.answers if name in scheduler.requests]
        late = {r for r in self._samplers(flight.plan) if r.state is State.FINISHED}
        self.seen["late"] += len(late)
        ended = self._tell(flight)
        for name in given:
            known = self.known[name]
            self._note(known, flight.answers[name])
            known.generated += 1
            known.first_token_at = self.now if known.generated == 1 else known.first_token_at
        self.ended.update(request.id for request in ended)
        self._audit_commit(bool(given or ended))

    def _tell(self, flight: Flight) -> list[Request]:
        tokens = flight.answers if self.case.tells_tokens else None
        return self.scheduler.complete(
            flight.plan, self.now, tokens, flight.finished, flight.parents
        )

    @staticmethod
    def _samplers(plan: StepPlan) -> list[Request]:
        return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]

    def _audit_request(self, known: Known) -> None:
        request = known.request
        assert request.first_token_at == known.first_token_at, request
        if request.state is State.FINISHED:
            assert request.generated == known.generated, f"{request!r} has what it was not told"
            if request.finished_at == self.now:
                self._audit_finished(known)
        if request.alive:
            under_way = request.generated - known.generated
            assert 0 <= under_way <= 2, f"{request!r}: {under_way} tokens are not told"
            for line in self.shadow.lines[request.id]:
                assert len(line) == request.num_tokens, request
