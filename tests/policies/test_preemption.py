"""Preemption: which request loses its memory, and whether that is swapped or recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    Policy,
    Preemption,
    Request,
    SamplingParams,
    Scheduler,
    State,
)
from pagedsim.policies.fairness import VTC
from pagedsim.policies.preemption import Cheapest
from pagedsim.policies.victims import VICTIMS
from tests.core.drive import Server

# Which request


@dataclass(frozen=True)
class Running:
    """A request that decodes when memory is full."""

    at: int
    prompt: int
    output: int
    """As predicted, or the most that it may be."""
    priority: int = 0


# Each rule takes another request, and none takes b for its output, which is the longest in all.
BATCH = {
    "a": Running(0, 9, 30, priority=4),  # the last in rank
    "b": Running(0, 25, 40, priority=1),  # the most blocks
    "c": Running(8, 9, 36, priority=3),  # the most tokens left
    "e": Running(8, 2, 12, priority=2),  # the fewest tokens to compute again
    "d": Running(9, 9, 12, priority=0),  # the last admitted
}
EQUALS = {name: Running(0, 25, 30) for name in "abc"}


def yields(
    victim: str,
    policy: str = "fcfs",
    batch: dict[str, Running] = BATCH,
    blocks: int = 24,
    predicted: bool = True,
    **settings: bool,
) -> str:
    """The first request preempted when the batch has filled its memory."""
    scheduler = make_scheduler(
        memory=make_memory("paged", blocks=blocks, block_size=4),
        batching="unified",
        policy=make_policy(policy, victim=victim, **settings),
    )
    for now in range(60):
        for name, one in batch.items():
            if one.at == now:
                most = 60 if predicted else one.output
                request = Request(
                    name, one.prompt, SamplingParams(max_tokens=most), priority=one.priority
                )
                request._predicted_len = one.output if predicted else None
                scheduler.add(request, now, most)
        plan = scheduler.plan(now)
        if plan.preempted:
            assert len(scheduler.running) + len(plan.preempted) == len(batch)
            return str(plan.preempted[0].id)
        scheduler.commit(plan, now + 1.0)
    raise AssertionError("memory was never full")


RULES = {"last": "d", "rank": "a", "longest": "c", "cheapest": "e", "largest": "b"}


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize("victim", VICTIMS)
def test_each_victim_rule_chooses_its_request(victim: str, predicted: bool) -> None:
    policy = "priority" if victim == "rank" else "fcfs"
    assert yields(victim, policy, predicted=predicted) == RULES[victim]


@pytest.mark.parametrize("victim", VICTIMS)
def test_of_equal_requests_the_last_is_preempted(victim: str) -> None:
    assert yields(victim, batch=EQUALS) == "c"


# Under a displacing policy the batch is in order of rank, d b e c a, and the needy request depends
# on how much there is.
@pytest.mark.parametrize(
    ("victim", "of_all", "behind_e"),
    [
        ("last", "a", "a"),
        ("rank", "a", "a"),
        ("longest", "c", "c"),
        ("cheapest", "e", "c"),  # not e itself
        ("largest", "b", "a"),  # not b, which is before e
    ],
)
def test_under_a_displacing_policy_victims_rank_behind_the_needy_request(
    victim: str, of_all: str, behind_e: str
) -> None:
    assert yields(victim, "priority", blocks=25, displace=True) == of_all  # d is the needy
    assert yields(victim, "priority", blocks=26, displace=True) == behind_e


@pytest.mark.parametrize("victim", VICTIMS)
def test_under_a_displacing_policy_the_last_in_rank_preempts_itself(victim: str) -> None:
    assert yields(victim, "priority", blocks=24, displace=True) == "a"


# Swapped or recomputed


class Prices:
    """A token costs a second to recompute; a block costs `block` seconds, out and back."""

    def __init__(self, block: float) -> None:
        self.block = block

    def recompute_seconds(self, tokens: int) -> float:
        return float(tokens)

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self.block


def victim_of(preemption: str | Preemption, n: int = 1) -> Server:
    """b, 6 tokens in 2 blocks, has just been preempted."""
    server = Server(4, cpu_blocks=4, preemption=preemption)
    server.add("a", 6)
    server.add("b", 6, n=n)
    server.steps(2)
    assert server.running == ["a"]
    return server


@pytest.mark.parametrize(
    ("block", "queue"), [(2.99, "swapped"), (3.0, "waiting"), (9.0, "waiting")]
)
def test_cheapest_compares_the_bus_with_the_prefill(block: float, queue: str) -> None:
    """Two blocks against 6 tokens; a draw recomputes."""
    server = victim_of(Cheapest(Prices(block)))
    assert server.queues == {"running": ["a"], queue: ["b"]}


def test_cheapest_counts_a_shared_prompt_once() -> None:
    """What both sequences share is computed once: 6 tokens, as for a single one."""
    asked: list[int] = []

    class Asked(Prices):
        def recompute_seconds(self, tokens: int) -> float:
            asked.append(tokens)
            return float(tokens)

    server = Server(5, cpu_blocks=5, preemption=Cheapest(Asked(1.0)))
    server.add("a", 6)
    server.add("b", 7, n=2)
    server.steps(2)
    assert asked == [7 + 3]  # the second sequence shares the first block, and computes 3 again


# -- fairness beyond what `test_reference.py` draws: aborted and moved requests, wrong weights -----


def steps(scheduler: Scheduler, number: int) -> None:
    """So many steps of a second."""
    for _ in range(number):
        scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)


def one_seat(policy: Policy) -> Scheduler:
    memory = make_memory("paged", blocks=64, block_size=4)
    return make_scheduler(memory=memory, policy=policy, max_seqs=1)


def test_a_client_whose_waiting_request_was_aborted_waits_no_more() -> None:
    """So client b, which comes last, is lifted to c, the last that had a request waiting."""
    policy = VTC()
    scheduler = one_seat(policy)
    scheduler.add(Request(0, 4, client="a"), 0.0, 4)
    steps(scheduler, 1)
    scheduler.add(Request(1, 4, client="a"), 1.0, 4)
    steps(scheduler, 1)
    scheduler.abort(1, 2.0)
    steps(scheduler, 2)
    scheduler.add(Request(2, 4, client="c"), 4.0, 20)
    steps(scheduler, 20)
    assert policy.service("c") == policy.service("a") + 4 + 2 * 20 == 12 + 44
    scheduler.add(Request(3, 4, client="b"), 24.0, 1)
    steps(scheduler, 1)
    assert policy.service("b") == policy.service("c") + 4 + 2


def moved(to: Scheduler, client: str, prompt: int, output: int, said: int) -> Request:
    """A request that comes without keys and values after it has said so many tokens elsewhere."""
    there = one_seat(make_policy("fcfs"))
    request = Request("moved", prompt, client=client)
    there.add(request, 0.0, output)
    steps(there, said)
    there.withdraw(request, there.now)
    to.add(request, to.now, output)
    return request


def test_vtc_charges_a_prompt_on_each_server_that_computes_it() -> None:
    policy = VTC()
    scheduler = one_seat(policy)
    request = moved(scheduler, "b", prompt=10, output=6, said=4)
    steps(scheduler, 2)
    assert request.state is State.FINISHED
    assert policy.service("b") == 10 + 2 * 2
