"""Coefficients out of a log of steps, and how far to trust them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedsim.core import ConfigError, StepPlan
from pagedsim.sim.cost.nnls import Matrix, nnls

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

ALONE = 1e-6
"""With a leverage this near to 1 nothing but a row itself tells what its time is."""


class Sample(NamedTuple):
    """One recorded step: the totals of its plan, and how long it took."""

    seconds: float
    prefill_tokens: int = 0
    prefill_attention: int = 0
    prefill_context: int = 0
    decode_count: int = 0
    decode_context: int = 0

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
        )

    @property
    def kind(self) -> str:
        """prefill, decode or mixed."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_count else "prefill"


@dataclass(frozen=True)
class Fit:
    """Coefficients of one kind of step, in seconds, and what they were fitted on."""

    coefficients: dict[str, float]
    samples: int
    error: float
    """Mean over samples of |predicted / measured − 1|, each predicted from all the others."""

    def __str__(self) -> str:
        return f"{self.samples} steps, leave-one-out error {100 * self.error:.1f} %"


def fit_kinds(samples: Iterable[Sample]) -> dict[str, Fit]:
    """A fit for each kind of step of which there are enough samples."""
    rows = list(samples)
    for row in rows:
        if not row.seconds > 0:
            raise ConfigError(f"a step of {row.seconds} s: samples must take longer than 0 s")
    fits = {}
    for kind, features in KINDS.items():
        mine = [row for row in rows if row.kind == kind]
        if len(mine) > len(features):
            fits[kind] = fit(mine, features)
    if not fits:
        need = len(KINDS["decode"]) + 1
        raise ConfigError(f"{len(rows)} samples: need at least {need} of one kind of step")
    return fits


def fit(rows: Sequence[Sample], features: Sequence[str]) -> Fit:
    """Non-negative least squares of the relative errors, so that short steps count as much."""
    seconds = np.array([row.seconds for row in rows], dtype=float)
    columns = [
        np.ones(len(rows)) if name == "constant" else [getattr(row, name) for row in rows]
        for name in features
    ]
    a = np.array(columns, dtype=float).T / seconds[:, None]
    b = np.ones(len(rows))
    x = nnls(a, b)
    return Fit(dict(zip(features, x.tolist(), strict=True)), len(rows), leave_one_out(a, b, x))


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
