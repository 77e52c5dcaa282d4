"""Requests of several sequences: parallel samples and beams, one prompt, shared blocks."""

import re
from typing import Any

import pytest

from pagedsim.build import BATCHINGS
from pagedsim.core import Continuation, PlanError, ReservedMax
from tests.core.drive import Server, Step, spans


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_prompt_is_prefilled_once_and_forked_after_the_first_token(batching: str) -> None:
    server = Server(blocks=10, batching=batching)
    a = server.add("a", 6, n=3)
    assert server.step() == {"prefill": {"a": 6}}
    assert (a.generated, a.tables, server.free) == (1, [[0, 1]] * 3, 8)
    assert server.step() == {"decode": ["a"], "copies": 2}
    assert (a.generated, a.tables, server.free) == (2, [[0, 2], [0, 3], [0, 1]], 6)
    assert server.steps(2) == [{"decode": ["a"]}, {"decode": ["a"]}]
    assert (a.tables, server.free) == ([[0, 2, 4], [0, 3, 5], [0, 1, 6]], 3)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_group_takes_a_seat_and_a_decode_for_each_sequence(batching: str) -> None:
    server = Server(batching=batching, max_seqs=3)
    server.add("a", 6, n=3)
    server.add("b", 6)
    assert server.step() == {"prefill": {"a": 6}}
    plan = server.plan()
    assert (plan.decode_count, plan.decode_context) == (3, 3 * 7)
    assert server.waiting == ["b"]
    server.commit(plan)


def test_unified_charges_a_group_for_each_sequence() -> None:
    """Of 8 tokens three sequences take 3, so b's prompt gets a chunk of 5."""
    server = Server(batching="unified", budget=8)
    server.add("a", 8, n=3)
    server.step()
    server.add("b", 20)
    assert server.step() == {"decode": ["a"], "prefill": {"b": 5}}


@pytest.mark.parametrize("batching", BATCHINGS)
def test_all_sequences_end_together_at_the_length(batching: str) -> None:
    server = Server(blocks=10, batching=batching)
    server.add("a", 6, output=3, n=3)
    assert server.steps(2)[1] == {"decode": ["a"], "copies": 2}
    assert server.step() == {"decode": ["a"], "finished": ["a"]}
    assert server.free == 10


def test_a_width_of_one_is_no_group() -> None:
    server = Server(blocks=10)
    a = server.add("a", 6, beams=1)
    server.step({"a": Continuation((1,))})
    assert server.step({"a": 2}) == {"decode": ["a"]}
    assert a.outputs == [[1, 2]]


# Beams


def test_tokens_go_to_each_sequence() -> None:
    server = Server()
    a = server.add("a", 6, n=2)
    server.step({"a": Continuation((10, 20))})
    server.step({"a": Continuation((11, 21))})
    assert a.outputs == [[10, 11], [20, 21]]


def test_both_beams_may_go_on_from_one_parent() -> None:
    """Beam 1 wins twice: block 2, which beam 0 wrote, is given up, and block 1 is split."""
    server = Server(blocks=8)
    a = server.add("a", 5, beams=2)
    server.step({"a": Continuation((10, 20))})
    server.step({"a": Continuation((11, 21), parents=(0, 1))})
    assert a.tables == [[0, 2], [0, 1]]
    server.step({"a": Continuation((12, 22), parents=(1, 1))})
    assert a.outputs == [[20, 21, 12], [20, 21, 22]]
    assert (a.tables, server.free) == ([[0, 1], [0, 1]], 6)
    plan = server.plan()
    assert plan.copies == {2: 1}
    assert a.tables == [[0, 2], [0, 1]]
    server.commit(plan, {"a": Continuation((13, 23))})
    assert a.outputs == [[20, 21, 12, 13], [20, 21, 22, 23]]


def test_beams_that_change_places_copy_nothing() -> None:
    server = Server(blocks=8)
    a = server.add("a", 5, beams=2)
    server.step({"a": Continuation((10, 20))})
    server.step({"a": Continuation((11, 21), parents=(1, 0))})
    assert a.outputs == [[20, 11], [10, 21]]
    assert a.tables == [[0, 1], [0, 2]]
    plan = server.plan()
    assert plan.copies == {}
    server.commit(plan, {"a": Continuation((12, 22))})


