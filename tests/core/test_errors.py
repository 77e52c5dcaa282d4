"""What goes wrong says so in one line, and changes nothing."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from pagedsim.build import (
    BATCHINGS,
    make_batching,
    make_memory,
    make_policy,
    make_preemption,
    make_scheduler,
)
from pagedsim.core import (
    ConfigError,
    Continuation,
    IntegrityError,
    PagedMemory,
    PagedsimError,
    PlanError,
    Policy,
    PrefillFirst,
    Request,
    RequestError,
    ReservedMax,
    SamplingParams,
    Scheduler,
    ServerState,
    Static,
    Unified,
)
from pagedsim.core.errors import PolicyError, choices
from policies.ordering import Priority
from policies.preemption import Swap
from tests.core.drive import Server, Tokens


def says(error: type[PagedsimError], message: str) -> Any:
    """The error, with exactly this message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def test_names_with_commas_are_quoted_and_each_is_named_once() -> None:
    assert choices("x", ["b, late", "a", "a", "b"]) == "choose from a, b, 'b, late'"


# Infeasible requests are rejected in the plan, and the run goes on


@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_prompt_with_max_tokens_beyond_capacity_is_rejected_with_the_numbers(
    batching: str,
) -> None:
    server = Server(blocks=4, block_size=4, batching=batching)
    a = server.add("a", 10, max_tokens=7)
    server.add("b", 10, max_tokens=6)
    plan = server.plan()
    assert plan.rejected == ((a, "prompt of 10 + max_tokens 7 = 17 tokens: max_model_len is 16"),)
    assert (a.state.value, a.finish_reason) == ("rejected", plan.rejected[0].reason)
    server.commit(plan)
    assert server.running == ["b"]
    assert server.drain() == ["b"]


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        (17, SamplingParams(), "prompt of 17 tokens: max_model_len is 16"),
        (
            9,
            SamplingParams(n=2, max_tokens=5),
            "2 sequences of 14 tokens: memory of 5 blocks × 4 tokens holds as many of 12",
        ),
        (4, SamplingParams(n=9), "9 sequences: max_seqs is 8"),
    ],
    ids=["prompt", "group", "seats"],
)
@pytest.mark.parametrize("batching", BATCHINGS)
def test_what_can_never_be_served_is_rejected(
    batching: str, prompt: int, params: SamplingParams, reason: str
) -> None:
    server = Server(blocks=5, block_size=4, batching=batching, max_model_len=16)
    server.scheduler.add(Request("a", prompt, params), 0.0)
    server.add("b", 4, output=1)
    plan = server.plan()
    assert [rejection.reason for rejection in plan.rejected] == [reason]
    assert [chunk.request.id for chunk in plan.chunks] == ["b"]
    server.commit(plan)
    assert server.queues == {}


def test_what_the_watermark_never_lets_in_is_rejected() -> None:
    server = Server(blocks=10, block_size=4, watermark=0.2)
    server.add("a", 33)
    plan = server.plan()
    assert [rejection.reason for rejection in plan.rejected] == [
        "prompt of 33 tokens needs 9 blocks of 4: "
        "memory has 10, of which the watermark keeps 2 free"
    ]
    assert plan.empty
    server.commit(plan)
    assert server.scheduler.unfinished == 0


# Settings that cannot work fail when the object is built


@pytest.mark.parametrize("memory", ["paged", "prefix"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 8, "block_size": 0}, "block_size=0: must be a whole number of at least 1"),
        ({"blocks": 8, "block_size": -16}, "block_size=-16: must be a whole number of at least 1"),
        ({"blocks": 0}, "blocks=0: must be a whole number of at least 1"),
        ({"blocks": 8, "cpu_blocks": -1}, "cpu_blocks=-1: must be a whole number of at least 0"),
    ],
)
def test_sizes_that_make_no_memory(memory: str, settings: dict[str, int], message: str) -> None:
    with says(ConfigError, message):
        make_memory(memory, **settings)


