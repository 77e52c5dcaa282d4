"""A whole run of a fleet: a workload through a router and many schedulers, in simulated time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from math import inf

from pagedsim.core import PagedsimError
from pagedsim.core.errors import require_number
from pagedsim.core.source import Source
from pagedsim.fleet.account import Track
from pagedsim.fleet.autoscale import Autoscale, scale
from pagedsim.fleet.chore import SHORTEST
from pagedsim.fleet.failures import Failures, fail
from pagedsim.fleet.front import MAX_RETRIES, Front
from pagedsim.fleet.handover import RESEND, Handover
from pagedsim.fleet.link import Fabric, Network
from pagedsim.fleet.member import Member, Unit
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import feed
from pagedsim.sim.server import Recorder
from policies.routing.router import Router


def simulate_fleet(
    units: Sequence[Unit],
    source: Source,
    router: Router,
    recorders: Sequence[Track],
    refused: Recorder,
    *,
    staleness: float = 0.0,
    network: Network | None = None,
    failures: Failures | None = None,
    autoscale: Autoscale | None = None,
    on_receiver_death: str = RESEND,
    max_retries: int = MAX_RETRIES,
    way: float = 0.0,
    seed: int = 0,
    together: bool = False,
    begins: Callable[[Front], None] = lambda front: None,
) -> Front:
    """Run until everything is served; returns what was seen of that from the door.

    `recorders` has one for each replica; `refused` records the requests that reach none. Each
    request takes `way` seconds to come to the router. `network` joins replicas that send each other
    keys and values, and `on_receiver_death` is one of `AFTER_DEATH`; a request
    under which replicas died more than `max_retries` times is rejected. What fails by chance is
    drawn by the `seed`. Replicas that do not concern each other live in times of their own, unless
    they are to be `together`; what comes out is the same. `begins` receives the front before any
    request arrives.
    """
    environment = Environment()
    together = together or failures is not None or autoscale is not None
    apart = _apart(units, source, router) and not together
    members = [
        Member(index, unit, environment, recorder, apart)
        for index, (unit, recorder) in enumerate(zip(units, recorders, strict=True))
    ]
    front = Front(environment, members, router, refused, staleness, max_retries)
    _join(front, network, seed, on_receiver_death == RESEND)
    if failures is not None:
        fail(front, failures, seed)
    if autoscale is not None:
        scale(front, autoscale)
    begins(front)
    feed(environment, front, source, way)
    collecting = gc.isenabled()
    gc.disable()  # as in `simulate`
    try:
        if apart:
            environment.run()
            for member in members:
                member.finish()
        else:
            _run_together(front)
    finally:
        if collecting:
            gc.enable()
    return front


def _run_together(front: Front) -> None:
    environment = front.environment
    over = environment.all_of([member.server.process for member in front.members])
    try:
        environment.run(over)
    except (RuntimeError, AttributeError) as error:  # SimPy cannot name a compiled process
        if over.triggered or environment.peek() < inf or error.__cause__ is not None:
            raise  # it is somebody else's
        raise PagedsimError(front.stuck()) from None


def _apart(units: Sequence[Unit], source: Source, router: Router) -> bool:
    """Whether nobody outside hears of what a replica does, until somebody looks."""
    waits = source.mode == "closed" or source.turns is not None
    hears = router.holds or router.migrates_every is not None
    hears = hears or type(router).observe is not Router.observe
    tiers = [tier for unit in units for tier in unit.scheduler.memory.tiers]
    shares = len(set(tiers)) < len(tiers)  # what one writes there, others find
    return not (waits or hears or shares) and all(unit.role == "both" for unit in units)


def _join(front: Front, network: Network | None, seed: int, resends: bool) -> None:
    """Have requests go on at other replicas, where prompts and decodes are apart or some move."""
    apart = [member for member in front.members if member.role == "prefill"]
    every = front.router.migrates_every
    if every is not None:
        name = type(front.router).__name__
        require_number(f"{name}.migrates_every", every, SHORTEST)
    if not apart and every is None:
        return
    assert network is not None, "links must be given"
    fabric = Fabric(front.environment, network, seed)
    front.handover = Handover(front, fabric, resends)
    for member in apart:
        member.hand_over(front.handover.takes(member))
    if every is not None:
        front.environment.process(front.moves(every))
