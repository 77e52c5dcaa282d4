"""The driver: times by hand, feeds, the bus, and fast-forward without a trace."""

from __future__ import annotations

import random
from itertools import product

import pytest

from pagedsim.build import make_memory, make_preemption, make_scheduler
from pagedsim.core import (
    Arrived,
    ConfigError,
    PagedsimError,
    Policy,
    Preemption,
    PrefillFirst,
    Request,
    Scheduler,
    StepPlan,
)
from pagedsim.core.batch_state import ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.core.source import Mode
from policies.ordering import Priority
from policies.past_future import PastFuture
from tests.sim.harness import Affine, Constant, Jobs, content, run


def scheduler(**settings: object) -> Scheduler:
    memory = make_memory(blocks=64, block_size=4)
    return make_scheduler(memory=memory, **settings)  # type: ignore[arg-type]


def test_times_of_two_requests_by_hand() -> None:
    jobs = Jobs([(0.0, 4, 3), (0.5, 4, 2)])
    requests, steps = run(scheduler(), jobs)
    # Steps of one second: prefill 0, prefill 1, then both decode; 1 ends first.
    assert steps["start"].to_pylist() == [0.0, 1.0, 2.0, 3.0]
    assert requests["first_token"].to_pylist() == [1.0, 2.0]
    assert requests["finished"].to_pylist() == [4.0, 3.0]
    assert steps["decode_seqs"].to_pylist() == [0, 0, 2, 1]


def test_an_idle_server_starts_at_the_next_arrival() -> None:
    requests, _ = run(scheduler(), Jobs([(0.1, 4, 2), (10.3, 4, 2)]))
    assert requests["scheduled"].to_pylist() == [0.1, 10.3]


def test_a_burst_arrives_at_once() -> None:
    requests, _ = run(scheduler(), Jobs([(3.0, 4, 2), (9.0, 4, 2)], mode="burst"))
    assert requests["arrival"].to_pylist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["open", "burst", "closed"])
def test_requests_are_queued_when_they_have_come_their_way(mode: Mode) -> None:
    """They arrive as before, and wait for their first token from then on."""
    jobs = Jobs([(0.0, 4, 2)] * 2, mode=mode, users=2)
    requests, _ = run(scheduler(), jobs, way=0.25)
    assert requests["arrival"].to_pylist() == [0.0, 0.0]
    assert requests["scheduled"].to_pylist() == [0.25, 0.25]
    assert requests["first_token"].to_pylist() == [1.25, 1.25]


def test_every_request_of_a_user_takes_the_same_latency() -> None:
    jobs = Jobs([(0.0, 4, 2)] * 2, mode="closed", users=1, think_time=5.0)
    requests, _ = run(scheduler(), jobs, way=0.25)
    assert requests["arrival"].to_pylist() == [0.0, 7.25]
    assert requests["scheduled"].to_pylist() == [0.25, 7.5]


@pytest.mark.parametrize("way", [0.0, 0.02, 5.0])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_in_transit_is_served_after_the_last_job_is_drawn(
    way: float, ahead: bool
) -> None:
    jobs = Jobs([(0.0, 4, 2)] * 3, mode="closed", users=2, think_time=0.0)
    requests, _ = run(scheduler(async_scheduling=ahead), jobs, way=way)
    assert requests.num_rows == 3


def test_users_in_a_closed_loop_ask_again_after_thinking() -> None:
    jobs = Jobs([(0.0, 4, 2)] * 3, mode="closed", users=1, think_time=5.0)
    requests, _ = run(scheduler(), jobs)
    assert requests["arrival"].to_pylist() == [0.0, 7.0, 14.0]


@pytest.mark.parametrize(("mode", "arrival"), [("closed", [0, 7, 14]), ("burst", [0, 0, 0])])
def test_a_deadline_moves_with_the_arrival(mode: str, arrival: list[float]) -> None:
    class Due(Policy):
        def observe(self, event: object) -> None:
            if isinstance(event, Arrived):
                request = event.request
                seen.append((request.arrival, request.deadline))

    seen: list[tuple[float | None, float | None]] = []
    rows = [(0.0, 4, 2), (1.0, 4, 2), (2.0, 4, 2)]
    jobs = Jobs(rows, mode=mode, users=1, think_time=5.0, due=1.5)  # type: ignore[arg-type]
    run(scheduler(policy=Due()), jobs)
    assert seen == [(at, at + 1.5) for at in arrival]


def test_a_closed_loop_serves_requests_left_when_the_first_user_stops() -> None:
    jobs = Jobs([(0.0, 4, 2), (0.0, 4, 30)], mode="closed", users=3, think_time=0.5)
    requests, _ = run(scheduler(), jobs)
    assert requests["state"].to_pylist() == ["finished"] * 2
    assert requests["arrival"].to_pylist() == [0.0, 0.0]


def swapping() -> Scheduler:
    memory = make_memory(blocks=4, block_size=4, cpu_blocks=8)
    return make_scheduler(memory=memory, preemption="swap", batching="unified")


