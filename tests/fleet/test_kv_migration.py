"""KV migration from prefill to decode: placement, transfers and waiting for memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Request, Scheduler
from pagedsim.fleet.link import Network
from policies.routing.router import Move, Refusal, Replica, Replicas, Router
from policies.routing.simple import Central, LeastRequests, RoundRobin
from tests.fleet.fleets import served
from tests.sim.harness import Constant, Jobs


def scheduler(blocks: int = 24, memory: str = "paged", **more: Any) -> Scheduler:
    made = make_memory(memory, blocks=blocks, block_size=4, cpu_blocks=16)
    return make_scheduler(memory=made, **{"max_seqs": 8, "batching": "unified", **more})


NETWORK = Network(bandwidth_gb_s=1e-9 * 8)  # 8 bytes a second


def test_a_request_decodes_after_its_keys_and_values_have_come() -> None:
    """A prompt of 4 tokens, a byte each: a step of a second, half a second on the way."""
    requests, steps = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 3)]),
        RoundRobin(),
        Constant(),
        roles=("prefill", "decode"),
        token_bytes=1.0,
        network=NETWORK,
    )
    assert requests["first_token"].to_pylist() == [1.0]
    assert requests["finished"].to_pylist() == [3.5]
    assert requests["replica"].to_pylist() == [1]
    table = steps.replicas[1].table()
    assert table["start"].to_pylist() == [1.5, 2.5]


def test_a_request_without_room_at_the_target_stays_at_the_source() -> None:
    """Each takes three blocks of four; the second has to wait for the first to end."""
    requests, _ = served(
        [scheduler(), scheduler(blocks=4)],
        Jobs([(0.0, 8, 4), (0.0, 8, 4)]),
        RoundRobin(),
        Constant(),
        roles=("prefill", "decode"),
        token_bytes=0.0,
        network=NETWORK,
    )
    assert requests["first_token"].to_pylist() == [1.0, 1.0]
    assert requests["finished"].to_pylist() == [4.0, 7.0]


def test_one_token_is_all_and_nothing_moves() -> None:
    requests, _ = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 1)]),
        RoundRobin(),
        Constant(),
        roles=("prefill", "decode"),
        network=NETWORK,
    )
    assert requests["replica"].to_pylist() == [0]


class Moves(Router):
    """Every request starts at the first replica, and moves to the second one."""

    migrates_every = 2.25

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[0]

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch]


def test_a_live_migration_decodes_while_it_is_copied() -> None:
    """At 2.25 s it has computed 5 tokens, which take 5/8 s; at that step's end one more."""
    requests, steps = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 8)]),
        Moves(),
        Constant(),
        token_bytes=1.0,
        network=NETWORK,
    )
    first, second = (one.table() for one in steps.replicas)
    assert requests["replica"].to_pylist() == [1]
    assert first["end"].to_pylist() == [1.0, 2.0, 3.0]
    assert second["start"].to_pylist()[0] == 3.125
    assert sum(first["decode_seqs"].to_pylist()) + sum(second["decode_seqs"].to_pylist()) == 7
    assert requests["output_tokens"].to_pylist() == [8]


def test_a_request_without_a_token_does_not_migrate() -> None:
    """A step ahead, the second request counts its first token while that is still computed."""
    requests, _ = served(
        [scheduler(async_scheduling=True), scheduler()],
        Jobs([(0.0, 4, 8), (1.5, 4, 8)]),
        Moves(),
        Constant(),
        token_bytes=0.01,
        network=NETWORK,
    )
    assert requests["output_tokens"].to_pylist() == [8, 8]
    assert requests["replica"].to_pylist() == [1, 1]


def test_a_request_attached_as_a_replica_goes_idle_is_served() -> None:
    """Who is swapped out finds no room beside what is held for one that boards at that moment."""
    jobs = [(0.0, 6, 13), (0.0, 30, 8), (0.05, 16, 7), (0.05, 27, 15)]
    jobs += [(0.55, 34, 18), (0.55, 35, 16), (1.0, 20, 4)]
    requests, _ = served(
        [scheduler(preemption="swap"), scheduler(14, preemption="swap", max_seqs=4)],
        Jobs(jobs),
        RoundRobin(),
        Constant(0.05),
        roles=("prefill", "decode"),
        token_bytes=1.0,
        layers=2,
        network=Network(4e-8, sharing="fair", layerwise=True),
    )
    assert requests["output_tokens"].to_pylist() == [output for _, _, output in jobs]


def test_a_placed_request_is_visible_to_the_next_routing_decision() -> None:
    """Six prompts end in one step; each of three that decode gets two of them."""
    requests, _ = served(
        [scheduler(blocks=64, max_batched_tokens=64), *(scheduler() for _ in range(3))],
        Jobs([(0.0, 4, 3)] * 6),
        LeastRequests(),
        Constant(),
        roles=("prefill", "decode", "decode", "decode"),
        network=NETWORK,
    )
    assert sorted(requests["replica"].to_pylist()) == [1, 1, 2, 2, 3, 3]


def test_a_prompt_that_went_on_makes_room_in_front() -> None:
    """One slot each: the second prompt begins when the first has gone, not when it is answered."""
    requests, _ = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 10)] * 3),
        Central(slots=1),
        Constant(),
        roles=("prefill", "decode"),
        network=NETWORK,
    )
    assert requests["first_token"].to_pylist() == [1.0, 2.0, 3.0]


