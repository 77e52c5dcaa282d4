"""The rules of routers that go by prefixes, each worked out by hand."""

from __future__ import annotations

from collections import Counter
from math import exp

import pytest

from pagedsim.build import make_router
from pagedsim.core import Request
from pagedsim.policies.routing.prefixes import BLOCK, Sent
from pagedsim.policies.routing.router import Refusal
from tests.policies.routing.fakes import Fake, Fleet, fleet, named, prompts


def ask(*starts: tuple[int, int]) -> Request:
    return Request("a", prompts(*starts))


# -- what was sent ---------------------------------------------------------------------------------


def test_the_stalest_are_forgotten_where_memory_ends_tails_first() -> None:
    sent, there = Sent(), fleet({"total_blocks": 4 * BLOCK, "block_size": 1})
    sent.sent(ask((0, 3 * BLOCK)), there[0])
    assert sent.overflow(there[0], 1) == 0 and sent.overflow(there[0], 3) == 2
    sent.sent(ask((5000, 2 * BLOCK)), there[0])
    assert sent.tokens(ask((0, 3 * BLOCK)), there) == [2 * BLOCK]
    sent.sent(ask((0, BLOCK)), there[0])  # its beginning is fresh again
    sent.sent(ask((7000, BLOCK)), there[0])
    assert sent.tokens(ask((0, 3 * BLOCK)), there) == [BLOCK]
    assert sent.tokens(ask((5000, 2 * BLOCK)), there) == [2 * BLOCK]


def test_a_replica_that_comes_back_has_forgotten_everything() -> None:
    sent, there = Sent(), fleet({}, {})
    request = ask((0, 2 * BLOCK))
    for one in there:
        sent.sent(request, one)
    without = Fleet(there.fakes[:1])
    assert sent.tokens(request, without) == [2 * BLOCK]
    assert sent.tokens(request, there) == [2 * BLOCK, 0]


def test_what_was_sent_to_prefill_is_remembered_after_a_question_about_decode() -> None:
    sent, there = Sent(), fleet({"role": "prefill"}, {"role": "decode"})
    prefill, decode = (Fleet([there.fakes[at]], others=[there.fakes[1 - at]]) for at in (0, 1))
    request = ask((0, 2 * BLOCK))
    sent.sent(request, prefill[0])
    assert sent.tokens(request, decode) == [0]
    assert sent.tokens(request, prefill) == [2 * BLOCK]


# -- SGLang ----------------------------------------------------------------------------------------


def test_the_longest_prefix_decides_if_it_is_long_enough() -> None:
    router, there = make_router("prefix_aware"), fleet({}, {}, {})
    assert named(router, there, ask((0, 10 * BLOCK))) == 0
    assert named(router, there, ask((5000, 2 * BLOCK))) == 1  # nothing was sent there
    assert named(router, there, ask((0, 4 * BLOCK), (9000, 6 * BLOCK))) == 0  # 0.4
    assert named(router, there, ask((0, 3 * BLOCK), (8000, 7 * BLOCK))) == 2  # 0.3, and empty
    assert named(router, there, ask((6000, 4 * BLOCK))) == 1  # 16, 2 and 10 blocks


def test_far_apart_loads_are_evened_out_and_the_prefix_goes_along() -> None:
    router, there = make_router("prefix_aware"), fleet({}, {})
    request = ask((0, 4 * BLOCK))
    assert named(router, there, request) == 0
    there.fakes[0].running, there.fakes[1].running = 200, 140
    assert named(router, there, request) == 0  # 60 apart
    there.fakes[1].running = 135
    assert named(router, there, request) == 0  # 65, but no more than 1.5 times
    there.fakes[1].running = 133
    assert named(router, there, request) == 1
    there.fakes[1].running = 200
    assert named(router, there, ask((0, 4 * BLOCK), (7000, BLOCK))) == 0  # both have it: the first
    there.fakes[0].running, there.fakes[1].running = 64, 0
    assert named(router, there, ask((0, 4 * BLOCK), (8000, BLOCK))) == 0  # 64 are not more than 64
    there.fakes[0].running = 65
    assert named(router, there, ask((0, 4 * BLOCK), (9000, BLOCK))) == 1


def test_by_what_caches_hold_the_rest_goes_by_free_memory() -> None:
    router = make_router("prefix_aware", known="cached")
    there = fleet({"cached": 32}, {"cached": 48}, {"free_blocks": 2000, "wanted_blocks": 999})
    assert named(router, there, ask((0, 150))) == 1
    assert named(router, there, ask((0, 160))) == 2  # 48 are 0.3 of it
    assert named(router, there, ask((0, 161))) == 2
    there.fakes[2].wanted_blocks = 1001
    assert named(router, there, ask((0, 161))) == 0


