"""A running request goes on at another scheduler, with its keys and values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from pagedsim.core import (
    ConfigError,
    Request,
    RequestError,
    ReservedMax,
    State,
)
from tests.core.drive import Server
from tests.core.travel import OneWay, Travel, Trip, trips

EXAMPLES = settings().max_examples
MORE = settings(max_examples=4 * EXAMPLES)


def decoding(server: Server, name: str = "r", prompt: int = 6, output: int = 9) -> Request:
    """A request that has sampled its first token."""
    request = server.add(name, prompt, output)
    while not request.generated:
        server.step()
    return request


def move(request: Request, here: Server, there: Server) -> None:
    output_len = here.scheduler.migration.detach(request, here.now)
    assert there.scheduler.migration.reserve(request, there.now)
    assert there.scheduler.migration.attach(request, there.now, output_len)
    here.scheduler.migration.release_reservation(request)
    here.scheduler.check()
    there.scheduler.check()


# -- what stays ----------------------------------------------------------------------------------


def test_blocks_of_a_detached_request_stay_until_released() -> None:
    here = Server()
    request = decoding(here)
    here.scheduler.migration.detach(request, here.now)
    assert (here.free, request.tables, request.state) == (98, [], State.AWAY)
    assert here.queues == {}
    assert list(here.scheduler.migration.held) == [request]
    here.step()
    here.scheduler.migration.release_reservation(request)
    assert here.free == 100
    with pytest.raises(RequestError, match="'r': no memory is held for it here"):
        here.scheduler.migration.release_reservation(request)


def test_blocks_kept_for_a_request_that_ran_elsewhere_meanwhile_are_not_its_own() -> None:
    here, there = Server(), Server()
    request = decoding(here)
    output_len = here.scheduler.migration.detach(request, 1.0)
    assert there.scheduler.migration.reserve(request, 1.0)
    assert there.scheduler.migration.attach(request, 1.0, output_len)
    there.step()
    there.scheduler.migration.detach(request, 2.0)
    with pytest.raises(RequestError, match="6 tokens are kept here, and it has computed 7 by now"):
        here.scheduler.migration.attach(request, 2.0, output_len)
    with pytest.raises(RequestError, match="its memory is kept here: attach or release it"):
        here.scheduler.migration.reserve(request, 2.0)


# -- what comes ----------------------------------------------------------------------------------


def test_a_reservation_is_deferred_or_refused_for_good() -> None:
    here, there = Server(), Server(blocks=4)
    request = decoding(here, prompt=11)
    other = decoding(there, "other", prompt=8, output=3)
    assert not there.scheduler.migration.reserve(request, 1.0)
    assert list(there.scheduler.migration.deferred) == [request]
    there.drain()
    assert not other.alive
    assert there.scheduler.migration.reserve(request, 3.0)
    assert not there.scheduler.migration.deferred
    assert there.free == 1
    longer = decoding(here, "longer", prompt=15)
    with pytest.raises(RequestError, match="'longer' can never be served here: prompt of 15 tok"):
        Server(blocks=3).scheduler.migration.reserve(longer, 4.0)
    with pytest.raises(RequestError, match="it has 16 tokens, and would end here at 16"):
        Server(blocks=4).scheduler.migration.reserve(longer, 4.0)
    assert there.scheduler.infeasible(longer) == "it has 16 tokens, and would end here at 16"


# -- order ---------------------------------------------------------------------------------------


def test_deferred_reservations_are_granted_by_rank() -> None:
    here, there = Server(), Server(blocks=4, policy="priority")
    requests = [here.add(name, 9, 9, priority=level) for name, level in (("low", 5), ("high", 1))]
    here.steps(2)
    decoding(there, "other", prompt=8, output=4)
    low, high = requests
    assert not there.scheduler.migration.reserve(low, there.now)
    assert not there.scheduler.migration.reserve(high, there.now)
    there.drain()
    assert not there.scheduler.migration.reserve(low, there.now)
    assert there.scheduler.migration.reserve(high, there.now)
    urgent = there.add("urgent", 3, 1, priority=0)
    there.step()
    assert not urgent.alive  # it ranks before the deferred reservation


# -- what becomes of it --------------------------------------------------------------------------


def test_a_migrating_request_can_be_aborted_at_either_end() -> None:
    here, there = Server(), Server()
    request = decoding(here)
    assert there.scheduler.migration.reserve(request, 1.0)
    with pytest.raises(RequestError, match="it is running at another scheduler; abort it there"):
        there.scheduler.abort("r", 1.0)
    here.scheduler.migration.detach(request, 1.0)
    there.scheduler.abort("r", 2.0)
    assert (request.state, request.finish_reason) == (State.ABORTED, "abort")
    assert request.finished_at == 2.0
    assert (here.free, there.free) == (98, 100)
    here.scheduler.migration.release_reservation(request)
    assert here.free == 100
    kept = decoding(here, "kept")
    here.scheduler.migration.detach(kept, 3.0)
    here.scheduler.abort("kept", 4.0)
    assert here.free == 100
    with pytest.raises(RequestError, match="cannot abort request 'kept': not known, or ended"):
        here.scheduler.abort("kept", 4.0)


# -- what is refused -----------------------------------------------------------------------------


def test_requests_that_cannot_be_detached_or_attached() -> None:
    here, there = Server(), Server()
    group = here.add("group", 6, 9, n=2)
    here.step()
    with pytest.raises(RequestError, match="'group' cannot migrate: it is a group of sequences"):
        here.scheduler.migration.detach(group, 1.0)
    with pytest.raises(RequestError, match="'group' cannot migrate: it is a group of sequences"):
        there.scheduler.migration.reserve(group, 1.0)
    with pytest.raises(RequestError, match="'new' is new: it has no keys and values"):
        there.scheduler.migration.reserve(Request("new", 6), 1.0)
    waits = here.add("waits", 6, 9)
    with pytest.raises(RequestError, match="'waits' cannot migrate: it does not decode yet"):
        here.scheduler.migration.detach(waits, 1.0)
    with pytest.raises(RequestError, match="'waits': not known here, or ended already"):
        there.scheduler.migration.detach(waits, 1.0)
    with pytest.raises(RequestError, match="tokens=101: must be a whole number from 1 to max_mod"):
        Server(blocks=25).scheduler.migration.reserve(waits, 1.0, tokens=101)
    assert there.scheduler.migration.reserve(waits, 1.0, tokens=7)
    with pytest.raises(RequestError, match="'waits' cannot be attached: it was not detached"):
        there.scheduler.migration.attach(waits, 1.0)
    with pytest.raises(RequestError, match="'waits': memory is held for it here: release its"):
        there.add("waits", 6)
    here.scheduler.withdraw(waits, 1.0)
    with pytest.raises(RequestError, match="'waits' cannot be attached: it has no keys and values"):
        there.scheduler.migration.attach(waits, 1.0)
    there.scheduler.migration.release_reservation(waits)
    request = decoding(there, output=3)
    there.scheduler.migration.detach(request, 1.0)
    assert here.scheduler.migration.reserve(request, 1.0, tokens=3)
    with pytest.raises(RequestError, match="has computed 6 tokens, and memory is reserved for 4"):
        here.scheduler.migration.attach(request, 1.0, 3)
    assert here.scheduler.migration.reserve(request, 1.0)
    with pytest.raises(RequestError, match="'r': output_len=1: at least 2"):
        here.scheduler.migration.attach(request, 1.0, 1)


def test_servers_without_migration() -> None:
    request = decoding(Server())
    static = Server(batching="static")
    assert static.scheduler.migration.detach_error is None
    with pytest.raises(ConfigError, match="Static cannot accept a migrated request"):
        static.scheduler.migration.reserve(request, 0.0)
    reserved = Server(memory=ReservedMax(16, max_model_len=16))
    message = "ReservedMax holds nothing for requests that are elsewhere: choose memory=paged"
    with pytest.raises(ConfigError, match=message):
        reserved.scheduler.migration.detach(decoding(reserved), 0.0)
    with pytest.raises(ConfigError, match=message):
        reserved.scheduler.migration.reserve(request, 0.0)


# -- all at random -------------------------------------------------------------------------------


@given(trip=trips())
def test_a_migrated_request_ends_once_and_whole(trip: Trip) -> None:
    Travel(trip).go()


@given(trip=trips(ahead=True))
def test_a_migrated_request_ends_once_with_async_scheduling(trip: Trip) -> None:
    Travel(trip).go()


@given(trip=trips(untold=True))
def test_fast_forward_changes_nothing(trip: Trip) -> None:
    compare_gliding(trip)


def compare_gliding(trip: Trip) -> None:
    assert Travel(trip, glides=True).go().trace == Travel(trip).go().trace


@given(trip=trips())
def test_a_deferred_reservation_is_made_in_the_end(trip: Trip) -> None:
    """Though newcomers wait there, and others are swapped out."""
    OneWay(trip).go()


@pytest.mark.slow
@MORE
@given(trip=trips(), ahead=trips(ahead=True), untold=trips(untold=True))
def test_many_more(trip: Trip, ahead: Trip, untold: Trip) -> None:
    Travel(trip).go()
    Travel(ahead).go()
    OneWay(ahead).go()
    compare_gliding(untold)
