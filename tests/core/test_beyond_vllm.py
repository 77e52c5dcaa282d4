"""What the scheduler can do that neither vLLM did: every policy with every way to yield."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from pagedsim.build import BATCHINGS
from pagedsim.core import (
    Admitted,
    Arrived,
    ConfigError,
    Event,
    Left,
    Policy,
    Preempted,
    PreemptionMode,
    PrefillFirst,
    Request,
    ReservedMax,
    ServerState,
    State,
    StepPlan,
)
from policies.ordering import Priority
from tests.core.drive import Server, shown, spans

# Priority with swap


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_priority_swaps_the_least_urgent_out(batching: str) -> None:
    server = Server(6, cpu_blocks=6, batching=batching, policy="priority", preemption="swap")
    server.add("a", 8, priority=1)
    server.add("b", 8, priority=3)
    server.add("c", 8, priority=2)
    assert server.steps(2) == [
        {"prefill": {"a": 8, "b": 8, "c": 8}},
        {"decode": ["a", "c"], "preempted": ["b"], "swap_out": 2},
    ]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_the_most_urgent_of_the_swapped_comes_back_first(batching: str) -> None:
    """First come, first served, it would be c, who left first."""
    server = Server(4, cpu_blocks=2, batching=batching, policy="priority", preemption="swap")
    server.add("a", 8, priority=1, output=2, n=2)
    server.add("b", 4, priority=2)
    server.add("c", 4, priority=3)
    assert server.steps(2)[1] == {
        "decode": ["a"],
        "preempted": ["c", "b"],
        "swap_out": 2,
        "finished": ["a"],
    }
    assert server.step() == {"decode": ["b", "c"], "resumed": ["b", "c"], "swap_in": 2}


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_swapped_request_holds_back_all_that_are_less_urgent(batching: str) -> None:
    """b, on the CPU, does not fit yet; `more` goes before it, `less` behind it."""
    server = Server(8, cpu_blocks=2, batching=batching, policy="priority", preemption="swap")
    server.add("a", 8, priority=1)
    server.add("b", 8, priority=3)
    server.add("c", 8, priority=2)
    assert server.steps(2)[1] == {"decode": ["a", "c"], "preempted": ["b"], "swap_out": 2}
    server.add("more", 3, priority=2)
    server.add("less", 1, priority=9)
    assert server.step()["prefill"] == {"more": 3}


def test_a_displaced_request_is_swapped_and_comes_back_without_recomputing() -> None:
    server = Server(cpu_blocks=4, policy="priority", preemption="swap", max_seqs=1)
    a = server.add("a", 6, priority=5, output=4)
    server.steps(2)
    server.add("u", 6, priority=1, output=2)
    assert server.steps(4) == [
        {"displaced": ["a"], "swap_out": 2},
        {"prefill": {"u": 6}},
        {"decode": ["u"], "finished": ["u"]},
        {"decode": ["a"], "resumed": ["a"], "swap_in": 2},
    ]
    assert (a.recomputed_tokens, a.swapped_blocks) == (0, 4)


def test_an_urgent_newcomer_goes_before_a_swapped_request() -> None:
    """First come, first served, it would wait (rule 4 of vLLM 0.6.6): not with priorities."""
    server = Server(5, cpu_blocks=3, policy=Priority(displace=False), preemption="swap")
    server.add("a", 6, priority=1)
    server.add("b", 10, priority=5)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"], "swap_out": 3}
    server.add("u", 4, priority=2)
    assert server.step() == {"prefill": {"u": 4}}


def test_an_urgent_newcomer_does_so_whenever_its_rank_was_taken() -> None:
    class Urgency(Policy):
        rank_changes = "always"

        def rank(self, request: Request, state: ServerState) -> float:
            return request.priority

    server = Server(4, cpu_blocks=4, policy=Urgency(), preemption="swap")
    server.add("a", 6, priority=1)
    server.add("b", 8, priority=5)
    assert server.steps(2)[1] == {"decode": ["a"], "preempted": ["b"], "swap_out": 2}
    server.add("last", 4, priority=9)
    server.add("u", 4, priority=0)
    assert server.step() == {"prefill": {"u": 4}}


# Prefill first, now and then


def test_after_an_admission_none_follows_for_some_decode_steps() -> None:
    """lightllm's max_wait_tokens: looked for after so many steps, then at each until one comes."""
    server = Server(batching=PrefillFirst(0.0, max_wait_tokens=2))
    server.add("a", 4)
    server.add("b", 4)
    assert server.step() == {"prefill": {"a": 4, "b": 4}}
    server.add("c", 4)
    assert [list(step) for step in server.steps(3)] == [["decode"], ["decode"], ["prefill"]]
    assert [list(step) for step in server.steps(3)] == [["decode"]] * 3
    server.add("d", 4)
    assert server.step() == {"prefill": {"d": 4}}


