"""The configuration of one run as typed objects, and the interface of a backend that serves it.

A `RunConfig` is the only reader of the composed dictionary: a backend gets the objects. It prepares
a `BackendRun`, which serves a workload and fills a `StoppableRecorder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from pagedsim.build import BESIDE, MEMORIES, OF_MEMORY, inner_policy, make_policy, policies
from pagedsim.cluster.spec import FleetSpec
from pagedsim.core import (
    Batching,
    ConfigError,
    EvictionPolicy,
    Memory,
    PagedsimError,
    Policy,
    Preemption,
    RequestId,
    Scheduler,
    StepPlan,
)
from pagedsim.core.contracts import vet
from pagedsim.core.policy_validation import refuse_signatures
from pagedsim.metrics.recorder import Recorder, ReplicaRecorder
from pagedsim.metrics.slo import Reader, Slo, slo_of
from pagedsim.metrics.steps import Batches
from pagedsim.metrics.tables import NAN
from pagedsim.policies.routing.router import Router
from pagedsim.run.objects import (
    KEPT,
    UNPICKLED,
    autoscale_of,
    draws,
    make,
    refuse_no_class,
    refuse_no_target,
    said_of,
    seeded,
    takes,
)
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import CostModel
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.workload import Predictor, Workload
from pagedsim.workload.predictor import CONTRACT

Settings = dict[str, Any]

REPLICA_KEYS = (
    *("policy", "preemption", "batching", "memory", "model", "hardware", "stack", "cost"),
    *("server", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
    *("kv_cache_dtype", "quantization"),
)
"""Keys and groups that may differ between the pools of a fleet; all others are the fleet's."""
POOL_CONFIG = "config"
"""The key under which a pool has its own values of `REPLICA_KEYS`, once they are composed."""
_NOT_OF_ITS_CLASS = (*BESIDE["memory"], "_target_", "kind")
"""Keys of the group `memory` that are not settings of its class."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run, each part built from its group when it is first read.

    One object is for one run: its policy keeps state.
    """

    settings: Settings
    """The resolved configuration as plain values, as it is stored beside the results."""
    seed: int = 0

    @cached_property
    def backend(self) -> Backend:
        return make("backend", self.settings["backend"], Backend)

    def prepare(self) -> BackendRun:
        """What the backend makes of it; raises ConfigError for what cannot be served."""
        return self.backend.prepare(self)

    def workload(self) -> Workload:
        """The requests to serve, with predicted lengths."""
        workload = self.backend.traffic(self.settings["workload"], self.seed)
        predictor = self.settings.get("predictor")  # older configurations have none
        if predictor is None:
            return workload
        return vet(make("predictor", predictor, Predictor), CONTRACT).applied(workload, self.seed)

    @cached_property
    def slo(self) -> Slo | None:
        return slo_of(self.settings["slo"])

    @cached_property
    def reader(self) -> Reader:
        """The reading speed that the metric `qoe` assumes."""
        return Reader(**self.settings.get("qoe", {}))  # older configurations have none

    # -- one server --------------------------------------------------------------------------------

    @cached_property
    def server(self) -> ServerSpec:
        """The groups policy, preemption, batching, memory and server, and the keys beside them."""
        config, memory = self.settings, self.settings["memory"]
        if not isinstance(memory, dict):
            raise ConfigError(f"memory={memory}: must be a mapping of settings")
        with self.errors_of("server", "memory"):
            return ServerSpec(
                policy=policy_of(config["policy"], self.seed),
                preemption=_preemption(config["preemption"]),
                batching=make("batching", config["batching"], Batching),
                **config["server"],
                **_memory(memory, self.seed),
                **{key: memory[key] for key in OF_MEMORY if key in memory},
                tensor_parallel=config["tensor_parallel"],
                pipeline_parallel=config["pipeline_parallel"],
                expert_parallel=config["expert_parallel"],
                kv_cache_dtype=config["kv_cache_dtype"],
                quantization=config["quantization"],
            )

    @cached_property
    def model(self) -> ModelShape:
        return make("model", self.settings["model"], ModelShape)

    @cached_property
    def hardware(self) -> Hardware:
        return make("hardware", self.settings["hardware"], Hardware)

    def cost(self, replica: Replica) -> CostModel:
        settings = self.settings["cost"]
        try:
            taken = takes(str(settings["_target_"]), "replica")
        except (PagedsimError, KeyError, TypeError, ValueError):  # make says what is wrong
            taken = True  # or it is compiled, without a signature
        made = make("cost", settings, CostModel, **({"replica": replica} if taken else {}))
        if getattr(made, "replica", None) is None:  # a class without it, or an object
            made.replica = replica
        return made

    @contextmanager
    def errors_of(self, *groups: str) -> Iterator[None]:
        """Put the group before the key that an error is about, if it is a key of one of these."""
        if not groups:
            yield
            return
        with said_of(groups[0], self.settings[groups[0]]), self.errors_of(*groups[1:]):
            yield

    # -- a fleet -----------------------------------------------------------------------------------

    @cached_property
    def fleet(self) -> FleetSpec:
        """The replicas; a single one where the configuration has no group `fleet`."""
        settings = self.settings.get("fleet")  # older configurations have none
        if settings is None:
            return FleetSpec()
        pools = settings.get("pools")
        if isinstance(pools, Mapping):  # what a pool is configured to is made a replica at a time
            settings = {**settings, "pools": {name: _bare(pool) for name, pool in pools.items()}}
        scaling = autoscale_of(settings.get("autoscale"), self.seed)
        return make("fleet", {**settings, "autoscale": scaling}, FleetSpec)

    @cached_property
    def router(self) -> Router:
        """The router, which has the run's seed added to its own if it draws at random."""
        return make("router", seeded("router", self.settings["router"], self.seed), Router)

    def pool(self, name: str) -> RunConfig:
        pools = self.settings["fleet"].get("pools") or {}
        return RunConfig({**self.settings, **pools.get(name, {}).get(POOL_CONFIG, {})}, self.seed)


