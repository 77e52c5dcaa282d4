"""The ways to compute a decode step, and how much of it there is to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from experiments.benchmarks.shapes import BASE, shape_of
from pagedsim.core import SamplingParams
from pagedsim.kernels.float8 import AUTO
from pagedsim.sim.model import ModelShape

DTYPE = "bfloat16"
CACHES = (AUTO, "fp8_e4m3")
IMPLEMENTATIONS = ("native", "transformers")
DRAWN = SamplingParams(temperature=0.8, top_p=0.95)
"""How tokens are drawn in the arm that draws. Random weights make flat distributions, so that more
tokens are left than with a model that was trained."""


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    shape: ModelShape
    batch: int
    context: int
    """Tokens of a request, on average over what is timed."""
    runs: int


TINY = Size(ModelShape("little", 2, 64, 4, 2, 16, 128, 512, 512), batch=3, context=60, runs=1)


def size_of(tiny: bool) -> Size:
    """What is measured on a GPU, or where sizes are tiny."""
    return TINY if tiny else Size(shape_of(BASE), batch=64, context=1024, runs=8)


class Arm(NamedTuple):
    """One way to compute a step."""

    cache: str
    model_impl: str
    graphs: bool
    ahead: bool = False
    sampled: bool = False
    """With DRAWN; the others are greedy."""

    def __str__(self) -> str:
        words = [self.model_impl, "graphs" if self.graphs else "kernel by kernel"]
        words += ["sampled"] * self.sampled + ["async_scheduling"] * self.ahead
        return ", ".join([*words, *([] if self.cache == AUTO else [self.cache])])

    def headline(self, graphs: bool) -> bool:
        """Whether bars are about it, where there are graphs or not."""
        return self.model_impl == "native" and self.graphs == graphs


def arms(graphs: bool) -> Iterator[Arm]:
    """All of them, those that bars are about first."""
    for cache in CACHES:
        for impl in IMPLEMENTATIONS:
            for graph in (True, False) if graphs else (False,):
                arm = Arm(cache, impl, graph)
                yield from (arm, arm._replace(ahead=True))
                if (cache, impl, graph) == (AUTO, "native", graphs):
                    yield from (arm._replace(ahead=ahead, sampled=True) for ahead in (False, True))
