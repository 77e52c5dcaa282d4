"""Replicas die, with everything that is on them, and come back empty."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole, shown
from pagedsim.fleet.chore import Chore
from pagedsim.fleet.roster import Standing

if TYPE_CHECKING:
    from pagedsim.fleet.front import Front
    from pagedsim.fleet.member import Member

Outage = tuple[float, float]
"""When a replica dies, and for how many seconds."""


class Failures(Protocol):
    """What `fleet.failures` describes."""

    def of(self, index: int, seed: int) -> Iterator[Outage]:
        """The outages of a replica, in order."""


@dataclass(frozen=True)
class Named:
    """Failures that are written down."""

    outages: Mapping[int, Sequence[Outage]]

    def of(self, index: int, seed: int) -> Iterator[Outage]:
        return iter(self.outages.get(index, ()))


@dataclass(frozen=True)
class Drawn:
    """Failures by chance: both times are exponential, each replica's its own."""

    mean_between: float
    """Seconds from when a replica is up until it dies."""
    mean_repair: float
    """Seconds until it is up again."""
    seed: int = 0
    """Beside the run's."""

    def __post_init__(self) -> None:
        for key in ("mean_between", "mean_repair"):
            require_number(f"failures.{key}", getattr(self, key), above=0)
        require_whole("failures.seed", self.seed, 0)

    def of(self, index: int, seed: int) -> Iterator[Outage]:
        dice, at = Random(f"failures/{self.seed + seed}/{index}"), 0.0
        for _ in count():
            at += dice.expovariate(1 / self.mean_between)
            seconds = dice.expovariate(1 / self.mean_repair)
            yield at, seconds
            at += seconds


def failures_of(settings: Any, replicas: int) -> Failures | None:
    """What `fleet.failures` says, of so many replicas; raises ConfigError for what cannot be."""
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        given = {str(key): value for key, value in settings.items()}
        refuse_settings("failures", given, Drawn, "failures")
        return Drawn(**given)
    if not isinstance(settings, Sequence) or isinstance(settings, str):
        raise ConfigError(
            f"failures={shown(settings)}: must be a list, such as [{{replica: 0, at: 30, for: 20}}]"
            ", or settings, such as {mean_between: 3600, mean_repair: 60}"
        )
    outages: dict[int, list[Outage]] = {}
    for row, one in enumerate(settings):
        index, outage = _named(f"failures[{row}]", one, replicas)
        outages.setdefault(index, []).append(outage)
    for index, mine in outages.items():
        mine.sort()
        for (at, seconds), (following, _) in pairwise(mine):
            if _after(following) < at + seconds:
                raise ConfigError(
                    f"failures: replica {index} dies at {following:g} s, and is down from {at:g} "
                    f"to {at + seconds:g} s: its outages must not overlap"
                )
    return Named(outages)


def _named(where: str, settings: Any, replicas: int) -> tuple[int, Outage]:
    keys = ("replica", "at", "for")
    if not isinstance(settings, Mapping) or {str(key) for key in settings} != set(keys):
        raise ConfigError(f"{where}={shown(settings)}: must have {', '.join(keys)}, and no more")
    index = require_whole(f"{where}.replica", settings["replica"], 0, replicas - 1)
    at = require_number(f"{where}.at", settings["at"], 0)
    return index, (at, require_number(f"{where}.for", settings["for"], above=0))


def _joined(outages: Iterator[Outage]) -> Iterator[Outage]:
    """The same outages, those that follow each other without a pause as one."""
    one: Outage | None = None
    for at, seconds in outages:
        if one is None or at > _after(sum(one)):
            if one is not None:
                yield one
            one = (at, seconds)
        else:
            one = (one[0], at + seconds - one[0])
    if one is not None:
        yield one


def _after(end: float) -> float:
    """Up to when an outage begins together with the end of another, as far as numbers are exact."""
    return end * (1 + 1e-9)


def fail(front: Front, failures: Failures, seed: int) -> None:
    """Have replicas die when it is their time."""
    for member in front.members:
        outages = failures.of(member.index, seed)
        front.environment.process(_dies(front, member, outages))


def _dies(
    front: Front, member: Member, outages: Iterator[Outage]
) -> Generator[simpy.Event, None, None]:
    chore, roster = Chore(front), front.roster
    for at, seconds in _joined(outages):
        yield from chore.until(at)
        if front.over:
            return
        standing = roster[member]
        if standing is Standing.OFF:
            continue  # what is not there cannot die
        front.lose(member, Standing.OFF if standing is Standing.DRAINING else Standing.DOWN)
        yield from chore.until(at + seconds)
        if roster[member] is Standing.DOWN:
            front.up(member)
