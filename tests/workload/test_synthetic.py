"""Synthetic workloads: bounds, labels, prefixes, mixes, stages, and streams of their own."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload import (
    Workload,
    mix,
    shared_prefix,
    synthetic,
)
from pagedsim.workload.arrivals import Source, merge
from tests.core.refusals import refusal
from tests.workload.files import AGENTS, AZURE_2023, BAILIAN, BURSTGPT, MOONCAKE, PLAIN, written

TINY: dict[str, Any] = {"lengths": {"shape": "fixed", "prompt": 64, "output": 8}}
COLUMNS = (
    "arrival", "prompt_len", "output_len", "priority", "client", "predicted_len", "deadline",
    "sampling",
)  # fmt: skip


def changed(one: Workload, other: Workload) -> set[str]:
    """The columns in which two workloads differ."""
    return {
        name
        for name in COLUMNS
        if not np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
    }


def chat_and_batch(**settings: Any) -> Workload:
    classes = {
        "chat": {"rate": 3.0, "lengths": "alpaca", "priority": 0},
        "batch": {"rate": 1.0, "lengths": "sharegpt", "priority": 1, "arrivals": "gamma", "cv": 3},
    }
    return mix(**{"classes": classes, "requests": 2000, "max_len": 2048, **settings})


def test_the_same_seed_is_the_same_workload_and_another_is_not() -> None:
    settings: dict[str, Any] = {"requests": 50, "rate": 2.0}
    assert changed(synthetic(**settings, seed=1), synthetic(**settings, seed=1)) == set()
    moved = {"arrival", "prompt_len", "output_len"}
    assert changed(synthetic(**settings, seed=1), synthetic(**settings, seed=2)) == moved


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, False),
        ({"lengths": "alpaca"}, True),
        ({"priority": {0: 0.5, 1: 0.5}}, True),
        ({"prefixes": {"tokens": 4, "share": 0.5}}, True),
    ],
)
def test_a_workload_knows_whether_chance_had_a_part(settings: dict[str, Any], drawn: bool) -> None:
    base: dict[str, Any] = {"requests": 100, "arrivals": "fixed", "rate": 1.0, **TINY, **settings}
    one, other = synthetic(**base, seed=1), synthetic(**base, seed=2)
    assert one.drawn is drawn
    different = changed(one, other) != set()
    if "prefixes" in settings:
        assert one.prompts is not None and other.prompts is not None
        different = any(one.prompts[row] != other.prompts[row] for row in range(100))
    assert different is drawn


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({"rate": 4.0}, {"arrival"}),
        ({"lengths": "alpaca"}, {"prompt_len", "output_len"}),
        ({"priority": {0: 0.5, 1: 0.5}}, {"priority"}),
        ({"deadline": 5.0}, {"deadline"}),
        ({"prefixes": {"tokens": 16}}, {"prompt_len"}),
    ],
)
def test_changing_one_thing_leaves_the_others(settings: dict[str, Any], columns: set[str]) -> None:
    base: dict[str, Any] = {"requests": 200, "rate": 2.0, "seed": 3}
    assert changed(synthetic(**base), synthetic(**{**base, **settings})) == columns


def test_bounds_by_number_and_by_time() -> None:
    assert len(synthetic(requests=20, rate=1.0)) == 20
    by_time = synthetic(duration=100.0, rate=20.0)
    assert len(by_time) == pytest.approx(2000, abs=200)
    assert by_time.duration < 100
    assert len(synthetic(requests=20, duration=100.0, rate=20.0)) == 20
    assert changed(synthetic(requests=len(by_time), rate=20.0), by_time) == set()


def test_burst_and_closed_loop() -> None:
    burst = synthetic(requests=5, arrivals="burst", rate=3.0, **TINY)
    assert (burst.mode, set(burst.arrival.tolist())) == ("burst", {0.0})
    closed = synthetic(requests=5, arrivals="closed", users=2, think_time=0.5, **TINY)
    assert (closed.mode, closed.users, closed.think_time) == ("closed", 2, 0.5)
    assert [request.arrival for request, _ in closed.requests()] == [None] * 5


def test_priorities_and_clients_by_probability() -> None:
    made = synthetic(
        requests=20_000, rate=1.0, priority={-1: 0.25, 5: 0.75}, client={"a": 0.1, "b": 0.9}, **TINY
    )
    assert (made.priority == -1).mean() == pytest.approx(0.25, abs=0.02)
    assert set(made.priority.tolist()) == {-1, 5}
    assert made.clients == ("a", "b")
    assert (made.client == 0).mean() == pytest.approx(0.1, abs=0.01)


def test_shared_prefixes() -> None:
    made = synthetic(
        requests=10_000, rate=1.0, prefixes={"tokens": 32, "count": 4, "share": 0.6}, **TINY
    )
    assert made.prompts is not None
    first = [made.prompts[row].runs[0] for row in range(len(made))]
    shared = [stream for stream, length in first if length == 32]
    assert len(shared) / len(made) == pytest.approx(0.6, abs=0.02)
    assert np.bincount(shared) / len(shared) == pytest.approx(0.25, abs=0.02)
    assert set(made.prompt_len.tolist()) == {64, 96}
    lengths = [len(made.prompts[row]) for row in range(len(made))]
    assert lengths == made.prompt_len.tolist()


def test_prefixes_by_zipf() -> None:
    prefixes = {"tokens": 8, "count": 3, "skew": 1.0}
    made = synthetic(requests=20_000, rate=1.0, prefixes=prefixes, **TINY)
    assert made.prompts is not None
    used = np.bincount([made.prompts[row].runs[0][0] for row in range(len(made))])
    assert used / used.sum() == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_long_requests_are_cut_and_counted() -> None:
    made = synthetic(requests=10, rate=1.0, max_len=50, **TINY)
    assert set(made.prompt_len.tolist()) == {42} and set(made.output_len.tolist()) == {8}
    assert made.clipped == 10
    assert made.notices == ("10 of 10 requests were cut to max_len=50 tokens in all",)
    shortest = synthetic(requests=1, rate=1.0, max_len=2, **TINY)
    assert (shortest.prompt_len.tolist(), shortest.output_len.tolist()) == ([1], [1])


def test_a_distribution_that_its_bound_cuts_often_says_so() -> None:
    assert synthetic(requests=2000, rate=1.0, max_len=2048).notices == ()
    made = synthetic(requests=2000, rate=1.0, max_len=1024)
    at_cut = (made.prompt_len == 512) | (made.prompt_len + made.output_len == 1024)
    assert made.notices == (
        f"{at_cut.sum()} of 2,000 requests have the longest prompt or answer that max_len=1024 "
        "lets them draw",
    )
    assert made.clipped == 0


def test_a_mix_merges_its_classes_by_arrival() -> None:
    made = chat_and_batch()
    assert made.clients == ("batch", "chat")
    assert (np.diff(made.arrival) >= 0).all()
    chat = made.client == 1
    assert chat.mean() == pytest.approx(0.75, abs=0.06)
    assert made.rate == pytest.approx(4.0, rel=0.15)
    assert set(made.priority[chat].tolist()) == {0} and set(made.priority[~chat].tolist()) == {1}
    assert made.prompt_len[chat].mean() < 30 < made.prompt_len[~chat].mean()
    scaled = chat_and_batch(rate=40.0)  # together
    assert scaled.rate == pytest.approx(40.0, rel=0.15)
    assert (scaled.client == 1).mean() == pytest.approx(0.75, abs=0.06)


def test_a_burst_in_a_mix_begins_at_its_start() -> None:
    classes = {
        "chat": {"rate": 10.0, **TINY},
        "job": {"arrivals": "burst", "requests": 30, "start": 5.0, **TINY},
    }
    made = mix(classes=classes, requests=200)
    job = made.client == made.clients.index("job")
    assert job.sum() == 30 and set(made.arrival[job].tolist()) == {5.0}
    # A class that ends early ends the mix only if all do.
    alone = mix(classes={"job": classes["job"]})
    assert (len(alone), alone.mode, set(alone.arrival.tolist())) == (30, "open", {5.0})


def test_prefixes_of_two_classes_are_not_each_others() -> None:
    prefixes = {"tokens": 32, "count": 2}
    classes = {name: {"rate": 1.0, "prefixes": prefixes, **TINY} for name in ("a", "b")}
    made = mix(classes={**classes, "c": {"rate": 1.0, **TINY}}, requests=300)
    assert made.prompts is not None
    first: dict[str, set[int]] = {}
    for row in range(300):
        first.setdefault(made.clients[made.client[row]], set()).add(made.prompts[row].runs[0][0])
    assert first["a"] | first["b"] == {0, 1, 2, 3}
    assert not first["a"] & first["b"]
    assert not (first["a"] | first["b"]) & first["c"]


def test_a_million_requests_are_small_and_lazy() -> None:
    made = synthetic(
        requests=1_000_000, rate=1.0, priority={0: 0.5, 1: 0.5}, deadline=1.0,
        client={"a": 0.5, "b": 0.5}, max_len=2048,
    )  # fmt: skip
    columns = [getattr(made, name) for name in COLUMNS]
    assert sum(c.itemsize if c.strides == (0,) else c.nbytes for c in columns) <= 60e6
    assert [request.id for request, _ in islice(made.requests(), 3)] == [0, 1, 2]


def test_a_workload_of_arrays() -> None:
    made = Workload.of([0, 1, 1], [5, 6, 7], 8, client=[0, 1, 0], clients=["a", "b"])
    assert made.output_len.tolist() == [8, 8, 8]
    assert (made.duration, made.rate, len(made)) == (1.0, 2.0, 3)
    with pytest.raises(ValueError, match="read-only"):
        made.arrival[0] = 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], []), "needs at least one request"),
        (([1, 0], 1, 1), "arrival: times must not decrease"),
        (([0, float("inf")], 1, 1), "arrival=inf: must be from 0 to"),
        (([0], [0], 1), "prompt_len=0 in row 0: must be at least 1"),
        (([0, 1], 5, [1, float("nan")]), "output_len=nan in row 1: must be a whole number"),
        (([0], 2**70, 1), "prompt_len: must be numbers"),
    ],
)
def test_a_workload_of_bad_arrays_is_refused(columns: Any, message: str) -> None:
    refusal(lambda: Workload.of(*columns), message)


def test_lengths_may_be_whole_floats_and_priorities_must_be_finite() -> None:
    made = Workload.of([0, 1], [5.0, 6.0], np.array([7, 8], np.uint8))
    assert (made.prompt_len.tolist(), made.output_len.tolist()) == ([5, 6], [7, 8])
    with pytest.raises(ConfigError, match="priority=inf in row 1: must be finite"):
        Workload.of([0, 1], 5, 5, priority=[0, float("inf")])


CHAT: dict[str, Any] = {"rate": 1.0, **TINY}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"duration": 5.0, "arrivals": "burst"}, "needs requests=, since it has no rate"),
        ({"duration": 1e-9}, "duration=1e-09: no request arrives in that time"),
        ({"requests": 5, "priority": {0: 0.5, 1: 0.6}}, "priority: the probabilities sum to 1.1"),
        ({"requests": 5, "priority": {"nan": 1.0}}, "priority.nan: a priority must be a finite"),
        (
            {"requests": 5, "client": {"a": -1, "b": 2}},
            "client.a=-1: must be a number of at least",
        ),
        ({"requests": 5, "max_len": 64, "prefixes": {"tokens": 63}}, "must leave room"),
        ({"requests": 5, "rate": 1e-320}, "rate=9.99989e-321: the last request would arrive at"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    refusal(lambda: synthetic(**{**CHAT, **settings}), message)


# -- merged arrivals -------------------------------------------------------------------------------


def every(gap: float, claimed: float, limit: int | None = None) -> Source:
    """A source with an arrival each `gap` seconds that claims to have `claimed` a second."""

    def times(count: int) -> NDArray[np.float64]:
        return gap * np.arange(1, count + 1, dtype=np.float64)

    return Source(times, claimed, limit=limit)


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.one_of(st.none(), st.floats(0.5, 30)),
)
def test_the_merged_are_the_first_of_all(
    gaps: list[tuple[float, float]], requests: int, duration: float | None
) -> None:
    sources = [every(gap, claimed) for gap, claimed in gaps]
    first = np.sort(np.concatenate([source.times(requests) for source in sources]))[:requests]
    if duration is not None:
        first = first[first < duration]
    if not len(first):
        with pytest.raises(ConfigError, match="no request arrives in that time"):
            merge(sources, requests, duration)
        return
    merged = merge(sources, requests, duration)
    assert merged.arrival.tolist() == first.tolist()
    assert sum(merged.counts) == len(first)
    assert merged.join(merged.split()).tolist() == first.tolist()


# -- rate stages -----------------------------------------------------------------------------------


STAGES = [{"rate": 10, "seconds": 4}, {"rate": 50, "seconds": 2}]
PROMPTS = {"groups": 6, "questions": 5, "prefix_len": 48, "question_len": 16, "output_len": 4}


def made(**settings: Any) -> Any:
    return shared_prefix(**{"stages": STAGES, "pause": 100, **PROMPTS, **settings})


def test_stages_come_one_after_another_at_their_rates() -> None:
    arrival = made(stages=[{"rate": 10, "seconds": 400}, {"rate": 50, "seconds": 80}]).arrival
    assert len(arrival) == 8000 and arrival[0] < 1 and arrival[4000] - arrival[3999] > 100
    assert [np.ptp(arrival[:4000]), np.ptp(arrival[4000:])] == pytest.approx([400, 80], rel=0.06)


def test_every_prompt_is_asked_once_a_round() -> None:
    prompts = made().prompts
    first, second = ([prompts[row] for row in range(at, at + 30)] for at in (0, 30))
    assert len(set(first)) == 30 and first == second
    assert len({prompt[:48] for prompt in first}) == 6 and len({p[48:] for p in first}) == 30
    fewest = made(**dict.fromkeys(PROMPTS, 1))
    assert set(fewest.prompt_len.tolist()) == {2} and set(fewest.output_len.tolist()) == {1}


# -- prompts ---------------------------------------------------------------------------------------


OPEN: dict[str, Any] = {"rate": 1.0, "lengths": "sharegpt"}


def test_requests_ask_for_as_much_as_they_are_to() -> None:
    unbound, exact = (
        synthetic(requests=50, **OPEN),
        synthetic(requests=50, max_tokens="exact", **OPEN),
    )
    assert (exact.output_len == unbound.output_len).all()
    asked = [(request.max_tokens, output) for request, output in exact.requests()]
    assert len(set(asked)) > 1 and all(most == output for most, output in asked)
    most = int(np.median(unbound.output_len))
    cut = synthetic(requests=50, max_tokens=most, **OPEN)
    assert (cut.output_len == np.minimum(unbound.output_len, most)).all()
    assert {request.max_tokens for request, _ in cut.requests()} == {most}
    both = mix(
        classes={"a": {**OPEN, "max_tokens": "exact"}, "b": {**OPEN, "max_tokens": 7}, "c": OPEN},
        requests=60,
    )
    for request, output in both.requests():
        assert request.max_tokens == {"a": output, "b": 7, "c": None}[request.client]


# -- the options of `conf/workload` build what they say --------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
OPTIONS = sorted(path.stem for path in (ROOT / "conf/workload").glob("*.yaml"))
FILES = {
    "trace": PLAIN,
    "azure_conv": AZURE_2023,
    "azure_code": AZURE_2023,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "agentx": AGENTS,
}

SESSIONS = {"chat_sessions", "agents", "agents_16k", "kv_tiers", "offload_or_recompute"}
TYPED_STAGES = {"shared_prefix", "prefix_routing"}
AT_ONCE = {"fixed", "offload_gains", "swap_vs_recompute"}
"""Whose arrivals do not depend on the seed."""


def built(option: str, *overrides: str, **settings: Any) -> Workload:
    with initialize_config_module("pagedsim.conf", version_base=None):
        config = compose(overrides=[f"+workload={option}", *overrides])
    made = instantiate(config.workload, **settings)
    assert isinstance(made, Workload)
    return made


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds(option: str, tmp_path: Path) -> None:
    if option in FILES:
        once = ("workload.users=1", "workload.replay.plays=1") if option == "agentx" else ()
        made = built(option, f"workload.path={written(tmp_path, FILES[option])}", *once)
        assert len(made) in (3, 4)
    else:
        count = f"workload.{'sessions' if option in SESSIONS else 'requests'}=200"
        if option in TYPED_STAGES:
            count = "workload.stages=[{rate: 5, seconds: 20}, {rate: 10, seconds: 10}]"
        made, other = (built(option, count, seed=seed) for seed in (1, 2))
        assert (made.turns.count if made.turns else len(made)) == 200
        assert (made.arrival.tolist() != other.arrival.tolist()) == (option not in AT_ONCE)
