"""`batching=prefill_first` decides as vLLM 0.6.6 does: rule by rule, small input, exact output."""

import pytest

from pagedsim.core import ConfigError
from tests.core.drive import Server, Step, names


def test_rule_01_a_request_is_in_one_of_three_queues() -> None:
    """vLLM 0.6.6: new and recomputed requests wait, others run or are swapped; never two."""
    server = Server(blocks=4, cpu_blocks=2, preemption="swap")
    for name in "abc":
        server.add(name, 6)
    assert server.queues == {"waiting": ["a", "b", "c"]}
    server.step()
    assert server.queues == {"running": ["a", "b"], "waiting": ["c"]}
    server.step()
    assert server.queues == {"running": ["a"], "waiting": ["c"], "swapped": ["b"]}


def test_rule_01_a_recomputed_request_waits_like_a_new_one() -> None:
    """vLLM 0.6.6: a request preempted by recompute is back in waiting, with the new ones."""
    server = Server(blocks=4)
    for name in "abc":
        server.add(name, 6)
    server.steps(2)
    assert server.queues == {"running": ["a"], "waiting": ["b", "c"]}


def test_rule_02_running_sequences_take_seats_before_any_prefill() -> None:
    """vLLM 0.6.6: with three seats and two requests running, one of two new ones gets in."""
    server = Server(max_seqs=3)
    server.add("a", 4)
    server.add("b", 4)
    server.step()
    server.add("c", 4)
    server.add("d", 4)
    assert server.step() == {"prefill": {"c": 4}}
    assert server.step() == {"decode": ["a", "b", "c"]}
    assert server.waiting == ["d"]


def test_rule_02_decodes_leave_the_token_budget_to_prefills() -> None:
    """vLLM 0.6.6: three running requests do not make a prompt as long as the budget wait."""
    server = Server(budget=10, max_model_len=10)
    for name in "abc":
        server.add(name, 3)
    server.step()
    server.add("d", 10)
    assert server.step() == {"prefill": {"d": 10}, "finished": ["d"]}


def test_rule_03_a_step_is_all_prefill_or_all_decode() -> None:
    """vLLM 0.6.6: one admitted prompt, and no request decodes in that step."""
    server = Server()
    server.add("a", 6)
    assert server.step() == {"prefill": {"a": 6}}
    server.add("b", 6)
    assert server.step() == {"prefill": {"b": 6}}
    assert server.step() == {"decode": ["a", "b"]}


def test_rule_04_no_prefill_while_any_request_is_swapped() -> None:
    """vLLM 0.6.6: with a request on the CPU, a new prompt waits although it would fit."""
    server = Server(blocks=5, cpu_blocks=3, preemption="swap")
    server.add("a", 6)
    server.add("b", 10)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 3}
    server.add("c", 4)
    assert server.free == 3
    assert server.step() == {"decode": ["a", "b"], "resumed": ["b"], "swap_in": 3}
    assert server.waiting == ["c"]


def test_rule_05_the_first_that_lacks_blocks_ends_the_scan() -> None:
    """vLLM 0.6.6: c would fit into the block that is left, but b stands before it."""
    server = Server(blocks=4)
    server.add("a", 12)
    server.add("b", 8)
    server.add("c", 4)
    assert server.step() == {"prefill": {"a": 12}}
    assert (server.waiting, server.free) == (["b", "c"], 1)


def test_rule_05_the_first_that_exceeds_the_token_budget_ends_the_scan() -> None:
    """vLLM 0.6.6: c's two tokens are within the budget, but b stands before it."""
    server = Server(budget=10, max_model_len=10)
    server.add("a", 6)
    server.add("b", 6)
    server.add("c", 2)
    assert server.step() == {"prefill": {"a": 6}}
    assert server.waiting == ["b", "c"]


def test_rule_05_the_first_that_lacks_seats_ends_the_scan() -> None:
    """vLLM 0.6.6: c needs one seat and one is left, but b needs two and stands before it."""
    server = Server(max_seqs=3)
    server.add("a", 4, n=2)
    server.add("b", 4, n=2)
    server.add("c", 4)
    assert server.step() == {"prefill": {"a": 4}}
    assert server.waiting == ["b", "c"]


def test_rule_06_no_partial_prompts() -> None:
    """vLLM 0.6.6: under a budget of 10, prompts of 6, 6 and 2 take two steps, then all decode."""
    server = Server(budget=10, max_model_len=10)
    server.add("a", 6)
    server.add("b", 6)
    server.add("c", 2)
    assert server.steps(3) == [
        {"prefill": {"a": 6}},
        {"prefill": {"b": 6, "c": 2}},
        {"decode": ["a", "b", "c"]},
    ]


