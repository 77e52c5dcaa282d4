"""The order in which a policy observes events, whatever the server and its load."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import (
    Admitted,
    Arrived,
    ConfigError,
    Event,
    Left,
    PagedsimError,
    Preempted,
    Scheduler,
)
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.simulate import simulate
from tests.core.odd_policies import Witness
from tests.fuzz import Load, Simulation, simulations
from tests.sim.harness import Affine, Jobs, run

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
        scheduler = server.build(case.seed, case.ahead)
    except ConfigError:
        assume(False)
    costs = Affine(block=3e-4)
    try:
        simulate(scheduler, Load(case), costs, Recorder(), way=case.way)
    except PagedsimError:
        assume(False)
    policy = scheduler.policy
    assert isinstance(policy, Witness)
    return policy.events


@settings(max_examples=settings().max_examples * 2)
@given(case=simulations(fleets=False))
def test_events_come_in_the_promised_order(case: Simulation) -> None:
    events = observed(case)
    others = [event.now for event in events if not isinstance(event, Arrived)]
    assert others == sorted(others)
    arrivals = [event.now for event in events if isinstance(event, Arrived)]
    assert arrivals == sorted(arrivals)
    lives: dict[object, list[type]] = defaultdict(list)
    for event in events:
        lives[event.request.id].append(type(event))
    assert lives.keys() == set(range(len(case.jobs)))
    for life in lives.values():
        assert life[0] is Arrived and life[-1] is Left
        assert all(later in FOLLOWS[earlier] for earlier, later in pairwise(life)), life
    for event, later in pairwise(events):
        if isinstance(event, Left) and isinstance(later, Admitted):
            assert later.now >= event.now


def scheduler(ahead: bool) -> Scheduler:
    memory = make_memory(blocks=64, block_size=4)
    return make_scheduler(memory=memory, policy=Witness(), async_scheduling=ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_arrival_during_a_step_follows_the_departures_at_its_end(ahead: bool) -> None:
    """Steps of a second."""
    to = scheduler(ahead)
    run(to, Jobs([(0.0, 4, 2), (1.5, 4, 1)]))
    policy = to.policy
    assert isinstance(policy, Witness)
    seen = [(type(event).__name__, event.request.id, event.now) for event in policy.events]
    assert seen[:5] == [
        ("Arrived", 0, 0.0),
        ("Admitted", 0, 0.0),
        ("Left", 0, 2.0),
        ("Arrived", 1, 1.5),
        ("Admitted", 1, 2.0),
    ]