def test_a_pool_smaller_than_one_request() -> None:
    with says(
        ConfigError,
        "max_model_len=65: memory of 4 blocks × 16 tokens holds no request longer than 64; "
        "lower max_model_len or give more blocks",
    ):
        make_scheduler(memory=PagedMemory(4), max_model_len=65)


def test_a_reservation_that_no_run_can_hold() -> None:
    """Of 100 slots the longest run is 64; 65 could be reserved nowhere."""
    with says(
        ConfigError,
        "max_model_len=65: memory of 100 blocks × 1 tokens holds no request longer than 64; "
        "lower max_model_len or give more blocks",
    ):
        make_scheduler(memory=ReservedMax(100, max_model_len=65), max_model_len=65)


@pytest.mark.parametrize("watermark", [1.0, 1.5, 100, -0.01])
def test_a_watermark_of_all_blocks(watermark: float) -> None:
    with says(ConfigError, f"watermark={watermark}: must be a number of at least 0, below 1"):
        PrefillFirst(watermark)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 0}, "max_seqs=0: must be a whole number of at least 1"),
        ({"max_model_len": 0}, "max_model_len=0: must be a whole number of at least 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens=0: must be a whole number of at least 1"),
        (
            {"max_batched_tokens": 63},
            "max_batched_tokens=63: must be at least max_model_len=64, "
            "since PrefillFirst never splits a prompt",
        ),
        (
            {"max_batched_tokens": 64, "max_seqs": 65},
            "max_batched_tokens=64: must be at least max_seqs=65, "
            "since PrefillFirst never splits a prompt",
        ),
    ],
)
def test_limits_that_serve_no_request(settings: dict[str, Any], message: str) -> None:
    with says(ConfigError, message):
        make_scheduler(memory=PagedMemory(4), **settings)


def test_swap_without_cpu_blocks() -> None:
    with says(ConfigError, "preemption that swaps needs cpu_blocks: at least 1, not 0"):
        make_scheduler(memory=PagedMemory(4), preemption="swap")


def test_swap_with_reserved_memory() -> None:
    with says(
        ConfigError,
        "preemption that swaps needs paged memory: ReservedMax "
        "keeps what it reserved until the end; choose preemption=recompute",
    ):
        make_scheduler(memory=ReservedMax(64, max_model_len=8), preemption=Swap())


def test_displacement_from_a_static_batch() -> None:
    with says(
        ConfigError,
        "Priority displaces running requests: "
        "a static batch runs to its end; choose another batching or displace=false",
    ):
        Scheduler(memory=PagedMemory(4), batching=Static(), policy=Priority(displace=True))


# Calls out of turn change nothing


def picture(server: Server) -> dict[str, Any]:
    """All that a refused call must leave as it was."""
    scheduler = server.scheduler
    everyone = [*scheduler.waiting, *scheduler.running, *scheduler.swapped]
    return {
        "queues": server.queues,
        "known": list(scheduler.requests),
        "free": (server.memory.free, server.memory.cpu_free),
        "seats": scheduler.queues.seats,
        "now": scheduler.now,
        "clock": (scheduler.clock.tick, scheduler.clock.context, scheduler.clock.requests),
        "requests": [
            (r.id, r.state, r.num_tokens, r.computed, r.outputs, r.first_token_at) for r in everyone
        ],
        "tables": [[list(table) for table in r.tables] for r in everyone],
    }


def busy() -> Server:
    """Two requests decode and a third waits."""
    server = Server(max_seqs=2)
    for name in "abc":
        server.add(name, 6, output=4)
    server.steps(2)
    return server


def refused(
    server: Server, error: type[PagedsimError], message: str, call: Callable[[], Any]
) -> None:
    """The call raises just this, and nothing has changed."""
    before = picture(server)
    with says(error, message):
        call()
    assert picture(server) == before
    server.scheduler.check()


def test_double_add() -> None:
    server = busy()
    refused(
        server,
        RequestError,
        "request 'a' is already here; ids must be unique",
        lambda: server.add("a", 3),
    )
    assert server.drain() == ["a", "b", "c"]


