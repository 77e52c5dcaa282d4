"""Hooks that write to all that they can reach: each write is refused, or changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pagedsim.core.errors import PagedsimError
from pagedsim.core.queues import Queues
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Failure
from tests.run.test_own_parts import PARTS, configs, hooks, served

__all__ = ["configs", "served"]

DEEP = 7
"""References from an argument of a hook to what it writes to, at most."""
BROAD = 12
"""Elements of a container that are followed."""
CALLS = 25
"""Of a hook, in which it writes."""


class Vandal:
    """Writes to the public attributes and the containers that some objects lead to."""

    def __init__(self) -> None:
        self.tried: set[str] = set()
        self._calls: dict[str, int] = {}

    def called(self, hook: str, passed: Iterable[Any]) -> None:
        """Write, unless the hook has been called often."""
        self._calls[hook] = count = self._calls.get(hook, 0) + 1
        if count > CALLS:
            return
        seen: list[Any] = list(passed)
        known = set(map(id, seen))
        for _ in range(DEEP):
            further = [one for thing in seen for one in self._written(thing)]
            seen = [one for one in further if id(one) not in known and not known.add(id(one))]  # type: ignore[func-returns-value]

    def _written(self, thing: Any) -> list[Any]:
        """What an object leads to; it has been written to by then."""
        found = []
        if isinstance(thing, Mapping | Collection) and not isinstance(thing, str | bytes | range):
            found += self._emptied(thing)
        if isinstance(thing, Queues):  # what a batching moves requests between; not its clock
            tried(setattr, thing, "now", -1.0)
            return found
        if not type(thing).__module__.startswith("pagedsim."):
            return found
        for name in [name for name in dir(thing) if not name.startswith("_")]:
            try:
                value = getattr(thing, name)
            except (PagedsimError, AttributeError):  # decodes of a step that has ended
                continue
            if not callable(value):
                found.append(value)
                self.tried.add(f"{type(thing).__name__}.{name}")
                tried(setattr, thing, name, another(value))
                tried(delattr, thing, name)
        return found

    def _emptied(self, thing: Any) -> list[Any]:
        values = thing.values() if isinstance(thing, Mapping) else thing
        found = [one for _, one in zip(range(BROAD), values, strict=False)]
        for method in ("clear", "reverse", "pop", "popitem"):
            tried(lambda name: getattr(thing, name)(), method)
        tried(lambda: thing.append(found[0]))
        tried(lambda: thing.__setitem__(0, another(found[0])))
        return found


def tried(write: Callable[..., object], *passed: Any) -> None:
    with suppress(AttributeError, TypeError, IndexError, KeyError, ValueError):  # refused
        write(*passed)


def another(value: Any) -> Any:
    """Another value of the kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 3
    return f"{value}x" if isinstance(value, str) else ()


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("policy", "Request.arrival StepPlan.decode_count ServerState.now Chunk.length"),
        ("preemption", "Request.prompt_len ServerState.now"),
        ("router", "Request.arrival ReplicaView.index Candidates.all_replicas Placed.now"),
        ("batching", "Request.arrival StepPlan.decode_count"),
        ("cost", "StepPlan.decode_count Chunk.length Request.arrival"),
        ("autoscaler", "ScalingView.now ReplicaView.index Request.arrival"),
    ],
)
def test_hooks_that_write_to_all_they_reach_change_nothing(
    served: Any, name: str, reached: str
) -> None:
    part, vandal = PARTS[name], Vandal()

    def member(hook: str, seen: Callable[[str, Iterable[Any]], None]) -> Any:
        own = getattr(part.base, hook)

        def call(self: Any, *passed: Any) -> Any:
            seen(hook, passed)
            return own(self, *passed)

        return call

    def tables(seen: Callable[[str, Iterable[Any]], None]) -> dict[str, Any]:
        asked = [hook for hook in hooks(part.states) if callable(getattr(part.base, hook))]
        outcome = served(name, {hook: member(hook, seen) for hook in asked})
        assert isinstance(outcome, Run), outcome
        files = outcome.folder.glob("*.parquet")
        return {file.name: pq.read_table(file).to_pydict() for file in files}

    assert tables(lambda hook, passed: None) == tables(vandal.called)
    assert set(reached.split()) <= vandal.tried, sorted(vandal.tried)


def test_metrics_go_by_the_arrivals_of_the_workload_and_no_latency_is_below_zero(
    served: Any,
) -> None:
    def observe(self: Any, event: Any) -> None:
        event.request._arrival, event.request._priority = 99.0, 7

    outcome = served("policy", {"observe": observe})
    assert isinstance(outcome, Run), outcome
    table = pq.read_table(outcome.folder / "requests.parquet").to_pydict()
    assert set(table["arrival"]) == set(table["priority"]) == {0.0}

    def rank(self: Any, request: Any, state: Any) -> int:
        request._first_token_at = -1.0
        return 0

    outcome = served("policy", {"rank": rank})
    assert isinstance(outcome, Failure) and outcome.expected
    line = "Mine: request 0 got its first token at -1 s, before its arrival at 0 s: its hooks must"
    assert str(outcome).startswith(line)


@pytest.mark.parametrize(
    ("draw", "named"),
    [(random.random, "random"), (np.random.rand, "numpy.random"), (None, None)],
)
def test_numbers_drawn_from_a_global_generator_are_noted(
    served: Any, draw: Callable[[], float] | None, named: str | None
) -> None:
    def admit(self: Any, request: Any, state: Any) -> bool:
        return (draw() if draw else state.draw(request)) < 2

    outcome = served("policy", {"admit": admit})
    assert isinstance(outcome, Run), outcome
    told = [one["what"] for one in outcome.summary["notices"] if "hooks drew" in one["what"]]
    assert [one.partition(":")[0] for one in told] == (
        [f"hooks drew numbers from {named}"] if named else []
    )
    assert all("state.draw(request, seed)" in one for one in told)
