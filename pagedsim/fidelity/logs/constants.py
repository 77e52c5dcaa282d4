"""The constants that a log is fitted with, and what is known of them without it.

A log cannot tell a slow host from slow reading of weights, and what is taken for the other is wrong
for the next model. But tables of kernels decide what a GPU reaches of its data sheet, so that such
constants hardly move from those of its family, and the rest is what the log tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pagedsim.sim.hardware import FAMILIES

FRONT = "front_ms"
"""Time from a request's arrival until the scheduler has it: HTTP, tokenising, queueing."""
MEANING = {
    "compute_efficiency": "FLOP/s, of the data sheet's",
    "bandwidth_efficiency": "bytes/s of weights",
    "cache_efficiency": "bytes/s of keys and values",
    "bus_efficiency": "bytes/s over the bus",
    "interconnect_efficiency": "bytes/s between GPUs",
    "host_step_ms": "the host, a step",
    "host_request_us": "and a sequence of it",
    "block_tokens": "finding a block, as reading",
    FRONT: "to the scheduler, a request",
}
UNITS = {"_efficiency": "share", "_ms": "ms", "_us": "µs", "_tokens": "tokens"}

TIED = {"attention_efficiency": "compute_efficiency"}
"""Constants that are moved with another, since latencies of requests cannot tell them apart."""
KERNELS = {f"{name}_efficiency": name for name in ("compute", "attention", "bandwidth", "cache")}
"""Constants that belong to the GPU, each with its field of a `Family`."""

Constants = Mapping[str, float]
"""The roofline's by their keywords, and FRONT."""

TABLES = 0.03
"""Log-difference of a kernel's constant from its family's that is likely: tokens of models and GPUs
that the families were not fitted to are so far off in the median (docs/fidelity.md).

With this, `HOST` and `PATH` logs predict those of other models and GPUs best: vLLM 0.11's of
Llama-2-7B and CodeLlama-34B one another, vLLM 0.19's on RTX 4090 and RTX PRO 6000 one another.
Half or twice as much of each changed errors of the means by less than a point, with the roofline's
laws of products before those of `Family`."""
HOST, GRAIN = {"host_step_ms": 0.15}, {"host_step_ms": 1.0}
"""Likewise of what a stack's version decides, and the host's CPU moves, both with this much more of
it: it may be nothing."""
PATH = 1.0
"""Likewise of all else, such as what a sequence or the way to the scheduler takes: a factor of
three."""


class Constant(NamedTuple):
    """A constant of a fit."""

    name: str

    @property
    def share(self) -> bool:
        """Whether it is a share of a data sheet's number, and so at most 1."""
        return self.name.endswith("_efficiency")

    @property
    def unit(self) -> str:
        return next((unit for end, unit in UNITS.items() if self.name.endswith(end)), "")

    @property
    def meaning(self) -> str:
        return MEANING.get(self.name, self.name.replace("_", " "))

    def seconds(self, value: float) -> float:
        """The quantity that step times are linear in: for a share its inverse."""
        return 1.0 / value if self.share else value

    def width(self, family: str | None) -> float:
        """Log-difference from the beginning that is likely on a GPU of this family.

        On a GPU without tables kernels may be as far from the mean as those of families are.
        """
        if self.name not in KERNELS:
            return HOST.get(self.name, PATH)
        if family is not None:
            return TABLES
        return float(np.std(np.log([getattr(of, KERNELS[self.name]) for of in FAMILIES.values()])))

    @property
    def grain(self) -> float:
        """What is added to `seconds` before logarithms are taken."""
        return GRAIN.get(self.name, 0.0)

    @property
    def least(self) -> float:
        """The least that `seconds` can be."""
        return 1.0 if self.share else 0.0

    def held(self, seconds: float) -> float:
        """The value of `seconds`, clipped to its bound."""
        return self.seconds(max(seconds, self.least))