def test_adding_a_request_that_has_already_been_served() -> None:
    server = busy()
    a = server.scheduler.requests["a"]
    other = Server()
    refused(
        other,
        RequestError,
        "request 'a' was running already",
        lambda: other.scheduler.add(a, 0.0),
    )
    server.scheduler.abort("a", 2.0)
    refused(
        server,
        RequestError,
        "request 'a' was aborted already",
        lambda: server.scheduler.add(a, 2.0),
    )
    server.add("a", 3, output=1)  # the id itself is free again
    assert "a" in server.drain()


def test_an_output_of_no_tokens() -> None:
    server = busy()
    refused(
        server,
        RequestError,
        "request 'd': output_len=0: at least 1",
        lambda: server.add("d", 3, output=0),
    )


def test_abort_of_an_unknown_id() -> None:
    server = busy()
    refused(
        server,
        RequestError,
        "cannot abort request 'x': not known, or ended already",
        lambda: server.scheduler.abort("x", 9.0),
    )
    server.scheduler.abort("a", server.now)
    refused(
        server,
        RequestError,
        "cannot abort request 'a': not known, or ended already",
        lambda: server.scheduler.abort("a", 9.0),
    )
    assert server.drain() == ["b", "c"]


def test_a_second_plan_before_the_commit_of_the_first() -> None:
    server = busy()
    plan = server.plan()
    refused(server, PlanError, "plan 2 is not committed yet", lambda: server.scheduler.plan(9.0))
    server.commit(plan)
    assert server.drain() == ["a", "b", "c"]


def test_commit_of_a_stale_plan() -> None:
    server = busy()
    stale = server.plan()
    server.commit(stale)
    plan = server.plan()
    refused(
        server,
        PlanError,
        "plan 2 is stale: the plan to commit is 3",
        lambda: server.scheduler.commit(stale, 9.0),
    )
    server.commit(plan)
    assert server.drain() == ["c"]


def test_double_commit() -> None:
    server = busy()
    plan = server.plan()
    server.commit(plan)
    before = picture(server)
    with pytest.raises(PlanError, match=r"^plan 2 is stale: "):
        server.scheduler.commit(plan, 9.0)
    assert picture(server) == before
    assert server.drain() == ["a", "b", "c"]


def test_double_commit_says_so() -> None:
    server = busy()
    plan = server.plan()
    server.commit(plan)
    with says(PlanError, "plan 2 is stale: it was committed already, or is not this scheduler's"):
        server.scheduler.commit(plan, 9.0)


def test_commit_of_a_plan_of_another_scheduler() -> None:
    server, other = busy(), busy()
    foreign = other.plan()
    plan = server.plan()
    refused(
        server,
        PlanError,
        "plan 2 is stale: it is another scheduler's",
        lambda: server.scheduler.commit(foreign, 9.0),
    )
    server.commit(plan)


# Answers that do not fit the plan


def told() -> Server:
    """a, alone, and a group b of two have their first tokens; c waits for a seat."""
    server = Server(max_seqs=3)
    server.add("a", 6)
    server.add("b", 6, n=2)
    server.add("c", 6)
    server.step({"a": 1, "b": Continuation((2, 3))})
    return server


GOOD: Tokens = {"a": 4, "b": Continuation((5, 6))}


