"""What is offloaded to host memory, as a server is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pagedsim.core.errors import ConfigError, require_number, require_whole, shown, unknown
from pagedsim.core.memory import Memory
from pagedsim.core.offload.connector import OffloadConnector
from pagedsim.core.offload.lower import LowerTier
from pagedsim.core.offload.prices import LoadPrices

if TYPE_CHECKING:
    from pagedsim.core.batching import Batching

GIB = 1 << 30
LOADS = ("always", "cheaper")
"""Whether all that is in host memory and below is loaded, or what is cheaper than to compute it."""


@dataclass(frozen=True)
class Offload:
    """Nothing is: the base of all else."""

    def sized(self, block_size: int, block_bytes: float) -> Offload:
        """The same with a size in chunks, for a GPU whose blocks have so many tokens and bytes."""
        return self

    def connector(self, block_size: int, groups: int = 1) -> OffloadConnector | None:
        """A new connector for the scheduler of so many groups of GPUs."""
        return None

    def memory(
        self, kind: type[Memory], batching: Batching, settings: Mapping[str, Any], groups: int
    ) -> Memory | None:
        """The memory of so many groups that it takes in place of one of this kind with these
        settings; None: that one."""
        return None

    def note(self, block_size: int, longest: int) -> str | None:
        """What one should know of the settings, where requests have up to `longest` tokens."""
        return None


@dataclass(frozen=True, kw_only=True)
class VLLMOffload(Offload):
    """vLLM 0.33's connector; sizes are those of each GPU."""

    gib: float = 64.0
    """Host memory."""
    chunks: int | None = None
    """In place of `gib`."""
    chunk_tokens: int | None = None
    """Tokens of a chunk; None: those of a block."""
    eviction: str = "lru"
    store_threshold: int = 0
    tracked_chunks: int = 64_000
    prompt_only: bool = True
    sync_tokens: int = 0
    protect_promoted: bool = False
    load: str | LoadPrices = "always"
    """One of `LOADS`; a driver puts its prices in the place of `cheaper`."""
    tiers: Any = field(default_factory=dict)  # compiled, a type would be asked for before the line
    """Below host memory: settings by name, in whose place a driver puts a tuple of `LowerTier`."""

    def __post_init__(self) -> None:
        require_number("gib", self.gib, 0)
        for name in ("chunks", "chunk_tokens"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value, 1)
        if not (self.load in LOADS or hasattr(self.load, "load_seconds")):
            raise unknown("load", str(self.load), LOADS)
        lower = isinstance(self.tiers, tuple) and all(isinstance(t, LowerTier) for t in self.tiers)
        if not (lower or isinstance(self.tiers, Mapping)):
            raise ConfigError(f"tiers={shown(self.tiers)}: must be a mapping of names to settings")
        self._connector(1, 1, ())  # refuses what is wrong with the others

    def blocks_per_chunk(self, block_size: int) -> int:
        tokens = block_size if self.chunk_tokens is None else self.chunk_tokens
        if tokens % block_size:
            raise ConfigError(
                f"chunk_tokens={tokens}: must be a multiple of block_size={block_size}"
            )
        return tokens // block_size

    def sized(self, block_size: int, block_bytes: float) -> VLLMOffload:
        blocks = self.blocks_per_chunk(block_size)
        if self.chunks is not None:
            return self
        chunks = int(self.gib * GIB // (blocks * block_bytes))
        if not chunks:
            takes = blocks * block_bytes / GIB
            raise ConfigError(f"gib={self.gib:g}: must hold a chunk, which takes {takes:.3g} GiB")
        return replace(self, chunks=chunks)

    def connector(self, block_size: int, groups: int = 1) -> OffloadConnector:
        if self.chunks is None:
            raise ConfigError("offload: needs chunks, or a model, by whose blocks gib is divided")
        if self.load == "cheaper":
            raise ConfigError("offload.load=cheaper: must be always, or in the simulator")
        tiers = self.tiers
        if isinstance(tiers, Mapping):
            for name, tier in tiers.items():
                if tier is not None and not (isinstance(tier, Mapping) and tier.get("gib") == 0):
                    raise ConfigError(f"offload.tiers.{name}: must be null, or in the simulator")
            tiers = ()
        return self._connector(self.chunks * groups, self.blocks_per_chunk(block_size), tiers)

    def _connector(
        self, chunks: int, blocks_per_chunk: int, tiers: tuple[LowerTier, ...]
    ) -> OffloadConnector:
        return OffloadConnector(
            chunks,
            blocks_per_chunk=blocks_per_chunk,
            eviction=self.eviction,
            store_threshold=self.store_threshold,
            tracked_chunks=self.tracked_chunks,
            prompt_only=self.prompt_only,
            sync_tokens=self.sync_tokens,
            protect_promoted=self.protect_promoted,
            tiers=tiers,
            prices=None if isinstance(self.load, str) else self.load,
        )

    def note(self, block_size: int, longest: int) -> str | None:
        chunks = longest // (block_size * self.blocks_per_chunk(block_size))
        if self.store_threshold < 2 or self.tracked_chunks >= chunks:
            return None
        return (
            f"offload.tracked_chunks={self.tracked_chunks}: a request of {longest} tokens has "
            f"{chunks} chunks; those that are not counted are never stored"
        )
