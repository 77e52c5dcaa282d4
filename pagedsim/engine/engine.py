"""The engine: executes the scheduler's plans step by step, with real tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedsim.core import (
    Continuation,
    Request,
    RequestError,
    RequestId,
    SamplingParams,
    StepPlan,
)
from pagedsim.core.transfers import Direction, EndedCopy
from pagedsim.engine.assemble import assemble, device_of
from pagedsim.engine.beam import Beams
from pagedsim.engine.engine_args import Arguments, EngineArgs, vllm_errors
from pagedsim.engine.file_tier import file_tiers
from pagedsim.engine.host_copies import CopyError
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.output import Observer, RequestOutput, TransferObserver
from pagedsim.engine.parallel.ranks import RankError
from pagedsim.engine.runtime import THREADS, sent, uninterrupted
from pagedsim.engine.sampler import Draw, Row, Rows, Sampler
from pagedsim.engine.sequence import Group, make_group
from pagedsim.engine.step_inputs import Samplers, samplers_of
from pagedsim.requirements import refuse_older

log = logging.getLogger(__name__)

POLL_S = 1e-4
"""Between two looks at copies that are waited for."""
WAIT_S = 1e-3
"""For a copy to end, where nothing else can be done, before a driver's turn."""


class StepTimes(NamedTuple):
    """Where the host's time went in the last step, in seconds."""

    feed: float
    """From the step's start to its planning."""
    plan: float
    launch: float
    """Copies, moves and kernel launches; on a CPU the computation itself."""
    sample: float
    """Waiting for the tokens."""
    commit: float


StepResults = tuple[dict[RequestId, "int | Continuation"], dict[RequestId, str]]
"""Tokens and finish reasons, as `Scheduler.complete` takes them."""


class SamplingBatch:
    """The requests of a step that sample, and what stays the same while these sample together."""

    def __init__(self, samplers: Samplers, groups: Mapping[RequestId, Group]) -> None:
        self.samplers = samplers
        self.groups = [groups[request.id] for request, _ in samplers]
        self.plain = all(group.plain for group in self.groups)
        self.simple = all(group.simple for group in self.groups)
        self._steady = all(group.steady for group in self.groups)
        self.beams = any(isinstance(group, Beams) for group in self.groups)
        self.places: list[int] | None = None
        """Of the rows among the logits, if they are not those of the logits."""
        self.counts = [1] * len(samplers)
        """Of rows, for each request."""
        self._rows: Rows | None = None

    def is_of(self, samplers: Samplers) -> bool:
        """Whether it is of the same requests, and holds on."""
        return self._steady and self.samplers == samplers

    def rows(self) -> Rows | None:
        """The rows to sample next; None if there are only beams, or no row needs more than its
        logits. Called before the scheduler dispatches the step."""
        if self.plain:
            return None
        if self._rows is None or not self._steady:
            self._rows = self._gathered()
        else:
            positions = [request.num_tokens for request, _ in self.samplers]
            self._rows = self._rows._replace(positions=positions)
        return self._rows

    def _gathered(self) -> Rows | None:
        rows: list[Row] = []
        places: list[int] = []
        start = 0
        for number, ((_, count), group) in enumerate(zip(self.samplers, self.groups, strict=True)):
            mine = [] if isinstance(group, Beams) else group.rows()
            # All sequences of a request draw their first token from its single row.
            own_rows = count == len(mine)
            places += range(start, start + count) if own_rows else [start] * len(mine)
            rows += mine
            self.counts[number] = len(mine)
            start += count
        self.places = None if places == list(range(start)) else places
        return Rows.of(rows) if rows else None


