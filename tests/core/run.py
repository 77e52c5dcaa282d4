"""Runs a case to its end, and looks at every plan and at every commit.

`AheadRun` plans each step while the one before is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import NamedTuple

from pagedsim.core import (
    Continuation,
    Memory,
    Request,
    RequestId,
    Scheduler,
    State,
    StepPlan,
)
from pagedsim.core.memory.reserved import ReservedMemory, power_of_two
from tests.core.cases import Case, Job, token
from tests.core.odd_policies import Counting
from tests.core.shadow import Shadow

OVER = (State.FINISHED, State.ABORTED, State.REJECTED)


@dataclass
class Known:
    """What was seen of a request, and must not be taken back."""

    job: Job
    request: Request
    generated: int = 0
    first_token_at: float | None = None
    outputs: list[list[int]] = field(default_factory=list)


class Run:
    """A scheduler, a shadow that carries its plans out, and an auditor of both.

    `glides`: quiet steps are not planned one by one.
    """

    ahead = False
    """Whether steps are planned before the one before is completed."""

    def __init__(
        self, case: Case, glides: bool = False, scheduler: Scheduler | None = None
    ) -> None:
        self.case = case
        self.glides = glides
        self.random = Random(case.seed)
        self.scheduler = scheduler or case.server.build(case.seed, self.ahead)
        self.shadow = Shadow(self.scheduler.memory)
        self.known: dict[RequestId, Known] = {}
        self.now = 0.0
        self.steps = 0
        self.stalled = 0  # steps since something happened that cannot happen for ever
        self.patience = patience(case, self.scheduler)
        self.trace: list[tuple[object, ...]] = []
        """Each step in short, to compare runs."""
        self._arrivals: dict[str, tuple[int, Job]] = {}  # and at which step

        at = 0
        for index, job in enumerate(case.jobs):
            at += job.gap
            self._arrivals[str(index)] = (at, job)

    def go(self) -> Run:
        """Until no request is left."""
        while self.advance():
            pass
        self.audit_end()
        return self

    def advance(self) -> bool:
        """A step, or a pause; whether there was anything left to come."""
        if not (self._arrivals or self.scheduler.unfinished):
            return False
        self._arrive()
        if self.scheduler.unfinished:
            self._step()
        self.steps += 1
        return True

    # -- what an executor and its clients do -----------------------------------------------------

    def _arrive(self) -> None:
        for name, (at, job) in list(self._arrivals.items()):
            if at <= self.steps:
                del self._arrivals[name]
                request = job.request(name)
                output_len = job.output if self.case.ends == "hidden" else None
                self.scheduler.add(request, self.now, output_len)
                self.shadow.add(request)
                self.known[name] = Known(job, request)
                self.stalled = 0

    def _step(self) -> None:
        waiting = set(self.scheduler.waiting)
        plan = self.scheduler.plan(self.now)
        self._carry_out(plan, waiting)
        if self.glides and self._glide(plan):
            return
        self._abort(2 * self.steps)
        answers = {r.id: self._continue(r) for r in self._sampling(plan)}
        finished = self._finished(plan)
        self.now += 1
        if self.case.tells_tokens:
            ended = self.scheduler.commit(plan, self.now, answers, finished)
        else:
            answers, parents = self._untold(plan, answers)
            ended = self.scheduler.commit(plan, self.now, None, finished, parents)
        for name, answer in answers.items():
            self._record(self.known[name], answer)
        self._audit_commit(bool(answers or ended))
        self._abort(2 * self.steps + 1)
        self.shadow.scrub(self.scheduler.requests.values(), self.scheduler.queues.copies)

    def _carry_out(self, plan: StepPlan, waiting: set[Request]) -> None:
        self._audit_plan(plan, waiting)
        self.shadow.execute(plan)
        self.trace.append(summary(self.scheduler, plan))

    def _glide(self, plan: StepPlan) -> bool:
        """Fly over the quiet steps after `plan`; whether the last of them is committed."""
        quiet = self.scheduler.uneventful(plan)
        while quiet and self._undisturbed():
            self.now += 1
            flies = self.scheduler.fast_forward(plan, self.now)
            for request in plan.decodes:
                self._record(self.known[request.id], Continuation((0,) * request.num_seqs))
            self._audit_commit(advanced=True)
            if not flies:
                return True
            self.steps += 1
            self._carry_out(plan, set())
            quiet -= 1
        return False

    def _undisturbed(self) -> bool:
        """Whether no request arrives or is aborted before the next plan."""
        aborts = any(moment // 2 == self.steps for moment, _ in self.case.aborts)
        arrives = any(at <= self.steps + 1 for at, _ in self._arrivals.values())
        return not (aborts or arrives)

    def _abort(self, moment: int) -> None:
        for when, index in self.case.aborts:
            if when == moment and str(index) in self.scheduler.requests:
                request = self.scheduler.abort(str(index), self.now)
                assert request.state is State.ABORTED
                self._audit_queues()

    def _sampling(self, plan: StepPlan) -> list[Request]:
        planned = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        return [request for request in planned if request.state is State.RUNNING]

    def _continue(self, request: Request) -> int | Continuation:
        """The next tokens: its stream goes on, and its sequences differ now and then."""
        stream = self.known[request.id].job.stream or 0
        following = token(stream, request.num_tokens)
        if request.num_seqs == 1 and self.random.random() < 0.8:
            return following
        parents = None
        count = request.num_seqs
        if self.case.beams and self.random.random() < 0.6:
            count = (
                self.random.randint(1, request.num_seqs) if self.random.random() < 0.3 else count
            )
            parents = [self.random.randrange(request.num_seqs) for _ in range(count)]
        tokens = [following + 100 * self.random.randrange(2) for _ in range(count)]
        return Continuation(tokens, parents)

    def _untold(
        self, plan: StepPlan, answers: dict[RequestId, int | Continuation]
    ) -> tuple[dict[RequestId, int | Continuation], dict[RequestId, Sequence[int]]]:
        """What a simulation makes of them: no tokens, and parents only of decoding requests."""
        parents: dict[RequestId, Sequence[int]] = {}
        for request in plan.decodes:
            answer = answers.get(request.id)
            if isinstance(answer, Continuation) and answer.parents and request.num_seqs > 1:
                parents[request.id] = answer.parents
        untold: dict[RequestId, int | Continuation] = {
            name: Continuation((), parents.get(name)) for name in answers
        }
        return untold, parents

    def _finished(self, plan: StepPlan) -> dict[RequestId, str]:
        if self.case.ends == "hidden":
            return {}
        # A decode's token is counted by the commit, like the one of a chunk.
        ending = [
            request.id
            for request in self._sampling(plan)
            if request.generated + 1 >= self.known[request.id].job.output
        ]
        return dict.fromkeys(ending, "stop")

    def _record(self, known: Known, answer: int | Continuation) -> None:
        """Note what a request was given, in the shadow and beside it."""
        self._note(known, answer)
        self._store(known, answer)

    def _note(self, known: Known, answer: int | Continuation) -> None:
        if self.case.tells_tokens:
            tokens, parents = _lines(known.request, answer)
            old = known.outputs or [[] for _ in range(known.job.width)]
            known.outputs = [[*old[parent], tokens[i]] for i, parent in enumerate(parents)]
            assert known.request.outputs == known.outputs, f"{known.request!r} lost tokens"

    def _store(self, known: Known, answer: int | Continuation) -> None:
        request = known.request
        tokens, parents = _lines(request, answer)
        own = [(request.id, i, request.num_tokens) for i in range(len(parents))]
        self.shadow.sampled(request, tokens if self.case.tells_tokens else own, parents)

    # -- what must hold --------------------------------------------------------------------------

    def _audit_plan(self, plan: StepPlan, waiting: set[Request]) -> None:
        self._audit_queues()
        if plan.took_memory and self.case.server.batching != "sglang":
            admitted = [r for r in waiting if r.state is State.RUNNING]
            assert not admitted, f"{admitted} start in a step that takes memory"
            assert not plan.resumed, f"{plan.resumed} come back in a step that takes memory"
        assert not (plan.swap_out and plan.swap_in), "a step swaps in one direction"
        for request, reason in plan.rejected:
            assert request.state is State.REJECTED, request
            assert reason, request
            self.stalled = 0
        self._audit_totals(plan)
        self._audit_budget(plan)

    def _audit_totals(self, plan: StepPlan) -> None:
        chunks, decodes = plan.chunks, plan.decodes
        assert plan.prefill_tokens == sum(c.length for c in chunks)
        assert plan.prefill_context == sum(c.start + c.length for c in chunks)
        assert plan.prefill_attention == sum(c.length * (c.start + c.length) for c in chunks)
        assert plan.prefill_pairs == sum(
            sum(range(c.start + 1, c.start + c.length + 1)) for c in chunks
        )
        assert plan.decode_count == sum(r.num_seqs for r in decodes)
        assert plan.decode_context == sum(r.num_seqs * r.num_tokens for r in decodes)
        assert plan.swapped_blocks == len(plan.swap_out) + len(plan.swap_in)
        assert all(chunk.length > 0 for chunk in chunks)
        planned = {*decodes, *(chunk.request for chunk in chunks)}
        assert planned <= self.scheduler.running.keys(), "work for a request that does not run"

    def _audit_budget(self, plan: StepPlan) -> None:
        if self.case.server.batching in ("unified", "trtllm"):
            total = plan.prefill_tokens + plan.decode_count
            assert total <= self.scheduler.max_batched_tokens, "more than a step may compute"
            return
        mixed = self.case.server.mixed
        assert mixed or not (plan.chunks and plan.decodes), "a step is all prefill or all decode"
        if self.case.server.batching == "sglang":
            self._audit_prefills(plan)
        elif len({chunk.request for chunk in plan.chunks}) > 1:
            assert plan.prefill_tokens <= self.scheduler.max_batched_tokens
        if self.case.server.batching == "one_by_one":
            assert len(plan.decodes) <= 1
        else:
            assert not plan.held

    def _audit_prefills(self, plan: StepPlan) -> None:
        """The budgets of SGLang's batch of prefills, which are in whole pages."""
        chunk, page = self.case.server.chunk, self.case.server.block_size
        if chunk is not None:
            assert plan.prefill_tokens <= max(chunk, page)
        if len(plan.chunks) > 1:
            assert plan.prefill_tokens - plan.chunks[-1].length < self.scheduler.max_batched_tokens

    def _audit_commit(self, advanced: bool) -> None:
        self._audit_queues()
        for known in self.known.values():
            self._audit_request(known)
        self.stalled = 0 if advanced else self.stalled + 1
        assert self.stalled <= self.patience, f"no request advanced in {self.stalled} steps"

    def _audit_request(self, known: Known) -> None:
        request = known.request
        assert request.generated >= known.generated, f"{request!r} lost tokens"
        known.generated = request.generated
        if known.first_token_at is None and request.generated:
            known.first_token_at = self.now
        assert request.first_token_at == known.first_token_at, request
        if request.state is State.FINISHED and request.finished_at == self.now:
            self._audit_finished(known)
        if request.alive:
            for line in self.shadow.lines[request.id]:
                assert len(line) == request.num_tokens, request

    def _audit_finished(self, known: Known) -> None:
        request, job = known.request, known.job
        room = max(longest_answer(self.scheduler, self.case.server.batching, job.prompt), 1)
        expected = min(job.output, room)
        # What memory holds bounds a group sooner.
        assert request.generated == expected or (job.width > 1 and request.generated < expected)
        assert request.finish_reason in ("length", "stop"), request

    def _audit_queues(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        memory, alive = scheduler.memory, scheduler.requests.values()
        if isinstance(memory, ReservedMemory):
            used = sum(power_of_two(len(table)) for r in alive for table in r.tables)
        else:
            used = len(set(chain.from_iterable(t for r in alive for t in r.tables)))
            for request in alive:
                most = memory.blocks_for(request.num_tokens)
                assert all(len(table) <= most for table in request.tables), "blocks to no purpose"
        assert used + memory.free == memory.total, "GPU blocks do not add up"
        assert memory.used == used
        assert 0 <= memory.cached <= memory.free
        there = set(chain.from_iterable(t for r in alive for t in r.cpu_tables))
        assert len(there) + memory.cpu_free == memory.cpu_total, "CPU blocks do not add up"
        self._audit_usage(memory)
        places = Counter([*scheduler.waiting, *scheduler.running, *scheduler.swapped])
        assert places == Counter(alive), "a request is not in exactly one queue"

    def _audit_usage(self, memory: Memory) -> None:
        scheduler = self.scheduler
        usage = memory.usage([*scheduler.running, *scheduler.swapped])
        assert sum(usage) == memory.total * memory.block_size, usage
        assert min(usage) >= 0, usage

    def audit_end(self) -> None:
        scheduler = self.scheduler
        assert all(known.request.state in OVER for known in self.known.values())
        assert len(self.known) == len(self.case.jobs)
        assert scheduler.memory.free == scheduler.memory.total
        assert scheduler.memory.cpu_free == scheduler.memory.cpu_total
        assert not scheduler.queues.copies, "copies are pending for no request"
        if isinstance(scheduler.policy, Counting):
            assert scheduler.policy.arrived == scheduler.policy.left == len(self.known)


def summary(scheduler: Scheduler, plan: StepPlan) -> tuple[object, ...]:
    """A plan in short, and the holders of blocks, to compare runs."""
    requests = (plan.decodes, plan.held, plan.preempted, plan.displaced, plan.resumed)
    return (
        (plan.number, plan.now, plan.prefill_tokens, plan.decode_count, plan.decode_context),
        [(c.request.id, c.sequence, c.start, c.length) for c in plan.chunks],
        [[request.id for request in some] for some in requests],
        [rejection.request.id for rejection in plan.rejected],
        [(one.id, [list(table) for table in one.tables]) for one in scheduler.queues.holders],
        (scheduler.memory.free, scheduler.memory.cpu_free),
    )


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
        for request in scheduler.requests.values():  # preempted ones may have lost a token
            for line in self.shadow.lines[request.id]:
                del line[request.num_tokens :]
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
        there, gone = scheduler.requests, flight.plan.gone
        given = [name for name in flight.answers if name in there and there[name] not in gone]
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


def _lines(request: Request, answer: int | Continuation) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of an answer, and which sequences they continue."""
    tokens, parents = ((answer,), None) if isinstance(answer, int) else answer
    return tokens, range(len(tokens) or request.num_seqs) if parents is None else parents


def longest_answer(scheduler: Scheduler, batching: str, prompt: int) -> int:
    """Tokens after which any answer to a prompt ends."""
    if batching != "sglang":
        return scheduler.max_model_len - prompt
    page, total = scheduler.memory.block_size, scheduler.memory.total
    pages = -(-prompt // page) * page
    return min(
        min(scheduler.max_model_len, total * page) - 2 - prompt, (total - 1) * page - pages - 1
    )


def patience(case: Case, scheduler: Scheduler) -> int:
    """Steps within which a request must get a token or leave, once none arrives.

    Of those that run, the first in rank is never preempted: in each step it computes a chunk of
    at most the budget, or decodes. While it waits for room, the work of another may be done and
    lost to it, hence twice. To the steps of computing come one each for giving way, for being
    admitted or rebuilt, and for the empty step of a lone request that preempted itself.
    """
    work = max(job.width * (job.prompt + job.output) for job in case.jobs)
    budget = min(scheduler.max_batched_tokens, case.server.chunk or scheduler.max_batched_tokens)
    return 2 * (-(-work // budget) + 3)
