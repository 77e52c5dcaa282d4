"""`batching=unified` decides as vLLM 0.33 does: rule by rule, small input, exact output."""

import pytest

from pagedsim.core import Policy, Request, ServerState
from tests.core.drive import Server, Step, names, spans


def test_rule_01_there_are_only_waiting_and_running() -> None:
    """vLLM 0.33: a preempted request waits again, its tokens forgotten."""
    server = Server(blocks=4, batching="unified")
    server.add("a", 8)
    b = server.add("b", 8)
    assert server.queues == {"waiting": ["a", "b"]}
    server.step()
    assert server.queues == {"running": ["a", "b"]}
    server.step()
    assert server.queues == {"running": ["a"], "waiting": ["b"]}
    assert (b.computed, b.num_tokens) == (0, 9)


def test_rule_01_one_budget_for_prompts_chunks_and_decodes() -> None:
    """vLLM 0.33: each needs what it has not computed; 10 tokens a step are dealt out in order."""
    server = Server(batching="unified", budget=10)
    server.add("a", 6)
    server.add("b", 6)
    server.add("c", 20)
    assert server.steps(5) == [
        {"prefill": {"a": 6, "b": 4}},
        {"prefill": {"b": 2, "c": 7}, "decode": ["a"]},
        {"prefill": {"c": 8}, "decode": ["a", "b"]},
        {"prefill": {"c": 5}, "decode": ["a", "b"]},
        {"decode": ["a", "b", "c"]},
    ]


def test_rule_01_chunks_join_and_only_the_last_samples() -> None:
    """vLLM 0.33: 20 tokens under a budget of 8 are positions 0-8, 8-16 and 16-20."""
    server = Server(batching="unified", budget=8)
    a = server.add("a", 20, output=1)
    seen = []
    for _ in range(3):
        assert a.generated == 0
        plan = server.plan()
        seen += spans(plan.chunks)
        server.commit(plan)
    assert seen == [("a", 0, 0, 8, False), ("a", 0, 8, 16, False), ("a", 0, 16, 20, True)]
    assert a.generated == 1


def test_rule_01_no_request_grows_beyond_the_model() -> None:
    """vLLM 0.33: prompt and output together end at max_model_len."""
    server = Server(batching="unified", max_model_len=10)
    a = server.add("a", 8)
    assert server.steps(2) == [{"prefill": {"a": 8}}, {"decode": ["a"], "finished": ["a"]}]
    assert a.num_tokens == 10


def test_rule_02_running_requests_are_served_before_waiting_ones() -> None:
    """vLLM 0.33: a's long prompt takes the whole budget again; b gets what its end leaves."""
    server = Server(batching="unified", budget=8)
    server.add("a", 20)
    server.add("b", 4)
    assert server.steps(3) == [
        {"prefill": {"a": 8}},
        {"prefill": {"a": 8}},
        {"prefill": {"a": 4, "b": 4}},
    ]


def test_rule_02_a_batch_that_takes_the_whole_budget_admits_none() -> None:
    """vLLM 0.33: two decodes and a budget of two: c waits, although it has a seat and memory."""
    server = Server(batching="unified", budget=2)
    for name in "abc":
        server.add(name, 1)
    assert server.steps(2) == [{"prefill": {"a": 1, "b": 1}}, {"decode": ["a", "b"]}]
    assert server.waiting == ["c"]


def test_rule_02_running_goes_in_order_and_what_the_budget_does_not_reach_is_held() -> None:
    """vLLM 0.33: two groups of three under a budget of four: the second gets no token yet."""
    server = Server(batching="unified", budget=4)
    server.add("a", 2, 3, n=3)
    b = server.add("b", 2, n=3)
    assert server.step() == {"prefill": {"a": 2, "b": 2}}
    assert server.step() == {"decode": ["a"], "held": ["b"], "copies": 2}
    assert b.generated == 1
    assert server.step() == {"decode": ["a"], "held": ["b"], "finished": ["a"]}
    assert server.step() == {"decode": ["b"], "copies": 2}
    assert b.generated == 2


def test_rule_02_a_step_that_preempts_admits_none() -> None:
    """vLLM 0.33: a needs one of b's two blocks; c would fit into the other, and waits."""
    server = Server(blocks=4, batching="unified")
    server.add("a", 8)
    server.add("b", 8)
    server.step()
    server.add("c", 4)
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}
    assert (server.waiting, server.free) == (["b", "c"], 1)


