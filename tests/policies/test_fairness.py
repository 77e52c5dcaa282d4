"""Fairness beyond what `test_reference.py` draws: aborted and moved requests, wrong weights."""

from __future__ import annotations

import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    ConfigError,
    Policy,
    Request,
    Scheduler,
    State,
)
from pagedsim.policies.fairness import DRR, VTC


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
