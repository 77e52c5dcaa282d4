"""KV migration from prefill to decode: placement, transfers and waiting for memory.

Steps take a second; a token has a byte, of which eight go over a link in a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pagedsim.cluster.link import Network
from pagedsim.core import Request, Scheduler
from pagedsim.policies.routing.router import Move, Refusal, Replica, Replicas, Router
from pagedsim.policies.routing.simple import RoundRobin
from tests.cluster.fleets import NETWORK, Watching, served, server, whole
from tests.sim.harness import Constant, Jobs

scheduler = partial(server, blocks=24, max_seqs=8, batching="unified")
APART = ("prefill", "decode")


def moved(
    rows: list[tuple[float, int, int]] | Jobs,
    *schedulers: Scheduler,
    router: Router | None = None,
    roles: tuple[str, ...] = APART,
    step: float = 1.0,
    **more: Any,
) -> tuple[dict[str, list[Any]], Any]:
    """Columns of the requests, and the steps."""
    requests, steps = served(
        schedulers or [scheduler() for _ in roles],
        rows if isinstance(rows, Jobs) else Jobs(rows),
        router or RoundRobin(),
        Constant(step),
        roles,
        **{"token_bytes": 1.0, "network": NETWORK, **more},
    )
    return requests.to_pydict(), steps


def test_a_request_decodes_after_its_keys_and_values_have_come() -> None:
    """A prompt of 4 tokens: a step of a second, half a second on the way."""
    requests, steps = moved([(0.0, 4, 3)])
    assert (requests["first_token"], requests["finished"]) == ([1.0], [3.5])
    assert requests["replica"] == [1]
    assert steps.replicas[1].table()["start"].to_pylist() == [1.5, 2.5]
    requests, _ = moved([(0.0, 4, 1)])  # one token is all, and nothing moves
    assert requests["replica"] == [0]


def test_the_limit_of_the_decode_replica_holds() -> None:
    """What a server of its limit alone refuses is rejected, and what that cuts is cut."""
    rows, router = [(0.0, 9, 3), (0.0, 8, 3), (0.0, 6, 5)], Watching()
    requests, _ = moved(rows, scheduler(), scheduler(max_model_len=8), router=router)
    assert requests["state"] == ["rejected", "finished", "finished"]
    assert requests["reason"][0] == "replica-1: prompt of 9 tokens: max_model_len is 8"
    assert requests["output_tokens"][1:] == [1, 2]
    left = sorted(seen[1:] for seen in router.seen if seen[1] == "Left")
    assert left == [("Left", number, 1) for number in range(3)]


def test_a_request_without_room_at_the_target_stays_at_the_source() -> None:
    """Each takes three blocks of four; the second has to wait for the first to end."""
    requests, _ = moved([(0.0, 8, 4)] * 2, scheduler(), scheduler(blocks=4), token_bytes=0.0)
    assert (requests["first_token"], requests["finished"]) == ([1.0, 1.0], [4.0, 7.0])


class Moves(Router):
    """Every request starts at the first replica, and moves to the second one."""

    migrates_every = 2.25

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[0]

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch]


def test_a_live_migration_decodes_while_it_is_copied() -> None:
    """At 2.25 s it has computed 5 tokens, which take 5/8 s; at that step's end one more."""
    requests, steps = moved([(0.0, 4, 8)], scheduler(), scheduler(), router=Moves(), roles=())
    first, second = (one.table() for one in steps.replicas)
    assert requests["replica"] == [1]
    assert first["end"].to_pylist() == [1.0, 2.0, 3.0]
    assert second["start"].to_pylist()[0] == 3.125
    assert sum(first["decode_seqs"].to_pylist()) + sum(second["decode_seqs"].to_pylist()) == 7
    assert requests["output_tokens"] == [8]
    # Of 8 more tokens, 9 take until 3.375 s. It parts at 4 s with 11: two more are copied.
    _, steps = moved([(0.0, 8, 9)], scheduler(), scheduler(), router=Moves(), roles=())
    assert steps.replicas[1].table()["start"].to_pylist()[0] == 4.25