def test_rule_07_a_prompt_that_is_too_long_is_ignored_and_the_scan_goes_on() -> None:
    """vLLM 0.6.6: of prompts of 11 and 10 with a limit of 10, the second runs in the same step."""
    server = Server(max_model_len=10)
    server.add("a", 11)
    server.add("b", 10)
    assert server.step() == {"rejected": ["a"], "prefill": {"b": 10}, "finished": ["b"]}


def test_rule_07_the_token_budget_never_is_the_smaller_limit() -> None:
    """vLLM 0.6.6: without chunks, a budget below the model's length is refused at the start."""
    with pytest.raises(ConfigError, match=r"max_batched_tokens=9: .* max_model_len=10"):
        Server(budget=9, max_model_len=10)


@pytest.mark.parametrize(
    ("blocks", "prompt_blocks", "fits"),
    [(100, 99, True), (100, 100, False), (99, 99, True)],
    ids=["1-of-100-stays-free", "none-of-100-stays-free", "99-have-no-watermark"],
)
def test_rule_08_what_can_never_leave_the_watermark_free_is_ignored(
    blocks: int, prompt_blocks: int, fits: bool
) -> None:
    """vLLM 0.6.6: the watermark is int(0.01 × blocks): 1 of 100, but 0 of 99."""
    server = Server(blocks=blocks, block_size=4, watermark=0.01)
    server.add("a", prompt_blocks * 4 - 2)
    prefill = {"prefill": {"a": prompt_blocks * 4 - 2}}
    assert server.step() == (prefill if fits else {"rejected": ["a"]})


def test_rule_08_a_prompt_may_fill_the_memory_to_the_last_slot() -> None:
    """vLLM 0.6.6: a 99-block prompt fits 99 blocks; its one sampled token is never stored."""
    server = Server(blocks=99, block_size=4, watermark=0.01)
    server.add("a", 99 * 4)
    assert server.step() == {"prefill": {"a": 396}, "finished": ["a"]}


@pytest.mark.parametrize(
    ("prompt", "step"), [(49 * 4, {"prefill": {"b": 196}}), (50 * 4, {"decode": ["a"]})]
)
def test_rule_08_what_does_not_leave_the_watermark_free_now_waits(prompt: int, step: Step) -> None:
    """vLLM 0.6.6: beside 50 of 100 blocks in use, 49 more leave one free and 50 do not."""
    server = Server(blocks=100, block_size=4, watermark=0.01)
    server.add("a", 50 * 4 - 2)
    server.step()
    server.add("b", prompt)
    assert server.step() == step


def test_rule_09_a_decode_may_take_the_watermark() -> None:
    """vLLM 0.6.6: a 99-block prompt leaves block 100 free, and its first decode takes that."""
    server = Server(blocks=100, block_size=4, watermark=0.01)
    server.add("a", 396)
    server.step()
    assert server.free == 1
    assert server.step() == {"decode": ["a"]}
    assert server.free == 0


def test_rule_09_swap_in_leaves_the_watermark_free() -> None:
    """vLLM 0.6.6: 2 of 8 blocks must stay free beside a, so b does not come back to its 4."""
    server = Server(blocks=8, cpu_blocks=8, preemption="swap", watermark=0.25)
    server.add("a", 12)
    server.add("b", 12)
    server.step()
    assert server.step() == {"decode": ["a", "b"]}
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 4}
    assert server.free == 4
    assert server.step() == {"decode": ["a"]}  # 4 free - 4 needed < 2
    server.scheduler.abort("a", server.now)
    assert server.step() == {"decode": ["b"], "resumed": ["b"], "swap_in": 4}


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_rule_10_a_prompt_takes_its_blocks_rounded_up(prompt: int, blocks: int) -> None:
    """vLLM 0.6.6: ceil(length / block size) blocks, none ahead for the token to come."""
    server = Server(blocks=10, block_size=4)
    server.add("a", prompt)
    server.step()
    assert server.free == 10 - blocks


def test_rule_10_a_recomputed_request_prefills_what_it_had_generated_in_one_step() -> None:
    """vLLM 0.6.6: b comes back with a prompt of 6 and one generated token: 7, in one go."""
    server = Server(blocks=4)
    server.add("a", 6, output=3)
    server.add("b", 6)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}
    assert server.step() == {"prefill": {"b": 7}}


