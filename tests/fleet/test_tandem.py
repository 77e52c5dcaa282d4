"""Queueing theory of prefill and decode apart: a network of two stations in Jackson's product form.

A request is one step at a replica that prefills and one at a replica that decodes, each of a drawn
exponential length, and the transfer between takes no time. Departures of M/M/1 are Poisson (Burke
1956), so that the decode station is M/M/c with a mean of its own, and at any time the two
stations are independent (Jackson 1957).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import factorial

import numpy as np
import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler, StepPlan
from pagedsim.fleet.link import Network
from policies.routing.router import Router
from policies.routing.simple import Central, RoundRobin
from tests.fleet.fleets import served
from tests.fleet.theory import SEEDS, Floats, agrees
from tests.sim.harness import Constant, Jobs

SLOW = pytest.mark.slow


@dataclass
class TwoStages(Constant):
    """A step takes what was drawn for the one request in it, by its stage."""

    by_totals = False  # the time of a decode depends on which request it is

    prefill: Floats = field(default_factory=lambda: np.empty(0))
    decode: Floats = field(default_factory=lambda: np.empty(0))

    def step_seconds(self, plan: StepPlan) -> float:
        if plan.chunks:
            return float(self.prefill[int(plan.chunks[0].request.id)])
        return float(self.decode[int(plan.decodes[0].id)])


def station() -> Scheduler:
    """One request at a time, with memory for all that wait."""
    return make_scheduler(memory=make_memory(blocks=4096, block_size=16), max_seqs=1)


@dataclass(frozen=True)
class Tandem:
    """Requests arrive at rate 1."""

    prefill: float
    """Mean service; with one server also the part of time in which it is busy."""
    decode: float
    servers: int = 1
    """Replicas that decode."""

    def decode_idle(self) -> float:
        """Probability that the decode station is empty."""
        offered, full = self.decode, self.decode**self.servers / factorial(self.servers)
        below = sum(offered**n / factorial(n) for n in range(self.servers))
        return 1 / (below + full / (1 - offered / self.servers))

    def decode_sojourn(self) -> float:
        """Mean time at the decode station: M/M/c (Erlang 1917)."""
        load = self.decode / self.servers
        full = self.decode**self.servers / factorial(self.servers) / (1 - load)
        waits = full * self.decode_idle()
        return self.decode + waits * load / (1 - load)

    def prefill_sojourn(self) -> float:
        return self.prefill / (1 - self.prefill)


@dataclass(frozen=True)
class Passage:
    """When requests arrived, left the prefill station, and left the decode station."""

    arrived: Floats
    between: Floats
    left: Floats

    def idle(self) -> float:
        """Part of the time without a request at either station, first fifth of arrivals aside."""
        first = len(self.arrived) // 5
        cleared = np.maximum.accumulate(self.left)
        gaps = np.maximum(self.arrived[first + 1 :] - cleared[first:-1], 0)
        return float(gaps.sum() / (self.arrived[-1] - self.arrived[first]))


def steady(times: Floats) -> float:
    """The mean without the first fifth, which found empty stations."""
    return float(times[len(times) // 5 :].mean())


def passage(tandem: Tandem, router: Router, seed: int, count: int) -> Passage:
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1.0, count).cumsum()
    cost = TwoStages(
        prefill=random.exponential(tandem.prefill, count),
        decode=random.exponential(tandem.decode, count),
    )
    requests, _ = served(
        [station() for _ in range(1 + tandem.servers)],
        Jobs([(float(at), 1, 2) for at in arrivals]),
        router,
        cost,
        roles=("prefill", *["decode"] * tandem.servers),
        token_bytes=0.0,
        network=Network(bandwidth_gb_s=1.0),
    )
    assert requests["state"].unique().to_pylist() == ["finished"]
    columns = (requests[name].to_numpy() for name in ("arrival", "first_token", "finished"))
    return Passage(*columns)


@pytest.mark.parametrize(
    ("tandem", "router", "count", "width"),
    [
        pytest.param(Tandem(0.6, 0.5), RoundRobin, 1000, 0.3, id="one decodes"),
        pytest.param(Tandem(0.5, 1.8, 3), Central, 1500, 0.3, id="three decode"),
        pytest.param(
            Tandem(0.5, 0.7), RoundRobin, 8_000, 0.15, id="one decodes for longer", marks=SLOW
        ),
        pytest.param(
            Tandem(0.6, 2.1, 3), Central, 8_000, 0.15, id="three decode for longer", marks=SLOW
        ),
    ],
)
def test_prefill_and_decode_are_stations_in_product_form(
    tandem: Tandem, router: type[Router], count: int, width: float
) -> None:
    found = [passage(tandem, router(), seed, count) for seed in SEEDS]
    prefill = (steady(one.between - one.arrived) for one in found)
    decode = (steady(one.left - one.between) for one in found)
    agrees(prefill, tandem.prefill_sojourn(), width)
    agrees(decode, tandem.decode_sojourn(), width)
    both_idle = (1 - tandem.prefill) * tandem.decode_idle()
    agrees((one.idle() for one in found), both_idle, width)
