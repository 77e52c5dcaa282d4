"""Arrival processes: Poisson, gamma and fixed-rate, burst, closed-loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.contracts import SWITCH, WRONG, Contract, Rule, vet
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.workload.limits import LATEST

Mode = Literal["open", "closed", "burst"]
"""Open loop (timed arrivals), closed loop (a fixed number of users), or all at time 0."""


class Arrivals(ABC):
    """An arrival process."""

    mode: Mode = "open"
    drawn: ClassVar[bool] = True  # whether it is random

    @abstractmethod
    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """The first `count` arrivals in seconds; a smaller count must give a prefix of a larger."""


@dataclass(frozen=True)
class Timed(Arrivals):
    """An arrival process of `rate` requests a second."""

    rate: float

    def __post_init__(self) -> None:
        require_number("rate", self.rate, above=0)

    def scaled(self, factor: float) -> Self:
        """The same process at `factor` times the rate."""
        return replace(self, rate=self.rate * factor)


@dataclass(frozen=True)
class Poisson(Timed):
    """Exponential inter-arrival times."""

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        gaps = rng.standard_exponential(count)
        np.cumsum(gaps, out=gaps)
        gaps /= self.rate
        return gaps


@dataclass(frozen=True)
class Gamma(Timed):
    """Gamma inter-arrival times of coefficient of variation `cv`: 1 is Poisson, more is bursty."""

    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("cv", self.cv, low=0.001, high=1000)

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        square = self.cv**2
        gaps = rng.standard_gamma(1 / square, count)
        np.cumsum(gaps, out=gaps)
        gaps *= square / self.rate
        return gaps


@dataclass(frozen=True)
class FixedInterval(Timed):
    """One request each 1 / `rate` seconds, the first at 0."""

    drawn = False

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return np.arange(count) / self.rate


@dataclass(frozen=True)
class Burst(Arrivals):
    """All at time 0."""

    mode: Mode = "burst"
    drawn = False

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return np.zeros(count)


@dataclass(frozen=True)
class ClosedLoop(Arrivals):
    """Closed loop: each of `users` sends its next request `think_time` seconds after an answer.

    Arrival times depend on the server, so all times are 0 here; the driver sends the next request
    of the workload whenever a user becomes ready.
    """

    users: int
    think_time: float = 0.0
    mode: Mode = "closed"
    drawn = False

    def __post_init__(self) -> None:
        require_whole("users", self.users, 1)
        require_number("think_time", self.think_time, low=0)

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return np.zeros(count)


def _timed(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    """Validate arrival times: the requested number of them, sorted, as floats."""
    try:
        times = np.asarray(answer)
    except (ValueError, OverflowError):  # rows of unlike lengths
        return WRONG
    if times.dtype.kind not in "iuf" or times.shape != (asked[0],):
        return WRONG
    if not ((times >= 0) & (times <= LATEST)).all() or (np.diff(times) < 0).any():
        return WRONG
    return times.astype(np.float64, copy=False)


def _mode(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    modes = ("closed",) if isinstance(part, ClosedLoop) else ("open", "burst")
    return answer if isinstance(answer, str) and answer in modes else WRONG


CONTRACT = Contract(
    Arrivals,
    {
        "mode": Rule("'open' or 'burst', or 'closed' in a subclass of ClosedLoop", _mode),
        "drawn": SWITCH,
        "times": Rule(
            f"an array of {{0}} numbers of seconds from 0 to {LATEST:g}, none below the one before",
            _timed,
        ),
    },
)


# Settings of each process. The last two ignore a rate instead of refusing it, since every workload
# has one and sweeps set it.
_TAKES: Mapping[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "fixed": ("rate",),
    "burst": (),
    "closed": ("users", "think_time"),
}


def make_arrivals(
    kind: str | Arrivals,
    *,
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
) -> Arrivals:
    """An arrival process by name: poisson, gamma, fixed, burst or closed; objects pass through.

    >>> make_arrivals("gamma", rate=2.0, cv=3.0)
    Gamma(rate=2.0, cv=3.0)
    """
    if isinstance(kind, Arrivals):
        return vet(kind, CONTRACT)
    if kind not in _TAKES:
        raise unknown("arrivals", str(kind), _TAKES)
    takes = _TAKES[kind]
    for key, value in (("cv", cv), ("users", users), ("think_time", think_time)):
        if value is not None and key not in takes:
            owner = next(name for name, keys in _TAKES.items() if key in keys)
            raise ConfigError(f"{key}={value}: only arrivals={owner} takes it, not {kind}")
    given = {"rate": rate, "cv": cv, "users": users}
    for key in takes:
        if key in given and given[key] is None:
            raise ConfigError(f"{key}: must be given, for arrivals={kind}")
    if kind == "poisson":
        return Poisson(require_number("rate", rate, above=0))
    if kind == "gamma":
        cv = require_number("cv", cv, low=0.001, high=1000)
        return Gamma(require_number("rate", rate, above=0), cv)
    if kind == "fixed":
        return FixedInterval(require_number("rate", rate, above=0))
    if kind == "burst":
        return Burst()
    pause = 0.0 if think_time is None else require_number("think_time", think_time, low=0)
    return ClosedLoop(require_whole("users", users, 1), pause)
