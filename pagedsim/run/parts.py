"""The objects of one run, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pagedsim.build import inner_policy, make_policy, policies
from pagedsim.core import Batching, ConfigError, Policy, PolicyWrapper, Preemption, Scheduler
from pagedsim.core.errors import stranger
from pagedsim.core.policy import Need
from pagedsim.fleet.spec import FleetSpec
from pagedsim.metrics.qoe import Reader
from pagedsim.metrics.slo import Slo, refuse_strangers, slo_of
from pagedsim.run.backend import Backend, Settings, Stage
from pagedsim.run.objects import make, said_of, seeded, takes
from pagedsim.server import ServerSpec
from pagedsim.workload import Workload
from policies.drr import DRR
from policies.slo import SLO
from policies.victims import VictimRule
from policies.vtc import VTC


@dataclass(frozen=True)
class Parts:
    """The objects of one run."""

    workload: Workload
    stage: Stage
    slo: Slo | None
    reader: Reader
    drawn: bool
    """Whether anything in the run depends on its seed."""

    @property
    def scheduler(self) -> Scheduler | None:
        """What plans the run's steps; None where nobody here sees it."""
        return self.stage.scheduler if self.stage.ours else None


def build(config: Settings, seed: int, workload: Workload | None = None) -> Parts:
    """The objects that a configuration describes; a `workload` that is there is not made anew."""
    slo = slo_of(config["slo"])
    reader = Reader(**config.get("qoe", {}))  # a configuration of before has none
    backend = backend_of(config)
    if not backend.fleets:
        refuse_fleet(config, "this backend is one server; backend=sim simulates many")
    stage = backend.stage(config, seed)
    # Last, since a long trace takes longest to read.
    workload = workload or backend.workload(config, seed)
    stage.refuse(workload)
    if not backend.elsewhere:
        refuse_unmet(policy_of(config["policy"]), workload)
    if slo is not None:
        refuse_strangers(slo, workload.clients)
    return Parts(workload, stage, slo, reader, workload.drawn or stage.drawn)


def refuse_fleet(config: Settings, why: str) -> None:
    """Raise ConfigError for several replicas where there must be one server."""
    settings = config.get("fleet")
    if settings and not make("fleet", settings, FleetSpec).alone:
        key = "pools" if settings.get("pools") else "replicas"
        raise ConfigError(f"fleet.{key}={settings[key]}: {why}")


def backend_of(config: Settings) -> Backend:
    """Where a configuration's requests are served."""
    return make("backend", config["backend"], Backend)


_OF_MEMORY = (
    *("block_size", "blocks", "cpu_blocks", "swap_space_gib"),
    *("gpu_memory_utilization", "kv_layout"),
)
"""Settings of the group `memory` that are the server's; others are its class's own."""
_OTHERS = ("kind", "reserved_gib")
"""The class, and what the simulator's hardware is taken to leave."""


def server_of(config: Mapping[str, Any], seed: int = 0) -> ServerSpec:
    """Of the groups policy, preemption, batching, memory and server, and the keys beside them.

    A policy that draws at random has the run's `seed` added to its own.
    """
    memory = config["memory"]
    if not isinstance(memory, dict):
        raise ConfigError(f"memory={memory}: must be a mapping of settings")
    said = {key: memory[key] for key in _OF_MEMORY if key in memory}
    more = {key: memory[key] for key in memory if key not in (*_OF_MEMORY, *_OTHERS)}
    with said_of("server", config["server"]), said_of("memory", memory):
        return ServerSpec(
            policy=policy_of(config["policy"], seed),
            preemption=_preemption(config["preemption"]),
            batching=make("batching", config["batching"], Batching),
            **config["server"],
            memory=memory.get("kind", "paged"),
            memory_settings=more,
            **said,
            tensor_parallel=config["tensor_parallel"],
            pipeline_parallel=config["pipeline_parallel"],
            expert_parallel=config["expert_parallel"],
            kv_cache_dtype=config["kv_cache_dtype"],
            quantization=config["quantization"],
        )


def policy_of(settings: Any, seed: int = 0) -> Policy:
    """What the group `policy` describes, `of` and `victim` included."""
    if not isinstance(settings, Mapping):
        return make("policy", settings, Policy)  # says what is wrong
    said = {key: value for key, value in settings.items() if key != "victim"}
    with said_of("policy", settings):
        return make_policy(_inside("policy", said, seed), victim=settings.get("victim"))


