"""Hooks of a policy: when they are called, what they decide, and what they may know."""

import copy
import pickle
from collections.abc import Iterator, Sequence

import pytest

from pagedsim.build import BATCHINGS
from pagedsim.core import (
    Admitted,
    Arrived,
    Event,
    Left,
    PagedMemory,
    Policy,
    Preempted,
    PreemptionMode,
    Request,
    Scheduler,
    ServerState,
    StepPlan,
)
from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.policies.ordering import FCFS
from tests.core.drive import Server

# When hooks are called


class Witness(Policy):
    """Logs each call of a hook, and answers as the default does."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def admit(self, request: Request, state: ServerState) -> bool:
        self.log.append(f"admit {request.id}")
        return True

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        self.log.append(f"victim of {[r.id for r in running]} for {needy.id}")
        return super().choose_victim(running, needy, state)

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        self.log.append(f"swap or recompute {victim.id}")
        return None

    def observe(self, event: Event) -> None:
        match event:
            case Arrived(request, now):
                self.log.append(f"arrived {request.id} at {now:g}")
            case Admitted(request, now):
                self.log.append(f"admitted {request.id} at {now:g}")
            case Preempted(request, now):
                self.log.append(f"preempted {request.id} at {now:g}")
            case Left(request, now):
                self.log.append(f"left {request.id}, {request.state.value} at {now:g}")

    def after_step(self, plan: StepPlan, state: ServerState) -> None:
        self.log.append(f"served {plan.number} at {state.now:g}")

    def logged(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_hooks_are_called_at_their_moments() -> None:
    policy = Witness()
    server = Server(4, policy=policy, preemption="swap", cpu_blocks=4)
    server.add("a", 6, output=3)
    server.add("b", 6)
    plan = server.plan()
    arrivals = ["arrived a at 0", "arrived b at 0"]
    assert policy.logged() == [
        *arrivals,
        "admit a",
        "admitted a at 0",
        "admit b",
        "admitted b at 0",
    ]
    server.commit(plan)
    assert policy.logged() == ["served 0 at 1"]
    server.step()
    assert policy.logged() == [
        "victim of ['b'] for a",
        "swap or recompute b",
        "preempted b at 1",
        "served 1 at 2",
    ]
    server.step()
    assert policy.logged() == ["admitted b at 2", "served 2 at 3", "left a, finished at 3"]
    server.scheduler.abort("b", 4.0)
    assert policy.logged() == ["left b, aborted at 4"]
    server.add("c", 99)
    server.step()
    assert policy.logged() == ["arrived c at 3", "left c, rejected at 3", "served 3 at 4"]


# What a policy may know


HIDDEN = 7919
"""A length that occurs nowhere by chance."""


def values(thing: object, private: bool, depth: int = 4) -> Iterator[object]:
    """All that can be read from something by following its attributes and items."""
    yield thing
    if depth == 0 or isinstance(thing, str | bytes | type) or callable(thing):
        return
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif hasattr(thing, "__iter__"):
        parts = list(thing)
    else:
        parts = []
    module = type(thing).__module__
    if module.startswith(("pagedsim", "policies")):
        wanted = (name for name in dir(thing) if not name.startswith("__"))
        parts += [getattr(thing, name) for name in wanted if private or not name.startswith("_")]
    for part in parts:
        yield from values(part, False, depth - 1)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_no_policy_can_read_how_long_an_output_will_be(batching: str) -> None:
    """Not from the request (its private attributes included), the state, or any event."""
    peeks: set[str] = set()

    class Spy(Policy):
        def look(self, where: str, *things: object) -> None:
            peeks.add(where)
            found = {value for thing in things for value in numbers(thing)}
            assert not found & {HIDDEN, HIDDEN + 8}, f"{where} shows it"

        def rank(self, request: Request, state: ServerState) -> float:
            self.look("rank", request, *public(state))
            return 0.0

        def admit(self, request: Request, state: ServerState) -> bool:
            self.look("admit", request, *public(state))
            return True

        def observe(self, event: Event) -> None:
            self.look("observe", *event)

    server = Server(4000, cpu_blocks=1, policy=Spy(), batching=batching)
    server.add("a", 8, HIDDEN)
    server.steps(3)
    assert peeks == {"rank", "admit", "observe"}
    assert HIDDEN + 8 in numbers(server.scheduler.queues._ends), "the walk sees what is there"


def public(state: ServerState) -> list[object]:
    return [getattr(state, name) for name in dir(state) if not name.startswith("_")]


def numbers(thing: object) -> set[float]:
    return {value for value in values(thing, True) if isinstance(value, int | float)}


def test_what_a_request_carries_cannot_be_changed() -> None:
    given = {"tenant": "a"}
    request = Request("r", 4, extra=given)
    given["tenant"] = "b"
    assert request.extra == request.afresh().extra == {"tenant": "a"}
    for one in (request, Request("plain", 4)):
        with pytest.raises(TypeError):
            one.extra["tenant"] = "c"  # type: ignore[index]
    for copied in (copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert copied.extra == request.extra and type(copied.extra) is type(request.extra)
        assert not copied.decoding and copied.num_tokens == 4
    assert Request("plain", 4).extra == {}


class IdleTimes(PrefillFirst):
    """Counts the times without requests."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def idle(self) -> None:
        self.count += 1


@pytest.mark.parametrize(("later", "times"), [(1.0, 0), (3.0, 1)])
@pytest.mark.parametrize("way", ["an answer", "abort", "withdraw", "crash"])
def test_a_time_without_requests_begins_with_the_end_of_the_last(
    way: str, later: float, times: int
) -> None:
    batching = IdleTimes()
    scheduler = Scheduler(policy=FCFS(), memory=PagedMemory(8, 4), batching=batching)
    request = Request("a", 4)
    scheduler.add(request, 1.0, 1)
    if way == "an answer":
        scheduler.commit(scheduler.plan(1.0), 1.0)
    elif way == "abort":
        scheduler.abort("a", 1.0)
    elif way == "withdraw":
        scheduler.withdraw(request, 1.0)
    else:
        scheduler.crash(1.0)
    scheduler.add(Request("b", 4), later, 1)
    scheduler.plan(later)
    assert batching.count == times
