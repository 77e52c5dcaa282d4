"""A step in flight: its launch, its sampling, and its results for the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from pagedsim.core import Continuation, Request, RequestId, StepPlan
from pagedsim.engine.beam import Beams
from pagedsim.engine.fetch import Fetch, sent
from pagedsim.engine.sampler import Draw, Row, Sampler
from pagedsim.engine.sequence import Group
from pagedsim.engine.step_inputs import Samplers

StepResults = tuple[dict[RequestId, "int | Continuation"], dict[RequestId, str]]
"""Tokens and reasons, as `Scheduler.commit` takes them."""


class SamplingJob:
    """What is to be sampled in one step.

    It is asked when the step is launched, before the scheduler counts it; `draw` samples on the
    device, without waiting, and `answers`, which may come a step later, waits for the tokens.
    """

    def __init__(self, samplers: Samplers, groups: Mapping[RequestId, Group]) -> None:
        self.picked: Tensor | None = None
        """The tokens on the device: those of row i at place i, if all have one sequence."""
        self._samplers, self._groups = samplers, groups
        self._asked: list[Group] = []
        self._plain = all(groups[request.id].plain for request, _ in samplers)
        self._rows: list[Row] = []
        self._places: list[int] = []  # of these rows among the logits
        self._counts: list[int] = []  # of rows, for each request
        self._coming: Fetch | None = None
        self._draw: Draw | None = None
        self._logits: Tensor | None = None
        if not self._plain:
            self._ask()

    def _ask(self) -> None:
        start = 0
        for request, count in self._samplers:
            group = self._groups[request.id]
            mine = [] if isinstance(group, Beams) else group.rows()
            # All sequences of a request draw their first token from its one row.
            here = count == len(mine)
            self._places += range(start, start + count) if here else [start] * len(mine)
            self._rows += mine
            self._asked.append(group)
            self._counts.append(len(mine))
            start += count

    def draw(self, logits: Tensor, sampler: Sampler) -> None:
        """Sample what is sampled; beams take their logits later."""
        if self._plain:
            self.picked = logits.argmax(1)
            self._coming = Fetch([self.picked])
            return
        if any(isinstance(group, Beams) for group in self._asked):
            self._logits = logits
        if self._rows:
            if self._places != list(range(len(logits))):
                logits = logits[sent(torch.tensor(self._places), logits.device)]
            self._draw = sampler.draw(logits, self._rows)
            self.picked = self._draw.picked

    def answers(self) -> StepResults:
        """For all who are still alive; called once."""
        tokens: dict[RequestId, int | Continuation] = {}
        ended: dict[RequestId, str] = {}
        if self._coming is not None:
            (picked,) = self._coming.lists()
            groups = self._groups  # of those who have left it knows nothing more
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
            self._samplers, self._asked, self._counts, strict=True
        ):
            mine = list(islice(samples, rows))
            if request.alive:
                if isinstance(group, Beams):
                    assert self._logits is not None
                    taken = group.take(self._logits[start : start + count])
                    _tell(request, taken, tokens, ended)
                else:
                    _tell(request, group.take(mine), tokens, ended)
            start += count
        return tokens, ended


def _tell(
    request: Request,
    answer: tuple[int | Continuation, str | None],
    tokens: dict[RequestId, int | Continuation],
    ended: dict[RequestId, str],
) -> None:
    tokens[request.id], reason = answer
    if reason is not None:
        ended[request.id] = reason


class InflightStep:
    """A step that was planned, what computes it, and what it is asked.

    On a GPU it is computed from its launch on, while the host goes on. A CPU computes as it is
    launched. What fails on the way is kept, and is its outcome.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.question: SamplingJob | None = None
        self.error: Exception | None = None
        """Why it cannot be carried out."""
        self._compute: Callable[[], Tensor] | None = None

    @property
    def picked(self) -> Tensor | None:
        """The tokens on the device, as `SamplingJob` has them, once it is launched."""
        return None if self.question is None else self.question.picked

    def prepare(self, parts: Callable[[], tuple[Callable[[], Tensor], SamplingJob]]) -> None:
        """Have what computes the logits, and the question, made by `parts`."""
        with self._failing():
            self._compute, self.question = parts()

    def launch(self, sampler: Sampler) -> None:
        """Compute and sample, or have the GPU do so; the second time nothing happens."""
        compute, self._compute = self._compute, None
        if compute is not None and self.question is not None:
            with self._failing():
                self.question.draw(compute(), sampler)

    def outcome(self) -> StepResults | Exception:
        """Wait for the tokens; or why there are none."""
        if self.error is None and self.question is not None:
            with self._failing():
                return self.question.answers()
        assert self.error is not None, "neither a question nor an error"
        return self.error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
