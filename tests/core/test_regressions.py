"""Faults that were mended, each as small as it gets."""

from collections.abc import Sequence

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler, ServerState
from policies.ordering import Priority


def step(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Plan and commit; returns who was prefilled."""
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


def test_late_sorting_without_displacing_still_sorts() -> None:
    class Late(Priority):
        def __init__(self) -> None:
            super().__init__(displace=False)
            self.sorts_late = True

    scheduler = make_scheduler(
        memory=make_memory(blocks=16, block_size=4), policy=Late(), max_seqs=1
    )
    scheduler.add(Request("first", 4), now=0.0, output_len=3)
    step(scheduler)
    scheduler.add(Request("lazy", 4, priority=9), now=0.0, output_len=1)
    scheduler.add(Request("urgent", 4, priority=1), now=0.0, output_len=1)
    prefilled = [name for _ in range(6) for name in step(scheduler)]
    assert prefilled == ["urgent", "lazy"]


def test_the_cache_does_not_find_what_a_rebuilt_group_has_not_computed() -> None:
    """Its tables are laid out, and registered, at once; its chunks come step by step."""
    prompt = list(range(16))
    scheduler = make_scheduler(
        memory=make_memory("prefix", blocks=14, block_size=4),
        policy=Priority(displace=True),
        batching="unified",
        max_batched_tokens=8,
        max_seqs=8,
    )
    group = Request("group", prompt, SamplingParams(n=2, max_tokens=6), priority=5)
    scheduler.add(group, now=0.0)
    while not group.decoding:
        step(scheduler)
    scheduler.add(
        Request("urgent", range(100, 150), SamplingParams(max_tokens=2), priority=0), now=0.0
    )
    while "group" not in step(scheduler):
        pass
    assert group._rebuilt == 8  # half of the prompt, in 2 of its 4 blocks
    scheduler.abort("group", now=0.0)
    scheduler.add(Request("same", [*prompt, 99]), now=0.0)
    assert scheduler.plan(0.0).chunks[0].start <= 8


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


class Sliced(Policy):
    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        return running[-2:][0]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_the_candidates_can_be_sliced(batching: str) -> None:
    """They are declared a Sequence, which a deque is not."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=6, block_size=4), policy=Sliced(), batching=batching
    )
    for number in range(3):
        scheduler.add(Request(number, 6), now=0.0, output_len=8)
    for _ in range(40):
        step(scheduler)
    assert not scheduler.unfinished


class Pushing(Policy):
    displacing = True

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        return waiting.priority < running.priority


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_displaced_another_is_admitted_before_it_comes_back(preemption: str) -> None:
    scheduler = make_scheduler(
        memory=make_memory(blocks=8, block_size=4, cpu_blocks=8),
        policy=Pushing(),
        preemption=preemption,
        max_seqs=1,
    )
    scheduler.add(Request("lazy", 4, priority=9), now=0.0, output_len=20)
    step(scheduler)
    scheduler.add(Request("urgent", 4, priority=0), now=0.0, output_len=2)
    assert step(scheduler) == []  # it displaces
    assert step(scheduler) == ["urgent"]


def test_token_ids_of_numpy_are_the_same_tokens() -> None:
    numpy = pytest.importorskip("numpy")
    scheduler = make_scheduler(memory=make_memory("prefix", blocks=8, block_size=4))
    scheduler.add(Request("list", list(range(9))), now=0.0, output_len=1)
    step(scheduler)
    scheduler.add(Request("array", numpy.arange(9)), now=0.0, output_len=1)
    assert scheduler.plan(0.0).hits[0][1] == 8


def test_no_step_is_uneventful_after_an_arrival_since_the_plan() -> None:
    scheduler = make_scheduler(memory=make_memory(blocks=99, block_size=4))
    scheduler.add(Request("a", 4), now=0.0, output_len=99)
    step(scheduler)
    plan = scheduler.plan(0.0)
    scheduler.add(Request("b", 4), now=0.0, output_len=9)
    assert scheduler.uneventful(plan) == 0


def test_a_stale_plan_cannot_glide() -> None:
    scheduler = make_scheduler(memory=make_memory(blocks=99, block_size=4))
    scheduler.add(Request("a", 4), now=0.0, output_len=99)
    step(scheduler)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, 0.0)
    with pytest.raises(Exception, match="stale"):
        scheduler.fast_forward(plan, 0.0)


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


def test_telling_tokens_late_leaves_the_calendars_true() -> None:
    """A decodes without reported tokens, b's prefill with: a's need changes, or it is refused."""
    scheduler = make_scheduler(memory=make_memory("prefix", blocks=32, block_size=4))
    scheduler.add(Request("a", range(5)), now=0.0)
    step(scheduler)
    scheduler.add(Request("b", range(5, 9)), now=0.0)
    plan = scheduler.plan(0.0)
    try:
        scheduler.commit(plan, 0.0, tokens={"b": 3})
    except RuntimeError:
        scheduler.commit(plan, 0.0)
    scheduler.check()


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