def test_rule_11_decode_goes_through_running_in_order() -> None:
    """vLLM 0.6.6: with one free block and three that need one, the first in the list gets it."""
    server = Server(blocks=7)
    for name in "abc":
        server.add(name, 8)
    server.step()
    assert server.free == 1
    assert server.step() == {"decode": ["a", "b"], "preempted": ["c"]}
    assert server.free == 1


def test_rule_12_append_test_is_conservative() -> None:
    """vLLM 0.6.6: two requests of 6 tokens in 4 blocks of 4 need no block, and one must yield."""
    server = Server(blocks=4, block_size=4)
    server.add("a", 6)
    server.add("b", 6)
    assert server.step() == {"prefill": {"a": 6, "b": 6}}
    assert server.free == 0
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}


def test_rule_13_the_last_yields_until_the_needy_fits_who_then_may_be_last_himself() -> None:
    """vLLM 0.6.6: a takes c's block; b, the last of the batch, gives up its own."""
    server = Server(blocks=3)
    for name in "abc":
        server.add(name, 4)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["c", "b"]}
    assert server.free == 1


def test_rule_13_as_many_yield_as_the_needy_one_needs() -> None:
    """vLLM 0.6.6: two sequences need two blocks, so two requests of one block yield, last first."""
    server = Server(blocks=3)
    server.add("a", 4, n=2)
    server.add("b", 4)
    server.add("c", 4)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["c", "b"]}
    assert server.free == 0


def test_rule_13_a_lone_request_preempts_itself() -> None:
    """vLLM 0.6.6: no free block and no other request: it preempts itself; an empty step."""
    server = Server(blocks=2)
    server.add("a", 4)
    assert server.steps(2) == [{"prefill": {"a": 4}}, {"decode": ["a"]}]
    assert server.free == 0
    assert server.step() == {"preempted": ["a"]}
    assert (server.waiting, server.free) == (["a"], 2)


def test_rule_14_a_victim_is_taken_whole() -> None:
    """vLLM 0.6.6: a lacks one block; b gives up all of its four, and keeps none for later."""
    server = Server(blocks=5)
    server.add("a", 4)
    server.add("b", 16)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}
    assert server.free == 3


def test_rule_15_victims_lead_the_waiting_queue_the_oldest_first() -> None:
    """vLLM 0.6.6: c then b are preempted; b waits before c, and both before the newcomer d."""
    server = Server(blocks=3)
    for name in "abc":
        server.add(name, 4)
    server.step()
    server.add("d", 4)
    assert server.step() == {"decode": ["a"], "preempted": ["c", "b"]}
    assert server.waiting == ["b", "c", "d"]


def test_rule_16_prefill_and_preemption_can_alternate() -> None:
    """vLLM 0.6.6: the preempted is prefilled at once, before any decode, and preempted again."""
    server = Server(blocks=3)
    server.add("a", 9)
    assert server.steps(4) == [
        {"prefill": {"a": 9}},
        {"preempted": ["a"]},
        {"prefill": {"a": 10}},
        {"preempted": ["a"]},
    ]


def test_rule_17_swapped_requests_come_back_in_the_order_in_which_they_left() -> None:
    """vLLM 0.6.6: the youngest is preempted first, so it is also brought back first."""
    server = Server(blocks=3, cpu_blocks=3, preemption="swap")
    server.add("a", 4, output=2)
    server.add("b", 4)
    server.add("c", 4)
    server.step()
    assert server.step() == {
        "decode": ["a"],
        "preempted": ["c", "b"],
        "swap_out": 2,
        "finished": ["a"],
    }
    assert server.swapped == ["c", "b"]
    assert server.step() == {"decode": ["c"], "resumed": ["c"], "swap_in": 1}
    assert server.swapped == ["b"]


def test_rule_17_later_victims_queue_behind_earlier_ones() -> None:
    """vLLM 0.6.6: c is preempted a step before b, so c is ahead on the way back."""
    server = Server(blocks=6, cpu_blocks=8, preemption="swap")
    server.add("a", 7)
    server.add("b", 7)
    server.add("c", 7)
    server.step()
    assert server.step() == {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 2}
    assert server.step() == {"decode": ["a", "b"]}  # each takes one of c's blocks
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 3}
    assert server.swapped == ["c", "b"]


def test_rule_18_a_swapped_request_decodes_in_the_step_that_brings_it_back() -> None:
    """vLLM 0.6.6: it does so in a step without preemptions, and is then the last of running."""
    server = Server(blocks=6, cpu_blocks=2, preemption="swap")
    server.add("a", 6)
    server.add("b", 6, output=3)
    server.add("c", 6)
    server.step()
    preempts = {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 2}
    assert server.step() == preempts
    assert server.step() == {
        "decode": ["a", "b", "c"],
        "resumed": ["c"],
        "swap_in": 2,
        "finished": ["b"],
    }
    assert server.running == ["a", "c"]


