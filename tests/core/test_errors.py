"""What goes wrong says so in one line, and changes nothing."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedsim.build import BATCHINGS, make_batching, make_memory, make_scheduler
from pagedsim.core import (
    ConfigError,
    Continuation,
    IntegrityError,
    PagedMemory,
    PagedsimError,
    PlanError,
    PrefillFirst,
    Request,
    RequestError,
    ReservedMax,
    SamplingParams,
    Scheduler,
    Static,
)
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.policies.ordering import Priority
from pagedsim.policies.preemption import Swap
from tests.core.drive import Server, Tokens


def says(error: type[PagedsimError], message: str) -> Any:
    """The error, with exactly this message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


# Infeasible requests are rejected in the plan, and the run goes on


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        (17, SamplingParams(), "prompt of 17 tokens: max_model_len is 16"),
        (
            10,
            SamplingParams(max_tokens=7),
            "prompt of 10 + max_tokens 7 = 17 tokens: max_model_len is 16",
        ),
        (
            9,
            SamplingParams(n=2, max_tokens=5),
            "2 sequences of 14 tokens: memory of 5 blocks × 4 tokens holds as many of 12",
        ),
        (4, SamplingParams(n=9), "9 sequences: max_seqs is 8"),
    ],
)
@pytest.mark.parametrize("batching", [name for name in BATCHINGS if name != "sglang"])
def test_an_infeasible_request_is_rejected(
    batching: str, prompt: int, params: SamplingParams, reason: str
) -> None:
    server = Server(blocks=5, block_size=4, batching=batching, max_model_len=16)
    a = Request("a", prompt, params)
    server.scheduler.add(a, 0.0)
    server.add("b", 10, max_tokens=6)
    plan = server.plan()
    assert plan.rejected == ((a, reason),)
    assert (a.state.value, a.finish_reason) == ("rejected", reason)
    server.commit(plan)
    assert server.drain() == ["b"]


@pytest.mark.parametrize(
    ("prompt", "n", "reason"),
    [
        (17, 1, "prompt of 17 tokens: max_model_len is 16"),
        (4, 2, "2 sequences: batching=sglang serves one of each request"),
        (16, 1, "prompt of 16 tokens: memory has 20, of which a block of 4 stays free"),
    ],
)
def test_what_sglang_never_admits_is_rejected(prompt: int, n: int, reason: str) -> None:
    server = Server(blocks=5, block_size=4, batching="sglang", max_model_len=16)
    server.scheduler.add(Request("a", prompt, SamplingParams(n=n)), 0.0)
    plan = server.plan()
    assert [rejection.reason for rejection in plan.rejected] == [reason]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"chunked_prefill_size": 6}, "chunked_prefill_size=6: must be a multiple of block_size=4"),
        (
            {"chunked_prefill_size": 0},
            "chunked_prefill_size=0: must be a whole number of at least 1",
        ),
        (
            {"chunked_prefill_size": None, "mixed_chunk": True},
            "mixed_chunk=true: needs chunked_prefill_size, the tokens of a step",
        ),
        ({"retraction": "priority"}, "retraction=priority: must be length or rank"),
    ],
)
def test_bad_settings_of_sglang(settings: dict[str, Any], line: str) -> None:
    with says(ConfigError, line):
        Scheduler(
            memory=make_memory("radix", blocks=5, block_size=4),
            batching=make_batching("sglang", **settings),
        )


def test_what_does_not_go_with_sglang() -> None:
    memory = make_memory("paged", blocks=5, block_size=4, cpu_blocks=5)
    with says(ConfigError, "batching=sglang retracts requests: choose preemption=recompute"):
        make_scheduler(memory=memory, batching="sglang", preemption="swap")
    line = (
        "batching=sglang takes memory page by page, which ReservedMax does not: choose "
        "memory=radix, prefix or paged"
    )
    with says(ConfigError, line):
        memory = make_memory("reserved_max", blocks=8, block_size=4, max_model_len=8)
        make_scheduler(memory=memory, batching="sglang")


