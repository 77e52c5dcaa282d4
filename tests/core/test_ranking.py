"""Queues that rank few of those in them still have the right one in front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import Key
from pagedsim.core.waiting_queue import DriftingQueue, Ranking
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


@given(keys=st.lists(st.integers(0, 5), min_size=1), moves=st.lists(st.integers(0, 99)))
def test_a_ranking_is_in_order_after_every_move(keys: list[int], moves: list[int]) -> None:
    lines = Lines()
    some = [lines.new(key, 0) for key in keys]
    ranking = Ranking(lines.order, some[::2])
    for request in some[1::2]:
        ranking.add(request)
    for number in moves:
        request = some[number % len(some)]
        lines.of[request] = (number % 7, 0)
        ranking.move(request)
        assert list(ranking) == sorted(some, key=lines.order)


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
    """Who starts in which step."""
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


def test_whose_rank_has_changed_takes_its_place_waiting_and_running() -> None:
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
