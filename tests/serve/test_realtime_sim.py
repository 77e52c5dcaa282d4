"""The simulator in real time decides and takes as long as the simulation, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, RequestError, SamplingParams, Scheduler, StepPlan
from pagedsim.core.batch_state import ServerState
from pagedsim.core.policy import Arrived, Event
from pagedsim.engine.output import RequestOutput
from pagedsim.metrics.recorder import Recorder
from pagedsim.serve.factory import build_model
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.sim.simulate import simulate
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import Conf
from pagedsim.spec.run import RunSpec
from tests.sim.harness import Affine, Constant, content

Row = tuple[float, int, int, int]
"""Arrival, prompt, output, sequences."""


class Clock:
    """A clock that advances when it is waited for."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def scheduler(
    blocks: int = 40, memory: str = "paged", cpu_blocks: int = 0, **settings: Any
) -> Scheduler:
    made = make_memory(memory, blocks=blocks, block_size=4, cpu_blocks=cpu_blocks)
    return make_scheduler(memory=made, **settings)


class Rows:
    """The same requests for a simulation."""

    mode: Literal["open"] = "open"
    users = None
    think_time = 0.0
    turns = None

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def requests(self) -> Iterator[tuple[Request, int]]:
        for i, (arrival, prompt, output, n) in enumerate(self.rows):
            params = SamplingParams(max_tokens=output, n=n)
            yield Request(i, [7] * prompt, params, arrival=arrival, priority=i % 3), output


def paced(
    engine: RealtimeSimulator,
    clock: Clock,
    rows: list[Row],
    stream: bool = True,
    delta: bool = True,
) -> list[RequestOutput]:
    """All outputs; each request is handed over when it comes, as a server would."""
    outputs: list[RequestOutput] = []
    left = list(enumerate(rows))
    while left or engine.has_unfinished_requests():
        due = clock.time + engine.pause
        if left and left[0][1][0] <= due:
            i, (arrival, prompt, output, n) = left.pop(0)
            clock.time = max(clock.time, arrival)
            engine.add_request(
                i, [7] * prompt, SamplingParams(max_tokens=output, n=n), stream=stream,
                delta=delta, arrival=arrival, priority=i % 3,
            )  # fmt: skip
            continue
        clock.time = due
        outputs += engine.step()
    return outputs


rows = st.lists(
    st.tuples(
        st.floats(0, 3).map(lambda at: round(at, 4)),
        st.integers(1, 30),
        st.integers(1, 20),
        st.sampled_from((1, 1, 1, 3)),
    ),
    min_size=1,
    max_size=25,
).map(sorted)

