"""Which replicas of a fleet are there, and since when: some die, some start and stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from math import inf

from pagedsim.fleet.member import Member
from pagedsim.sim.environment import Environment

Span = tuple[float, float]
"""From when until when, in seconds of the run."""


class Standing(Enum):
    """What a replica may be."""

    UP = "up"  # it takes requests
    STARTING = "starting"  # it will
    DRAINING = "draining"  # it serves those that it has, and takes no more
    DOWN = "down"  # it died, and will come back
    OFF = "off"  # nobody needs it


THERE = (Standing.UP, Standing.STARTING, Standing.DRAINING)
"""Such a replica is paid for."""


class Roster:
    """The standing of each member; all are up at first."""

    def __init__(
        self, environment: Environment, members: Sequence[Member], changed: Callable[[], None]
    ) -> None:
        """`changed` is called when others take requests than before."""
        self.members = members
        self._changed = changed
        self._environment = environment
        self._standing = [Standing.UP for _ in members]
        self._since = [0.0 for _ in members]
        self._past: list[list[tuple[Standing, float, float]]] = [[] for _ in members]

    def __getitem__(self, member: Member) -> Standing:
        return self._standing[member.index]

    def since(self, member: Member) -> float:
        """Since when it is what it is."""
        return self._since[member.index]

    def those(self, *standings: Standing) -> list[Member]:
        """The members of these standings, in the order of their numbers."""
        return [one for one in self.members if self._standing[one.index] in standings]

    def put(self, member: Member, standing: Standing) -> None:
        """It is that from now on."""
        now, index, before = self._environment.now, member.index, self[member]
        self._past[index].append((before, self._since[index], now))
        self._standing[index], self._since[index] = standing, now
        if Standing.UP in (before, standing):
            self._changed()

    def there(self) -> list[list[Span]]:
        """When each of them was paid for; what goes on ends at infinity."""
        return [self._spans(one, *THERE) for one in self.members]

    def down(self) -> list[list[Span]]:
        """When each of them was dead."""
        return [self._spans(one, Standing.DOWN) for one in self.members]

    def _spans(self, member: Member, *standings: Standing) -> list[Span]:
        spans: list[Span] = []
        now = (self[member], self._since[member.index], inf)
        for standing, begin, end in (*self._past[member.index], now):
            if standing not in standings or begin == end:
                continue
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]
            spans.append((begin, end))
        return spans