def _bare(pool: Any) -> Any:
    """The settings of a pool without what they are composed to."""
    if not isinstance(pool, Mapping):
        return pool
    return {key: value for key, value in pool.items() if key != POOL_CONFIG}


def memory_target(memory: Mapping[str, Any]) -> str:
    """What a group `memory` names: the path of a class, or, of ours, its name."""
    target = str(memory.get("_target_") or memory.get("kind", "paged"))  # older ones have `kind`
    module, _, name = target.rpartition(".")
    own = module.startswith("pagedsim.")
    ours = {kind.__name__: name for name, kind in MEMORIES.items()}
    return ours.get(name, target) if own else target


def _memory(settings: Mapping[str, Any], seed: int) -> Settings:
    """The class of a memory and its own settings, or an object that a script gave."""
    if "kind" not in settings:
        refuse_no_target("memory", settings)
    target = memory_target(settings)
    own = {key: settings[key] for key in settings if key not in _NOT_OF_ITS_CLASS}
    if target in (UNPICKLED, KEPT):
        return {"memory": make("memory", {**own, "_target_": target}, Memory)}
    if target not in MEMORIES:
        refuse_no_class("memory", target, Memory)
    own = _with_eviction("memory", own, seed)
    if isinstance(tiers := own.get("tiers"), Mapping):
        own["tiers"] = {
            name: _with_eviction(f"memory.tiers.{name}", tier, seed) for name, tier in tiers.items()
        }
    return {"memory": target, "memory_settings": own}


def _with_eviction(where: str, settings: Any, seed: int) -> Any:
    """The settings of a pool of blocks, with its order of eviction made, if it has a class."""
    given = settings.get("eviction") if isinstance(settings, Mapping) else None
    if isinstance(given, str) and "." in given:
        given = {"_target_": given}
    if not isinstance(given, Mapping):
        return settings
    key = f"{where}.eviction"
    return {**settings, "eviction": make(key, seeded(key, given, seed), EvictionPolicy)}


