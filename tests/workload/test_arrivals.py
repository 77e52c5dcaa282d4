"""Arrival processes have the configured rate and burstiness."""

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.workload import Arrivals, FixedInterval, Gamma, Poisson, make_arrivals, stream

COUNT = 40_000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(4.0), 1.0), (Gamma(4.0, 0.5), 0.5), (Gamma(4.0, 3.0), 3.0), (FixedInterval(4.0), 0)],
)
def test_rate_and_burstiness(process: Arrivals, cv: float, seed: int) -> None:
    gaps = np.diff(process.times(COUNT, stream(seed, "arrivals")))
    error = cv / COUNT**0.5  # standard error of the mean gap, relative
    assert gaps.mean() == pytest.approx(1 / 4.0, rel=4 * error + 1e-9)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)
    assert (gaps >= 0).all()


@pytest.mark.parametrize("process", [Poisson(2.0), Gamma(2.0, 3.0), FixedInterval(2.0)])
def test_more_arrivals_begin_with_the_fewer(process: Arrivals) -> None:
    few, many = (process.times(count, stream(1, "a")) for count in (10, 1000))
    assert few.tolist() == many[:10].tolist()


def test_streams_of_other_names_and_seeds_differ() -> None:
    drawn = {stream(seed, name).random() for seed in (0, 1) for name in ("arrivals", "lengths")}
    assert len(drawn) == 4
    with pytest.raises(ConfigError, match="seed=-1"):
        stream(-1, "arrivals")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "poisson", "rate": -1}, "rate=-1: must be a number above 0"),
        ({"kind": "poisson", "rate": "fast"}, "rate='fast': must be a number above 0"),
        ({"kind": "poisson"}, "rate: must be given, for arrivals=poisson"),
        ({"kind": "poison", "rate": 1.0}, "did you mean 'poisson'"),
        ({"kind": "poisson", "rate": 1.0, "cv": 2.0}, "cv=2.0: only arrivals=gamma takes it"),
        ({"kind": "gamma", "rate": 1.0}, "cv: must be given, for arrivals=gamma"),
        ({"kind": "gamma", "rate": 1.0, "cv": 0}, "cv=0: must be a number from 0.001 to 1000"),
        ({"kind": "closed"}, "users: must be given, for arrivals=closed"),
        ({"kind": "closed", "users": 0}, "users=0: must be a whole number of at least 1"),
        ({"kind": "burst", "users": 3}, "users=3: only arrivals=closed takes it"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_arrivals(**settings)
    assert message in str(error.value)
