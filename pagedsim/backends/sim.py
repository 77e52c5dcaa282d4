"""The backend `sim`: one replica in simulated time, or a fleet of them behind a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pagedsim.backends.base import Backend, BackendRun, StoppableRecorder
from pagedsim.cluster.dispatcher import Dispatcher
from pagedsim.cluster.prefix_fetch import NEVER
from pagedsim.cluster.replica import Unit
from pagedsim.cluster.simulate import simulate_fleet
from pagedsim.cluster.spec import FleetSpec, Pool
from pagedsim.core import (
    ConfigError,
    PagedsimError,
    Policy,
    RequestId,
    Scheduler,
    policy_validation,
)
from pagedsim.core.errors import require_flag, require_number, shown, unknown
from pagedsim.metrics.recorder import ReplicaRecorder
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.steps import Batches
from pagedsim.metrics.tables import NAN, Span
from pagedsim.policies.routing.router import Router
from pagedsim.server import ServerSpec
from pagedsim.sglang import StoredHiCache
from pagedsim.sim.beams import TURNOVER, Beams
from pagedsim.sim.capacity import sized
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.cost import CostModel, Decodes
from pagedsim.sim.cost.base import refuse_attributes
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.disk import Disk, with_tiers
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.storage import StorageJobs, storage_of
from pagedsim.sim.store import Store
from pagedsim.sim.transfers import Transfers
from pagedsim.spec.objects import draws
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload


class Simulation(BackendRun):
    """One replica in simulated time."""

    def __init__(
        self,
        replica: Replica,
        cost: CostModel,
        server: ServerSpec,
        stores: dict[str, Store],
        backend: Simulated,
        seed: int,
    ) -> None:
        """`server` has all its sizes; `stores` are shared with servers that are alike."""
        self.replica, self.cost, self.server, self.stores = replica, cost, server, stores
        self.fast_forward, self.power = backend.fast_forward, backend.power
        storage = storage_of(server, replica, stores)
        self.scheduler = with_tiers(server, replica, cost, stores).scheduler()
        self.decodes_only = backend.only == "decode"
        """Whether prompts are computed by another server."""
        self.beams = Beams(backend.beam_turnover, seed)
        copy_seconds = 0.0
        if backend.copy_efficiency is not None:  # a block is read, and written elsewhere on the GPU
            bandwidth = replica.hardware.bandwidth * backend.copy_efficiency
            copy_seconds = 2 * replica.block_bytes / bandwidth
        self.settings: Settings = {
            "overlap": backend.overlap,
            "copy_seconds": copy_seconds,
            "beams": self.beams,
        }
        """The arguments of a `Server` beside its scheduler and its costs."""
        if self.scheduler.offloads:
            copies = CopyTimes.of(replica, cost.bus_efficiency)
            connector = self.scheduler.queues.connector
            below = connector.lower.tiers if connector is not None else ()
            disks = [tier for tier in below if isinstance(tier, Disk)]
            self.settings["transfers"] = Transfers(copies, replica.model.layers, disks)
        if storage is not None and isinstance(memory := self.scheduler.memory, StoredHiCache):
            self.settings["storage"] = StorageJobs(storage, memory)

    @property
    def entries(self) -> Sequence[Scheduler]:
        return (self.scheduler,)

    def draws_for(self, workload: Workload) -> bool:
        return self.beams.draws_for(workload.asked) or super().draws_for(workload)

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        simulate(
            self.scheduler,
            workload,
            self.cost,
            recorder,
            fast_forward=self.fast_forward,
            way=self.cost.server_seconds,
            **self.settings,
        )

    def work(self, steps: Batches) -> Mapping[str, float | None]:
        total, hardware = total_work(self.replica, steps), self.replica.hardware
        known: dict[str, float | None] = {
            "flops": total.flop,
            "bytes": total.bytes,
            "peak_flops": hardware.flop_rate,
            "peak_bandwidth": hardware.bandwidth,
            "euros_per_hour": self.replica.euros_per_hour,
        }
        if self.decodes_only:  # steps have prompts that were computed elsewhere
            return known | {"flops": None, "bytes": None}
        if (power := self.power) is not None:
            known["joules"] = power.joules(self.replica, steps)
            known["idle_watts"] = power.idle_watts(self.replica)
        return known

    def notices(self) -> list[str]:
        notices = policy_validation.lines(self.cost, "notices", self.cost.notices)
        note = self.server.offloading.note(self.server.block_size, self.scheduler.max_model_len)
        connector = self.scheduler.queues.connector
        if connector is not None and connector.oversized:
            notices.append(
                f"{connector.oversized} offers of blocks to the host tier were larger than it is, "
                f"{connector.host_total} blocks, and nothing of them was stored; offload.gib= or "
                "offload.chunks= has its size"
            )
        return [*notices, note] if note else notices


@dataclass(frozen=True)
class Place:
    """One replica of a fleet."""

    name: str
    pool: str
    role: str
    simulation: Simulation

    def described(self) -> ReplicaFacts:
        """What a summary has to know of it."""
        sizes, replica = self.simulation.sizes(), self.simulation.replica
        gpus = f"{replica.tensor_parallel} × " if replica.tensor_parallel > 1 else ""
        return ReplicaFacts(
            self.name,
            total_blocks=sizes["total_blocks"],
            block_size=sizes["block_size"],
            max_seqs=sizes["max_seqs"],
            pool=self.pool,
            role=self.role,
            hardware=f"{gpus}{replica.hardware.name}",
        )


class FleetRun(BackendRun):
    """Many replicas in simulated time behind a router."""

    def __init__(self, spec: FleetSpec, places: Sequence[Place], router: Router, seed: int) -> None:
        self.spec = spec
        self.places = places
        self.router = router
        self.seed = seed
        self.scheduler = places[0].simulation.scheduler
        self._recorders: Sequence[ReplicaRecorder] = ()
        self._dispatcher: Dispatcher | None = None
        for place in places:
            if not place.simulation.cost.by_totals:
                raise ConfigError("cost: by_totals=False is one server's, not a fleet's")
        self._refuse_misfits()

    @property
    def policies(self) -> Sequence[Policy]:
        """One of each pool."""
        policies = {place.pool: place.simulation.scheduler.policy for place in self.places}
        return tuple(policies.values())

    @property
    def limits(self) -> Mapping[int, str]:
        pools: dict[int, list[str]] = {}
        for place in self.places:
            pools.setdefault(place.simulation.scheduler.max_model_len, []).append(place.pool)
        several = len(pools) > 1
        return {
            limit: f" (fleet.pools: {', '.join(dict.fromkeys(names))})" if several else ""
            for limit, names in pools.items()
        }

    @property
    def entries(self) -> Sequence[Scheduler]:
        receiving = (place for place in self.places if place.role != "decode")
        return tuple({place.pool: place.simulation.scheduler for place in receiving}.values())

    def draws_for(self, workload: Workload) -> bool:
        spec = self.spec
        shared = [self.router, *([spec.autoscale.make()] if spec.autoscale else [])]
        return (
            (spec.dying is not None and spec.dying.drawn)
            or (spec.link is not None and spec.link.drawn)
            or any(map(draws, shared))
            or any(place.simulation.draws_for(workload) for place in self.places)
        )

    def _refuse_misfits(self) -> None:
        """Raise ConfigError for a replica that cannot send, or receive, migrated requests."""
        moving, fetching = self.router.migrates_every is not None, self.spec.fetch != NEVER
        if moving or fetching or any(place.role == "prefill" for place in self.places):
            if self.spec.link is None:
                raise ConfigError(
                    "fleet.link=null: must be given where requests go from replica to replica"
                )
            hardware = [place.simulation.replica.hardware for place in self.places]
            self.spec.link.refuse_unknown(hardware)
        self._validate_likeness(moving or fetching)
        for place in self.places:
            migration = place.simulation.scheduler.migration
            if fetching and place.role != "decode" and (reason := migration.prefix_error):
                raise ConfigError(f"fleet.fetch={self.spec.fetch}: {place.name}: {reason}")
            gives = migration.detach_error if moving or place.role == "prefill" else None
            takes = migration.attach_error if moving or place.role == "decode" else None
            if reason := gives or takes:
                why = "its router moves requests" if moving else f"role={place.role}"
                raise ConfigError(f"fleet.pools.{place.pool or place.name}: {why}: {reason}")

    def _validate_likeness(self, moving: bool) -> None:
        """Raise ConfigError where a KV cache would go to a replica of another model or format, or
        replicas behind one router differ in `stack.server_ms`."""
        roles = {place.role for place in self.places}
        first = self.places[0].simulation
        for place in self.places[1:] if moving or roles != {"both"} else ():
            replica, first_replica = place.simulation.replica, first.replica
            for key, value, required in (
                ("model", replica.model.name, first_replica.model.name),
                ("kv_cache_dtype", replica.kv_format, first_replica.kv_format),
            ):
                if value != required:
                    raise ConfigError(
                        f"fleet.pools.{place.pool}: {key}={value}: must be {required}, as that of "
                        f"{self.places[0].name}: requests go from one to the other"
                    )
        for place in self.places[1:]:
            seconds, first_seconds = place.simulation.cost.server_seconds, first.cost.server_seconds
            if seconds != first_seconds:
                raise ConfigError(
                    f"fleet.pools.{place.pool}: stack.server_ms={1e3 * seconds:g}: must be "
                    f"{1e3 * first_seconds:g}, as that of {self.places[0].name}: one frontend "
                    "serves all"
                )

    def refuse(self, workload: Workload) -> None:
        disaggregated = any(place.role == "prefill" for place in self.places)
        if disaggregated and any(params.num_seqs > 1 for params in workload.asked):
            raise ConfigError(
                "fleet.pools: role=prefill: requests of several sequences (workload.n, "
                "workload.beam) cannot go on at another replica"
            )

    @property
    def outages(self) -> bool:
        return self.spec.dying is not None

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        self._recorders = [recorder.add_replica() for _ in self.places]
        simulate_fleet(
            [self._unit(place) for place in self.places],
            workload,
            self.router,
            self._recorders,
            recorder,
            self.spec,
            seed=self.seed,
            together=any(place.simulation.stores for place in self.places),
            way=self.places[0].simulation.cost.server_seconds,
            begins=self._begin,
        )

    def _begin(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def _unit(self, place: Place) -> Unit:
        simulation, replica = place.simulation, place.simulation.replica
        return Unit(
            place.name,
            place.role,
            simulation.scheduler,
            simulation.cost,
            {"fast_forward": simulation.fast_forward, **simulation.settings},
            token_bytes=replica.kv_bytes_per_token,
            links=replica.tensor_parallel * replica.model.layers / replica.most_layers,
            hardware=replica.hardware,
            layers=replica.model.layers,
        )

    def sizes(self) -> Settings:
        replica_sizes = [place.simulation.sizes() for place in self.places]
        peaks = [size["swapped_peak"] for size in replica_sizes if size["swapped_peak"] is not None]
        block_sizes = {size["block_size"] for size in replica_sizes}
        return {
            "total_blocks": sum(size["total_blocks"] for size in replica_sizes),
            "block_size": block_sizes.pop() if len(block_sizes) == 1 else NAN,
            "max_seqs": float(np.mean([size["max_seqs"] for size in replica_sizes])),
            "swapped_peak": max(peaks, default=None),
            "host_blocks": sum(size["host_blocks"] for size in replica_sizes),
            "replicas": [place.described() for place in self.places],
            "spans": self._spans() if self.spec.changes else None,
        }

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        dispatcher = self._dispatcher
        columns: dict[str, pa.Array] = {}
        if dispatcher is not None and dispatcher.migration is not None:
            moves = [dispatcher.migration.records.get(request_id) for request_id in ids]
            columns |= {
                "came_from": pa.array([move and move.source for move in moves], pa.int32()),
                "left": pa.array([move and move.ready for move in moves], pa.float64()),
                "boarded": pa.array([move and move.attached for move in moves], pa.float64()),
            }
        if dispatcher is not None and dispatcher.fetches is not None:
            fetched = [dispatcher.fetches.tokens[request_id] for request_id in ids]
            columns["fetched_tokens"] = pa.array(fetched, pa.int32())
        if dispatcher is not None and self.spec.dying is not None:
            retries = [dispatcher.retries[request_id] for request_id in ids]
            columns["retries"] = pa.array(retries, pa.int32())
        return columns

    def _spans(self) -> list[Span] | None:
        """When replicas were there, and when they were dead."""
        if self._dispatcher is None:  # the run was stopped
            return None
        spans, states = [], self._dispatcher.states
        for place, alive, down in zip(self.places, states.paid(), states.down(), strict=True):
            simulation = place.simulation
            watts = simulation.power.idle_watts(simulation.replica) if simulation.power else None
            spans += [Span(*when, True, watts, simulation.replica.euros_per_hour) for when in alive]
            spans += [Span(*when, False) for when in down]
        return spans

    def extra_summary(self) -> Settings:
        if (dispatcher := self._dispatcher) is None or dispatcher.fabric is None:
            return {}
        migrations = dispatcher.migration.migrations if dispatcher.migration is not None else 0
        return {"transfers": {**dispatcher.fabric.facts(), "migrations": migrations}}

    def leave_off(self, recorder: StoppableRecorder) -> None:
        """Record the requests in replicas, between them, and in the queue in front of them."""
        if self._dispatcher is None:
            return
        recorded: set[RequestId] = set()
        for replica, tables in zip(self._dispatcher.replicas, self._recorders, strict=True):
            for request in replica.alive:
                if request.id not in recorded:
                    recorded.add(request.id)
                    replica.scheduler.queues.discard_tokens(request)
                    tables.left(request)
        for request, _ in self._dispatcher.held:
            recorder.left(request)

    def work(self, steps: Batches) -> Mapping[str, float | None]:
        """Work and energy are sums; a peak is the mean over the time that steps took."""
        batches = [recorder.own_steps() for recorder in self._recorders]
        works = [
            place.simulation.work(steps) for place, steps in zip(self.places, batches, strict=True)
        ]
        busy = [steps.seconds for steps in batches]
        known = {name: _sum(works, name) for name in ("flops", "bytes", "euros_per_hour")}
        for peak in ("peak_flops", "peak_bandwidth"):
            weighted = [
                seconds * (work[peak] or 0.0) for seconds, work in zip(busy, works, strict=True)
            ]
            known[peak] = sum(weighted) / sum(busy) if sum(busy) else None
        return known | self._energy(works, busy)

    @staticmethod
    def _energy(
        works: Sequence[Mapping[str, float | None]], busy: Sequence[float]
    ) -> dict[str, float | None]:
        """Idle GPUs draw a mean in the summary; what each one's differ by in steps is put right."""
        if any(work.get("joules") is None or work.get("idle_watts") is None for work in works):
            return {}
        idle = [work["idle_watts"] or 0.0 for work in works]
        mean = sum(idle) / len(idle)
        joules = sum(work["joules"] or 0.0 for work in works)
        joules += sum((mean - watts) * seconds for watts, seconds in zip(idle, busy, strict=True))
        return {"joules": joules, "idle_watts": sum(idle)}

    def notices(self) -> list[str]:
        lines = [line for place in self.places for line in place.simulation.notices()]
        return list(dict.fromkeys(lines))


