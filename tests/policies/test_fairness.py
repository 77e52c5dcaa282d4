"""Fairness among clients: the bound that VTC proves, the turns of DRR, and what weights do."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import (
    Admitted,
    Arrived,
    Policy,
    Preempted,
    Request,
    Scheduler,
    State,
    StepPlan,
)
from policies.drr import DRR
from policies.vtc import VTC
from tests.policies.served import Job, Outcome, served, started

SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=4, max_size=14)

MANY = st.lists(st.tuples(st.integers(1, 12), st.integers(6, 12)), min_size=12, max_size=20)


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


def two_clients(sizes: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[Job]:
    """One sends all at once, the other a request a second."""
    flood = [Job(0, prompt, output, {"client": "a"}) for prompt, output in sizes]
    trickle = [Job(at, *size, {"client": "b"}) for at, size in enumerate(others)]
    return [*flood, *trickle]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@given(sizes=SIZES, others=SIZES, seqs=st.integers(1, 4))
def test_two_clients_that_wait_differ_by_no_more_than_the_bound(
    batching: str, sizes: list[tuple[int, int]], others: list[tuple[int, int]], seqs: int
) -> None:
    watched, tokens = Service(), 40
    served(
        two_clients(sizes, others),
        VTC(),
        batching=batching,
        max_seqs=seqs,
        blocks=tokens // 4,
        look=watched.look,
    )
    longest = max(prompt for prompt, _ in (*sizes, *others))
    assert watched.apart <= 2 * max(1.0 * longest, 2.0 * tokens)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_client_that_was_served_alone_pays_nothing_for_it_later(batching: str) -> None:
    """One client is served alone for long; later both send more than the server can do at once."""
    alone = [Job(20 * at, 4, 16, {"client": "a"}) for at in range(100)]
    flood = [Job(2000, 4, 16, {"client": "b"}) for _ in range(150)]
    again = [Job(2000.5, 4, 16, {"client": "a"}) for _ in range(150)]
    watched = Service()
    outcome = served(
        [*alone, *flood, *again],
        VTC(),
        batching=batching,
        max_seqs=4,
        blocks=21,
        look=watched.look,
    )
    order = started(outcome)
    assert sum(100 <= number < 250 for number in order[: order.index(250)]) <= 4
    assert watched.apart <= 2 * max(4, 2 * 20 * 4)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@given(
    past=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.integers(1, 12), st.integers(6, 12)),
        min_size=8,
        max_size=16,
    ),
    sizes=MANY,
    others=MANY,
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
    watched, tokens, late = Service(), 40, 20.0 * len(past) + 20
    before = [
        Job(20.0 * turn, prompt, output, {"client": "abc"[client]})
        for turn, (client, prompt, output) in enumerate(past)
    ]
    both = [
        Job(late + 0.1 * number, *size, {"client": client})
        for number, (client, some) in enumerate((("b", others), ("a", sizes)))
        for size in some
    ]
    served(
        [*before, *both],
        VTC(),
        batching=batching,
        max_seqs=seqs,
        blocks=tokens // 4,
        look=watched.look,
    )
    longest = max(prompt for prompt, _ in (*sizes, *others))
    assert watched.apart <= 2 * max(1.0 * longest, 2.0 * tokens)


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


def test_vtc_follows_the_least_served_and_skips_nobody() -> None:
    later = (("a", 4), ("a", 4), ("b", 16), ("b", 2))
    jobs = [
        Job(0, 8, 1, {"client": "a"}),
        *(Job(0.5, size, 1, {"client": client}) for client, size in later),
    ]
    # a has had 8 + 2 when b, lifted to a's 10, comes: they are level, a came first and gets 6
    # more, then b's long prompt puts it behind.
    assert started(served(jobs, VTC(), max_seqs=1)) == [0, 1, 3, 2, 4]


def test_a_client_that_comes_back_has_saved_nothing_up() -> None:
    policy = VTC()
    busy = [Job(0, 4, 4, {"client": "a"}) for _ in range(30)]
    back = [Job(40, 4, 4, {"client": "b"}) for _ in range(10)]
    order = started(served([*busy, *back], policy, max_seqs=1))
    first = order.index(30)
    assert {number >= 30 for number in order[first : first + 4]} == {True, False}


@pytest.mark.parametrize("policy", [VTC(weights={"a": 3}), DRR(8, weights={"a": 3})])
def test_a_weight_is_a_share(policy: Policy) -> None:
    jobs = [Job(0, 8, 4, {"client": who}) for who in "ab" for _ in range(40)]
    order = started(served(jobs, policy, max_seqs=1))[:24]
    assert sum(number < 40 for number in order) == pytest.approx(18, abs=1)


def test_drr_gives_turns_by_tokens_not_by_requests() -> None:
    jobs = [
        *(Job(0, 16, 1, {"client": "a"}) for _ in range(4)),
        *(Job(0, 4, 1, {"client": "b"}) for _ in range(16)),
    ]
    order = started(served(jobs, DRR(quantum=16), max_seqs=1))
    assert [number < 4 for number in order[:10]].count(True) == 2


def test_drr_keeps_no_savings_of_who_has_nothing_waiting() -> None:
    policy = DRR(quantum=100)
    served([Job(0, 4, 1, {"client": "a"}), Job(30, 4, 1, {"client": "b"})], policy)
    assert all(left <= 0 for left in policy._ring.values())


def test_drr_savings_cover_what_is_generated_at_the_time_they_lapse() -> None:
    """Of 100 tokens a client has 92 left, of which its first request generates two before the
    second is admitted and nothing waits any more: it owes only what is generated afterwards."""
    policy = DRR(quantum=100)
    served([Job(0, 4, 6, {"client": "a"}), Job(1.5, 4, 2, {"client": "a"})], policy)
    assert policy._ring["a"] == -6


def test_drr_has_a_prompt_paid_once_if_it_is_preempted_before_its_first_token() -> None:
    policy, request = DRR(quantum=8), Request(0, 8, client="a")
    policy.observe(Arrived(Request(1, 8, client="a"), 0.0))  # waits, so that no savings lapse
    for event in (Arrived, Admitted, Preempted):
        policy.observe(event(request, 0.0))
    request.preemptions = 1
    policy.observe(Admitted(request, 1.0))
    assert policy._ring["a"] == 8  # of its second turn nothing is spent


def test_vtc_lifts_a_client_whose_request_comes_with_its_keys_and_values() -> None:
    """What the request generated elsewhere counts neither before nor after it is admitted."""
    here, there = (
        make_scheduler(memory=make_memory("paged", blocks=64, block_size=4), policy=policy)
        for policy in (VTC(), "fcfs")
    )
    own, guest = Request("own", 9, client="a"), Request("guest", 4, client="b")
    here.add(own, 0.0, 20)
    there.add(guest, 0.0, 20)
    for one in (here, there):
        for now in range(5):
            one.commit(one.plan(now), now + 1)
    length = there.part(guest, 5.0)
    assert here.reserve(guest, 5.0) and here.board(guest, 5.0, length)
    assert isinstance(here.policy, VTC)
    assert here.policy.service("b") == here.policy.service("a") == 9 + 2 * 5


def test_weights_that_are_none_are_refused() -> None:
    from pagedsim.core import ConfigError

    for make in (VTC, DRR):
        with pytest.raises(ConfigError, match=r"weights\.a=0: must be a number above 0"):
            make(weights={"a": 0})
        with pytest.raises(ConfigError, match=r"weights=2: must be numbers by client"):
            make(weights=2)  # type: ignore[arg-type]


def test_an_abort_takes_nothing_from_the_others() -> None:
    policy = VTC()
    found = at_the_end(policy, Service())
    assert all(request.state is State.FINISHED for request in found.requests)
    assert policy._clients.pending("a") == policy._clients.pending("b") == 0
    assert not policy._clients.waits("a")
