"""The checks refuse what they cannot check, in one line that names it, in the place of passing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedsim import testing
from pagedsim.core import ConfigError, PagedMemory, Policy, Unified
from pagedsim.policies.ordering import FCFS
from pagedsim.policies.routing.simple import RoundRobin
from pagedsim.testing import check_batching, check_memory, check_policy, check_router

CHECKS = [getattr(testing, name) for name in testing.__all__]
ONE = FCFS()


class Scaled(Policy):
    """It has no default."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Sizeless(PagedMemory):
    """It takes the blocks alone."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, 16)


def one_line(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", ["x", Callable, ONE, int, lambda *given, **named: 3])
def test_what_is_no_such_component_is_refused(check: Any, make: Any) -> None:
    told = one_line(lambda: check(make))
    assert told.startswith(f"{check.__name__}(") and ": must be a class derived from " in told


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: check_router(FCFS), r"check_router\(FCFS\): must be a class derived from Router"),  # type: ignore[arg-type]
        (lambda: check_policy(lambda: ONE), r"check_policy\(<lambda>\): returned .* twice: must"),
        (lambda: check_policy(Scaled), r": missing a .* 'factor'; .*: lambda: Scaled\(\.\.\.\)$"),  # type: ignore[arg-type]
        (lambda: check_memory(Sizeless), r"check_memory\(Sizeless\): got an unexpected .*'block_s"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_named(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


@pytest.mark.parametrize("cases", [0, -1, "5", 1.5, None, True])
def test_no_cases_are_no_check(cases: Any) -> None:
    for call in (
        lambda: check_policy(FCFS, cases=cases),
        lambda: check_router(RoundRobin, cases=cases),
        lambda: check_batching(Unified, cases=cases),
    ):
        assert one_line(call).startswith(f"cases={cases!r}: must be a whole number of at least 1")


def test_a_seed_is_a_whole_number() -> None:
    assert one_line(lambda: check_policy(FCFS, seed="a")) == "seed='a': must be a whole number"  # type: ignore[arg-type]
