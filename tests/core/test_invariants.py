"""Whatever the policy, preemption, batching, memory and workload: the scheduler's invariants hold.

They are looked at after every plan and every commit (`run.py`), and in the memory of a toy
executor that carries the plans out (`shadow.py`). `pytest -m slow` runs the same on new random
workloads; PAGEDSIM_EXAMPLES says how many for each pair of batching and memory.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from tests.core.cases import BATCHINGS, MEMORIES, Case, cases
from tests.core.run import Run

RANDOM = settings(
    max_examples=int(os.environ.get("PAGEDSIM_EXAMPLES", "1000")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
REPEATABLE = settings(RANDOM, max_examples=200, derandomize=True, database=None)
FEWER = settings(REPEATABLE, max_examples=40)

every_batching = pytest.mark.parametrize("batching", BATCHINGS)
every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_batching
@every_memory
@REPEATABLE
@given(data=st.data())
def test_invariants_hold(batching: str, memory: str, data: st.DataObject) -> None:
    Run(data.draw(cases(batching, memory))).go()


@every_batching
@every_memory
@FEWER
@given(data=st.data())
def test_gliding_over_quiet_steps_changes_nothing(
    batching: str, memory: str, data: st.DataObject
) -> None:
    compare_gliding(data.draw(cases(batching, memory)))


def compare_gliding(case: Case) -> None:
    """Where nothing is told, the scheduler may skip steps in which it could decide nothing."""
    untold = replace(case, tells_tokens=False, beams=False, ends="hidden")
    assert Run(untold, glides=True).go().trace == Run(untold).go().trace


@pytest.mark.slow
@every_batching
@every_memory
@RANDOM
@given(data=st.data())
def test_invariants_hold_for_many_more(batching: str, memory: str, data: st.DataObject) -> None:
    case = data.draw(cases(batching, memory))
    Run(case).go()
    compare_gliding(case)


@pytest.mark.parametrize(
    ("batching", "memory", "move"),
    [
        ("prefill_first", "paged", "preempt"),
        ("prefill_first", "paged", "displace"),
        ("prefill_first", "paged", "swap out"),
        ("prefill_first", "paged", "resume"),
        ("prefill_first", "paged", "copy"),
        ("prefill_first", "paged", "rebuild"),
        ("prefill_first", "paged", "reject"),
        ("prefill_first", "paged", "abort before commit"),
        ("prefill_first", "paged", "abort after commit"),
        ("prefill_first", "prefix", "hit"),
        ("prefill_first", "reserved_oracle", "copy"),
        ("static", "paged", "preempt"),
        ("static", "paged", "resume"),
        ("unified", "paged", "chunk"),
        ("unified", "paged", "hold"),
        ("unified", "paged", "rebuild"),
        ("unified", "paged", "swap out"),
        ("unified", "paged", "displace"),
        ("unified", "prefix", "hit"),
    ],
)
def test_the_workloads_make_every_move(batching: str, memory: str, move: str) -> None:
    """Or all that was checked above would be checked of nothing."""
    once = settings(REPEATABLE, max_examples=2000, phases=[Phase.generate])
    find(cases(batching, memory), lambda case: Run(case).go().seen[move] > 0, settings=once)
