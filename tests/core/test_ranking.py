"""The order of requests: queues that rank few of those in them, and mended faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler, ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import Key
from pagedsim.core.waiting_queue import DriftingQueue
from policies.ordering import HRRN

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "go", "leave", "wait", "wait", "forget"]),
        st.integers(0, 9),
        st.integers(-3, 3),
    ),
    max_size=60,
)


@dataclass
class Lines:
    """Ranks that are lines over the time: a height and a speed for each."""

    now: float = 0.0
    asked: int = 0

    def __post_init__(self) -> None:
        self.of: dict[Request, tuple[float, float]] = {}

    def order(self, request: Request) -> Key:
        self.asked += 1
        height, speed = self.of[request]
        return (height + speed * self.now, 0.0, request._order)

    def new(self, height: float, speed: float) -> Request:
        request = Request(len(self.of), 1)
        request._order = len(self.of)
        self.of[request] = (height - speed * self.now, speed)
        return request


@given(moves=MOVES)
def test_the_first_of_a_drifting_queue_is_the_first_of_all(
    moves: list[tuple[str, int, int]],
) -> None:
    lines = Lines()
    queue = DriftingQueue(lines.order, lambda one: lines.of[one][1], lambda: lines.now)
    there: list[Request] = []
    for move, number, speed in moves:
        if move == "come":
            there.append(lines.new(number, speed))
            queue.append(there[-1])
        elif move == "wait":
            lines.now += number / 3
        elif move == "forget":
            queue.expire()
        elif there and move == "leave":
            queue.remove(there.pop(number % len(there)))
        elif there:
            queue.arrange()
            there.remove(queue.pop())
        queue.arrange()
        assert len(queue) == len(there)
        if there:
            assert queue.head is min(there, key=lines.order)


def test_waiting_requests_are_not_ranked_again_while_the_head_cannot_change() -> None:
    lines = Lines()
    queue = DriftingQueue(lines.order, lambda one: lines.of[one][1], lambda: lines.now)
    for number in range(1000):
        queue.append(lines.new(number * 7 % 1000, -1 - number % 5))
    for _ in range(2):
        lines.now += 1.0
        queue.arrange()
    lines.asked = 0
    for _ in range(1000):
        lines.now += 1.0
        queue.arrange()
    assert lines.asked < 50


class RankedAtEveryStep(HRRN):
    rank_changes: RankChanges = "always"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=14),
    gap=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_hrrn_decides_as_if_all_were_ranked_at_every_step(
    sizes: list[tuple[int, int]], gap: float
) -> None:
    assert starts(HRRN(), sizes, gap) == starts(RankedAtEveryStep(), sizes, gap)


def starts(policy: Policy, sizes: list[tuple[int, int]], gap: float) -> list[Any]:
    """The requests that start in each step."""
    memory = make_memory(blocks=12, block_size=2)
    scheduler = make_scheduler(memory=memory, policy=policy, batching="unified", max_seqs=3)
    now, found = 0.0, []
    coming = [(number * gap, number, *size) for number, size in enumerate(sizes)]
    while coming or scheduler.unfinished:
        while coming and coming[0][0] <= now:
            _, number, prompt, output = coming.pop(0)
            scheduler.add(Request(number, prompt), now, output)
        plan = scheduler.plan(now)
        found.append([request.id for request, _ in plan.hits])
        now += 1.0
        scheduler.commit(plan, now)
    return found


class Told(Policy):
    """Ranks that a test sets, and says so."""

    rank_changes: RankChanges = "when stale"
    displacing = True

    def __init__(self) -> None:
        self.ranks: dict[Any, float] = {}
        self.moved: list[Request] = []

    def rank(self, request: Request, state: ServerState) -> float:
        return self.ranks.get(request.id, 5.0)

    def stale(self, state: ServerState) -> list[Request]:
        moved, self.moved = self.moved, []
        return moved


def test_a_request_with_a_stale_rank_takes_its_place_waiting_and_running() -> None:
    policy = Told()
    scheduler = make_scheduler(
        memory=make_memory(blocks=99, block_size=4), policy=policy, batching="unified", max_seqs=2
    )
    requests = [Request(name, 4) for name in "abcd"]
    for request in requests:
        scheduler.add(request, 0.0, 30)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    assert [one.id for one in scheduler.running] == ["a", "b"]
    policy.ranks = {"a": 9.0, "d": 1.0}
    scheduler.commit(scheduler.plan(1.0), 2.0)  # nothing has reported that
    assert [one.id for one in scheduler.running] == ["a", "b"]
    policy.moved = [requests[0], requests[3]]
    assert [one.id for one in scheduler.plan(2.0).displaced] == ["a"]
    assert [one.id for one in scheduler.waiting] == ["d", "c", "a"]


def test_a_stale_rank_of_a_request_that_waits_at_another_server_changes_nothing() -> None:
    policies = Told(), Told()
    here, there = (
        make_scheduler(memory=make_memory(blocks=9, block_size=4), policy=policy, max_seqs=1)
        for policy in policies
    )
    for server, names in ((here, "ab"), (there, "cde")):
        for name in names:
            server.add(Request(name, 4), 0.0, 9)
        server.commit(server.plan(0.0), 1.0)
    policies[0].moved = list(there.waiting)
    here.plan(1.0)
    assert [one.id for one in (*here.waiting, *there.waiting)] == ["b", "d", "e"]


# Faults that were mended, each as small as it gets


def step(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Plan and commit; returns the prefilled requests."""
    plan = scheduler.plan(now)
    scheduler.commit(plan, now)
    return [str(chunk.request.id) for chunk in plan.chunks]


