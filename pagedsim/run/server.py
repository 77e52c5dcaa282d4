"""The server that a configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pagedsim.build import inner_policy, make_policy, policies
from pagedsim.core import Batching, ConfigError, Policy, Preemption
from pagedsim.run.backend import Settings
from pagedsim.run.objects import make, said_of, seeded, takes
from pagedsim.server import ServerSpec

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
