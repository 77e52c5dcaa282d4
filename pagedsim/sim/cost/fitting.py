"""Fit coefficients to a log of steps, with leave-one-out errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, StepPlan

Matrix = NDArray[np.float64]


class Coefficients(NamedTuple):
    """Seconds per unit of each feature of a step."""

    constant: float = 0.0
    prefill_tokens: float = 0.0
    prefill_attention: float = 0.0
    prefill_context: float = 0.0
    decode_count: float = 0.0
    decode_context: float = 0.0

    def beside(self, decode: Coefficients) -> Coefficients:
        """For prefill and decode in one step; the constant (mostly reading weights) counts once."""
        return self._replace(
            constant=max(self.constant, decode.constant),
            decode_count=decode.decode_count,
            decode_context=decode.decode_context,
        )

    def reading(self, factor: float) -> Coefficients:
        """With the reading of decode context slower by a factor."""
        return self._replace(decode_context=self.decode_context * factor)


FEATURES = Coefficients._fields
features_of: Callable[[StepPlan], tuple[int, int, int, int, int]] = attrgetter(*FEATURES[1:])
"""The features of a plan, without the constant."""
KINDS = {
    "prefill": FEATURES[:4],
    "decode": ("constant", "decode_count", "decode_context"),
    "mixed": FEATURES,
}
SWAP = ("constant", "blocks")
"""Coefficients of moving blocks one way: fixed time, and time per block."""

ALONE = 1e-6
"""Rows with a leverage this close to 1 determine a coefficient alone."""
OUTLIER = 2.0
"""Residuals beyond this multiple of the typical one are down-weighted (Huber's weights)."""
STALL = 5.0
"""Cap on the measured time of a stalled step, as a multiple of its predicted time."""
PARTS = 7
"""Number of parts of a recording, whose median speed is the speed of the machine."""
_ROUNDS = 20


class Sample(NamedTuple):
    """One recorded step: the totals of its plan, and how long it took."""

    seconds: float
    prefill_tokens: int = 0
    prefill_attention: int = 0
    prefill_context: int = 0
    decode_count: int = 0
    decode_context: int = 0
    swap_out: int = 0
    """Blocks."""
    swap_in: int = 0
    prefill_pairs: int = 0
    prefill_chunks: int = 0

    @classmethod
    def of(cls, plan: StepPlan, seconds: float) -> Sample:
        """The sample of a plan carried out in `seconds`."""
        return cls(
            seconds,
            *features_of(plan),
            swap_out=len(plan.swap_out),
            swap_in=len(plan.swap_in),
            prefill_pairs=plan.prefill_pairs,
            prefill_chunks=len(plan.chunks),
        )

    @property
    def swaps(self) -> int:
        """Number of directions in which blocks were moved."""
        return bool(self.swap_out) + bool(self.swap_in)

    @property
    def swapped_blocks(self) -> int:
        """Blocks moved in both directions."""
        return self.swap_out + self.swap_in

    @property
    def kind(self) -> str:
        """prefill, decode or mixed; swap for an empty step."""
        if not self.prefill_tokens:
            return "decode" if self.decode_count else "swap"
        return "mixed" if self.decode_count else "prefill"

    def seconds_of(self, coefficients: Mapping[str, float]) -> float:
        """Its predicted time without swaps, by coefficients of its kind."""
        return sum(
            weight * (1.0 if name == "constant" else getattr(self, name))
            for name, weight in coefficients.items()
        )


@dataclass(frozen=True)
class Fit:
    """Coefficients of one kind of step, in seconds, with the quality of the fit."""

    coefficients: dict[str, float]
    samples: int
    error: float
    """Mean over samples of |predicted / measured − 1|, each predicted from all the others."""

    @property
    def percent(self) -> str:
        return f"{100 * self.error:.1f} %"


def fit_kinds(samples: Iterable[Sample]) -> dict[str, Fit]:
    """A fit for each kind of step with enough samples without swaps."""
    rows = list(samples)
    for row in rows:
        if not row.seconds > 0:
            raise ConfigError(f"a step of {row.seconds} s: samples must take longer than 0 s")
    fits = {}
    for kind, features in KINDS.items():
        mine = [row for row in rows if row.kind == kind and not row.swaps]
        if len(mine) > len(features):
            fits[kind] = fit(mine, features)
    if not fits:
        need = len(KINDS["decode"]) + 1
        raise ConfigError(f"{len(rows)} samples: need at least {need} of one kind of step")
    return fits


def fit(rows: Sequence[Sample], features: Sequence[str]) -> Fit:
    """Non-negative least squares of relative errors, so that short steps count as much as long
    ones.

    A shared machine stalls now and then, and has slow periods. So outliers are down-weighted
    (Huber's weights), and finally all coefficients are scaled by one factor that matches the
    total time of steps, in the median over `PARTS` parts of the recording, with stalled steps
    capped at `STALL`. Rare slow steps thus affect the level of the fit but not its shape.
    """
    seconds = np.array([row.seconds for row in rows], dtype=float)
    columns = [
        np.ones(len(rows)) if name == "constant" else [getattr(row, name) for row in rows]
        for name in features
    ]
    a = np.array(columns, dtype=float).T
    x = _level(a, seconds, _robust(a, seconds))
    error = leave_one_out(a / seconds[:, None], np.ones(len(rows)), x)
    return Fit(dict(zip(features, x.tolist(), strict=True)), len(rows), error)


def fit_swaps(samples: Iterable[Sample], fits: Mapping[str, Fit]) -> Fit | None:
    """Coefficients of swaps: per direction, and per block.

    None if too few steps of fitted kinds moved blocks, or all moved the same number.
    """
    rows = [row for row in samples if row.swaps and (row.kind == "swap" or row.kind in fits)]
    if len(rows) <= len(SWAP) or len({row.swapped_blocks / row.swaps for row in rows}) == 1:
        return None
    a = np.array([[row.swaps, row.swapped_blocks] for row in rows], dtype=float)
    without = np.array(
        [row.seconds_of(fits[row.kind].coefficients) if row.kind in fits else 0.0 for row in rows]
    )
    seconds = np.array([row.seconds for row in rows])
    x = _robust(a, seconds, without)
    error = float(np.mean(np.abs((without + a @ x) / seconds - 1)))
    return Fit(dict(zip(SWAP, x.tolist(), strict=True)), len(rows), error)


def _robust(a: Matrix, seconds: Matrix, known: Matrix | float = 0.0) -> Matrix:
    """Outlier-robust coefficients; `known` seconds are explained otherwise."""
    scale, weight = seconds, np.ones(len(seconds))
    for _ in range(_ROUNDS):
        by = np.sqrt(weight) / scale
        x = nnls(a * by[:, None], (seconds - known) * by)
        predicted = np.maximum(a @ x + known, 1e-3 * seconds)
        errors = np.abs(seconds / predicted - 1)
        usual = OUTLIER * 1.4826 * float(np.median(errors))
        if usual < ALONE:  # all but a few fit exactly
            break
        scale, weight = predicted, np.minimum(1.0, usual / np.maximum(errors, ALONE))
    return x


def _level(a: Matrix, seconds: Matrix, x: Matrix) -> Matrix:
    """Coefficients scaled to match the total time, in the median over `PARTS` parts."""
    predicted = a @ x
    counted = np.minimum(seconds, STALL * predicted)
    parts = np.array_split(np.arange(len(seconds)), max(1, min(PARTS, len(seconds) // PARTS)))
    ratios = [counted[part].sum() / predicted[part].sum() for part in parts if predicted.any()]
    return x * float(np.median(ratios)) if ratios else x


def leave_one_out(a: Matrix, b: Matrix, x: Matrix) -> float:
    """Mean error of each row, predicted from all others.

    Without refits: leaving a row out scales its residual by 1 / (1 − leverage), as long as the
    same coefficients stay at 0. Rows that determine a coefficient alone are refitted without.
    """
    q, _ = np.linalg.qr(a[:, x > 0])
    leverage = (q**2).sum(axis=1)
    alone = leverage > 1 - ALONE
    errors = np.abs(b - a @ x) / np.where(alone, 1.0, 1 - leverage)
    for row in np.flatnonzero(alone):
        others = np.arange(len(a)) != row
        errors[row] = abs(b[row] - a[row] @ nnls(a[others], b[others]))
    return float(errors.mean())


def nnls(a: Matrix, b: Matrix) -> Matrix:
    """The x ≥ 0 that minimises |a·x − b| (Lawson and Hanson's active set method): more work never
    makes a step shorter."""
    scale = np.linalg.norm(a, axis=0)  # features differ by orders of magnitude
    scale[scale == 0] = 1.0
    a = a / scale
    columns = a.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)  # coefficients not held at 0
    tolerance = 10 * np.finfo(float).eps * columns * max(1.0, float(np.abs(a.T @ b).max()))
    for _ in range(10 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if trial[free].min() > 0:
                x = trial
                break
            # Move towards the trial until the first coefficient reaches 0, and hold it there.
            falling = free & (trial <= 0)
            steps = x[falling] / np.maximum(x[falling] - trial[falling], np.finfo(float).tiny)
            x = x + steps.min() * (trial - x)
            free &= x > tolerance
            x[~free] = 0.0
            if not free.any():
                break
    return np.asarray(x / scale)
