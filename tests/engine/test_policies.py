"""Policies change the schedule, never the tokens."""

from __future__ import annotations

from itertools import product

import pytest

from pagedsim.build import BATCHINGS, POLICIES, accepts, make_policy
from tests.engine.test_equality import GREEDY, PROMPTS, prompts, small, wanted

SHORT = {"quantum": 1e-3, "starve": 1, "most": 3}
"""Settings that make something happen within so short a run."""


EVERY = [
    pytest.param(name, batching, marks=() if batching == "unified" else pytest.mark.slow)
    for name, batching in product(POLICIES, BATCHINGS)
]


@pytest.mark.parametrize(("name", "batching"), EVERY)
def test_greedy_tokens_are_the_same_under_every_policy(name: str, batching: str) -> None:
    kind = POLICIES[name]
    settings = {key: value for key, value in SHORT.items() if accepts(kind, key)}
    if batching == "static" and accepts(kind, "displace"):
        settings["displace"] = False
    engine = small(
        "llama",
        policy=make_policy(name, victim="largest" if batching == "unified" else None, **settings),
        batching=batching,
        preemption="swap" if batching == "prefill_first" else "recompute",
        memory="prefix" if name in ("longest_prefix", "continuum") else "paged",
    )
    waiting = list(enumerate(prompts()))
    outputs = {}
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[:2]:
            engine.add_request(
                number,
                prompt,
                GREEDY,
                priority=-number % 3,
                client="ab"[number % 2],
                deadline=1e9 - number,
                predicted_len=float(number * 7 % 16),
            )
        waiting = waiting[2:]
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
    assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted("llama")
