"""The page's own router, tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from policies.routing.router import Router
from tests.policies.routing.fakes import fleet, named

PAGE = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")


def shown() -> str:
    """The router of the section that promises ten lines."""
    marked = re.search(r"<!-- test:router -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.M)
    assert marked, "the page shows a router after the marker test:router"
    return marked[1]


def router() -> Router:
    names: dict[str, Any] = {}
    exec(compile(shown(), "routing.md", "exec"), names)
    made = names["ByLength"]()
    assert isinstance(made, Router)
    return made


def test_it_takes_ten_lines() -> None:
    assert len([line for line in shown().splitlines() if line.strip()]) <= 10


def test_it_sends_long_prompts_here_and_short_ones_there() -> None:
    there = fleet({"running": 2}, {"running": 1}, {"running": 1}, {})
    assert named(router(), there, 1000) == 1
    assert named(router(), there, 999) == 3
    assert named(router(), fleet({}), 1000) == 0