def policy_of(settings: Any, seed: int = 0) -> Policy:
    """What the group `policy` describes, `of` and `victim` included."""
    if not isinstance(settings, Mapping):
        return make("policy", settings, Policy)  # says what is wrong
    own = {key: value for key, value in settings.items() if key != "victim"}
    with said_of("policy", settings):
        return make_policy(_inside("policy", own, seed), victim=settings.get("victim"))


def _inside(where: str, settings: Mapping[str, Any], seed: int) -> Policy:
    """The policy of these settings, and those that it wraps, to any depth."""
    given = dict(seeded(where, settings, seed))
    with said_of(where, given):
        of = given.get("of")
        if isinstance(of, str):
            given["of"] = _by_name(f"{where}.of", of, seed)
        elif isinstance(of, Mapping) and "_target_" in of:
            given["of"] = _inside(f"{where}.of", of, seed)
        return make(where, given, Policy)


def _by_name(where: str, name: str, seed: int) -> Policy:
    """A wrapped policy by name or path, with the class's own settings."""
    policy = inner_policy(name)
    if draws(policy):
        kind = policies().get(name)
        target = name if kind is None else f"{kind.__module__}.{kind.__qualname__}"
        return _inside(where, {"_target_": target}, seed)
    refuse_signatures(policy, Policy)
    return policy


def _preemption(settings: Any) -> Any:
    """The preemption, or how to make it once there are prices."""
    if isinstance(settings, dict) and settings.get("_target_"):
        with said_of("preemption", {"_target_": None}):
            if takes(settings["_target_"], "prices"):
                return partial(_priced, settings)
    return make("preemption", settings, Preemption)


def _priced(settings: Settings, prices: Any) -> Preemption:
    return make("preemption", settings, Preemption, prices=prices)


# -- what a backend offers -------------------------------------------------------------------------


class BackendRun(ABC):
    """One run's scheduler, and what carries its steps out."""

    scheduler: Scheduler
    ours: ClassVar[bool] = True
    """Whether there is that scheduler; a server elsewhere does not show its own."""

    @property
    def policies(self) -> Sequence[Policy]:
        """The policies that decide in this run."""
        return (self.scheduler.policy,) if self.ours else ()

    @property
    def limits(self) -> Mapping[int, str]:
        """The lengths at which its servers cut answers, each with whose it is; empty if unknown."""
        return {self.scheduler.max_model_len: ""} if self.ours else {}

    @property
    def entries(self) -> Sequence[Scheduler]:
        """Schedulers at which requests arrive, one of each kind, as far as they are known before
        the run."""
        return ()

    def draws_for(self, workload: Workload) -> bool:
        """Whether its seed decides anything in how these requests are served."""
        return any(map(draws, self.policies))

    @abstractmethod
    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        """Serve every request; `recorder` gets every step and every departure."""

    def refuse(self, workload: Workload) -> None:
        """Raise ConfigError for requests that cannot be served here, whatever is done."""

    def sizes(self) -> Settings:
        """What `summarise` takes of the server's limits and memory."""
        if not self.ours:
            return {"total_blocks": NAN, "block_size": NAN, "max_seqs": NAN}
        memory = self.scheduler.memory
        return {
            "total_blocks": memory.total,
            "block_size": memory.block_size,
            "max_seqs": self.scheduler.max_seqs,
            "swapped_peak": memory.cpu_peak,
        }

    def leave_off(self, recorder: StoppableRecorder) -> None:
        """The run ends: record the requests that are unfinished."""
        for request in self.scheduler.requests.values() if self.ours else ():
            self.scheduler.queues.discard_tokens(request)  # of steps that did not end
            recorder.left(request)

    def work(self, steps: Batches) -> Mapping[str, float | None]:
        """What `summarise` takes to tell how well the hardware was used, where that is known."""
        return {}

    def step_columns(self) -> Mapping[str, pa.Array]:
        """What else is known of each recorded step."""
        return {}

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        """What else is known of these requests."""
        return {}

    @property
    def outages(self) -> bool:
        """Whether what serves is down for a part of the time."""
        return False

    def unknown(self) -> Sequence[str]:
        """Columns of the recorded requests that are unknown here."""
        return ()

    def leave(self, folder: Path, workload: Workload, requests: pa.Table) -> None:
        """Write what else there is of a complete run into its folder, beside its tables."""

    def extra_summary(self) -> Settings:
        """What else the summary has, by key: of a fleet, `transfers` between its replicas."""
        return {}

    def facts(self) -> Settings:
        """What a reader of the results must know of the machine and is in no configuration."""
        return {}

    def notices(self) -> list[str]:
        """What a reader of the report must know of the run, a line each."""
        return []


