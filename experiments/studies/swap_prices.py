"""Cost of preempting and resuming one sequence, by the simulator's cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.run.objects import make
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.base import step
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica


def require_prices(batch: Sequence[int], buses: Mapping[str, float]) -> None:
    """Raise ConfigError for decodes or buses that nothing can be priced beside or over."""
    if len(batch) != 2:
        raise ConfigError(f"batch={list(batch)}: must be two numbers: decodes, and their tokens")
    for count in batch:
        require_whole("batch", count, 1)
    if not buses:
        raise ConfigError("buses: must have at least one")
    for bus, rate in buses.items():
        require_number(f"buses.{bus}", rate, 1e-3)


class Price(NamedTuple):
    """Seconds for one sequence."""

    swap: float
    """Swap out and in."""
    recompute: float
    """Recomputation in a step of its own."""
    beside: float
    """Recomputation added to a step of decodes."""


class Priced:
    """The prices that a configuration gives; nothing is run.

    Block size, layout and bus may be others than the configuration's.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        block_size: int | None = None,
        layout: str | None = None,
        pcie_gb_s: float | None = None,
    ) -> None:
        memory = config["memory"]
        server = ServerSpec(
            block_size=block_size or memory["block_size"],
            kv_layout=layout or memory["kv_layout"],
            kv_cache_dtype=config["kv_cache_dtype"],
            tensor_parallel=config["tensor_parallel"],
        )
        hardware = make("hardware", config["hardware"], Hardware)
        if pcie_gb_s is not None:
            hardware = replace(hardware, pcie_gb_s=pcie_gb_s)
        model = make("model", config["model"], ModelShape)
        self.replica = Replica.of(server, model, hardware)
        self.cost = make("cost", config["cost"], CostModel, replica=self.replica)

    def __call__(self, tokens: int, decodes: int = 1, context: int = 0) -> Price:
        """The price of `tokens`, beside so many decodes that attend to so much in all."""
        blocks = -(-tokens // self.replica.block_size)
        beside = self.cost.step_seconds(step(tokens, decodes, context))
        return Price(
            self.cost.prices().swap_seconds(blocks),
            self.cost.recompute_seconds(tokens),
            beside - self.cost.decode_seconds(decodes, context),
        )