def test_rule_18_swap_in_needs_the_blocks_of_the_next_token() -> None:
    """vLLM 0.6.6: b left with 8 tokens in 2 blocks and a ninth to store, so it needs 3 blocks."""
    server = Server(blocks=4, cpu_blocks=4, preemption="swap")
    server.add("a", 7)
    server.add("b", 8)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 2}
    assert server.free == 2
    assert server.step() == {"decode": ["a"]}  # takes its third block; b would need 3
    server.scheduler.abort("a", server.now)
    assert server.step() == {"decode": ["b"], "resumed": ["b"], "swap_in": 2}
    assert server.free == 1


def test_rule_18_swap_in_stops_at_the_first_that_does_not_fit() -> None:
    """vLLM 0.6.6: b's two blocks would fit, but c stands before it and needs four."""
    server = Server(blocks=5, cpu_blocks=5, preemption="swap")
    server.add("a", 4)
    server.add("b", 4)
    server.add("c", 12)
    server.step()
    server.step()
    assert server.swapped == ["c"]
    server.steps(3)
    assert (server.running, server.free) == (["a", "b"], 1)
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 2}
    assert (server.swapped, server.free) == (["c", "b"], 2)
    assert server.step() == {"decode": ["a"]}
    assert server.swapped == ["c", "b"]


def test_rule_19_swap_out_and_swap_in_never_share_a_step() -> None:
    """vLLM 0.6.6: b's turn to leave frees more than c needs to come back; c waits a step."""
    server = Server(blocks=6, cpu_blocks=6, preemption="swap")
    server.add("a", 4)
    server.add("b", 11)
    server.add("c", 4)
    assert server.steps(5) == [
        {"prefill": {"a": 4, "b": 11, "c": 4}},
        {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 1},
        {"decode": ["a", "b"]},
        {"decode": ["a"], "preempted": ["b"], "swap_out": 4},
        {"decode": ["a", "c"], "resumed": ["c"], "swap_in": 1},
    ]


def test_rule_19_block_pairs_follow_the_block_table() -> None:
    """vLLM 0.6.6: (GPU, CPU) on the way out and (CPU, GPU) on the way in, first block first."""
    server = Server(blocks=4, cpu_blocks=2, preemption="swap")
    server.add("a", 6, output=2)
    b = server.add("b", 6)
    server.step()
    gpu = b.tables[0].copy()
    plan = server.plan()
    cpu = b.cpu_tables[0].copy()
    assert plan.swap_out == list(zip(gpu, cpu, strict=True))
    server.commit(plan)
    plan = server.plan()
    assert plan.swap_in == list(zip(cpu, b.tables[0], strict=True))
    assert sorted(gpu) == [2, 3]
    assert sorted(cpu) == [0, 1]


def test_rule_20_running_keeps_its_order_and_newcomers_join_its_end() -> None:
    """vLLM 0.6.6: who was not touched, then this step's prefills; or decodes, then swapped-in."""
    server = Server(blocks=8, cpu_blocks=2, preemption="swap")
    server.add("a", 6)
    server.add("b", 6)
    server.step()
    server.add("c", 6)
    server.add("d", 6)
    assert server.step() == {"prefill": {"c": 6, "d": 6}}
    assert server.running == ["a", "b", "c", "d"]
    assert server.step() == {"decode": ["a", "b", "c"], "preempted": ["d"], "swap_out": 2}
    assert server.running == ["a", "b", "c"]
    assert server.step()["decode"] == ["a", "b", "c", "d"]
    assert server.running == ["a", "b", "c", "d"]


def test_rule_21_an_urgent_request_displaces_the_least_urgent_and_runs_a_step_later() -> None:
    """vLLM 0.6.6: the displaced goes back to waiting, is not counted as preempted, and restarts."""
    server = Server(policy="priority", max_seqs=2)
    server.add("a", 6, priority=5)
    server.add("b", 6, priority=7)
    server.step()
    server.add("c", 6, priority=1)
    assert server.step() == {"displaced": ["b"], "decode": ["a"]}
    assert server.waiting == ["c", "b"]
    assert server.step() == {"prefill": {"c": 6}}
    assert server.step() == {"decode": ["c", "a"]}  # sorted: c is the more urgent
    assert server.running == ["c", "a"]


