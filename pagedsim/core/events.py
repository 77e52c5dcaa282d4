"""Events that a policy observes: arrivals, admissions, preemptions and departures.

Their order is the same in the simulator and in the engine. `Admitted` and `Preempted` come while a
step is planned, in the order of its decisions; `Left` comes when the step has ended, and `Arrived`
with the next plan, before its decisions, since an engine cannot look at new requests while a step
runs. So a request that arrives during a step is observed after the departures at the end of it,
with an earlier `now`: that of `Arrived` may go back, that of all other events never does. Arrivals
are in order of time among themselves, and the events of one request in that of its life.
"""

from __future__ import annotations

from typing import NamedTuple

from pagedsim.core.request import Request


class Arrived(NamedTuple):
    """A request joined the waiting queue, or came with its keys and values and need not wait."""

    request: Request
    now: float


class Admitted(NamedTuple):
    """A request joined the batch: for the first time, or again after it was preempted."""

    request: Request
    now: float


class Preempted(NamedTuple):
    """A request lost its memory and its place in the batch."""

    request: Request
    now: float


class Left(NamedTuple):
    """A request finished, was aborted, was rejected, or goes on elsewhere: `request.state` says
    which."""

    request: Request
    now: float


Event = Arrived | Admitted | Preempted | Left
