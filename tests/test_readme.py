"""The README's promises, tried: its policy does what it says, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
LINES = 150


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES


def shown() -> str:
    """The policy of the section that promises ten lines."""
    marked = re.search(r"<!-- test:sjf -->\n```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert marked, "the README shows shortest job first after the marker test:sjf"
    return marked[1]


def policy() -> Policy:
    names: dict[str, Any] = {}
    exec(compile(shown(), "README.md", "exec"), names)
    made = names["ShortestJobFirst"]()
    assert isinstance(made, Policy)
    return made


def test_the_policy_takes_about_ten_lines() -> None:
    assert len([line for line in shown().splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_the_policy_serves_the_shortest_first(batching: str) -> None:
    scheduler = make_scheduler(
        memory=make_memory(blocks=64, block_size=4),
        batching=batching,
        policy=policy(),
        max_seqs=1,
        max_model_len=128,
    )
    for name, length in (("long", 30), ("short", 3), ("middle", 9)):
        scheduler.add(Request(name, 5, predicted_len=length), now=0.0, output_len=length)
    ended: list[Any] = []
    while scheduler.unfinished:
        ended += [request.id for request in scheduler.commit(scheduler.plan(0.0), 0.0)]
    assert ended == ["short", "middle", "long"]
