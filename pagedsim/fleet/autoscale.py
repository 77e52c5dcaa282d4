"""Autoscaling: start and stop replicas by their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import simpy

from pagedsim.core import ConfigError
from pagedsim.core.errors import (
    refuse_settings,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.fleet.dispatcher import MIN_INTERVAL_S, PHASES, BackgroundProcess, Dispatcher
from pagedsim.fleet.replica import ReplicaHandle, ReplicaState
from pagedsim.policies.routing.llumnix import freeness
from pagedsim.policies.routing.router import Replica


def _kv_use(replica: Replica) -> float:
    return 1 - replica.free_blocks / replica.total_blocks


RULES: dict[str, Callable[[Replica], float]] = {
    "queue": lambda replica: replica.waiting,
    "kv": _kv_use,
    "freeness": freeness,
}
"""The metric of each rule, averaged over replicas; a starting replica counts as empty."""
LESS_IS_BUSIER = ("freeness",)


@dataclass(frozen=True)
class Autoscale:
    """Thresholds for starting and stopping replicas.

    With prefill-decode disaggregation the replicas of each role are scaled separately. At each
    interval at most one replica per role starts or stops: scaling up returns the last draining
    replica to service, or else starts the first one that is off; scaling down drains the last
    replica that is up.
    """

    RENAMED: ClassVar = {"least": "min_replicas", "every": "interval_s", "start": "startup_s"}

    rule: str
    """`queue`: waiting requests, including those queued at the router; `kv`: share of KV blocks in
    use; `freeness`: Llumnix's, free blocks less those that the queue needs, per request."""
    up: float
    """Start a replica if the mean is beyond this."""
    down: float
    """Stop a replica if the mean is on the other side of this."""
    min_replicas: int = 1
    """Minimum number of replicas of each role, and the initial one."""
    interval_s: float = 10.0
    """Seconds between decisions."""
    startup_s: float = 60.0
    """Seconds that a replica takes to start; it costs money, but receives no requests yet."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise unknown("autoscale.rule", str(self.rule), RULES)
        for key in ("up", "down"):
            require_number(f"autoscale.{key}", getattr(self, key))
        upside = "below" if self.rule in LESS_IS_BUSIER else "above"
        if (self.up < self.down if upside == "below" else self.up > self.down) is False:
            raise ConfigError(
                f"autoscale.up={self.up:g}: must be {upside} down={self.down:g} with "
                f"rule={self.rule}"
            )
        require_whole("autoscale.min_replicas", self.min_replicas, 1)
        require_number("autoscale.interval_s", self.interval_s, MIN_INTERVAL_S)
        require_number("autoscale.startup_s", self.startup_s, 0)

    def wanted(self, replicas: Sequence[Replica], held: float) -> int:
        """The change in the number of replicas: 1, 0 or -1; `held` requests are queued at the
        router."""
        count = len(replicas)
        if count < self.min_replicas:
            return 1
        total = sum(map(RULES[self.rule], replicas)) + (held if self.rule == "queue" else 0)
        sign = -1 if self.rule in LESS_IS_BUSIER else 1
        mean = sign * total / count
        if mean > sign * self.up:
            return 1
        return -1 if mean < sign * self.down and count > self.min_replicas else 0


def autoscale_of(settings: Any, replicas: Mapping[str, int]) -> Autoscale:
    """The setting `fleet.autoscale`, validated against the number of replicas of each role."""
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"autoscale={shown(settings)}: must be settings, such as "
            "{rule: queue, up: 4, down: 1}, or null"
        )
    given = {str(key): value for key, value in settings.items()}
    refuse_settings("autoscale", given, Autoscale, "autoscale")
    made = Autoscale(**given)
    for role, count in replicas.items():
        if made.min_replicas > count:
            which = "" if role == "both" else f" with role={role}"
            raise ConfigError(
                f"autoscale.min_replicas={made.min_replicas}: the fleet has {count} "
                f"replicas{which}, which is the most there can be"
            )
    return made


def scale(dispatcher: Dispatcher, rule: Autoscale) -> None:
    """Start autoscaling; initially all but the first replicas of each role are off."""
    for role in dict.fromkeys(replica.role for replica in dispatcher.replicas):
        mine = [replica for replica in dispatcher.replicas if replica.role == role]
        for replica in mine[rule.min_replicas :]:
            dispatcher.states.put(replica, ReplicaState.OFF)
        dispatcher.environment.process(_scale_periodically(dispatcher, rule, mine))


def _held(dispatcher: Dispatcher, role: str) -> float:
    """The share of one role in the requests queued at the router, which count evenly for all
    replicas that can serve them."""
    there = Counter(
        one.role for one in dispatcher.states.in_state(ReplicaState.UP, ReplicaState.STARTING)
    )
    share = 0.0
    for phase in PHASES:
        if able := role in (phase, "both") and there[phase] + there["both"]:
            share += dispatcher.held_for(phase) * there[role] / able
    return share


def _scale_periodically(
    dispatcher: Dispatcher, rule: Autoscale, replicas: Sequence[ReplicaHandle]
) -> Generator[simpy.Event, None, None]:
    background, states, now = BackgroundProcess(dispatcher), dispatcher.states, 0.0

    def in_state(*which: ReplicaState) -> list[ReplicaHandle]:
        return [replica for replica in replicas if states[replica] in which]

    while True:
        now += rule.interval_s
        yield from background.until(now)
        for draining in in_state(ReplicaState.DRAINING):
            dispatcher.stop_if_drained(draining)
        there = [dispatcher.view(one) for one in in_state(ReplicaState.UP, ReplicaState.STARTING)]
        more = rule.wanted(there, _held(dispatcher, replicas[0].role))
        if more > 0:
            if draining_ones := in_state(ReplicaState.DRAINING):
                dispatcher.bring_up(draining_ones[-1])
            elif off := in_state(ReplicaState.OFF):
                states.put(off[0], ReplicaState.STARTING)
                dispatcher.environment.process(_starts(dispatcher, off[0], rule.startup_s))
        elif more < 0 and (up := in_state(ReplicaState.UP)):
            dispatcher.drain(up[-1])


def _starts(
    dispatcher: Dispatcher, replica: ReplicaHandle, seconds: float
) -> Generator[simpy.Event, None, None]:
    states, began = dispatcher.states, dispatcher.environment.now
    yield dispatcher.environment.timeout(seconds)
    if (
        states[replica] is ReplicaState.STARTING and states.since(replica) == began
    ):  # no failure since
        dispatcher.bring_up(replica)
