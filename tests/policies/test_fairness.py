"""Fairness among clients: the bound that VTC proves, the turns of DRR, and what weights do."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    Policy,
    Request,
    Scheduler,
    State,
    StepPlan,
)
from policies.fairness import DRR, VTC
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
@given(sizes=SIZES, others=SIZES, seqs=st.integers(1, 4))
def test_two_clients_that_wait_differ_by_no_more_than_the_bound(
    batching: str, sizes: list[tuple[int, int]], others: list[tuple[int, int]], seqs: int
) -> None:
    assert_bound_holds(two_clients(sizes, others), batching, seqs)


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


def test_vtc_follows_the_least_served_and_skips_none() -> None:
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


PREEMPTED = [Job(0, 4, 24, {"client": "a"}), Job(0, 28, 1, {"client": "b"})]
"""In a memory of 32 tokens, 4 of them computed in a step, the second request is preempted when the
first has grown, before all of its prompt is computed, and admitted again when the first has ended.
"""


def preempted(policy: Policy, *later: Job) -> Outcome:
    jobs = [*PREEMPTED, *later]
    outcome = served(jobs, policy, batching="unified", blocks=9, max_batched_tokens=4, max_seqs=2)
    assert outcome.requests[1].preemptions == 1
    return outcome


def test_vtc_charges_a_prompt_once_if_it_is_preempted_before_its_first_token() -> None:
    policy = VTC()
    preempted(policy)
    assert (policy.service("a"), policy.service("b")) == (4 + 2 * 24, 28 + 2)


def test_drr_charges_a_prompt_once_if_it_is_preempted_before_its_first_token() -> None:
    later = [Job(20, 4, 1, {"client": client}) for client in "bbbbaaaa"]
    order = started(preempted(DRR(quantum=8), *later))
    # Its second turn covered the prompt of 28, so that b owes but the token that follows it.
    assert order == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9]


def test_drr_counts_once_what_a_preempted_request_has_generated() -> None:
    """Four tokens a turn: the turns that pass until it is admitted again are those of its prompt,
    since what it had generated was paid when it was preempted."""
    jobs = [(0, 8, 7, "b"), (1, 12, 5, "a"), (2, 4, 1, "c"), (2, 8, 1, "c"), (2, 4, 1, "a")]
    some = [Job(at, prompt, output, {"client": who}) for at, prompt, output, who in jobs]
    outcome = served(some, DRR(quantum=4), batching="unified", max_seqs=2, blocks=7)
    assert outcome.requests[1].preemptions == 1
    assert started(outcome) == [0, 1, 2, 4, 3]


def test_a_preempted_request_waits_until_it_is_admitted_again() -> None:
    """Client d comes when nothing waits, and is lifted to c, the last that had a request waiting;
    b, which was served less, has none since its preempted request was admitted again."""
    policy = VTC()
    preempted(policy, Job(40, 4, 20, {"client": "c"}), Job(80, 4, 1, {"client": "d"}))
    assert policy.service("c") == 30 + 4 + 2 * 20
    assert policy.service("d") == policy.service("c") + 4 + 2


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


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_service_is_what_was_admitted_and_generated_after_every_step(
    batching: str, preemption: str
) -> None:
    """With one client there is none to be lifted to."""
    policy = VTC()
    alive: list[Request] = []

    def look(scheduler: Scheduler, plan: StepPlan) -> None:
        alive.extend(request for request, _ in plan.hits if request not in alive)
        had = sum(request.prompt_len + 2 * request.generated for request in alive)
        assert policy.service("a") == had

    jobs = [Job(2.0 * at, 5, 9 + at % 4, {"client": "a"}) for at in range(20)]
    outcome = served(
        jobs, policy, batching=batching, preemption=preemption, blocks=8, cpu_blocks=8, look=look
    )
    assert sum(request.preemptions for request in outcome.requests) > 5


def test_a_client_that_was_served_more_than_those_that_wait_keeps_what_it_had() -> None:
    """b is lifted to the 6 that a had had by then, and waits until a comes again."""
    policy = VTC()
    jobs = [(0, 20, "a"), (0.5, 1, "b"), (10, 1, "a")]
    order = started(
        served([Job(at, 4, out, {"client": who}) for at, out, who in jobs], policy, max_seqs=1)
    )
    assert order == [0, 1, 2]
    assert policy.service("a") == 4 + 2 * 20 + 4 + 2
    assert policy.service("b") == 4 + 2 + 4 + 2


def who_starts(scheduler: Scheduler) -> list[str]:
    """The clients of requests in the order in which they are admitted, until all have ended."""
    order: list[str] = []
    while scheduler.unfinished:
        plan = scheduler.plan(scheduler.now)
        order.extend(request.client for request, _ in plan.hits)
        scheduler.commit(plan, scheduler.now + 1.0)
    return order


def test_a_client_that_comes_is_lifted_to_the_least_served_of_those_that_wait() -> None:
    """At 4 s a waits with the 12 that it has had, and b with 6, to which c is lifted: it goes
    before a's second request, which came sooner."""
    jobs = [(0, 4, "a"), (0.5, 1, "b"), (0.5, 1, "a"), (4, 1, "c")]
    some = [Job(at, 4, output, {"client": client}) for at, output, client in jobs]
    assert started(served(some, VTC(), max_seqs=1)) == [0, 1, 3, 2]


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


