"""Answers of other simulators for the rows of tables."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pagedsim.fidelity.step_tables.times import Point

PEERS = Path(__file__).parents[1] / "data" / "peers"
ASKED = {"columns": "AIConfigurator", "checkpoint": "AIConfigurator, checkpoint"}
"""How AIConfigurator was asked (experiments/data/README.md): with the quantisation that a row's
columns state, or with that of the checkpoint that was served."""


class Peer(NamedTuple):
    """A simulator, and its answers by the names of rows."""

    name: str
    seconds: Mapping[str, Mapping[str, float]]
    """TTFT and TPOT."""

    def predicted(self, point: Point) -> Point | None:
        """The point with this simulator's prediction; None without one."""
        times = self.seconds.get(point.cell.name)
        if times is None or point.metric not in ("ttft", "tpot", "e2e"):
            return None
        e2e = times["ttft"] + (point.cell.output - 1) * times["tpot"]
        return point._replace(predicted={**times, "e2e": e2e}[point.metric])


def peers_of(points: Sequence[Point]) -> list[Peer]:
    """Those that answer any of the rows."""
    names = {point.cell.name for point in points} - {""}
    answers: dict[str, dict[str, Mapping[str, float]]] = {asked: {} for asked in ASKED}
    for path in sorted(PEERS.glob("*.csv.gz")) if names else ():
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["id"] in names and row["ttft_ms"]:
                    times = {key: 1e-3 * float(row[f"{key}_ms"]) for key in ("ttft", "tpot")}
                    answers[row["asked"]][row["id"]] = times
    return [Peer(ASKED[asked], of_rows) for asked, of_rows in answers.items() if of_rows]