def _inside(where: str, settings: Mapping[str, Any], seed: int) -> Policy:
    """The policy that settings describe, and whatever it stands around, to any depth."""
    said = dict(seeded(where, settings, seed))
    with said_of(where, said):
        of = said.get("of")
        if isinstance(of, str):
            inner_policy(of)  # says what is wrong with it
            path = policies().get(of)
            target = of if path is None else f"{path.__module__}.{path.__qualname__}"
            said["of"] = _inside(f"{where}.of", {"_target_": target}, seed)
        elif isinstance(of, Mapping) and "_target_" in of:
            said["of"] = _inside(f"{where}.of", of, seed)
        return make(where, said, Policy)


def _preemption(settings: Any) -> Any:
    """The preemption, or how to make it once there are prices."""
    if isinstance(settings, dict) and "_target_" in settings:
        with said_of("preemption", {"_target_": None}):
            if takes(settings["_target_"], "prices"):
                return partial(_priced, settings)
    return make("preemption", settings, Preemption)


def _priced(settings: Settings, prices: Any) -> Preemption:
    return make("preemption", settings, Preemption, prices=prices)


LACKS: Mapping[Need, tuple[Callable[[Workload], bool], str]] = {
    "predictor": (
        lambda workload: bool(np.isnan(workload.predicted_len).all()),
        "goes by predicted lengths, and nobody predicts any; "
        "choose predictor=oracle, noisy, bucket or rank",
    ),
    "deadline": (
        lambda workload: bool(np.isnan(workload.deadline).all()),
        "goes by deadlines, and no request has one; set workload.deadline=, in seconds",
    ),
    "prompts": (
        lambda workload: workload.prompts is None,
        "goes by what prompts have in common, and these have no contents; "
        "set workload.prefixes, or take a trace with them",
    ),
    "session": (
        lambda workload: workload.turns is None,
        "goes by sessions, and no request is of one; take workload=chat_sessions or agents",
    ),
    "client": (
        lambda workload: len(np.unique(workload.client)) < 2,
        "goes by clients, and all requests are of one; set workload.client=, or "
        "workload.client_column= of a trace",
    ),
    "priority": (
        lambda workload: len(np.unique(workload.priority)) < 2,
        "goes by priorities, and all requests have the same; set "
        "workload.priority=, or workload.priority_column= of a trace",
    ),
}
"""Whether a workload lacks what a word of `Policy.needs` means, and what to say of it."""
_REFUSED: tuple[Need, ...] = ("predictor", "deadline", "prompts", "session")
"""Of one client, or one priority, a policy is still itself."""


def refuse_unmet(policy: Policy, workload: Workload) -> None:
    """Raise ConfigError where the requests lack what a policy goes by, or a client it weighs."""
    for need, reason in unmet(policy, workload):
        if need in _REFUSED:
            raise ConfigError(f"policy: {reason}")
    there = set(workload.clients)
    for where, one in _with_key(policy):
        for client in one.weights if isinstance(one, (VTC, DRR)) else ():
            if not client or client not in there:
                raise stranger(f"{where}.weights.{client}", client, there)


def remarks(policy: Policy, workload: Workload) -> Iterator[str]:
    """What a reader must know of a policy that found little to go by."""
    for need, reason in unmet(policy, workload):
        if need not in _REFUSED:
            lacks, _, instead = reason.partition("; ")
            yield f"{lacks}: alone it is first come, first served; {instead}"
    for where, one in _with_key(policy):
        if isinstance(one, SLO) and (beyond := int((workload.priority > max(one.targets)).sum())):
            levels = ", ".join(f"{level:g}" for level in one.targets)
            yield (
                f"{beyond:,} of {len(workload):,} requests have no target, since their priority is "
                f"beyond those of {where}.targets ({levels}): they go last"
            )


def unmet(policy: Policy, workload: Workload) -> Iterator[tuple[Need, str]]:
    """What the requests lack that a policy goes by, or one that it stands around; and why."""
    for need in policy.needs:
        lacks, reason = LACKS[need]
        if lacks(workload):
            yield need, f"{type(policy).__name__} {reason}"
    if isinstance(policy, PolicyWrapper):
        yield from unmet(policy.inner, workload)


def _with_key(policy: Policy, key: str = "policy") -> Iterator[tuple[str, Policy]]:
    """A policy and those that it stands around, each with the key of its settings."""
    yield key, policy
    if isinstance(policy, PolicyWrapper):
        yield from _with_key(policy.inner, key if isinstance(policy, VictimRule) else f"{key}.of")
