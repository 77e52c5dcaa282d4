"""The scheduler's invariants, checked by walking over everything. For tests, not for every step."""

from __future__ import annotations

from collections.abc import Collection

from pagedsim.core.batch_state import BatchState
from pagedsim.core.errors import IntegrityError
from pagedsim.core.request import Request, RequestId, State


def check_state(state: BatchState) -> None:
    """Raise IntegrityError if a queue, the clock or the memory contradicts another."""
    _check_queues(state)
    _check_batch(state)
    _check_reservations(state)
    for request in state.waiting:
        if request._tables or request._cpu_tables or request.computed:
            raise IntegrityError(f"{request!r} waits, and holds blocks")
    for request in (*state.running, *state.holding):
        _check_tables(state, request)
    state.clock.check([request for request in state.running if request.decoding])
    state.memory.check(state.holders)
    if state.connector is not None:
        state.connector.check()


def _check_tables(state: BatchState, request: Request) -> None:
    """A running request has a table for each sequence, long enough for what is in memory."""
    sequences = request.num_seqs if request.generated else len(request._tables)
    if not request._tables or len(request._tables) != sequences:
        raise IntegrityError(
            f"{request!r} has {len(request._tables)} tables for {request.num_seqs}"
        )
    blocks = state.memory.blocks_for(request.computed)
    if any(len(table) < blocks for table in request._tables):
        lengths = [len(table) for table in request._tables]
        raise IntegrityError(f"{request!r} has {request.computed} tokens in {lengths} blocks")


def _check_queues(state: BatchState) -> None:
    """Each live request is in exactly one queue, the one that its state names."""
    queue_of: dict[State, Collection[Request]] = {
        State.WAITING: tuple(state.waiting),
        State.HOLDING: tuple(state.holding),
        State.RUNNING: state.running,
        State.SWAPPED: state.swapped,
    }
    seen: dict[RequestId, State] = {}
    for kind, requests in queue_of.items():
        for request in requests:
            if request.id in seen:
                other = seen[request.id].value
                raise IntegrityError(f"{request!r} is in two queues: {other} and {kind.value}")
            if request.state is not kind:
                raise IntegrityError(f"{request!r} stands among the {kind.value}")
            seen[request.id] = kind
    if lost := state.requests.keys() ^ seen.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} are known or queued, but not both")
    if lost := state.requests.keys() ^ state._ends.keys():
        raise IntegrityError(f"requests {sorted(lost, key=str)} have an end or live, but not both")


def _check_reservations(state: BatchState) -> None:
    """A placeholder has blocks for the computed tokens of a request that is not served here."""
    reservations = state.reservations
    for placeholder in reservations.placeholders.values():
        request = placeholder.request
        if request.id in state.requests:
            raise IntegrityError(f"{request!r} is served here, and memory is held for it")
        blocks = sum(map(len, placeholder._tables))
        if blocks < state.memory.blocks_for(placeholder.computed):
            reserved = f"{placeholder.computed} tokens in {blocks} blocks"
            raise IntegrityError(f"{request!r} has {reserved} that are held for it")
    if (
        stray := (reservations.awaiting_memory.keys() | reservations.awaiting_seat.keys())
        - reservations.placeholders.keys()
    ):
        raise IntegrityError(f"{sorted(stray, key=str)} await what is not reserved for them")


def _check_batch(state: BatchState) -> None:
    """The batch's subset and its sum are true."""
    others = [request for request in state.running if not request.decoding]
    if set(others) != state.prefilling.keys() | state.leaving.keys():
        listed = [*state.prefilling, *state.leaving]
        raise IntegrityError(f"{others} do not decode, listed as such are {listed}")
    seats = sum(request.num_seqs for request in state.running)
    if seats != state.seats:
        raise IntegrityError(f"{seats} seats are taken, {state.seats} are counted")
    if seats > state.max_seqs:
        raise IntegrityError(f"{seats} seats are taken, max_seqs is {state.max_seqs}")
