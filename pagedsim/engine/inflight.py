"""A step in flight: its launch, its sampling, and its results for the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from pagedsim.core import Continuation, RequestId, StepPlan
from pagedsim.engine.beam import Beams
from pagedsim.engine.runtime import Fetch, sent
from pagedsim.engine.sampler import Draw, Row, Sampler
from pagedsim.engine.sequence import Group
from pagedsim.engine.step_inputs import Samplers

StepResults = tuple[dict[RequestId, "int | Continuation"], dict[RequestId, str]]
"""Tokens and finish reasons, as `Scheduler.complete` takes them."""


class SamplingJob:
    """The sampling of one step.

    Created before the scheduler dispatches the step; `draw` samples on the device asynchronously,
    and `results`, which may follow a step later, waits for the tokens.
    """

    def __init__(self, samplers: Samplers, groups: Mapping[RequestId, Group]) -> None:
        self.picked: Tensor | None = None
        """Sampled tokens on the device; row i is request i if each has one sequence."""
        self._samplers, self._groups = samplers, groups
        self._sampled: list[Group] = []
        self._plain = all(groups[request.id].plain for request, _ in samplers)
        self._rows: list[Row] = []
        self._places: list[int] = []  # of these rows among the logits
        self._counts: list[int] = []  # of rows, for each request
        self._coming: Fetch | None = None
        self._draw: Draw | None = None
        self._logits: Tensor | None = None
        if not self._plain:
            self._prepare()

    def _prepare(self) -> None:
        start = 0
        for request, count in self._samplers:
            group = self._groups[request.id]
            mine = [] if isinstance(group, Beams) else group.rows()
            # All sequences of a request draw their first token from its one row.
            here = count == len(mine)
            self._places += range(start, start + count) if here else [start] * len(mine)
            self._rows += mine
            self._sampled.append(group)
            self._counts.append(len(mine))
            start += count

    def draw(self, logits: Tensor, sampler: Sampler) -> None:
        """Launch sampling; beam search processes its logits in `results`."""
        if self._plain:
            self.picked = logits.argmax(1)
            self._coming = Fetch([self.picked])
            return
        if any(isinstance(group, Beams) for group in self._sampled):
            self._logits = logits
        if self._rows:
            if self._places != list(range(len(logits))):
                logits = logits[sent(torch.tensor(self._places), logits.device)]
            self._draw = sampler.draw(logits, self._rows)
            self.picked = self._draw.picked

    def results(self) -> StepResults:
        """Wait for the tokens; results of all requests that are still alive. Called once."""
        tokens: dict[RequestId, int | Continuation] = {}
        ended: dict[RequestId, str] = {}
        if self._coming is not None:
            (picked,) = self._coming.lists()
            groups = self._groups  # requests that left are not in it
            for (request, _), token in zip(self._samplers, picked, strict=True):
                if request.finish_reason is None:
                    name = request.id
                    tokens[name] = token
                    if token in groups[name].ends:
                        ended[name] = "stop"
            return tokens, ended
        samples = iter(self._draw.samples() if self._draw is not None else ())
        start = 0
        for (request, count), group, rows in zip(
            self._samplers, self._sampled, self._counts, strict=True
        ):
            mine = list(islice(samples, rows))
            if request.alive:
                if isinstance(group, Beams):
                    assert self._logits is not None
                    tokens[request.id], reason = group.take(self._logits[start : start + count])
                else:
                    tokens[request.id], reason = group.take(mine)
                if reason is not None:
                    ended[request.id] = reason
            start += count
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
        """Build the computation of the logits and the sampling job by `parts`."""
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
