"""A replica dies while requests go from one to another: state by state, with times by hand.

Steps take a second. A prompt of 4 tokens is computed at replica 0 in the first one; a token has a
byte, and 8 bytes a second go from replica to replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pagedsim.core import Request, Scheduler
from pagedsim.core.errors import AnswerError
from pagedsim.fleet.dispatcher import Dispatcher
from pagedsim.fleet.failures import ListedOutages, Outage
from pagedsim.fleet.link import Network
from policies.routing.router import Event, Move, Replica, Replicas, Router
from policies.routing.simple import Central, RoundRobin
from tests.fleet.fleets import NETWORK, Watching, server, whole
from tests.sim.harness import Constant, Jobs

APART = ("prefill", "decode", "decode")


def draining(at: float, replica: int) -> Callable[[Dispatcher], None]:
    """What drains a replica at that time."""

    def begins(dispatcher: Dispatcher) -> None:
        event = dispatcher.environment.at(at)
        event.callbacks.append(lambda _: dispatcher.drain(dispatcher.replicas[replica]))

    return begins


decoder = partial(server, max_seqs=4, batching="unified")


def killed(
    deaths: dict[int, list[Outage]],
    rows: list[tuple[float, int, int]],
    schedulers: list[Scheduler] | None = None,
    roles: tuple[str, ...] = APART,
    router: Router | None = None,
    **more: Any,
) -> tuple[Dispatcher, list[dict[str, Any]]]:
    schedulers = schedulers or [decoder() for _ in roles]
    dispatcher, recorder = whole(
        schedulers,
        Jobs(rows),
        router or RoundRobin(),
        Constant(),
        roles,
        token_bytes=1.0,
        failures=ListedOutages(deaths),
        **{"network": NETWORK, **more},
    )
    for one in schedulers:
        one.check()
        assert not one.migration.held and one.memory.used == 0
    assert all(not replica.incoming and not replica.notifier for replica in dispatcher.replicas)
    rows_out: list[dict[str, Any]] = recorder.requests_table().to_pylist()
    assert [row["state"] for row in rows_out] == ["finished"] * len(rows)
    assert [row["output_tokens"] for row in rows_out] == [output for _, _, output in rows]
    return dispatcher, rows_out


def test_what_is_sent_to_a_replica_that_dies_is_sent_to_another() -> None:
    """On its way from 1 to 1.5, it is sent to replica 2 from 1.25 on, and decodes twice there."""
    router = Watching()
    dispatcher, [row] = killed({1: [(1.25, 9.0)]}, [(0.0, 4, 3)], router=router)
    assert (row["replica"], row["first_token"], row["finished"]) == (2, 1.0, 3.75)
    assert dispatcher.retries[0] == 0
    assert router.seen[1:4] == [
        (1.0, "Placed", 0, 1),
        (1.25, "Left", 0, 1),
        (1.25, "Placed", 0, 2),
    ]


def test_or_it_is_computed_again_with_the_tokens_that_it_has() -> None:
    """From 1.25 to 2.25 it computes its prompt and the first token again, which gives the second;
    half a second and a byte later the last."""
    dispatcher, [row] = killed({1: [(1.25, 9.0)]}, [(0.0, 4, 3)], on_receiver_death="recompute")
    assert (row["replica"], row["first_token"], row["finished"]) == (2, 1.0, 2.25 + 5 / 8 + 1.0)
    assert dispatcher.retries[0] == 1


@pytest.mark.parametrize("way", ["resend", "recompute"])
def test_what_its_source_took_along_begins_anew(way: str) -> None:
    """The source is back at 2, and computes the prompt from then on."""
    dispatcher, [row] = killed({0: [(1.25, 0.75)]}, [(0.0, 4, 3)], on_receiver_death=way)
    assert (row["first_token"], row["finished"]) == (3.0, 5.5)
    assert dispatcher.retries[0] == 1


def test_both_ends_die() -> None:
    dispatcher, [row] = killed({0: [(1.25, 0.75)], 1: [(1.25, 9.0)]}, [(0.0, 4, 3)])
    assert (row["replica"], row["first_token"], row["finished"]) == (2, 3.0, 5.5)
    assert dispatcher.retries[0] == 1


def test_a_source_that_dies_when_all_has_arrived_takes_nothing_along() -> None:
    dispatcher, [row] = killed({0: [(1.75, 9.0)]}, [(0.0, 4, 3)])
    assert (row["first_token"], row["finished"]) == (1.0, 3.5)
    assert dispatcher.retries[0] == 0


def test_a_request_waiting_for_memory_at_a_failed_replica_goes_elsewhere() -> None:
    """Request 0 has all memory of replica 1; request 1 waits for it from 1 on."""
    schedulers = [decoder(), decoder(blocks=4), decoder()]
    rows = [(0.0, 8, 6), (0.0, 8, 3)]
    router = First()
    dispatcher, [one, other] = killed({1: [(3.25, 20.0)]}, rows, schedulers, router=router)
    # From the beginning: a step of prompt, a second on the way, decodes.
    assert (one["first_token"], dispatcher.retries[0]) == (4.25, 1)
    assert (other["finished"], dispatcher.retries[1]) == (3.25 + 1.0 + 2.0, 0)
    assert {one["replica"], other["replica"]} == {2}


class First(Router):
    """The first replica of those that may take it."""

    migrates_every: float | None = None

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[0]


def test_what_waits_for_a_seat_at_a_replica_that_dies_is_lost() -> None:
    """Its keys and values are there, and nowhere else."""
    schedulers = [decoder(), decoder(max_seqs=1), decoder()]
    rows = [(0.0, 4, 9), (0.0, 4, 3)]
    dispatcher, [_, other] = killed({1: [(3.25, 20.0)]}, rows, schedulers, router=First())
    assert dispatcher.retries == {0: 1, 1: 1}
    assert other["first_token"] == 4.25


def test_what_waits_for_a_replica_that_decodes_waits_until_one_is_back() -> None:
    roles = ("prefill", "decode")
    dispatcher, [row] = killed({1: [(0.5, 3.0)]}, [(0.0, 4, 3)], roles=roles)
    assert (row["first_token"], row["finished"], dispatcher.retries[0]) == (1.0, 3.5 + 0.5 + 2.0, 0)


def test_what_waits_for_a_replica_that_decodes_is_lost_with_its_source() -> None:
    roles = ("prefill", "decode")
    deaths = {0: [(2.0, 1.0)], 1: [(0.5, 5.0)]}
    dispatcher, [row] = killed(deaths, [(0.0, 4, 3)], roles=roles)
    assert (row["first_token"], dispatcher.retries[0]) == (4.0, 1)
    assert row["finished"] == 5.5 + 0.5 + 2.0


class Moves(First):
    """Everything starts at replica 0, and moves to replica 1 at 2.25."""

    migrates_every = 2.25

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch if now < 3]


BOTH = ("both", "both")


@pytest.mark.parametrize("at", [2.5, 3.05])
def test_a_target_that_dies_while_a_request_moves_leaves_it_where_it_is(at: float) -> None:
    """Copies go from 2.25 on, and the last one from 3 to 3.125, for which it has parted."""
    dispatcher, [row] = killed({1: [(at, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=Moves())
    assert (row["replica"], dispatcher.retries[0]) == (0, 0)
    assert dispatcher.migration is not None and not dispatcher.migration.migrations
    assert row["finished"] == (8.0 if at < 3 else at + 5.0)


@pytest.mark.parametrize("at", [2.5, 3.05])
def test_a_source_that_dies_while_a_request_moves_takes_it_along(at: float) -> None:
    dispatcher, [row] = killed({0: [(at, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=Moves())
    assert (row["replica"], dispatcher.retries[0]) == (1, 1)
    assert row["finished"] == at + 8.0


def test_a_source_that_dies_after_a_move_takes_nothing_along() -> None:
    dispatcher, [row] = killed({0: [(3.5, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=Moves())
    assert (row["replica"], dispatcher.retries[0], row["finished"]) == (1, 0, 8.125)


def test_a_move_that_was_lost_leaves_no_journey() -> None:
    """It boards at 3.125, and the replica to which it moved dies at 4."""
    dispatcher, [row] = killed({1: [(4.0, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=Moves())
    assert (row["replica"], dispatcher.retries[0], row["finished"]) == (0, 1, 12.0)
    assert dispatcher.migration is not None and not dispatcher.migration.records


class WatchedMoves(Moves):
    def __init__(self) -> None:
        self.seen: list[tuple[float, str, int]] = []

    def observe(self, event: Event) -> None:
        self.seen.append((event.now, type(event).__name__, event.replica.index))


@pytest.mark.parametrize(("dies", "seen"), [
    (1, [(0.0, "Placed", 0), (8.05, "Left", 0)]),
    (0, [(0.0, "Placed", 0), (3.05, "Left", 0), (3.05, "Placed", 1), (11.05, "Left", 1)]),
])  # fmt: skip
def test_a_router_observes_where_a_request_that_moves_is_lost(
    dies: int, seen: list[tuple[float, str, int]]
) -> None:
    """At 3.05 it has parted, and its last tokens are on their way."""
    router = WatchedMoves()
    killed({dies: [(3.05, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=router)
    assert [(round(at, 9), what, where) for at, what, where in router.seen] == seen


@pytest.mark.parametrize("longest", [6, 9])
def test_a_request_that_outgrows_its_target_in_migration_continues(longest: int) -> None:
    """At its source to the end, or at the target as long as it can be there."""
    schedulers = [decoder(), decoder(max_model_len=longest)]
    settings: dict[str, Any] = {"token_bytes": 1.0, "network": NETWORK}
    jobs = Jobs([(0.0, 4, 8)])
    _, recorder = whole(schedulers, jobs, Often(), Constant(), BOTH, **settings)
    [row] = recorder.requests_table().to_pylist()
    assert (row["state"], row["output_tokens"]) == (
        "finished",
        longest - 4 if row["replica"] else 8,
    )


class Often(Moves):
    migrates_every = 1.25

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch]


@pytest.mark.parametrize(("most", "state"), [(3, "finished"), (2, "rejected")])
def test_a_request_under_which_replicas_die_too_often_is_rejected(most: int, state: str) -> None:
    """It is sent to replica 1 from 1 on and thrice more; each time that dies before it is there."""
    deaths = [(1.25 + n, 0.5) for n in range(3)]
    dispatcher, recorder = whole(
        [decoder(), decoder()],
        Jobs([(0.0, 4, 3), (5.0, 4, 1)]),
        RoundRobin(),
        Constant(),
        ("prefill", "decode"),
        token_bytes=1.0,
        network=NETWORK,
        failures=ListedOutages({1: deaths}),
        max_retries=most,
    )
    row, other = recorder.requests_table().to_pylist()
    assert (row["state"], other["state"]) == (state, "finished")
    assert row["finished"] == (3.75 + 0.5 + 2.0 if state == "finished" else 3.25)
    if state == "rejected":
        assert row["reason"] == "replicas died under it more than 2 times (fleet.max_retries)"
    for replica in dispatcher.replicas:
        assert not replica.decoder.migration.held and replica.decoder.memory.used == 0


@pytest.mark.parametrize(("most", "states"), [
    (0, ["rejected", "finished"]),
    (1, ["rejected", "finished"]),
    (2, ["finished", "finished"]),
])  # fmt: skip
def test_a_run_whose_replicas_die_too_often_ends(most: int, states: list[str]) -> None:
    """Two deaths find request 0 at work; request 1 needs one step, between the two."""
    dispatcher, recorder = whole(
        [decoder()],
        Jobs([(0.0, 4, 4), (1.5, 4, 1)]),
        RoundRobin(),
        Constant(),
        failures=ListedOutages({0: [(1.25, 0.5), (4.25, 0.5)]}),
        max_retries=most,
    )
    rows = recorder.requests_table().to_pylist()
    assert [row["state"] for row in rows] == states
    assert dispatcher.retries[0] == most


def test_repeated_transfers_go_ahead_of_later_ones() -> None:
    """Request 0 is on its way from 1 on, request 1 waits from 2 on; the only receiver is down from
    2.5 to 3.5, and has one slot."""
    router, rows = Central(slots=1), [(0.0, 16, 3), (0.0, 16, 3)]
    _, [one, other] = killed({1: [(2.5, 1.0)]}, rows, roles=("prefill", "decode"), router=router)
    assert one["finished"] == 3.5 + 2.0 + 2.0
    assert other["finished"] > one["finished"]


def test_what_is_sent_again_was_not_sent_while_it_was_computed() -> None:
    """Layer by layer the first transfer is over at 1.25; the second takes half a second."""
    router = RoundRobin()
    network = Network(8e-9, layerwise=True)
    _, [row] = killed({1: [(1.125, 9.0)]}, [(0.0, 4, 3)], router=router, network=network, layers=2)
    assert row["finished"] == 1.125 + 0.5 + 2.0


def test_lost_requests_that_arrived_at_once_keep_their_order() -> None:
    """The second of the batch was placed first in the queues of the replica that dies."""
    rows = [(0.0, 4, 3)] * 3
    _, found = killed({0: [(1.5, 1.0)]}, rows, [decoder(max_seqs=1)], roles=("both",))
    assert [row["first_token"] for row in found] == [3.5, 6.5, 9.5]


def test_lost_requests_go_before_those_that_came_after_them() -> None:
    """Three arrive while all are down; what was lost when the first died arrived before them."""
    deaths = {0: [(0.5, 2.0)]}
    rows = [(0.0, 4, 2), (0.25, 4, 2), (1.0, 4, 2), (1.5, 4, 2)]
    _, found = killed(deaths, rows, [decoder(max_seqs=1)], roles=("both",))
    assert [row["first_token"] for row in found] == [3.5, 5.5, 7.5, 9.5]


def test_lost_requests_go_between_those_that_came_before_and_after_them() -> None:
    """Each replica has one slot. When the second one dies, what the first lost waits in front, and
    two requests that came last."""
    deaths = {0: [(1.5, 20.0)], 1: [(1.75, 0.75)]}
    rows = [(0.0, 4, 2), (0.0, 4, 2), (1.0, 4, 2), (1.0, 4, 2)]
    _, found = killed(deaths, rows, roles=BOTH, router=Central(slots=1))
    assert [row["first_token"] for row in found] == [3.5, 5.5, 7.5, 9.5]


@pytest.mark.parametrize("at", [0.5, 1.25])
def test_a_draining_replica_stops_when_nothing_is_held_there(at: float) -> None:
    """Nothing is computed there from 1 on, and all is sent at 1.5."""

    drains = draining(at, 0)
    dispatcher, _ = killed({}, [(0.0, 4, 3)], begins=drains)
    assert dispatcher.states.paid()[0] == [(0.0, 1.5)]


def test_a_draining_replica_serves_what_is_on_its_way_to_it() -> None:
    drains = draining(1.25, 1)
    dispatcher, [row] = killed({}, [(0.0, 4, 3)], begins=drains)
    assert (row["replica"], row["finished"]) == (1, 3.5)
    assert dispatcher.states.paid()[1] == [(0.0, 3.5)]


def test_a_draining_replica_serves_what_waits_for_its_memory() -> None:
    """Both requests go to replica 2, which has memory for one. The first is lost on its way there
    at 1.5, with its source, and the second has the memory from then on."""

    class ById(Router):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            return replicas[0 if replicas.role == "decode" else -int(request.id == 1)]

    drains = draining(1.25, 2)
    roles = ("prefill", "prefill", "decode", "decode")
    schedulers = [decoder(), decoder(), decoder(blocks=4), decoder()]
    dispatcher, found = killed(
        {0: [(1.5, 20.0)]}, [(0.0, 8, 3)] * 2, schedulers, roles, ById(), begins=drains
    )
    assert [row["replica"] for row in found] == [3, 2]
    assert found[1]["finished"] == 1.5 + 8 / 8 + 2.0
    assert dispatcher.states.paid()[2] == [(0.0, 4.5)]


def test_a_draining_replica_stops_when_a_move_to_it_is_given_up() -> None:
    """The request ends at 3 where it is, while it is copied."""

    drains = draining(2.5, 1)
    dispatcher, [row] = killed({}, [(0.0, 8, 3)], roles=BOTH, router=Moves(), begins=drains)
    assert (row["replica"], row["finished"]) == (0, 3.0)
    assert dispatcher.states.paid()[1] == [(0.0, 3.0)]


def test_a_router_observes_once_that_a_request_is_lost() -> None:
    """Its target dies on the way, then its source, while it waits for another target."""
    router = Watching()
    killed({1: [(1.25, 9.0)], 0: [(2.0, 1.0)]}, [(0.0, 4, 2)], roles=APART[:2], router=router)
    assert router.seen == [
        (0.0, "Placed", 0, 0),
        (1.0, "Placed", 0, 1),
        (1.25, "Left", 0, 1),
        (3.0, "Placed", 0, 0),
        (10.25, "Placed", 0, 1),
        (11.75, "Left", 0, 1),
    ]


def test_a_newcomer_waits_behind_those_that_wait_for_a_replica() -> None:
    class Slow(First):
        """Request 1 gets a replica from 5 on, all others at once."""

        holds = True

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:  # type: ignore[override]
            return None if request.id == 1 and now < 5 else replicas[0]

    rows = [(0.0, 4, 6), (1.0, 4, 2), (2.0, 4, 2)]
    _, found = killed({}, rows, [decoder()], roles=("both",), router=Slow())
    assert [row["first_token"] for row in found] == [1.0, 7.0, 7.0]


def test_a_router_cannot_have_a_prefill_replica_decode() -> None:
    class Wrong(First):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            return replicas.all_replicas[0]

    with pytest.raises(AnswerError, match=r"Wrong.route gave .* which may decode"):
        killed({}, [(0.0, 4, 3)], router=Wrong())