def test_a_decode_replica_is_chosen_without_the_prefix() -> None:
    there = fleet({"cached": 1000, "running": 1}, {}, role="decode")
    assert named(make_router("prefix_aware", known="cached"), there, ask((0, 500))) == 1
    there = fleet({"cached": 1000, "free_blocks": 999}, {}, role="decode")
    assert named(make_router("llm_d", known="cached"), there, ask((0, 500))) == 1
    there = fleet({"running": 1}, {}, role="decode")
    router = make_router("preble")
    assert [named(router, there, ask((0, 500))) for _ in range(2)] == [1, 1]


# -- llm-d -----------------------------------------------------------------------------------------


def test_scores_are_weighted_and_added() -> None:
    there = fleet(
        {"waiting": 4, "free_blocks": 900, "cached": 64},
        {"waiting": 2, "free_blocks": 500, "cached": 32},
        {"waiting": 0, "free_blocks": 200},
    )
    request = ask((0, 128))
    router = make_router("llm_d", known="cached")
    scores = router._scores(request, there, there.cached_tokens(request))  # type: ignore[attr-defined]
    assert scores == pytest.approx([0 + 1.8 + 1.5, 1 + 1 + 0.75, 2 + 0.4 + 0])
    assert named(router, there, request) == 0
    assert named(make_router("llm_d", prefix=0), there, request) == 2  # 1.8, 2, 2.4


@pytest.mark.parametrize(("host", "chosen"), [(0.8, 1), (0.5, 0), (0.0, 0)])
def test_a_hit_in_host_memory_counts_less(host: float, chosen: int) -> None:
    there = fleet({"cached": 300}, {"cached": 100, "on_host": 300})  # 300, 100 + host * 300
    router = make_router("llm_d", known="cached", host=host)
    assert named(router, there, ask((0, 500))) == chosen


def test_among_equals_any_is_chosen() -> None:
    router, there = make_router("llm_d"), fleet({"free_blocks": 10}, {}, {})
    counts = Counter(named(router, there, ask((1000 * n, 99))) for n in range(400))
    assert set(counts) == {1, 2} and min(counts.values()) > 150


# -- Dynamo and LMetric ----------------------------------------------------------------------------


def test_the_cost_is_blocks_to_compute_and_to_decode_with() -> None:
    there = fleet(
        {"owed_tokens": 160, "cached": 160, "free_blocks": 980},  # 10 + 20 - 10, 20 + 20
        {"owed_tokens": 0, "free_blocks": 985},  # 20, 15 + 20
        {"owed_tokens": 0, "free_blocks": 990, "wanted_blocks": 4},  # 20, 14 + 20
    )
    assert named(make_router("dynamo"), there, ask((0, 320))) == 2  # 60, 55, 54
    assert named(make_router("dynamo", overlap=2), there, ask((0, 320))) == 0  # 50
    assert named(make_router("dynamo", overlap=0), there, ask((0, 320))) == 2  # 70
    there.fakes[0].cached = 240
    assert named(make_router("dynamo"), there, ask((0, 320))) == 2  # 55
    assert named(make_router("dynamo", prefill=2), there, ask((0, 320))) == 0  # 70, 75, 74
    there.role = "decode"
    assert named(make_router("dynamo", prefill=2), there, ask((0, 320))) == 2


def test_a_temperature_draws_by_the_cost() -> None:
    there = fleet({"free_blocks": 990}, {"free_blocks": 980}, {"free_blocks": 970})
    router = make_router("dynamo", temperature=0.5)
    counts = Counter(named(router, there) for _ in range(4000))
    weights = [1.0, exp(-1), exp(-2)]
    for at, weight in enumerate(weights):
        assert counts[at] == pytest.approx(4000 * weight / sum(weights), abs=130)


def test_the_product_of_what_is_to_be_computed_and_of_load() -> None:
    there = fleet(
        {"cached": 160, "free_blocks": 959, "running": 9},  # 160 × (41 + 20 + 1), or 160 × 10
        {"free_blocks": 991, "running": 5},  # 320 × (9 + 20 + 1), or 320 × 6
    )
    assert named(make_router("lmetric"), there, ask((0, 320))) == 1  # 9920 against 9600
    assert named(make_router("lmetric", load="requests"), there, ask((0, 320))) == 0
    there.fakes[0].free_blocks = 962
    assert named(make_router("lmetric"), there, ask((0, 320))) == 0  # 9440
    there.role = "decode"
    assert named(make_router("lmetric"), there, ask((0, 320))) == 1


# -- Preble ----------------------------------------------------------------------------------------


def test_it_exploits_what_is_more_than_half_and_else_explores() -> None:
    router, there = make_router("preble"), fleet({}, {})
    assert named(router, there, ask((0, 4 * BLOCK))) == 0
    assert named(router, there, ask((0, 3 * BLOCK), (7000, 2 * BLOCK))) == 0  # 3 of 5
    assert named(router, there, ask((0, 2 * BLOCK), (8000, 2 * BLOCK))) == 1  # half: by load


