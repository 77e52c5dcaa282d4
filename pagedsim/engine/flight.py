"""A step under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from pagedsim.core import StepPlan
from pagedsim.engine.answer import Answers, Question
from pagedsim.engine.sampler import Sampler


class Flight:
    """A step that was planned, what computes it, and what it is asked.

    On a GPU it is computed from its launch on, while the host goes on. A CPU computes as it is
    launched. What fails on the way is kept, and is its outcome.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.question: Question | None = None
        self.error: Exception | None = None
        """Why it cannot be carried out."""
        self._compute: Callable[[], Tensor] | None = None

    @property
    def picked(self) -> Tensor | None:
        """The tokens on the device, as `Question` has them, once it is launched."""
        return None if self.question is None else self.question.picked

    def prepare(self, parts: Callable[[], tuple[Callable[[], Tensor], Question]]) -> None:
        """Have what computes the logits, and the question, made by `parts`."""
        with self._failing():
            self._compute, self.question = parts()

    def launch(self, sampler: Sampler) -> None:
        """Compute and sample, or have the GPU do so; the second time nothing happens."""
        compute, self._compute = self._compute, None
        if compute is not None and self.question is not None:
            with self._failing():
                self.question.draw(compute(), sampler)

    def outcome(self) -> Answers | Exception:
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