def test_a_sequence_without_children_ends_and_gives_its_seat_and_blocks_back() -> None:
    server = Server(blocks=8, max_seqs=3)
    a = server.add("a", 6, n=3)
    server.step({"a": Continuation((1, 2, 3))})
    server.step({"a": Continuation((4, 5, 6))})
    assert (a.tables, server.free) == ([[0, 2], [0, 3], [0, 1]], 4)
    server.step({"a": Continuation((7, 8), parents=(0, 2))})
    assert (a.width, a.outputs) == (2, [[1, 4, 7], [3, 6, 8]])
    assert (a.tables, server.free, server.scheduler.queues.seats) == ([[0, 2], [0, 1]], 5, 2)
    server.add("b", 4)
    assert server.step({"b": 9}) == {"prefill": {"b": 4}}
    plan = server.plan()
    assert (plan.decode_count, plan.decode_context) == (3, 2 * 9 + 5)
    server.commit(plan, {"a": Continuation((1, 2)), "b": 3})


def test_the_last_sequence_of_a_group_goes_on_alone() -> None:
    server = Server(blocks=8)
    a = server.add("a", 6, n=2)
    server.step({"a": Continuation((1, 2))})
    server.step({"a": Continuation((4,), parents=(1,))})
    assert (a.width, a.outputs, server.free) == (1, [[2, 4]], 6)
    assert server.step({"a": 5}) == {"decode": ["a"]}
    assert a.outputs == [[2, 4, 5]]


def test_a_reserved_beam_goes_on_in_the_run_of_its_parent() -> None:
    """Runs of 8: both new beams come from beam 1, so what it stored is copied into run 0."""
    server = Server(memory=ReservedMax(16, max_model_len=8))
    a = server.add("a", 2, beams=2)
    server.step({"a": Continuation((10, 20))})
    server.step({"a": Continuation((11, 21))})
    server.step({"a": Continuation((12, 22), parents=(1, 1))})
    assert [table[0] for table in a.tables] == [8, 0]
    plan = server.plan()
    assert plan.copies == {0: 8, 1: 9, 2: 10, 3: 11}
    server.commit(plan, {"a": Continuation((13, 23))})


def test_a_reserved_beam_may_name_any_parent_for_its_first_token() -> None:
    """Only run 0 holds the prompt when the group forks; nothing may be copied into it."""
    server = Server(memory=ReservedMax(16, max_model_len=8))
    server.add("a", 2, beams=2)
    server.step({"a": Continuation((10, 20), parents=(1, 1))})
    plan = server.plan()
    assert plan.copies == {8: 0, 9: 1}
    server.commit(plan, {"a": Continuation((11, 21))})


def test_a_simulation_tells_parents_alone() -> None:
    """The same as with tokens: beam 1 wins twice, and its block is split in the next step."""
    server = Server(blocks=8)
    a = server.add("a", 5, output=5, beams=2)
    server.step()
    server.step()
    assert (a.tables, server.memory.shared) == ([[0, 2], [0, 1]], 1)
    server.commit(server.plan(), parents={"a": (1, 1)})
    assert (a.tables, server.free, server.memory.shared) == ([[0, 1], [0, 1]], 6, 2)
    assert server.step() == {"decode": ["a"], "copies": 1}
    assert (a.tables, server.memory.shared) == ([[0, 2], [0, 1]], 1)
    assert server.step() == {"decode": ["a"], "finished": ["a"]}
    assert (server.free, server.memory.shared) == (8, 0)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ({"a": (0, 2)}, "request 'a', parents (0, 2): parents (0, 2), of 2 sequences"),
        ({"a": (0, 0, 1)}, "3 tokens for 3 of at most 2 sequences"),
        ({"a": ()}, "0 tokens for 0 of at most 2 sequences"),
        ({"b": (0,)}, "request 'b', parents (0,): decodes no sequences that could"),
        ({"c": (0, 0)}, "request 'c', parents (0, 0): decodes no sequences that could"),
    ],
)
def test_parents_that_cannot_be_are_refused(parents: Any, message: str) -> None:
    server = Server(blocks=8)
    server.add("a", 5, output=5, beams=2)
    server.add("b", 5, output=5)
    server.step()
    plan = server.plan()
    with pytest.raises(PlanError, match=re.escape(message)):
        server.commit(plan, parents=parents)
    server.commit(plan)  # nothing has happened


