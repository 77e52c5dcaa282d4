"""Replicas that live in times of their own, and who of them has to be brought to the present."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from pagedsim.fleet.member import Member


class Apart:
    """Brings those to the present where anything has been due, before a router sees them.

    Where it is shown nothing, or only how things were, nobody has to be, and what a replica does
    is worked out in long pieces.
    """

    def __init__(self, members: Sequence[Member], shown: bool) -> None:
        self._members = members
        self._shown = shown
        self._due: list[tuple[float, int]] = []  # of everybody who has anything to do
        self._listed = [False] * len(members)

    def settle(self, now: float) -> None:
        """A router is about to look."""
        due = self._due
        while due and due[0][0] < now:
            index = heappop(due)[1]
            member = self._members[index]
            member.settle()
            self._list(member)

    def came(self, member: Member) -> None:
        """A request has arrived there."""
        if self._shown:
            member.settle()
            if not self._listed[member.index]:
                self._list(member)

    def _list(self, member: Member) -> None:
        next_time = member.due
        if there := next_time < inf:
            heappush(self._due, (next_time, member.index))
        self._listed[member.index] = there
