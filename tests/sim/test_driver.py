"""The driver: times by hand, feeds, the bus, the order of events, and fast-forward without a trace.

Most of it holds with async scheduling (`ahead`), too, where a step is planned while the one before
runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import (
    Admitted,
    Arrived,
    ConfigError,
    Event,
    Left,
    PagedsimError,
    Policy,
    Preempted,
    Request,
    SamplingParams,
    Scheduler,
)
from pagedsim.core.batch_state import ServerState
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.beams import Beams
from pagedsim.sim.cost import Fitted, Roofline
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, agents, chat_sessions
from tests.core.odd_policies import Witness
from tests.fuzz import Load, Simulation, simulations
from tests.sim.harness import Affine, Constant, Jobs, content, run
from tests.sim.shapes import replica

ROWS = [(0.05 * i, 3 + 7 * i % 23, 1 + 5 * i % 17) for i in range(40)]
BOTH = pytest.mark.parametrize("ahead", [False, True])


def scheduler(ahead: bool = False, blocks: int = 64, **settings: Any) -> Scheduler:
    memory = make_memory(blocks=blocks, block_size=4, cpu_blocks=settings.pop("cpu_blocks", 0))
    return make_scheduler(memory=memory, async_scheduling=ahead, **settings)


def columns(table: Any, *names: str) -> list[list[Any]]:
    return [table[name].to_pylist() for name in names]


# -- times by hand: steps of a second --------------------------------------------------------------


def test_times_of_two_requests_by_hand() -> None:
    requests, steps = run(scheduler(), Jobs([(0.0, 4, 3), (0.5, 4, 2)]))
    # Prefill 0, prefill 1, then both decode; 1 ends first.
    assert columns(steps, "start", "decode_seqs") == [[0.0, 1.0, 2.0, 3.0], [0, 0, 2, 1]]
    assert columns(requests, "first_token", "finished") == [[1.0, 2.0], [4.0, 3.0]]


def test_times_of_two_requests_by_hand_a_step_ahead() -> None:
    requests, steps = run(scheduler(ahead=True), Jobs([(0.0, 4, 3), (0.5, 4, 2)]))
    # The second comes while step 0 runs, when step 1 is planned already, so it is in step 2. Both
    # end with step 3, which is known when step 4 is on its way.
    assert steps["start"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert columns(steps, "prefill_tokens", "decode_seqs") == [[4, 0, 4, 0, 0], [0, 1, 0, 2, 2]]
    assert columns(requests, "first_token", "finished") == [[1.0, 3.0], [4.0, 4.0]]
    assert requests["output_tokens"].to_pylist() == [3, 2]


@dataclass
class With(Jobs):
    """Jobs with sampling parameters by request, where they have any."""

    params: dict[int, SamplingParams] = field(default_factory=dict)

    def requests(self) -> Iterator[tuple[Request, int]]:
        for request, output in super().requests():
            params = self.params.get(int(request.id), request.params)
            yield Request(request.id, request.prompt_len, params, arrival=request.arrival), output


@BOTH
def test_a_policy_that_admits_no_request_is_an_error(ahead: bool) -> None:
    class Closed(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return False

    with pytest.raises(PagedsimError, match="nothing can run at 0 s: 1 requests wait"):
        run(scheduler(ahead, policy=Closed()), Jobs([(0.0, 4, 2)]))


# -- feeds -----------------------------------------------------------------------------------------


@BOTH
def test_users_in_a_closed_loop_send_again_after_thinking(ahead: bool) -> None:
    jobs = Jobs([(0.0, 4, 2)] * 3, mode="closed", users=1, think_time=5.0)
    requests, _ = run(scheduler(ahead), jobs)
    assert requests["arrival"].to_pylist() == [0.0, 7.0, 14.0]
    requests, _ = run(scheduler(ahead), jobs, way=0.25)  # of every request
    assert requests["arrival"].to_pylist() == [0.0, 7.25, 14.5]
    assert requests["scheduled"].to_pylist() == [0.25, 7.5, 14.75]


def test_a_closed_loop_serves_requests_left_when_the_first_user_stops() -> None:
    jobs = Jobs([(0.0, 4, 2), (0.0, 4, 30)], mode="closed", users=3, think_time=0.5)
    requests, _ = run(scheduler(), jobs)
    assert requests["state"].to_pylist() == ["finished"] * 2
    assert requests["arrival"].to_pylist() == [0.0, 0.0]


# -- the bus ---------------------------------------------------------------------------------------


def swapping(block: float, overlap: bool = False) -> list[dict[str, Any]]:
    """Steps of a second, of two requests of which one has to be swapped out and in."""
    server = scheduler(blocks=4, cpu_blocks=8, preemption="swap", batching="unified")
    jobs = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
    _, steps = run(server, jobs, Constant(1.0, block), overlap=overlap)
    rows: list[dict[str, Any]] = steps.to_pylist()
    return rows


def test_swaps_lie_on_the_critical_path_unless_they_overlap() -> None:
    serial, beside = swapping(0.25), swapping(0.25, overlap=True)
    out, back = (sum(row[name] for row in serial) for name in ("swap_out", "swap_in"))
    assert out == back == sum(row["swap_out"] for row in beside) > 0
    busy = [sum(row["end"] - row["start"] for row in rows) for rows in (serial, beside)]
    assert busy[0] == pytest.approx(len(serial) + 0.25 * (out + back))
    assert busy[1] == pytest.approx(len(serial) + 0.25 * back)


def test_a_swap_in_waits_for_the_bus() -> None:
    """What was swapped out is still on its way when there is room for it again."""
    rows = swapping(5.0, overlap=True)
    (out,) = (row for row in rows if row["swap_out"])
    (back,) = (row for row in rows if row["swap_in"])
    moved = 5.0 * (out["swap_out"] + back["swap_in"])
    assert back["start"] < out["start"] + 5.0 * out["swap_out"]
    assert back["end"] == out["start"] + moved + 1.0


# -- async scheduling ------------------------------------------------------------------------------


def test_a_request_that_depends_on_its_last_tokens_is_served_alike() -> None:
    groups = With(ROWS, params=dict.fromkeys(range(len(ROWS)), SamplingParams(n=2, max_tokens=9)))
    cost: Any = Roofline(replica("llama-2-7b", "a100-80gb"))
    tables = [run(scheduler(ahead), groups, cost) for ahead in (True, False)]
    assert list(map(content, tables[0])) == list(map(content, tables[1]))


def test_the_host_counts_only_where_it_takes_longer() -> None:
    where = replica("llama-2-7b", "a100-80gb")
    quick = Roofline(where, host_step_ms=1.0, host_request_us=10.0)
    slow = Roofline(where, host_step_ms=900.0, host_request_us=10.0)
    device = Roofline(where, host_step_ms=0.0, host_request_us=0.0)
    server = scheduler(ahead=True)
    server.add(Request("a", 40), 0.0, 9)
    first = server.plan(0.0)
    server.dispatch(first)
    second = server.plan(0.0)
    assert (first.ahead, second.ahead) == (False, True)
    assert quick.step_seconds(first) == pytest.approx(device.step_seconds(first) + 1e-3 + 1e-5)
    assert quick.step_seconds(second) == pytest.approx(device.step_seconds(second))
    assert slow.step_seconds(second) == pytest.approx(0.9 + 1e-5)
    for cost, plan in product((quick, slow, device), (first, second)):
        assert cost.explain(plan).seconds == pytest.approx(cost.step_seconds(plan))


def test_what_was_fitted_to_other_steps_is_noticed() -> None:
    where = replica("llama-2-7b", "a100-80gb")
    for fitted, ahead in product((False, True), repeat=2):
        named = {"async_scheduling": fitted}
        cost = Fitted(where, prefill={}, decode={"constant": 1e-3}, fitted_for=named)
        simulate(scheduler(ahead), Jobs([(0.0, 4, 3)]), cost, Recorder())
        told = f"step times are fitted for async_scheduling={str(fitted).lower()}"
        assert [line.split(",")[0] for line in cost.notices] == [told] * (fitted != ahead)


# -- the order of events ---------------------------------------------------------------------------

FOLLOWS: dict[type, tuple[type, ...]] = {
    Arrived: (Admitted, Left),
    Admitted: (Preempted, Left),
    Preempted: (Admitted, Left),
    Left: (),
}
"""What may come next of the same request."""


def observed(case: Simulation) -> list[Event]:
    server = replace(case.servers[0], policy="witness", victim=None, displace=None)
    try:
        one = server.build(case.seed, case.ahead)
        simulate(one, Load(case), Affine(block=3e-4), Recorder(), way=case.way)
    except PagedsimError:
        assume(False)
    assert isinstance(one.policy, Witness)
    return one.policy.events


@given(case=simulations(fleets=False))
def test_events_come_in_the_promised_order(case: Simulation) -> None:
    events = observed(case)
    for arrivals in (False, True):
        times = [event.now for event in events if isinstance(event, Arrived) is arrivals]
        assert times == sorted(times)
    lives: dict[object, list[type]] = defaultdict(list)
    for event in events:
        lives[event.request.id].append(type(event))
    assert lives.keys() == set(range(len(case.jobs)))
    for life in lives.values():
        assert life[0] is Arrived and life[-1] is Left
        assert all(later in FOLLOWS[earlier] for earlier, later in pairwise(life)), life


@BOTH
def test_an_arrival_during_a_step_follows_the_departures_at_its_end(ahead: bool) -> None:
    policy = Witness()
    run(scheduler(ahead, policy=policy), Jobs([(0.0, 4, 2), (1.5, 4, 1)]))
    seen = [(type(event).__name__, event.request.id, event.now) for event in policy.events]
    assert seen[:5] == [
        ("Arrived", 0, 0.0),
        ("Admitted", 0, 0.0),
        ("Left", 0, 2.0),
        ("Arrived", 1, 1.5),
        ("Admitted", 1, 2.0),
    ]


# -- a simulated beam search: the law of surviving beams, and its effects on memory and time -------


def search(name: int | str, width: int) -> Request:
    return Request(name, 8, SamplingParams(n=width, beam_search=True))


@pytest.mark.parametrize("width", [2, 6])
def test_beams_die_out_at_the_expected_rate(width: int) -> None:
    """A beam has no child if its own place is refilled and no place draws it."""
    turnover, steps = 0.6, 10_000
    beams, request = Beams(turnover), search("a", width)
    dead = 0
    for _ in range(steps):
        dead += width - len(set(beams.chosen(request) or range(width)))
    drawn = turnover / width  # the chance that a place draws this beam
    expected = (turnover - drawn) * (1 - drawn) ** (width - 1)
    assert dead / steps / width == pytest.approx(expected, rel=0.05)


def test_without_turnover_every_beam_continues() -> None:
    assert Beams(0.0).chosen(search("a", 4)) is None
    for turnover in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="beam_turnover"):
            Beams(turnover)


# -- requests that are sent once others are answered -----------------------------------------------


FIXED = {"shape": "fixed", "prompt": 8, "output": 4}


def served(made: Workload, **settings: Any) -> pa.Table:
    memory = make_memory("prefix", blocks=64, block_size=4)
    requests, _ = run(make_scheduler(memory=memory, **settings), made)  # type: ignore[arg-type]
    return requests


def test_two_requests_that_continue_one_answer_both_hit_it() -> None:
    kind = {"shape": "tree", "breadth": 2, "depth": 2, "keep": 2, "lengths": FIXED}
    made = agents(programs={"one": kind}, sessions=1, arrivals="burst")
    requests = served(made, batching="one_by_one")
    assert requests["cached_tokens"].to_pylist() == [0, 4, 8, 16, 8, 16, 20]


def test_a_request_waits_for_all_its_predecessors() -> None:
    kind = {"shape": "map_reduce", "width": 3, "tool": 2, "lengths": FIXED}
    made = agents(programs={"one": kind}, sessions=1, arrivals="burst")
    requests = served(made, max_seqs=2)
    finished = requests["finished"].to_pylist()
    assert len(set(finished[:3])) > 1
    assert requests["arrival"].to_pylist() == [0.0, 0.0, 0.0, max(finished[:3]) + 2]


def test_each_user_has_one_session_at_a_time() -> None:
    made = chat_sessions(
        sessions=3, arrivals="closed", users=2, think_time=100, turns=2, lengths=FIXED
    )
    requests = served(made)
    arrival, finished = requests["arrival"].to_pylist(), requests["finished"].to_pylist()
    assert arrival[0] == arrival[2] == 0.0
    assert arrival[4] == min(finished[1], finished[3]) + 100
    assert arrival[5] == finished[4]
