"""Who tells policies how long an answer will be: the group `predictor`, and nobody else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import AnswerError, printed, require_number, require_whole
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.streams import stream
from pagedsim.workload.workload import Workload

Floats = NDArray[np.float64]

SAMPLE = 2000
"""Requests on which an agreement of orders is measured."""
PREDICTED = "predicted lengths are off by"
"""How the line begins that says how good guesses are."""


class Predictor(ABC):
    """Guesses the length of each answer, rightly or wrongly to a stated extent."""

    drawn: ClassVar[bool] = True
    """Whether chance has a part in it."""

    def applied(self, workload: Workload, seed: int) -> Workload:
        """The workload with guesses and, where they are drawn, a line that says how good."""
        answer = self.guesses(workload.output_len, stream(seed, "predictions"))
        guess = self._checked(answer, len(workload.output_len))
        if not self.drawn:
            return replace(workload, predicted_len=guess)
        told = (*workload.notices, _told(workload.output_len, guess))
        return replace(workload, predicted_len=guess, notices=told, drawn=True)

    def _checked(self, answer: object, count: int) -> Floats:
        """The guesses as numbers; AnswerError unless they are one for each answer, above 0, or NaN
        where there is none."""
        try:
            guess = np.asarray(answer)
        except ValueError:  # rows of unlike lengths
            guess = np.empty(0)
        numbers = guess.dtype.kind in "iuf" and guess.shape == (count,)
        if numbers and not ((guess <= 0) | np.isinf(guess)).any():
            return guess.astype(np.float64, copy=False)
        raise AnswerError(
            f"{type(self).__name__}.guesses gave {printed(answer)}: must be an array of {count} "
            "finite numbers of tokens above 0, NaN where there is no guess"
        )

    @abstractmethod
    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        """One for each answer, in tokens."""


class Nobody(Predictor):
    """Nobody guesses; a workload that has guesses of its own loses them."""

    drawn = False

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        return np.broadcast_to(np.nan, len(output_len))


class Oracle(Predictor):
    """The truth."""

    drawn = False

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        return output_len.astype(np.float64)


@dataclass(frozen=True)
class Noisy(Predictor):
    """The truth times a log-normal error of median 1.

    Two guesses in three are within a factor of exp(`sigma`).
    """

    sigma: float = 0.5

    def __post_init__(self) -> None:
        require_number("sigma", self.sigma, above=0)

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        error = np.minimum(self.sigma * rng.standard_normal(len(output_len)), 700.0)  # exp's limit
        return np.clip(np.exp(error) * output_len, 1.0, LONGEST)


@dataclass(frozen=True)
class Bucket(Predictor):
    """The middle of one of `buckets` ranges of `width` tokens; the last takes all that is longer.

    It is the right one with probability `accuracy`, else one beside it.
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
    """The right lengths in the wrong order: what is learned is which answer is longer.

    Of two answers the longer one is guessed to be so with probability (1 + `tau`) / 2: `tau` is
    Kendall's rank correlation of truth and guess.
    """

    tau: float = 0.6

    def __post_init__(self) -> None:
        require_number("tau", self.tau, -1, 1)

    def guesses(self, output_len: NDArray[np.int32], rng: np.random.Generator) -> Floats:
        # Two normal variables of correlation r have tau = 2 / π × asin r. The first is in the
        # order of the lengths, the second gives the order of the guesses.
        count = len(output_len)
        order = np.lexsort((rng.random(count), output_len))  # of equal lengths in any order
        first = np.empty(count)
        first[order] = np.sort(rng.standard_normal(count))
        r = np.sin(np.pi / 2 * self.tau)
        second = r * first + np.sqrt(max(1 - r * r, 0.0)) * rng.standard_normal(count)
        guess = np.empty(count)
        guess[np.argsort(second, kind="stable")] = np.sort(output_len)
        return guess


def _told(output_len: NDArray[np.int32], guess: Floats) -> str:
    """How good guesses are."""
    off = np.median(np.abs(guess - output_len) / output_len)
    tau = kendall(output_len[:SAMPLE].astype(np.float64), guess[:SAMPLE])
    return f"{PREDICTED} {off:.0%} in the median; Kendall's tau of their order is {tau:.2f}"


def kendall(first: Floats, second: Floats) -> float:
    """Kendall's tau-b: how far two orders of the same things agree, from -1 to 1."""
    one = np.sign(first[:, None] - first)
    other = np.sign(second[:, None] - second)
    pairs = np.sqrt((one * one).sum() * (other * other).sum())
    return float((one * other).sum() / pairs) if pairs else float("nan")
