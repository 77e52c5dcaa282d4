"""Autoscaling: start and stop replicas by their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import simpy

from pagedsim.cluster.dispatcher import MIN_INTERVAL_S, PHASES, BackgroundProcess, Dispatcher
from pagedsim.cluster.replica import ReplicaHandle, ReplicaState
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.policies.autoscaling import Autoscaler, ScalingView


@dataclass(frozen=True)
class Autoscale:
    """An autoscaler for each role, and when its decisions take effect.

    Scaling up returns the last draining replicas to service, then starts the first ones that are
    off; scaling down drains the last replicas that are up.
    """

    make: Callable[[], Autoscaler]
    """Builds a new autoscaler, one for each role."""
    min_replicas: int = 1
    """Minimum number of replicas of each role, and the initial one."""
    interval_s: float = 10.0
    """Seconds between decisions."""
    startup_s: float = 60.0
    """Seconds that a replica takes to start; it costs money, but receives no requests yet."""

    def __post_init__(self) -> None:
        require_whole("fleet.autoscale.min_replicas", self.min_replicas, 1)
        require_number("fleet.autoscale.interval_s", self.interval_s, MIN_INTERVAL_S)
        require_number("fleet.autoscale.startup_s", self.startup_s, 0)

    def refuse_small(self, replicas: Mapping[str, int]) -> None:
        """Raise ConfigError if a role has fewer replicas than the minimum."""
        for role, count in replicas.items():
            if self.min_replicas > count:
                which = "" if role == "both" else f" with role={role}"
                raise ConfigError(
                    f"fleet.autoscale.min_replicas={self.min_replicas}: the fleet has {count} "
                    f"replicas{which}, which is the most there can be"
                )


def scale(dispatcher: Dispatcher, settings: Autoscale) -> None:
    """Start autoscaling; initially all but the first replicas of each role are off."""
    for role in dict.fromkeys(replica.role for replica in dispatcher.replicas):
        mine = [replica for replica in dispatcher.replicas if replica.role == role]
        for replica in mine[settings.min_replicas :]:
            dispatcher.states.put(replica, ReplicaState.OFF)
        scaling = _Scaling(dispatcher, settings, mine)
        dispatcher.environment.process(scaling.periodically())


def _held(dispatcher: Dispatcher, role: str) -> float:
    """The requests queued at the router that count for one role, divided evenly over all replicas
    that can serve them."""
    replicas = dispatcher.states.in_state(ReplicaState.UP, ReplicaState.STARTING)
    present = Counter(replica.role for replica in replicas)
    share = 0.0
    for phase in PHASES:
        if able := role in (phase, "both") and present[phase] + present["both"]:
            share += dispatcher.held_for(phase) * present[role] / able
    return share


class _Scaling:
    """The replicas of one role, started and stopped."""

    def __init__(
        self, dispatcher: Dispatcher, settings: Autoscale, replicas: Sequence[ReplicaHandle]
    ) -> None:
        self._dispatcher, self._settings, self._replicas = dispatcher, settings, replicas
        self._autoscaler = settings.make()

    def periodically(self) -> Generator[simpy.Event, None, None]:
        background, now = BackgroundProcess(self._dispatcher), 0.0
        while True:
            now += self._settings.interval_s
            yield from background.until(now)
            for draining in self._in_state(ReplicaState.DRAINING):
                self._dispatcher.stop_if_drained(draining)
            present = self._in_state(ReplicaState.UP, ReplicaState.STARTING)
            self._change(self._wanted(now, present) - len(present))

    def _in_state(self, *which: ReplicaState) -> list[ReplicaHandle]:
        return [replica for replica in self._replicas if self._dispatcher.states[replica] in which]

    def _wanted(self, now: float, present: Sequence[ReplicaHandle]) -> int:
        settings, role = self._settings, self._replicas[0].role
        if len(present) < settings.min_replicas:
            return len(present) + 1
        view = ScalingView(
            now,
            role,
            tuple(self._dispatcher.view(replica) for replica in present),
            starting=len(self._in_state(ReplicaState.STARTING)),
            draining=len(self._in_state(ReplicaState.DRAINING)),
            queued=_held(self._dispatcher, role),
            min_replicas=settings.min_replicas,
            max_replicas=len(self._replicas),
            interval_s=settings.interval_s,
            startup_s=settings.startup_s,
        )
        return max(self._autoscaler.desired(view), settings.min_replicas)

    def _change(self, more: int) -> None:
        """Start or drain up to that many replicas."""
        if more < 0:
            for replica in self._in_state(ReplicaState.UP)[more:][::-1]:
                self._dispatcher.drain(replica)
            return
        back = self._in_state(ReplicaState.DRAINING)[::-1][:more]
        for replica in back:
            self._dispatcher.bring_up(replica)
        for replica in self._in_state(ReplicaState.OFF)[: more - len(back)]:
            self._dispatcher.states.put(replica, ReplicaState.STARTING)
            starting = _starts(self._dispatcher, replica, self._settings.startup_s)
            self._dispatcher.environment.process(starting)


def _starts(
    dispatcher: Dispatcher, replica: ReplicaHandle, seconds: float
) -> Generator[simpy.Event, None, None]:
    states, began = dispatcher.states, dispatcher.environment.now
    yield dispatcher.environment.timeout(seconds)
    if (
        states[replica] is ReplicaState.STARTING and states.since(replica) == began
    ):  # no failure since
        dispatcher.bring_up(replica)
