"""The scheduler's invariants, checked by walking over everything. For tests, not for every step."""

from __future__ import annotations

from collections.abc import Collection

from pagedsim.core.errors import IntegrityError
from pagedsim.core.places import BatchState
from pagedsim.core.request import Request, RequestId, State


def check_places(places: BatchState) -> None:
    """Raise IntegrityError if a queue, the clock or the memory contradicts another."""
    _check_queues(places)
    _check_batch(places)
    _check_holdings(places)
    for request in places.waiting:
        if request.tables or request.cpu_tables or request.computed:
            raise IntegrityError(f"{request!r} waits, and holds blocks")
    for request in places.running:
        _check_tables(places, request)
    places.clock.check([request for request in places.running if request.decoding])
    places.memory.check(places.holders)


def _check_tables(places: BatchState, request: Request) -> None:
    """A running request has a table for each sequence, long enough for what is in memory."""
    sequences = request.width if request.generated else len(request.tables)
    if not request.tables or len(request.tables) != sequences:
        raise IntegrityError(f"{request!r} has {len(request.tables)} tables for {request.width}")
    blocks = places.memory.blocks_for(request.computed)
    if any(len(table) < blocks for table in request.tables):
        lengths = [len(table) for table in request.tables]
        raise IntegrityError(f"{request!r} has {request.computed} tokens in {lengths} blocks")


def _check_queues(places: BatchState) -> None:
    """Each living request is in exactly one queue, the one that its state names."""
    by_state: dict[State, Collection[Request]] = {
        State.WAITING: tuple(places.waiting),
        State.RUNNING: (*places.running, *places.leaving),
        State.SWAPPED: places.swapped,
    }
    seen: dict[RequestId, State] = {}
    for state, requests in by_state.items():
        for request in requests:
            if request.id in seen:
                there = seen[request.id].value
                raise IntegrityError(f"{request!r} is in two queues: {there} and {state.value}")
            if request.state is not state:
                raise IntegrityError(f"{request!r} stands among the {state.value}")
            seen[request.id] = state
    if lost := places.requests.keys() ^ seen.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} are known or queued, but not both")
    if lost := places.requests.keys() ^ places._ends.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} have an end or live, but not both")


def _check_holdings(places: BatchState) -> None:
    """Who stands in for a request has what its memory was, or is to be, and the request is away."""
    holdings = places.holdings
    for placeholder in holdings.placeholders.values():
        request = placeholder.of
        if request.id in places.requests:
            raise IntegrityError(f"{request!r} is served here, and memory is held for it")
        blocks = sum(map(len, placeholder.tables))
        if blocks < places.memory.blocks_for(placeholder.computed):
            there = f"{placeholder.computed} tokens in {blocks} blocks"
            raise IntegrityError(f"{request!r} has {there} that are held for it")
    if stray := (holdings.asking.keys() | holdings.standing.keys()) - holdings.placeholders.keys():
        raise IntegrityError(f"{sorted(stray, key=str)} ask for what is not held for them")


def _check_batch(places: BatchState) -> None:
    """The batch's subset and its sum are true."""
    prefilling = [request for request in places.running if not request.decoding]
    if set(prefilling) != places.prefilling.keys():
        listed = list(places.prefilling)
        raise IntegrityError(f"{prefilling} do not decode yet, listed as such are {listed}")
    seats = sum(request.width for request in places.running)
    if seats != places.seats:
        raise IntegrityError(f"{seats} seats are taken, {places.seats} are counted")
    if seats > places.max_seqs:
        raise IntegrityError(f"{seats} seats are taken, max_seqs is {places.max_seqs}")
