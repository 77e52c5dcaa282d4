"""The simulator in real time: a backend paced by the cost model's step times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import simpy

from pagedsim.core import Request, RequestError, RequestId, SamplingParams, Scheduler, StepPlan
from pagedsim.core.plan import sampled_in
from pagedsim.engine.output import Observer, RequestOutput, Tokenizer, TransferObserver
from pagedsim.serve.sim_output import FillerTokenizer, SimOutput
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import AheadServer, Costs, Server


class FailureTrackingCost:
    """A cost model that records the step at which it failed."""

    by_totals = False

    def __init__(self, cost: Costs) -> None:
        self.failed: StepPlan | None = None
        self._cost = cost
        self.decode_seconds, self.swap_seconds = cost.decode_seconds, cost.swap_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        try:
            return self._cost.step_seconds(plan)
        except Exception:
            self.failed = plan
            raise


class SimEvents:
    """Collects steps and departures of the simulated server, and forwards them to an observer."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._steps: list[tuple[float, list[Request]]] = []  # (end, requests that sample)
        self._left: list[Request] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._steps.append((end, list(dict.fromkeys(sampled_in(plan)))))
        if self._observer is not None:
            self._observer.step(plan, start, end, scheduler)

    def again(self, end: float, used_blocks: int) -> None:
        raise AssertionError("steps are not passed over")

    def left(self, request: Request) -> None:
        self._left.append(request)
        if self._observer is not None:
            self._observer.left(request)

    def ended(self, now: float) -> list[list[Request]]:
        """The sampling requests of each step that has ended."""
        over = [requests for end, requests in self._steps if end <= now]
        self._steps = [step for step in self._steps if step[0] > now]
        return over

    def leavers(self) -> list[Request]:
        """Departures since the last call."""
        left, self._left = self._left, []
        return left

    def forget(self) -> None:
        """Discard pending events after a failure."""
        self._steps, self._left = [], []


SLICE = 0.05
"""Wall-clock seconds after which a step returns even if simulated time lags behind, so that new
requests, aborts and queries are processed."""


class StepByStep(Environment):
    """An environment that disables fast-forwarding: an event may always be due next."""

    def peek(self) -> float:
        return self.now

    @property
    def due(self) -> float:
        """Time of the next event; infinity if there is none."""
        return super().peek()