def test_who_finds_the_batch_at_its_end_does_not_wait() -> None:
    server = Server(batching=PrefillFirst(0.0, max_wait_tokens=9))
    server.add("a", 4, output=2)
    server.step()
    server.add("b", 4)
    assert server.steps(2) == [{"decode": ["a"], "finished": ["a"]}, {"prefill": {"b": 4}}]


def test_who_displaces_others_does_not_wait() -> None:
    batching = PrefillFirst(0.0, max_wait_tokens=9)
    server = Server(batching=batching, policy=Priority(displace=True), max_seqs=2)
    server.add("a", 4, priority=5)
    server.add("b", 4, priority=5)
    server.step()
    server.add("u", 4, priority=1)
    assert server.steps(2) == [{"decode": ["a"], "displaced": ["b"]}, {"prefill": {"u": 4}}]


# Swap under unified


def test_unified_swaps_and_resumes_in_the_order_of_leaving() -> None:
    server = Server(4, cpu_blocks=4, batching="unified", preemption="swap")
    server.add("a", 8, output=3)
    b = server.add("b", 7)
    assert server.steps(5) == [
        {"prefill": {"a": 8, "b": 7}},
        {"decode": ["a"], "preempted": ["b"], "swap_out": 2},
        {"decode": ["a"], "finished": ["a"]},
        {"decode": ["b"], "resumed": ["b"], "swap_in": 2},
        {"decode": ["b"]},
    ]
    assert (b.preemptions, b.recomputed_tokens, b.swapped_blocks) == (1, 0, 4)


def test_unified_swaps_a_prompt_in_the_middle_and_goes_on_where_it_was() -> None:
    server = Server(5, cpu_blocks=5, batching="unified", preemption="swap", budget=9)
    server.add("a", 8, output=3)
    b = server.add("b", 12)
    assert server.step() == {"prefill": {"a": 8, "b": 1}}
    plan = server.plan()
    assert (plan.preempted, plan.swap_out) == ((b,), [(2, 0)])
    server.commit(plan)
    assert server.step() == {"decode": ["a"], "finished": ["a"]}
    plan = server.plan()
    assert spans(plan.chunks) == [("b", 0, 1, 10, False)]
    assert len(plan.swap_in) == 1
    server.commit(plan)
    assert server.step() == {"prefill": {"b": 2}}


def test_unified_admits_beside_a_resumed_request_with_what_it_leaves() -> None:
    server = Server(5, cpu_blocks=4, batching="unified", preemption="swap", budget=20)
    server.add("a", 8, output=2)
    server.add("b", 12)
    assert server.steps(2)[1] == {
        "decode": ["a"],
        "preempted": ["b"],
        "swap_out": 3,
        "finished": ["a"],
    }
    server.add("c", 4)
    assert server.step() == {
        "decode": ["b"],
        "resumed": ["b"],
        "swap_in": 3,
        "prefill": {"c": 4},
    }


# The CPU pool is full


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_full_cpu_pool_falls_back_to_recompute(batching: str) -> None:
    """a's two sequences need c's block and b's; the CPU pool has room for one of them."""
    server = Server(4, cpu_blocks=1, batching=batching, preemption="swap")
    server.add("a", 8, n=2)
    server.add("b", 4)
    server.add("c", 4)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["c", "b"], "swap_out": 1}
    assert server.queues == {"running": ["a"], "swapped": ["c"], "waiting": ["b"]}


