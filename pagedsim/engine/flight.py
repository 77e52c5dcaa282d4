"""A step under way."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pagedsim.core import StepPlan
from pagedsim.engine.answer import Answers, Question
from pagedsim.engine.sampler import Sampler


class Flight:
    """A step that was planned: what computes it, and what it is asked.

    On a GPU it is computed from its take-off on, while the host goes on. A CPU computes while it
    takes off.
    """

    def __init__(self, plan: StepPlan, compute: Callable[[], Tensor], question: Question) -> None:
        """`compute` returns the logits."""
        self.plan = plan
        self._compute: Callable[[], Tensor] | None = compute
        self._question = question
        self._error: Exception | None = None

    @property
    def picked(self) -> Tensor | None:
        """The tokens on the device, as `Question` has them, once it has taken off."""
        return self._question.picked

    def take_off(self, sampler: Sampler) -> None:
        """Compute and sample, or have the GPU do so; the second time nothing happens."""
        if self._compute is None:
            return
        compute, self._compute = self._compute, None
        try:
            self._question.draw(compute(), sampler)
        except Exception as error:
            self._error = error

    def outcome(self) -> Answers | Exception:
        """Wait for the tokens; or why there are none."""
        if self._error is not None:
            return self._error
        try:
            return self._question.answers()
        except Exception as error:
            return error
