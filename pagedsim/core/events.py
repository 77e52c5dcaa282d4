"""What a policy may be told of: who comes, joins the batch, loses its place in it, and leaves."""

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
