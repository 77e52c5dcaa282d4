"""Failure injection: replicas fail with all their state and restart with a cold cache."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random
from typing import Any, ClassVar

import simpy

from pagedsim.cluster.dispatcher import BackgroundProcess, Dispatcher
from pagedsim.cluster.replica import ReplicaHandle, ReplicaState
from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole, shown

Outage = tuple[float, float]
"""Time of a failure, and seconds until the restart."""


@dataclass(frozen=True)
class ListedOutages:
    """Outages listed in the configuration."""

    drawn: ClassVar[bool] = False
    """Whether they depend on the seed."""
    outages: Mapping[int, Sequence[Outage]]

    def of(self, index: int, seed: int) -> Iterator[Outage]:
        return iter(self.outages.get(index, ()))


@dataclass(frozen=True)
class RandomOutages:
    """Random outages, independent per replica: exponential seconds to failures and to repair."""

    drawn: ClassVar[bool] = True
    mean_between: float
    mean_repair: float
    seed: int = 0
    """Added to the run's seed."""

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


Failures = ListedOutages | RandomOutages


def failures_of(settings: Any, replicas: int) -> Failures:
    """The setting `fleet.failures`, validated against the number of replicas."""
    if isinstance(settings, Mapping):
        given = {str(key): value for key, value in settings.items()}
        refuse_settings("failures", given, RandomOutages, "failures")
        return RandomOutages(**given)
    if not isinstance(settings, Sequence) or isinstance(settings, str):
        raise ConfigError(
            f"failures={shown(settings)}: must be a list, such as [{{replica: 0, at: 30, for: 20}}]"
            ", or settings, such as {mean_between: 3600, mean_repair: 60}"
        )
    outages: dict[int, list[Outage]] = {}
    for row, setting in enumerate(settings):
        index, outage = _listed(f"failures[{row}]", setting, replicas)
        outages.setdefault(index, []).append(outage)
    for index, mine in outages.items():
        mine.sort()
        for (at, seconds), (following, _) in pairwise(mine):
            if _after(following) < at + seconds:
                raise ConfigError(
                    f"failures: replica {index} dies at {following:g} s, and is down from {at:g} "
                    f"to {at + seconds:g} s: its outages must not overlap"
                )
    return ListedOutages(outages)


def _listed(where: str, settings: Any, replicas: int) -> tuple[int, Outage]:
    keys = ("replica", "at", "for")
    if not isinstance(settings, Mapping) or {str(key) for key in settings} != set(keys):
        raise ConfigError(f"{where}={shown(settings)}: must have {', '.join(keys)}, and no more")
    index = require_whole(f"{where}.replica", settings["replica"], 0, replicas - 1)
    at = require_number(f"{where}.at", settings["at"], 0)
    return index, (at, require_number(f"{where}.for", settings["for"], above=0))


def _joined(outages: Iterator[Outage]) -> Iterator[Outage]:
    """The same outages, adjacent ones merged."""
    outage: Outage | None = None
    for at, seconds in outages:
        if outage is None or at > _after(sum(outage)):
            if outage is not None:
                yield outage
            outage = (at, seconds)
        else:
            outage = (outage[0], at + seconds - outage[0])
    if outage is not None:
        yield outage


def _after(end: float) -> float:
    """The end of an outage plus a rounding tolerance, within which the next one is adjacent."""
    return end * (1 + 1e-9)


def fail(dispatcher: Dispatcher, failures: Failures, seed: int) -> None:
    """Start failure injection."""
    for replica in dispatcher.replicas:
        outages = failures.of(replica.index, seed)
        dispatcher.environment.process(_fail_periodically(dispatcher, replica, outages))


def _fail_periodically(
    dispatcher: Dispatcher, replica: ReplicaHandle, outages: Iterator[Outage]
) -> Generator[simpy.Event, None, None]:
    background, states = BackgroundProcess(dispatcher), dispatcher.states
    for at, seconds in _joined(outages):
        yield from background.until(at)
        if dispatcher.finished:
            return
        state = states[replica]
        if state is ReplicaState.OFF:
            continue  # a replica that is off cannot fail
        dispatcher.crash(
            replica, ReplicaState.OFF if state is ReplicaState.DRAINING else ReplicaState.DOWN
        )
        yield from background.until(at + seconds)
        if states[replica] is ReplicaState.DOWN:
            dispatcher.bring_up(replica)
