"""vLLM's settings of KV offloading, as those of our host tier (`ServerSpec.offload`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, require_number, require_whole, shown, unknown
from pagedsim.core.offload import LowerTier, VLLMOffload
from pagedsim.server import ServerSpec

OFFLOAD_SETTINGS = ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config")
BACKENDS = ("native",)
CONNECTORS = ("OffloadingConnector",)
ROLES = ("kv_both", "kv_producer", "kv_consumer")
SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
TIERS = ("fs",)
_TIER = ("folder", "threads", "gib", "read_gb_s", "write_gb_s", "latency_us", "shared")
"""Settings of a tier; the simulator reads those from the third on."""
TIERED = ("type", "root_dir", "n_read_threads", "n_write_threads")
"""Settings of a tier of files."""
THREADS = 16

_EXTRA: Mapping[str, str] = {
    "cpu_bytes_to_use": "gib",
    "blocks_per_chunk": "chunk_tokens",
    "block_size": "chunk_tokens",
    "eviction_policy": "eviction",
    "store_threshold": "store_threshold",
    "max_tracker_size": "tracked_chunks",
    "offload_prompt_only": "prompt_only",
}
"""Keys of kv_connector_extra_config -> settings of `VLLMOffload`."""
_WHERE = "kv_transfer_config.kv_connector_extra_config"


def offload_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The host tier that vLLM's settings ask for; None without one."""
    size, given = (settings.get(name) for name in ("kv_offloading_size", "kv_transfer_config"))
    backend = settings.get("kv_offloading_backend") or BACKENDS[0]
    if backend not in BACKENDS:
        raise unknown("kv_offloading_backend", str(backend), BACKENDS)
    extra = {} if given is None else _extra_of(given)
    if given is None and size is None:
        return None
    if settings.get("offload") is not None:
        raise ConfigError("offload: says the same as kv_offloading_size and kv_transfer_config")
    offload = {_EXTRA[name]: value for name, value in extra.items() if name in _EXTRA}
    if "secondary_tiers" in extra:
        offload["tiers"] = _tiers_of(extra["secondary_tiers"])
    if "blocks_per_chunk" in extra:
        offload["chunk_tokens"] = _chunk_tokens(extra, settings)
    if size is not None:  # vLLM, too, prefers it
        gib = require_number("kv_offloading_size", size, above=0)
    elif "cpu_bytes_to_use" in extra:
        name = f"{_WHERE}.cpu_bytes_to_use"
        gib = require_whole(name, extra["cpu_bytes_to_use"], 1) / 2**30
    else:
        raise ConfigError(f"{_WHERE}: must have cpu_bytes_to_use, or give kv_offloading_size")
    # vLLM's are sizes over all GPUs.
    return offload | {"gib": gib / (settings.get("tensor_parallel_size") or 1)}


def _extra_of(given: Any) -> Mapping[str, Any]:
    """The settings of the connector, from an object or its JSON."""
    config = given
    if isinstance(given, str):
        try:
            config = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"kv_transfer_config={shown(given)}: is no JSON: {error}") from error
    config = getattr(config, "__dict__", config)  # a KVTransferConfig
    if not isinstance(config, Mapping):
        raise ConfigError(f"kv_transfer_config={shown(given)}: must be a JSON object")
    for name, known in (("kv_connector", CONNECTORS), ("kv_role", ROLES)):
        if (value := config.get(name)) is None:
            raise ConfigError(f"kv_transfer_config: must have {name}: {choices('', known)}")
        if value not in known:
            raise unknown(f"kv_transfer_config.{name}", str(value), known)
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{_WHERE}={shown(extra)}: must be a JSON object")
    for name, value in extra.items():
        if name == "spec_name":
            if value not in SPECS:
                raise unknown(f"{_WHERE}.spec_name", str(value), SPECS)
        elif name not in _EXTRA and name != "secondary_tiers":
            raise unknown(_WHERE, str(name), ("spec_name", *_EXTRA, "secondary_tiers"))
    return {name: value for name, value in extra.items() if name != "spec_name"}


def _tiers_of(given: Any) -> dict[str, Any]:
    """The tiers below the host tier, from `secondary_tiers`."""
    where = f"{_WHERE}.secondary_tiers"
    if not (isinstance(given, list | tuple) and all(isinstance(tier, Mapping) for tier in given)):
        raise ConfigError(f"{where}={shown(given)}: must be a list of objects")
    tiers: dict[str, Any] = {}
    for number, tier in enumerate(given):
        if (kind := tier.get("type")) not in TIERS:
            raise unknown(f"{where}[{number}].type", str(kind), TIERS)
        for name in tier:
            if name not in TIERED:
                raise unknown(f"{where}[{number}]", str(name), TIERED)
        if not tier.get("root_dir"):
            raise ConfigError(f"{where}[{number}]: must have root_dir")
        threads = sum(
            require_whole(f"{where}[{number}].{name}", tier.get(name, THREADS), 1)
            for name in TIERED[2:]
        )
        tiers[f"{kind}{number}"] = {"folder": tier["root_dir"], "threads": threads}
    return tiers


def _chunk_tokens(extra: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """From `blocks_per_chunk`."""
    where = f"{_WHERE}.blocks_per_chunk"
    if "block_size" in extra:
        raise ConfigError(f"{where}: says the same as block_size; give one of them")
    block: int = settings.get("block_size") or ServerSpec.block_size
    return require_whole(where, extra["blocks_per_chunk"], 1) * block


def with_tiers(server: ServerSpec, tier: Callable[..., LowerTier]) -> ServerSpec:
    """The server with a `tier` in the place of each one below host memory that has a folder."""
    offload = server.offloading
    if not (isinstance(offload, VLLMOffload) and isinstance(offload.tiers, Mapping)):
        return server
    tiers = []
    for name, given in offload.tiers.items():
        where, settings = f"offload.tiers.{name}", given if isinstance(given, Mapping) else {}
        if (folder := settings.get("folder")) is None:
            if given is not None and settings.get("gib") != 0:
                raise ConfigError(f"{where}: needs a folder in the engine, or must be null")
            continue
        if not isinstance(folder, str | PathLike) or not str(folder):
            raise ConfigError(f"{where}.folder={shown(folder)}: must be a path, or null")
        if server.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel={server.tensor_parallel}: must be 1 with a folder in "
                "offload.tiers; each process has a part of every chunk"
            )
        for key in settings:
            if key not in _TIER:
                instead = choices(str(key), _TIER)
                raise ConfigError(f"{where}.{key}: no such setting of a tier; {instead}")
        threads = require_whole(f"{where}.threads", settings.get("threads", THREADS), 1)
        tiers.append(tier(f"{where}.folder", str(folder), threads))
    return replace(server, offload=replace(offload, tiers=tuple(tiers)))
