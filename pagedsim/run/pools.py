"""The configurations of a fleet's pools: the study's own, with what each pool sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.run.backend import Settings

OF_A_REPLICA = (
    *("policy", "preemption", "batching", "memory", "model", "hardware", "stack", "cost"),
    *("server", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
    *("kv_cache_dtype", "quantization"),
)
"""Keys and groups that may differ from replica to replica; all others are the fleet's."""
OWN = "config"
"""Where a pool has them, once they are composed."""


def with_pools(config: Settings, composed: Callable[[str, Sequence[str]], Settings]) -> Settings:
    """The configuration, each of its pools with the one that its `set` makes.

    `composed` gives the configuration with more overrides; its first argument is whose they are.
    """
    fleet = config.get("fleet")
    pools = fleet.get("pools") if isinstance(fleet, Mapping) else None
    if not isinstance(pools, Mapping):
        return config
    made = {name: _with_own(str(name), pool, composed) for name, pool in pools.items()}
    return {**config, "fleet": {**config["fleet"], "pools": made}}


def without_configurations(fleet: Settings) -> Settings:
    """A fleet's settings alone: what its pools are configured to is made a replica at a time."""
    pools = fleet.get("pools")
    if not isinstance(pools, Mapping):
        return fleet
    bare = {
        name: {key: value for key, value in pool.items() if key != OWN}
        if isinstance(pool, Mapping)
        else pool
        for name, pool in pools.items()
    }
    return {**fleet, "pools": bare}


def configured(config: Settings, pool: str) -> Settings:
    """The configuration of one of the replicas of a pool."""
    pools = config["fleet"].get("pools") or {}
    return {**config, **pools.get(pool, {}).get(OWN, {})}


def _with_own(name: str, pool: Any, composed: Callable[[str, Sequence[str]], Settings]) -> Any:
    words = pool.get("set") if isinstance(pool, Mapping) else None
    if not words or not isinstance(words, Sequence) or isinstance(words, str):
        return pool  # what is wrong with it is said where the fleet is made
    where = f"fleet.pools.{name}.set"
    for word in map(str, words):
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if group not in OF_A_REPLICA:
            raise ConfigError(
                f"{where}: {word}: is not a replica's own; it may set {', '.join(OF_A_REPLICA)}"
            )
    own = composed(where, list(map(str, words)))
    return {**pool, OWN: {key: own[key] for key in OF_A_REPLICA if key in own}}