def test_rule_03_need_is_exact() -> None:
    """vLLM 0.33: without a free block, two requests go on until one really needs one."""
    server = Server(blocks=4, block_size=4, batching="unified")
    server.add("a", 6)
    server.add("b", 6)
    assert server.steps(4) == [
        {"prefill": {"a": 6, "b": 6}},
        {"decode": ["a", "b"]},
        {"decode": ["a", "b"]},
        {"decode": ["a"], "preempted": ["b"]},
    ]


def test_rule_04_the_last_of_running_yields_and_leads_the_waiting_queue() -> None:
    """vLLM 0.33: first come, first served; it goes back to the front, ahead of the newcomer."""
    server = Server(blocks=6, batching="unified")
    for name in "abc":
        server.add(name, 8)
    server.step()
    server.add("d", 8)
    assert server.step() == {"decode": ["a", "b"], "preempted": ["c"]}
    assert server.waiting == ["c", "d"]


def test_rule_04_the_needy_one_may_be_the_last_and_ends_the_scan() -> None:
    """vLLM 0.33: a takes c's block; b, now the last, pops itself."""
    server = Server(blocks=3, batching="unified")
    for name in "abc":
        server.add(name, 4)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["c", "b"]}
    assert (server.waiting, server.free) == (["b", "c"], 1)


def test_rule_04_a_preempted_request_starts_from_nothing_and_samples_on() -> None:
    """vLLM 0.33: always recompute: prompt and generated tokens again, then the next token."""
    server = Server(blocks=4, batching="unified")
    server.add("a", 8, output=2)
    b = server.add("b", 8)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "finished": ["a"]}
    plan = server.plan()
    assert spans(plan.chunks) == [("b", 0, 0, 9, True)]
    server.commit(plan)
    assert (b.generated, b.preemptions, b.recomputed_tokens) == (2, 1, 8)


def test_rule_05_the_least_urgent_yields_wherever_it_runs() -> None:
    """vLLM 0.33: the victim is the greatest (priority, arrival), here the first of running."""
    server = Server(blocks=6, batching="unified", policy="priority")
    server.add("a", 6, priority=9)
    server.step()
    server.add("b", 8, priority=1)
    server.add("c", 8, priority=1)
    server.step()
    assert server.running == ["a", "b", "c"]
    assert server.step() == {"decode": ["b", "c"], "preempted": ["a"]}


def test_rule_05_among_equals_the_latest_arrival_yields() -> None:
    """vLLM 0.33: the priorities are equal, so the later arrival is the victim, a."""
    server = Server(blocks=4, batching="unified", policy="priority")
    server.add("a", 6, arrival=2.0)
    server.step()
    server.add("b", 8, arrival=1.0)
    server.step()
    assert server.running == ["a", "b"]
    assert server.step() == {"decode": ["b"], "preempted": ["a"]}


def test_rule_05_tokens_already_scheduled_for_the_victim_return_to_the_budget() -> None:
    """vLLM 0.33: a has its token when b takes its block; of three tokens c gets two, not one."""
    server = Server(blocks=3, block_size=8, batching="unified", policy="priority", budget=3)
    server.add("a", 1, priority=9)
    server.step()
    server.add("b", 6, priority=1)
    server.add("c", 8, priority=2)
    assert server.steps(3) == [{"prefill": {"b": 2}, "decode": ["a"]}] * 3
    assert server.steps(2) == [{"prefill": {"c": 1}, "decode": ["a", "b"]}] * 2
    assert server.step() == {"prefill": {"c": 2}, "decode": ["b"], "preempted": ["a"]}


def test_rule_05_waiting_is_ordered_by_priority_then_arrival() -> None:
    """vLLM 0.33: a heap; arrivals take their place at once."""
    server = Server(batching="unified", policy="priority", max_seqs=1)
    server.add("a", 4, priority=5)
    server.add("b", 4, priority=1)
    server.add("c", 4, priority=5)
    server.add("d", 4, priority=5, arrival=-1.0)
    assert server.waiting == ["b", "d", "a", "c"]
    assert server.step() == {"prefill": {"b": 4}}


def test_rule_05_no_waiting_request_displaces_a_running_one() -> None:
    """vLLM 0.33: the urgent request waits for a seat."""
    server = Server(batching="unified", policy="priority", max_seqs=1)
    server.add("a", 4, priority=9)
    server.step()
    server.add("b", 4, priority=1)
    assert server.step() == {"decode": ["a"]}
    assert server.queues == {"running": ["a"], "waiting": ["b"]}


def test_rule_05_after_one_that_preempts_itself_the_scan_goes_on() -> None:
    """vLLM 0.33: a is the least urgent and needs a block: it yields, and b behind it decodes."""
    server = Server(blocks=4, batching="unified", policy="priority")
    server.add("a", 7, priority=9)
    server.step()
    server.add("b", 6, priority=1)
    assert server.step() == {"prefill": {"b": 6}, "decode": ["a"]}
    assert server.running == ["a", "b"]
    assert server.step() == {"decode": ["b"], "preempted": ["a"]}


