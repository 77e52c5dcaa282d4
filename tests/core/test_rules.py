"""The rules of the batchings, each on a small input with its exact steps.

`prefill_first` decides as vLLM 0.6.6 does and `unified` as vLLM 0.33 does: their rules have the
numbers of the reference, and the recordings and oracles of `tests/conformance` decide all of them.
What follows is beyond vLLM: priorities with swap, `max_wait_tokens`, static batches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pagedsim.core import PrefillFirst, Request
from policies.ordering import Priority
from tests.core.drive import Server, Step, names, spans


class Arrival(NamedTuple):
    name: str
    prompt: int | Sequence[int]
    knows: dict[str, Any]


def r(name: str, prompt: int | Sequence[int], output: int | None = None, **knows: Any) -> Arrival:
    """A request that ends after `output` tokens, or not within the case."""
    return Arrival(name, prompt, {"output": output, **knows})


class Rule(NamedTuple):
    """A server, the requests that arrive before each step, what the steps do, and the queues."""

    name: str
    server: dict[str, Any]
    arrivals: dict[int, list[Arrival]]
    steps: list[Step]
    queues: dict[str, list[str]] | None = None


ONE = {"batching": "unified"}
SWAP = {"preemption": "swap"}
URGENT = {"policy": "priority"}
CACHE = {"batching": "unified", "cache": True}

V0 = [
    Rule(
        "1: a request is in one of three queues",
        {"blocks": 4, "cpu_blocks": 2, **SWAP},
        {0: [r("a", 6), r("b", 6), r("c", 6)]},
        [{"prefill": {"a": 6, "b": 6}}, {"decode": ["a"], "preempted": ["b"], "swap_out": 2}],
        {"running": ["a"], "waiting": ["c"], "swapped": ["b"]},
    ),
    Rule(
        "2: running sequences take seats before any prefill",
        {"max_seqs": 3},
        {0: [r("a", 4), r("b", 4)], 1: [r("c", 4), r("d", 4)]},
        [{"prefill": {"a": 4, "b": 4}}, {"prefill": {"c": 4}}, {"decode": ["a", "b", "c"]}],
        {"running": ["a", "b", "c"], "waiting": ["d"]},
    ),
    Rule(
        "3: a step is all prefill or all decode",
        {},
        {0: [r("a", 6)], 1: [r("b", 6)]},
        [{"prefill": {"a": 6}}, {"prefill": {"b": 6}}, {"decode": ["a", "b"]}],
    ),
    Rule(
        "4: no prefill while any request is swapped, although it would fit",
        {"blocks": 5, "cpu_blocks": 3, **SWAP},
        {0: [r("a", 6), r("b", 10)], 2: [r("c", 4)]},
        [
            {"prefill": {"a": 6, "b": 10}},
            {"decode": ["a"], "preempted": ["b"], "swap_out": 3},
            {"decode": ["a", "b"], "resumed": ["b"], "swap_in": 3},
        ],
        {"running": ["a", "b"], "waiting": ["c"]},
    ),
    Rule(
        "5: the first that lacks blocks ends the scan, although c would fit",
        {"blocks": 4},
        {0: [r("a", 12), r("b", 8), r("c", 4)]},
        [{"prefill": {"a": 12}}],
        {"running": ["a"], "waiting": ["b", "c"]},
    ),
    Rule(
        "6: no partial prompts",
        {"budget": 10, "max_model_len": 10},
        {0: [r("a", 6), r("b", 6), r("c", 2)]},
        [{"prefill": {"a": 6}}, {"prefill": {"b": 6, "c": 2}}, {"decode": ["a", "b", "c"]}],
    ),
    Rule(
        "7: a prompt that is too long is ignored and the scan goes on",
        {"max_model_len": 10},
        {0: [r("a", 11), r("b", 10)]},
        [{"rejected": ["a"], "prefill": {"b": 10}, "finished": ["b"]}],
    ),
    Rule(
        "8: what can never leave the watermark of 1 in 100 blocks free is ignored",
        {"blocks": 100, "watermark": 0.01},
        {0: [r("a", 398), r("b", 396)]},
        [{"rejected": ["a"], "prefill": {"b": 396}}],
    ),
    Rule(
        "8: what does not leave the watermark free now waits",
        {"blocks": 100, "watermark": 0.01},
        {0: [r("a", 198)], 1: [r("b", 200)]},
        [{"prefill": {"a": 198}}, {"decode": ["a"]}],
    ),
    Rule(
        "9: a decode may take the watermark",
        {"blocks": 100, "watermark": 0.01},
        {0: [r("a", 396)]},
        [{"prefill": {"a": 396}}, {"decode": ["a"]}],
    ),
    Rule(
        "10 and 12: a free block is wanted where the last has room; recomputed in one step",
        {"blocks": 4},
        {0: [r("a", 6, 3), r("b", 6)]},
        [
            {"prefill": {"a": 6, "b": 6}},
            {"decode": ["a"], "preempted": ["b"]},
            {"prefill": {"b": 7}},
        ],
    ),
    Rule(
        "13 and 15: the last yield, the needy one at the end, and lead the queue by age",
        {"blocks": 3},
        {0: [r("a", 4), r("b", 4), r("c", 4)], 1: [r("d", 4)]},
        [{"prefill": {"a": 4, "b": 4, "c": 4}}, {"decode": ["a"], "preempted": ["c", "b"]}],
        {"running": ["a"], "waiting": ["b", "c", "d"]},
    ),
    Rule(
        "13 and 16: a lone request preempts itself; prefill and preemption can alternate",
        {"blocks": 3},
        {0: [r("a", 9)]},
        [
            {"prefill": {"a": 9}},
            {"preempted": ["a"]},
            {"prefill": {"a": 10}},
            {"preempted": ["a"]},
        ],
    ),
    Rule(
        "17: swapped requests come back in the order in which they left",
        {"blocks": 3, "cpu_blocks": 3, **SWAP},
        {0: [r("a", 4, 2), r("b", 4), r("c", 4)]},
        [
            {"prefill": {"a": 4, "b": 4, "c": 4}},
            {"decode": ["a"], "preempted": ["c", "b"], "swap_out": 2, "finished": ["a"]},
            {"decode": ["c"], "resumed": ["c"], "swap_in": 1},
        ],
        {"running": ["c"], "swapped": ["b"]},
    ),
    Rule(
        "18: a swapped request decodes in the step that brings it back, as the last",
        {"blocks": 6, "cpu_blocks": 2, **SWAP},
        {0: [r("a", 6), r("b", 6, 3), r("c", 6)]},
        [
            {"prefill": {"a": 6, "b": 6, "c": 6}},
            {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 2},
            {"decode": ["a", "b", "c"], "resumed": ["c"], "swap_in": 2, "finished": ["b"]},
        ],
        {"running": ["a", "c"]},
    ),
    Rule(
        "19: swap-out and swap-in never share a step",
        {"blocks": 6, "cpu_blocks": 6, **SWAP},
        {0: [r("a", 4), r("b", 11), r("c", 4)]},
        [
            {"prefill": {"a": 4, "b": 11, "c": 4}},
            {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 1},
            {"decode": ["a", "b"]},
            {"decode": ["a"], "preempted": ["b"], "swap_out": 4},
            {"decode": ["a", "c"], "resumed": ["c"], "swap_in": 1},
        ],
    ),
    Rule(
        "21: an urgent request displaces the least urgent and runs a step later",
        {"max_seqs": 2, **URGENT},
        {0: [r("a", 6, priority=5), r("b", 6, priority=7)], 1: [r("c", 6, priority=1)]},
        [
            {"prefill": {"a": 6, "b": 6}},
            {"displaced": ["b"], "decode": ["a"]},
            {"prefill": {"c": 6}},
            {"decode": ["c", "a"]},
        ],
        {"running": ["c", "a"], "waiting": ["b"]},
    ),
    Rule(
        "21: waiting is not sorted before the prefill scan",
        {"max_seqs": 1, **URGENT},
        {0: [r("a", 4, priority=5), r("b", 4, priority=1)]},
        [{"prefill": {"a": 4}}, {"displaced": ["a"]}, {"prefill": {"b": 4}}],
    ),
]

V1 = [
    Rule(
        "1: one budget for prompts, chunks and decodes, dealt out in order",
        {"budget": 10, **ONE},
        {0: [r("a", 6), r("b", 6), r("c", 20)]},
        [
            {"prefill": {"a": 6, "b": 4}},
            {"prefill": {"b": 2, "c": 7}, "decode": ["a"]},
            {"prefill": {"c": 8}, "decode": ["a", "b"]},
            {"prefill": {"c": 5}, "decode": ["a", "b"]},
            {"decode": ["a", "b", "c"]},
        ],
    ),
    Rule(
        "2: what the budget does not reach is held",
        {"budget": 4, **ONE},
        {0: [r("a", 2, 3, n=3), r("b", 2, n=3)]},
        [
            {"prefill": {"a": 2, "b": 2}},
            {"decode": ["a"], "held": ["b"], "copies": 2},
            {"decode": ["a"], "held": ["b"], "finished": ["a"]},
            {"decode": ["b"], "copies": 2},
        ],
    ),
    Rule(
        "2: a step that preempts admits none",
        {"blocks": 4, **ONE},
        {0: [r("a", 8), r("b", 8)], 1: [r("c", 4)]},
        [{"prefill": {"a": 8, "b": 8}}, {"decode": ["a"], "preempted": ["b"]}],
        {"running": ["a"], "waiting": ["b", "c"]},
    ),
    Rule(
        "3: need is exact: two go on until one really needs a block",
        {"blocks": 4, **ONE},
        {0: [r("a", 6), r("b", 6)]},
        [
            {"prefill": {"a": 6, "b": 6}},
            {"decode": ["a", "b"]},
            {"decode": ["a", "b"]},
            {"decode": ["a"], "preempted": ["b"]},
        ],
    ),
    Rule(
        "4: the last of running yields, leads the waiting queue and starts from nothing",
        {"blocks": 4, **ONE},
        {0: [r("a", 8, 2), r("b", 8)], 1: [r("c", 8)]},
        [
            {"prefill": {"a": 8, "b": 8}},
            {"decode": ["a"], "preempted": ["b"], "finished": ["a"]},
            {"prefill": {"b": 9}},
        ],
        {"running": ["b"], "waiting": ["c"]},
    ),
    Rule(
        "5: the least urgent yields wherever it runs",
        {"blocks": 6, **ONE, **URGENT},
        {0: [r("a", 6, priority=9)], 1: [r("b", 8, priority=1), r("c", 8, priority=1)]},
        [
            {"prefill": {"a": 6}},
            {"prefill": {"b": 8, "c": 8}, "decode": ["a"]},
            {"decode": ["b", "c"], "preempted": ["a"]},
        ],
    ),
    Rule(
        "5: tokens already scheduled for the victim return to the budget",
        {"blocks": 3, "block_size": 8, "budget": 3, **ONE, **URGENT},
        {0: [r("a", 1, priority=9)], 1: [r("b", 6, priority=1), r("c", 8, priority=2)]},
        [
            {"prefill": {"a": 1}},
            *[{"prefill": {"b": 2}, "decode": ["a"]}] * 3,
            *[{"prefill": {"c": 1}, "decode": ["a", "b"]}] * 2,
            {"prefill": {"c": 2}, "decode": ["b"], "preempted": ["a"]},
        ],
    ),
    Rule(
        "6: all blocks of a prompt must be free, though a chunk takes few",
        {"blocks": 4, "budget": 12, **ONE},
        {0: [r("a", 10), r("b", 8)]},
        [{"prefill": {"a": 10}}],
    ),
    Rule(
        "8: a hit is capped so that one token is computed",
        CACHE,
        {0: [r("a", range(8), 1)], 1: [r("b", range(8))]},
        [{"prefill": {"a": 8}, "finished": ["a"]}, {"prefill": {"b": 4}, "hits": {"b": 4}}],
    ),
    Rule(
        "8: a chain of full blocks is hit as far as it agrees",
        CACHE,
        {
            0: [r("a", [*range(12), 99], 1)],
            1: [r("b", [*range(8), 50, 9, 10, 11, 99]), r("c", [50, 1, 2, 3, *range(4, 13)])],
        },
        [
            {"prefill": {"a": 13}, "finished": ["a"]},
            {"prefill": {"b": 5, "c": 13}, "hits": {"b": 8}},
        ],
    ),
    Rule(
        "8: blocks are registered when the step that fills them is planned",
        CACHE,
        {0: [r("a", range(9)), r("b", range(9))]},
        [{"prefill": {"a": 9, "b": 1}, "hits": {"b": 8}}],
    ),
    Rule(
        "10: with caching a preempted request resumes almost for free",
        {"blocks": 6, **CACHE},
        {0: [r("a", range(12), 2), r("b", range(20, 29))]},
        [
            {"prefill": {"a": 12, "b": 9}},
            {"decode": ["a"], "preempted": ["b"], "finished": ["a"]},
            {"prefill": {"b": 2}},
        ],
    ),
]

BEYOND = [
    *(
        Rule(
            f"{batching}: the most urgent of the swapped comes back first",
            {"blocks": 4, "cpu_blocks": 2, "batching": batching, **URGENT, **SWAP},
            {
                0: [
                    r("a", 8, 2, priority=1, n=2),
                    r("b", 4, priority=2),
                    r("c", 4, priority=3),
                ]
            },
            [
                {"prefill": {"a": 8, "b": 4, "c": 4}},
                {"decode": ["a"], "preempted": ["c", "b"], "swap_out": 2, "finished": ["a"]},
                {"decode": ["b", "c"], "resumed": ["b", "c"], "swap_in": 2},
            ],
        )
        for batching in ("prefill_first", "unified")
    ),
    *(
        Rule(
            f"{batching}: a swapped request holds back all that are less urgent",
            {"blocks": 8, "cpu_blocks": 2, "batching": batching, **URGENT, **SWAP},
            {
                0: [r("a", 8, priority=1), r("b", 8, priority=3), r("c", 8, priority=2)],
                2: [r("more", 3, priority=2), r("less", 1, priority=9)],
            },
            [
                {"prefill": {"a": 8, "b": 8, "c": 8}},
                {"decode": ["a", "c"], "preempted": ["b"], "swap_out": 2},
                {"prefill": {"more": 3}, **beside},
            ],
        )
        for batching, beside in (("prefill_first", {}), ("unified", {"decode": ["a", "c"]}))
    ),
    Rule(
        "an urgent newcomer goes before a swapped request",
        {"blocks": 5, "cpu_blocks": 3, "policy": Priority(displace=False), **SWAP},
        {0: [r("a", 6, priority=1), r("b", 10, priority=5)], 2: [r("u", 4, priority=2)]},
        [
            {"prefill": {"a": 6, "b": 10}},
            {"decode": ["a"], "preempted": ["b"], "swap_out": 3},
            {"prefill": {"u": 4}},
        ],
    ),
    Rule(
        "a displaced request is swapped and comes back without recomputing",
        {"cpu_blocks": 4, "max_seqs": 1, **URGENT, **SWAP},
        {0: [r("a", 6, 4, priority=5)], 2: [r("u", 6, 2, priority=1)]},
        [
            {"prefill": {"a": 6}},
            {"decode": ["a"]},
            {"displaced": ["a"], "swap_out": 2},
            {"prefill": {"u": 6}},
            {"decode": ["u"], "finished": ["u"]},
            {"decode": ["a"], "resumed": ["a"], "swap_in": 2},
        ],
    ),
    Rule(
        "max_wait_tokens: no admission for so many decodes, then in each step until one comes",
        {"batching": PrefillFirst(0.0, max_wait_tokens=2)},
        {0: [r("a", 4), r("b", 4)], 1: [r("c", 4)], 7: [r("d", 4)]},
        [
            {"prefill": {"a": 4, "b": 4}},
            *[{"decode": ["a", "b"]}] * 2,
            {"prefill": {"c": 4}},
            *[{"decode": ["a", "b", "c"]}] * 3,
            {"prefill": {"d": 4}},
        ],
    ),
    Rule(
        "max_wait_tokens: at the end of the batch no request waits",
        {"batching": PrefillFirst(0.0, max_wait_tokens=9)},
        {0: [r("a", 4, 2)], 1: [r("b", 4)]},
        [{"prefill": {"a": 4}}, {"decode": ["a"], "finished": ["a"]}, {"prefill": {"b": 4}}],
    ),
    Rule(
        "max_wait_tokens: a request that displaces others does not wait",
        {
            "batching": PrefillFirst(0.0, max_wait_tokens=9),
            "policy": Priority(displace=True),
            "max_seqs": 2,
        },
        {0: [r("a", 4, priority=5), r("b", 4, priority=5)], 1: [r("u", 4, priority=1)]},
        [
            {"prefill": {"a": 4, "b": 4}},
            {"decode": ["a"], "displaced": ["b"]},
            {"prefill": {"u": 4}},
        ],
    ),
    Rule(
        "unified swaps a prompt in the middle and goes on where it was",
        {"blocks": 5, "cpu_blocks": 5, "budget": 9, **ONE, **SWAP},
        {0: [r("a", 8, 3), r("b", 12)]},
        [
            {"prefill": {"a": 8, "b": 1}},
            {"decode": ["a"], "preempted": ["b"], "swap_out": 1},
            {"decode": ["a"], "finished": ["a"]},
            {"prefill": {"b": 9}, "resumed": ["b"], "swap_in": 1},
            {"prefill": {"b": 2}},
        ],
    ),
    *(
        Rule(
            f"{batching}: a full CPU pool falls back to recompute",
            {"blocks": 4, "cpu_blocks": 1, "batching": batching, **SWAP},
            {0: [r("a", 8, n=2), r("b", 4), r("c", 4)]},
            [
                {"prefill": {"a": 8, "b": 4, "c": 4}},
                {"decode": ["a"], "preempted": ["c", "b"], "swap_out": 1},
            ],
            {"running": ["a"], "swapped": ["c"], "waiting": ["b"]},
        )
        for batching in ("prefill_first", "unified")
    ),
    Rule(
        "no request is displaced for one that is then rejected",
        {"policy": Priority(displace=True), **ONE},
        {0: [r("a", 4, priority=5)], 1: [r("u", 4000, priority=1)]},
        [{"prefill": {"a": 4}}, {"decode": ["a"], "rejected": ["u"]}],
    ),
    Rule(
        "a static batch is formed over as many steps as its prompts take, until one has left",
        {"batching": "static", "max_seqs": 4, "budget": 16, "max_model_len": 16},
        {0: [r("a", 12, 3), r("b", 12, 2), r("c", 12, 1), r("d", 12, 1)]},
        [
            {"prefill": {"a": 12}},
            {"prefill": {"b": 12}},
            {"prefill": {"c": 12}, "finished": ["c"]},
            {"decode": ["a", "b"], "finished": ["b"]},
            {"decode": ["a"], "finished": ["a"]},
            {"prefill": {"d": 12}, "finished": ["d"]},
        ],
    ),
    *(
        Rule(
            f"{preemption}: a request that loses its place in a static batch leads the next",
            {"blocks": 4, "cpu_blocks": 4, "batching": "static", "preemption": preemption},
            {0: [r("a", 6, 3), r("b", 6, 2), r("c", 4, 1)]},
            [
                {"prefill": {"a": 6, "b": 6}},
                {"decode": ["a"], "preempted": ["b"], **out},
                {"decode": ["a"], "finished": ["a"]},
                then,
            ],
        )
        for preemption, out, then in (
            ("recompute", {}, {"prefill": {"b": 7, "c": 4}, "finished": ["b", "c"]}),
            (
                "swap",
                {"swap_out": 2},
                {"decode": ["b"], "resumed": ["b"], "swap_in": 2, "finished": ["b"]},
            ),
        )
    ),
    Rule(
        "a group takes a seat and a decode of the budget for each sequence",
        {"max_seqs": 4, "budget": 8, **ONE},
        {0: [r("a", 8, n=3)], 1: [r("b", 20), r("c", 1)]},
        [{"prefill": {"a": 8}}, {"decode": ["a"], "prefill": {"b": 5}}],
        {"running": ["a", "b"], "waiting": ["c"]},
    ),
]

RULES = [
    pytest.param(rule, id=f"{origin}{rule.name}")
    for origin, rules in (("vLLM 0.6.6, ", V0), ("vLLM 0.33, ", V1), ("", BEYOND))
    for rule in rules
]


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: Rule) -> None:
    server = Server(**rule.server)
    for step, wanted in enumerate(rule.steps):
        for name, prompt, knows in rule.arrivals.get(step, ()):
            server.add(name, prompt, **knows)
        assert server.step() == wanted, f"step {step}"
    assert rule.queues is None or server.queues == rule.queues


def test_a_step_that_sorts_newcomers_is_not_quiet() -> None:
    """The one in front did not fit; the next step looks at another."""
    server = Server(5, policy="priority")
    server.add("a", 4, priority=0)
    server.step()
    server.add("x", 17, priority=9)
    server.add("u", 4, priority=5)
    plan = server.plan()
    assert (names(plan.decodes), server.waiting) == (["a"], ["u", "x"])
    assert server.scheduler.uneventful(plan) == 0
    server.commit(plan)
    assert server.step() == {"prefill": {"u": 4}}


def test_chunks_join_and_only_the_last_samples() -> None:
    """20 tokens under a budget of 8 are positions 0-8, 8-16 and 16-20."""
    server = Server(batching="unified", budget=8)
    a = server.add("a", 20, output=1)
    seen = []
    for _ in range(3):
        assert a.generated == 0
        plan = server.plan()
        seen += spans(plan.chunks)
        server.commit(plan)
    assert seen == [("a", 0, 0, 8, False), ("a", 0, 8, 16, False), ("a", 0, 16, 20, True)]
    assert a.generated == 1


def test_the_free_list_is_the_eviction_order() -> None:
    """blocks without a hash go to the front, hashed ones tail first to the back."""
    server = Server(6, batching="unified", cache=True)
    a = server.add("a", range(9), output=1)
    plan = server.plan()
    assert a.tables == [[0, 1, 2]]  # the third is partial, so it has no hash
    server.commit(plan)  # free: 2, then 3 4 5 as they were, then a's tail 1 and its head 0
    b = server.add("b", range(100, 116))
    c = server.add("c", range(200, 203))
    server.step()
    assert (b.tables, c.tables) == ([[2, 3, 4, 5]], [[1]])


def test_a_token_counts_when_it_is_committed() -> None:
    """planning takes the memory for a chunk; the sampled token comes with the commit."""
    server = Server(batching="unified")
    a: Request = server.add("a", 6)
    plan = server.plan()
    assert (a.num_tokens, server.free) == (6, 98)
    server.commit(plan)
    assert (a.num_tokens, names(server.scheduler.queues.decoding())) == (7, ["a"])


@pytest.mark.parametrize(
    ("batching", "displace", "displaces"),
    [
        ("prefill_first", None, True),  # as vLLM 0.6.6
        ("prefill_first", True, True),
        ("prefill_first", False, False),
        ("unified", None, False),  # as vLLM 0.33
        ("unified", True, True),
        ("unified", False, False),
        ("static", None, False),
        ("static", False, False),
    ],
)
def test_whether_an_urgent_request_pushes_out_a_running_one(
    batching: str, displace: bool | None, displaces: bool
) -> None:
    server = Server(batching=batching, policy=Priority(displace), max_seqs=1)
    server.add("a", 4, priority=5)
    server.step()
    server.add("u", 4, priority=1)
    if displaces:
        assert server.steps(2) == [{"displaced": ["a"]}, {"prefill": {"u": 4}}]
        assert server.queues == {"running": ["u"], "waiting": ["a"]}
    else:
        assert server.steps(2) == [{"decode": ["a"]}, {"decode": ["a"]}]
        assert server.queues == {"running": ["a"], "waiting": ["u"]}