class RealtimeSimulator:
    """`LLMEngine`'s interface over the simulator's server, paced by the wall clock.

    The caller of `step` sleeps for `pause` before. Times are simulated; with `speed=10` ten
    simulated seconds pass in one real second. Outputs are filler of the requested length.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: Costs,
        *,
        observer: Observer | None = None,
        speed: float = 1.0,
        answer_tokens: int = 256,
        tokenizer: Tokenizer | None = None,
        way: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ) -> None:
        """`answer_tokens`: output length without max_tokens; `clock` is the wall clock in seconds.

        A request is queued `way` simulated seconds after its arrival, as in `simulate`; what it
        really took to read it passes within that time. `settings` are those of `Server`.
        """
        self.scheduler, self.speed, self.answer_tokens = scheduler, speed, answer_tokens
        self._way, self._on_their_way = way, 0
        self.tokenizer: Tokenizer = tokenizer or FillerTokenizer()
        self.failure = ""
        self.lag = 0.0
        self.default_sampling: dict[str, Any] = {}
        self._events = SimEvents(observer)
        self._cost = FailureTrackingCost(cost)
        self._settings = settings
        if settings.get("transfers") is not None and isinstance(observer, TransferObserver):
            settings["transfers"].tell = partial(observer.transferred, waited=False)
        self._answers: dict[RequestId, SimOutput] = {}
        self._unqueued: list[RequestOutput] = []  # failed to be queued
        self._clock, self._epoch = clock, clock()
        self._begin(0.0)
        self._environment.step()  # the server's process begins, and rests

    def _begin(self, now: float) -> None:
        """Start a simulated server over the scheduler, and reschedule pending arrivals."""
        kind = AheadServer if self.scheduler.async_scheduling else Server
        self._environment = StepByStep(now)
        self._server = kind(
            self._environment,
            self.scheduler,
            self._cost,
            self._events,
            fast_forward=False,
            **self._settings,
        )
        requests = self.scheduler.requests
        self._on_their_way = 0
        self._server.searching = sum(request.params.beam_search for request in requests.values())
        for answer in self._answers.values():
            if answer.request.id not in requests:
                self._announce(answer)

    @property
    def now(self) -> float:
        """Simulated seconds since the engine was created."""
        return (self._clock() - self._epoch) * self.speed

    @property
    def pause(self) -> float:
        due = self._environment.due
        return due if due == inf else max(due - self.now, 0.0) / self.speed

    @property
    def waiting(self) -> int:
        """Requests that wait for their admission, those on their way to the queue included."""
        return self._on_their_way + len(self.scheduler.waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self._answers)

    def close(self) -> None:
        """Nothing to release."""

    # -- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        delta: bool = False,
        arrival: float | None = None,
        **labels: Any,
    ) -> None:
        """Queue a prompt, as `LLMEngine` does; it arrives at `arrival` on this engine's clock."""
        params = params or SamplingParams()
        if params.logprobs is not None:
            raise RequestError(f"request {request_id!r}: logprobs: backend=sim computes none")
        if request_id in self._answers:
            raise RequestError(f"request {request_id!r} is already here; ids must be unique")
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        when = self.now if arrival is None else arrival
        request = Request(request_id, ids, params, arrival=when, **labels)
        if reason := self.scheduler.infeasible(request):
            raise RequestError(f"request {request_id!r}: {reason}")
        streams = stream and not (params.beam_search or (params.best_of or 0) > params.n)
        self._answers[request_id] = answer = SimOutput(
            request, text, request.max_tokens or self.answer_tokens, streams=streams, delta=delta
        )
        self._announce(answer)

    def _announce(self, answer: SimOutput) -> None:
        request = answer.request

        def arrive(event: simpy.Event) -> None:
            self._on_their_way -= 1
            if self._answers.get(request.id) is answer:  # it may have been aborted before
                try:
                    self._server.submit(request, answer.limit)
                except Exception as error:  # a policy's own; other requests are not affected
                    self.failure = f"{type(error).__name__}: {error}"
                    self._unqueued.append(self._ended(answer, "error"))

        self._on_their_way += 1
        self._when((request.arrival or 0.0) + self._way, arrive)

    def _when(self, time: float, what: Callable[[simpy.Event], None]) -> None:
        event = self._environment.at(time)
        assert event.callbacks is not None
        event.callbacks.append(what)

    def abort_request(self, request_id: RequestId) -> RequestOutput:
        if request_id not in self._answers:
            raise RequestError(f"cannot abort request {request_id!r}: not known, or ended already")
        answer = self._answers[request_id]
        if request_id in self.scheduler.requests:
            self._server.abort(request_id)
            self._when(self.now, lambda event: self._server.wake())
        return self._ended(answer, "abort")

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Process due events; returns the outputs.

        If a step fails, its requests end with finish reason "error"; if a policy fails, all do.
        """
        now, outputs = self.now, list[RequestOutput]()
        until = self._clock() + SLICE
        while self._environment.due <= now and self._clock() <= until:
            try:
                self._environment.step()
            except Exception as error:
                outputs += self._failed(error)
            outputs += self._new_outputs()
            self.lag = max(self.now - self._environment.now, 0.0) / self.speed
        return outputs

    def _new_outputs(self) -> list[RequestOutput]:
        """Outputs of the steps that ended, and of finished requests."""
        outputs, self._unqueued = self._unqueued, []
        for requests in self._events.ended(self._environment.now):
            for request in requests:
                answer = self._answers.get(request.id)
                if answer is not None and answer.request is request:
                    answer.grow()
                    if answer.streams and request.alive:
                        outputs.append(answer.output())
        for request in self._events.leavers():
            answer = self._answers.get(request.id)
            if answer is not None and answer.request is request:
                outputs.append(self._ended(answer, self._reason(answer)))
        return outputs

    def _reason(self, answer: SimOutput) -> str:
        """Finish reason; "stop" if neither max_tokens nor the model limited the length."""
        request = answer.request
        bound = request.prompt_len + request.generated >= self.scheduler.max_model_len
        free = answer.stop is not None or (request.max_tokens is None and not bound)
        if request.finish_reason == "length" and answer.complete and free:
            return "stop"
        return request.finish_reason or "rejected"

    def _ended(self, answer: SimOutput, reason: str) -> RequestOutput:
        del self._answers[answer.request.id]
        return answer.output(reason)

    def _failed(self, error: Exception) -> list[RequestOutput]:
        """End the requests of a failed step, and restart the server over the same queues.

        An error outside a step ends all requests; without requests it is raised.
        """
        plan, self._cost.failed = self._cost.failed, None
        scheduler, now = self.scheduler, self._environment.now
        if plan is None and not scheduler.requests:
            raise error
        self.failure = f"{type(error).__name__}: {error}"
        plans = [step for step in (plan, *scheduler.in_flight) if step is not None]
        touched = [request for step in plans for request in step.touched]
        outputs = []
        for request in dict.fromkeys(scheduler.requests.values() if plan is None else touched):
            if request.alive:
                self._server.abort(request.id)
                outputs.append(self._ended(self._answers[request.id], "error"))
        if scheduler.pending is not None:
            scheduler.dispatch(scheduler.pending)
        for plan_in_flight in list(scheduler.in_flight):
            scheduler.complete(plan_in_flight, now)
        self._events.forget()
        self._begin(now)
        return outputs