def test_parents_are_told_with_tokens_or_without() -> None:
    server = Server(blocks=8)
    server.add("a", 5, output=5, beams=2)
    server.step({"a": Continuation((1, 2))})
    with pytest.raises(PlanError, match="parents go with their tokens"):
        server.commit(server.plan(), {"a": Continuation((1, 2))}, parents={"a": (1, 1)})


# Preemption


def crowded(batching: str, preemption: str = "recompute", budget: int | None = None) -> Server:
    """Seven blocks of 4; c makes the group a yield after four tokens, with its own last one."""
    server = Server(7, batching=batching, budget=budget, preemption=preemption, cpu_blocks=7)
    server.add("c", 5, output=5)
    server.add("a", 6, output=6, n=2)
    return server


REBUILT = [
    ("a", 0, 0, 9, False),  # the first sequence computes the prompt and its own tokens
    ("a", 1, 4, 9, False),  # the second what lies beyond the full prompt block that they share
]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_recomputed_group_is_rebuilt_without_sampling_and_decodes_on(batching: str) -> None:
    server = crowded(batching)
    a = server.scheduler.requests["a"]
    server.steps(4)
    assert server.free == 0
    assert server.step() == {"decode": ["c"], "preempted": ["a"], "finished": ["c"]}
    assert (server.free, a.generated) == (7, 4)
    plan = server.plan()
    assert spans(plan.chunks) == REBUILT
    assert (plan.prefill_tokens, plan.decodes) == (14, ())
    shared = a.tables[0][0]
    assert [table[0] for table in a.tables] == [shared] * 2
    server.commit(plan)
    assert (a.generated, server.free) == (4, 2)  # nothing was sampled
    assert server.step() == {"decode": ["a"]}
    assert a.generated == 5


def test_recomputed_tokens_of_a_group_are_what_it_computes_again() -> None:
    server = crowded("unified")
    a = server.scheduler.requests["a"]
    server.steps(6)
    assert a.recomputed_tokens == 14


def test_unified_rebuilds_a_group_in_chunks_that_leave_no_position_out() -> None:
    server = crowded("unified", budget=11)
    a = server.scheduler.requests["a"]
    server.steps(4)
    assert server.step()["preempted"] == ["a"]
    plan = server.plan()
    assert spans(plan.chunks) == [("a", 0, 0, 9, False), ("a", 1, 4, 6, False)]
    assert (plan.prefill_tokens, plan.prefill_context) == (11, 9 + 6)
    server.commit(plan)
    assert a.generated == 4
    plan = server.plan()
    assert spans(plan.chunks) == [("a", 1, 6, 9, False)]
    assert (plan.prefill_tokens, plan.prefill_context) == (3, 9)
    server.commit(plan)
    assert server.step() == {"decode": ["a"]}
    assert a.generated == 5


def test_a_group_that_yields_while_it_is_rebuilt_loses_what_it_had_rebuilt() -> None:
    server = crowded("unified", budget=11)
    a = server.scheduler.requests["a"]
    server.steps(6)
    assert (a.recomputed_tokens, a.computed) == (14, 0)
    plan = server.plan()
    assert server.scheduler.queues.preempt(plan, a) == 3  # for a request that needs its memory
    assert a.recomputed_tokens == 14 + 11


