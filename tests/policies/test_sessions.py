"""Policies that know sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    ConfigError,
    Policy,
    Request,
    Scheduler,
    ServerState,
    StepPlan,
)
from pagedsim.core.errors import PolicyError
from pagedsim.core.memory.eviction import Guard
from pagedsim.workload import Sessions, Workload, agents
from policies.continuum import Continuum
from policies.mlfq import PLAS
from tests.sim.harness import Affine, content, run


def scheduler(policy: str | Policy = "fcfs", blocks: int = 64, **settings: Any) -> Scheduler:
    memory = make_memory("prefix", blocks=blocks, block_size=4)
    if isinstance(policy, str):
        policy = make_policy(policy)
    return make_scheduler(memory=memory, policy=policy, **settings)


def served(made: Workload, to: Scheduler, **settings: Any) -> pa.Table:
    requests, _ = run(to, made, **settings)  # type: ignore[arg-type]
    return requests


# -- served least first ----------------------------------------------------------------------------


def with_a_past(**settings: Any) -> PLAS:
    """A policy that has seen session a served for 8 s, b for 2 s and 2 s at once."""
    policy = PLAS(quantum=1.0, levels=4, **settings)
    turns = Sessions([0, 1, 1], [1, 1, 1], [[]] * 3, [0, 0, 0])
    served(Workload.of([0.0] * 3, 4, [8, 2, 2], turns=turns), scheduler(policy))
    return policy


def test_a_request_joins_the_level_of_what_its_session_was_served() -> None:
    """Levels of 1, 2 and 4 s, and one without an end."""
    policy = with_a_past()
    levels = [policy.entry(Request(9, 4, session=name)) for name in ("0", "1", "2", None)]
    assert levels == [3, 2, 0, 0]


def test_on_the_critical_path_what_goes_in_parallel_counts_once() -> None:
    policy = with_a_past(critical_path=True)
    assert [policy.entry(Request(9, 4, session=name)) for name in ("0", "1")] == [3, 1]


# -- memory that is kept ---------------------------------------------------------------------------


def test_a_guard_gives_the_soonest_to_expire_and_lets_it_go_in_time() -> None:
    guard = Guard()
    for block, until in ((1, 9.0), (2, 5.0), (3, 7.0)):
        guard.set(block, until)
        assert guard.takes(block)
    assert not guard.takes(4)
    assert (len(guard.places), guard.pop(), guard.gives(1), guard.gives(2)) == (3, 2, True, False)
    assert guard.expired(6.9) == [] and guard.expired(7.0) == [3] and not guard.places
    guard.set(5, 6.0)
    assert not guard.takes(5), "it is past"


@dataclass
class Asked:
    """Requests written down: (arrival, prompt, output, session) a row."""

    rows: Sequence[tuple[float, range, int, str | None]]
    mode: Literal["open"] = "open"
    users: None = None
    think_time: float = 0.0
    turns: None = None

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, prompt, output, session) in enumerate(self.rows):
            yield Request(number, prompt, arrival=arrival, session=session), output


CHAT = range(36)
"""9 blocks of 4."""


def own(number: int, length: int) -> range:
    """A prompt with a beginning of its own."""
    return range(1000 * number, 1000 * number + length)


def asked(to: Scheduler, *rows: tuple[float, range, int, str | None]) -> list[dict[str, Any]]:
    """In steps of one second."""
    found: list[dict[str, Any]] = run(to, Asked(rows))[0].to_pylist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("batching", ["unified", "prefill_first"])
@pytest.mark.parametrize(("policy", "comes", "cached"), [
    ("fcfs", 6.5, 0), ("continuum", 6.5, 36), ("continuum", 9.5, 0),
])  # fmt: skip
def test_a_session_that_comes_back_in_time_finds_its_blocks(
    batching: str, policy: str, comes: float, cached: int
) -> None:
    """It leaves 9 or 10 of 16 blocks at second 5, and strangers wait for 5 each."""
    strangers = [(4.0, own(number, 16), 12, f"s{number}") for number in range(1, 5)]
    rows = [(0.0, CHAT, 5, "a"), *strangers, (comes, range(41), 3, "a")]
    last = asked(scheduler(policy, 16, batching=batching), *rows)[-1]
    assert last["cached_tokens"] == cached


def test_no_request_waits_for_pinned_memory_while_none_runs() -> None:
    to = scheduler(Continuum(ttl=1000.0), 16)
    rows = asked(to, (0.0, CHAT, 5, "a"), (10.0, own(1, 60), 2, "b"))
    assert rows[1]["scheduled"] == 10.0


def test_a_running_request_takes_pinned_blocks_before_it_is_preempted() -> None:
    to = scheduler(Continuum(ttl=1000.0), 16)
    rows = asked(to, (0.0, CHAT, 2, "a"), (0.0, own(1, 12), 40, "b"))
    assert [row["preemptions"] for row in rows] == [0, 0]
    assert to.policy.time_to_live("") == 1000.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("batching", ["unified", "prefill_first"])
def test_calls_of_a_session_that_overlap_have_no_gap(batching: str) -> None:
    """The second comes while the first is computed, and is observed after the end of it."""
    policy = Continuum(ttl=2.0)
    to = scheduler(policy, 50, batching=batching)
    calls = Asked([(at, range(8), 1, "a") for at in (0.0, 0.005, 0.03)])
    found = run(to, calls, Affine())[0]  # type: ignore[arg-type]
    assert found["state"].to_pylist() == ["finished"] * 3
    assert policy.time_to_live("") >= 0


def test_a_session_that_returns_in_time_goes_before_older_ones_that_do_not() -> None:
    """Sessions o and y are answered at 1 and 2 s, and kept until 6 and 7 s; z runs until 10 s."""
    short = [(0.0, own(1, 4), 1, "o"), (1.0, own(2, 4), 1, "y"), (2.0, own(3, 4), 8, "z")]
    back = [(3.0, own(4, 4), 1, None), (6.5, own(5, 4), 1, "o"), (6.8, own(6, 4), 1, "y")]
    found = asked(scheduler(Continuum(ttl=5.0), max_seqs=1), *short, *back)
    assert [row["scheduled"] for row in found[3:]] == [12.0, 11.0, 10.0]


@pytest.mark.parametrize("way", ["withdraw", "abort"])
def test_a_request_that_is_not_finished_here_is_no_answer_of_its_session(way: str) -> None:
    policy = Continuum(ttl=2.0)
    to = scheduler(policy)
    first = Request("first", 4, session="a")
    to.add(first, 0.0, 9)
    to.commit(to.plan(0.0), 1.0)
    if way == "abort":
        to.abort("first", 1.0)
    else:
        to.withdraw(first, 1.0)
    to.add(Request("second", 4, session="a"), 5.0, 2)
    to.plan(5.0)
    assert policy.time_to_live("") == 2.0


def test_memory_must_have_something_to_keep() -> None:
    with pytest.raises(ConfigError, match="Continuum pins blocks of a prefix cache"):
        make_scheduler(memory=make_memory("paged", blocks=8), policy=Continuum())


def test_seconds_are_seconds() -> None:
    class Slip(Policy):
        def pin_prefix_for(self, request: Request, state: ServerState) -> float:
            return -1.0

    with pytest.raises(
        PolicyError, match=r"Slip.pin_prefix_for gave -1.0: must be seconds, a number from 0"
    ):
        asked(scheduler(Slip()), (0.0, CHAT, 2, "a"))


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["unified", "prefill_first"])
@pytest.mark.parametrize("policy", ["plas", "continuum"])
def test_fast_forward_leaves_no_trace_and_no_invariant_is_broken(
    policy: str, batching: str
) -> None:
    lengths = {"shape": "uniform", "prompt_min": 1, "prompt_max": 30, "output_min": 1}
    made = agents(
        programs={
            "chat": {
                "share": 0.6, "shape": "chain", "turns": 5, "prefixes": {"tokens": 20},
                "tool": {"shape": "exponential", "mean": 0.4},
                "lengths": {**lengths, "output_max": 40},
            },
            "tree": {
                "share": 0.4, "shape": "tree", "breadth": 3, "depth": 2,
                "lengths": {**lengths, "output_max": 20},
            },
        },
        sessions=40, rate=2.0, seed=4,
    )  # fmt: skip
    tables = []
    for fast in (True, False):
        to = scheduler(policy, 90, batching=batching, preemption="recompute")
        cost = Affine() if fast else Checked()
        cost.scheduler = to  # type: ignore[attr-defined]
        tables.append(run(to, made, cost, fast_forward=fast))  # type: ignore[arg-type]
    assert [content(table) for table in tables[0]] == [content(table) for table in tables[1]]
    assert sum(tables[0][0]["cached_tokens"].to_pylist()) > 0


class Checked(Affine):
    """Checks the scheduler at each step."""

    scheduler: Scheduler

    def step_seconds(self, plan: StepPlan) -> float:
        self.scheduler.check()
        return super().step_seconds(plan)
