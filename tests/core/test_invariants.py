"""Whatever the policy, preemption, batching, memory and workload: the scheduler's invariants hold.

They are looked at after every plan and every commit (`run.py`), and in the memory of a toy
executor that carries the plans out (`shadow.py`). `pytest -m slow` runs the same on more
workloads; `tests/conftest.py` says how many, and how to have new ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import BATCHINGS, MEMORIES
from tests.core.cases import Case, Job, Server, cases
from tests.core.run import AheadRun, Run

EXAMPLES = settings().max_examples  # for each pair of batching and memory
HALF = settings(max_examples=EXAMPLES // 2)
MORE = settings(max_examples=2 * EXAMPLES)
FEWER = settings(max_examples=EXAMPLES // 6)

CACHES = [name for name in MEMORIES if not name.startswith("reserved")]
RESERVED = [name for name in MEMORIES if name not in CACHES]

every_pair = pytest.mark.parametrize(
    ("batching", "memory"),
    [
        (batching, memory)
        for memory in (*CACHES, "reserved")
        for batching in BATCHINGS
        if (batching, memory) != ("sglang", "reserved")  # which is refused
    ],
)


def drawn(data: st.DataObject, batching: str, memory: str) -> Case:
    kind = memory if memory in CACHES else data.draw(st.sampled_from(RESERVED))
    return data.draw(cases(batching, kind))


@every_pair
@given(data=st.data())
def test_invariants_hold(batching: str, memory: str, data: st.DataObject) -> None:
    Run(drawn(data, batching, memory)).go()


@every_pair
@HALF
@given(data=st.data())
def test_invariants_hold_ahead(batching: str, memory: str, data: st.DataObject) -> None:
    """With steps planned before the last is completed."""
    AheadRun(drawn(data, batching, memory)).go()


@every_pair
@FEWER
@given(data=st.data())
def test_fast_forward_changes_nothing(batching: str, memory: str, data: st.DataObject) -> None:
    compare_gliding(drawn(data, batching, memory))


def compare_gliding(case: Case) -> None:
    """Without reported tokens, the scheduler may skip steps in which it has nothing to decide."""
    untold = replace(case, tells_tokens=False, beams=False, ends="hidden")
    assert Run(untold, glides=True).go().trace == Run(untold).go().trace


PAIR = Job(4, 11, width=2)
ONCE_BROKEN = {
    "a lone sequence registers blocks as soon when steps are skipped": Case(
        Server("prefix", 8, 1, "one_by_one", "ltr", displace=True, max_seqs=1, ratio=1),
        tuple(Job(1, output, stream=0) for output in (1, 3, 6, 1)),
    ),
    "the request that lacked memory was the victim, and took it back": Case(
        Server(
            "prefix",
            26,
            1,
            "unified",
            "mlfq",
            displace=True,
            max_seqs=6,
            max_batched_tokens=5,
            victim="longest",
        ),
        (
            *(Job(1, 1, width=2) for _ in range(3)),
            Job(1, 4, width=2),
            Job(1, 6, width=3),
            Job(1, 8, width=2),
        ),
        tells_tokens=True,
    ),
    "no request is held back from a step without decodes": Case(
        Server("paged", 40, 4, "unified", "priority", displace=True, max_batched_tokens=4),
        (Job(3, 9, priority=5), Job(12, 2, gap=2, priority=1)),
    ),
    "an abort between plan and commit, when the plan fills a cached block": Case(
        Server("prefix", 8, 4, "prefill_first"),
        (Job(3, 9, stream=0),),
        aborts=((2, 0),),
        tells_tokens=True,
    ),
    "a victim whose block this step was to fill": Case(
        Server("prefix", 3, 2, "unified", "priority", displace=False),
        (Job(2, 4, stream=0, priority=5), Job(2, 3, gap=1, stream=1, priority=1)),
        tells_tokens=True,
    ),
    "a group whose last sequence fills a block": Case(
        Server("prefix", 19, 1, "prefill_first", max_seqs=3),
        (Job(11, 11, width=2, stream=0),),
        tells_tokens=True,
        beams=True,
        seed=84,
    ),
    "a rebuilt group takes no more than it needs": Case(
        Server("paged", 12, 3, "unified", max_seqs=5, max_batched_tokens=10, max_model_len=8),
        (Job(1, 7), Job(1, 7, width=4)),
    ),
    "a group alone, with fewer free blocks than sequences": Case(
        Server("paged", 4, 4, "prefill_first"), (Job(4, 3, width=2, limited=True),)
    ),
    "a group without a limit, in prefill_first": Case(
        Server("paged", 4, 4, "prefill_first", preemption="swap", cpu_blocks=4), (PAIR,)
    ),
    "a group without a limit, in unified": Case(Server("paged", 4, 4, "unified"), (PAIR,)),
    "a group that lost its memory after one token": Case(
        Server("paged", 4, 4, "static", max_seqs=5),
        (Job(1, 3, width=3, limited=True), Job(1, 2, width=2, limited=True)),
    ),
    "reserved memory that reckons with less than it could hold": Case(
        Server("reserved_max", 8, 1, "prefill_first", reserved_len=2), (Job(3, 4), Job(1, 4))
    ),
    "reserved runs that could never be had together": Case(
        Server("reserved_max", 15, 1, "unified", reserved_len=6), (Job(1, 1, width=4),)
    ),
    "sequences that end before their first copies are made": Case(
        Server("reserved_pow2", 4, 2, "static", reserved_len=5),
        (Job(1, 1, width=4), Job(1, 1, width=4)),
        tells_tokens=True,
        beams=True,
        seed=76,
    ),
    "sequences that branch before their first copies are made": Case(
        Server("reserved_oracle", 17, 2, "prefill_first", reserved_len=3),
        (Job(2, 1, gap=3), Job(1, 3, width=3, gap=3, stream=1)),
        tells_tokens=True,
        ends="told",
        beams=True,
    ),
    "sequences that change places and still share": Case(
        Server("paged", 10, 2, "static", max_seqs=2),
        (Job(1, 2, width=2, stream=0),),
        tells_tokens=True,
        beams=True,
        seed=12,
    ),
    "a group that splits a block in the step that brings it back": Case(
        Server(*("paged", 2, 4, "unified", "priority", True, "swap"), cpu_blocks=2, max_seqs=2),
        (Job(2, 3, width=2, priority=5), Job(2, 1, width=2, gap=1, priority=1)),
    ),
    "a request that lost its room to this step's growth displaces in the next": Case(
        Server(
            *("paged", 7, 4, "unified", "priority", True, "swap"),
            cpu_blocks=1,
            max_seqs=3,
            max_batched_tokens=6,
        ),
        (
            Job(14, 14, gap=1, priority=3, limited=True),
            Job(1, 8, priority=3),
            Job(10, 4, gap=2, priority=3, limited=True),
            Job(10, 4, gap=2, priority=3, limited=True),
            Job(8, 5, gap=1, priority=1, limited=True),
        ),
    ),
    "a hit that is handed out, so that its double, in use, is found in its place": Case(
        Server("prefix", 12, 2, "prefill_first", "sjf", max_seqs=8),
        (
            Job(9, 1, stream=0, predicted=9),
            Job(1, 2, stream=0),
            Job(1, 2, width=4, stream=0),
            Job(1, 2, stream=0),
            Job(16, 3, width=2, stream=0),
        ),
    ),
    "a block that a resumed request was to fill, and is held back": Case(
        Server("prefix", 13, 1, "one_by_one", preemption="swap", cpu_blocks=13, max_seqs=8),
        (
            Job(1, 2, stream=0),
            Job(1, 3, width=4, stream=0),
            Job(3, 2, gap=3),
            Job(2, 2, stream=0),
            Job(4, 1, gap=3, stream=0),
        ),
        tells_tokens=True,
        ends="told",
    ),
}


@pytest.mark.parametrize("case", ONCE_BROKEN.values(), ids=ONCE_BROKEN.keys())
def test_mended_faults(case: Case) -> None:
    """Small workloads, each found by chance, that random ones seldom come to."""
    Run(case).go()
    AheadRun(case).go()
    compare_gliding(case)


@pytest.mark.slow
@every_pair
@MORE
@given(data=st.data())
def test_invariants_hold_for_many_more(batching: str, memory: str, data: st.DataObject) -> None:
    case = drawn(data, batching, memory)
    Run(case).go()
    compare_gliding(case)
    AheadRun(drawn(data, batching, memory)).go()