def test_tokens_of_a_rebuilt_group_are_those_from_before() -> None:
    server = Server(blocks=6)
    server.add("c", 4)
    a = server.add("a", 6, n=2)
    server.step({"c": 0, "a": Continuation((1, 2))})
    server.step({"c": 0, "a": Continuation((3, 4))})
    assert server.free == 1
    assert server.step({"c": 0}) == {"decode": ["c"], "preempted": ["a"]}
    server.scheduler.abort("c", server.now)
    assert server.step({}) == {"prefill": {"a": 7 + 3}}
    assert a.outputs == [[1, 3], [2, 4]]
    server.step({"a": Continuation((5, 6))})
    assert a.outputs == [[1, 3, 5], [2, 4, 6]]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_swapped_group_comes_back_whole_and_decodes_at_once(batching: str) -> None:
    server = crowded(batching, preemption="swap")
    a = server.scheduler.requests["a"]
    server.steps(4)
    out: Step = {"decode": ["c"], "preempted": ["a"], "swap_out": 5, "finished": ["c"]}
    assert server.step() == out
    assert (server.free, a.generated) == (7, 4)
    assert server.step() == {"decode": ["a"], "resumed": ["a"], "swap_in": 5}
    assert (server.free, a.generated, a.recomputed_tokens) == (2, 5, 0)


def test_a_group_swapped_before_its_first_decode_splits_when_it_is_back() -> None:
    server = Server(blocks=4, cpu_blocks=2, preemption="swap")
    server.add("c", 4, output=2)
    a = server.add("a", 6, n=2)
    server.step()
    out: Step = {"decode": ["c"], "preempted": ["a"], "swap_out": 2, "finished": ["c"]}
    assert server.step() == out
    plan = server.plan()
    # The shared last block comes in twice: copies on the GPU are made before blocks come in.
    assert plan.copies == {}
    assert [cpu for cpu, _ in plan.swap_in] == [0, 1, 1]
    assert sorted(table[-1] for table in a.tables) == sorted(gpu for _, gpu in plan.swap_in[1:])
    server.commit(plan)


def test_a_group_preempted_before_its_first_token_simply_starts_again() -> None:
    server = Server(blocks=5, batching="unified", budget=9)
    server.add("c", 8)
    a = server.add("a", 12, n=2)
    assert server.steps(2) == [
        {"prefill": {"c": 8, "a": 1}},
        {"decode": ["c"], "preempted": ["a"]},
    ]
    server.scheduler.abort("c", server.now)
    assert server.steps(2) == [{"prefill": {"a": 9}}, {"prefill": {"a": 3}}]
    assert a.generated == 1


# Groups that nothing may stop


def test_prefill_first_finishes_a_lone_group_that_fits() -> None:
    """At most 8 tokens in 2 sequences: one shared block and two of their own are all there are."""
    server = Server(blocks=3)
    server.add("a", 4, output=4, n=2)
    assert server.drain(limit=50) == ["a"]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_group_without_max_tokens_ends_where_the_memory_does(batching: str) -> None:
    """Alone, a sequence could reach 36 tokens in 9 blocks; three of them reach 12 at most."""
    server = Server(blocks=9, batching=batching)
    server.add("a", 6, n=3)
    server.drain(limit=100)


def test_unified_finishes_or_rejects_a_group_wider_than_the_budget() -> None:
    server = Server(batching="unified", budget=3)
    a = server.add("a", 2, output=5, n=4)
    for _ in range(50):
        server.step()
    assert not a.alive


def test_unified_a_group_that_yields_gives_its_decodes_back_to_the_prompts_behind() -> None:
    """Eight sequences are more than a step computes, so prompts begin while one group waits."""
    server = Server(20, 1, batching="unified", policy="priority", budget=7, max_seqs=10)
    server.add("g", 1, n=4, priority=9)
    server.add("held", 1, n=4, priority=9)
    server.step()
    server.add("d", 6, priority=1)
    assert server.step() == {"prefill": {"d": 3}, "decode": ["g"], "held": ["held"]}
    server.add("e", 5, priority=2)
    assert server.step() == {"prefill": {"e": 3}, "decode": ["g"], "held": ["held"]}
    server.scheduler.abort("held", server.now)
    assert server.step() == {"prefill": {"d": 3, "e": 2}, "preempted": ["g"]}
