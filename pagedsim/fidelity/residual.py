"""How far a cost model is from recorded steps, and where it is farthest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pagedsim.sim.cost.fitting import KINDS, STALL, Sample

RANGES = 4
"""Parts that the steps of a kind are cut into, by each of what they have to do."""
FEWEST = 0.05
"""A range with a smaller share of a kind's steps tells nothing."""


class Residual(NamedTuple):
    """Of the steps of one kind."""

    steps: int
    total: float
    """Predicted over measured time of all of them, less 1; a stalled step's counts as in a fit."""
    median: float
    """Of |predicted / measured - 1|, step by step."""
    p90: float
    stalled: float
    """The share of their time in which the machine did something else."""


class Weakest(NamedTuple):
    """The range of steps that is predicted worst, all its steps together."""

    kind: str
    feature: str
    low: float
    high: float
    steps: int
    total: float
    """As in `Residual`."""


def residuals(samples: Sequence[Sample], seconds: Sequence[float]) -> dict[str, Residual]:
    """For each kind of step; `seconds` are what is predicted."""
    return {
        kind: _residual(np.array([samples[i].seconds for i in rows]), np.array(seconds)[rows])
        for kind, rows in _by_kind(samples).items()
    }


def weakest(samples: Sequence[Sample], seconds: Sequence[float]) -> Weakest | None:
    """Where predictions are farthest off; None where every range is too small to tell."""
    found = []
    every = np.array(seconds)
    for kind, rows in _by_kind(samples).items():
        measured = np.array([samples[i].seconds for i in rows])
        for feature in KINDS.get(kind, ("swapped_blocks",)):
            if feature == "constant":
                continue
            values = np.array([getattr(samples[i], feature) for i in rows], dtype=float)
            bounds = np.unique(np.quantile(values, np.linspace(0, 1, RANGES + 1)))
            for low, high in pairwise(bounds):
                inside = (values >= low) & ((values < high) | (high == bounds[-1]))
                if inside.sum() >= max(FEWEST * len(rows), 2):
                    one = _residual(measured[inside], every[rows][inside])
                    reach = float(values[inside].min()), float(values[inside].max())
                    found.append(Weakest(kind, feature, *reach, int(inside.sum()), one.total))
    return max(found, key=lambda one: abs(one.total), default=None)


def _by_kind(samples: Sequence[Sample]) -> Mapping[str, list[int]]:
    """Rows of each kind of step; those that moved blocks are a kind of their own."""
    kinds: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        kinds.setdefault("swap" if sample.swaps else sample.kind, []).append(row)
    return {kind: kinds[kind] for kind in (*KINDS, "swap") if kind in kinds}


def _residual(measured: np.ndarray, seconds: np.ndarray) -> Residual:
    counted = np.minimum(measured, STALL * np.maximum(seconds, np.finfo(float).tiny))
    off = np.abs(seconds / measured - 1)
    return Residual(
        len(measured),
        float(seconds.sum() / counted.sum() - 1),
        float(np.median(off)),
        float(np.quantile(off, 0.9)),
        float(1 - counted.sum() / measured.sum()),
    )
