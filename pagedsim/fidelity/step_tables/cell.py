"""A row of a table: one case of one server, and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica

Metric = Literal["prompt", "token", "latency", "ttft", "tpot"]
METRICS: Mapping[Metric, str] = {
    "prompt": "prompt step",
    "token": "token step",
    "latency": "batch",
    "ttft": "TTFT",
    "tpot": "TPOT",
}
"""What each is called on a page."""
Way = Literal["steps", "batch", "loop"]
"""How it was measured: a step of prompts and one of tokens; requests that all come at once; as many
requests at a time, each followed by another."""
SHORTEST = 0.8
"""Lengths of such a loop are drawn from this share of what its row says up to all of it."""


@dataclass(frozen=True)
class Cell:
    """Requests of one size on one server, all times in seconds."""

    table: str
    place: str
    """The file, and the line in it."""
    model: ModelShape
    hardware: Hardware
    tensor_parallel: int
    stack: str
    way: Way
    prompt: int
    output: int
    at_once: int
    measured: Mapping[Metric, float]

    @property
    def replica(self) -> Replica:
        """The model on its GPUs."""
        return Replica(self.model, self.hardware, self.tensor_parallel)

    @property
    def precision(self) -> str:
        """What its products are computed in."""
        return self.model.products

    def __str__(self) -> str:
        gpus = f"{self.tensor_parallel} × {self.hardware.name}"
        form = "" if self.precision == "fp16" else f" {self.precision}"
        sizes = f"{self.prompt:,} in, {self.output:,} out, {self.at_once} at once"
        return f"{self.model.name}{form} on {gpus}: {sizes}"
