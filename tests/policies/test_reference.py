"""Policies agree with slow references of their rules, decision by decision, and both with traces.

The loads are those of `tests/fuzz.py`, on servers with little memory. What is compared is the
order of admissions and preemptions. Where a rule here departs from its paper on purpose, the
docstring of the reference says so. A trace has the number of the request that each step of a second
computes. Each is short enough to be followed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_router, make_scheduler
from pagedsim.cluster.link import Network
from pagedsim.core import (
    Admitted,
    ConfigError,
    Event,
    Policy,
    PolicyWrapper,
    Preempted,
    Request,
    Scheduler,
)
from pagedsim.metrics.recorder import Recorder
from pagedsim.policies.continuum import Continuum
from pagedsim.policies.fairness import DRR, VTC
from pagedsim.policies.ltr import LTR
from pagedsim.policies.mlfq import MLFQ, PLAS, SkipJoin
from pagedsim.policies.ordering import SRPT
from pagedsim.policies.past_future import PastFuture
from pagedsim.policies.prefix_order import LongestPrefix
from pagedsim.policies.program_aware import ProgramAware
from pagedsim.policies.session_affinity import SessionAffinity
from pagedsim.sim.simulate import simulate
from tests.cluster.fleets import whole
from tests.core.cases import Job as Coming
from tests.core.cases import Server, jobs, servers
from tests.fuzz import Fleet, Load, Simulation
from tests.policies.reference import clients, memory, queues
from tests.policies.reference.log import AskedEachTime
from tests.policies.served import Job, served
from tests.sim.harness import Affine

Make = Callable[..., Policy]


class Recording(PolicyWrapper):
    """Decides as the policy inside, and records admissions and preemptions."""

    def __init__(self, of: Policy) -> None:
        super().__init__(of)
        self.decisions: list[tuple[str, object]] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, (Admitted, Preempted)):
            self.decisions.append((type(event).__name__, event.request.id))
        super().observe(event)


@dataclass(frozen=True)
class Pair:
    """A policy and its reference."""

    ours: Make
    reference: Make
    settings: st.SearchStrategy[dict[str, Any]]
    by_client: bool = False
    """Whether clients are ranked before every admission; otherwise requests, once a step."""
    cached: bool = False
    """Whether it needs a prefix cache."""


WEIGHTS = st.sampled_from([None, {"a": 2.0}, {"b": 4.0, "c": 0.5}])
LEVELS: dict[str, st.SearchStrategy[Any]] = {
    "quantum": st.sampled_from([0.011, 0.031, 0.12]),
    "levels": st.sampled_from([2, 4, 16]),
    "starve": st.sampled_from([0.11, 0.5]),
    "displace": st.booleans(),
}
PAIRS = {
    "vtc": Pair(
        VTC,
        clients.VTC,
        st.fixed_dictionaries({"output": st.sampled_from([1.0, 2.0]), "weights": WEIGHTS}),
        by_client=True,
    ),
    "drr": Pair(
        DRR,
        clients.DRR,
        st.fixed_dictionaries({"quantum": st.sampled_from([2.0, 8.0]), "weights": WEIGHTS}),
        by_client=True,
    ),
    "mlfq": Pair(MLFQ, queues.MLFQ, st.fixed_dictionaries(LEVELS)),
    "skip_join": Pair(
        SkipJoin,
        queues.SkipJoin,
        st.fixed_dictionaries({**LEVELS, "prefill_rate": st.sampled_from([100.0, 500.0])}),
    ),
    "plas": Pair(
        PLAS, queues.PLAS, st.fixed_dictionaries({**LEVELS, "critical_path": st.booleans()})
    ),
    "ltr": Pair(
        LTR,
        queues.LTR,
        st.fixed_dictionaries(
            {
                "starve": st.sampled_from([1, 4, 9]),
                "period": st.sampled_from([1, 3]),
                "displace": st.booleans(),
            }
        ),
    ),
    "past_future": Pair(
        PastFuture,
        memory.PastFuture,
        st.fixed_dictionaries(
            {
                "of": st.sampled_from([None, SRPT(False)]),
                "window": st.sampled_from([2, 200]),
                "reserve": st.sampled_from([0.0, 0.05, 0.3]),
            }
        ),
    ),
    "continuum": Pair(
        Continuum,
        queues.Continuum,
        st.fixed_dictionaries(
            {"ttl": st.sampled_from([0.0, 0.02, 0.1]), "window": st.sampled_from([1, 3])}
        ),
        cached=True,
    ),
    "session_affinity": Pair(
        SessionAffinity,
        queues.SessionAffinity,
        st.fixed_dictionaries(
            {
                "window": st.sampled_from([2, 4, 32]),
                "min_blocks": st.sampled_from([1, 2]),
                "max_wait": st.sampled_from([0.02, 0.2, 9.0]),
                "ttl": st.sampled_from([0.0, 0.05, 60.0]),
            }
        ),
        cached=True,
    ),
    "program_aware": Pair(
        ProgramAware,
        queues.ProgramAware,
        st.fixed_dictionaries(
            {
                "service": st.sampled_from([0.0, 0.7310585]),
                "wait": st.sampled_from([0.0, 0.2689414]),
                "half_life": st.sampled_from([0.0, 0.05, 60.0]),
            }
        ),
    ),
    "lpm": Pair(
        LongestPrefix,
        memory.LongestPrefix,
        st.fixed_dictionaries({"most": st.sampled_from([0, 1, 4, 128])}),
        cached=True,
    ),
}


@st.composite
def loads(draw: st.DrawFn, fleets: bool, cached: bool, most: int) -> Simulation:
    """Requests on servers that they do not fit into all together.

    In a fleet, ranks are asked between two steps, too, when memory is reserved. Those that change
    with the time are as of the last step then, which a reference does not know of.
    """
    fleet = None
    if fleets and draw(st.sampled_from([False, False, True])):
        fleet = Fleet("round_robin", draw(st.sampled_from([("prefill", "decode"), ("both",) * 2])))
    made = []
    for _ in fleet.roles if fleet else (0,):
        batching = draw(st.sampled_from(["prefill_first", "unified"]))
        shares = cached or draw(st.booleans())
        server = draw(servers(batching, "prefix" if shares else "paged"))
        if shares:  # prompts of which a beginning is shared are long
            server = replace(server, blocks=2 + 110 // server.block_size, max_model_len=None)
            chunked = [16, 40] if batching == "unified" else []
            tokens = draw(st.sampled_from([120, 160, *chunked]))
            server = replace(server, max_batched_tokens=tokens)
        made.append(server)
    longest = min(one.max_model_len or one.blocks * one.block_size for one in made)
    widths = (1,) if fleet else draw(st.sampled_from([(1,), (1,), (1, 1, 2, 3)]))
    each = jobs(min(1 + longest // 2, 60), min(16, 2 + longest // 2), widths)
    least = draw(st.sampled_from([1, 7]))  # of few requests, or of half, no length is predicted
    coming = draw(st.lists(each, min_size=2, max_size=most))
    return Simulation(
        servers=tuple(made),
        jobs=tuple(
            replace(job, predicted=job.predicted * (job.predicted >= least)) for job in coming
        ),
        ahead=draw(st.booleans()),
        sessions=fleet is None and draw(st.booleans()),
        overlap=draw(st.booleans()),
        fleet=fleet,
    )


class Named(Load):
    """Four clients, and predictions that are missing for some."""

    def requests(self) -> Any:
        for (request, output), job in zip(super().requests(), self._jobs, strict=True):
            request._client = "abcd"[job.priority]
            if not job.predicted:
                request._predicted_len = None
            yield request, output


def scheduler(server: Server, policy: Policy, ahead: bool, each_time: bool) -> Scheduler:
    made = Scheduler(
        memory=server._memory(),
        batching=server._batching(),
        policy=policy,
        preemption=server._preemption(),
        max_seqs=server.max_seqs,
        max_batched_tokens=server.max_batched_tokens,
        max_model_len=server.max_model_len,
        async_scheduling=ahead,
    )
    if each_time:
        made.waiting = made.queues.waiting = AskedEachTime(made.queues.order)
    return made


def decisions(
    case: Simulation, make: Callable[[], Policy], *, slow: bool, by_client: bool
) -> list[list[tuple[str, object]]]:
    """Admissions and preemptions of each server, in order."""
    watched = [Recording(make()) for _ in case.servers]
    try:
        made = [
            scheduler(server, policy, case.ahead, slow and by_client)
            for server, policy in zip(case.servers, watched, strict=True)
        ]
    except ConfigError:
        reject()
    how: dict[str, Any] = {"overlap": case.overlap, "fast_forward": not slow}
    if case.fleet is None:
        simulate(made[0], Named(case), Affine(block=3e-4), Recorder(), **how)
    else:
        whole(
            made,
            Named(case),
            make_router(case.fleet.router),
            Affine(block=3e-4),
            case.fleet.roles,
            token_bytes=1.0,
            server=how,
            network=Network(4e-8),
        )
    return [one.decisions for one in watched]


def agree(name: str, data: st.DataObject, most: int) -> None:
    pair = PAIRS[name]
    case = data.draw(loads(pair.by_client, pair.cached, most))
    known = data.draw(pair.settings)
    ours = decisions(case, lambda: pair.ours(**known), slow=False, by_client=pair.by_client)
    other = decisions(case, lambda: pair.reference(**known), slow=True, by_client=pair.by_client)
    assert ours == other


# A reference is slow, and to make a failing load smaller takes minutes; ask for it where one fails.
AS_DRAWN = settings(phases=[Phase.generate])


@pytest.mark.parametrize("name", PAIRS)
@AS_DRAWN
@given(data=st.data())
def test_a_policy_decides_as_its_reference(name: str, data: st.DataObject) -> None:
    agree(name, data, 8 if PAIRS[name].by_client else 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@settings(AS_DRAWN, max_examples=2 * settings().max_examples)
@given(data=st.data())
def test_a_policy_decides_as_its_reference_on_many_loads(name: str, data: st.DataObject) -> None:
    agree(name, data, 12 if PAIRS[name].by_client else 24)


# Traces


def trace(jobs: list[Job], policy: Policy) -> str:
    plans = served(jobs, policy, max_seqs=1).plans
    computed = ([*(c.request for c in plan.chunks), *plan.decodes] for plan in plans)
    return "".join(str(request.id) for step in computed for request in step)


def job(at: float, output: int, prompt: int = 1, **knows: Any) -> Job:
    return Job(at, prompt, output, knows)


def guess(at: float, output: int, predicted: float, prompt: int = 1) -> Job:
    return Job(at, prompt, output, {"predicted_len": predicted})


@dataclass
class Case:
    policy: str
    settings: dict[str, Any]
    jobs: list[Job]
    trace: str


QUANTA = {"quantum": 2.0, "levels": 3, "starve": 100.0}  # of 2 s, 4 s and without an end
CASES = {
    # After four idle steps a request is urgent for three tokens, and of two that are, the lower
    # prediction goes first: 1 overtakes 0 as soon as it is urgent, too.
    "starved": Case(
        "ltr",
        {"starve": 4, "period": 3},
        [guess(0, 9, 9), guess(0, 30, 1)],
        "111100011100011100011111111111111111111",
    ),
    "a level each time": Case(
        "mlfq", QUANTA, [job(0, 12), job(0.5, 3), job(4.5, 6)], "001102200012222000000"
    ),
    "back to the first level": Case(
        "mlfq",
        {"quantum": 2.0, "levels": 4, "starve": 6.0},
        [job(0, 12), *(job(2 + at, 1) for at in range(9))],
        "001234560078900000000",
    ),
    "joined where the prefill fits": Case(
        "skip_join",
        {**QUANTA, "prefill_rate": 1.0},
        [job(0, 3, prompt=4), job(0, 3, prompt=3), job(0, 3, prompt=2), job(0, 2, prompt=5)],
        "22000111233",
    ),
    "a session that was served": Case(
        "plas",
        {"quantum": 1.0, "levels": 4, "starve": 100.0},
        [
            job(0, 4, session="a"),
            job(4.5, 4, session="a"),
            job(4.5, 4, session="b"),
            job(6.5, 3, session="c"),
        ],
        "000022323311112",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_policy_and_reference_match_the_trace_by_hand(name: str) -> None:
    case = CASES[name]
    pair = PAIRS[case.policy]
    for make in (pair.ours, pair.reference):
        assert trace(case.jobs, make(**case.settings)) == case.trace


def test_a_call_that_comes_in_the_last_step_of_its_session_joins_the_level_of_all_of_it() -> None:
    """It is ranked when it is added, and again once the call before it has ended."""
    policy = PLAS(quantum=1.0, levels=4)
    memory = make_memory("paged", blocks=64, block_size=4)
    scheduler = make_scheduler(memory=memory, policy=policy, max_seqs=1)
    scheduler.add(Request("first", 4, session="a"), 0.0, 2)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    plan = scheduler.plan(1.0)
    scheduler.add(Request("second", 4, session="a"), 1.2, 2)
    scheduler.add(Request("other", 4, session="b"), 1.5, 2)
    scheduler.commit(plan, 2.0)
    assert [request.id for request, _ in scheduler.plan(2.0).hits] == ["other"]


def test_an_infeasible_request_is_rejected_when_its_changed_rank_makes_it_the_head() -> None:
    """All seats are taken then; whether a policy names changed ranks makes no difference."""
    rows = [(1, 2, 0, 1), (1, 1, 2, 3), (1, 1, 1, 2), (1, 2, 3, 1), (1, 1, 0, 0), (1, 2, 1, 1)]
    rows += [(1, 1, 1, 1), (1, 1, 3, 0), (3, 5, 0, 3), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 0, 2)]
    server = Server(
        "paged", 7, 2, "prefill_first", watermark=0.0, max_seqs=1, max_model_len=7, of="srpt"
    )
    coming = tuple(
        Coming(prompt, output, gap=gap, predicted=guess, limited=number not in (1, 3, 10))
        for number, (prompt, output, gap, guess) in enumerate(rows)
    )
    case = Simulation((server,), coming, ahead=True, overlap=True)
    known = {"starve": 9, "period": 3, "displace": True}
    pair = PAIRS["ltr"]
    ours = decisions(case, lambda: pair.ours(**known), slow=False, by_client=False)
    assert ours == decisions(case, lambda: pair.reference(**known), slow=True, by_client=False)
    assert ("Preempted", 9) in ours[0]
