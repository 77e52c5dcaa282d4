"""Build the tiers of memory=tiered, with links and prices, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pagedsim.build import EVICTIONS, make_eviction
from pagedsim.core import ConfigError, EvictionPolicy, Tier, TieredMemory, policy_validation
from pagedsim.core.errors import (
    refuse_settings,
    require_flag,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.server import ServerSpec
from pagedsim.sim.cost.base import CostModel, ModelledPrices
from pagedsim.sim.hardware import GIB
from pagedsim.sim.replica import Replica
from pagedsim.sim.tiers import Level, Link, Tiers, Way

LOADS = ("always", "cheaper")
"""Whether cached blocks below the GPU are always loaded, or only if cheaper than recomputing."""


@dataclass(frozen=True)
class TierSpec:
    """The configuration of a tier; sizes and rates are per GPU."""

    name: str
    gib: float = 0.0
    blocks: int | None = None
    """In place of `gib`; 0 of either disables the tier."""
    read_gb_s: float | None = None
    """None: the rate of the bus, which is also the maximum."""
    write_gb_s: float | None = None
    latency_us: float = 0.0
    eviction: str | EvictionPolicy | None = None
    """Name, path or object; None: that of the memory."""
    shared: bool = False
    """Whether identical replicas share one tier, of the size of one."""

    def __post_init__(self) -> None:
        where = f"tiers.{self.name}"
        for key in ("gib", "latency_us"):
            require_number(f"{where}.{key}", getattr(self, key), 0)
        if self.blocks is not None:
            require_whole(f"{where}.blocks", self.blocks, 0)
        for key in ("read_gb_s", "write_gb_s"):
            if (rate := getattr(self, key)) is not None:
                require_number(f"{where}.{key}", rate, above=0)
        if isinstance(self.eviction, str) and self.eviction not in EVICTIONS:
            raise unknown(f"{where}.eviction", self.eviction, EVICTIONS)
        require_flag(f"{where}.shared", self.shared)

    def size(self, replica: Replica) -> int:
        return int(self.gib * GIB // replica.block_bytes) if self.blocks is None else self.blocks

    def level(
        self, replica: Replica, cost: CostModel, eviction: str | EvictionPolicy = "lru"
    ) -> Level:
        """The tier with its link; `eviction` unless it has its own."""
        read, write = (self._way(rate, replica, cost) for rate in (self.read_gb_s, self.write_gb_s))
        order = make_eviction(self.eviction or eviction)
        return Level(Tier(self.name, self.size(replica), order), Link(read, write))

    def _way(self, gb_s: float | None, replica: Replica, cost: CostModel) -> Way:
        single, two = (
            policy_validation.seconds(cost, "swap_seconds", cost.swap_seconds(blocks))
            for blocks in (1, 2)
        )
        bus = two - single
        fixed = single - bus
        transfer = 0.0 if gb_s is None else replica.block_bytes / (gb_s * 1e9)
        return Way(max(self.latency_us * 1e-6, fixed), max(transfer, bus))


class Prices(ModelledPrices):
    """Recompute and load times for `TieredMemory`."""

    def __init__(self, cost: CostModel, tiers: Tiers) -> None:
        super().__init__(cost)
        self._tiers = tiers

    def load_seconds(self, level: int, blocks: int) -> float:
        """Seconds to load blocks from the tier of a level over an idle link."""
        return self._tiers.levels[level - 1].link.reading.seconds(blocks)


def tiered(
    server: ServerSpec, replica: Replica, cost: CostModel, beside: Tiers | None = None
) -> tuple[ServerSpec, Tiers | None]:
    """The server with its tiers, if it has memory=tiered.

    Shared tiers are taken from `beside`, those of an identical server.
    """
    if not issubclass(server.memory_class, TieredMemory):
        return server, None
    if server.cpu_blocks:
        raise ConfigError(
            f"cpu_blocks={server.cpu_blocks}: memory=tiered swaps to its tiers; "
            "set memory.tiers.cpu.blocks"
        )
    settings = dict(server.memory_settings)
    specs = _specs(settings.pop("tiers", {}))
    layerwise = require_flag("layerwise", settings.pop("layerwise", True))
    if (load := settings.pop("load", "always")) not in LOADS:
        raise unknown("load", str(load), LOADS)
    eviction = settings.get("eviction") or "lru"
    shared = {level.tier.name: level for level in beside.levels} if beside else {}
    tiers = Tiers(
        [
            shared[spec.name] if spec.shared and shared else spec.level(replica, cost, eviction)
            for spec in specs
            if spec.size(replica)
        ],
        replica.model.layers if layerwise else None,
    )
    if server.may_swap and not tiers.levels:
        raise ConfigError("tiers: must have at least one with gib or blocks, to swap to")
    settings["tiers"] = [level.tier for level in tiers.levels]
    settings["prices"] = Prices(cost, tiers) if load == "cheaper" else None
    return replace(server, memory_settings=settings, cpu_blocks=0), tiers


def _specs(tiers: Any) -> list[TierSpec]:
    """The specifications of tiers, in order; null removes one."""
    if not isinstance(tiers, Mapping):
        raise ConfigError(f"tiers={shown(tiers)}: must be a mapping of names to settings")
    specs = []
    for name, settings in tiers.items():
        where = f"tiers.{name}"
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where}={shown(settings)}: must be a mapping of settings, or null")
        given = {str(key): value for key, value in settings.items()}
        make = partial(TierSpec, str(name))
        refuse_settings("a tier", given, make, where)
        specs.append(make(**given))
    return specs
