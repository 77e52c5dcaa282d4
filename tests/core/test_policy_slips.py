"""Slips in a policy of one's own are told, and not taken for another answer."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import ConfigError, Policy, Request, Scheduler
from pagedsim.core.errors import PolicyError


def scheduler(policy: Policy) -> Scheduler:
    memory = make_memory("paged", blocks=6, block_size=4, cpu_blocks=8)
    return make_scheduler(memory=memory, policy=policy, preemption="swap", max_model_len=24)


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ({"rank_changes": "sometimes"}, "Mine.rank_changes='sometimes': must be one of 'never', "),
        ({"victm": lambda self: None}, "Mine.victm: no such hook; did you mean 'victim'?"),
        ({"keeps": lambda self: None}, "Mine.keeps: no such hook; did you mean 'keep'?"),
    ],
)
def test_what_nobody_asks_is_refused(members: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        scheduler(type("Mine", (Policy,), members)())
    assert str(error.value).startswith(line)


def test_helpers_beside_a_hook_are_one_s_own() -> None:
    members = {"_victim": lambda self: 0, "ranks": lambda self: 0, "rank": lambda self, r, state: 0}
    scheduler(type("Mine", (Policy,), members)())


def test_an_answer_to_keep_that_is_none_is_told() -> None:
    served = scheduler(type("Mine", (Policy,), {"keep": lambda self, victim, state: "swpa"})())
    for name in "ab":
        served.add(Request(name, prompt=8), now=0.0, output_len=12)
    with pytest.raises(PolicyError, match=r"Mine\.keep gave 'swpa': must be one of Keep"):
        while served.unfinished:
            served.commit(served.plan(0.0), 0.0)
