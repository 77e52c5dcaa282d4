"""A server whose scheduler plans a step while the one before runs: times by hand."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Event, Left, PagedsimError, Policy, Request, SamplingParams, Scheduler
from pagedsim.core.batch_state import ServerState
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost import Fitted, Roofline
from pagedsim.sim.simulate import simulate
from tests.sim.harness import Affine, Constant, Jobs, content, run
from tests.sim.shapes import replica

ROWS = [(0.05 * i, 3 + 7 * i % 23, 1 + 5 * i % 17) for i in range(40)]


def scheduler(ahead: bool = True, blocks: int = 64, **settings: Any) -> Scheduler:
    memory = make_memory(blocks=blocks, block_size=4, cpu_blocks=settings.pop("cpu_blocks", 0))
    return make_scheduler(memory=memory, async_scheduling=ahead, **settings)


def test_times_of_two_requests_by_hand() -> None:
    requests, steps = run(scheduler(), Jobs([(0.0, 4, 3), (0.5, 4, 2)]))
    # The second comes while step 0 runs, when step 1 is planned already, so it is in step 2. Both
    # end with step 3, which is known when step 4 is on its way.
    assert steps["start"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert steps["prefill_tokens"].to_pylist() == [4, 0, 4, 0, 0]
    assert steps["decode_seqs"].to_pylist() == [0, 1, 0, 2, 2]
    assert requests["first_token"].to_pylist() == [1.0, 3.0]
    assert requests["finished"].to_pylist() == [4.0, 4.0]
    assert requests["output_tokens"].to_pylist() == [3, 2]


def test_a_predictable_end_costs_no_extra_step() -> None:
    class Limited(Jobs):
        def requests(self) -> Any:
            params = SamplingParams(max_tokens=2)
            return iter([(Request(0, 4, params, arrival=0.0), 2)])

    _, steps = run(scheduler(), Limited([]))
    assert steps["start"].to_pylist() == [0.0, 1.0]


def test_the_last_token_of_the_longest_request_is_known_to_be() -> None:
    requests, steps = run(scheduler(max_model_len=6), Jobs([(0.0, 4, 9)]))
    assert requests["output_tokens"].to_pylist() == [2]
    assert steps["start"].to_pylist() == [0.0, 1.0]


def test_an_idle_server_starts_at_the_next_arrival() -> None:
    requests, steps = run(scheduler(), Jobs([(0.1, 4, 2), (10.3, 4, 2)]))
    assert requests["scheduled"].to_pylist() == [0.1, 10.3]
    assert requests["finished"].to_pylist() == pytest.approx([2.1, 12.3])
    assert steps.num_rows == 6


def test_users_in_a_closed_loop_ask_again_after_thinking() -> None:
    jobs = Jobs([(0.0, 4, 2)] * 3, mode="closed", users=1, think_time=5.0)
    requests, _ = run(scheduler(), jobs)
    assert requests["arrival"].to_pylist() == [0.0, 7.0, 14.0]


def test_a_request_that_can_never_be_served_is_rejected() -> None:
    requests, _ = run(scheduler(max_model_len=16), Jobs([(0.0, 40, 2), (0.0, 4, 2)]))
    assert requests["state"].to_pylist() == ["rejected", "finished"]


def test_a_policy_that_admits_no_request() -> None:
    class Refuses(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return False

    with pytest.raises(PagedsimError, match="nothing can run at 0 s: 1 requests wait"):
        run(scheduler(policy=Refuses()), Jobs([(0.0, 4, 2)]))


@pytest.mark.parametrize(
    ("batching", "preemption", "memory"),
    list(product(("prefill_first", "unified", "static"), ("recompute", "swap"), (20, 64))),
)
def test_every_request_gets_all_tokens(batching: str, preemption: str, memory: int) -> None:
    def served(ahead: bool) -> Any:
        settings = {"batching": batching, "preemption": preemption, "cpu_blocks": 20}
        server = scheduler(ahead, memory, max_seqs=8, max_model_len=64, **settings)
        return run(server, Jobs(ROWS), Affine())

    (requests, steps), (again, _), (wanted, _) = served(True), served(True), served(False)
    assert content(requests) == content(again)
    for name in ("state", "output_tokens", "prompt_tokens"):
        assert requests[name].to_pylist() == wanted[name].to_pylist()
    starts, ends = steps["start"].to_pylist(), steps["end"].to_pylist()
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_a_request_that_depends_on_its_last_tokens_is_served_alike() -> None:
    class Groups(Jobs):
        def requests(self) -> Any:
            for request, output in super().requests():
                params = SamplingParams(n=2, max_tokens=9)
                yield (
                    Request(request.id, request.prompt_len, params, arrival=request.arrival),
                    output,
                )

    cost: Any = Roofline(replica("llama-2-7b", "a100-80gb"))
    tables = [run(scheduler(ahead), Groups(ROWS), cost) for ahead in (True, False)]
    assert list(map(content, tables[0])) == list(map(content, tables[1]))


def test_an_arrival_that_depends_on_its_last_tokens_ends_repeated_steps() -> None:
    class Late(Jobs):
        def requests(self) -> Any:
            for request, output in super().requests():
                params = SamplingParams(n=2, max_tokens=9) if request.id == 3 else request.params
                yield (
                    Request(request.id, request.prompt_len, params, arrival=request.arrival),
                    output,
                )

    rows = [(0.0, 4, 9), (0.0, 4, 20), (0.0, 4, 5), (5.5, 4, 9)]
    tables = [run(scheduler(max_seqs=2), Late(rows), fast_forward=fast) for fast in (True, False)]
    assert list(map(content, tables[0])) == list(map(content, tables[1]))


def test_a_policy_sees_the_time_of_the_repeated_step() -> None:
    class Opening(Policy):
        seen: ClassVar[list[float]] = []

        def admit(self, request: Request, state: ServerState) -> bool:
            self.seen.append(state.now)
            return not state.batch_size or request.id in (0, 1) or state.now >= 6.0

    rows = [(0.0, 4, 20), (0.0, 4, 20), (0.0, 4, 3), (3.5, 4, 3), (5.3, 4, 3)]
    tables = [
        run(scheduler(policy=Opening(), batching="unified"), Jobs(rows), fast_forward=fast)
        for fast in (True, False)
    ]
    assert list(map(content, tables[0])) == list(map(content, tables[1]))
    assert all(now.is_integer() for now in Opening.seen) and 6.0 in Opening.seen


def test_swaps_that_go_out_beside_the_computation() -> None:
    rows = [(0.0, 12, 24)] * 4
    settings: dict[str, Any] = {"blocks": 20, "cpu_blocks": 20, "preemption": "swap"}
    times = [
        run(scheduler(**settings), Jobs(rows), Constant(1.0, 0.25), overlap=overlap)[1]["end"][-1]
        for overlap in (False, True)
    ]
    assert times[1].as_py() < times[0].as_py()


def test_the_host_counts_only_where_it_takes_longer() -> None:
    where = replica("llama-2-7b", "a100-80gb")
    quick = Roofline(where, host_step_ms=1.0, host_request_us=10.0)
    slow = Roofline(where, host_step_ms=900.0, host_request_us=10.0)
    device = Roofline(where, host_step_ms=0.0, host_request_us=0.0)
    server = scheduler()
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


class Order(Policy):
    """Records which requests are ranked, as each is when it is added, and which leave."""

    rank_changes = "never"

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def rank(self, request: Request, state: ServerState) -> float:
        self.seen.append(("ranked", request.id))
        return 0.0

    def observe(self, event: Event) -> None:
        if isinstance(event, Left):
            self.seen.append(("left", event.request.id))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fast_forward", [False, True])
def test_an_arrival_in_a_step_is_added_before_the_departures_at_its_end(
    ahead: bool, fast_forward: bool
) -> None:
    for at in (0.5 + step for step in range(3, 9)):  # the first request ends at 6
        policy = Order()
        jobs = Jobs([(0.0, 4, 6), (0.0, 4, 20), (at, 4, 2)])
        run(scheduler(ahead, policy=policy), jobs, fast_forward=fast_forward)
        sooner = policy.seen.index(("left", 0)) < policy.seen.index(("ranked", 2))
        assert sooner == (at > 6)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_arrival_in_a_step_sees_the_number_of_the_same_next_step_where_steps_are_repeated(
    ahead: bool,
) -> None:
    class Numbered(Policy):
        def __init__(self) -> None:
            self.came: dict[object, int] = {}

        def rank(self, request: Request, state: ServerState) -> float:
            self.came.setdefault(request.id, state.step)
            return 0.0

    for at in (0.5 + step for step in range(3, 9)):  # the first request ends at 6
        repeated, planned = Numbered(), Numbered()
        for policy in (repeated, planned):
            jobs = Jobs([(0.0, 4, 6), (0.0, 4, 20), (at, 4, 2)])
            run(scheduler(ahead, policy=policy), jobs, fast_forward=policy is repeated)
        assert repeated.came == planned.came == {0: 0, 1: 0, 2: int(at) + 1 + ahead}
