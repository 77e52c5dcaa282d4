"""Predicted output lengths, as a policy may be given: right, or wrong by a known amount."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import require_number
from pagedsim.workload.limits import LONGEST


def predict(
    output_len: NDArray[np.int32], sigma: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The true length times a log-normal error of median 1; `sigma` 0 is an oracle.

    Two guesses in three are then within a factor of exp(sigma).
    """
    require_number("prediction_sigma", sigma, low=0)
    if sigma == 0:
        return output_len.astype(np.float64)
    guess = rng.standard_normal(len(output_len))
    guess *= sigma
    np.minimum(guess, 700.0, out=guess)  # beyond that, exp is infinite
    np.exp(guess, out=guess)
    guess *= output_len
    np.clip(guess, 1.0, LONGEST, out=guess)
    return guess