def test_rule_06_the_first_that_lacks_blocks_ends_the_scan() -> None:
    """vLLM 0.33: c would fit into the block that is left, but b stands before it."""
    server = Server(blocks=4, batching="unified")
    server.add("a", 12)
    server.add("b", 8)
    server.add("c", 4)
    assert server.step() == {"prefill": {"a": 12}}
    assert (server.waiting, server.free) == (["b", "c"], 1)


def test_rule_06_the_last_admitted_takes_what_is_left_of_the_budget() -> None:
    """vLLM 0.33: c gets a chunk of 2; no admission follows it."""
    server = Server(batching="unified", budget=10)
    server.add("a", 4)
    server.add("b", 4)
    server.add("c", 4)
    server.add("d", 4)
    assert server.step() == {"prefill": {"a": 4, "b": 4, "c": 2}}
    assert server.waiting == ["d"]


@pytest.mark.parametrize(
    ("blocks", "step"), [(4, {"prefill": {"a": 10}}), (5, {"prefill": {"a": 10, "b": 2}})]
)
def test_rule_06_all_blocks_of_a_prompt_must_be_free_though_a_chunk_takes_few(
    blocks: int, step: Step
) -> None:
    """vLLM 0.33: b's chunk of 2 needs a block, its prompt of 8 two; after a, 1 or 2 are free."""
    server = Server(blocks=blocks, batching="unified", budget=12)
    server.add("a", 10)
    server.add("b", 8)
    assert server.step() == step
    assert server.free == 1


def test_rule_07_admission_needs_a_seat() -> None:
    """vLLM 0.33: no more than max_seqs run, whatever the budget."""
    server = Server(batching="unified", max_seqs=2)
    for name in "abc":
        server.add(name, 4)
    assert server.step() == {"prefill": {"a": 4, "b": 4}}
    assert server.step() == {"decode": ["a", "b"]}
    assert server.waiting == ["c"]


def cached(blocks: int = 100) -> Server:
    return Server(blocks, batching="unified", cache=True)


def test_rule_08_a_hit_is_capped_so_that_one_token_is_computed() -> None:
    """vLLM 0.33: an exact 2-block prompt of 8 tokens hits one block, and computes the other."""
    server = cached()
    server.add("a", range(8), output=1)
    server.step()
    b = server.add("b", range(8))
    assert server.step() == {"prefill": {"b": 4}, "hits": {"b": 4}}
    assert b.cached_tokens == 4


def test_rule_08_a_chain_of_full_blocks_is_hit_as_far_as_it_agrees() -> None:
    """vLLM 0.33: two of three full blocks agree; equal tokens after a difference do not count."""
    server = cached()
    server.add("a", [*range(12), 99], output=1)
    server.step()
    server.add("b", [*range(8), 50, 9, 10, 11, 99])
    server.add("c", [50, 1, 2, 3, *range(4, 13)])
    assert server.step() == {"prefill": {"b": 5, "c": 13}, "hits": {"b": 8}}


def test_rule_08_blocks_are_registered_when_the_step_that_fills_them_is_planned() -> None:
    """vLLM 0.33: b hits in the very step that computes a's blocks, and shares them."""
    server = cached()
    a = server.add("a", range(9))
    b = server.add("b", range(9))
    assert server.step() == {"prefill": {"a": 9, "b": 1}, "hits": {"b": 8}}
    assert a.tables[0][:2] == b.tables[0][:2]


def test_rule_08_a_partial_block_is_not_registered_until_a_decode_fills_it() -> None:
    """vLLM 0.33: 7 tokens fill one block; the eighth, generated, completes the second."""
    server = cached()
    server.add("a", range(7), output=3)
    server.step({"a": 7})
    server.add("b", range(9))
    assert server.step({"a": 8, "b": 0}) == {
        "decode": ["a"],
        "prefill": {"b": 1},
        "hits": {"b": 8},
    }


def test_rule_08_of_equal_blocks_the_first_registered_is_hit() -> None:
    """vLLM 0.33: b computes its last block itself, though a has the same; c hits a's."""
    server = cached()
    a = server.add("a", range(8))
    b = server.add("b", range(8))
    server.step()
    assert (a.tables, b.tables) == ([[0, 1]], [[0, 2]])
    c = server.add("c", range(9))
    server.step()
    assert c.tables[0][:2] == [0, 1]


