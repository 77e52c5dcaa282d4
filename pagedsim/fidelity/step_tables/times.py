"""Named constants of stacks, and predictions for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.sheets import option_names, stack_named
from pagedsim.fidelity.step_tables.schedule import Schedule
from pagedsim.fidelity.step_tables.tables import Cell, Metric
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack


@dataclass(frozen=True)
class Constants:
    """Constants of serving stacks; a name is a stack's and the constant's, such as
    `vllm-0.12.host_step_ms`."""

    stacks: Mapping[str, Stack]

    @classmethod
    def standing(cls) -> Constants:
        """The constants that simulations use."""
        return cls({name: stack_named(name) for name in sorted(option_names("stack"))})

    def __getitem__(self, name: str) -> float:
        stack, _, field = name.rpartition(".")
        value: float = getattr(self.stacks[stack], field)
        return value

    def but(self, values: Mapping[str, float]) -> Constants:
        """These constants with some values changed; KeyError for an unknown stack."""
        stacks = dict(self.stacks)
        for name, value in values.items():
            stack, _, field = name.rpartition(".")
            changed: dict[str, Any] = {field: value}
            stacks[stack] = replace(stacks[stack], **changed)
        return Constants(stacks)

    def cost_of(self, replica: Replica, stack: str) -> Roofline:
        """The cost model of a replica under one of the stacks."""
        return Roofline(replica, stack=self.stacks[stack])


# -- predictions -----------------------------------------------------------------------------------

Floats = NDArray[np.float64]


class StepTimes(Protocol):
    """What is asked of a cost model: those of `cost=roofline` and `cost=measured` answer it."""

    server_seconds: float

    def seconds_of(self, steps: Floats, ahead: NDArray[np.bool_] | bool = False) -> Floats:
        """Seconds of steps, a row each."""


CostOf = Callable[[Replica, str], StepTimes]
"""The cost model of a replica under a stack of this name."""


class Point(NamedTuple):
    """One measured number, and a prediction of it."""

    cell: Cell
    metric: Metric
    mark: str
    """Why the server could not run the row as the table says, if it could not."""
    predicted: float = nan

    @property
    def measured(self) -> float:
        return self.cell.measured[self.metric]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class _Server:
    """The rows of one server, with their steps in one table."""

    replica: Replica
    stack: str
    totals: Floats
    ahead: NDArray[np.bool_]
    rows: NDArray[np.int64]
    """Steps of each term of the sums, grouped by point."""
    weights: Floats
    begins: NDArray[np.int64]
    """Where each point's terms begin."""
    served: Floats
    """1 for a point that has a request's way through the server in it."""
    places: NDArray[np.int64]
    """Index of each point among all points."""

    def seconds(self, cost: StepTimes) -> Floats:
        terms = cost.seconds_of(self.totals, self.ahead)[self.rows] * self.weights
        summed: Floats = np.add.reduceat(terms, self.begins)
        return summed + self.served * cost.server_seconds


class Points:
    """All measured points, in one order."""

    def __init__(self, rows: Iterable[tuple[Cell, Schedule]]) -> None:
        self.all: list[Point] = []
        by_server: dict[tuple[Replica, str], list[tuple[int, Cell, Schedule]]] = {}
        for cell, schedule in rows:
            key = cell.replica, cell.stack
            by_server.setdefault(key, []).append((len(self.all), cell, schedule))
            self.all += [Point(cell, metric, schedule.mark) for metric in cell.measured]
        self._servers = [_joined(*key, of) for key, of in by_server.items()]
        self.measured = np.array([point.measured for point in self.all])

    def predicted(self, cost_of: CostOf) -> Floats:
        """Predicted seconds of each point by a cost model."""
        predictions = np.empty(len(self.all))
        for server in self._servers:
            predictions[server.places] = server.seconds(cost_of(server.replica, server.stack))
        return predictions

    def scored(self, cost_of: CostOf) -> list[Point]:
        """All points with a cost model's predictions."""
        both = zip(self.all, self.predicted(cost_of).tolist(), strict=True)
        return [point._replace(predicted=seconds) for point, seconds in both]


def _joined(replica: Replica, stack: str, rows: Sequence[tuple[int, Cell, Schedule]]) -> _Server:
    steps, weights, begins, served, places = [], [], [], [], []
    above = terms = 0
    for place, cell, schedule in rows:
        for at, metric in enumerate(cell.measured):
            weight = schedule.weights[metric]
            counting = np.flatnonzero(weight)
            steps.append(counting + above)
            weights.append(weight[counting])
            begins.append(terms)
            terms += len(counting)
            served.append(float(metric in ("ttft", "e2e")))
            places.append(place + at)
        above += len(schedule.totals)
    return _Server(
        replica,
        stack,
        np.concatenate([schedule.totals for _, _, schedule in rows]),
        np.concatenate([schedule.ahead for _, _, schedule in rows]),
        np.concatenate(steps),
        np.concatenate(weights),
        np.array(begins),
        np.array(served),
        np.array(places),
    )
