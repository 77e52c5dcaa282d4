"""A running request goes on at another scheduler, with its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings

from pagedsim.core import (
    Request,
    RequestError,
    ReservedMax,
    State,
)
from tests.core.drive import Server
from tests.core.refusals import refusal
from tests.core.travel import OneWay, Travel, Trip, trips

EXAMPLES = settings().max_examples
MORE = settings(max_examples=4 * EXAMPLES)


def decoding(server: Server, name: str = "r", prompt: int = 6, output: int = 9) -> Request:
    """A request that has sampled its first token."""
    request = server.add(name, prompt, output)
    while not request.generated:
        server.step()
    return request


def refused(call: Callable[[], object], named: str) -> None:
    refusal(call, named, RequestError)


def test_a_reservation_is_deferred_or_refused_for_good() -> None:
    source, target = Server(), Server(blocks=4)
    request = decoding(source, prompt=11)
    decoding(target, "other", prompt=8, output=3)
    assert not target.scheduler.migration.reserve(request, 1.0)
    assert list(target.scheduler.migration.deferred) == [request]
    target.drain()
    assert target.scheduler.migration.reserve(request, 3.0)
    assert not target.scheduler.migration.deferred
    assert target.free == 1
    longer = decoding(source, "longer", prompt=15)
    few, more = (Server(blocks=blocks).scheduler.migration for blocks in (3, 4))
    refused(lambda: few.reserve(longer, 4.0), "'longer' can never be served here | prompt of 15")
    refused(lambda: more.reserve(longer, 4.0), "it has 16 tokens | end here at 16")
    assert target.scheduler.infeasible(longer) == "it has 16 tokens, and would end here at 16"


# -- order ---------------------------------------------------------------------------------------


def test_deferred_reservations_are_granted_by_rank() -> None:
    source, target = Server(), Server(blocks=4, policy="priority")
    requests = [source.add(name, 9, 9, priority=level) for name, level in (("low", 5), ("high", 1))]
    source.steps(2)
    decoding(target, "other", prompt=8, output=4)
    low, high = requests
    assert not target.scheduler.migration.reserve(low, target.now)
    assert not target.scheduler.migration.reserve(high, target.now)
    target.drain()
    assert not target.scheduler.migration.reserve(low, target.now)
    assert target.scheduler.migration.reserve(high, target.now)
    urgent = target.add("urgent", 3, 1, priority=0)
    target.step()
    assert not urgent.alive  # it ranks before the deferred reservation


# -- what becomes of it --------------------------------------------------------------------------


def test_a_detached_request_can_be_aborted_at_either_end() -> None:
    source, target = Server(), Server()
    leave, join = source.scheduler.migration, target.scheduler.migration
    request, kept = decoding(source), decoding(source, "kept")
    assert join.reserve(request, 1.0)
    leave.detach(request, 1.0)
    target.scheduler.abort("r", 2.0)
    assert (request.state, request.finish_reason) == (State.ABORTED, "abort")
    assert (request.finished_at, target.free) == (2.0, 100)
    leave.release_reservation(request)
    leave.detach(kept, 3.0)
    source.scheduler.abort("kept", 4.0)
    assert source.free == 100
    refused(lambda: source.scheduler.abort("kept", 4.0), "'kept' | not known, or ended already")


# -- what is refused -----------------------------------------------------------------------------


def test_requests_that_cannot_be_detached_or_attached() -> None:
    source, target = Server(), Server()
    leave, join = source.scheduler.migration, target.scheduler.migration
    group = source.add("group", 6, 9, n=2)
    source.step()
    for call in (leave.detach, join.reserve):
        refused(partial(call, group, 1.0), "'group' cannot migrate | a group of sequences")
    refused(lambda: join.reserve(Request("new", 6), 1.0), "'new' is new | no keys and values")
    waits = source.add("waits", 6, 9)
    refused(lambda: leave.detach(waits, 1.0), "'waits' cannot migrate | does not decode yet")
    refused(lambda: join.detach(waits, 1.0), "'waits': not known here")
    few = Server(blocks=25).scheduler.migration
    refused(lambda: few.reserve(waits, 1.0, tokens=101), "tokens=101 | from 1 to max_mod")
    refused(lambda: leave.release_reservation(waits), "'waits': no memory is held for it here")
    assert join.reserve(waits, 1.0, tokens=7)
    refused(lambda: join.attach(waits, 1.0), "'waits' cannot be attached | not detached")
    refused(lambda: target.add("waits", 6), "'waits': memory is held for it here")
    refused(lambda: target.scheduler.abort("waits", 1.0), "at another scheduler; abort it there")
    source.scheduler.withdraw(waits, 1.0)
    refused(lambda: join.attach(waits, 1.0), "'waits' cannot be attached | no keys and values")
    join.release_reservation(waits)
    request = decoding(target, output=3)
    join.detach(request, 1.0)
    assert leave.reserve(request, 1.0, tokens=3)
    refused(lambda: leave.attach(request, 1.0, 3), "has computed 6 tokens | reserved for 4")
    assert leave.reserve(request, 1.0)
    refused(lambda: leave.attach(request, 1.0, 1), "'r' | output_len=1 | at least 2")


def test_blocks_kept_for_a_request_that_ran_elsewhere_meanwhile_are_not_its_own() -> None:
    source, target = Server(), Server()
    kept, other = source.scheduler.migration, target.scheduler.migration
    request = decoding(source)
    output_len = kept.detach(request, 1.0)
    assert other.reserve(request, 1.0) and other.attach(request, 1.0, output_len)
    target.step()
    other.detach(request, 2.0)
    refused(lambda: kept.attach(request, 2.0, output_len), "6 tokens are kept | computed 7 by now")
    refused(lambda: kept.reserve(request, 2.0), "memory is kept here | attach or release it")


def test_servers_without_migration() -> None:
    request = decoding(Server())
    static = Server(batching="static").scheduler.migration
    assert static.detach_error is None
    refusal(lambda: static.reserve(request, 0.0), "Static cannot accept a migrated request")
    reserved = Server(memory=ReservedMax(16, max_model_len=16))
    migration, own = reserved.scheduler.migration, decoding(reserved)
    for call in (partial(migration.detach, own, 0.0), partial(migration.reserve, request, 0.0)):
        refusal(call, "ReservedMax holds nothing | elsewhere | memory=paged")


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
