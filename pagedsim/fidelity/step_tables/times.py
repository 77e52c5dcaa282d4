"""Named constants of the roofline, and predictions for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.sheets import option_names, stack_named
from pagedsim.fidelity.step_tables.schedule import Schedule
from pagedsim.fidelity.step_tables.tables import Cell, Metric
from pagedsim.sim.cost import Measured, Roofline
from pagedsim.sim.hardware import FAMILIES, OTHER, Family, Hardware
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

LINK = "link.interconnect_us"
"""The constant that data sheets in conf/hardware have for links between GPUs."""


@dataclass(frozen=True)
class Constants:
    """Constants by GPU family and by stack; a name is that of the family or stack and the
    constant's, such as `hopper.cache`."""

    families: Mapping[str, Family]
    stacks: Mapping[str, Stack]
    interconnect_us: float

    @classmethod
    def standing(cls) -> Constants:
        """The constants that simulations use."""
        stacks = {name: stack_named(name) for name in sorted(option_names("stack"))}
        return cls(FAMILIES, stacks, Hardware.interconnect_us)

    def __getitem__(self, name: str) -> float:
        if name == LINK:
            return self.interconnect_us
        owner, field = name.split(".")
        value: float = getattr(self.families.get(owner) or self.stacks[owner], field)
        return value

    def but(self, values: Mapping[str, float]) -> Constants:
        """These constants with some values changed; KeyError for an unknown name."""
        families, stacks = dict(self.families), dict(self.stacks)
        for name, value in values.items():
            owner, _, field = name.partition(".")
            if owner in families:
                families[owner] = families[owner]._replace(**{field: value})
            elif owner in stacks:
                changed: dict[str, Any] = {field: value}
                stacks[owner] = replace(stacks[owner], **changed)
            elif name != LINK:
                raise KeyError(f"{name}: no such constant")
        return Constants(families, stacks, values.get(LINK, self.interconnect_us))

    def cost_of(self, replica: Replica, stack: str) -> Roofline:
        """The cost model of a replica under one of the stacks."""
        name = replica.hardware.family
        family = OTHER if name is None else self.families[name]
        standing = replica.hardware.interconnect_us == Hardware.interconnect_us
        if standing and replica.tensor_parallel > 1:
            hardware = replace(replica.hardware, interconnect_us=self.interconnect_us)
            replica = replace(replica, hardware=hardware)
        return Roofline(replica, stack=self.stacks[stack], family=family)


# -- predictions -----------------------------------------------------------------------------------

Floats = NDArray[np.float64]

CostOf = Callable[[Replica, str], Roofline | Measured]
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
    rows: NDArray[np.int64]
    """Steps of each term of the sums, grouped by point."""
    weights: Floats
    begins: NDArray[np.int64]
    """Where each point's terms begin."""
    served: Floats
    """1 for a point that has a request's way through the server in it."""
    places: NDArray[np.int64]
    """Index of each point among all points."""

    def seconds(self, cost: Roofline | Measured) -> Floats:
        terms = cost.seconds_of(self.totals)[self.rows] * self.weights
        summed: Floats = np.add.reduceat(terms, self.begins)
        return summed + self.served * cost.server_seconds


class Points:
    """All measured points, in one order."""

    def __init__(self, rows: Iterable[tuple[Cell, Schedule]]) -> None:
        self.all: list[Point] = []
        by_server: dict[tuple[Replica, str], list[tuple[int, Cell, Schedule]]] = {}
        for cell, schedule in rows:
            key = (cell.replica, cell.stack)
            by_server.setdefault(key, []).append((len(self.all), cell, schedule))
            self.all += [Point(cell, metric, schedule.mark) for metric in cell.measured]
        self._servers = [_joined(*key, of) for key, of in by_server.items()]
        self.measured = np.array([point.measured for point in self.all])

    def predicted(
        self, cost_of: CostOf, only: Callable[[Replica, str], bool] | None = None
    ) -> Floats:
        """Predicted seconds of each point by a cost model; NaN for servers not in `only`."""
        predictions = np.full(len(self.all), np.nan)
        for server in self._servers:
            if only is None or only(server.replica, server.stack):
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
            served.append(float(metric == "ttft"))
            places.append(place + at)
        above += len(schedule.totals)
    return _Server(
        replica,
        stack,
        np.concatenate([schedule.totals for _, _, schedule in rows]),
        np.concatenate(steps),
        np.concatenate(weights),
        np.array(begins),
        np.array(served),
        np.array(places),
    )