def test_drr_charges_a_prompt_on_each_server_that_computes_it() -> None:
    """Of the 16 tokens of its first turn b spends 15 on the prompt and one on a token, so that a
    starts one request of its own sooner than if b had kept them."""
    scheduler = one_seat(DRR(quantum=16))
    moved(scheduler, "b", prompt=15, output=6, said=5)
    others = [Request(number, 8, client="ab"[number // 4]) for number in range(8)]
    for other in others:
        scheduler.add(other, 0.0, 1)
    assert "".join(who_starts(scheduler)) == "abaabbab"


def test_drr_gives_no_turns_to_a_client_that_has_nothing_waiting() -> None:
    alone = [Job(at, 8, 1, {"client": "b"}) for at in range(20)]
    both = [Job(21, 8, 1, {"client": who}) for who in "ab" for _ in range(8)]
    jobs = [Job(0, 8, 1, {"client": "a"}), *alone, *both]
    outcome = served(jobs, DRR(quantum=9), max_seqs=1)
    order = [outcome.requests[number].client for number in started(outcome)]
    assert order[21:29].count("a") == 4


def test_drr_charges_what_is_generated_after_admission() -> None:
    """Prompts are of one token; a's answers are of 15, b's of one: 16 tokens a request, and 2."""
    jobs = [
        Job(0, 1, out, {"client": who}) for who, out in (("a", 15), ("b", 1)) for _ in range(64)
    ]
    outcome = served(jobs, DRR(quantum=16), max_seqs=1)
    order = [outcome.requests[number].client for number in started(outcome)]
    assert order[:45].count("a") == pytest.approx(45 / 9, abs=1)


def test_a_guest_with_its_keys_and_values_takes_no_turn_of_drr() -> None:
    """Its prompt is worth eight turns, in which a would save up for as many requests."""
    memory = make_memory("paged", blocks=64, block_size=4)
    here = make_scheduler(memory=memory, policy=DRR(quantum=8), max_seqs=2)
    there = one_seat(make_policy("fcfs"))
    guest = Request("guest", 64, client="b")
    there.add(guest, 0.0, 4)
    steps(there, 1)
    here.add(Request("long", 8, client="a"), 0.0, 40)
    steps(here, 1)
    assert here.migration.reserve(guest, 1.0)
    for number in range(8):
        here.add(Request(number, 8, client="a"), 1.0, 1)
    steps(here, 1)
    assert here.migration.attach(guest, 2.0, there.migration.detach(guest, 2.0))
    for number in range(8):
        here.add(Request(8 + number, 8, client="b"), 2.0, 1)
    assert who_starts(here)[:8].count("a") == 4


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
    length = there.migration.detach(guest, 5.0)
    assert here.migration.reserve(guest, 5.0) and here.migration.attach(guest, 5.0, length)
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
