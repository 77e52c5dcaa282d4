"""The engine in real time: when requests come, what they ask, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pagedsim.core import PagedsimError, Policy, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.source import Job, Mode
from pagedsim.engine.drive import drive
from pagedsim.engine.engine import LLMEngine
from pagedsim.policies.ordering import FCFS
from tests.engine.architectures import loaded


@dataclass
class Asked:
    """A workload of a few requests."""

    jobs: list[Job]
    mode: Mode = "open"
    users: int | None = None
    think_time: float = 0.0
    turns: None = None

    def requests(self) -> Iterator[Job]:
        return iter(self.jobs)


@dataclass
class Seen:
    """An observer that records its events."""

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self.steps.append((start, end, plan.decode_count + len(plan.chunks)))

    def left(self, request: Request) -> None:
        self.requests.append(request)


class Fake:
    """A clock that advances with sleep, and a little with every reading."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def job(id: int, output: int = 3, prompt: Any = 5, **labels: Any) -> Job:
    return Request(id, prompt, **labels), output


@pytest.fixture
def clock() -> Fake:
    return Fake()


def served(
    clock: Fake,
    source: Asked,
    stopping: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Seen:
    seen = Seen()
    given: dict[str, Any] = {"device": "cpu", "block_size": 4, "blocks": 64, "max_model_len": 64}
    given |= {"model": loaded("llama"), **settings}
    engine = LLMEngine(observer=seen, clock=clock, **given)
    drive(engine, source, stopping=stopping, sleep=clock.sleep)
    assert not engine.has_unfinished_requests() or stopping()
    return seen


def test_requests_come_at_their_times(clock: Fake) -> None:
    jobs = [job(0, 3, arrival=0.0), job(1, 4, arrival=2.0), job(2, 6, arrival=2.0)]
    seen = served(clock, Asked(jobs))
    assert [(request.id, request.generated) for request in seen.requests] == [
        (0, 3),
        (1, 4),
        (2, 6),
    ]
    assert [request.arrival for request in seen.requests] == [0.0, 2.0, 2.0]
    starts = [request.scheduled_at or 0.0 for request in seen.requests]
    assert starts[0] < 0.01
    assert all(2.0 <= start < 2.1 for start in starts[1:])


def test_a_burst_comes_at_once_and_takes_its_deadlines_along(clock: Fake) -> None:
    late = [job(i, arrival=10.0 * i, deadline=10.0 * i + 5) for i in range(3)]
    seen = served(clock, Asked(late, mode="burst"))
    assert all((request.arrival or 0) < 0.01 for request in seen.requests)
    assert [round(request.deadline or 0, 2) for request in seen.requests] == [5, 5, 5]
    assert seen.steps[0][2] == 3


def test_users_wait_for_their_answers_and_think(clock: Fake) -> None:
    seen = served(clock, Asked([job(i) for i in range(5)], mode="closed", users=2, think_time=1.5))
    requests = sorted(seen.requests, key=lambda request: int(request.id))
    assert [request.arrival for request in requests[:2]] == [0.0, 0.0]
    first = sorted(request.finished_at or 0.0 for request in requests[:2])
    arrivals = [request.arrival or 0.0 for request in requests[2:4]]
    assert arrivals == pytest.approx([end + 1.5 for end in first], abs=1e-3)
    assert len(seen.requests) == 5


def test_what_prompts_share_they_share_in_the_cache(clock: Fake) -> None:
    """Token ids of a workload may be any numbers; the model has 128 or so."""
    prefix = [2**33 + i for i in range(12)]
    prompts = [[*prefix, 7, 8], [*prefix, 9, 10]]
    source = Asked([job(i, prompt=prompt, arrival=2.0 * i) for i, prompt in enumerate(prompts)])
    seen = served(clock, source, memory="prefix")
    assert [request.cached_tokens for request in seen.requests] == [0, 12]


def test_ends_of_texts_are_ignored_and_nothing_is_drawn(clock: Fake) -> None:
    """A batching sees no `ignore_eos`: for all that it knows, an answer may end at any token."""
    params = SamplingParams(temperature=1.0, max_tokens=4)
    model = replace(loaded("llama"), eos_token_ids=tuple(range(loaded("llama").vocab_size)))
    source = Asked([(Request(0, [5, 6], params, arrival=0.0), 9)])
    (request,) = served(clock, source, model=model).requests
    used = request.params
    assert (used.temperature, used.ignore_eos, used.max_tokens) == (0.0, False, 4)
    assert request.generated == 4


def test_it_stops_while_idle(clock: Fake) -> None:
    source = Asked([job(0, arrival=0.0), job(1, arrival=1e6)])
    seen = served(clock, source, stopping=lambda: clock.now > 105)
    assert [request.id for request in seen.requests] == [0]
    assert clock.now < 106


def test_a_policy_that_admits_no_request_is_reported(clock: Fake) -> None:
    class AdmitNone(FCFS):
        def admit(self, request: Request, state: object) -> bool:
            return False

    policy: Policy = AdmitNone()
    with pytest.raises(PagedsimError, match=r"nothing can run at .*: 1 requests wait"):
        served(clock, Asked([job(0, arrival=0.0)]), policy=policy)