def test_swaps_lie_on_the_critical_path_unless_they_overlap() -> None:
    jobs = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
    _, serial = run(swapping(), jobs, Constant(1.0, block=0.25))
    _, beside = run(swapping(), jobs, Constant(1.0, block=0.25), overlap=True)
    out, back = sum(serial["swap_out"].to_pylist()), sum(serial["swap_in"].to_pylist())
    assert out == back == sum(beside["swap_out"].to_pylist()) > 0
    busy = [
        sum(e - s for s, e in zip(*(t[c].to_pylist() for c in ("start", "end")), strict=True))
        for t in (serial, beside)
    ]
    steps = serial.num_rows
    assert busy[0] == pytest.approx(steps + 0.25 * (out + back))
    assert busy[1] == pytest.approx(steps + 0.25 * back)


def test_a_swap_in_waits_for_the_bus() -> None:
    """What was swapped out is still on its way when there is room for it again."""
    jobs = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
    _, steps = run(swapping(), jobs, Constant(1.0, block=5.0), overlap=True)
    rows = steps.to_pylist()
    (out,) = (row for row in rows if row["swap_out"])
    (back,) = (row for row in rows if row["swap_in"])
    moved = 5.0 * (out["swap_out"] + back["swap_in"])
    assert back["start"] < out["start"] + 5.0 * out["swap_out"]
    assert back["end"] == out["start"] + moved + 1.0


def test_a_policy_that_admits_no_request_is_an_error() -> None:
    class Closed(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return False

    with pytest.raises(PagedsimError, match="nothing can run at 0 s: 1 requests wait"):
        run(scheduler(policy=Closed()), Jobs([(0.0, 4, 2)]))


class Aging(Policy):
    """The rank changes with time alone."""

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return request.priority - 0.3 * (state.now - request.arrival)


class Remaining(Policy):
    rank_changes: RankChanges = "while running"
    displacing = True

    def rank(self, request: Request, state: ServerState) -> float:
        return (request.predicted_len or 0) - request.generated


class Few(Policy):
    def admit(self, request: Request, state: ServerState) -> bool:
        return len(state.running) < 3 or state.free_blocks > 20


class Counting(Policy):
    """Served tokens decide: it watches every step."""

    def __init__(self) -> None:
        self.seen = 0

    def rank(self, request: Request, state: ServerState) -> float:
        return (self.seen * 7 + request.prompt_len) % 5

    def served(self, plan: StepPlan, state: ServerState) -> None:
        self.seen += 1


POLICIES = {
    "fcfs": Policy,
    "priority": Priority,
    "displacing": lambda: Priority(displace=True),
    "staying": lambda: Priority(displace=False),
    "aging": Aging,
    "remaining": Remaining,
    "few": Few,
    "counting": Counting,
    "past_future": PastFuture,
}
MEMORIES = ("paged", "prefix", "reserved_max", "reserved_oracle")


class Halves:
    def recompute_seconds(self, tokens: int) -> float:
        return tokens * 1e-3

    def swap_seconds(self, blocks: int) -> float:
        return blocks * 9e-3


def crowded(policy: str, preemption: str, batching: str, memory: str, seed: int) -> Scheduler:
    """A server that is too small for what comes."""
    reserved = memory.startswith("reserved")
    settings = {"max_model_len": 64} if reserved else {"block_size": 4, "cpu_blocks": 12}
    blocks = 256 if reserved else 40
    prices: dict[str, object] = {"prices": Halves()} if preemption == "cheapest" else {}
    kind: Preemption = make_preemption(preemption, **prices)
    return make_scheduler(
        memory=make_memory(memory, blocks=blocks, **settings),
        policy=POLICIES[policy](),
        preemption=kind,
        batching=PrefillFirst(max_wait_tokens=3) if batching == "closed" else batching,
        max_seqs=8,
        max_batched_tokens=64,
        max_model_len=64,
    )


BATCHINGS = ("prefill_first", "closed", "unified", "static")
EVERY = [
    pytest.param(policy, batching, memory, marks=() if quick else pytest.mark.slow)
    for number, policy in enumerate(POLICIES)
    for which, batching in enumerate(BATCHINGS)
    for turn, memory in enumerate(MEMORIES)
    for quick in [not number or (number + which + turn) % 2 == 0]
]
"""Every policy with every batching and memory; the first of them all quickly, the others half."""


@pytest.mark.parametrize(("policy", "batching", "memory"), EVERY)
def test_fast_forward_changes_no_byte(policy: str, batching: str, memory: str) -> None:
    quick = 0
    for preemption, seed in product(("recompute", "swap", "cheapest"), range(2)):
        dice = random.Random(seed)
        rows, now = [], 0.0
        for _ in range(40):
            now += dice.expovariate(2.5) if dice.random() < 0.8 else 3.0
            rows.append((now, dice.randint(1, 30), dice.randint(1, 30)))
        rows.append((now + 0.1, 70, 5))  # never fits
        jobs = Jobs(rows, priorities=[2, 0, 1, 1], mode=dice.choice(["open", "closed"]))
        jobs.users, jobs.think_time = 12, 0.05
        try:
            tables = [
                run(
                    crowded(policy, preemption, batching, memory, seed),
                    jobs,
                    Affine(block=1e-3),
                    overlap=seed == 1,
                    fast_forward=fast,
                )
                for fast in (True, False)
            ]
        except ConfigError as error:
            assert "swap" in str(error) or "displace" in str(error)  # a combination that is refused
            continue
        quick += 1
        for ours, theirs in zip(*tables, strict=True):
            assert content(ours) == content(theirs)
    assert quick or batching == "static" or memory.startswith("reserved")
