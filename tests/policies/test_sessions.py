"""Policies that know sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    ConfigError,
    Policy,
    Request,
    Scheduler,
    ServerState,
)
from pagedsim.core.errors import PolicyError
from pagedsim.policies.continuum import Continuum
from tests.sim.harness import run


def scheduler(policy: str | Policy = "fcfs", blocks: int = 64, **settings: Any) -> Scheduler:
    memory = make_memory("prefix", blocks=blocks, block_size=4)
    if isinstance(policy, str):
        policy = make_policy(policy)
    return make_scheduler(memory=memory, policy=policy, **settings)


# -- served least first ----------------------------------------------------------------------------


# -- memory that is kept ---------------------------------------------------------------------------


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