def test_a_prompt_beyond_the_watermark_is_rejected() -> None:
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


WHOLE = "must be a whole number of at least"
SETTINGS: list[tuple[Callable[[], object], str]] = [
    (lambda: make_memory(blocks=8, block_size=0), f"block_size=0: {WHOLE} 1"),
    (lambda: make_memory(blocks=0), f"blocks=0: {WHOLE} 1"),
    (lambda: make_memory("prefix", blocks=8, cpu_blocks=-1), f"cpu_blocks=-1: {WHOLE} 0"),
    (lambda: PagedMemory(4, swap_bound="no"), "swap_bound='no': must be true or false"),
    (
        lambda: make_scheduler(memory=PagedMemory(4), max_model_len=65),
        "max_model_len=65: memory of 4 blocks × 16 tokens holds no request longer than 64; "
        "lower max_model_len or give more blocks",
    ),
    (  # of 100 slots the longest run is 64; 65 could be reserved nowhere
        lambda: make_scheduler(memory=ReservedMax(100, max_model_len=65), max_model_len=65),
        "max_model_len=65: memory of 100 blocks × 1 tokens holds no request longer than 64; "
        "lower max_model_len or give more blocks",
    ),
    (lambda: PrefillFirst(1.0), "watermark=1.0: must be a number of at least 0, below 1"),
    (lambda: make_scheduler(memory=PagedMemory(4), max_seqs=0), f"max_seqs=0: {WHOLE} 1"),
    (
        lambda: make_scheduler(memory=PagedMemory(4), max_batched_tokens=63),
        "max_batched_tokens=63: must be at least max_model_len=64, "
        "since PrefillFirst never splits a prompt",
    ),
    (
        lambda: make_scheduler(memory=PagedMemory(4), max_batched_tokens=64, max_seqs=65),
        "max_batched_tokens=64: must be at least max_seqs=65, "
        "since PrefillFirst never splits a prompt",
    ),
    (
        lambda: make_scheduler(memory=PagedMemory(4), preemption="swap"),
        "preemption that swaps needs cpu_blocks: at least 1, not 0",
    ),
    (
        lambda: make_scheduler(memory=ReservedMax(64, max_model_len=8), preemption=Swap()),
        "preemption that swaps needs paged memory, and ReservedMax never swaps; "
        "choose preemption=recompute",
    ),
    (
        lambda: Scheduler(memory=PagedMemory(4), batching=Static(), policy=Priority(displace=True)),
        "Priority displaces running requests: "
        "a static batch runs to its end; choose another batching or displace=false",
    ),
]


@pytest.mark.parametrize(("build", "message"), SETTINGS, ids=[line for _, line in SETTINGS])
def test_settings_that_cannot_work(build: Callable[[], object], message: str) -> None:
    with says(ConfigError, message):
        build()


@pytest.mark.parametrize(
    ("bounds", "allowed", "fine", "beyond"),
    [
        ({}, "", [-1, 0.5, np.float64(2)], []),
        ({"above": 0}, " above 0", [1e-9], [0, -1]),
        ({"low": 0.001, "high": 0.5}, " from 0.001 to 0.5", [0.001, 0.5], [0, 1]),
        ({"above": 0, "high": 1}, " above 0, at most 1", [0.1, 1], [0, 1.1]),
        ({"low": 0, "below": 1}, " of at least 0, below 1", [0, 0.9], [-0.1, 1]),
    ],
)
def test_a_number_within_bounds(
    bounds: dict[str, float], allowed: str, fine: list[float], beyond: list[float]
) -> None:
    for value in fine:
        assert require_number("k", value, **bounds) == value
        assert type(require_number("k", value, **bounds)) is float
    others: list[Any] = [math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1]]
    for value in (*beyond, *others):
        with says(ConfigError, f"k={value!r}: must be a number{allowed}"):
            require_number("k", value, **bounds)


