"""Fits that others made to their own measurements, as rows: what they say of a grid of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedsim.core import Request, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.step_tables.cell import Cell, Metric
from pagedsim.fidelity.step_tables.sheets import hardware_named, model_named, settings
from pagedsim.run.objects import make
from pagedsim.sim.cost import Fitted
from pagedsim.sim.replica import Replica

LENGTHS = (128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
ANSWER = 128
"""Tokens: the step of decodes is the one in the middle."""
STEP_TOKENS = 4096
"""Prompts of a step have so many tokens at most; nothing says that more were measured."""


def grid(table: str, name: str, stack: str) -> Iterator[Cell]:
    """Rows of the fit in conf/cost of that name."""
    words: Mapping[str, Any] = settings("cost", name)
    fitted_for = words["fitted_for"]
    model, hardware = model_named(fitted_for["model"]), hardware_named(fitted_for["hardware"])
    replica = Replica(model, hardware, fitted_for["tensor_parallel"])
    cost = make("cost", words, Fitted, replica=replica)
    for length in LENGTHS:
        for count in BATCHES:
            context = count * (length + ANSWER // 2)
            measured: dict[Metric, float] = {"token": cost.decode_seconds(count, context)}
            if count * length <= STEP_TOKENS:
                measured = {"prompt": cost.step_seconds(_prompts(count, length)), **measured}
            yield Cell(
                *(table, f"cost={name}", model, hardware, replica.tensor_parallel, stack),
                *("steps", length, ANSWER, count, measured),
            )


def _prompts(count: int, length: int) -> StepPlan:
    plan = StepPlan(0, 0.0)
    for number in range(count):
        plan.add_chunk(Chunk(Request(number, length), 0, length, samples=True))
    return plan
