"""One run as typed objects: the groups of its configuration, each built when it is first read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pagedsim.build import (
    AUTOSCALERS,
    BESIDE,
    MEMORIES,
    OF_MEMORY,
    inner_policy,
    plugins,
    policies,
)
from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.spec import FleetSpec
from pagedsim.core import (
    Batching,
    ConfigError,
    EvictionPolicy,
    Memory,
    PagedsimError,
    Policy,
    Preemption,
)
from pagedsim.core.contracts import vet
from pagedsim.core.errors import shown, unknown
from pagedsim.core.offload import Offload
from pagedsim.core.policy_validation import refuse_signatures
from pagedsim.metrics.slo import Reader, Slo, slo_of
from pagedsim.policies.autoscaling import CONTRACT as AUTOSCALING
from pagedsim.policies.autoscaling import Autoscaler
from pagedsim.policies.routing.router import Router
from pagedsim.policies.victims import VictimRule
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import CostModel
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.spec.given import Given
from pagedsim.spec.objects import (
    draws,
    make,
    refuse_no_class,
    refuse_no_target,
    said_of,
    seeded,
    takes,
)
from pagedsim.workload import Predictor, Workload
from pagedsim.workload.predictor import CONTRACT

if TYPE_CHECKING:
    from pagedsim.backends.base import Backend, BackendRun

Settings = dict[str, Any]

REPLICA_KEYS = (
    *("policy", "preemption", "batching", "memory", "offload", "model", "hardware", "stack"),
    *("cost", "server", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
    *("kv_cache_dtype", "quantization"),
)
"""Keys and groups that may differ between the pools of a fleet; all others are the fleet's."""
POOL_CONFIG = "config"
"""The key under which a pool has its own values of `REPLICA_KEYS`, once they are composed."""
_NOT_OF_ITS_CLASS = (*BESIDE["memory"], "_target_")
"""Keys of the group `memory` that are not settings of its class."""


@dataclass(frozen=True)
class RunSpec:
    """The configuration of one run, each part built from its group when it is first read.

    One object is for one run: its policy keeps state.
    """

    settings: Settings
    """The resolved configuration as plain values, as it is stored beside the results."""
    seed: int = 0

    @cached_property
    def backend(self) -> Backend:
        from pagedsim.backends.base import Backend

        return make("backend", self.settings["backend"], Backend)

    def prepare(self) -> BackendRun:
        """What the backend makes of it; raises ConfigError for what cannot be served."""
        return self.backend.prepare(self)

    def workload(self, context: int | None = None) -> Workload:
        """The requests to serve, with predicted lengths; of recorded sessions those that a server
        with so many tokens of context can serve wholly."""
        settings = self.settings["workload"]
        workload = self.backend.traffic(settings, self.seed)
        if context is not None and workload.whole and workload.longest > context:
            workload = self.backend.traffic({**settings, "max_len": context}, self.seed)
        predictor = self.settings["predictor"]
        return vet(make("predictor", predictor, Predictor), CONTRACT).applied(workload, self.seed)

    @cached_property
    def slo(self) -> Slo | None:
        return slo_of(self.settings["slo"])

    @cached_property
    def reader(self) -> Reader:
        """The reading speed that the metric `qoe` assumes."""
        return Reader(**self.settings["qoe"])

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
                **self._offload(),
                tensor_parallel=config["tensor_parallel"],
                pipeline_parallel=config["pipeline_parallel"],
                expert_parallel=config["expert_parallel"],
                kv_cache_dtype=config["kv_cache_dtype"],
                quantization=config["quantization"],
            )

    def _offload(self) -> Settings:
        if self.settings.get("offload") is None:  # of a run that was stored before there was any
            return {}
        return {"offload": make("offload", self.settings["offload"], Offload)}

    @cached_property
    def model(self) -> ModelShape:
        return make("model", self.settings["model"], ModelShape)

    @cached_property
    def hardware(self) -> Hardware:
        return make("hardware", self.settings["hardware"], Hardware)

    def cost(self, replica: Replica) -> CostModel:
        settings = self.settings["cost"]
        try:
            taken = takes(settings["_target_"], "replica")
        except (PagedsimError, KeyError, TypeError, ValueError):  # make says what is wrong
            taken = True  # or it is compiled, without a signature
        model = make("cost", settings, CostModel, **({"replica": replica} if taken else {}))
        if getattr(model, "replica", None) is None:  # a class without it, or an object
            model.replica = replica
        return model

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
        settings = self.settings.get("fleet")  # of which a server's configuration has none
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

    def pool(self, name: str) -> RunSpec:
        pools = self.settings["fleet"].get("pools") or {}
        return RunSpec({**self.settings, **pools.get(name, {}).get(POOL_CONFIG, {})}, self.seed)


def _bare(pool: Any) -> Any:
    """The settings of a pool without what they are composed to."""
    if not isinstance(pool, Mapping):
        return pool
    return {key: value for key, value in pool.items() if key != POOL_CONFIG}