@pytest.mark.parametrize(
    ("tokens", "finished", "message"),
    [
        ({"a": 1}, {}, "no tokens for requests ['b']"),
        ({}, {}, "no tokens for requests ['a', 'b']"),
        (None, {}, "no tokens are reported, though those of earlier steps were"),
        ({**GOOD, "c": 1}, {}, "requests ['c'] sampled nothing in it"),
        ({**GOOD, "x": 1}, {}, "requests ['x'] sampled nothing in it"),
        (GOOD, {"c": "stop"}, "requests ['c'] sampled nothing in it"),
        ({**GOOD, "b": 1}, {}, "request 'b' got 1 tokens for 2 sequences"),
        ({**GOOD, "b": Continuation((1,))}, {}, "request 'b' got 1 tokens for 2 sequences"),
        ({**GOOD, "a": Continuation((1, 2))}, {}, "request 'a' got 2 tokens for 1 sequences"),
        (
            {**GOOD, "b": Continuation((1, 2), parents=(0,))},
            {},
            "request 'b' got 2 tokens for 1 of at most 2 sequences",
        ),
        (
            {**GOOD, "b": Continuation((), parents=())},
            {},
            "request 'b' got 0 tokens for 0 of at most 2 sequences",
        ),
        (
            {**GOOD, "b": Continuation((1, 2, 3), parents=(0, 1, 1))},
            {},
            "request 'b' got 3 tokens for 3 of at most 2 sequences",
        ),
        (
            {**GOOD, "b": Continuation((1, 2), parents=(0, 2))},
            {},
            "request 'b' got parents (0, 2), of 2 sequences",
        ),
        (
            {**GOOD, "b": Continuation((1, 2), parents=(0, -1))},
            {},
            "request 'b' got parents (0, -1), of 2 sequences",
        ),
    ],
)
def test_a_wrong_answer_is_refused_and_the_right_one_still_taken(
    tokens: Any, finished: dict[int | str, str], message: str
) -> None:
    server = told()
    plan = server.plan()
    refused(
        server,
        PlanError,
        f"plan 1: {message}",
        lambda: server.scheduler.commit(plan, 9.0, tokens, finished),
    )
    server.commit(plan, GOOD)
    a, b = (server.scheduler.requests[name] for name in "ab")
    assert (a.outputs, b.outputs) == ([[1, 4]], [[2, 5], [3, 6]])


def test_tokens_told_late_are_refused() -> None:
    server = Server()
    server.add("a", 6)
    server.step()
    plan = server.plan()
    refused(
        server,
        PlanError,
        "plan 1: tokens are reported, though 1 requests decoded without reported tokens",
        lambda: server.scheduler.commit(plan, 9.0, {"a": 1}),
    )
    server.commit(plan)


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing() -> None:
    server = Server(batching="unified", budget=4)
    server.add("a", 6)
    server.step({})
    server.step({"a": 1})
    assert server.scheduler.requests["a"].outputs == [[1]]


def test_a_token_for_such_a_chunk_is_refused() -> None:
    server = Server(batching="unified", budget=4)
    server.add("a", 6)
    plan = server.plan()
    with says(PlanError, "plan 0: requests ['a'] sampled nothing in it"):
        server.scheduler.commit(plan, 1.0, {"a": 1})


def test_answers_for_a_request_that_was_aborted_since_are_no_mistake() -> None:
    server = told()
    plan = server.plan()
    server.scheduler.abort("b", server.now)
    server.commit(plan, GOOD)
    assert server.scheduler.requests["a"].outputs == [[1, 4]]


def test_the_end_of_a_request_that_was_aborted_since_is_no_mistake() -> None:
    server = told()
    plan = server.plan()
    server.scheduler.abort("b", server.now)
    assert server.commit(plan, GOOD, {"a": "stop", "b": "stop"}) == ["a"]


def test_an_executor_may_end_a_request_and_say_why() -> None:
    server = told()
    plan = server.plan()
    a = server.scheduler.requests["a"]
    assert server.commit(plan, GOOD, {"a": "stop"}) == ["a"]
    assert (a.finish_reason, a.finished_at, a.num_tokens) == ("stop", 2.0, 8)


# Policies that break their promise


def test_a_victim_who_is_no_candidate() -> None:
    class Stranger(Policy):
        def choose_victim(self, running: Any, needy: Request, state: ServerState) -> Request:
            return Request("x", 1)

    server = Server(blocks=4, policy=Stranger())
    server.add("a", 6)
    server.add("b", 6)
    server.step()
    with says(
        PolicyError,
        "Stranger.choose_victim gave Request('x', new, 1+0 tokens): must be one of the requests "
        "that it was given",
    ):
        server.plan()


