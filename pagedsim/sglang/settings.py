"""SGLang's host tier, as a server is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedsim.core.batching import Batching
from pagedsim.core.errors import (
    ConfigError,
    refuse_settings,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.core.memory import Memory
from pagedsim.core.offload import Offload
from pagedsim.core.offload.settings import GIB
from pagedsim.sglang.batching import SGLang
from pagedsim.sglang.hicache import USES_TO_WRITE, HiCache, WritePolicy
from pagedsim.sglang.radix import RadixMemory
from pagedsim.sglang.storage import PrefetchSettings, StoredHiCache


@dataclass(frozen=True, kw_only=True)
class HiCacheOffload(Offload):
    """SGLang 0.5's hierarchical cache; sizes are those of each GPU."""

    ratio: float = 2.0
    """Blocks of the host tier for each of the GPU's."""
    gib: float | None = None
    """Host memory, in place of `ratio`."""
    blocks: int | None = None
    """Blocks of the host tier, in place of both."""
    write_policy: WritePolicy = "write_through"
    storage: Mapping[str, Any] | None = None
    """A storage below the host tier, as a driver makes it; None, or a `gib` of 0: there is none."""
    prefetch: PrefetchSettings | Mapping[str, Any] = field(default_factory=PrefetchSettings)
    """How prompts are fetched from there."""

    def __post_init__(self) -> None:
        require_number("ratio", self.ratio, above=0)
        if self.gib is not None:
            require_number("gib", self.gib, above=0)
        if self.blocks is not None:
            require_whole("blocks", self.blocks, 1)
        if self.write_policy not in USES_TO_WRITE:
            raise unknown("write_policy", str(self.write_policy), USES_TO_WRITE)
        if self.storage is not None and not isinstance(self.storage, Mapping):
            raise ConfigError(f"storage={shown(self.storage)}: must be a mapping of settings")
        _ = self.prefetching  # refuses what is wrong

    @property
    def prefetching(self) -> PrefetchSettings:
        """`prefetch` as an object."""
        if isinstance(self.prefetch, PrefetchSettings):
            return self.prefetch
        if not isinstance(self.prefetch, Mapping):
            raise ConfigError(f"prefetch={shown(self.prefetch)}: must be a mapping of settings")
        refuse_settings("a prefetch", self.prefetch, PrefetchSettings, "prefetch")
        return PrefetchSettings(**self.prefetch)

    def sized(self, block_size: int, block_bytes: float) -> HiCacheOffload:
        if self.blocks is not None or self.gib is None:
            return self
        if not (blocks := int(self.gib * GIB // block_bytes)):
            takes = block_bytes / GIB
            raise ConfigError(f"gib={self.gib:g}: must hold a block, which takes {takes:.3g} GiB")
        return replace(self, blocks=blocks)

    def memory(
        self, kind: type[Memory], batching: Batching, settings: Mapping[str, Any], groups: int
    ) -> HiCache:
        if not isinstance(batching, SGLang):
            raise ConfigError(
                f"offload: hicache is of batching=sglang, not of {type(batching).__name__}"
            )
        if kind is not RadixMemory:
            raise ConfigError(f"offload: hicache needs memory=radix, not {kind.__name__}")
        blocks, size = settings["blocks"], settings["block_size"]
        if self.blocks is not None:
            host = self.blocks * groups
        elif self.gib is not None:
            raise ConfigError("gib: needs a model, by whose blocks it is divided; or set blocks")
        else:
            host = int(self.ratio * blocks * size) // size + 1
        settings = {**settings, "host_blocks": host, "write_policy": self.write_policy}
        if self.storage is None or self.storage.get("gib") == 0:
            return HiCache(**settings)
        return StoredHiCache(**settings, prefetch=self.prefetching)
