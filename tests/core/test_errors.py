"""What goes wrong says so in one line, and changes nothing."""

import math
from collections.abc import Callable
from functools import partial
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
)
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.policies.ordering import Priority
from tests.core.drive import Server, Tokens
from tests.core.refusals import refusal

# Infeasible requests are rejected in the plan, and the run goes on


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        (17, SamplingParams(), "prompt of 17 tokens | max_model_len is 16"),
        (10, SamplingParams(max_tokens=7), "10 + max_tokens 7 = 17 | max_model_len is 16"),
        (9, SamplingParams(n=2, max_tokens=5), "2 sequences of 14 | 5 blocks × 4 tokens | 12"),
        (4, SamplingParams(n=9), "9 sequences | max_seqs is 8"),
    ],
)
@pytest.mark.parametrize("batching", [name for name in BATCHINGS if name != "sglang"])
def test_an_infeasible_request_is_rejected(
    batching: str, prompt: int, params: SamplingParams, named: str
) -> None:
    server = Server(blocks=5, block_size=4, batching=batching, max_model_len=16)
    a = Request("a", prompt, params)
    server.scheduler.add(a, 0.0)
    server.add("b", 10, max_tokens=6)
    plan = server.plan()
    [(rejected, reason)] = plan.rejected
    assert rejected is a and all(text in reason for text in named.split(" | "))
    assert (a.state.value, a.finish_reason) == ("rejected", reason)
    server.commit(plan)
    assert server.drain() == ["b"]


@pytest.mark.parametrize(
    ("settings", "prompt", "n", "named"),
    [
        ({"batching": "sglang", "max_model_len": 16}, 17, 1, "17 tokens | max_model_len is 16"),
        ({"batching": "sglang"}, 4, 2, "2 sequences | batching=sglang serves one"),
        ({"batching": "sglang"}, 16, 1, "16 tokens | 20, of which a block of 4 stays free"),
        ({"blocks": 10, "watermark": 0.2}, 33, 1, "33 tokens needs 9 blocks | 10 | watermark | 2"),
    ],
)
def test_what_a_batching_never_admits_is_rejected(
    settings: dict[str, Any], prompt: int, n: int, named: str
) -> None:
    server = Server(**{"blocks": 5, "block_size": 4, **settings})
    server.add("a", prompt, n=n)
    plan = server.plan()
    [(_, reason)] = plan.rejected
    assert plan.empty and all(text in reason for text in named.split(" | "))
    server.commit(plan)
    assert not server.scheduler.unfinished


# Settings that cannot work fail when the object is built


def sglang(memory: str = "radix", preemption: str = "recompute", **settings: Any) -> Scheduler:
    sizes = {"max_model_len": 8} if memory == "reserved_max" else {}
    sizes |= {"cpu_blocks": 5} if preemption == "swap" else {}
    return make_scheduler(
        memory=make_memory(memory, blocks=8, block_size=4, **sizes),
        batching=make_batching("sglang", **settings),
        preemption=preemption,
    )


def served_by(**settings: Any) -> Callable[[], Scheduler]:
    return lambda: make_scheduler(**{"memory": PagedMemory(4), **settings})


SETTINGS: list[tuple[str, Callable[[], object]]] = [
    ("block_size=0 | at least 1", lambda: make_memory(blocks=8, block_size=0)),
    ("blocks=0 | at least 1", lambda: make_memory(blocks=0)),
    ("cpu_blocks=-1 | at least 0", lambda: make_memory("prefix", blocks=8, cpu_blocks=-1)),
    ("swap_bound='no' | true or false", lambda: PagedMemory(4, swap_bound="no")),
    ("watermark=1.0 | at least 0, below 1", lambda: PrefillFirst(1.0)),
    ("max_seqs=0 | at least 1", served_by(max_seqs=0)),
    ("max_model_len=65 | 4 blocks × 16 tokens | 64", served_by(max_model_len=65)),
    (  # of 100 slots the longest run is 64; 65 could be reserved nowhere
        "max_model_len=65 | 100 blocks | 64",
        served_by(memory=ReservedMax(100, max_model_len=65), max_model_len=65),
    ),
    ("max_batched_tokens=63 | max_model_len=64", served_by(max_batched_tokens=63)),
    ("max_batched_tokens=64 | max_seqs=65", served_by(max_batched_tokens=64, max_seqs=65)),
    ("swaps needs cpu_blocks | at least 1, not 0", served_by(preemption="swap")),
    (
        "ReservedMax never swaps | preemption=recompute",
        served_by(memory=ReservedMax(64, max_model_len=8), preemption="swap"),
    ),
    (
        "Priority displaces | static | displace=false",
        served_by(batching="static", policy=Priority(displace=True)),
    ),
    ("chunked_prefill_size=6 | block_size=4", lambda: sglang(chunked_prefill_size=6)),
    ("chunked_prefill_size=0 | at least 1", lambda: sglang(chunked_prefill_size=0)),
    (
        "mixed_chunk=true | needs chunked_prefill_size",
        lambda: sglang(chunked_prefill_size=None, mixed_chunk=True),
    ),
    ("retraction=priority | length or rank", lambda: sglang(retraction="priority")),
    ("batching=sglang | preemption=recompute", lambda: sglang("paged", preemption="swap")),
    ("batching=sglang | ReservedMax | memory=radix", lambda: sglang("reserved_max")),
]


