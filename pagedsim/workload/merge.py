"""Merge arrival processes, limited by number of requests or by duration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.limits import MOST

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
        """The arrivals of each source."""
        if self._places is None:
            return [self.arrival]
        return np.split(self.arrival[self._places], np.cumsum(self.counts)[:-1])

    def join(self, columns: Sequence[NDArray[T]]) -> NDArray[T]:
        """Merge the sources' columns into one in order of arrival.

        A column may be a scalar array, which is the value of all rows of its source.
        """
        if self._places is None:
            return columns[0]
        if all(column.ndim == 0 and _same(column, columns[0]) for column in columns):
            return columns[0]
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


def _same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return bool(one == other) or (one != one and other != other)