def test_a_lost_transfer_restarts_ahead_of_the_queue() -> None:
    network = Network(4e-8, failure_rate=0.5, retries=0, timeout_s=0.1)
    requests, _ = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 5)] * 12),
        Central(slots=1),
        Constant(),
        roles=("prefill", "decode"),
        token_bytes=1.0,
        network=network,
    )
    assert set(requests["state"].to_pylist()) == {"finished"}


def test_an_answer_is_not_cut_where_its_prompt_is_computed() -> None:
    requests, _ = served(
        [scheduler(max_model_len=12), scheduler()],
        Jobs([(0.0, 8, 30)]),
        RoundRobin(),
        roles=("prefill", "decode"),
        network=NETWORK,
    )
    assert requests["output_tokens"].to_pylist() == [30]


def test_an_answer_that_fits_nowhere_else_ends_where_it_began() -> None:
    requests, _ = served(
        [scheduler(), scheduler(max_model_len=16)],
        Jobs([(0.0, 15, 9)]),
        RoundRobin(),
        roles=("prefill", "decode"),
        network=NETWORK,
    )
    assert requests["state"].to_pylist() == ["finished"]
    assert requests["reason"].to_pylist() == ["length"]
    assert requests["output_tokens"].to_pylist() == [1]
    assert requests["replica"].to_pylist() == [0]


def test_what_ends_where_it_began_makes_room_for_what_waits_to_decode() -> None:
    """Two prompts end in one step, and the only slot is free again when the first fits nowhere."""

    class OneDecodes(RoundRobin):
        holds = True

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:  # type: ignore[override]
            return None if replicas.role == "decode" and replicas[0].requests else replicas[0]

    requests, _ = served(
        [scheduler(), scheduler(max_model_len=16)],
        Jobs([(0.0, 15, 9)] * 2),
        OneDecodes(),
        Constant(),
        roles=("prefill", "decode"),
        network=NETWORK,
    )
    assert requests["state"].to_pylist() == ["finished"] * 2
    assert requests["finished"].to_pylist() == [1.0, 1.0]


def test_a_request_that_is_refused_before_it_decodes_leaves_nothing_behind() -> None:
    class Refuses(RoundRobin):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica | Refusal:  # type: ignore[override]
            answer = super().route(request, replicas, now)
            return Refusal("too late") if replicas.role == "decode" else answer

    made = [scheduler(), scheduler()]
    jobs, roles = Jobs([(0.0, 4, 3)]), ("prefill", "decode")
    requests, _ = served(made, jobs, Refuses(), Constant(), roles=roles, network=NETWORK)
    assert requests["state"].to_pylist() == ["rejected"]
    assert not made[0].migration.held and made[0].memory.used == 0


def test_what_is_computed_while_a_copy_is_on_its_way_is_copied_too() -> None:
    """At 2.25 s it has 9 tokens, which take until 3.375 s. It parts at 4 s with 11: two more."""
    _, steps = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 8, 9)]),
        Moves(),
        Constant(),
        token_bytes=1.0,
        network=NETWORK,
    )
    assert steps.replicas[1].table()["start"].to_pylist()[0] == 4.25


@pytest.mark.parametrize("token_bytes", [(1.0, 2.0), (2.0, 1.0)])
def test_a_transfer_takes_as_long_as_the_end_with_more_bytes_a_token(
    token_bytes: tuple[float, float],
) -> None:
    requests, _ = served(
        [scheduler(), scheduler()],
        Jobs([(0.0, 4, 3)]),
        RoundRobin(),
        Constant(),
        roles=("prefill", "decode"),
        token_bytes=token_bytes,
        network=NETWORK,
    )
    assert requests["finished"].to_pylist() == [1.0 + 8 / 8 + 2.0]


def test_of_a_request_on_its_way_no_memory_is_wanted_once_it_is_reserved() -> None:
    """From 1 to 1.5 s the first request is on its way; two of its three tokens are to come."""

    class Predicted(Jobs):
        def requests(self) -> Iterator[tuple[Request, int]]:
            for request, output in super().requests():
                request.predicted_len = float(output)
                yield request, output

    class Looks(RoundRobin):
        seen: list[tuple[float, int, int, float]]

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            there = replicas.all_replicas[1]
            seen = (there.requests, there.wanted_blocks, there.predicted_tokens)
            self.seen.append((now, *seen))
            return super().route(request, replicas, now)

    router = Looks()
    router.seen = []
    jobs, roles = Predicted([(0.0, 4, 3), (1.25, 4, 1)]), ("prefill", "decode")
    served(
        [scheduler(), scheduler()], jobs, router, Constant(), roles,
        token_bytes=1.0, network=NETWORK,
    )  # fmt: skip
    assert router.seen == [(0.0, 0, 0, 0.0), (1.0, 0, 0, 0.0), (1.25, 1, 0, 2.0)]


def test_memory_of_a_migrated_request_goes_to_a_waiting_one() -> None:
    """Replica 1 has memory for one. The first request moves to replica 2 from 4.25 s on, parts at
    6 s and has moved a quarter of a second later; nothing runs at replica 1 then."""

    class Away(Moves):
        migrates_every = 4.25

        def migrate(self, replicas: Replicas, now: float) -> list[Move]:
            return [Move(one, replicas[0], replicas[1]) for one in replicas[0].batch if now < 5]

    requests, _ = served(
        [scheduler(), scheduler(blocks=5), scheduler()],
        Jobs([(0.0, 8, 12), (0.0, 8, 3)]),
        Away(),
        Constant(),
        roles=("prefill", "decode", "decode"),
        token_bytes=1.0,
        network=NETWORK,
    )
    assert requests["replica"].to_pylist() == [2, 1]
    assert requests["finished"].to_pylist()[1] == 6.25 + 8 / 8 + 2.0
