"""The rules of routers that go by load, each worked out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pagedsim.build import make_memory, make_router, make_scheduler
from pagedsim.core import Request
from tests.policies.routing.fakes import Fake, Fleet, fleet, named


def test_round_robin_takes_turns_and_counts_each_role_by_itself() -> None:
    router, there = make_router("round_robin"), fleet({}, {}, {})
    decoders = Fleet([Fake(7), Fake(9)], role="decode")
    assert [named(router, there) for _ in range(4)] == [0, 1, 2, 0]
    assert [named(router, decoders) for _ in range(3)] == [7, 9, 7]
    assert named(router, there) == 1


def test_the_power_of_two_never_takes_the_worst_and_takes_the_best_half_of_the_time() -> None:
    router = make_router("power_of_two")
    there = fleet({"waiting": 3}, {"running": 2}, {"swapped": 1}, {})
    counts = Counter(named(router, there) for _ in range(4000))
    assert counts[0] == 0
    assert counts[3] == pytest.approx(2000, abs=160)
    assert counts[2] == pytest.approx(4000 / 3, abs=160)
    assert named(make_router("power_of_two", choices=9), there) == 3


def test_least_requests_counts_all_of_them() -> None:
    there = fleet({"waiting": 2}, {"running": 1, "swapped": 1}, {"waiting": 1}, {"swapped": 1})
    assert named(make_router("least_requests"), there) == 2


def test_least_tokens_adds_prompts_owed_and_what_is_stored() -> None:
    there = fleet({"owed_tokens": 300}, {"stored_tokens": 299}, {"owed_tokens": 150})
    there.fakes[2].stored_tokens = 151
    assert named(make_router("least_tokens"), there) == 1
    there.fakes[1].stored_tokens = 301
    assert named(make_router("least_tokens"), there) == 0


def test_least_work_is_seconds_of_prompts_and_of_predicted_tokens() -> None:
    router = make_router("least_work")
    # 100 tokens of this prompt: 0.1 s on either; 50 tokens owed: 0.05 s more.
    assert named(router, fleet({"owed_tokens": 50}, {})) == 1
    # 100 tokens, five a step, are 20 steps of 15.1 ms; at the other, 10 of 11.1 ms.
    predicted = {"predicted_tokens": 90.0, "running": 4}
    request = Request("a", 100, predicted_len=10)
    assert named(router, fleet(predicted, {"owed_tokens": 190}), request) == 1
    assert named(router, fleet(predicted, {"owed_tokens": 192}), request) == 0


def test_central_names_none_while_all_slots_are_taken() -> None:
    router = make_router("central", slots=2)
    assert named(router, fleet({"running": 2}, {"running": 1}, {"running": 2})) == 1
    assert named(router, fleet({"running": 2}, {"waiting": 1, "running": 1})) is None
    assert (
        named(make_router("central", slots=9), fleet(*({"running": n} for n in (3, 1, 2, 1)))) == 1
    )
    as_many_as_may_run = make_router("central")
    assert named(as_many_as_may_run, fleet({"running": 4, "max_seqs": 4})) is None
    assert named(as_many_as_may_run, fleet({"running": 4, "max_seqs": 4}, {"running": 9})) == 1


# -- vLLM ------------------------------------------------------------------------------------------


def test_a_waiting_request_counts_four_times_a_running_one() -> None:
    router = make_router("vllm_dp")
    assert named(router, fleet({"waiting": 1}, {"running": 3})) == 1
    assert named(router, fleet({"waiting": 1}, {"running": 5})) == 0
    assert named(router, fleet({"waiting": 1}, {"running": 4})) == 0


def test_vllm_dp_counts_its_own_requests_between_updates() -> None:
    router, there = make_router("vllm_dp"), fleet({}, {"running": 5}, seen_at=0.1)
    assert [named(router, there) for _ in range(4)] == [0, 0, 1, 0]  # 0, 4, 8 against 5, 5, 5, 9
    there.seen_at = 0.2
    assert [named(router, there) for _ in range(3)] == [0, 0, 1]


def test_vllm_dp_keeps_counts_by_role() -> None:
    """What was sent to decode before is seen by now, though prompts came first since."""
    router = make_router("vllm_dp")
    prefill, decode = (fleet({}, {"running": 5}, role=role) for role in ("prefill", "decode"))
    answers = []
    for seen_at, there in ((0.1, decode), (0.1, decode), (0.2, prefill), (0.2, decode)):
        there.seen_at = seen_at
        answers.append(named(router, there))
    assert answers == [0, 0, 0, 0]
    assert [named(router, decode) for _ in range(2)] == [0, 1]


# -- sticky ----------------------------------------------------------------------------------------


def homes(there: Fleet, sessions: int = 400, **settings: Any) -> dict[str, int | str | None]:
    router = make_router("sticky", **settings)
    return {
        f"s{n}": named(router, there, Request("a", 10, client=f"s{n}")) for n in range(sessions)
    }


def test_a_session_stays_and_sessions_are_spread() -> None:
    there = fleet({}, {}, {}, {})
    first = homes(there)
    assert homes(there) == first
    counts = Counter(first.values())
    assert len(counts) == 4 and min(counts.values()) > 60


def test_if_one_dies_its_sessions_alone_move() -> None:
    there = fleet({}, {}, {}, {})
    before = homes(there)
    del there.fakes[2]
    after = homes(there)
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if before[name] == 2
    }
    assert {after[name] for name in before if before[name] == 2} == {0, 1, 3}


def test_where_home_is_crowded_the_fewest_requests_decide() -> None:
    there = fleet({}, {}, {}, {})
    home = homes(there, 1)["s0"]
    assert isinstance(home, int)
    for one in there.fakes:
        one.running = 3
    there.fakes[(home + 1) % 4].running = 2
    there.fakes[home].running = 5  # 6 with this one, of 14 + …: twice the mean is 7
    assert homes(there, 1)["s0"] == home
    there.fakes[home].running = 8  # 9 against twice 17 / 4
    assert homes(there, 1)["s0"] == (home + 1) % 4
    assert homes(there, 1, bound=None)["s0"] == home


# -- Llumnix ---------------------------------------------------------------------------------------


def test_the_freest_has_the_most_blocks_a_request_less_what_is_wanted() -> None:
    router = make_router("llumnix")
    there = fleet(
        {"free_blocks": 100, "running": 9},  # 10
        {"free_blocks": 60, "running": 3, "wanted_blocks": 16},  # 11
        {"free_blocks": 20, "running": 1},  # 10
    )
    assert named(router, there) == 1


def decoding(*lengths: int) -> list[Request]:
    """Requests that decode, with so many tokens each, and one that does not yet."""
    memory = make_memory(blocks=10_000, block_size=16)
    scheduler = make_scheduler(memory=memory, batching="unified", max_batched_tokens=10_000)
    made = [Request(f"of {length}", length - 1) for length in lengths]
    for request in made:
        scheduler.add(request, 0.0, 100)
    scheduler.commit(scheduler.plan(0.0), 0.0)
    assert [one.num_tokens for one in made if one.decoding] == list(lengths)
    return [*made, Request("of 1", 1)]


def moves(there: Fleet, **settings: Any) -> list[tuple[Any, int, int]]:
    found = make_router("llumnix", **settings).migrate(there, 0.0)
    return [(one.request.id, one.source.index, one.target.index) for one in found]


def test_the_crowded_give_their_shortest_to_the_free() -> None:
    there = fleet(
        {"free_blocks": 5, "running": 4, "batch": decoding(90, 30, 60)},  # 1 a request
        {"free_blocks": 500, "running": 4},  # 100
        {"free_blocks": 0, "running": 4, "wanted_blocks": 5, "batch": decoding(200, 100)},  # -1
        {"free_blocks": 900, "running": 4},  # 180
        {"free_blocks": 20, "running": 4},  # 4
    )
    assert moves(there) == [("of 100", 2, 3), ("of 30", 0, 1)]
    assert moves(there, crowded=0.5) == [("of 100", 2, 3)]


def test_no_request_moves_to_a_replica_without_room_or_with_more_load() -> None:
    crowded = {"free_blocks": 8, "running": 3, "batch": decoding(320)}  # 2 a request; 20 blocks
    assert moves(fleet(crowded, {"free_blocks": 19, "running": 0})) == []
    assert moves(fleet(crowded, {"free_blocks": 24, "running": 0})) == []  # 4 / 2 then
    assert moves(fleet(crowded, {"free_blocks": 25, "running": 0})) == [("of 320", 0, 1)]
    assert moves(fleet(crowded, {"free_blocks": 900, "role": "prefill"})) == []


def test_migration_can_be_switched_off() -> None:
    assert make_router("llumnix").migrates_every == 0.05
    assert make_router("llumnix", migration=False).migrates_every is None


# -- Splitwise -------------------------------------------------------------------------------------


def test_the_shortest_queue_of_prompts_and_then_the_mixed_pool() -> None:
    router = make_router("splitwise", prompt_tokens=1000)
    there = fleet(
        {"role": "prefill", "owed_tokens": 900},
        {"role": "prefill", "owed_tokens": 800},
        {"role": "both", "owed_tokens": 850},
        {"role": "both", "owed_tokens": 950},
        role="prefill",
    )
    assert named(router, there, 200) == 1
    there.fakes[1].owed_tokens = 901
    assert named(router, there, 100) == 0
    assert named(router, there, 101) == 2  # the pool's best would owe 1001, the mixed one 951
    there.fakes[2].owed_tokens = 940
    assert named(router, there, 101) == 0  # all would owe more: the best of all


def test_the_most_memory_and_then_the_mixed_pool() -> None:
    router = make_router("splitwise", reserve=0.01)  # 10 blocks
    there = fleet(
        {"role": "decode", "free_blocks": 30, "wanted_blocks": 15},
        {"role": "decode", "free_blocks": 20},
        {"role": "both", "free_blocks": 18},
        role="decode",
    )
    assert named(router, there, 160) == 1
    there.fakes[1].wanted_blocks = 1
    assert named(router, there, 160) == 1  # 19 blocks would leave 9, the mixed one 8: best of all
    there.fakes[2].free_blocks = 20
    assert named(router, there, 160) == 2