def memory_target(memory: Mapping[str, Any]) -> str:
    """What a group `memory` names: the path of a class, or, of ours, its name."""
    target = str(memory.get("_target_"))
    module, _, name = target.rpartition(".")
    is_ours = module.startswith("pagedsim.")
    ours = {kind.__name__: name for name, kind in MEMORIES.items()}
    return ours.get(name, target) if is_ours else target


def _memory(settings: Mapping[str, Any], seed: int) -> Settings:
    """The class of a memory and its own settings, or an object that a script gave."""
    refuse_no_target("memory", settings)
    settings_of_class = {key: settings[key] for key in settings if key not in _NOT_OF_ITS_CLASS}
    if isinstance(settings["_target_"], Given):
        return {"memory": make("memory", settings, Memory)}
    target = memory_target(settings)
    if target not in MEMORIES:
        refuse_no_class("memory", target, Memory)
    settings_of_class = _with_eviction("memory", settings_of_class, seed)
    return {"memory": target, "memory_settings": settings_of_class}


def _with_eviction(where: str, settings: Any, seed: int) -> Any:
    """The settings of a pool of blocks, with its order of eviction built, if it has a class."""
    given = settings.get("eviction") if isinstance(settings, Mapping) else None
    if isinstance(given, str) and "." in given:
        given = {"_target_": given}
    if not isinstance(given, Mapping):
        return settings
    key = f"{where}.eviction"
    return {**settings, "eviction": make(key, seeded(key, given, seed), EvictionPolicy)}


def policy_of(settings: Any, seed: int = 0, where: str = "policy") -> Policy:
    """What the group `policy` describes, `victim` included, and what it wraps, to any depth."""
    if not isinstance(settings, Mapping):
        return make(where, settings, Policy)  # says what is wrong
    victim = settings.get("victim") if where == "policy" else None
    without_victim = {
        key: value for key, value in settings.items() if key != "victim" or where != "policy"
    }
    given = dict(seeded(where, without_victim, seed))
    with said_of(where, settings):
        inner = given.get("of")
        if isinstance(inner, str):
            given["of"] = _by_name(f"{where}.of", inner, seed)
        elif isinstance(inner, Mapping) and "_target_" in inner:
            given["of"] = policy_of(inner, seed, f"{where}.of")
        policy = make(where, given, Policy)
        return policy if victim is None else VictimRule(policy, victim)


def _by_name(where: str, name: str, seed: int) -> Policy:
    """A wrapped policy by name or path, with the class's own settings."""
    policy = inner_policy(name)
    if draws(policy):
        kind = policies().get(name)
        target = name if kind is None else f"{kind.__module__}.{kind.__qualname__}"
        return policy_of({"_target_": target}, seed, where)
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


# -- fleet.autoscale -------------------------------------------------------------------------------

_TIMING = {
    field.name: field.default
    for field in fields(Autoscale)
    if field.name in BESIDE["fleet.autoscale"]
}
"""Its settings that are not the autoscaler's own, and what they are unless they are given."""
_THRESHOLDS = ("up", "down")
"""Settings of the built-in rules, null for others."""
_EXAMPLE = "{rule: queue, up: 4, down: 1}"


def autoscale_of(settings: Any, seed: int) -> Autoscale | None:
    """What the setting describes; None if it is off, with neither `rule` nor `_target_`."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"fleet.autoscale={shown(settings)}: must be settings, such as {_EXAMPLE}, or null"
        )
    given = {
        str(key): value
        for key, value in settings.items()
        if key not in _TIMING and not (key in _THRESHOLDS and value is None)
    }
    rule = given.pop("rule", None)
    if rule is None and given.get("_target_") is None:
        timing = {key for key in _TIMING if settings.get(key, _TIMING[key]) != _TIMING[key]}
        if unused := given.keys() - {"_target_"} | timing:
            raise ConfigError(
                f"fleet.autoscale.{min(unused)}: needs rule or _target_ beside it, as in "
                f"{_EXAMPLE}; fleet.autoscale=null is without autoscaling"
            )
        return None
    if rule is not None:
        if given.get("_target_") is not None:
            raise ConfigError(
                f"fleet.autoscale.rule={rule}: must be null beside _target_={given['_target_']}"
            )
        given["_target_"] = _path_of(rule)

    def autoscaler() -> Autoscaler:
        seeded_settings = seeded("fleet.autoscale", given, seed)
        return vet(make("fleet.autoscale", seeded_settings, Autoscaler), AUTOSCALING)

    autoscaler()  # what is wrong with it is said before anything runs
    return Autoscale(autoscaler, **{key: settings[key] for key in _TIMING if key in settings})


def _path_of(rule: object) -> str:
    """The path of the class that a rule's name stands for."""
    ours = {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in AUTOSCALERS.items()}
    paths = {**plugins("autoscaler"), **ours}
    if (name := str(rule)) in paths:
        return paths[name]
    path = "; the path of a class is fleet.autoscale._target_" if "." in name else ""
    raise ConfigError(f"{unknown('fleet.autoscale.rule', name, paths)}{path}")
