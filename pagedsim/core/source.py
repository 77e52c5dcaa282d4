"""What an executor is fed with, whether it simulates or serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from pagedsim.core.request import Request

Job = tuple[Request, int]
"""A request, and the length that its output will have."""

Mode = Literal["open", "closed", "burst"]


class Turns(Protocol):
    """Which requests of a workload go on from others; each is known by its id, a number."""

    def after(self, row: int) -> Sequence[int]:
        """Those that must have left before it is sent."""

    def followers(self, row: int) -> Sequence[int]:
        """Those that wait for it."""

    def pause(self, row: int) -> float:
        """Seconds between the last answer that it waits for and its arrival."""


class Source(Protocol):
    """A workload, as far as an executor needs to know."""

    @property
    def mode(self) -> Mode:
        """At their times, each user after an answer, or all at once."""

    @property
    def users(self) -> int | None:
        """How many ask, where they wait for answers."""

    @property
    def think_time(self) -> float:
        """Seconds between an answer and the next question."""

    @property
    def turns(self) -> Turns | None:
        """Which requests wait for answers to others; None where none does.

        These arrive no sooner than they say, and all of them no sooner than those before them.
        """

    def requests(self) -> Iterator[Job]:
        """The requests in order of arrival, made one by one."""


def arrives(request: Request, now: float) -> None:
    """The request arrives now, and so much later falls due as it was to arrive before."""
    if request.deadline is not None:
        request.deadline += now - (request.arrival or 0.0)
    request.arrival = now
