"""Calibrate: fit step times in milliseconds to engine measurements, or constants to a server's log.

For a log, the simulator serves its requests with one set of constants after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is compared with times that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.logs import report
from pagedsim.fidelity.logs.consistency_checks import inconsistencies
from pagedsim.fidelity.logs.constants import Constant
from pagedsim.fidelity.logs.fit import LogFit, fit_to_logs
from pagedsim.fidelity.logs.log import read_log
from pagedsim.fidelity.logs.server import ExternalServer, Fit
from pagedsim.fidelity.logs.trials import Part
from pagedsim.fidelity.recorded import log_of, recorded_runs
from pagedsim.fidelity.step_grid import profiled
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.run import RunSpec
from pagedsim.user_error import shown


@dataclass(frozen=True)
class Calibrate(Study):
    """Fit `cost=fitted` to recorded steps, to a profile, or to the log of an external server."""

    asks = False

    title: str
    question: str
    run: str | None = None
    requests: str | None = None
    split: float = 0.5

    def __post_init__(self) -> None:
        require_number("split", self.split, above=0, below=1)
        if self.run is not None and self.requests is not None:
            raise ConfigError("run, requests: only one of them can be fitted to")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        if self.run is None and self.requests is None and not RunSpec(runs.config).backend.alone:
            raise ConfigError(
                "run: must be given: run=<folder of an earlier study on the engine>, "
                "requests=<log of a server elsewhere>, or backend=engine to profile it"
            )
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        if self.requests is not None:
            return read_external(runs, self.requests, self.split)
        if self.run is None:
            log = profiled(runs.config, runs.config["seed"])
        else:
            recorded = recorded_runs(self.run)
            some = "1 run" if len(recorded) == 1 else f"{len(recorded)} runs"
            log = log_of(recorded, f"{some} under {shown(Path(self.run).absolute())}")
        cost = fitted(log)
        path = runs.spec.folder / "cost.json"
        cost.save(path)
        calibrated = Calibration(log, cost)
        return Analysis(
            finding=[f"Step times are fitted to {calibrated.title}."],
            listings=calibrated.listings(),
            notes=list(calibrated.notes()),
            data={"source": log.source, "machine": log.machine} | calibrated.data(),
            table=calibrated.table(),
            used={"use it": f"cost=fitted cost.path={shown(path)}"},
        )


# -- logs ------------------------------------------------------------------------------------------

NEEDED = 20
"""Minimum number of requests to fit to."""


def read_external(runs: Runs, requests: str, split: float) -> Analysis:
    """Fit to the first `split` of the log `requests`, and predict the rest."""
    log = read_log(requests)
    known = round(split * len(log))
    if known < NEEDED or known == len(log):
        raise ConfigError(
            f"{log.path}: study.split={split:g} fits to {known} of its {len(log)} "
            f"requests: must be at least {NEEDED}, and leave some to predict"
        )
    server = ExternalServer(runs.config, log)
    log_fit = fit_to_logs([Part(server, np.arange(known))])
    # The others are served by one whole simulation, so that they find the queue and the memory as
    # the fitted left them.
    served, before = (server.serve_with(of) for of in (log_fit.constants, log_fit.begin))
    (cold,) = log_fit.cold
    first = cold.requests
    parts = {"fitted": np.arange(first, known), "unseen": np.arange(known, len(log))}
    scores = {name: served.score(rows) for name, rows in parts.items()}
    scores |= {f"{name}, before the fit": before.score(rows) for name, rows in parts.items()}

    path = runs.spec.folder / "fit.json"
    largest = server.serve_with(log_fit.constants, first=known).largest
    loose = [name for name, interval in log_fit.ranges.items() if not interval.decided]
    fit = Fit(dict(log_fit.constants), server.facts, largest, log.path.name, loose)
    fit.save(path)
    words = server.words(log_fit.constants, list(log_fit.ranges))
    return Analysis(
        finding=[
            f"{scores['unseen'].count} requests whose times no fit has seen, predicted against "
            f"measured means: {report.mean_errors(scores['unseen'])}.",
            f"{log.path.name}: {len(log)} requests within {log.arrived[-1]:.1f} s, answered after "
            f"{(log.arrived + log.latencies.e2e).max():.1f} s; fitted by {log_fit.simulations} "
            f"simulations, requests are {100 * log_fit.distance:.1f} % off on average, and were "
            f"{100 * log_fit.before:.1f} % off before.",
        ],
        listings=[
            *([report.constants(log_fit)] if log_fit.ranges else []),
            *(
                report.errors(part, scores[part])
                for part in ("fitted", "unseen", "unseen, before the fit")
            ),
        ],
        notes=[
            *inconsistencies(server, served, log_fit.begin),
            *report.about_fit(log_fit, scores),
            *report.about_log(server, served, cold, scores["unseen"], "unseen"),
        ],
        data={
            "requests": fit.source,
            "server": fit.server,
            "split": split,
            "constants": {name: _constant(log_fit, name) for name in log_fit.constants},
            "words": words,
            "cold": cold._asdict(),
            "simulations": log_fit.simulations,
            "distance": log_fit.distance,
            "before": log_fit.before,
            **report.data(served, scores),
        },
        table=report.table(scores),
        used={
            "another log": f"experiment=predict fit={shown(path)} requests=...",
            "simulate": words,
        },
    )


def _constant(fit: LogFit, name: str) -> dict[str, Any]:
    interval = fit.ranges.get(name)
    return {
        "meaning": Constant(name).meaning,
        "unit": Constant(name).unit,
        "value": fit.constants[name],
        "before": fit.begin[name],
        "range": interval and interval._asdict() | {"decided": interval.decided},
    }
