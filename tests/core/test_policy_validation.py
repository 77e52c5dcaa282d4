"""Mistakes in a user's policy are reported, and not taken for another value."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, PolicyWrapper, Request, Scheduler, ServerState
from pagedsim.core.errors import PolicyError
from pagedsim.core.policy import RankChanges, rank_key
from pagedsim.policies.admission import Cap
from pagedsim.policies.aging import Aging
from pagedsim.policies.continuum import Continuum
from tests.core.drive import Server
from tests.core.refusals import refusal


def scheduler(policy: Policy, batching: str = "prefill_first") -> Scheduler:
    memory = make_memory("paged", blocks=6, block_size=4, cpu_blocks=8)
    return make_scheduler(
        memory=memory, policy=policy, preemption="swap", batching=batching, max_model_len=24
    )


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"aftr_step": lambda self: None}, "Mine.aftr_step | no such hook | 'after_step'"),
        ({"rank_change": "never"}, "Mine.rank_change: | no such attribute | 'rank_changes'"),
        ({"may_prempt": lambda self: None}, "Mine.may_prempt | no such hook"),
        ({"admit": lambda self, *, r: 0}, "Mine.admit(self, *, r) | admit(self, request"),
        ({"rank": lambda self, request, now: -now}, "Mine.rank | takes now | state.now"),
        (
            {"may_preempt": lambda self, w, r, state: True, "displacing": False},
            "Mine overrides may_preempt | never",
        ),
    ],
)
def test_hooks_that_are_never_called_or_wrongly_declared_are_refused(
    members: dict[str, Any], named: str
) -> None:
    mine = type("Mine", (Policy,), members)()
    assert refusal(lambda: scheduler(mine), named).startswith("Mine")


class Timed(Policy):
    """Goes by what its subclasses get wrong."""

    rank_changes: RankChanges = "with time"

    def rank(self, request: Request, state: ServerState) -> float:
        return 0.0


@pytest.mark.parametrize(
    "hook", [lambda self, *them: 0, lambda self, r, s, scale=1: 0, staticmethod(lambda r, s: 0)]
)
def test_a_hook_may_take_its_arguments_in_any_way(hook: Any) -> None:
    served(scheduler(type("Mine", (Policy,), {"rank": hook})()))


def served(one: Scheduler, names: str = "ab") -> None:
    """Serve requests of which memory holds one at its longest."""
    for name in names:
        one.add(Request(name, prompt=8), now=0.0, output_len=12)
    while one.unfinished:
        one.commit(one.plan(0.0), 0.0)


@pytest.mark.parametrize(
    ("around", "hook", "answer", "named"),
    [
        (PolicyWrapper, "rank", (1, "a"), "Mine.rank gave"),
        (PolicyWrapper, "choose_victim", None, "Mine.choose_victim gave"),
        (Aging, "rank", (1, "a"), "Mine.rank gave"),
        (Aging, "speed", "fast", "Mine.speed gave"),
        (Aging, "stale", 3, "Mine.stale gave"),
        (Cap, "admit", "no", "Cap.admit, around Mine, gave"),  # either may have answered
    ],
)
def test_an_error_names_the_wrapped_policy(
    around: type[PolicyWrapper], hook: str, answer: Any, named: str
) -> None:
    mine = type("Mine", (Timed,), {hook: lambda self, *_: answer})()
    assert refusal(lambda: served(scheduler(around(mine))), "must be", PolicyError).startswith(
        named
    )


def test_a_wrapper_whose_init_does_not_call_super_is_refused() -> None:
    mine = type("Mine", (PolicyWrapper,), {"__init__": lambda self: None})()
    refusal(lambda: scheduler(mine), "Mine.inner | is not set | super()")


def test_pins_want_a_prefix_cache() -> None:
    refusal(lambda: scheduler(Continuum()), "Continuum pins blocks of a prefix cache")


class Slow(Timed):
    """Later arrivals gain faster, behind those of the same step."""

    displacing = None
    sorts_late = True

    def rank(self, request: Request, state: ServerState) -> float:
        return request.priority * (1 - state.now)

    def stale(self, state: ServerState) -> bool:
        return False


def test_ranks_that_change_with_time_do_so_where_arrivals_are_sorted_late() -> None:
    served = scheduler(Slow())
    for priority in range(3):
        served.add(Request(priority, prompt=20, priority=priority), now=0.0, output_len=4)
    now, order = 0.0, []
    while served.unfinished:
        plan, now = served.plan(now), now + 1.0
        order += [request.id for request, _ in plan.hits]
        served.commit(plan, now)
    assert order == [0, 2, 1]


class Aged(Policy):
    """The longer a request has been here, the sooner it goes, from a level of its own on."""

    def rank(self, request: Request, state: ServerState) -> float:
        return request.prompt_len - state.now * (1 + request.prompt_len % 3)


class Grown(Policy):
    """The fewest tokens go first."""

    displacing = True

    def rank(self, request: Request, state: ServerState) -> float:
        return request.generated


@pytest.mark.parametrize("kind", [Aged, Grown])
@pytest.mark.parametrize("changes", ["never", "while running", "always"])
@pytest.mark.parametrize("batching", ["unified", "prefill_first", "sglang"])
def test_a_rank_that_changes_against_rank_changes_ends_the_run(
    kind: type[Policy], changes: str, batching: str
) -> None:
    if kind is Grown and batching == "sglang":
        return  # its batch goes by no ranks
    policy = type("Mine", (kind,), {"rank_changes": changes})()
    server = Server(24, policy=policy, batching=batching, max_seqs=2)
    for length in range(4, 12):
        server.add(str(length), length, 6)
    if changes == "always" or (kind, changes) == (Grown, "while running"):
        server.steps(60)
        assert not server.scheduler.unfinished
        return
    named = f"Mine.rank gave | rank_changes={changes!r} says | declare 'always'"
    refusal(lambda: server.steps(60), named, PolicyError)


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, Fraction])
def test_ranks_in_other_numbers_are_those_in_pythons_own(number: Callable[[int], float]) -> None:
    class Longest(Policy):
        rank_changes = "never"

        def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
            return number(-request.prompt_len), number(1)

    served = make_scheduler(memory=make_memory(blocks=8, block_size=4), policy=Longest())
    for length in (3, 5, 4):
        served.add(Request(length, length), now=0.0, output_len=2)
    assert [chunk.request.id for chunk in served.plan(0.0).chunks] == [5, 4, 3]
    key = rank_key(served.policy, served.queues.state, served.requests[5])
    assert {type(part) for part in cast("tuple[float, ...]", key[0])} <= {float, int}