YIELDING: list[dict[str, Any]] = [
    {"preemption": "recompute"},
    {"preemption": "swap", "cpu_blocks": 60},
]
SGLANG: dict[str, Any] = {"policy": "lpm", "batching": "sglang", "memory": "radix"}
SETTINGS: list[dict[str, Any]] = [
    *(
        {"policy": policy, "batching": batching, "async_scheduling": ahead, **yielding}
        for policy, batching, ahead, yielding in product(
            ("priority",), ("prefill_first", "unified"), (False, True), YIELDING
        )
    ),
    *({**SGLANG, "async_scheduling": ahead} for ahead in (False, True)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(map(str, one.values())))
@examples(max_examples=examples().max_examples // 5)
@given(rows=rows, overlap=st.booleans(), way=st.sampled_from((0.0, 0.02)))
def test_every_step_and_every_time_is_that_of_the_simulation(
    settings: dict[str, Any], rows: list[Row], overlap: bool, way: float
) -> None:
    if settings["batching"] == "sglang":  # which serves one sequence of each request
        rows = [(arrival, prompt, output, 1) for arrival, prompt, output, _ in rows]
    cost = Affine(block=0.0007)
    wanted, got = Recorder(), Recorder()
    how: dict[str, Any] = {"overlap": overlap, "way": way}
    simulate(scheduler(**settings), Rows(rows), cost, wanted, fast_forward=False, **how)
    clock = Clock()
    engine = RealtimeSimulator(scheduler(**settings), cost, observer=got, clock=clock, **how)
    outputs = paced(engine, clock, rows)
    assert content(got.requests_table()) == content(wanted.requests_table())
    assert content(got.steps_table()) == content(wanted.steps_table())
    assert engine.scheduler.memory.used == 0
    said: dict[Any, list[int]] = {}
    for output in outputs:
        assert len({tuple(one.token_ids) for one in output.outputs}) == 1
        said.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    for i, (_, _, output_len, _) in enumerate(rows):
        assert said[i] == list(range(1, output_len + 1))


def test_tokens_come_when_their_steps_end() -> None:
    clock = Clock()
    engine = RealtimeSimulator(scheduler(), Constant(1.0), clock=clock)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2), stream=True, delta=True)
    assert engine.step() == [] and engine.pause == 1.0
    clock.time = 0.99
    assert engine.step() == []
    clock.time = 1.0
    (first,) = engine.step()
    assert (first.outputs[0].text, first.finished) == (" 1", False)
    clock.time = 2.0
    (last,) = engine.step()
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == (" 2", "length")
    assert last.metrics.first_token == 1.0 and last.metrics.finished == 2.0
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("read", [0.0, 0.015])
def test_a_request_is_queued_when_the_modelled_server_would_have_read_it(read: float) -> None:
    """What it takes here to read it passes within that time: it does not come on top."""
    clock = Clock()
    engine = RealtimeSimulator(scheduler(), Constant(1.0), clock=clock, way=0.02)
    clock.time = read
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=1), arrival=0.0)
    assert engine.waiting == 1 and engine.pause == pytest.approx(0.02 - read)
    clock.time = 0.02
    assert engine.step() == [] and engine.waiting == 0
    clock.time = 1.02
    (answer,) = engine.step()
    assert answer.metrics.arrival == 0.0 and answer.metrics.first_token == 1.02


def test_the_command_and_a_simulation_of_its_words_take_the_same_time_to_a_first_token() -> None:
    words = ["model=tiny", "hardware=cpu", "stack.server_ms=7"]
    served = build_model(Composed.of(words, Conf(root="serve")).resolved()).engine
    assert isinstance(served, RealtimeSimulator)
    served._clock = clock = Clock()
    served._epoch = 0.0
    (answer,) = paced(served, clock, [(0.25, 20, 1, 1)])
    recorder = StoppableRecorder()
    simulation: Any = RunSpec(Composed.of(words).resolved()).prepare()
    simulation.run(Rows([(0.25, 20, 1, 1)]), recorder)
    (first,) = recorder.requests_table()["first_token"].to_pylist()
    assert answer.metrics.first_token == first > 0.257


def test_a_speed_of_ten_lets_ten_seconds_pass_in_one() -> None:
    clock = Clock()
    engine = RealtimeSimulator(scheduler(), Constant(1.0), clock=clock, speed=10)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3))
    engine.step()
    assert engine.pause == pytest.approx(0.1)
    clock.time = 0.35
    (answer,) = engine.step()
    assert list(answer.outputs[0].token_ids) == [1, 2, 3] and answer.metrics.finished == 3.0


