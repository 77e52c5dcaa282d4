"""The log-normal distribution, cut at a cap and rounded to whole tokens, with a given mean.

Cutting the tail lowers the mean, so the location is solved for: what comes out has the mean that
was asked for, not the one it had before the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import erfc, exp, inf, log, sqrt

Weighted = Sequence[tuple[float, float]]
"""(weight, cap): a mixture of caps, the weights summing to 1."""


def sigma_of(cv: float) -> float:
    """Standard deviation of the logarithm, from the coefficient of variation."""
    return sqrt(log(1 + cv**2))


def mean_of(mu: float, sigma: float, cap: float) -> float:
    """Mean of min(X, cap) in whole tokens, at least 1, for log-normal X."""
    if cap < 1.5:
        return 1.0
    whole = exp(mu + sigma**2 / 2)

    def below(bound: float, shift: float) -> float:
        return 1.0 if bound == inf else _phi((log(bound) - mu) / sigma - shift)

    # What is below one and a half becomes one token; above, rounding changes no mean.
    middle = whole * (below(cap, sigma) - below(1.5, sigma))
    return middle + below(1.5, 0) + (0.0 if cap == inf else cap * (1 - below(cap, 0)))


def solve_mu(mean: float, sigma: float, caps: Weighted) -> float | None:
    """The location that gives this mean, or None if no location does."""

    def average(mu: float) -> float:
        return sum(weight * mean_of(mu, sigma, cap) for weight, cap in caps)

    low, high = log(mean) - 8 * sigma - 2, log(mean) + 8 * sigma + 2
    mu = _bisect(average, mean, low, high)
    return mu if abs(average(mu) / mean - 1) < 1e-6 else None


def caps_left(mu: float, sigma: float, first_cap: float, total: float) -> Weighted:
    """What a first draw, cut at `first_cap`, leaves of `total`, as a mixture of caps."""
    points, reach = 161, 6.0
    grid = [reach * (2 * i / (points - 1) - 1) for i in range(points)]
    weights = [exp(-z * z / 2) for z in grid]
    scale = sum(weights)
    drawn = [min(max(exp(mu + sigma * z), 1.0), first_cap) for z in grid]
    return [(weight / scale, total - x) for weight, x in zip(weights, drawn, strict=True)]


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _phi(z: float) -> float:
    return erfc(-z / sqrt(2)) / 2