def test_rule_21_displaces_as_many_as_the_urgent_request_needs() -> None:
    """vLLM 0.6.6: the worst go first, until it could be admitted."""
    server = Server(blocks=6, policy="priority")
    server.add("a", 6, priority=1)
    server.add("b", 6, priority=2)
    server.add("c", 6, priority=3)
    server.step()
    server.add("d", 15, priority=1)
    assert server.step() == {"displaced": ["c", "b"], "decode": ["a"]}
    assert server.waiting == ["d", "b", "c"]
    assert server.step() == {"prefill": {"d": 15}}


def test_rule_21_displaces_for_one_request_a_step() -> None:
    """vLLM 0.6.6: two urgent requests wait; each step without a prefill makes room for one."""
    server = Server(policy="priority", max_seqs=2)
    server.add("a", 4, priority=8)
    server.add("b", 4, priority=9)
    server.step()
    server.add("c", 4, priority=1)
    server.add("d", 4, priority=2)
    assert server.steps(5) == [
        {"displaced": ["b"], "decode": ["a"]},
        {"prefill": {"c": 4}},
        {"displaced": ["a"], "decode": ["c"]},
        {"prefill": {"d": 4}},
        {"decode": ["c", "d"]},
    ]
    assert server.waiting == ["a", "b"]


def test_rule_21_no_request_is_displaced_for_one_that_fits() -> None:
    """vLLM 0.6.6: an urgent request that can simply be admitted is."""
    server = Server(policy="priority")
    server.add("a", 6, priority=5)
    server.step()
    server.add("b", 6, priority=1)
    assert server.step() == {"prefill": {"b": 6}}


def test_rule_21_equal_priorities_go_by_arrival() -> None:
    """vLLM 0.6.6: the key is (priority, arrival), so a later equal displaces none."""
    server = Server(policy="priority", max_seqs=1)
    server.add("a", 6, priority=3)
    server.step()
    server.add("late", 6, priority=3, arrival=2.0)
    server.add("early", 6, priority=3, arrival=1.0)
    assert server.step() == {"decode": ["a"]}
    assert server.waiting == ["early", "late"]


def test_rule_21_waiting_is_not_sorted_before_the_prefill_scan() -> None:
    """vLLM 0.6.6: in a step that admits, arrivals still stand in their order of arrival."""
    server = Server(policy="priority", max_seqs=1)
    server.add("a", 4, priority=5)
    server.add("b", 4, priority=1)
    assert server.waiting == ["a", "b"]
    assert server.step() == {"prefill": {"a": 4}}
    assert server.step() == {"displaced": ["a"]}
    assert server.waiting == ["b", "a"]
    assert server.step() == {"prefill": {"b": 4}}


def test_rule_21_the_victim_of_a_decode_is_the_least_urgent() -> None:
    """vLLM 0.6.6: running is sorted before the decode, so its last is its worst."""
    server = Server(blocks=4, policy="priority")
    server.add("a", 6, priority=5)
    server.add("b", 6, priority=1)
    server.step()
    assert server.step() == {"decode": ["b"], "preempted": ["a"]}


def test_rule_22_forks_share_blocks_and_copy_the_partial_one_on_write() -> None:
    """vLLM 0.6.6: of three sequences on one half-full block two get a copy, the last keeps it."""
    server = Server(blocks=8, block_size=4)
    a = server.add("a", 6, n=3)
    server.step()
    assert a.tables == [[0, 1], [0, 1], [0, 1]]
    assert server.free == 6
    plan = server.plan()
    assert a.tables == [[0, 2], [0, 3], [0, 1]]
    assert plan.copies == {2: 1, 3: 1}  # {target: source}
    assert server.free == 4
    server.commit(plan)
    assert server.step() == {"decode": ["a"]}  # nothing is shared but the prompt: no more copies


def test_rule_22_a_full_shared_tail_is_not_copied() -> None:
    """vLLM 0.6.6: nothing will be written into it; each sequence only gets a new block."""
    server = Server(blocks=8, block_size=4)
    a = server.add("a", 8, n=2)
    server.step()
    plan = server.plan()
    assert plan.copies == {}
    assert a.tables == [[0, 1, 2], [0, 1, 3]]
    server.commit(plan)


def test_a_step_that_sorts_newcomers_is_not_quiet() -> None:
    """The one in front did not fit; the next step looks at another."""
    server = Server(5, policy="priority")
    server.add("a", 4, priority=0)
    server.step()
    server.add("x", 17, priority=9)
    server.add("u", 4, priority=5)
    plan = server.plan()
    assert (names(plan.decodes), server.waiting) == (["a"], ["u", "x"])
    assert server.scheduler.uneventful(plan) == 0
    server.commit(plan)
    assert server.step() == {"prefill": {"u": 4}}
