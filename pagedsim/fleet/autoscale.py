"""Replicas start and stop by rule, with what there is to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import simpy

from pagedsim.core import ConfigError
from pagedsim.core.errors import (
    refuse_settings,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.fleet.chore import SHORTEST, Chore
from pagedsim.fleet.front import STAGES
from pagedsim.fleet.roster import Standing
from policies.routing.llumnix import freeness
from policies.routing.router import Replica

if TYPE_CHECKING:
    from pagedsim.fleet.front import Front
    from pagedsim.fleet.member import Member


def _kv_use(replica: Replica) -> float:
    return 1 - replica.free_blocks / replica.total_blocks


RULES: dict[str, Callable[[Replica], float]] = {
    "queue": lambda replica: replica.waiting,
    "kv": _kv_use,
    "freeness": freeness,
}
"""What is looked at, by name: the mean over all replicas, of which one that starts is empty."""
LESS_IS_BUSIER = ("freeness",)


@dataclass(frozen=True)
class Autoscale:
    """When to start another replica, and when to stop one.

    Where prefill and decode are apart, this goes for the replicas of each role by themselves. At
    each look at most one starts or stops. It starts the first that is off, or takes the last
    that drains back; it stops the last that is up, which serves those that it has to their end.
    """

    rule: str
    """`queue`: requests that wait, those in front of the router too; `kv`: the part of its blocks
    in use; `freeness`: Llumnix's, free blocks less those that the queue wants, a request."""
    up: float
    """One more replica where the mean is beyond it."""
    down: float
    """One less where the mean is on the other side of it."""
    least: int = 1
    """So many there are of each role at least, and in the beginning."""
    every: float = 10.0
    """Seconds from one look to the next."""
    start: float = 60.0
    """Seconds that a replica takes to start; it is paid for, and takes no requests yet."""

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
        require_whole("autoscale.least", self.least, 1)
        require_number("autoscale.every", self.every, SHORTEST)
        require_number("autoscale.start", self.start, 0)

    def wanted(self, replicas: Sequence[Replica], held: float) -> int:
        """How many more there should be: 1, 0 or -1. `held` requests wait in front of them."""
        count = len(replicas)
        if count < self.least:
            return 1
        total = sum(map(RULES[self.rule], replicas)) + (held if self.rule == "queue" else 0)
        sign = -1 if self.rule in LESS_IS_BUSIER else 1
        mean = sign * total / count
        if mean > sign * self.up:
            return 1
        return -1 if mean < sign * self.down and count > self.least else 0


def autoscale_of(settings: Any, replicas: Mapping[str, int]) -> Autoscale | None:
    """What `fleet.autoscale` says, of so many replicas of each role; raises ConfigError for what
    cannot be."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"autoscale={shown(settings)}: must be settings, such as "
            "{rule: queue, up: 4, down: 1}, or null"
        )
    given = {str(key): value for key, value in settings.items()}
    refuse_settings("autoscale", given, Autoscale, "autoscale")
    made = Autoscale(**given)
    for role, most in replicas.items():
        if made.least > most:
            which = "" if role == "both" else f" with role={role}"
            raise ConfigError(
                f"autoscale.least={made.least}: the fleet has {most} replicas{which}, which is the "
                "most there can be"
            )
    return made


def scale(front: Front, rule: Autoscale) -> None:
    """Have replicas start and stop; all but the first few of each role are off until then."""
    for role in dict.fromkeys(member.role for member in front.members):
        mine = [member for member in front.members if member.role == role]
        for member in mine[rule.least :]:
            front.roster.put(member, Standing.OFF)
        front.environment.process(_look(front, rule, mine))


def _held(front: Front, role: str) -> float:
    """Requests that are held in front, as the share of one role: they count evenly for all replicas
    that may take them."""
    there = Counter(one.role for one in front.roster.those(Standing.UP, Standing.STARTING))
    share = 0.0
    for stage in STAGES:
        if able := role in (stage, "both") and there[stage] + there["both"]:
            share += front.held_for(stage) * there[role] / able
    return share


def _look(
    front: Front, rule: Autoscale, members: Sequence[Member]
) -> Generator[simpy.Event, None, None]:
    chore, roster, now = Chore(front), front.roster, 0.0

    def those(*standings: Standing) -> list[Member]:
        return [member for member in members if roster[member] in standings]

    while True:
        now += rule.every
        yield from chore.until(now)
        for draining in those(Standing.DRAINING):
            front.stop_if_drained(draining)
        there = [front.view(one) for one in those(Standing.UP, Standing.STARTING)]
        more = rule.wanted(there, _held(front, members[0].role))
        if more > 0:
            if draining_ones := those(Standing.DRAINING):
                front.up(draining_ones[-1])
            elif off := those(Standing.OFF):
                roster.put(off[0], Standing.STARTING)
                front.environment.process(_starts(front, off[0], rule.start))
        elif more < 0 and (up := those(Standing.UP)):
            front.drain(up[-1])


def _starts(front: Front, member: Member, seconds: float) -> Generator[simpy.Event, None, None]:
    roster, began = front.roster, front.environment.now
    yield front.environment.timeout(seconds)
    if roster[member] is Standing.STARTING and roster.since(member) == began:  # it did not die
        front.up(member)