def test_load_is_that_of_the_window() -> None:
    router, there = make_router("preble", window=10, output=1), fleet({}, {})
    assert named(router, there, ask((0, 500)), now=0) == 0
    assert named(router, there, ask((1000, 100)), now=1) == 1
    assert named(router, there, ask((2000, 100)), now=2) == 1
    assert named(router, there, ask((3000, 100)), now=10.5) == 0  # the first has passed


def test_what_would_be_forgotten_costs() -> None:
    router = make_router("preble", output=1, window=1)
    small = {"total_blocks": 4 * BLOCK, "block_size": 1, "free_blocks": 4 * BLOCK}
    there = fleet(small, {"speed": 0.9})
    assert named(router, there, ask((0, 4 * BLOCK)), now=0) == 0
    # 64 tokens: 0.064 s and as much again for those forgotten, against 0.071 s.
    assert named(router, there, ask((5000, BLOCK)), now=9) == 1


def test_preble_moves_a_prefix_off_the_most_loaded_replica() -> None:
    router, there = make_router("preble"), fleet({}, {})
    prefix = (0, 8 * BLOCK)
    found = [named(router, there, ask(prefix, (n * 100 + 9000, 9))) for n in range(102)]
    assert found[:100] == [0] * 100
    assert found[100:] == [1, 1]


# -- Mooncake --------------------------------------------------------------------------------------


def test_the_soonest_first_token() -> None:
    router = make_router("conductor")
    there = fleet({"owed_tokens": 300, "cached": 256}, {"owed_tokens": 50}, {"owed_tokens": 100})
    assert named(router, there, 400) == 0  # 0.444, 0.45, 0.5 s
    there.fakes[0].owed_tokens = 310
    assert named(router, there, 400) == 1


def test_a_first_token_that_would_be_late_is_refused() -> None:
    there = fleet({"owed_tokens": 1000}, {"owed_tokens": 800})
    assert named(make_router("conductor", ttft=1.3), there, 400) == 1
    answer = make_router("conductor", ttft=1.1).route(Request("a", 400), there, 0.0)
    assert answer == Refusal("its first token would take 1.2 s: more than 1.1 s")


def batch(*first_tokens: float | None) -> list[Request]:
    made = [Request(n, 10) for n in range(len(first_tokens))]
    for request, at in zip(made, first_tokens, strict=True):
        request._first_token_at = at
    return made


def apart(role: str) -> Fleet:
    """One that prefills, with two requests, and one whose three requests began to decode."""
    there = [Fake(0, role="prefill", running=2, owed_tokens=1000)]
    decode = [Fake(1, role="decode", running=3, batch=batch(0.0, 5.0, 8.0))]
    if role == "prefill":
        return Fleet(there, role="prefill", others=decode)
    return Fleet(decode, role="decode", others=there)


@pytest.mark.parametrize(
    ("refuse", "tbt", "on_arrival", "later"),
    [
        ("late", 0.0141, 0, 1),  # 10 ms and 1 a sequence: 4 with this one, of 100 tokens
        ("late", 0.0140, 0, "Refusal"),
        ("now", 0.0140, 0, 1),  # 3 now, and this one
        ("now", 0.0139, "Refusal", 1),
        # In 1.1 s, at 9.1 s, the one that began at 0 has left after 7 s; 2 more come, and this one.
        ("predicted", 0.0150, 0, 1),
        ("predicted", 0.0149, "Refusal", 1),
    ],
)
def test_conductor_refuses_slow_answers_by_its_refuse_setting(
    refuse: str, tbt: float, on_arrival: int | str, later: int | str
) -> None:
    router = make_router("conductor", tbt=tbt, refuse=refuse, stay=7.0)
    assert named(router, apart("prefill"), 100, now=8.0) == on_arrival
    assert named(router, apart("decode"), 100, now=9.0) == later


@pytest.mark.parametrize(
    ("decoders", "milliseconds"),
    [
        ([{}], 11.1),  # nothing decodes: it, of 100 tokens
        ([{"running": 3}, {}], 12),  # 4 are two each
        ([{"running": 3}, {"speed": 0.5}], 24),
        ([{"running": 3, "stored_tokens": 3000}], 18),  # 4 of a thousand tokens
    ],
)
def test_sequences_and_their_tokens_are_spread_evenly_and_the_slowest_counts(
    decoders: list[dict[str, float]], milliseconds: float
) -> None:
    decode = [
        Fake(number, role="decode", **numbers)  # type: ignore[arg-type]
        for number, numbers in enumerate(decoders, 1)
    ]
    there = Fleet([Fake(0, role="prefill")], role="prefill", others=decode)
    for tbt, answer in ((milliseconds + 0.01, 0), (milliseconds - 0.01, "Refusal")):
        assert named(make_router("conductor", tbt=tbt * 1e-3, refuse="now"), there) == answer


def test_the_fastest_decodes() -> None:
    there = fleet({"running": 5}, {"running": 4, "waiting": 2}, {"running": 4}, role="decode")
    assert named(make_router("conductor"), there) == 2
    there.fakes[2].stored_tokens = 2000
    assert named(make_router("conductor"), there) == 0