class Backend(ABC):
    """The group `backend`."""

    alone: ClassVar[bool] = False
    """Whether a run needs the machine for itself, since its times are real."""
    elsewhere: ClassVar[bool] = False
    """Whether the server is elsewhere, so that only requests can differ between arms."""
    fleets: ClassVar[bool] = False
    """Whether there may be several replicas."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Groups of the configuration, and keys beside them, that change nothing here."""
    unread_since: ClassVar[str] = "times are measured, not modelled"
    """Why they do not."""

    @abstractmethod
    def prepare(self, config: RunConfig) -> BackendRun:
        """The run that a configuration describes; raises ConfigError for what cannot be."""

    def traffic(self, settings: Settings, seed: int) -> Workload:
        """As much of the workload as this backend is to serve."""
        return make("workload", settings, Workload, seed=seed)


def refuse_sessions(workload: Workload, backend: str) -> None:
    """Raise ConfigError for prompts that quote answers which only a run gives."""
    if workload.turns is not None:
        raise ConfigError(
            f"workload: its requests are turns of sessions, and backend={backend} cannot put what "
            "was answered into the next prompt: take backend=sim"
        )


# -- the recorder ----------------------------------------------------------------------------------


class Stopped(Exception):
    """The run was asked to stop."""


class StoppableRecorder(Recorder):
    """A recorder that can be looked at, and that can stop the run between two steps."""

    requests = 0
    """How many requests there will be; 0 while that is not known."""
    stopping = False
    """Whether the run was asked to stop."""
    now = 0.0
    """The time of a run whose steps are not seen, in its seconds."""

    def add_replica(self) -> ReplicaRecorder:
        self.replicas.append(_ReplicaRecorder(self, len(self.replicas)))
        return self.replicas[-1]

    @property
    def left_count(self) -> int:
        return len(self._ids)

    @property
    def begun(self) -> bool:
        """Whether there is anything to keep."""
        return self.now > 0 or any(one.last_end is not None for one in (self, *self.replicas))

    @property
    def time(self) -> float:
        """The end of the last step, in seconds of the run."""
        ends = (one.last_end for one in (self, *self.replicas))
        return max((end for end in ends if end is not None), default=self.now)

    def stop(self) -> None:
        """Raise `Stopped` at the next step, where everything recorded is whole."""
        self.stopping = True
        everywhere: list[Recorder | ReplicaRecorder] = [self, *self.replicas]
        for one in everywhere:
            one.step = partial(_stop, one)  # type: ignore[method-assign]


class _ReplicaRecorder(ReplicaRecorder):
    """A replica's, whose `step` may be replaced: of a class that is compiled it may not."""


def _stop(
    recorder: Recorder | ReplicaRecorder,
    plan: StepPlan,
    start: float,
    end: float,
    scheduler: Scheduler,
) -> None:
    for rejection in plan.rejected:  # no longer the scheduler's, and not recorded yet
        recorder.left(rejection.request)
    raise Stopped