# A victim that this step had served


def test_a_victim_gives_back_the_chunk_that_this_step_planned_for_it() -> None:
    """Of 7 tokens p, first in order, had 6 and b 1; b takes p's memory, and c gets a token too."""

    class FirstYields(Priority):
        def choose_victim(
            self, running: Sequence[Request], needy: Request, state: ServerState
        ) -> Request:
            return running[0]

    policy = FirstYields(displace=True)  # so that the batch is sorted, and p comes first
    server = Server(6, batching="unified", policy=policy, budget=8, cache=True)
    server.add("b", range(7), priority=5)
    server.add("c", range(50, 51), priority=6)
    server.step()
    server.add("p", range(20, 31), priority=1)
    assert server.step() == {"decode": ["b", "c"], "prefill": {"p": 6}}
    plan = server.plan()
    assert shown(plan) == {"decode": ["b", "c"], "preempted": ["p"]}
    assert (plan.prefill_tokens, plan.prefill_context) == (0, 0)
    assert (plan.prefill_attention, plan.prefill_pairs) == (0, 0)
    assert server.memory.cached == 1  # of p's blocks, the one that an earlier step had filled
    server.commit(plan)


@pytest.mark.parametrize(
    ("preemption", "swap_out"), [("recompute", []), ("swap", [(0, 0), (1, 1), (1, 2)])]
)
def test_a_victim_takes_back_the_copies_that_this_step_planned_for_it(
    preemption: str, swap_out: list[tuple[int, int]]
) -> None:
    """a's second sequence was given block 4, a copy of 1: it goes to the CPU straight from 1."""

    class FirstYields(Policy):
        def choose_victim(
            self, running: Sequence[Request], needy: Request, state: ServerState
        ) -> Request:
            return running[0]

    server = Server(
        5, cpu_blocks=4, batching="unified", policy=FirstYields(), preemption=preemption
    )
    server.add("a", 6, n=2)
    server.add("b", 8)
    server.step()
    plan = server.plan()
    assert shown(plan)["preempted"] == ["a"]
    assert (plan.copies, list(plan.swap_out)) == ({}, swap_out)
    server.commit(plan)


# Abort


def moment(request: Request) -> str:
    if request.state is not State.RUNNING:
        return request.state.value
    return "decoding" if request.decoding else "prefilling"


