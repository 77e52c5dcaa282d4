"""Coefficients out of a log of steps, and how far to trust them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, StepPlan

Matrix = NDArray[np.float64]

FEATURES = (
    "constant",
    "prefill_tokens",
    "prefill_attention",
    "prefill_context",
    "decode_count",
    "decode_context",
)
KINDS = {
    "prefill": FEATURES[:4],
    "decode": ("constant", "decode_count", "decode_context"),
    "mixed": FEATURES,
}
"""Which features matter in which kind of step."""
SWAP = ("constant", "blocks")
"""Coefficients of moving blocks one way: whatever the number, and for each of them."""

ALONE = 1e-6
"""With a leverage this near to 1 nothing but a row itself tells what its time is."""
OUTLIER = 2.0
"""Residuals of so many times the usual one count less the larger they are (Huber's weights)."""
STALL = 5.0
"""A step that takes so many times what it should was stalled; no more of its time counts."""
PARTS = 7
"""Stretches of a recording; how fast a machine is in most of them is how fast it is."""
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
        """A plan that was carried out in `seconds`."""
        return cls(
            seconds,
            plan.prefill_tokens,
            plan.prefill_attention,
            plan.prefill_context,
            plan.decode_count,
            plan.decode_context,
            len(plan.swap_out),
            len(plan.swap_in),
            plan.prefill_pairs,
            len(plan.chunks),
        )

    @property
    def swaps(self) -> int:
        """Directions in which blocks were moved: out, in, or both."""
        return bool(self.swap_out) + bool(self.swap_in)

    @property
    def swapped_blocks(self) -> int:
        """In both directions."""
        return self.swap_out + self.swap_in

    @property
    def kind(self) -> str:
        """prefill, decode or mixed; swap where nothing was computed."""
        if not self.prefill_tokens:
            return "decode" if self.decode_count else "swap"
        return "mixed" if self.decode_count else "prefill"

    def seconds_of(self, coefficients: Mapping[str, float]) -> float:
        """What coefficients of its kind say that it takes, without its swaps."""
        return sum(
            weight * (1.0 if name == "constant" else getattr(self, name))
            for name, weight in coefficients.items()
        )


@dataclass(frozen=True)
class Fit:
    """Coefficients of one kind of step, in seconds, and what they were fitted on."""

    coefficients: dict[str, float]
    samples: int
    error: float
    """Mean over samples of |predicted / measured − 1|, each predicted from all the others."""

    @property
    def percent(self) -> str:
        """The error for reading."""
        return f"{100 * self.error:.1f} %"

    def __str__(self) -> str:
        return f"{self.samples} steps, leave-one-out error {self.percent}"


def fit_kinds(samples: Iterable[Sample]) -> dict[str, Fit]:
    """A fit for each kind of step of which there are enough samples that moved no blocks."""
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
    """Non-negative least squares of the relative errors, so that short steps count as much.

    A machine that others use stalls now and then, and is slow for a while. So outliers weigh less
    (Huber's weights), and in the end all coefficients are scaled by one factor, such that the
    steps of a stretch take in all as long as they did: in the median of `PARTS` stretches, a
    stalled step counted up to `STALL`. What is rare is in the level, not in the shape.
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
    """What moving blocks adds to a step: for each direction, and for each block.

    None where too few steps of a kind that is fitted moved any, or all moved as many.
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
    """Coefficients that outliers hardly move; `known` of the seconds have another reason."""
    scale, weight = seconds, np.ones(len(seconds))
    for _ in range(_ROUNDS):
        by = np.sqrt(weight) / scale
        x = nnls(a * by[:, None], (seconds - known) * by)
        predicted = np.maximum(a @ x + known, 1e-3 * seconds)
        off = np.abs(seconds / predicted - 1)
        usual = OUTLIER * 1.4826 * float(np.median(off))
        if usual < ALONE:  # they fit but for a few
            break
        scale, weight = predicted, np.minimum(1.0, usual / np.maximum(off, ALONE))
    return x


def _level(a: Matrix, seconds: Matrix, x: Matrix) -> Matrix:
    """Scaled such that the total is right, in the median of `PARTS` of the recording."""
    predicted = a @ x
    counted = np.minimum(seconds, STALL * predicted)
    parts = np.array_split(np.arange(len(seconds)), max(1, min(PARTS, len(seconds) // PARTS)))
    ratios = [counted[part].sum() / predicted[part].sum() for part in parts if predicted.any()]
    return x * float(np.median(ratios)) if ratios else x


def leave_one_out(a: Matrix, b: Matrix, x: Matrix) -> float:
    """Mean error of each row as predicted from all the others.

    It takes no refit: leaving a row out magnifies its residual by 1 / (1 − leverage). That holds
    as long as the same coefficients stay at 0; a row that alone decides one is left out in earnest.
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
    """The x ≥ 0 with the smallest |a·x − b| (Lawson and Hanson's active set method)."""
    scale = np.linalg.norm(a, axis=0)  # features differ by many powers of ten
    scale[scale == 0] = 1.0
    a = a / scale
    columns = a.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)  # coefficients that are not held at 0
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
            # Go towards the trial only until the first coefficient reaches 0, and hold that.
            falling = free & (trial <= 0)
            steps = x[falling] / np.maximum(x[falling] - trial[falling], np.finfo(float).tiny)
            x = x + steps.min() * (trial - x)
            free &= x > tolerance
            x[~free] = 0.0
            if not free.any():
                break
    return np.asarray(x / scale)
