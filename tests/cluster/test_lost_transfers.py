"""A replica dies or drains while requests go from one to another: state by state, times by hand.

Steps take a second. A prompt of 4 tokens is computed at replica 0 in the first one; a token has a
byte, and 8 bytes a second go from replica to replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pagedsim.cluster.dispatcher import Dispatcher
from pagedsim.cluster.failures import ListedOutages, Outage
from pagedsim.cluster.link import Network
from pagedsim.core import Request, Scheduler
from pagedsim.core.errors import AnswerError
from pagedsim.policies.routing.router import Event, Move, Replica, Replicas, Router
from pagedsim.policies.routing.simple import RoundRobin
from tests.cluster.fleets import NETWORK, Watching, server, whole
from tests.sim.harness import Constant, Jobs

Rows = list[tuple[float, int, int]]
Deaths = dict[int, list[Outage]]

PAIR = ("prefill", "decode")
APART = ("prefill", "decode", "decode")
BOTH = ("both", "both")

scheduler = partial(server, max_seqs=4, batching="unified")


def killed(
    deaths: Deaths,
    rows: Rows,
    schedulers: list[Scheduler] | None = None,
    roles: tuple[str, ...] = APART,
    router: Router | None = None,
    **more: Any,
) -> tuple[Dispatcher, list[dict[str, Any]]]:
    """The dispatcher, and the requests, which all finish and leave nothing behind."""
    schedulers = schedulers or [scheduler() for _ in roles]
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
    found: list[dict[str, Any]] = recorder.requests_table().to_pylist()
    assert [row["state"] for row in found] == ["finished"] * len(rows)
    assert [row["output_tokens"] for row in found] == [output for _, _, output in rows]
    return dispatcher, found


# -- from prefill to decode ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deaths", "more", "replica", "first_token", "finished", "retries"),
    [
        pytest.param(
            *({1: [(1.25, 9.0)]}, {"on_receiver_death": "recompute"}, 2, 1.0, 3.25 + 5 / 8, 1),
            id="the receiver dies: computed again with its token, which gives the second one",
        ),
        pytest.param(
            *({0: [(1.25, 0.75)]}, {"on_receiver_death": "resend"}, 2, 3.0, 5.5, 1),
            id="the source dies, and computes the prompt again from 2 on",
        ),
        pytest.param(
            *({0: [(1.25, 0.75)]}, {"on_receiver_death": "recompute"}, 2, 3.0, 5.5, 1),
            id="whatever is done where a receiver dies",
        ),
        pytest.param(
            *({0: [(1.25, 0.75)], 1: [(1.25, 9.0)]}, {}, 2, 3.0, 5.5, 1), id="both ends die"
        ),
        pytest.param(
            *({0: [(1.75, 9.0)]}, {}, 1, 1.0, 3.5, 0), id="the source dies when all has arrived"
        ),
        pytest.param(
            *({1: [(0.5, 3.0)]}, {"roles": PAIR}, 1, 1.0, 3.5 + 0.5 + 2.0, 0),
            id="it waits for a replica that decodes until one is back",
        ),
        pytest.param(
            *({0: [(2.0, 1.0)], 1: [(0.5, 5.0)]}, {"roles": PAIR}, 1, 4.0, 5.5 + 0.5 + 2.0, 1),
            id="what waits for one is lost with its source",
        ),
        pytest.param(
            {1: [(1.125, 9.0)]},
            {"network": Network(8e-9, layerwise=True), "layers": 2},
            *(2, 1.0, 1.125 + 0.5 + 2.0, 0),
            id="what is sent again was not sent while it was computed",
        ),
    ],
)
def test_a_request_on_its_way(
    deaths: Deaths,
    more: dict[str, Any],
    replica: int,
    first_token: float,
    finished: float,
    retries: int,
) -> None:
    dispatcher, [row] = killed(deaths, [(0.0, 4, 3)], **more)
    assert (row["first_token"], row["finished"]) == (first_token, finished)
    assert (row["replica"], dispatcher.retries[0]) == (replica, retries)


def test_a_router_observes_once_that_a_request_is_lost() -> None:
    """Its target dies on the way, then its source, while it waits for another target."""
    router = Watching()
    killed({1: [(1.25, 9.0)], 0: [(2.0, 1.0)]}, [(0.0, 4, 2)], roles=PAIR, router=router)
    assert router.seen == [
        (0.0, "Placed", 0, 0),
        (1.0, "Placed", 0, 1),
        (1.25, "Left", 0, 1),
        (3.0, "Placed", 0, 0),
        (10.25, "Placed", 0, 1),
        (11.75, "Left", 0, 1),
    ]


class First(Router):
    """The first replica of those that may take it."""

    migrates_every: float | None = None

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[0]


def test_a_router_cannot_have_a_prefill_replica_decode() -> None:
    class Wrong(First):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            return replicas.all_replicas[0]

    with pytest.raises(AnswerError, match=r"Wrong.route gave .* which may decode"):
        killed({}, [(0.0, 4, 3)], router=Wrong())


# -- live migration --------------------------------------------------------------------------------


class Moves(First):
    """Everything starts at replica 0, and moves to replica 1 at 2.25.

    Copies go from 2.25 on, and the last one from 3 to 3.125, for which a request has parted.
    """

    migrates_every = 2.25

    def __init__(self) -> None:
        self.seen: list[tuple[float, str, int]] = []

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch if now < 3]

    def observe(self, event: Event) -> None:
        self.seen.append((round(event.now, 9), type(event).__name__, event.replica.index))


@pytest.mark.parametrize(
    ("dies", "at", "replica", "retries", "finished"),
    [
        # The target leaves it where it is.
        (1, 2.5, 0, 0, 8.0),
        (1, 3.05, 0, 0, 3.05 + 5.0),
        # The source takes it along until it has moved.
        (0, 2.5, 1, 1, 2.5 + 8.0),
        (0, 3.05, 1, 1, 3.05 + 8.0),
        (0, 3.5, 1, 0, 8.125),
        # It attaches at 3.125, and the replica to which it moved dies.
        (1, 4.0, 0, 1, 12.0),
    ],
)
def test_a_replica_dies_while_or_after_a_request_moves(
    dies: int, at: float, replica: int, retries: int, finished: float
) -> None:
    router = Moves()
    dispatcher, [row] = killed({dies: [(at, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=router)
    assert (row["replica"], dispatcher.retries[0]) == (replica, retries)
    assert row["finished"] == finished
    assert dispatcher.migration is not None
    assert dispatcher.migration.migrations == (at > 3.125)
    assert len(dispatcher.migration.records) == (at == 3.5)
    if at == 3.05:
        anew = [(3.05, "Left", 0), (3.05, "Placed", 1)] if retries else []
        assert router.seen == [(0.0, "Placed", 0), *anew, (finished, "Left", replica)]


def test_a_router_cannot_move_a_request_to_a_replica_that_is_down() -> None:
    class Faithful(Moves):
        """To the replica that it saw first."""

        first: Replicas | None = None

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            self.first = self.first or list(replicas)  # type: ignore[assignment]
            return replicas[0]

        def migrate(self, replicas: Replicas, now: float) -> list[Move]:
            assert self.first is not None
            return [Move(one, self.first[0], self.first[1]) for one in replicas[0].batch]

    with pytest.raises(AnswerError, match=r"Faithful.migrate gave .*: must be a list of Move"):
        killed({1: [(1.0, 20.0)]}, [(0.0, 4, 8)], roles=BOTH, router=Faithful())


# -- too many deaths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "rows", "deaths", "most", "finished"),
    [
        # It is sent to replica 1 from 1 on and thrice more; each time that dies before it is there.
        (PAIR, [(0.0, 4, 3), (5.0, 4, 1)], {1: [(1.25 + n, 0.5) for n in range(3)]}, 3, 6.25),
        (PAIR, [(0.0, 4, 3), (5.0, 4, 1)], {1: [(1.25 + n, 0.5) for n in range(3)]}, 2, None),
        # Two deaths find request 0 at work; request 1 needs one step, between the two.
        (("both",), [(0.0, 4, 4), (1.5, 4, 1)], {0: [(1.25, 0.5), (4.25, 0.5)]}, 1, None),
        (("both",), [(0.0, 4, 4), (1.5, 4, 1)], {0: [(1.25, 0.5), (4.25, 0.5)]}, 2, 8.75),
    ],
)
def test_a_request_under_which_replicas_die_too_often_is_rejected(
    roles: tuple[str, ...], rows: Rows, deaths: Deaths, most: int, finished: float | None
) -> None:
    dispatcher, recorder = whole(
        [scheduler() for _ in roles],
        Jobs(rows),
        RoundRobin(),
        Constant(),
        roles,
        token_bytes=1.0,
        network=NETWORK,
        failures=ListedOutages(deaths),
        max_retries=most,
    )
    row, other = recorder.requests_table().to_pylist()
    assert other["state"] == "finished"
    if finished is None:
        told = f"replicas died under it more than {most} times (fleet.max_retries)"
        assert (row["state"], row["reason"]) == ("rejected", told)
    else:
        assert (row["state"], row["finished"]) == ("finished", finished)
    for replica in dispatcher.replicas:
        assert not replica.scheduler.migration.held and replica.scheduler.memory.used == 0


# -- draining replicas -----------------------------------------------------------------------------


def draining(at: float, replica: int) -> Callable[[Dispatcher], None]:
    """What drains a replica at that time."""

    def begins(dispatcher: Dispatcher) -> None:
        event = dispatcher.environment.at(at)
        event.callbacks.append(lambda _: dispatcher.drain(dispatcher.replicas[replica]))

    return begins


@pytest.mark.parametrize(
    ("at", "replica", "paid"),
    [
        # Nothing is computed at the source from 1 on, and all is sent at 1.5.
        (0.5, 0, 1.5),
        (1.25, 0, 1.5),
        # The target serves what is on its way to it.
        (1.25, 1, 3.5),
    ],
)
def test_a_draining_replica_stops_when_nothing_is_held_there(
    at: float, replica: int, paid: float
) -> None:
    dispatcher, [row] = killed({}, [(0.0, 4, 3)], begins=draining(at, replica))
    assert (row["replica"], row["finished"]) == (1, 3.5)
    assert dispatcher.states.paid()[replica] == [(0.0, paid)]
