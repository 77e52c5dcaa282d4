"""Arrival processes (Poisson, gamma and fixed-rate, burst, closed-loop), and merging of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.contracts import SWITCH, WRONG, Contract, Rule, vet
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.workload.limits import LATEST, MOST

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


# Processes and their settings. The last two ignore a rate instead of refusing it, since every
# workload has one and sweeps set it.
_PROCESSES: Mapping[str, tuple[Callable[..., Arrivals], tuple[str, ...]]] = {
    "poisson": (Poisson, ("rate",)),
    "gamma": (Gamma, ("rate", "cv")),
    "fixed": (FixedInterval, ("rate",)),
    "burst": (Burst, ()),
    "closed": (ClosedLoop, ("users", "think_time")),
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
    if kind not in _PROCESSES:
        raise unknown("arrivals", str(kind), _PROCESSES)
    process, takes = _PROCESSES[kind]
    given = {"rate": rate, "cv": cv, "users": users, "think_time": think_time}
    for key, value in given.items():
        if value is not None and key not in takes and key != "rate":
            owner = next(name for name, (_, keys) in _PROCESSES.items() if key in keys)
            raise ConfigError(f"{key}={value}: only arrivals={owner} takes it, not {kind}")
    for key in takes:
        if given[key] is None and key != "think_time":
            raise ConfigError(f"{key}: must be given, for arrivals={kind}")
    return process(**{key: given[key] for key in takes if given[key] is not None})


Floats = NDArray[np.float64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Source:
    """One arrival process: its times, rate (0 if not timed) and maximum number of arrivals.

    `times(m)` must be a prefix of `times(n)` for m < n.
    """

    times: Callable[[int], Floats]
    rate: float
    cv: float = 1.0
    limit: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Merged:
    """Merged arrivals: `counts[i]` rows are of source i; `join` merges other columns likewise."""

    arrival: Floats
    counts: tuple[int, ...]
    _places: NDArray[np.int64] | None

    def split(self) -> list[Floats]:
        if self._places is None:
            return [self.arrival]
        return np.split(self.arrival[self._places], np.cumsum(self.counts)[:-1])

    def join(self, columns: Sequence[NDArray[T]]) -> NDArray[T]:
        """Merge the sources' columns into one in order of arrival.

        A column may be a scalar array, which is the value of all rows of its source.
        """
        if self._places is None:
            return columns[0]
        first = columns[0]
        if all(c.ndim == 0 and np.array_equal(c, first, equal_nan=True) for c in columns):
            return first
        full = [np.broadcast_to(c, n) for c, n in zip(columns, self.counts, strict=True)]
        stacked = np.concatenate(full)
        joined = np.empty_like(stacked)
        joined[self._places] = stacked
        return joined


def merge(sources: Sequence[Source], requests: int | None, duration: float | None) -> Merged:
    """The first `requests` arrivals over all sources, before `duration` seconds."""
    most = [_most(source, requests, duration, len(sources)) for source in sources]
    wanted = _first_guess(sources, most, requests, duration)
    while True:
        drawn = [source.times(count) for source, count in zip(sources, wanted, strict=True)]
        open_ended = [t[-1] for t, n, top in zip(drawn, wanted, most, strict=True) if n < top]
        known_until = min(open_ended, default=inf)  # later, a source may have more arrivals
        if known_until == inf or (duration is not None and known_until >= duration):
            break
        known = sum(int(np.searchsorted(times, known_until, "right")) for times in drawn)
        if requests is not None and known >= requests:
            break
        wanted = [int(min(2 * count, top)) for count, top in zip(wanted, most, strict=True)]
    return _cut(drawn, requests, duration)


def _most(source: Source, requests: int | None, duration: float | None, sources: int) -> float:
    """Upper bound on the arrivals needed of a source."""
    where = f"classes.{source.name}: " if source.name else ""
    if not source.rate and source.limit is None and (requests is None or sources > 1):
        raise ConfigError(f"{where}needs requests=, since it has no rate")
    if requests is None and duration is None and source.limit is None:
        raise ConfigError(f"{where}needs requests= or duration=")
    return min(inf if n is None else n for n in (source.limit, requests))


def _first_guess(
    sources: Sequence[Source], most: Sequence[float], requests: int | None, duration: float | None
) -> list[int]:
    if len(sources) == 1 and duration is None:
        return [int(most[0])]
    total = sum(source.rate for source in sources)
    if requests is None and duration is not None and total * duration > MOST:
        raise ConfigError(
            f"duration={duration:g}: at {total:g} requests/s these are {total * duration:g}: "
            f"must be at most {MOST}"
        )
    span = min(
        inf if duration is None else duration,
        inf if requests is None or not total else requests / total,
    )
    guesses = []
    for source, top in zip(sources, most, strict=True):
        expected = source.rate * span if source.rate and span < inf else top
        if expected < inf:
            expected += 6 * sqrt(expected) * max(1.0, source.cv) + 16  # rarely too few
        guesses.append(int(min(top, ceil(expected))))
    return guesses


def _cut(drawn: Sequence[Floats], requests: int | None, duration: float | None) -> Merged:
    if len(drawn) == 1:
        arrival, places = drawn[0], None
        kept = _kept(arrival, requests, duration)
        arrival, counts = arrival[:kept], (kept,)
    else:
        arrival = np.concatenate(drawn)
        order = np.argsort(arrival, kind="stable")
        arrival = arrival[order]
        kept = _kept(arrival, requests, duration)
        source = np.repeat(np.arange(len(drawn)), [len(times) for times in drawn])[order[:kept]]
        arrival = arrival[:kept].copy()
        counts = tuple(np.bincount(source, minlength=len(drawn)).tolist())
        # Rows of a source keep their order, so a stable sort by source gives their positions.
        places = np.argsort(source, kind="stable")
    if not len(arrival):
        raise ConfigError(f"duration={duration}: no request arrives in that time")
    return Merged(arrival, counts, places)


def _kept(arrival: Floats, requests: int | None, duration: float | None) -> int:
    kept = len(arrival) if duration is None else int(np.searchsorted(arrival, duration, "left"))
    return kept if requests is None else min(kept, requests)
