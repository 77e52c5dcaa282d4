"""The scheduler's invariants hold where steps are planned before the last is told of."""

from __future__ import annotations

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tests.core.ahead import AheadRun
from tests.core.cases import Case, cases
from tests.core.test_invariants import (
    ONCE_BROKEN,
    RANDOM,
    REPEATABLE,
    every_batching,
    every_memory,
)

FEW = settings(REPEATABLE, max_examples=120)


@every_batching
@every_memory
@FEW
@given(data=st.data())
def test_invariants_hold(batching: str, memory: str, data: st.DataObject) -> None:
    AheadRun(data.draw(cases(batching, memory))).go()


@pytest.mark.parametrize("case", ONCE_BROKEN.values(), ids=ONCE_BROKEN.keys())
def test_what_was_broken_once(case: Case) -> None:
    AheadRun(case).go()


@pytest.mark.slow
@every_batching
@every_memory
@RANDOM
@given(data=st.data())
def test_invariants_hold_for_many_more(batching: str, memory: str, data: st.DataObject) -> None:
    AheadRun(data.draw(cases(batching, memory))).go()


@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
@pytest.mark.parametrize("move", ["ahead", "late", "preempt", "resume", "abort before commit"])
def test_the_workloads_make_every_move(batching: str, move: str) -> None:
    """Or all that was checked above would be checked of nothing."""
    once = settings(REPEATABLE, max_examples=4000, phases=[Phase.generate])
    find(cases(batching, "paged"), lambda case: AheadRun(case).go().seen[move] > 0, settings=once)