def test_rule_08_a_hit_takes_a_reference_and_leaves_the_free_list() -> None:
    """vLLM 0.33: a's two blocks are free and cached; b's hit takes them out, and one new one."""
    server = cached(blocks=5)
    server.add("a", range(9), output=1)
    server.step()
    assert (server.free, server.memory.cached) == (5, 2)
    b = server.add("b", range(9))
    server.step()
    assert b.tables[0][:2] == [0, 1]
    assert (server.free, server.memory.cached) == (2, 0)


def test_rule_08_a_failed_allocation_touches_nothing() -> None:
    """vLLM 0.33: b hits two idle blocks but lacks two more; those two stay free and cached."""
    server = cached(blocks=4)
    server.add("a", range(8), output=1)
    server.step()
    server.add("x", range(50, 56))
    server.step()
    server.add("b", range(13))
    assert server.step() == {"decode": ["x"]}
    assert (server.free, server.memory.cached) == (2, 2)
    server.scheduler.abort("x", server.now)
    assert server.step() == {"prefill": {"b": 5}, "hits": {"b": 8}}


def test_rule_09_the_free_list_is_the_eviction_order() -> None:
    """vLLM 0.33: blocks without a hash go to the front, hashed ones tail first to the back."""
    server = cached(blocks=6)
    a = server.add("a", range(9), output=1)
    plan = server.plan()
    assert a.tables == [[0, 1, 2]]  # the third is partial, so it has no hash
    server.commit(plan)  # free: 2, then 3 4 5 as they were, then a's tail 1 and its head 0
    b = server.add("b", range(100, 116))
    c = server.add("c", range(200, 203))
    server.step()
    assert (b.tables, c.tables) == ([[2, 3, 4, 5]], [[1]])


def test_rule_09_allocation_drops_the_hash_and_a_freed_block_keeps_it_until_then() -> None:
    """vLLM 0.33: of a's two idle blocks, c takes the tail; the head can still be hit."""
    server = cached(blocks=6)
    server.add("a", range(9), output=1)
    server.step()
    server.add("b", range(100, 116))
    assert server.memory.cached == 2
    server.add("c", range(200, 203))
    server.step()
    assert (server.free, server.memory.cached) == (1, 1)
    server.scheduler.abort("b", server.now)
    server.add("d", range(9))
    assert server.step()["hits"] == {"d": 4}


def test_rule_09_equal_blocks_are_not_merged_and_stand_in_for_one_another() -> None:
    """vLLM 0.33: a's and b's last blocks are equal; when a's is taken, b's is hit instead."""
    server = cached(blocks=4)
    a = server.add("a", range(8), output=1)
    b = server.add("b", range(8))
    plan = server.plan()
    assert (a.tables, b.tables) == ([[0, 1]], [[0, 2]])
    server.commit(plan)
    x = server.add("x", range(50, 53))
    plan = server.plan()
    assert (b.tables, x.tables) == ([[0, 2, 3]], [[1]])  # a's last block is handed out
    server.commit(plan)
    server.scheduler.abort("b", server.now)
    c = server.add("c", range(9))
    plan = server.plan()
    assert c.tables[0][:2] == [0, 2]
    server.commit(plan)


def test_rule_10_with_caching_a_preempted_request_resumes_almost_for_free() -> None:
    """vLLM 0.33: a takes b's partial block; the full ones keep their keys, and 2 of 10 remain."""
    server = cached(blocks=6)
    server.add("a", range(12), output=2)
    b = server.add("b", range(20, 29))
    assert server.steps(3) == [
        {"prefill": {"a": 12, "b": 9}},
        {"decode": ["a"], "preempted": ["b"], "finished": ["a"]},
        {"prefill": {"b": 2}},
    ]
    assert b.recomputed_tokens == 9


def test_rule_11_an_empty_plan_is_a_plan() -> None:
    """vLLM 0.33: a step may have nothing to compute; it is committed like any other.

    There a lone request can outgrow the memory; here what cannot fit alone is rejected, so only
    a policy that admits no request leaves a step empty.
    """

    class Closed(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return False

    server = Server(batching="unified", policy=Closed())
    server.add("a", 4)
    plan = server.plan()
    assert plan.empty
    assert server.commit(plan) == []
    assert server.waiting == ["a"]


def test_rule_12_a_token_counts_when_it_is_committed() -> None:
    """vLLM 0.33: planning takes the memory for a chunk; the sampled token comes with the commit."""
    server = Server(batching="unified")
    a: Request = server.add("a", 6)
    plan = server.plan()
    assert (a.num_tokens, server.free) == (6, 98)
    server.commit(plan)
    assert (a.num_tokens, names(server.scheduler.queues.decoding())) == (7, ["a"])
