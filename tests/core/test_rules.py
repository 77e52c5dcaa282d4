"""Rules of the batchings beyond vLLM, each on a small input with its exact steps.

What `prefill_first` and `unified` share with vLLM is decided by `tests/conformance`; here are
priorities with swap, `max_wait_tokens` and static batches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pagedsim.core import PrefillFirst
from pagedsim.policies.ordering import Priority
from tests.core.drive import Server, Step


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


RULES = [
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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule(rule: Rule) -> None:
    server = Server(**rule.server)
    for step, wanted in enumerate(rule.steps):
        for name, prompt, knows in rule.arrivals.get(step, ()):
            server.add(name, prompt, **knows)
        assert server.step() == wanted, f"step {step}"
    assert rule.queues is None or server.queues == rule.queues