@pytest.mark.parametrize("settings", [{}, SGLANG], ids=["prefill_first", "sglang"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_is_aborted_wherever_it_is(ahead: bool, settings: dict[str, Any]) -> None:
    clock = Clock()
    engine = RealtimeSimulator(
        scheduler(max_seqs=2, async_scheduling=ahead, **settings), Constant(1.0), clock=clock
    )
    for name in "abc":
        engine.add_request(name, [1] * 9, SamplingParams(max_tokens=9), arrival=0.5)
    assert engine.abort_request("b").outputs[0].finish_reason == "abort"  # before it came
    for clock.time in (0.6, 2.6):
        engine.step()
    engine.abort_request("a")  # in the batch, in the middle of a step
    engine.abort_request("c")
    with pytest.raises(RequestError, match="not known"):
        engine.abort_request("a")
    clock.time = 9.0
    engine.step()
    assert engine.scheduler.memory.used == 0 and not engine.has_unfinished_requests()
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    engine.step()
    clock.time = 11.0
    assert engine.step()[0].finished


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_ends_its_requests_and_no_others(ahead: bool) -> None:
    class Breaks(Constant):
        def step_seconds(self, plan: StepPlan) -> float:
            if any(request.id == "bad" for request in plan.touched):
                raise ValueError("a gap in the table")
            return 1.0

    clock = Clock()
    engine = RealtimeSimulator(scheduler(max_seqs=1, async_scheduling=ahead), Breaks(), clock=clock)
    for at, name in enumerate(("good", "bad", "better", "late")):
        engine.add_request(
            name, [1] * 5, SamplingParams(max_tokens=3), arrival=20.0 if name == "late" else at / 8
        )
    outputs: dict[Any, str | None] = {}
    for clock.time in (0.5, 9.0, 15.0, 40.0):
        outputs |= {one.request_id: one.outputs[0].finish_reason for one in engine.step()}
    assert outputs == {"good": "length", "bad": "error", "better": "length", "late": "length"}
    assert engine.failure == "ValueError: a gap in the table"
    assert engine.scheduler.memory.used == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("hears", [False, True])
def test_a_policy_that_fails_ends_all_and_the_engine_goes_on(ahead: bool, hears: bool) -> None:
    class Breaks(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return self._look(request, not hears)

        def observe(self, event: Event) -> None:
            if isinstance(event, Arrived):
                self._look(event.request, hears)

        def _look(self, request: Request, here: bool) -> bool:
            if here and request.id == "bad":
                raise ValueError("a bug")
            return True

    outputs = reasons(Breaks(), ahead, (("running", 0.0), ("bad", 2.5), ("good", 9.0)))
    assert outputs == {"running": "error", "bad": "error", "good": "length"}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_fails_to_be_ranked_ends_alone(ahead: bool) -> None:
    class Breaks(Policy):
        def rank(self, request: Request, state: ServerState) -> Any:
            if request.id == "bad":
                raise ValueError("a bug")
            return 0

    outputs = reasons(Breaks(), ahead, (("running", 0.0), ("bad", 2.5), ("good", 9.0)))
    assert outputs == {"running": "length", "bad": "error", "good": "length"}


def reasons(
    policy: Policy, ahead: bool, requests: Sequence[tuple[str, float]]
) -> dict[Any, str | None]:
    """Why requests of five tokens and steps of a second end, that come when it is said."""
    clock = Clock()
    engine = RealtimeSimulator(
        scheduler(policy=policy, async_scheduling=ahead), Constant(1.0), clock=clock
    )
    for name, arrival in requests:
        engine.add_request(name, [1], SamplingParams(max_tokens=5), arrival=arrival)
    outputs: dict[Any, str | None] = {}
    for clock.time in range(20):
        outputs |= {one.request_id: one.outputs[0].finish_reason for one in engine.step()}
    assert engine.failure == "ValueError: a bug"
    assert engine.scheduler.memory.used == 0 and not engine.has_unfinished_requests()
    return outputs


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_behind_an_aborted_one_is_served(ahead: bool) -> None:
    class Waits(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return request.id != "never"

    clock = Clock()
    engine = RealtimeSimulator(
        scheduler(policy=Waits(), async_scheduling=ahead), Constant(1.0), clock=clock
    )
    for name in ("never", "behind"):
        engine.add_request(name, [1], SamplingParams(max_tokens=1))
    engine.step()
    assert engine.pause == inf
    clock.time = 5.0
    engine.abort_request("never")
    assert engine.pause == 0
    engine.step()
    clock.time = 6.0
    (answer,) = engine.step()
    assert answer.finished and answer.metrics.finished == 6.0


def test_a_step_returns_though_the_model_is_far_behind() -> None:
    clock = Clock()

    class Works(Constant):
        def step_seconds(self, plan: StepPlan) -> float:
            clock.time += 0.02  # this is how long we take
            return 1.0

    engine = RealtimeSimulator(scheduler(), Works(), clock=clock, speed=1e6)
    engine.add_request("a", [1], SamplingParams(max_tokens=50), stream=True, delta=True)
    clock.time = 1.0
    assert len(engine.step()) < 5
    assert engine.pause == 0
