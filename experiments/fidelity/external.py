"""Calibrate to a server elsewhere: step times from when requests came, began and ended.

The simulator serves the log's requests with one set of coefficients after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is held against times that no fit has seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.fidelity import external_report as report
from pagedsim.fidelity.external_fit import Found, fitted
from pagedsim.fidelity.external_log import Log, read_log
from pagedsim.fidelity.external_score import Scores, score
from pagedsim.fidelity.external_server import ExternalServer, Served
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading
from pagedsim.user_error import shown

NEEDED = 20
"""Requests to fit to: four coefficients from fewer would be chance."""


def read_external(runs: Runs, requests: str, split: float) -> Reading:
    """Fit `cost=fitted` to the first `split` of the log `requests`, and predict the rest."""
    log = read_log(requests)
    known = _known(log, split)
    server = ExternalServer(runs.config, log)
    before = server.serve_unfitted()
    found = fitted(server, known)
    # What may be known of steps is what the fitted requests saw; the others are served by
    # one whole simulation, so that they find the queue and the memory as the fitted left them.
    seen, whole = server.serve(found.weights, first=known), server.serve(found.weights)
    source = f"request times of {log.path.name}"
    cost = server.cost(found.weights, limits=seen.largest, fitted_for=server.facts, source=source)
    path = runs.command.folder / "cost.json"
    cost.save(path)
    rows = np.arange(len(log))
    scores = {
        "fitted": score(log, whole.latencies, rows[:known]),
        "unseen": score(log, whole.latencies, rows[known:]),
        "unseen, before the fit": score(log, before.latencies, rows[known:]),
    }
    return Reading(
        finding=_finding(log, found, scores),
        listings=[
            report.coefficients(found),
            *(report.errors(part, one) for part, one in scores.items()),
        ],
        notes=list(report.notes(log, found, scores, whole, server.guessed_blocks)),
        data=_data(server, split, found, scores, whole),
        table=report.table(scores),
        used={"use it": f"cost=fitted cost.path={shown(path)}"},
    )


def _known(log: Log, split: float) -> int:
    """How many requests are fitted."""
    known = round(split * len(log))
    if known < NEEDED or known == len(log):
        raise ConfigError(
            f"{log.path}: study.split={split:g} fits to {known} of its {len(log)} "
            f"requests: must be at least {NEEDED}, and leave some to predict"
        )
    return known


def _finding(log: Log, found: Found, scores: dict[str, Scores]) -> list[str]:
    unseen = scores["unseen"]
    off = ", ".join(
        f"{metric.upper()} {100 * error.mean:+.1f} %" for metric, error in unseen.errors.items()
    ).replace("-", "−")
    return [
        f"{unseen.count} requests whose times no fit has seen, predicted against measured means: "
        f"{off}.",
        f"{log.path.name}: {len(log)} requests within {log.arrived[-1]:.1f} s, answered after "
        f"{(log.arrived + log.latencies.e2e).max():.1f} s; fitted by {found.simulations} "
        f"simulations, requests are {100 * found.distance:.1f} % off on average.",
    ]


def _data(
    server: ExternalServer, split: float, found: Found, scores: dict[str, Scores], whole: Served
) -> dict[str, Any]:
    return {
        "requests": server.log.path.name,
        "server": server.facts,
        "split": split,
        "coefficients": {
            name: {
                "meaning": meaning,
                "unit": unit,
                "value": getattr(found.weights, name) * scale,
                "before": getattr(found.begin, name) * scale,
                "firmness": found.firmness.get(name),
            }
            for name, (meaning, unit, scale) in report.UNITS.items()
        },
        "simulations": found.simulations,
        "distance": found.distance,
        "scores": {part: one.content() for part, one in scores.items()},
        "simulated": {"steps": whole.steps, "preemptions": whole.preemptions},
    }