def _sum(works: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [work[name] for work in works]
    return None if None in values else sum(values)


PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Simulated(Backend):
    """Where steps are simulated."""

    fleets = True

    overlap: bool = False
    """Whether swaps out go on beside the computation."""
    fast_forward: bool = True
    """Whether quiet decode steps are planned in one go."""
    beam_turnover: float = TURNOVER
    """How often a beam is replaced by another's child; see `Beams`."""
    copy_efficiency: float | None = 0.9
    """The part of the GPU's bandwidth that copies of its blocks reach; None: they take no time."""
    power: EnergyRoofline | None = None
    """What GPUs draw; None: energy is not reported."""
    only: str | None = None
    """The one of `PHASES` that is done here, as if another server did the other; None: both."""

    def __post_init__(self) -> None:
        for key in ("overlap", "fast_forward"):
            require_flag(key, getattr(self, key))
        require_number("beam_turnover", self.beam_turnover, 0, 1)
        if self.copy_efficiency is not None:
            require_number("copy_efficiency", self.copy_efficiency, above=0, high=1)
        if not isinstance(self.power, EnergyRoofline | None):
            raise ConfigError(
                f"power={shown(self.power)}: must be settings with a _target_, or null"
            )
        if self.only is not None and str(self.only) not in PHASES:
            raise unknown("only", str(self.only), PHASES)

    def traffic(self, settings: Settings, seed: int) -> Workload:
        whole = super().traffic(settings, seed)
        if self.only != "prefill":
            return whole
        notice = "backend.only=prefill: every answer ends with its first token"
        single_tokens = np.ones_like(whole.output_len)
        return replace(whole, output_len=single_tokens, notices=(*whole.notices, notice))

    def prepare(self, config: RunSpec) -> Simulation | FleetRun:
        if config.fleet.alone:
            return self.simulation(config)
        places = [
            place
            for name, pool in config.fleet.kinds.items()
            for place in self._places(name, pool, config)
        ]
        return FleetRun(config.fleet, places, config.router, config.seed)

    def simulation(self, config: RunSpec) -> Simulation:
        server = config.server
        with config.errors_of("memory"):
            replica = Replica.of(server, config.model, config.hardware)
        cost = config.cost(replica)
        refuse_attributes(cost)
        if self.only == "decode":
            cost = Decodes(cost)
        with config.errors_of("server", "memory", "offload"):
            server = server.priced(cost.prices())
            memory = config.settings["memory"]
            rule = {key: memory[key] for key in ("pool", "reserved_gib") if key in memory}
            server = sized(server, replica, **rule)
            return Simulation(replica, cost, server, {}, self, config.seed)

    def _places(self, name: str, pool: Pool, config: RunSpec) -> Iterator[Place]:
        """The replicas of a pool; what fits and what a step takes is worked out once for all."""
        try:
            first = self.simulation(config.pool(name))
        except PagedsimError as error:
            raise ConfigError(f"fleet.pools.{name}: {error}" if name else str(error)) from error
        for index in range(pool.replicas):
            simulation = self._like(first, config.pool(name)) if index else first
            yield Place(f"{name or 'replica'}-{index}", name, pool.role, simulation)

    def _like(self, simulation: Simulation, config: RunSpec) -> Simulation:
        """Another such server, with a policy and a memory of its own."""
        server = config.server.priced(simulation.cost.prices())
        server = replace(
            server.of_sizes(simulation.server.sizes()), offload=simulation.server.offload
        )
        replica, cost, stores = simulation.replica, simulation.cost, simulation.stores
        return Simulation(replica, cost, server, stores, self, config.seed)
