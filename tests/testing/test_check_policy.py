"""The check of policies passes those that keep their promises, and names the first broken one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Any

import pytest

from pagedsim import testing
from pagedsim.build import POLICIES, make_policy
from pagedsim.core import (
    ConfigError,
    PagedMemory,
    Policy,
    PolicyWrapper,
    Request,
    ServerState,
    Unified,
)
from pagedsim.core.policy import RankChanges
from pagedsim.policies.ordering import FCFS
from pagedsim.policies.routing.simple import RoundRobin
from pagedsim.testing import check_batching, check_memory, check_policy, check_router


class Shortest(Policy):
    rank_changes: RankChanges = "never"

    def rank(self, request: Request, state: ServerState) -> Any:
        return request.prompt_len


class Late(Shortest):
    """Goes by the time, and says that it does not."""

    def rank(self, request: Request, state: ServerState) -> Any:
        return -(state.now % 0.7)


class Counting(Shortest):
    """Answers by the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def admit(self, request: Request, state: ServerState) -> bool:
        self.calls += 1
        return self.calls % 2 == 0


class Shunning(Policy):
    def admit(self, request: Request, state: ServerState) -> bool:
        return request.id != 3


class Failing(Shortest):
    def admit(self, request: Request, state: ServerState) -> bool:
        return 1 / (request.prompt_len - 7) > -9


class Closed(Shortest):
    def __init__(self) -> None:
        self.weight = Lock()


class Mixed(Shortest):
    def rank(self, request: Request, state: ServerState) -> Any:
        return (1, 2) if request.priority else 1


class Remembering(Shortest):
    """What one object learns stays with the class."""

    runs = count()

    def __init__(self) -> None:
        self.sign = 1 - 2 * (next(self.runs) % 2)

    def rank(self, request: Request, state: ServerState) -> Any:
        return self.sign * request.prompt_len


class Around(PolicyWrapper):
    """As the inner policy."""


class Rejecting(Shortest):
    def should_reject(self, request: Request, state: ServerState) -> str | None:
        return "too long" if request.prompt_len > 9 else None


class Picky(Shortest):
    def __init__(self) -> None:
        raise ConfigError("Picky: refused")


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_of_pagedsim_keep_their_promises(name: str) -> None:
    check_policy(lambda: make_policy(name), cases=4)


@pytest.mark.parametrize("make", [Shortest, Rejecting, lambda: Around(Shortest())])
def test_success_is_silent(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check_policy(make, cases=5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Late, r"Late: Late\.rank gave -0\.\d+ and now -0\.\d+ for .*rank_changes='never' says"),
        (Counting, r"Counting\.admit gave False and then True for the same request and state"),
        (Shunning, r"Shunning: nothing can run at [\d.]+ s: .* Shunning admits none of them"),
        (Failing, r"Failing: ZeroDivisionError: division by zero \(.*test_check_policy\.py:\d+\)"),
        (Closed, r"Closed: cannot be copied: TypeError: .*lock"),
        (Mixed, r"Mixed: Mixed\.rank gave 1 for .* and \(1, 2\) for .*: must be numbers for all"),
        (Remembering, r"Remembering: two runs of the same requests differ: .* in row \d+ of"),
    ],
)
def test_the_first_broken_promise_is_named(kind: type[Policy], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{told}") as error:
        check_policy(kind)
    assert "\n" not in str(error.value)


def test_one_that_refuses_every_server_is_not_passed() -> None:
    with pytest.raises(ConfigError, match="Picky: refused"):
        check_policy(Picky)


# -- what the checks of any component refuse -------------------------------------------------------


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
