"""The scheduler's invariants hold with steps planned before the last is completed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.ahead import AheadRun
from tests.core.cases import Case, cases
from tests.core.test_invariants import (
    EXAMPLES,
    MORE,
    ONCE_BROKEN,
    assert_made,
    every_batching,
    every_memory,
)

HALF = settings(max_examples=EXAMPLES // 2)


@every_batching
@every_memory
@HALF
@given(data=st.data())
def test_invariants_hold(batching: str, memory: str, data: st.DataObject) -> None:
    AheadRun(data.draw(cases(batching, memory))).go()


@pytest.mark.parametrize("case", ONCE_BROKEN.values(), ids=ONCE_BROKEN.keys())
def test_what_was_broken_once(case: Case) -> None:
    AheadRun(case).go()


@pytest.mark.slow
@every_batching
@every_memory
@MORE
@given(data=st.data())
def test_invariants_hold_for_many_more(batching: str, memory: str, data: st.DataObject) -> None:
    AheadRun(data.draw(cases(batching, memory))).go()


@every_batching
def test_the_workloads_make_every_move(batching: str) -> None:
    """Or all that was checked above would be checked of nothing."""
    moves = {"ahead", "late", "preempt", "resume", "abort before commit"}
    assert_made(moves, cases(batching, "paged"), AheadRun)
