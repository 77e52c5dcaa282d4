"""SGLang's settings of its hierarchical cache, as those of our host tier (`ServerSpec.offload`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_number, shown, unknown
from pagedsim.engine.vllm_offload import OFFLOAD_SETTINGS
from pagedsim.sglang import HiCacheOffload
from pagedsim.sglang.hicache import USES_TO_WRITE

SWITCH = "enable_hierarchical_cache"
HICACHE_SETTINGS = (SWITCH, "hicache_ratio", "hicache_size", "hicache_write_policy")
GB = 1e9 / 2**30


def with_hicache(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with the server that SGLang's ask for, if they ask for a host tier."""
    given = {name: settings[name] for name in HICACHE_SETTINGS if settings.get(name) is not None}
    if not require_flag(SWITCH, given.pop(SWITCH, False)):
        for name, value in given.items():
            raise ConfigError(f"{name}={shown(value)}: needs {SWITCH}=True")
        return settings
    for name in ("offload", *OFFLOAD_SETTINGS):
        if settings.get(name) is not None:
            raise ConfigError(f"{name}: there is a host tier by {SWITCH}; give one of them")
    offload: dict[str, Any] = {}
    if "hicache_ratio" in given:
        offload["ratio"] = require_number("hicache_ratio", given["hicache_ratio"], above=0)
    if size := require_number("hicache_size", given.get("hicache_size", 0), 0):
        offload["gib"] = size * GB  # 0: as the ratio says; of each GPU, as ours
    if (policy := given.get("hicache_write_policy")) is not None:
        if policy not in USES_TO_WRITE:
            raise unknown("hicache_write_policy", str(policy), USES_TO_WRITE)
        offload["write_policy"] = policy
    server = {} if "server" in settings else {"batching": "sglang", "memory": "radix"}
    return {**server, **settings, "offload": HiCacheOffload(**offload)}
