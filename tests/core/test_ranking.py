"""The order of requests: queues that rank few of those in them, and mended faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import Key
from pagedsim.core.waiting_queue import DriftingQueue
from pagedsim.policies.ordering import HRRN
from tests.core.drive import Server

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
    server = Server(policy=policy, batching="unified", max_seqs=2)
    requests = [server.add(name, 4, 30) for name in "abcd"]
    server.step()
    policy.ranks = {"a": 9.0, "d": 1.0}
    assert server.step() == {"decode": ["a", "b"]}  # nothing has reported that
    policy.moved = [requests[0], requests[3]]
    assert server.step()["displaced"] == ["a"]
    assert server.waiting == ["d", "c", "a"]


# Faults that were mended, each as small as it gets


@pytest.mark.parametrize("stopped", [["a"], ["a", "b"]])
def test_stopped_requests_leave_in_the_order_of_the_batch(stopped: list[str]) -> None:
    """As `length` ends do: the cache evicts in that order, so a replay would part from its run."""
    server = Server(4, batching="unified", cache=True)
    server.add("a", range(4))
    server.add("b", range(4, 8), max_tokens=len(stopped))
    ends: dict[int | str, str] = dict.fromkeys(reversed(stopped), "stop")
    assert server.commit(server.plan(), {"a": 1, "b": 2}, ends) == ["a", "b"]


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    server = Server()
    request = server.add("a", 4, max_tokens=1)
    server.commit(server.plan(), {"a": 7}, {"a": "stop"})
    assert request.finish_reason == "stop"


def test_an_id_used_again_while_the_old_one_is_in_flight_is_not_ended() -> None:
    """The engine may report the end of an aborted request; its id can be another's by then."""
    server = Server()
    server.add("a", 4)
    plan = server.plan()
    server.scheduler.abort("a", 0.0)
    server.add("a", 4)
    assert server.commit(plan, {"a": 7}, {"a": "stop"}) == []
    assert server.step({"a": 7}) == {"prefill": {"a": 4}}


def test_token_ids_of_numpy_are_the_same_tokens() -> None:
    server = Server(cache=True)
    server.add("list", list(range(9)), 1)
    server.step()
    server.add("array", np.arange(9), 1)  # type: ignore[arg-type]
    assert server.step()["hits"] == {"array": 8}


class ByDeadline(Policy):
    rank_changes = "never"

    def rank(self, request: Request, state: ServerState) -> float:
        if request.deadline is None:
            raise ValueError("no deadline")
        return request.deadline


def test_a_request_that_cannot_be_ranked_is_not_half_added() -> None:
    server = Server(policy=ByDeadline())
    with pytest.raises(ValueError, match="no deadline"):
        server.add("a", 4)
    server.scheduler.check()


def test_one_step_ranks_each_waiting_request_a_few_times_at_most() -> None:
    """Not once for each admission: 256 seats and 10,000 waiting would take over a second."""

    class Counting(Policy):
        asked = 0

        def rank(self, request: Request, state: ServerState) -> float:
            self.asked += 1
            return 0.0

    policy = Counting()
    server = Server(policy=policy, batching="unified", max_seqs=20)
    for number in range(40):
        server.add(str(number), 4, 9)
    policy.asked = 0
    server.step()
    assert policy.asked <= 3 * 40
