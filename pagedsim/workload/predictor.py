"""Output-length predictors (the config group `predictor`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.contracts import SWITCH, WRONG, Contract, Rule
from pagedsim.core.errors import require_number, require_whole
from pagedsim.workload.draws import stream
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.workload import Workload

Floats = NDArray[np.float64]

SAMPLE = 2000
"""Requests over which rank correlation is computed."""
PREDICTED = "predicted lengths are off by"
"""Start of the notice on prediction accuracy."""


class Predictor(ABC):
    """Predicts output lengths with a configurable error."""

    drawn: ClassVar[bool] = True
    """Whether it is random."""

    def applied(self, workload: Workload, seed: int) -> Workload:
        """The workload with predictions and, if they are random, a notice on their accuracy."""
        answer = self.guesses(workload.output_len, stream(seed, "predictions"))
        guess = GUESSES.checked(self, "guesses", answer, (workload.output_len,))
        if not self.drawn:
            return replace(workload, predicted_len=guess)
        notices = (*workload.notices, _told(workload.output_len, guess))
        return replace(workload, predicted_len=guess, notices=notices, drawn=True)

    @abstractmethod
    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        """Predicted output length of each request, in tokens."""


def _guessed(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    """Validate predictions: a positive number for each request, NaN where there is none."""
    try:
        guess = np.asarray(answer)
    except ValueError:  # rows of unlike lengths
        return WRONG
    numbers = guess.dtype.kind in "iuf" and guess.shape == (len(asked[0]),)
    if not numbers or ((guess <= 0) | np.isinf(guess)).any():
        return WRONG
    return guess.astype(np.float64, copy=False)


def _applied(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    """Validate that a workload equals the given one except for its predictions."""
    given = asked[0]
    if not isinstance(answer, Workload) or _guessed(part, answer.predicted_len, asked) is WRONG:
        return WRONG
    names = ("arrival", "prompt_len", "output_len", "priority", "deadline")
    same = (
        np.array_equal(getattr(answer, name), getattr(given, name), equal_nan=True)
        for name in names
    )
    return answer if all(same) else WRONG


GUESSES = Rule(
    "an array of {0.size} finite numbers of tokens above 0, NaN where there is no guess", _guessed
)
CONTRACT = Contract(
    Predictor,
    {
        "drawn": SWITCH,
        "guesses": GUESSES,
        "applied": Rule(
            "the workload that it was given, with a finite predicted_len above 0, or NaN, for "
            "each request",
            _applied,
        ),
    },
)


class NoPredictor(Predictor):
    """No predictions; removes those of the workload."""

    drawn = False

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        return np.broadcast_to(np.nan, len(output_len))


class Oracle(Predictor):
    """The true output length."""

    drawn = False

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        return output_len.astype(np.float64)


@dataclass(frozen=True)
class Noisy(Predictor):
    """The true length times a log-normal error of median 1.

    Two thirds of the predictions are within a factor of exp(`sigma`).
    """

    sigma: float = 0.5

    def __post_init__(self) -> None:
        require_number("sigma", self.sigma, above=0)

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        error = np.minimum(self.sigma * rng.standard_normal(len(output_len)), 700.0)  # exp's limit
        return np.clip(np.exp(error) * output_len, 1.0, LONGEST)


@dataclass(frozen=True)
class Bucket(Predictor):
    """Classification into `buckets` of `width` tokens (the last is unbounded), as their midpoints.

    The bucket is correct with probability `accuracy`, otherwise an adjacent one.
    """

    buckets: int = 10
    width: int = 200
    accuracy: float = 0.9

    def __post_init__(self) -> None:
        require_whole("buckets", self.buckets, 2)
        require_whole("width", self.width, 1)
        require_number("accuracy", self.accuracy, 0, 1)

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        right = np.minimum((output_len - 1) // self.width, self.buckets - 1)
        wrong = rng.random(len(right)) >= self.accuracy
        beside = right + np.where(rng.random(len(right)) < 0.5, -1, 1)
        beside = np.where((beside < 0) | (beside >= self.buckets), 2 * right - beside, beside)
        return (np.where(wrong, beside, right) + 0.5) * self.width


@dataclass(frozen=True)
class Rank(Predictor):
    """Learning to rank: the true lengths, assigned in a partly wrong order.

    The longer of two outputs is predicted to be longer with probability (1 + `tau`) / 2; `tau` is
    Kendall's rank correlation between true and predicted lengths.
    """

    tau: float = 0.6

    def __post_init__(self) -> None:
        require_number("tau", self.tau, -1, 1)

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        # Two normal variables of correlation r have tau = 2 / π × asin r. The first is sorted like
        # the true lengths, the second gives the predicted order.
        count = len(output_len)
        order = np.lexsort((rng.random(count), output_len))  # ties in random order
        first = np.empty(count)
        first[order] = np.sort(rng.standard_normal(count))
        r = np.sin(np.pi / 2 * self.tau)
        second = r * first + np.sqrt(max(1 - r * r, 0.0)) * rng.standard_normal(count)
        guess = np.empty(count)
        guess[np.argsort(second, kind="stable")] = np.sort(output_len)
        return guess


def _told(output_len: NDArray[np.int32], guess: Floats) -> str:
    error = np.median(np.abs(guess - output_len) / output_len)
    tau = kendall(output_len[:SAMPLE].astype(np.float64), guess[:SAMPLE])
    return f"{PREDICTED} {error:.0%} in the median; Kendall's tau of their order is {tau:.2f}"


def kendall(first: Floats, second: Floats) -> float:
    """Kendall's tau-b rank correlation, from -1 to 1."""
    signs = np.sign(first[:, None] - first)
    other = np.sign(second[:, None] - second)
    pairs = np.sqrt((signs * signs).sum() * (other * other).sum())
    return float((signs * other).sum() / pairs) if pairs else float("nan")
