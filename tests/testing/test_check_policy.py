"""The check of policies passes those that keep their promises, and names the first broken one."""

from __future__ import annotations

import random
from itertools import count
from threading import Lock
from typing import Any

import pytest

from pagedsim.build import POLICIES, make_policy
from pagedsim.core import ConfigError, Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.testing import check_policy


class Shortest(Policy):
    rank_changes: RankChanges = "never"

    def rank(self, request: Request, state: ServerState) -> Any:
        return request.prompt_len


class Late(Shortest):
    """Goes by the time, and says that it does not."""

    def rank(self, request: Request, state: ServerState) -> Any:
        return -(state.now % 0.7)


class LateWhileWaiting(Late):
    rank_changes: RankChanges = "while running"


class Drawn(Policy):
    def rank(self, request: Request, state: ServerState) -> Any:
        return random.random()


class Counting(Shortest):
    """Answers by the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def admit(self, request: Request, state: ServerState) -> bool:
        self.calls += 1
        return self.calls % 2 == 0


class Promoting(Shortest):
    """Changes what it is asked about."""

    def rank(self, request: Request, state: ServerState) -> Any:
        request.priority += 1
        return request.prompt_len


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


class Skipping(Shortest):
    """Answers by how many steps it was called in, which skipped steps change."""

    def admit(self, request: Request, state: ServerState) -> bool:
        return not state.running or int(state.now * 40) % 3 == 0


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
        (Late, r"Late\.rank_changes='never': rank of a request gave -0\.\d+, and -0\.\d+ a step"),
        (LateWhileWaiting, r"LateWhileWaiting\.rank_changes='while running': rank of a request"),
        (Drawn, r"Drawn\.rank gave 0\.\d+ and then 0\.\d+ for the same request and state"),
        (Counting, r"Counting\.admit gave False and then True for the same request and state"),
        (Promoting, r"Promoting\.rank changed a request: priority=0 is priority=2 now"),
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