def test_a_static_batch_is_formed_in_order_of_priority_by_default() -> None:
    """Arrivals wait for a sort that only displacing does, and a static batch never displaces."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=16, block_size=4),
        policy="priority",
        batching="static",
        max_seqs=1,
    )
    scheduler.add(Request("first", 4), now=0.0, output_len=1)
    step(scheduler)
    scheduler.add(Request("lazy", 4, priority=9), now=0.0, output_len=1)
    scheduler.add(Request("urgent", 4, priority=1), now=0.0, output_len=1)
    assert step(scheduler) + step(scheduler) == ["urgent", "lazy"]


@pytest.mark.parametrize("stopped", [["a"], ["a", "b"]])
def test_told_ends_leave_in_the_order_of_the_batch(stopped: list[str]) -> None:
    """As `length` ends do: the cache evicts in that order, so a replay would part from its run."""
    scheduler = make_scheduler(
        memory=make_memory("prefix", blocks=4, block_size=4), batching="unified"
    )
    scheduler.add(Request("a", range(4)), now=0.0)
    scheduler.add(
        Request("b", range(4, 8), SamplingParams(max_tokens=1 if len(stopped) == 1 else 2)), now=0.0
    )
    told: dict[int | str, str] = dict.fromkeys(reversed(stopped), "stop")
    gone = scheduler.commit(scheduler.plan(0.0), 1.0, tokens={"a": 1, "b": 2}, finished=told)
    assert [request.id for request in gone] == ["a", "b"]


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    scheduler = make_scheduler(memory=make_memory(blocks=4, block_size=4))
    scheduler.add(Request("a", 4, SamplingParams(max_tokens=1)), now=0.0)
    plan = scheduler.plan(0.0)
    (gone,) = scheduler.commit(plan, 1.0, tokens={"a": 7}, finished={"a": "stop"})
    assert gone.finish_reason == "stop"


def test_an_id_used_again_while_the_old_one_is_in_flight_is_not_ended() -> None:
    """The engine may tell of an aborted request; its id can be another's by then."""
    scheduler = make_scheduler(memory=make_memory(blocks=4, block_size=4))
    scheduler.add(Request("a", 4), now=0.0)
    plan = scheduler.plan(0.0)
    scheduler.abort("a", now=0.0)
    scheduler.add(Request("a", 4), now=0.0)
    assert scheduler.commit(plan, 1.0, tokens={"a": 7}, finished={"a": "stop"}) == []
    plan = scheduler.plan(1.0)
    assert [chunk.request.id for chunk in plan.chunks] == ["a"]
    assert scheduler.commit(plan, 2.0, tokens={"a": 7}) == []


def test_token_ids_of_numpy_are_the_same_tokens() -> None:
    numpy = pytest.importorskip("numpy")
    scheduler = make_scheduler(memory=make_memory("prefix", blocks=8, block_size=4))
    scheduler.add(Request("list", list(range(9))), now=0.0, output_len=1)
    step(scheduler)
    scheduler.add(Request("array", numpy.arange(9)), now=0.0, output_len=1)
    assert scheduler.plan(0.0).hits[0][1] == 8


def test_reserved_memory_is_full_and_its_batch_goes_on() -> None:
    """Nothing grows there, so no request is preempted where few blocks are free."""
    scheduler = make_scheduler(
        memory=make_memory("reserved_max", blocks=16, block_size=4, max_model_len=32),
        max_seqs=4,
        max_model_len=32,
    )
    for name in ("a", "b"):
        scheduler.add(Request(name, 4), now=0.0, output_len=20)
    plans = []
    for _ in range(20):
        plans.append(scheduler.plan(0.0))
        scheduler.commit(plans[-1], 0.0)
    assert not any(plan.preempted for plan in plans)
    assert not scheduler.unfinished


class ByDeadline(Policy):
    rank_changes = "never"

    def rank(self, request: Request, state: ServerState) -> float:
        if request.deadline is None:
            raise ValueError("no deadline")
        return request.deadline


def test_a_request_that_cannot_be_ranked_is_not_half_added() -> None:
    scheduler = make_scheduler(memory=make_memory(blocks=9, block_size=4), policy=ByDeadline())
    with pytest.raises(ValueError, match="no deadline"):
        scheduler.add(Request("a", 4), now=0.0)
    scheduler.check()


def test_one_step_ranks_each_waiting_request_a_few_times_at_most() -> None:
    """Not once for each admission: 256 seats and 10,000 waiting would take over a second."""

    class Counting(Policy):
        asked = 0

        def rank(self, request: Request, state: ServerState) -> float:
            self.asked += 1
            return 0.0

    policy = Counting()
    scheduler = make_scheduler(
        memory=make_memory(blocks=99, block_size=4), policy=policy, batching="unified", max_seqs=20
    )
    for number in range(40):
        scheduler.add(Request(number, 4), now=0.0, output_len=9)
    policy.asked = 0
    step(scheduler, now=1.0)
    assert policy.asked <= 3 * 40
