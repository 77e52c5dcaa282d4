"""Least squares with no negative coefficient: more work never makes a step shorter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


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
