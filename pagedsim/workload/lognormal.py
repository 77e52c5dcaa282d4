"""The log-normal distribution, cut at a cap and rounded to whole tokens, with a given mean.

Cutting the tail lowers the mean, so the location is solved for: what comes out has the mean that
was asked for, not the one it had before the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import erfc, exp, inf, log, sqrt

Weighted = tuple[tuple[float, float], ...]
"""(weight, cap): a mixture of caps, the weights summing to 1."""


def sigma_of(cv: float) -> float:
    """Standard deviation of the logarithm, from the coefficient of variation."""
    return sqrt(log(1 + cv**2))


def mean_of(mu: float, sigma: float, caps: Weighted) -> float:
    """Mean of min(X, cap) in whole tokens, at least 1, for log-normal X."""
    # Rounding moves a mean only where tokens are few: there, every length is counted by itself.
    few = min([16, *(int(cap) for _, cap in caps if cap < inf)])
    edges = [0.0, *(_below(count + 0.5, mu, sigma) for count in range(1, few + 1))]
    mean = sum(count * (edges[count] - edges[count - 1]) for count in range(1, few + 1))
    whole = exp(mu + sigma**2 / 2)
    counted = _below(few + 0.5, mu + sigma**2, sigma)
    for weight, cap in caps:
        above = 1 - max(_below(cap, mu, sigma), edges[few])
        middle = max(_below(cap, mu + sigma**2, sigma) - counted, 0.0)
        mean += weight * (whole * middle + (cap * above if cap < inf else 0.0))
    return mean


@cache  # all arms and seeds of a study ask for the same
def solve_mu(mean: float, sigma: float, caps: Weighted) -> float | None:
    """The location that gives this mean, or None if no location does."""
    low, high = log(mean) - 8 * sigma - 2, log(mean) + 8 * sigma + 2
    mu = _bisect(lambda mu: mean_of(mu, sigma, caps), mean, low, high)
    return mu if abs(mean_of(mu, sigma, caps) / mean - 1) < 1e-6 else None


def caps_left(mu: float, sigma: float, first_cap: float, total: float) -> Weighted:
    """What a first draw, cut at `first_cap`, leaves of `total`, as a mixture of caps."""
    points, reach = 161, 6.0
    grid = [reach * (2 * i / (points - 1) - 1) for i in range(points)]
    weights = [exp(-z * z / 2) for z in grid]
    scale = sum(weights)
    drawn = [min(max(exp(mu + sigma * z), 1.0), first_cap) for z in grid]
    return tuple((weight / scale, total - x) for weight, x in zip(weights, drawn, strict=True))


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _below(bound: float, mu: float, sigma: float) -> float:
    """The probability that log-normal X is below `bound`."""
    return 1.0 if bound == inf else erfc((mu - log(bound)) / (sigma * sqrt(2))) / 2
