"""Calibrate from outside: step times from nothing but when requests came, began and ended.

The simulator serves the log's requests with one set of coefficients after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is held against times that no fit has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.fidelity.external_fit import Found, fitted
from pagedsim.fidelity.external_log import Log, read_log
from pagedsim.fidelity.external_report import UNITS, say
from pagedsim.fidelity.external_score import Scores, score
from pagedsim.fidelity.external_server import Served, Twin
from pagedsim.metrics.files import write_json
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.folder import kept_configuration
from pagedsim.user_error import shown

NEEDED = 20
"""Requests to fit to: four coefficients from fewer would be chance."""


@dataclass(frozen=True)
class Outside(Errand):
    """Fit `cost=fitted` to the log `requests`, to its first `split`; predict the rest."""

    requests: str | None
    split: float = 0.5

    def __post_init__(self) -> None:
        require_number("study.split", self.split, above=0, high=1)
        if self.split == 1:
            raise ConfigError("study.split=1: must be below 1, or nothing is left to predict")

    def perform(self, folder: Path) -> None:
        if self.requests is None:
            raise ConfigError("requests: must be given: requests=<log of a server's requests>")
        log = read_log(self.requests)
        known = self._known(log)
        twin = Twin(kept_configuration(folder), log)
        before = twin.serve_unfitted()
        found = fitted(twin, known)
        # What may be known of steps is what the fitted requests saw; the others are served by
        # one whole simulation, so that they find the queue and the memory as the fitted left them.
        seen, whole = twin.serve(found.weights, first=known), twin.serve(found.weights)
        source = f"request times of {log.path.name}"
        cost = twin.cost(found.weights, limits=seen.largest, fitted_for=twin.server, source=source)
        cost.save(folder / "cost.json")
        rows = np.arange(len(log))
        scores = {
            "fitted": score(log, whole.latencies, rows[:known]),
            "unseen": score(log, whole.latencies, rows[known:]),
            "unseen, before the fit": score(log, before.latencies, rows[known:]),
        }
        write_json(folder / "calibrate.json", self._content(twin, found, scores, whole))
        say(log, found, scores, whole, twin.guessed_blocks)
        print(f"results   {shown(folder / 'calibrate.json')}")
        print(f"use it    cost=fitted cost.path={shown(folder / 'cost.json')}")

    def _known(self, log: Log) -> int:
        """How many requests are fitted."""
        known = round(self.split * len(log))
        if known < NEEDED or known == len(log):
            raise ConfigError(
                f"{log.path}: study.split={self.split:g} fits to {known} of its {len(log)} "
                f"requests: must be at least {NEEDED}, and leave some to predict"
            )
        return known

    def _content(
        self, twin: Twin, found: Found, scores: dict[str, Scores], whole: Served
    ) -> dict[str, Any]:
        return {
            "requests": twin.log.path.name,
            "command": command([*typed("requests="), f"requests={twin.log.path.name}"]),
            "server": twin.server,
            "split": self.split,
            "coefficients": {
                name: {
                    "meaning": meaning,
                    "unit": unit,
                    "value": getattr(found.weights, name) * scale,
                    "before": getattr(found.begin, name) * scale,
                    "firmness": found.firmness.get(name),
                }
                for name, (meaning, unit, scale) in UNITS.items()
            },
            "simulations": found.simulations,
            "distance": found.distance,
            "scores": {part: one.content() for part, one in scores.items()},
            "simulated": {"steps": whole.steps, "preemptions": whole.preemptions},
        }