def test_a_request_that_decodes_faster_than_it_is_copied_pauses_for_the_third_copy() -> None:
    """Ten tokens a second are decoded and eight copied, so each copy leaves more for the next."""
    dispatcher, recorder = whole(
        [scheduler(blocks=400), scheduler(blocks=400)],
        Jobs([(0.0, 200, 900)]),
        Moves(),
        Constant(0.1),
        token_bytes=1.0,
        network=NETWORK,
    )
    assert dispatcher.migration is not None
    assert dispatcher.migration.fabric.usage.transfers == 3
    assert dispatcher.migration.migrations == 1
    assert recorder.requests_table()["output_tokens"].to_pylist() == [900]


def test_a_request_without_a_token_does_not_migrate() -> None:
    """A step ahead, the second request counts its first token while that is still computed."""
    pair = (scheduler(async_scheduling=True), scheduler())
    rows = [(0.0, 4, 8), (1.5, 4, 8)]
    requests, _ = moved(rows, *pair, router=Moves(), roles=(), token_bytes=0.01)
    assert (requests["output_tokens"], requests["replica"]) == ([8, 8], [1, 1])


def test_a_request_attached_as_a_replica_goes_idle_is_served() -> None:
    """A swapped request finds no room beside what is held for one that attaches at that moment."""
    jobs = [(0.0, 6, 13), (0.0, 30, 8), (0.05, 16, 7), (0.05, 27, 15)]
    jobs += [(0.55, 34, 18), (0.55, 35, 16), (1.0, 20, 4)]
    requests, _ = moved(
        jobs,
        scheduler(preemption="swap"),
        scheduler(blocks=14, preemption="swap", max_seqs=4),
        step=0.05,
        layers=2,
        network=Network(4e-8, sharing="fair", layerwise=True),
    )
    assert requests["output_tokens"] == [output for _, _, output in jobs]


def test_a_request_that_is_refused_before_it_decodes_leaves_nothing_behind() -> None:
    class Refuses(Watching):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica | Refusal:  # type: ignore[override]
            answer = super().route(request, replicas, now)
            return Refusal("too late") if replicas.role == "decode" else answer

    first, second = scheduler(), scheduler()
    router = Refuses()
    requests, _ = moved([(0.0, 4, 3)], first, second, router=router)
    assert requests["state"] == ["rejected"]
    assert router.seen == [(0.0, "Placed", 0, 0), (1.0, "Left", 0, 0)]
    assert not first.migration.held and first.memory.used == 0


def test_of_a_request_on_its_way_no_memory_is_wanted_once_it_is_reserved() -> None:
    """From 1 to 1.5 s the first request is on its way; two of its three tokens are to come."""

    class Predicted(Jobs):
        def requests(self) -> Iterator[tuple[Request, int]]:
            for request, output in super().requests():
                request._predicted_len = float(output)
                yield request, output

    class Looks(RoundRobin):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[float, int, int, float]] = []

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            there = replicas.all_replicas[1]
            seen = (there.requests, there.wanted_blocks, there.predicted_tokens)
            self.seen.append((now, *seen))
            return super().route(request, replicas, now)

    router = Looks()
    moved(Predicted([(0.0, 4, 3), (1.25, 4, 1)]), router=router)
    assert router.seen == [(0.0, 0, 0, 0.0), (1.0, 0, 0, 0.0), (1.25, 1, 0, 2.0)]


def test_memory_of_a_migrated_request_goes_to_a_waiting_one() -> None:
    """Replica 1 has memory for one. The first request moves to replica 2 from 4.25 s on, parts at
    6 s and has moved a quarter of a second later; nothing runs at replica 1 then."""

    class Away(Moves):
        migrates_every = 4.25

        def migrate(self, replicas: Replicas, now: float) -> list[Move]:
            return super().migrate(replicas, now) if now < 5 else []

    three = (scheduler(), scheduler(blocks=5), scheduler())
    rows, roles = [(0.0, 8, 12), (0.0, 8, 3)], ("prefill", "decode", "decode")
    requests, _ = moved(rows, *three, router=Away(), roles=roles)
    assert requests["replica"] == [2, 1]
    assert requests["finished"][1] == 6.25 + 8 / 8 + 2.0
