"""Fairness among clients: the bound that VTC proves, the turns of DRR, and what weights do."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    ConfigError,
    Policy,
    Request,
    Scheduler,
    State,
    StepPlan,
)
from pagedsim.policies.fairness import DRR, VTC
from tests.policies.served import Job, Outcome, served

SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=4, max_size=14)

HALF = settings(max_examples=settings().max_examples // 2)


class Service:
    """What each client has had, by what the plans do, and how far two of those that wait differ."""

    def __init__(self, prompt: float = 1.0, output: float = 2.0) -> None:
        self.prompt, self.output = prompt, output
        self.had: defaultdict[str, float] = defaultdict(float)
        self.apart = 0.0
        self._begun: dict[frozenset[str], float] = {}

    def look(self, scheduler: Scheduler, plan: StepPlan) -> None:
        for request, _ in plan.hits:
            self.had[request.client] += self.prompt * request.prompt_len
        for request in (*plan.decodes, *(c.request for c in plan.chunks if c.samples)):
            self.had[request.client] += self.output
        waiting = frozenset(request.client for request in scheduler.waiting)
        if {"a", "b"} <= waiting:
            # Since both have had requests waiting.
            begun = self._begun.setdefault(waiting, self.had["a"] - self.had["b"])
            self.apart = max(self.apart, abs(self.had["a"] - self.had["b"] - begun))
        else:
            self._begun.clear()


def assert_bound_holds(jobs: list[Job], batching: str, seqs: int) -> None:
    """Two clients that wait differ by no more than VTC proves, in a memory of 40 tokens."""
    watched, tokens = Service(), 40
    served(
        jobs,
        VTC(),
        batching=batching,
        max_seqs=seqs,
        blocks=tokens // 4,
        look=watched.look,
    )
    longest = max(job.prompt for job in jobs)
    assert watched.apart <= 2 * max(1.0 * longest, 2.0 * tokens)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@HALF
@given(
    past=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.integers(1, 12), st.integers(6, 12)),
        min_size=8,
        max_size=16,
    ),
    sizes=SIZES,
    others=SIZES,
    seqs=st.integers(1, 4),
)
def test_the_bound_holds_whatever_clients_were_served_before(
    batching: str,
    past: list[tuple[int, int, int]],
    sizes: list[tuple[int, int]],
    others: list[tuple[int, int]],
    seqs: int,
) -> None:
    """Each request of the past is served by itself, then two clients send all that they have."""
    late = 20.0 * len(past) + 20
    before = [
        Job(20.0 * turn, prompt, output, {"client": "abc"[client]})
        for turn, (client, prompt, output) in enumerate(past)
    ]
    both = [
        Job(late + 0.1 * number, *size, {"client": client})
        for number, (client, some) in enumerate((("b", others), ("a", sizes)))
        for size in some
    ]
    assert_bound_holds([*before, *both], batching, seqs)


def at_the_end(policy: Policy | str, watched: Service) -> Outcome:
    heavy = [Job(0, 8, 6, {"client": "a"}) for _ in range(60)]
    light = [Job(at * 3.0, 8, 6, {"client": "b"}) for at in range(20)]
    return served([*heavy, *light], policy, max_seqs=2, look=watched.look)


@pytest.mark.parametrize("policy", [VTC, lambda: DRR(quantum=8)], ids=["vtc", "drr"])
def test_a_flood_of_one_client_does_not_hold_up_the_other(policy: type[Policy]) -> None:
    fair, fcfs = Service(), Service()
    kept = [r for r in at_the_end(policy(), fair).requests if r.client == "b"]
    held = [r for r in at_the_end("fcfs", fcfs).requests if r.client == "b"]
    waits = [sum((r.first_token_at or 0) - (r.arrival or 0) for r in one) for one in (kept, held)]
    assert waits[0] < waits[1] / 4
    assert fair.apart < fcfs.apart / 4


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


def test_weights_that_are_none_are_refused() -> None:
    for make in (VTC, DRR):
        with pytest.raises(ConfigError, match=r"weights\.a=0: must be a number above 0"):
            make(weights={"a": 0})
        with pytest.raises(ConfigError, match=r"weights=2: must be numbers by client"):
            make(weights=2)  # type: ignore[arg-type]