def test_a_whole_number_within_bounds_and_a_flag() -> None:
    for value in (1, 10**6, np.int64(3)):
        whole = require_whole("k", value, low=1, high=10**6)
        assert (whole, type(whole)) == (value, int)
    others: list[Any] = [0, 10**6 + 1, 1.0, "1", None, True]
    for value in others:
        with says(ConfigError, f"k={value!r}: must be a whole number from 1 to 1000000"):
            require_whole("k", value, low=1, high=10**6)
    assert require_flag("k", False) is False
    for answer in ("no", 0, None):
        with says(ConfigError, f"k={answer!r}: must be true or false"):
            require_flag("k", answer)


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


def test_requests_that_cannot_be_added_or_aborted() -> None:
    server, other = busy(), Server()
    scheduler = server.scheduler
    a = scheduler.requests["a"]
    known = "request 'a' is already here; ids must be unique"
    refused(server, RequestError, known, lambda: server.add("a", 3))
    refused(
        other,
        RequestError,
        "request 'a' was running already",
        lambda: other.scheduler.add(a, 0.0),
    )
    refused(
        server,
        RequestError,
        "request 'd': output_len=0: at least 1",
        lambda: server.add("d", 3, output=0),
    )
    ended = "cannot abort request '{}': not known, or ended already"
    refused(server, RequestError, ended.format("x"), lambda: scheduler.abort("x", 9.0))
    scheduler.abort("a", server.now)
    refused(server, RequestError, ended.format("a"), lambda: scheduler.abort("a", 9.0))
    again = "request 'a' was aborted already"
    refused(server, RequestError, again, lambda: scheduler.add(a, 2.0))
    server.add("a", 3, output=1)  # the id itself is free again
    assert server.drain() == ["b", "a", "c"]


def test_plans_out_of_turn() -> None:
    server, other = busy(), busy()
    scheduler = server.scheduler
    plan, foreign = server.plan(), other.plan()
    refused(server, PlanError, "plan 2 is not committed yet", lambda: scheduler.plan(9.0))
    stale = "plan 2 is stale: it is another scheduler's"
    refused(server, PlanError, stale, lambda: scheduler.commit(foreign, 9.0))
    server.commit(plan)
    stale = "plan 2 is stale: it was committed already, or is not this scheduler's"
    refused(server, PlanError, stale, lambda: scheduler.commit(plan, 9.0))
    following = server.plan()
    stale = "plan 2 is stale: the plan to commit is 3"
    refused(server, PlanError, stale, lambda: scheduler.commit(plan, 9.0))
    assert server.commit(following) == ["a", "b"]
    assert server.drain() == ["c"]


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
        (None, {}, "no tokens are reported, though those of earlier steps were"),
        ({**GOOD, "c": 1}, {}, "requests ['c'] sampled nothing in it"),
        (GOOD, {"c": "stop"}, "requests ['c'] sampled nothing in it"),
        ({**GOOD, "b": 1}, {}, "request 'b' got 1 tokens for 2 sequences"),
        (
            {**GOOD, "b": Continuation((1, 2), parents=(0,))},
            {},
            "request 'b' got 2 tokens for 1 of at most 2 sequences",
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


def test_tokens_reported_after_unreported_decodes_are_refused() -> None:
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
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens=5: must be a whole number from 0 to max_tokens",
        ),
        ({"early_stopping": "soon"}, "early_stopping='soon': must be False, True or 'never'"),
        ({"stop": 5}, "stop=5: must be a list of strings"),
        ({"stop": ["a", ""]}, "stop='': must be strings of at least one character"),
        ({"temperature": -0.5}, "temperature=-0.5: must be a number of at least 0 (greedy)"),
        ({"top_p": 0}, "top_p=0: must be a number above 0, at most 1"),
        ({"top_k": -2}, "top_k=-2: must be a whole number of at least -1 (off)"),
        ({"length_penalty": -1e6}, "length_penalty=-1000000.0: must be a number from -50 to 50"),
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
