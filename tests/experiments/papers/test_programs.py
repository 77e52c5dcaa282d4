"""The steps that calls of programs tell, by the structure of each session."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.experiments.papers.programs import telling_agents


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
    lengths = {"shape": "fixed", "prompt": 10, "output": 5}
    workload = telling_agents(
        programs={"one": {**shape, "lengths": lengths}}, sessions=2, arrivals="burst"
    )
    told = [request.extra.get("steps_to_execution") for request, _ in workload.requests()]
    assert told == 2 * steps