class SamplingJob:
    """The sampling of one step.

    Created before the scheduler dispatches the step; `draw` samples on the device asynchronously,
    and `results`, which may follow a step later, waits for the tokens.
    """

    def __init__(self, batch: SamplingBatch) -> None:
        self.picked: Tensor | None = None
        """Sampled tokens on the device; row i is request i if each has one sequence."""
        self._batch, self._rows = batch, batch.rows()
        self._draw: Draw | None = None
        self._logits: Tensor | None = None

    def draw(self, logits: Tensor, sampler: Sampler) -> None:
        """Launch sampling; beam search processes its logits in `results`."""
        if self._batch.plain:
            self._draw = Draw(logits.argmax(1))
        if self._batch.beams:
            self._logits = logits
        if self._rows is not None:
            if (places := self._batch.places) is not None:
                logits = logits[sent(torch.tensor(places), logits.device)]
            self._draw = sampler.draw(logits, self._rows)
        if self._draw is not None:
            self.picked = self._draw.picked

    def results(self) -> StepResults:
        """Wait for the tokens; results of all requests that are still alive. Called once."""
        tokens: dict[RequestId, int | Continuation] = {}
        ended: dict[RequestId, str] = {}
        batch = self._batch
        picked, scores = ([], None) if self._draw is None else self._draw.results()
        if batch.simple:
            for (request, _), group, token in zip(
                batch.samplers, batch.groups, picked, strict=True
            ):
                if request.finish_reason is None:
                    name = request.id
                    tokens[name] = token
                    if token in group.ends:
                        ended[name] = "stop"
            return tokens, ended
        answer: int | Continuation
        start = at = scored = 0
        for (request, count), group, rows in zip(
            batch.samplers, batch.groups, batch.counts, strict=True
        ):
            if request.finish_reason is None:
                if isinstance(group, Beams):
                    assert self._logits is not None
                    answer, reason = group.take(self._logits[start : start + count])
                else:
                    answer, reason = group.take(picked[at : at + rows], scores, scored)
                tokens[request.id] = answer
                if reason is not None:
                    ended[request.id] = reason
            start += count
            at += rows
            scored += rows * group.scored
        return tokens, ended