@pytest.mark.parametrize(("named", "build"), SETTINGS, ids=[named for named, _ in SETTINGS])
def test_settings_that_cannot_work(named: str, build: Callable[[], object]) -> None:
    refusal(build, named)


@pytest.mark.parametrize(
    ("bounds", "allowed", "fine", "beyond"),
    [
        ({}, "", [-1, 0.5, np.float64(2)], []),
        ({"above": 0}, "above 0", [1e-9], [0, -1]),
        ({"low": 0.001, "high": 0.5}, "from 0.001 to 0.5", [0.001, 0.5], [0, 1]),
        ({"above": 0, "high": 1}, "above 0, at most 1", [0.1, 1], [0, 1.1]),
        ({"low": 0, "below": 1}, "at least 0, below 1", [0, 0.9], [-0.1, 1]),
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
        refusal(partial(require_number, "k", value, **bounds), f"k={value!r}: must be | {allowed}")


def test_a_whole_number_within_bounds_and_a_flag() -> None:
    bounds = {"low": 1, "high": 10**6}
    for value in (1, 10**6, np.int64(3)):
        whole = require_whole("k", value, **bounds)
        assert (whole, type(whole)) == (value, int)
    others: list[Any] = [0, 10**6 + 1, 1.0, "1", None, True]
    for value in others:
        named = f"k={value!r}: must be | whole number from 1 to 1000000"
        refusal(partial(require_whole, "k", value, **bounds), named)
    assert require_flag("k", False) is False
    for answer in ("no", 0, None):
        refusal(partial(require_flag, "k", answer), f"k={answer!r}: must be | true or false")


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
    server: Server, error: type[PagedsimError], named: str, call: Callable[[], Any]
) -> None:
    """The call is refused by a line that names this, and nothing has changed."""
    before = picture(server)
    refusal(call, named, error)
    assert picture(server) == before
    server.scheduler.check()


def test_requests_that_cannot_be_added_or_aborted() -> None:
    server, other = busy(), Server()
    scheduler = server.scheduler
    a = scheduler.requests["a"]
    refused(server, RequestError, "'a' is already here", lambda: server.add("a", 3))
    refused(other, RequestError, "'a' was running already", lambda: other.scheduler.add(a, 0.0))
    none = "'d' | output_len=0 | at least 1"
    refused(server, RequestError, none, lambda: server.add("d", 3, output=0))
    refused(server, RequestError, "'x' | not known", lambda: scheduler.abort("x", 9.0))
    scheduler.abort("a", server.now)
    refused(server, RequestError, "'a' | ended already", lambda: scheduler.abort("a", 9.0))
    refused(server, RequestError, "'a' was aborted already", lambda: scheduler.add(a, 2.0))
    server.add("a", 3, output=1)  # the id itself is free again
    assert server.drain() == ["b", "a", "c"]


def test_plans_out_of_turn() -> None:
    server, other = busy(), busy()
    scheduler = server.scheduler
    plan, foreign = server.plan(), other.plan()
    refused(server, PlanError, "plan 2 is not committed yet", lambda: scheduler.plan(9.0))
    stale = "plan 2 is stale | another scheduler"
    refused(server, PlanError, stale, lambda: scheduler.commit(foreign, 9.0))
    server.commit(plan)
    stale = "plan 2 is stale | committed already"
    refused(server, PlanError, stale, lambda: scheduler.commit(plan, 9.0))
    following = server.plan()
    stale = "plan 2 is stale | the plan to commit is 3"
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
    ("tokens", "finished", "named"),
    [
        ({"a": 1}, {}, "no tokens for requests ['b']"),
        (None, {}, "no tokens are reported"),
        ({**GOOD, "c": 1}, {}, "['c'] sampled nothing"),
        (GOOD, {"c": "stop"}, "['c'] sampled nothing"),
        ({**GOOD, "b": 1}, {}, "'b' got 1 tokens for 2 sequences"),
        ({**GOOD, "b": Continuation((1, 2), (0,))}, {}, "'b' got 2 tokens for 1 of at most 2"),
        (
            {**GOOD, "b": Continuation((1, 2, 3), (0, 1, 1))},
            {},
            "3 tokens for 3 of at most 2",
        ),
        ({**GOOD, "b": Continuation((1, 2), (0, 2))}, {}, "'b' got parents (0, 2), of 2 sequences"),
    ],
)
def test_a_wrong_answer_is_refused_and_the_right_one_still_taken(
    tokens: Any, finished: dict[int | str, str], named: str
) -> None:
    server = told()
    plan = server.plan()
    wrong = partial(server.scheduler.commit, plan, 9.0, tokens, finished)
    refused(server, PlanError, f"plan 1: | {named}", wrong)
    server.commit(plan, GOOD)
    a, b = (server.scheduler.requests[name] for name in "ab")
    assert (a.outputs, b.outputs) == ([[1, 4]], [[2, 5], [3, 6]])


