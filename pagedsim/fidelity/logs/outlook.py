"""What a fit leaves open: steps of other models by constants that are as good."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.constants import Constants
from pagedsim.fidelity.logs.server import ExternalServer
from pagedsim.fidelity.sheets import model_named
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import signed
from pagedsim.sim.cost.base import milliseconds, step

SHAPES = ("llama-3.2-3b", "llama-2-7b", "codellama-34b", "llama-3.1-70b", "mixtral-8x7b")
"""Models of conf/model, whether or not the GPU has room for them."""
STEPS = {
    "1 token": {"decodes": 1, "context": 2048},
    "64 tokens": {"decodes": 64, "context": 64 * 2048},
    "prompt": {"prompt": 2048},
}
_NOTE = (
    "steps of other models on this server: one token after 2,048, of 64 requests each, and a "
    "prompt of 2,048; −/+: two standard deviations, by how sure the constants are together"
)


class Outlook(NamedTuple):
    """A step of a model; seconds."""

    model: str
    step: str
    fitted: float
    least: float
    most: float

    @property
    def text(self) -> str:
        ends = (signed(end / self.fitted - 1, 0, "") for end in (self.least, self.most))
        return f"{milliseconds(self.fitted)} {'/'.join(ends)} %"


def outlooks(
    server: ExternalServer, constants: Constants, ends: Sequence[Constants]
) -> list[Outlook]:
    """Steps of `SHAPES` that can be split as the server's model is; `ends`: of independent axes."""
    ahead, left_open = bool(server.config["server"]["async_scheduling"]), []
    plans = {name: step(**totals, ahead=ahead) for name, totals in STEPS.items()}
    for shape in SHAPES:
        with suppress(ConfigError):  # such as fewer heads than GPUs
            costs = [server.cost_of(model_named(shape), of) for of in (constants, *ends)]
            for name, plan in plans.items():
                fitted, *others = (cost.step_seconds(plan) for cost in costs)
                less, more = (side * (np.array(others) - fitted) for side in (-1, 1))
                far = [float(np.sqrt((np.maximum(d, 0.0) ** 2).sum())) for d in (less, more)]
                left_open.append(Outlook(shape, name, fitted, fitted - far[0], fitted + far[1]))
    return left_open


def listing(left_open: Sequence[Outlook]) -> list[Listing]:
    """The table of it, if there is any."""
    rows: dict[str, dict[str, str]] = {}
    for outlook in left_open:
        rows.setdefault(outlook.model, {"": outlook.model})[outlook.step] = outlook.text
    return [Listing.of("What the log leaves open", [*rows.values()], _NOTE)] if rows else []
