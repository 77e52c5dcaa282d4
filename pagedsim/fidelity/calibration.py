"""Step times fitted to a log of steps: coefficients, and residuals by kind and range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.fidelity.engine_model import data_sheet
from pagedsim.fidelity.recorded import StepLog, predicted
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed
from pagedsim.sim.cost import Fitted, Roofline
from pagedsim.sim.cost.fitting import KINDS, STALL, Sample, fit_kinds

UNITS = {
    "constant": ("ms", 1e3, "a step"),
    "prefill_tokens": ("µs", 1e6, "a token of a prompt"),
    "prefill_attention": ("ns", 1e9, "a token of a prompt and one it attends to"),
    "prefill_context": ("µs", 1e6, "a token that prompts attend to"),
    "decode_count": ("µs", 1e6, "a sequence that decodes"),
    "decode_context": ("ns", 1e9, "a token that decodes attend to"),
}
SWAP_UNITS = {"constant": ("µs", 1e6, "a swap"), "blocks": ("µs", 1e6, "a block swapped, one way")}


def fitted(log: StepLog) -> Fitted:
    """The fit; raises ConfigError for a log that is too short."""
    machine = log.machine
    source = f"{log.source}: {machine['device']}, {machine['model']}, {machine['dtype']}"
    try:
        ahead = bool(machine.get("async_scheduling"))
        return Fitted.fit(log.samples, log.replica, source=source, ahead=ahead)
    except ConfigError as error:
        raise ConfigError(f"{log.source}: too short to fit: {error}") from error


class Calibration:
    """A fit, with its residuals on the steps that it was made from."""

    def __init__(self, log: StepLog, cost: Fitted) -> None:
        self.log, self.cost = log, cost
        self.fits = fit_kinds(log.samples)
        mine = [predicted(cost, sample) for sample in log.samples]
        roofline = Roofline(log.replica)
        sheet = [predicted(roofline, sample) for sample in log.samples]
        self.rest, self.sheet = residuals(log.samples, mine), residuals(log.samples, sheet)
        self.weakest = weakest(log.samples, mine)

    @property
    def title(self) -> str:
        machine = self.log.machine
        return (
            f"{len(self.log.samples)} steps of {self.log.source}: {machine['device']}, "
            f"{machine['model']}, {machine['dtype']}, blocks of {machine['block_size']} tokens"
        )

    def notes(self) -> Iterator[str]:
        machine, hardware = self.log.machine, self.log.replica.hardware.name
        if data_sheet(machine) is None:
            yield (
                f"there is no data sheet of {machine['device']}: hardware={hardware}, as "
                "configured, stands for it"
            )
        for kind in ("prefill", "decode"):
            if kind not in self.fits:
                why = "too few steps to fit: they take what the same work takes in mixed ones"
                yield f"{kind}: {why}"
        if not self.cost.settings["swap"]:
            yield "swaps: too few to fit: they take what the hardware's data sheet says"
        if (weak := self.weakest) is not None:
            yield (
                f"weakest: {weak.kind} steps with {weak.feature} of {weak.low:,.0f} to "
                f"{weak.high:,.0f}: {percent(abs(weak.total))} "
                f"{'too long' if weak.total > 0 else 'too short'} ({weak.steps} steps)"
            )

    def data(self) -> dict[str, Any]:
        return {
            "coefficients": self._coefficients,
            "unit": "s",
            "leave_one_out": {kind: fit.error for kind, fit in self.fits.items()},
            "residuals": {kind: residual._asdict() for kind, residual in self.rest.items()},
            "roofline": {kind: residual.total for kind, residual in self.sheet.items()},
            "weakest": self.weakest and self.weakest._asdict(),
        }

    def table(self) -> list[dict[str, object]]:
        return [
            {"kind": kind, "coefficient": name, "seconds": value}
            for kind, values in self._coefficients.items()
            for name, value in values.items()
        ]

    @property
    def _coefficients(self) -> dict[str, dict[str, float]]:
        return {kind: dict(self.cost.settings[kind] or {}) for kind in (*KINDS, "swap")}

    def listings(self) -> list[Listing]:
        """Coefficients, and errors of each kind of step."""
        kinds = [kind for kind in KINDS if kind in self.fits]
        coefficients, rows = self._coefficients, []
        for name, (unit, scale, meaning) in UNITS.items():
            values = {kind: coefficients[kind].get(name) for kind in kinds}
            cells = {k: "" if v is None else f"{v * scale:,.4g} {unit}" for k, v in values.items()}
            rows.append({"each": meaning, **cells})
        for name, value in coefficients["swap"].items():
            unit, scale, meaning = SWAP_UNITS[name]
            cells = {**dict.fromkeys(kinds, ""), kinds[0]: f"{value * scale:,.4g} {unit}"}
            rows.append({"each": meaning, **cells})
        errors = [
            {
                "": kind,
                "steps": f"{residual.steps:,}",
                "leave one out": self.fits[kind].percent if kind in self.fits else "–",
                "half are within": percent(residual.median),
                "90 % within": percent(residual.p90),
                "in all": signed(residual.total),
                "stalled": percent(residual.stalled),
                f"roofline of {self.log.replica.hardware.name}": signed(self.sheet[kind].total),
            }
            for kind, residual in self.rest.items()
        ]
        return [Listing.of(self.title, rows), Listing.of("How far off", errors)]


# -- residuals -------------------------------------------------------------------------------------

RANGES = 4
"""Number of ranges into which the values of a feature are cut, for each kind of step."""
FEWEST = 0.05
"""A range with a smaller share of a kind's steps is not judged."""


class Residual(NamedTuple):
    """Errors of the predicted times of one kind of step."""

    steps: int
    total: float
    """Predicted over measured time of all of them, less 1; a stalled step's counts as in a fit."""
    median: float
    """Of |predicted / measured - 1|, step by step."""
    p90: float
    stalled: float
    """The share of their measured time that is beyond the stall limit."""


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
    """Residuals for each kind of step; `seconds` are the predicted times."""
    return {
        kind: _residual(np.array([samples[i].seconds for i in rows]), np.array(seconds)[rows])
        for kind, rows in _by_kind(samples).items()
    }


def weakest(samples: Sequence[Sample], seconds: Sequence[float]) -> Weakest | None:
    """The range of a feature with the largest total error; None if all ranges have too few
    steps."""
    ranges = []
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
                    residual = _residual(measured[inside], every[rows][inside])
                    reach = float(values[inside].min()), float(values[inside].max())
                    ranges.append(Weakest(kind, feature, *reach, int(inside.sum()), residual.total))
    return max(ranges, key=lambda weak: abs(weak.total), default=None)


def _by_kind(samples: Sequence[Sample]) -> Mapping[str, list[int]]:
    """Rows of each kind of step; steps with swaps are a kind of their own."""
    kinds: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        kinds.setdefault("swap" if sample.swaps else sample.kind, []).append(row)
    return {kind: kinds[kind] for kind in (*KINDS, "swap") if kind in kinds}


def _residual(measured: np.ndarray, seconds: np.ndarray) -> Residual:
    counted = np.minimum(measured, STALL * np.maximum(seconds, np.finfo(float).tiny))
    errors = np.abs(seconds / measured - 1)
    return Residual(
        len(measured),
        float(seconds.sum() / counted.sum() - 1),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(1 - counted.sum() / measured.sum()),
    )