def test_a_hook_of_the_old_kind_is_refused_at_the_start() -> None:
    class Old(Policy):
        def rank(self, request: Request, now: float) -> float:  # type: ignore[override]
            return -now

    with says(ConfigError, "Old.rank takes now: it must take state, and state.now is the time"):
        Server(policy=Old())


# Requests and their sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n=0: must be a whole number of at least 1"),
        ({"n": 3, "best_of": 2}, "best_of=2: must be a whole number of at least n=3"),
        (
            {"max_tokens": 0},
            "max_tokens=0: must be a whole number of at least 1, or None for as many as the model "
            "can",
        ),
        ({"min_tokens": -1}, "min_tokens=-1: must be a whole number from 0 to max_tokens"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens=5: must be a whole number from 0 to max_tokens",
        ),
        ({"early_stopping": "soon"}, "early_stopping='soon': must be False, True or 'never'"),
        ({"stop": 5}, "stop=5: must be a list of strings"),
        ({"stop": ["a", ""]}, "stop='': must be strings of at least one character"),
        ({"temperature": -0.5}, "temperature=-0.5: must be a number of at least 0 (greedy)"),
        ({"top_p": 0}, "top_p=0: must be a number above 0, at most 1"),
        ({"top_p": 1.5}, "top_p=1.5: must be a number above 0, at most 1"),
        ({"top_k": -2}, "top_k=-2: must be a whole number of at least -1 (off)"),
        ({"top_k": 1.5}, "top_k=1.5: must be a whole number"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"top_p": math.nan}, "top_p=nan: must be a number"),
        ({"n": None}, "n=None: must be a whole number"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: must be a whole number"),
        ({"logprobs": True}, "logprobs=True: must be a whole number"),
        ({"presence_penalty": None}, "presence_penalty=None: must be a number"),
        ({"length_penalty": -1e6}, "length_penalty=-1000000.0: must be a number from -50 to 50"),
        ({"stop": [None]}, "stop=(None,): must be a list of strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids=('a',): must be a list of ids"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"min_p": 2}, "min_p=2: must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a number above 0"),
        ({"logprobs": -1}, "logprobs=-1: must be a whole number of at least 0"),
    ],
)
def test_sampling_params_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with says(RequestError, f"SamplingParams.{message}"):
        SamplingParams(**settings)


def test_stops_may_be_given_as_one_string_or_as_lists() -> None:
    loose: dict[str, Any] = {"stop": "end", "stop_token_ids": [3, 4]}
    assert SamplingParams(**loose) == SamplingParams(stop=("end",), stop_token_ids=(3, 4))


@pytest.mark.parametrize(
    ("settings", "width"), [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5)]
)
def test_a_request_is_as_wide_as_its_sampling(settings: dict[str, Any], width: int) -> None:
    assert Request("a", 4, SamplingParams(**settings)).width == width


@pytest.mark.parametrize("prompt", [0, -3, [], ()])
def test_a_prompt_of_nothing(prompt: Any) -> None:
    length = prompt if isinstance(prompt, int) else 0
    with says(RequestError, f"request 'a': prompt of {length} tokens: at least 1"):
        Request("a", prompt)


def test_every_error_is_one_of_ours_and_of_python() -> None:
    """A caller may catch PagedsimError, or the built-in that it also is."""
    assert issubclass(ConfigError, PagedsimError) and issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, PagedsimError) and issubclass(RequestError, ValueError)
    assert issubclass(PlanError, PagedsimError) and issubclass(PlanError, RuntimeError)
    assert issubclass(IntegrityError, PagedsimError) and issubclass(IntegrityError, AssertionError)


def test_names_are_for_build_and_objects_for_the_core() -> None:
    """The two ways to say the same thing."""
    by_name = make_scheduler(
        memory=make_memory("paged", blocks=4),
        policy=make_policy("priority", displace=False),
        preemption=make_preemption("recompute"),
        batching=make_batching("unified"),
    )
    assert isinstance(by_name.policy, Priority)
    assert isinstance(by_name.batching, Unified)
