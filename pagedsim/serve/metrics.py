"""What a server has done, for Prometheus, under vLLM's names.

`Metrics` is an observer: it is told of every step and of everybody who leaves, in the scheduler's
thread. What a step costs here does not grow with who decodes in it. Times are the engine's: with
`backend=sim` those of the model, whatever the speed.
"""

from __future__ import annotations

from collections import Counter

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.request import State
from pagedsim.serve.histogram import Histogram, one_two_five

_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_EACH = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = one_two_five(1_000_000)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)


class Metrics:
    """Counts and histograms since the server began."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Of requests that have got their first token; each counts once."""
        self.generation_tokens = 0
        self.preemptions = 0
        self.cache_queries = 0
        """Prompt tokens that were looked up in the prefix cache, and found."""
        self.cache_hits = 0
        self.ended: Counter[str] = Counter()
        """Requests by why they ended."""
        self.step_tokens = Histogram(_STEP)
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_EACH)
        self.per_token = Histogram(_EACH)
        self.latency = Histogram(_WHOLE)
        self.queued = Histogram(_WHOLE)
        self.prefill = Histogram(_WHOLE)
        self.decode = Histogram(_WHOLE)
        self.inference = Histogram(_WHOLE)
        self.prompt = Histogram(_TOKENS)
        self.generated = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.n = Histogram(_CHOICES)
        self._longest = 0  # that a prompt and its answer may be
        self._decoded = 0.0  # when the last step ended that decoded
        self._boarded: list[tuple[float, int]] = []  # since then: when, and how many sequences

    # -- as an observer --------------------------------------------------------------------------

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was planned or carried out; called before the scheduler is told of it."""
        self._longest = scheduler.max_model_len
        if plan.decode_count:
            self._between(plan.decode_count, end)
        for chunk in plan.chunks:
            if chunk.samples:
                self._sampled(chunk.request, end)
        if plan.hits:
            self.cache_queries += sum([request.prompt_len for request, _ in plan.hits])
            self.cache_hits += sum([tokens for _, tokens in plan.hits])
        self.preemptions += len(plan.preemptions)
        self.generation_tokens += plan.decode_count
        if tokens := plan.prefill_tokens + plan.decode_count:
            self.step_tokens.add(tokens)

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected."""
        self.ended[self._reason(request)] += 1
        arrival, end = request.arrival, request.finished_at
        first, scheduled = request.first_token_at, request.scheduled_at
        if request.state is not State.FINISHED or None in (arrival, scheduled, first, end):
            return
        assert arrival is not None and end is not None
        assert first is not None and scheduled is not None
        self.latency.add(end - arrival)
        self.queued.add(scheduled - arrival)
        self.prefill.add(first - scheduled)
        self.decode.add(end - first)
        self.inference.add(end - scheduled)
        self.prompt.add(request.prompt_len)
        self.generated.add(request.generated)
        self.n.add(request.params.n)
        if request.max_tokens is not None:
            self.max_tokens.add(request.max_tokens)
        if request.generated > 1:
            self.per_token.add((end - first) / (request.generated - 1))

    # -- inside ----------------------------------------------------------------------------------

    def _reason(self, request: Request) -> str:
        """Why it ended; a simulated answer that nothing bound has ended by itself."""
        reason, length = request.finish_reason or "rejected", request.prompt_len + request.generated
        unbound = request.max_tokens is None and length < self._longest
        return "stop" if reason == "length" and unbound else reason

    def _sampled(self, request: Request, end: float) -> None:
        """A chunk gives a sequence its next token; a prompt's last, all of them their first."""
        if request.first_token_at is not None:  # it was preempted in between
            self.generation_tokens += 1
            self._boarded.append((end, 1))
            return
        self.generation_tokens += request.width
        self.prompt_tokens += request.prompt_len
        self._boarded.append((end, request.width))
        if request.arrival is not None:
            self.first_token.add(end - request.arrival)

    def _between(self, sequences: int, end: float) -> None:
        """So many sequences get a token: how long after their last ones?

        Those who began to decode since the last step that decoded had theirs then; the others
        in that step.
        """
        for since, count in self._boarded:
            count = min(count, sequences)
            if count:
                self.between_tokens.add(end - since, count)
                sequences -= count
        if sequences:
            self.between_tokens.add(end - self._decoded, sequences)
        self._boarded.clear()
        self._decoded = end