class InflightStep:
    """A planned step with its computation and its sampling.

    A GPU computes asynchronously from the launch on, a CPU during the launch. An error on the way
    is kept and becomes the outcome.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.sampling: SamplingJob | None = None
        self.error: Exception | None = None
        """The error that prevents its execution."""
        self._compute: Callable[[], Tensor] | None = None

    @property
    def picked(self) -> Tensor | None:
        """Sampled tokens on the device, as in `SamplingJob`, once launched."""
        return None if self.sampling is None else self.sampling.picked

    def prepare(self, parts: Callable[[], tuple[Callable[[], Tensor], SamplingJob]]) -> None:
        """Build the computation of the logits and the sampling by `parts`."""
        with self._failing():
            self._compute, self.sampling = parts()

    def launch(self, sampler: Sampler) -> None:
        """Launch computation and sampling; idempotent."""
        compute, self._compute = self._compute, None
        if compute is not None and self.sampling is not None:
            with self._failing():
                self.sampling.draw(compute(), sampler)

    def outcome(self) -> StepResults | Exception:
        """Wait for the results, or return the error."""
        if self.error is None and self.sampling is not None:
            with self._failing():
                return self.sampling.results()
        assert self.error is not None, "neither a sampling job nor an error"
        return self.error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error


class LLMEngine:
    """Serves requests step by step.

    >>> engine = LLMEngine(model="tiny", device="cpu")
    >>> engine.add_request("a", "Once", SamplingParams(temperature=0, max_tokens=3))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.request_id, len(output.outputs[0].token_ids))
    a 3
    """

    def __init__(
        self,
        arguments: Arguments | None = None,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ) -> None:
        """`settings` are those of `Arguments.of`, where no object is given.

        `clock` gives the time in seconds; what the engine reports is counted from now.
        """
        refuse_older("engine")
        self.arguments = arguments = arguments or Arguments.of(**settings)
        self._threaded = device_of(arguments.device).type == "cpu"
        if self._threaded:
            THREADS.take(arguments.num_threads)
        try:
            parts = assemble(arguments)
        except BaseException:
            self._give_threads_back()
            raise
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.server = parts.server
        self.scheduler, self.runner = parts.scheduler, parts.runner
        self.observer = observer
        self.prices = parts.prices
        self.times: StepTimes | None = None
        """Of the last step; None before the first, and after one that failed."""
        self.end = 0.0
        """Of the last step."""
        self.failure = ""
        """Error of the last failed step."""
        self.stuck = False
        """Whether the last step was idle, and all will be until requests come or go."""
        self._copies_failed = False
        self.files = file_tiers(self.scheduler)
        """The tiers of files below the host tier."""
        self._rests = False  # since the last step, unless something has come at its end
        self._sampler = Sampler()
        self._batch: SamplingBatch | None = None  # of the last planned step
        self._oldest: InflightStep | None = None  # the oldest step in flight
        self._in_flight: list[StepPlan] = []  # all plans that are not completed
        # A CPU computes during the launch: the next step is planned first.
        self._defers = self.server.async_scheduling and self.model.device.type == "cpu"
        self.scheduler.expect_tokens()
        self._groups: dict[RequestId, Group] = {}
        self._streamed: set[RequestId] = set()
        self._numbers = itertools.count()
        self._eos = [token for token in self.model.eos_token_ids if token < self.model.vocab_size]
        self._clock, self._epoch = clock, clock()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """An engine with vLLM's names of settings, in errors, too."""
        with vllm_errors():
            return cls(args.arguments())

    @property
    def now(self) -> float:
        """Seconds since the engine was made."""
        return self._clock() - self._epoch

    @property
    def pause(self) -> float:
        """Seconds until the next step is due: 0, or infinity if it would be idle."""
        return inf if self.stuck and not self.copying else 0.0

    @property
    def copying(self) -> bool:
        """Whether copies from or to the host tier are in flight."""
        return self.runner.copies.busy or any(tier.busy for tier in self.files)

    @property
    def lag(self) -> float:
        """Always 0: steps have no due time."""
        return 0.0

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Defaults of SamplingParams: the model's own, if any."""
        from_model = self.arguments.generation_config == "auto"
        return self.model.default_sampling if from_model else {}

    def restart_clock(self) -> None:
        """Count times from now."""
        self._epoch, self.end = self._clock(), 0.0

    def close(self) -> None:
        """Release the engine's resources; it must not be used afterwards.

        The processes of a tensor-parallel model end with this, or when the engine is deleted. A
        model that was loaded before stays, for its next engine. After the last engine torch has as
        many threads as before the first.
        """
        self.runner.close()
        for tier in self.files:
            tier.close()
        self._give_threads_back()
        if not isinstance(self.arguments.model, LoadedModel):
            self.model.close()

    def _give_threads_back(self) -> None:
        if self._threaded:
            self._threaded = False
            THREADS.give_back()

    def check_progress(self) -> None:
        """Raise PagedsimError if requests are left and none can run."""
        if self.stuck and not self.copying:
            self.scheduler.raise_if_deadlocked(self.now)

    @property
    def waiting(self) -> int:
        """Requests that wait for their admission."""
        return len(self.scheduler.waiting)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        scheduler = self.scheduler
        unbegun = scheduler.transfer_source.unbegun
        return bool(scheduler.unfinished or self._oldest or unbegun)

    def get_num_unfinished_requests(self) -> int:
        return self.scheduler.unfinished

    # -- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        delta: bool = False,
        **labels: Any,
    ) -> None:
        """Queue a prompt, a text or token ids; raises RequestError if it can never be served.

        `labels` are for policies: priority, client, deadline, predicted_len, extra, arrival. With
        `stream`, every step that generates a token for it returns its output so far; with `delta`,
        too, only what is new since its last output, also in the last one. Where the returned
        sequences are known only at the end (beams, `best_of`), a stream of deltas is one output.
        """
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, self._encoded(request_id, prompt), params, **labels)
        if reason := self.scheduler.infeasible(request):
            raise RequestError(f"request {request_id!r}: {reason}")
        self.submit(request, text=text)
        group = self._groups[request_id]
        group.deltas = stream and delta and not group.ranked
        if stream and group.deltas == delta:
            self._streamed.add(request_id)

    def submit(
        self,
        request: Request,
        output_len: int | None = None,
        *,
        text: str | None = None,
        now: float | None = None,
    ) -> None:
        """Queue a `Request` of the core; its prompt must be token ids.

        With `output_len` it generates that many tokens, whatever they are, invisibly for policies
        and batchings. An infeasible request is rejected by the next step. `now` is its arrival, if
        not now.
        """
        self._check_ids(request)
        longest = max(self.scheduler.max_model_len - request.prompt_len, 1)
        group = make_group(
            request,
            tokenizer=self.tokenizer,
            eos=self._eos if output_len is None else (),
            seed=self.arguments.seed,
            number=next(self._numbers),
            text=text,
            limit=min(longest, output_len or longest),
        )
        self.scheduler.add(request, self.now if now is None else now, output_len)
        self.stuck = False
        self._groups[request.id] = group

    def abort_request(self, request_id: RequestId) -> RequestOutput:
        """Abort a request in any state; returns its final output."""
        request = self.scheduler.abort(request_id, self.now)
        self.stuck = False
        return self._leave(request, "abort")

    def _encoded(self, request_id: RequestId, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError(
                f"request {request_id!r}: the prompt is a text, and {self.model.name} has no "
                "tokenizer; give token ids"
            )
        return self.tokenizer.encode(prompt)

    def _check_ids(self, request: Request) -> None:
        if request.prompt is None:
            raise RequestError(f"request {request.id!r}: prompt must be token ids, or a text")
        known = range(self.model.vocab_size)
        for name, tokens in (
            ("prompt", (min(request.prompt), max(request.prompt))),
            ("SamplingParams.stop_token_ids", request.params.stop_token_ids),
        ):
            for token in tokens:
                if token not in known:
                    raise RequestError(
                        f"request {request.id!r}: {name} has token {token}: "
                        f"ids of {self.model.name} are 0 to {known.stop - 1}"
                    )

    # -- steps ---------------------------------------------------------------------------------

    def step(self, since: float | None = None) -> list[RequestOutput]:
        """Plan a step, execute it, and commit it to the scheduler.

        The step's time counts from `since`, by default now. A driver that keeps the engine busy
        passes the end of the last step: then steps follow without gaps, as in a simulation, and the
        host's work in between counts as part of the next one. With `async_scheduling` the following
        step is planned and launched before this one ends; the next call waits for it.

        Returns the requests that ended in it, and the outputs so far of those that stream. If its
        execution fails, the requests of this step, and of one that was planned on top of it, end
        with finish reason "error", and the engine goes on serving the others.

        Where nothing can run before a copy from or to the host tier has ended, it waits for that
        for a moment, and if none ends it does nothing.
        """
        entered, self.times = self.now, None
        if self.stuck and self.copying:
            if not self.collect(WAIT_S):
                return []
            entered = self.now
        start = entered if since is None else since
        if self._rests and start > self.end:
            self.collect(now=start)
        outputs: list[RequestOutput] = []
        planning: list[float] = []
        try:
            if self._oldest is None:
                self._oldest = self._planned(start, None, outputs, planning)
                self.stuck = self._oldest.plan.idle
            elif since is None:  # in flight since the last one ended
                start = self.end
            current, following = self._oldest, None
            if self._plans_ahead(current):
                following = self._planned(start, current, outputs, planning)
            launched = self.now
            current.launch(self._sampler)
            outcome = current.outcome()
            self.runner.check()
            if isinstance(outcome, Exception):
                return outputs + self._fail(outcome)
            done = self.now
            with uninterrupted():
                self.end = start if current.plan.empty else done
                self._complete(current.plan, start, outcome, outputs)
                self._oldest = following
                if self.copying:
                    # What ends below beside an idle step ends in the pause after it.
                    ended = self.runner.copies.ended if self.stuck else self._ended
                    self._report(ended(current.plan.flushed), waited=False)
                self._rests = self.stuck or not self.has_unfinished_requests()
        except BaseException as error:
            # E.g. Ctrl-C: end the step's requests. After a RankError no request can be served.
            if not isinstance(error, Exception) or isinstance(error, RankError):
                self._fail(error)
            raise
        self.times = StepTimes(
            feed=entered - start,
            plan=sum(planning),
            launch=launched - entered - sum(planning),
            sample=done - launched,
            commit=self.now - done,
        )
        return outputs

    def _plans_ahead(self, current: InflightStep) -> bool:
        """Whether another step can be planned before this one's tokens are committed."""
        scheduler = self.scheduler
        ahead = scheduler.async_scheduling and not scheduler.looks_back
        return ahead and scheduler.runnable and not current.plan.empty and current.error is None

    def _planned(
        self,
        now: float,
        before: InflightStep | None,
        outputs: list[RequestOutput],
        planning: list[float],
    ) -> InflightStep:
        """Plan a step after the one in flight, if any, and launch it; the seconds of planning are
        appended to `planning`."""
        with uninterrupted():
            start = self.now
            plan = self.scheduler.plan(now)
            self._unlock_promotions()
            planning.append(self.now - start)
            self._in_flight.append(plan)
            outputs += [self._leave(rejected.request, "rejected") for rejected in plan.rejected]
            flight = InflightStep(plan)

            def parts() -> tuple[Callable[[], Tensor], SamplingJob]:
                inputs = self.runner.inputs_of(plan, None if before is None else before.plan)

                def compute() -> Tensor:
                    return self.runner.carry_out(inputs, None if before is None else before.picked)

                samplers = samplers_of(plan)
                if self._batch is None or not self._batch.is_of(samplers):
                    self._batch = SamplingBatch(samplers, self._groups)
                return compute, SamplingJob(self._batch)

            flight.prepare(parts)
            self.scheduler.dispatch(plan)
        if not self._defers:
            flight.launch(self._sampler)
        return flight

    def _complete(
        self, plan: StepPlan, start: float, results: StepResults, outputs: list[RequestOutput]
    ) -> None:
        if self.observer is not None:
            self.observer.step(plan, start, self.end, self.scheduler)
        self._in_flight.remove(plan)
        finished = self.scheduler.complete(plan, self.end, *results)
        outputs += [self._leave(request, request.finish_reason or "") for request in finished]
        if streamed := self._streamed:
            groups = self._groups
            outputs += [groups[name].output(False) for name in results[0] if name in streamed]

    def collect(self, seconds: float = 0.0, now: float | None = None) -> bool:
        """While `stuck`, wait for so long at most until copies have ended; returns whether any has.

        They end `now`, if that is given.
        """
        until = time.monotonic() + seconds
        while not (ended := self._ended()) and time.monotonic() < until:
            time.sleep(POLL_S)
        if ended:
            self.end = self.now if now is None else now
            self._report(ended, waited=True)
        return bool(ended)

    def _ended(self, flushed: Collection[int] = ()) -> list[EndedCopy]:
        """Copies that have ended, between the GPU, the host tier and files below it."""
        below = [copy for tier in self.files for copy in tier.poll()]
        return [*self.runner.copies.ended(flushed), *below]

    def _report(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        """Copies from and to the host tier have ended."""
        if not ended:
            return
        self._tell(ended, waited)
        self.stuck = False
        if not (copies := [copy for copy in ended if not copy.below]):
            return
        if (error := next((copy.error for copy in copies if copy.error), None)) is not None:
            self._warn_of_copy(error)
        failed = [copy.job for copy in copies if copy.error]
        self.scheduler.transferred([copy.job for copy in copies], self.end, failed)

    def _tell(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        if isinstance(self.observer, TransferObserver):
            self.observer.transferred(ended, waited)

    def _warn_of_copy(self, error: BaseException) -> None:
        if not self._copies_failed:
            self._copies_failed = True
            text = f"{type(error).__name__}: {error}"
            log.warning(
                "a copy between the GPU and the host tier failed (%s); the tokens that it would "
                "have saved are computed, here and wherever one fails from now on",
                text,
            )

    def _unlock_promotions(self) -> None:
        """Protect what comes up to the host tier, where requests would wait for it for ever."""
        connector = self.scheduler.queues.connector
        if connector is not None and connector.promotes_for_ever:
            connector.protect_promoted()
            log.warning(
                "requests wait for blocks that evict one another from host memory, as in vLLM; "
                "from now on offload.protect_promoted=true"
            )

    def _leave(self, request: Request, reason: str) -> RequestOutput:
        if self.observer is not None:
            self.observer.left(request)
        self._streamed.discard(request.id)
        self._batch = None
        group = self._groups.pop(request.id)
        group.close(reason)
        return group.output(finished=True)

    def _fail(self, error: BaseException) -> list[RequestOutput]:
        """End all requests whose memory the steps in flight touch: its content is undefined.

        If a copy has failed that they need, they compute all their tokens again instead.
        """
        outputs: list[RequestOutput] = []
        again: list[tuple[Request, int]] = []
        scheduler = self.scheduler
        with uninterrupted():
            self.end = now = self.now
            self.failure = f"{type(error).__name__}: {error}"
            plans, self._in_flight, self._oldest = self._in_flight, [], None
            for plan in plans:
                if isinstance(error, Exception) and not isinstance(error, CopyError):
                    log.error("step %d failed: %s", plan.number, self.failure)
                for request in plan.touched:
                    if scheduler.requests.get(request.id) is not request:
                        continue
                    if isinstance(error, CopyError):
                        again.append((request, scheduler.withdraw(request, now)))
                    else:
                        scheduler.abort(request.id, now)
                        outputs.append(self._leave(request, "error"))
            self.runner.forget()
            for plan in plans:
                if scheduler.pending is plan:
                    scheduler.dispatch(plan)
            for plan in plans:
                scheduler.complete(plan, now, {}, {})
            if scheduler.memory.begins_transfers:  # it forgets the host tier, too
                self._drain(error)
            scheduler.memory.forget()
            self._lose_copies(plans, error)
            for request, output_len in again:
                scheduler.add(request, now, output_len)
        return outputs

    def _drain(self, error: BaseException) -> None:
        """Wait until no copy is in flight, and report none to the scheduler."""
        if isinstance(error, CopyError):
            self._warn_of_copy(error.__cause__ or error)
        self._tell(self.runner.copies.drained(), waited=False)

    def _lose_copies(self, plans: Sequence[StepPlan], error: BaseException) -> None:
        """After failed steps: their copies that were not begun have failed, and so have stores."""
        connector, copies = self.scheduler.queues.connector, self.runner.copies
        if connector is None:
            return
        connector.distrust()
        cause = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
        for plan in plans:
            for transfer in plan.transfers:
                if transfer.direction is Direction.STORE:
                    copies.spoil(transfer.job, cause)
        lost = [job for job in connector.jobs if not copies.holds(job)]
        ends = [EndedCopy(job, connector.jobs[job].direction, 0, 0.0, cause) for job in lost]
        # Loads that a step waits for write blocks that are free as soon as it is over.
        flushed = [job for plan in plans for job in plan.flushed]
        self._report([*copies.ended(flushed), *ends], waited=False)
