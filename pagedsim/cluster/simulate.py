"""Simulate a fleet: a workload, a router and many schedulers, in simulated time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from math import inf

from pagedsim.cluster.autoscale import scale
from pagedsim.cluster.dispatcher import MIN_INTERVAL_S, Dispatcher
from pagedsim.cluster.failures import fail
from pagedsim.cluster.kv_migration import RESEND, KVMigration
from pagedsim.cluster.link import Fabric
from pagedsim.cluster.prefix_fetch import ALWAYS, NEVER, PrefixFetches
from pagedsim.cluster.replica import FleetRecorder, ReplicaHandle, ReplicaRecorder, Unit
from pagedsim.cluster.spec import FleetSpec
from pagedsim.core import PagedsimError
from pagedsim.core.errors import require_number
from pagedsim.core.source import Source
from pagedsim.policies.routing.router import Router
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import feed


def simulate_fleet(
    units: Sequence[Unit],
    source: Source,
    router: Router,
    recorders: Sequence[ReplicaRecorder],
    refused: FleetRecorder,
    spec: FleetSpec,
    *,
    way: float = 0.0,
    seed: int = 0,
    together: bool = False,
    begins: Callable[[Dispatcher], None] = lambda dispatcher: None,
) -> Dispatcher:
    """Run until all requests are served; returns the dispatcher.

    `recorders` has one for each replica; `refused` records requests that reach none, and transfers
    between replicas. Each request takes `way` seconds to reach the router. `spec` says how the
    replicas are connected, fail and scale; `seed` is that of random failures. Independent replicas
    are simulated in environments of their own, unless `together` is set; the results are the same.
    `begins` receives the dispatcher before the first arrival.
    """
    environment, failures, autoscale = Environment(), spec.dying, spec.autoscale
    together = together or failures is not None or autoscale is not None
    together = together or spec.fetch != NEVER
    independent = _independent(units, source, router) and not together
    replicas = [
        ReplicaHandle(index, unit, environment, recorder, independent)
        for index, (unit, recorder) in enumerate(zip(units, recorders, strict=True))
    ]
    dispatcher = Dispatcher(
        environment, replicas, router, refused, spec.staleness, spec.max_retries
    )
    _join(dispatcher, spec, seed)
    if failures is not None:
        fail(dispatcher, failures, seed)
    if autoscale is not None:
        scale(dispatcher, autoscale)
    begins(dispatcher)
    feed(environment, dispatcher, source, way)
    collecting = gc.isenabled()
    gc.disable()  # as in `simulate`
    try:
        if independent:
            environment.run()
            for replica in replicas:
                replica.run_to_end()
        else:
            _run_together(dispatcher)
    finally:
        if collecting:
            gc.enable()
    return dispatcher


def _run_together(dispatcher: Dispatcher) -> None:
    environment = dispatcher.environment
    over = environment.all_of([replica.server.process for replica in dispatcher.replicas])
    try:
        environment.run(over)
    except (RuntimeError, AttributeError) as error:  # SimPy cannot name a compiled process
        if over.triggered or environment.peek() < inf or error.__cause__ is not None:
            raise  # not a deadlock
        raise PagedsimError(dispatcher.deadlock_message()) from None


def _independent(units: Sequence[Unit], source: Source, router: Router) -> bool:
    """Whether nothing outside a replica depends on its steps, except routers that read its
    state."""
    waits = source.mode == "closed" or source.turns is not None
    reacts = router.holds or router.migrates_every is not None
    reacts = reacts or type(router).observe is not Router.observe
    return not (waits or reacts) and all(unit.role == "both" for unit in units)


def _join(dispatcher: Dispatcher, spec: FleetSpec, seed: int) -> None:
    """Set up fetches of prefixes, and migration for prefill-decode disaggregation or a router that
    rebalances."""
    prefill = [replica for replica in dispatcher.replicas if replica.role == "prefill"]
    every = dispatcher.router.migrates_every
    if every is not None:
        name = type(dispatcher.router).__name__
        require_number(f"{name}.migrates_every", every, MIN_INTERVAL_S)
    migrates = bool(prefill) or every is not None
    if not migrates and spec.fetch == NEVER:
        return
    assert spec.link is not None, "links must be given"
    hardware = [replica.unit.hardware for replica in dispatcher.replicas]
    fabric = dispatcher.fabric = Fabric(dispatcher.environment, spec.link, seed, hardware)
    if spec.fetch != NEVER:
        dispatcher.fetches = PrefixFetches(dispatcher, fabric, always=spec.fetch == ALWAYS)
    if not migrates:
        return
    dispatcher.migration = KVMigration(dispatcher, fabric, spec.on_receiver_death == RESEND)
    for replica in prefill:
        replica.hand_off(dispatcher.migration.on_prefill_step(replica))
    if every is not None:
        dispatcher.environment.process(dispatcher.rebalance(every))
