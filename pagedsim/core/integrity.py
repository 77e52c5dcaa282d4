"""The scheduler's invariants, checked by walking over everything. For tests, not for every step."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pagedsim.core.errors import IntegrityError
from pagedsim.core.request import Request, RequestId, State

if TYPE_CHECKING:
    from pagedsim.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise IntegrityError if a queue, the clock or the memory contradicts another."""
    _check_places(scheduler)
    _check_batch(scheduler)
    for request in scheduler.waiting:
        if request.tables or request.cpu_tables or request.computed:
            raise IntegrityError(f"{request!r} waits, and holds blocks")
    for request in scheduler.running:
        _check_tables(scheduler, request)
    scheduler.clock.check([request for request in scheduler.running if request.decoding])
    scheduler.memory.check([*scheduler.running, *scheduler.leaving, *scheduler.swapped])


def _check_tables(scheduler: Scheduler, request: Request) -> None:
    """A running request has a table for each sequence, long enough for what is in memory."""
    sequences = request.width if request.generated else len(request.tables)
    if not request.tables or len(request.tables) != sequences:
        raise IntegrityError(f"{request!r} has {len(request.tables)} tables for {request.width}")
    blocks = scheduler.memory.blocks_for(request.computed)
    if any(len(table) < blocks for table in request.tables):
        lengths = [len(table) for table in request.tables]
        raise IntegrityError(f"{request!r} has {request.computed} tokens in {lengths} blocks")


def _check_places(scheduler: Scheduler) -> None:
    """Each living request is in exactly one queue, the one that its state names."""
    places: dict[State, Collection[Request]] = {
        State.WAITING: tuple(scheduler.waiting),
        State.RUNNING: (*scheduler.running, *scheduler.leaving),
        State.SWAPPED: scheduler.swapped,
    }
    seen: dict[RequestId, State] = {}
    for state, requests in places.items():
        for request in requests:
            if request.id in seen:
                there = seen[request.id].value
                raise IntegrityError(f"{request!r} is in two queues: {there} and {state.value}")
            if request.state is not state:
                raise IntegrityError(f"{request!r} stands among the {state.value}")
            seen[request.id] = state
    if lost := scheduler.requests.keys() ^ seen.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} are known or queued, but not both")
    if lost := scheduler.requests.keys() ^ scheduler._ends.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} have an end or live, but not both")


def _check_batch(scheduler: Scheduler) -> None:
    """The batch's subset and its sum are true."""
    prefilling = [request for request in scheduler.running if not request.decoding]
    if set(prefilling) != scheduler.prefilling.keys():
        listed = list(scheduler.prefilling)
        raise IntegrityError(f"{prefilling} do not decode yet, listed as such are {listed}")
    seats = sum(request.width for request in scheduler.running)
    if seats != scheduler.seats:
        raise IntegrityError(f"{seats} seats are taken, {scheduler.seats} are counted")
    if seats > scheduler.max_seqs:
        raise IntegrityError(f"{seats} seats are taken, max_seqs is {scheduler.max_seqs}")
