"""The engine: the scheduler's plans, carried out step by step, with real tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from pagedsim.core import (
    PagedsimError,
    Request,
    RequestError,
    RequestId,
    SamplingParams,
    Scheduler,
    StepPlan,
)
from pagedsim.core.errors import unknown
from pagedsim.engine.answer import answers
from pagedsim.engine.arguments import Arguments
from pagedsim.engine.assemble import assemble
from pagedsim.engine.output import RequestOutput
from pagedsim.engine.sampler import Sampler
from pagedsim.engine.sequence import Group, make_group

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who is told of every step and of every request that leaves; a Recorder of metrics is one."""

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed."""

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected."""


def _arguments(settings: dict[str, Any]) -> Arguments:
    known = [field.name for field in fields(Arguments)]
    for name in settings:
        if name not in known:
            raise unknown("engine setting", name, known)
    return Arguments(**settings)


class StepTimes(NamedTuple):
    """Where the last step's time went, in seconds."""

    feed: float
    """From when the step counts to when it was planned."""
    plan: float
    launch: float
    """Inputs, moves and kernel launches; on a CPU the computation itself."""
    sample: float
    """Waiting for the logits, and sampling."""
    commit: float


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
        """`settings` are those of `Arguments`, where no object is given.

        `clock` gives the time in seconds; what the engine reports is counted from now.
        """
        self.arguments = arguments = arguments or _arguments(settings)
        parts = assemble(arguments)
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.scheduler, self.runner = parts.scheduler, parts.runner
        self.observer = observer
        self.prices = parts.prices
        self.times: StepTimes | None = None
        """Of the last step; None before the first, and after one that failed."""
        self.end = 0.0
        """Of the last step."""
        self.failure = ""
        """Why the last step failed that did."""
        self.stuck = False
        """Whether the last step found nothing to do, and none will until another request comes."""
        self._sampler = Sampler()
        self._groups: dict[RequestId, Group] = {}
        self._streamed: set[RequestId] = set()
        self._numbers = itertools.count()
        self._clock, self._epoch = clock, clock()

    @property
    def now(self) -> float:
        """Seconds since the engine was made."""
        return self._clock() - self._epoch

    def restart_clock(self) -> None:
        """Count times from now."""
        self._epoch, self.end = self._clock(), 0.0

    def check_progress(self) -> None:
        """Raise PagedsimError if requests are left that nothing can be done for."""
        if self.stuck and self.scheduler.unfinished:
            raise PagedsimError(
                f"nothing can run at {self.now:.6g} s: {len(self.scheduler.waiting)} requests "
                f"wait, {len(self.scheduler.swapped)} are swapped out; the policy admits nobody"
            )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.scheduler.unfinished)

    # -- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **labels: Any,
    ) -> None:
        """Queue a prompt, a text or token ids; raises RequestError if it can never be served.

        `labels` are what policies see: priority, client, deadline, predicted_len, arrival. With
        `stream`, every step that gives it a token returns what there is of it.
        """
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, self._encoded(request_id, prompt), params, **labels)
        if reason := self.scheduler.infeasible(request):
            raise RequestError(f"request {request_id!r}: {reason}")
        self.submit(request, text=text)
        if stream:
            self._streamed.add(request_id)

    def submit(
        self,
        request: Request,
        output_len: int | None = None,
        *,
        text: str | None = None,
        now: float | None = None,
    ) -> None:
        """Queue a request of the core's own; its prompt must be token ids.

        With `output_len` its output ends there at the latest, which no policy sees. One that can
        never be served leaves with the next step, rejected. `now` is when it came, if not now.
        """
        self._check_ids(request)
        longest = max(self.scheduler.max_model_len - request.prompt_len, 1)
        group = make_group(
            request,
            tokenizer=self.tokenizer,
            eos=[token for token in self.model.eos_token_ids if token < self.model.vocab_size],
            seed=self.arguments.seed,
            number=next(self._numbers),
            text=text,
            limit=min(longest, output_len or longest),
        )
        self.scheduler.add(request, self.now if now is None else now, output_len)
        self.stuck = False
        self._groups[request.id] = group

    def abort_request(self, request_id: RequestId) -> RequestOutput:
        """End a request wherever it is; returns what there is of it."""
        request = self.scheduler.abort(request_id, self.now)
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
        """Plan a step, carry it out, commit it.

        It counts from `since`, or else from now. Who keeps an engine busy gives the end of the
        last step: then steps follow one another without gaps, as they do in a simulation, and what
        the host does in between is part of the next one.

        Returns the requests that ended in it, and of those that stream what there is so far. If
        carrying it out fails, the requests of this step end with finish reason "error", and the
        engine goes on serving the others.
        """
        begun, self.times = self.now, None
        start = begun if since is None else since
        plan = self.scheduler.plan(start)
        self.stuck = plan.empty and not (plan.took_memory or plan.rejected)
        planned = self.now
        outputs = [self._leave(rejected.request, "rejected") for rejected in plan.rejected]
        try:
            logits, samplers = self.runner.execute(plan)
            launched = self.now
            tokens, ended = answers(logits, samplers, self._groups, self._sampler)
        except Exception as error:
            return outputs + self._fail(plan, error)
        except BaseException as error:  # such as a Ctrl-C: nobody is left half served
            self._fail(plan, error)
            raise
        done = self.now
        self.end = end = start if plan.empty else done
        if self.observer is not None:
            self.observer.step(plan, start, end, self.scheduler)
        finished = self.scheduler.commit(plan, end, tokens, ended)
        outputs += [self._leave(request, request.finish_reason or "") for request in finished]
        if self._streamed:
            outputs += [
                self._groups[request.id].output(finished=False)
                for request, _ in samplers
                if request.id in self._streamed and request.alive
            ]
        self.times = StepTimes(
            feed=begun - start,
            plan=planned - begun,
            launch=launched - planned,
            sample=done - launched,
            commit=self.now - done,
        )
        return outputs

    def _leave(self, request: Request, reason: str) -> RequestOutput:
        if self.observer is not None:
            self.observer.left(request)
        self._streamed.discard(request.id)
        group = self._groups.pop(request.id)
        group.close(reason)
        return group.output(finished=True)

    def _fail(self, plan: StepPlan, error: BaseException) -> list[RequestOutput]:
        """End all whose memory this step touched: it may hold anything now."""
        self.end = now = self.now
        self.failure = f"{type(error).__name__}: {error}"
        log.error("step %d failed: %s", plan.number, self.failure)
        touched = dict.fromkeys(
            [
                *plan.decodes,
                *(chunk.request for chunk in plan.chunks),
                *plan.held,
                *plan.resumed,
                *plan.preempted,
                *plan.displaced,
            ]
        )
        outputs = []
        for request in touched:
            if request.alive:
                self.scheduler.abort(request.id, now)
                outputs.append(self._leave(request, "error"))
        self.scheduler.memory.forget()
        self.scheduler.commit(plan, now, {}, {})
        return outputs
