"""vLLM's settings of KV offloading, as those of our host tier (`ServerSpec.offload`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, shown, unknown
from pagedsim.server import ServerSpec

OFFLOAD_SETTINGS = ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config")
BACKENDS = ("native",)
CONNECTORS = ("OffloadingConnector",)
ROLES = ("kv_both", "kv_producer", "kv_consumer")
SPECS = ("CPUOffloadingSpec",)

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
    offload = {_EXTRA[name]: value for name, value in extra.items()}
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
        if (value := config.get(name)) not in known:
            raise unknown(f"kv_transfer_config.{name}", str(value), known)
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{_WHERE}={shown(extra)}: must be a JSON object")
    for name, value in extra.items():
        if name == "spec_name":
            if value not in SPECS:
                raise unknown(f"{_WHERE}.spec_name", str(value), SPECS)
        elif name not in _EXTRA:
            raise unknown(_WHERE, str(name), ("spec_name", *_EXTRA))
    return {name: value for name, value in extra.items() if name != "spec_name"}


def _chunk_tokens(extra: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """From `blocks_per_chunk`."""
    where = f"{_WHERE}.blocks_per_chunk"
    if "block_size" in extra:
        raise ConfigError(f"{where}: says the same as block_size; give one of them")
    block: int = settings.get("block_size") or ServerSpec.block_size
    return require_whole(where, extra["blocks_per_chunk"], 1) * block