@pytest.mark.parametrize(
    ("parents", "named"),
    [
        ({"a": (0, 2)}, "'a' | parents (0, 2), of 2 sequences"),
        ({"a": (0, 0, 1)}, "3 tokens for 3 of at most 2 sequences"),
        ({"a": ()}, "0 tokens for 0 of at most 2 sequences"),
        ({"b": (0,)}, "'b' | decodes no sequences"),
        ({"c": (0, 0)}, "'c' | decodes no sequences"),
    ],
)
def test_parents_that_cannot_be_are_refused(parents: Any, named: str) -> None:
    server = Server(blocks=8)
    server.add("a", 5, output=5, beams=2)
    server.add("b", 5, output=5)
    server.step()
    plan = server.plan()
    wrong = partial(server.scheduler.commit, plan, 9.0, parents=parents)
    refused(server, PlanError, named, wrong)
    server.commit(plan)


def test_parents_go_with_their_tokens() -> None:
    server = Server(blocks=8)
    server.add("a", 5, output=5, beams=2)
    server.step({"a": Continuation((1, 2))})
    plan = server.plan()
    said: Tokens = {"a": Continuation((1, 2))}
    wrong = partial(server.scheduler.commit, plan, 9.0, said, parents={"a": (1, 1)})
    refused(server, PlanError, "parents go with their tokens", wrong)


def test_tokens_reported_after_unreported_decodes_are_refused() -> None:
    server = Server()
    server.add("a", 6)
    server.step()
    plan = server.plan()
    wrong = partial(server.scheduler.commit, plan, 9.0, {"a": 1})
    refused(server, PlanError, "plan 1: tokens are reported | 1 requests decoded without", wrong)
    server.commit(plan)


# Requests and their sampling


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n": 0}, "n=0 | at least 1"),
        ({"n": 3, "best_of": 2}, "best_of=2 | at least n=3"),
        ({"max_tokens": 0}, "max_tokens=0 | at least 1, or None"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 | from 0 to max_tokens"),
        ({"early_stopping": "soon"}, "early_stopping='soon' | False, True or 'never'"),
        ({"stop": 5}, "stop=5 | a list of strings"),
        ({"stop": ["a", ""]}, "stop='' | at least one character"),
        ({"temperature": -0.5}, "temperature=-0.5 | at least 0"),
        ({"top_p": 0}, "top_p=0 | above 0, at most 1"),
        ({"top_k": -2}, "top_k=-2 | at least -1"),
        ({"length_penalty": -1e6}, "length_penalty=-1000000.0 | from -50 to 50"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids=('a',) | a list of ids"),
        ({"seed": 1.5}, "seed=1.5 | a whole number"),
        ({"min_p": 2}, "min_p=2 | from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 | above 0"),
        ({"logprobs": -1}, "logprobs=-1 | at least 0"),
    ],
)
def test_sampling_params_that_make_no_sense(settings: dict[str, Any], named: str) -> None:
    refusal(lambda: SamplingParams(**settings), f"SamplingParams. | {named}", RequestError)


def test_stops_may_be_given_as_one_string_or_as_lists() -> None:
    loose: dict[str, Any] = {"stop": "end", "stop_token_ids": [3, 4]}
    assert SamplingParams(**loose) == SamplingParams(stop=("end",), stop_token_ids=(3, 4))


@pytest.mark.parametrize("prompt", [0, -3, [], ()])
def test_a_prompt_of_nothing(prompt: Any) -> None:
    length = prompt if isinstance(prompt, int) else 0
    named = f"'a' | prompt of {length} tokens | at least 1"
    refusal(lambda: Request("a", prompt), named, RequestError)


def test_every_error_is_one_of_ours_and_of_python() -> None:
    """A caller may catch PagedsimError, or the built-in that it also is."""
    builtins = {ConfigError: ValueError, RequestError: ValueError, PlanError: RuntimeError}
    for kind, builtin in {**builtins, IntegrityError: AssertionError}.items():
        assert issubclass(kind, PagedsimError) and issubclass(kind, builtin)
