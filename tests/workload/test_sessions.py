"""Workloads of sessions: dependencies between requests, and contents of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.policies.eviction import STEPS
from pagedsim.workload import Sessions, Workload, agents, chat_sessions
from pagedsim.workload.draws import make_draw

FIXED = {"shape": "fixed", "prompt": 10, "output": 5}


def waits(made: Workload) -> list[list[int]]:
    assert made.turns is not None
    return [made.turns.after(row) for row in range(len(made))]


def runs(made: Workload) -> list[list[tuple[int, int]]]:
    assert made.prompts is not None
    return [list(made.prompts[row].runs) for row in range(len(made))]


def program(**settings: Any) -> Workload:
    kind = {"one": {"lengths": FIXED, **settings}}
    return agents(programs=kind, sessions=1, arrivals="burst")


def test_the_prompt_of_a_turn_has_all_turns_before() -> None:
    made = chat_sessions(
        sessions=2, arrivals="burst", turns=3, lengths=FIXED, prefixes={"tokens": 8}
    )
    assert made.prompt_len.tolist() == [18, 33, 48] * 2
    assert waits(made) == [[], [0], [1], [], [3], [4]]
    first, second, third = runs(made)[:3]
    assert second[: len(first)] == first and third[: len(second)] == second
    assert runs(made)[3][0] == first[0], "the system prompt is the same"
    assert runs(made)[3][1] != first[1]
    assert made.prompts is not None
    for row in (0, 1):
        (said,) = made.prompts.answer(row).runs  # type: ignore[union-attr]
        assert runs(made)[row + 1][-2] == (said[0], 5)


def test_a_tree_goes_on_from_the_best_when_all_of_a_level_are_answered() -> None:
    made = program(shape="tree", breadth=2, depth=2, keep=2)
    assert waits(made) == [[], [], *[[0, 1]] * 4, [2, 3, 4, 5]]
    assert made.prompt_len.tolist() == [10, 10, *[25] * 4, 40]
    first, second, of_first, again, of_second, _, last = runs(made)
    assert first == second, "the same question"
    assert of_first == again != of_second
    assert of_first[:1] == of_second[:1] and of_first[1] != of_second[1]
    assert last[: len(of_first)] == of_first


def test_calls_of_one_turn_come_at_once() -> None:
    made = program(shape="tree", breadth=3, depth=2, tool={"shape": "exponential", "mean": 5})
    assert made.turns is not None
    pauses = [made.turns.pause(row) for row in range(len(made))]
    assert len(set(pauses[3:6])) == 1 and pauses[3] != pauses[6]


def test_a_session_ends_before_it_is_too_long() -> None:
    made = chat_sessions(sessions=3, arrivals="burst", turns=9, lengths=FIXED, max_len=40)
    assert made.prompt_len.tolist() == [10, 25] * 3
    assert made.notices == (
        "of 3 sessions 3 ended early: their next turn would have passed max_len=40 tokens",
    )
    cut = chat_sessions(sessions=1, arrivals="burst", lengths=FIXED, max_len=12)
    assert (cut.prompt_len.tolist(), cut.output_len.tolist(), cut.clipped) == ([7], [5], 1)


def test_a_turn_of_which_one_call_is_too_long_is_left_out_whole() -> None:
    lengths = {"shape": "uniform", "prompt_min": 1, "prompt_max": 60, "output_min": 1}
    kind = {"shape": "tree", "breadth": 6, "depth": 4, "keep": 6}
    made = agents(
        programs={"one": {**kind, "lengths": {**lengths, "output_max": 30}}},
        sessions=20, arrivals="burst", max_len=100,
    )  # fmt: skip
    assert made.turns is not None and (made.prompt_len + made.output_len).max() <= 100
    for session in range(20):
        counts = np.bincount(made.turns.turn[made.turns.session == session])[1:].tolist()
        assert counts == [6, 36, 36, 36, 1][: len(counts)]


def test_more_sessions_are_a_continuation_of_fewer() -> None:
    few, many = (
        chat_sessions(
            sessions=count, rate=1, turns={"shape": "geometric", "mean": 3}, lengths="sharegpt",
            think={"shape": "exponential", "mean": 9}, max_len=4000, prefixes={"tokens": 9}, seed=3,
        )
        for count in (10, 30)
    )  # fmt: skip
    rows = len(few)
    for column in ("arrival", "prompt_len", "output_len"):
        assert getattr(many, column)[:rows].tolist() == getattr(few, column).tolist()
    assert few.turns is not None and many.turns is not None
    assert many.turns.pauses[:rows].tolist() == few.turns.pauses.tolist()
    assert waits(many)[:rows] == waits(few)


def test_programs_have_their_shares_and_their_names_as_clients() -> None:
    chain = {"shape": "chain", "turns": 1, "lengths": FIXED}
    made = agents(
        programs={"a": {**chain, "share": 0.25}, "b": {**chain, "share": 0.75, "priority": 2}},
        sessions=4000, rate=9.0,
    )  # fmt: skip
    assert made.clients == ("a", "b")
    assert np.mean(made.client == 0) == pytest.approx(0.25, abs=0.03)
    assert (made.priority == np.where(made.client == 0, 0, 2)).all()


@pytest.mark.parametrize(
    ("given", "mean", "spread"),
    [
        ({"shape": "uniform", "min": 2, "max": 4}, 3, 2 / np.sqrt(12)),
        ({"shape": "exponential", "mean": 3}, 3, 3),
        ({"shape": "geometric", "mean": 3}, 3, np.sqrt(6)),
        ({"shape": "lognormal", "mean": 3, "cv": 0.5}, 3, 1.5),
    ],
)
def test_draws_have_their_mean_and_spread(given: Any, mean: float, spread: float) -> None:
    drawn = make_draw("turns", given).sample(200_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.std() == pytest.approx(spread, rel=0.02, abs=1e-9)


def test_no_request_waits_for_a_later_one() -> None:
    with pytest.raises(ConfigError, match="row 0 waits for row 1: must be one before it"):
        Sessions([0, 0], [1, 2], [[1], []], 0.0 * np.ones(2))
    with pytest.raises(ConfigError, match=r"turns: 1 for 2 requests"):
        Workload.of([0, 1], 4, 4, turns=Sessions([0], [1], [[]], [0.0]))


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ({"shape": "chain", "turns": 3}, [1, 1, None]),
        ({"shape": "map_reduce", "width": 2}, [None, None, None]),  # answers are quoted
        # Of two answers to a question the first is gone on from, by two calls and by the last.
        ({"shape": "tree", "breadth": 2, "depth": 2, "keep": 1}, [1, None, 1, None, None]),
    ],
)
def test_a_call_tells_the_turns_until_its_session_goes_on_from_it(
    shape: dict[str, Any], steps: list[int | None]
) -> None:
    programs = {"one": {**shape, "lengths": FIXED}}
    made = agents(programs=programs, sessions=2, arrivals="burst", tell_steps=True)
    assert [request.extra.get(STEPS) for request, _ in made.requests()] == 2 * steps