@pytest.mark.parametrize("cache", [False, True], ids=["paged", "prefix"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_abort_frees_everything_at_any_moment(
    batching: str, preemption: str, n: int, cache: bool
) -> None:
    """The same run again and again, and x aborted a step later each time, before its commit too."""
    seen = set()
    for steps, pending in product(range(12), (False, True)):
        budget = 9 if batching == "unified" else None
        server = Server(
            7, cpu_blocks=7, cache=cache, batching=batching, preemption=preemption, budget=budget
        )
        server.add("keep", range(6), output=12)
        x = server.add("x", range(50, 62), n=n, max_tokens=8)
        server.steps(steps)
        plan = server.plan() if pending else None
        seen.add((moment(x), x.preemptions > 0))
        if not x.alive:
            continue
        assert server.scheduler.abort("x", 99.0) is x
        server.scheduler.check()
        assert (x.state, x.finish_reason, x.finished_at) == (State.ABORTED, "abort", 99.0)
        assert (x.tables, x.cpu_tables) == ((), ())
        if plan:
            assert server.commit(plan) in ([], ["keep"])
        assert "x" not in server.drain()
        assert (server.free, server.memory.cpu_free) == (7, 7)
    lost = ("waiting" if preemption == "recompute" else "swapped", True)
    assert {("waiting", False), ("prefilling", False), ("decoding", False), lost} <= seen


def test_blocks_that_an_aborted_request_was_to_compute_are_not_found() -> None:
    server = Server(cache=True)
    server.add("a", range(8))
    plan = server.plan()
    server.scheduler.abort("a", 0.0)
    server.commit(plan)
    assert server.memory.cached == 0
    server.add("b", range(9))
    assert server.step() == {"prefill": {"b": 9}}


def test_nothing_is_copied_into_the_blocks_of_an_aborted_group() -> None:
    """Reserved runs of 8: a's fork is due in the next step, but then the run is b's."""
    server = Server(memory=ReservedMax(16, max_model_len=8))
    server.add("a", 4, n=2)
    server.step()
    server.scheduler.abort("a", server.now)
    server.add("b", 4, n=2)
    assert server.step() == {"prefill": {"b": 4}}


def test_abort_of_all_while_a_step_runs() -> None:
    server = Server(8, batching="unified", budget=8)
    for name in "abc":
        server.add(name, 6)
    server.step()
    plan = server.plan()
    for name in "abc":
        server.scheduler.abort(name, 1.0)
    assert server.commit(plan) == []
    assert (server.queues, server.free) == ({}, 8)
    server.add("d", 4, output=1)
    assert server.step() == {"prefill": {"d": 4}, "finished": ["d"]}


def test_the_id_of_an_aborted_request_may_be_used_while_its_step_runs() -> None:
    server = Server()
    server.add("a", 6)
    server.step()
    plan = server.plan()
    server.scheduler.abort("a", 1.0)
    new = server.add("a", 3, output=1)
    server.commit(plan)
    assert (new.generated, server.waiting) == (0, ["a"])
    assert server.step() == {"prefill": {"a": 3}, "finished": ["a"]}


# Static batching


def test_a_static_batch_is_formed_over_as_many_steps_as_its_prompts_take() -> None:
    server = Server(batching="static", max_seqs=4, budget=16, max_model_len=16)
    server.add("a", 12, output=3)
    server.add("b", 12, output=2)
    server.add("c", 12, output=1)  # as it leaves, the batch is closed
    server.add("d", 12, output=1)
    assert server.steps(6) == [
        {"prefill": {"a": 12}},
        {"prefill": {"b": 12}},
        {"prefill": {"c": 12}, "finished": ["c"]},
        {"decode": ["a", "b"], "finished": ["b"]},
        {"decode": ["a"], "finished": ["a"]},
        {"prefill": {"d": 12}, "finished": ["d"]},
    ]


def test_a_static_batch_runs_to_its_end_before_the_next_begins() -> None:
    server = Server(batching="static", max_seqs=2)
    server.add("a", 6, output=1)
    server.add("b", 6, output=3)
    server.add("c", 6, output=2)
    assert server.steps(5) == [
        {"prefill": {"a": 6, "b": 6}, "finished": ["a"]},
        {"decode": ["b"]},
        {"decode": ["b"], "finished": ["b"]},
        {"prefill": {"c": 6}},
        {"decode": ["c"], "finished": ["c"]},
    ]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_loses_its_place_in_a_static_batch_leads_the_next(preemption: str) -> None:
    server = Server(4, batching="static", preemption=preemption, cpu_blocks=4)
    server.add("a", 6, output=3)
    server.add("b", 6, output=2)
    server.add("c", 4, output=1)
    assert server.step() == {"prefill": {"a": 6, "b": 6}}
    assert server.step()["preempted"] == ["b"]
    assert server.step() == {"decode": ["a"], "finished": ["a"]}
    if preemption == "swap":
        assert server.step() == {
            "decode": ["b"],
            "resumed": ["b"],
            "swap_in": 2,
            "finished": ["b"],
        }
    else:
        assert server.step() == {"prefill": {"b": 7, "c": 4}, "finished": ["b", "c"]}


def test_a_static_batch_takes_the_most_urgent_but_displaces_none() -> None:
    server = Server(batching="static", policy=Priority(displace=False), max_seqs=1)
    server.add("a", 4, priority=5, output=2)
    server.add("b", 4, priority=1, output=2)
    assert server.step() == {"prefill": {"b": 4}}
    server.add("c", 4, priority=0, output=1)
    assert server.steps(2) == [
        {"decode": ["b"], "finished": ["b"]},
        {"prefill": {"c": 4}, "finished": ["c"]},
    ]


# Displacing, or not


@pytest.mark.parametrize(
    ("batching", "displace", "displaces"),
    [
        ("prefill_first", None, True),  # as vLLM 0.6.6
        ("prefill_first", True, True),
        ("prefill_first", False, False),
        ("unified", None, False),  # as vLLM 0.33
        ("unified", True, True),
        ("unified", False, False),
        ("static", None, False),
        ("static", False, False),
    ],
)
def test_whether_an_urgent_request_pushes_out_a_running_one(
    batching: str, displace: bool | None, displaces: bool
) -> None:
    server = Server(batching=batching, policy=Priority(displace), max_seqs=1)
    server.add("a", 4, priority=5)
    server.step()
    server.add("u", 4, priority=1)
    if displaces:
        assert server.steps(2) == [{"displaced": ["a"]}, {"prefill": {"u": 4}}]
        assert server.queues == {"running": ["u"], "waiting": ["a"]}
    else:
        assert server.steps(2) == [{"decode": ["a"]}, {"decode": ["a"]}]
        assert server.queues == {"running": ["a"], "waiting": ["u"]}


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_with_a_plain_yes_or_no_arrivals_take_their_place_at_once(batching: str) -> None:
    """Where vLLM 0.6.6 admits a first, since it sorts only in steps that admit none."""
    server = Server(batching=batching, policy=Priority(displace=True), max_seqs=1)
    server.add("a", 4, priority=5)
    server.add("u", 4, priority=1)
    assert server.step() == {"prefill": {"u": 4}}


def test_no_request_is_displaced_for_one_that_is_then_rejected() -> None:
    server = Server(batching="unified", policy=Priority(displace=True))
    server.add("a", 4, priority=5)
    server.step()
    server.add("u", 4000, priority=1)
    assert "displaced" not in server.step()


def test_no_request_is_displaced_for_one_that_the_policy_does_not_admit() -> None:
    class Gate(Priority):
        def admit(self, request: Request, state: ServerState) -> bool:
            return request.client != "banned"

    server = Server(policy=Gate(displace=True), max_seqs=1)
    server.add("a", 4, priority=5, output=3)
    server.step()
    server.add("u", 4, priority=1, client="banned")
    assert server.step() == {"decode": ["a"]}


def test_decodes_behind_an_urgent_prompt_are_held_and_lose_nothing() -> None:
    """Sorted by urgency, p's chunks take the whole budget; a keeps what it has."""
    server = Server(batching="unified", budget=4, policy=Priority(displace=True))
    a = server.add("a", 4, priority=5)
    server.steps(2)
    server.add("p", 20, priority=1)
    assert server.step() == {"prefill": {"p": 3}, "decode": ["a"]}
    assert a.generated == 3
    assert server.step() == {"prefill": {"p": 4}, "held": ["a"]}
    assert a.generated == 3


# The hooks of a policy


class Witness(Policy):
    """Writes down what it is asked and told, and answers as the default does."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def admit(self, request: Request, state: ServerState) -> bool:
        self.log.append(f"admit {request.id}")
        return True

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        self.log.append(f"victim of {[r.id for r in running]} for {needy.id}")
        return super().choose_victim(running, needy, state)

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        self.log.append(f"keep {victim.id}")
        return None

    def observe(self, event: Event) -> None:
        match event:
            case Arrived(request, now):
                self.log.append(f"arrived {request.id} at {now:g}")
            case Admitted(request, now):
                self.log.append(f"admitted {request.id} at {now:g}")
            case Preempted(request, now):
                self.log.append(f"preempted {request.id} at {now:g}")
            case Left(request, now):
                self.log.append(f"left {request.id}, {request.state.value} at {now:g}")

    def served(self, plan: StepPlan, state: ServerState) -> None:
        self.log.append(f"served {plan.number} at {state.now:g}")

    def told(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_hooks_are_asked_at_their_moments() -> None:
    policy = Witness()
    server = Server(4, policy=policy, preemption="swap", cpu_blocks=4)
    server.add("a", 6, output=3)
    server.add("b", 6)
    plan = server.plan()
    arrivals = ["arrived a at 0", "arrived b at 0"]
    assert policy.told() == [*arrivals, "admit a", "admitted a at 0", "admit b", "admitted b at 0"]
    server.commit(plan)
    assert policy.told() == ["served 0 at 1"]
    server.step()
    assert policy.told() == [
        "victim of ['b'] for a",
        "keep b",
        "preempted b at 1",
        "served 1 at 2",
    ]
    server.step()
    assert policy.told() == ["admitted b at 2", "served 2 at 3", "left a, finished at 3"]
    server.scheduler.abort("b", 4.0)
    assert policy.told() == ["left b, aborted at 4"]
    server.add("c", 99)
    server.step()
    assert policy.told() == ["arrived c at 3", "left c, rejected at 3", "served 3 at 4"]


def test_who_comes_during_a_step_is_told_of_after_it() -> None:
    policy = Witness()
    server = Server(4, policy=policy)
    server.add("a", 6, output=1)
    plan = server.plan()
    policy.told()
    server.add("b", 6)
    server.add("c", 6)
    server.commit(plan)
    assert policy.told() == ["served 0 at 1", "left a, finished at 1"]
    server.scheduler.abort("c", 1.0)
    assert policy.told() == ["arrived b at 0", "arrived c at 0", "left c, aborted at 1"]
    server.plan()
    assert policy.told() == ["admit b", "admitted b at 1"]


def test_admit_is_asked_only_for_what_fits() -> None:
    policy = Witness()
    server = Server(4, policy=policy, max_seqs=2)
    server.add("a", 6)
    server.add("b", 9)
    server.step()
    assert policy.log.count("admit a") == 1
    assert "admit b" not in policy.log


def test_a_no_to_one_holds_back_all_behind_it_until_it_is_a_yes() -> None:
    class AfterTwo(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return request.id != "b" or state.now >= 2

    server = Server(policy=AfterTwo(), batching="unified")
    for name in "abc":
        server.add(name, 4)
    assert server.steps(3) == [
        {"prefill": {"a": 4}},
        {"decode": ["a"]},
        {"prefill": {"b": 4, "c": 4}, "decode": ["a"]},
    ]


def test_keep_overrules_the_preemption_in_force() -> None:
    class SwapLong(Policy):
        def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
            return PreemptionMode.SWAP if victim.prompt_len > 6 else None

    server = Server(7, cpu_blocks=8, policy=SwapLong(), preemption="recompute")
    server.add("a", 8)
    server.add("b", 8)
    server.add("c", 12)
    server.step()
    assert server.step() == {"decode": ["a", "b"], "preempted": ["c"], "swap_out": 3}
    server = Server(4, cpu_blocks=8, policy=SwapLong(), preemption="recompute")
    server.add("a", 6)
    server.add("b", 6)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}


def test_keep_is_not_asked_where_there_is_nothing_to_choose() -> None:
    """Without a CPU pool there is no swap, whatever a policy would say."""

    class Insists(Policy):
        def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
            raise AssertionError("asked")

    server = Server(4, policy=Insists())
    server.add("a", 6)
    server.add("b", 6)
    server.step()
    assert server.step() == {"decode": ["a"], "preempted": ["b"]}


def test_victim_may_be_any_running_request() -> None:
    class First(Policy):
        def choose_victim(
            self, running: Sequence[Request], needy: Request, state: ServerState
        ) -> Request:
            return running[0]

    server = Server(6, policy=First(), batching="unified")
    for name in "abc":
        server.add(name, 8)
    server.step()
    assert server.step() == {"decode": ["b", "c"], "preempted": ["a"]}


def test_displaces_is_asked_only_of_a_policy_that_displaces() -> None:
    class AnyRunning(Policy):
        def __init__(self, displacing: bool) -> None:
            self.displacing = displacing

        def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
            return waiting.id == "u"

    server = Server(policy=AnyRunning(True), max_seqs=1)
    server.add("a", 4)
    server.step()
    server.add("u", 4)
    assert server.step()["displaced"] == ["a"]
    with pytest.raises(ConfigError, match=r"^AnyRunning overrides may_preempt, which is never"):
        Server(policy=AnyRunning(False))


def test_a_policy_without_hooks_is_first_come_first_served() -> None:
    class Plain(Policy):
        pass

    runs = []
    for policy in ("fcfs", Plain()):
        server = Server(6, policy=policy)
        for name in "abcd":
            server.add(name, 6, output=4)
        runs.append(server.steps(20))
    assert runs[0] == runs[1]


def test_a_rank_that_changes_with_time_is_asked_anew_in_every_step() -> None:
    """Least slack first: b's deadline is further away, but its prompt grew no shorter."""

    class Aging(Policy):
        def rank(self, request: Request, state: ServerState) -> float:
            assert request.arrival is not None
            return request.priority - (state.now - request.arrival) * request.prompt_len

    server = Server(policy=Aging(), max_seqs=1, batching="unified")
    server.add("a", 4, output=3)
    server.step()
    server.add("b", 4, priority=0, output=1)
    server.add("c", 8, priority=5, output=1)
    assert server.waiting == ["b", "c"]  # not asked yet
    server.steps(2)
    assert server.step() == {"prefill": {"c": 8}, "finished": ["c"]}


# What a policy may know


HIDDEN = 7919
"""A length that occurs nowhere by chance."""


def values(thing: object, private: bool, depth: int = 4) -> Iterator[object]:
    """All that can be read from something by following its attributes and items."""
    yield thing
    if depth == 0 or isinstance(thing, str | bytes | type) or callable(thing):
        return
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif hasattr(thing, "__iter__"):
        parts = list(thing)
    else:
        parts = []
    module = type(thing).__module__
    if module.startswith(("pagedsim", "policies")):
        wanted = (name for name in dir(thing) if not name.startswith("__"))
        parts += [getattr(thing, name) for name in wanted if private or not name.startswith("_")]
    for part in parts:
        yield from values(part, False, depth - 1)


def secrets(prompt: int) -> set[int]:
    return {HIDDEN, HIDDEN + prompt}


@pytest.mark.parametrize("batching", BATCHINGS)
def test_no_policy_can_read_how_long_an_output_will_be(batching: str) -> None:
    """Not from the request (its private attributes included), the state, or any event."""
    peeks: list[str] = []

    class Spy(Policy):
        displacing = None  # where the batching knows it

        def look(self, where: str, *things: object) -> None:
            peeks.append(where)
            for thing in things:
                found = {value for value in values(thing, True) if isinstance(value, int | float)}
                assert not found & secrets(8), f"{where} shows it"

        def rank(self, request: Request, state: ServerState) -> float:
            self.look("rank", request, *public(state))
            return 0.0

        def admit(self, request: Request, state: ServerState) -> bool:
            self.look("admit", request, *public(state))
            return True

        def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
            self.look("may_preempt", waiting, running, *public(state))
            return False

        def choose_victim(
            self, running: Sequence[Request], needy: Request, state: ServerState
        ) -> Request:
            self.look("choose_victim", running, needy, *public(state))
            return super().choose_victim(running, needy, state)

        def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
            self.look("swap_or_recompute", victim, *public(state))
            return None

        def observe(self, event: Event) -> None:
            self.look("observe", *event)

    server = Server(4000, cpu_blocks=1, policy=Spy(), batching=batching)
    server.add("a", 8, HIDDEN)
    server.steps(3)
    assert {"rank", "admit", "observe"} <= set(peeks)


def public(state: ServerState) -> list[object]:
    return [getattr(state, name) for name in dir(state) if not name.startswith("_")]


def test_a_spy_would_find_it() -> None:
    """The walk above does see what is there: the scheduler's own records hold the length."""
    server = Server(4000)
    server.add("a", 8, HIDDEN)
    known = values(vars(server.scheduler.queues), True)
    seen = {value for value in known if isinstance(value, int)}
    assert HIDDEN + 8 in seen
