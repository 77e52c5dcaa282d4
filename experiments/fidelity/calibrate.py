"""Calibrate: fit step times in milliseconds to engine measurements, or constants to a server's log.

For a log, the simulator serves its requests with one set of constants after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is compared with times that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.logs import report
from pagedsim.fidelity.logs.consistency_checks import signs
from pagedsim.fidelity.logs.fit import Found, fit_to_log
from pagedsim.fidelity.logs.log import Log, read_log
from pagedsim.fidelity.logs.score import Rows, Scores, score
from pagedsim.fidelity.logs.server import (
    Constant,
    Constants,
    ExternalServer,
    Fit,
    Served,
    constants_of,
    serve,
    words,
)
from pagedsim.fidelity.recorded import log_of, recorded_runs
from pagedsim.fidelity.step_grid import profiled
from pagedsim.run.backend import RunConfig, Settings
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
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
        if self.run is None and self.requests is None and not RunConfig(runs.config).backend.alone:
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
        path = runs.command.folder / "cost.json"
        cost.save(path)
        found = Calibration(log, cost)
        return Analysis(
            finding=[f"Step times are fitted to {found.title}."],
            listings=found.listings(),
            notes=list(found.notes()),
            data={"source": log.source, "machine": log.machine} | found.data(),
            table=found.table(),
            used={"use it": f"cost=fitted cost.path={shown(path)}"},
        )


# -- logs ------------------------------------------------------------------------------------------

NEEDED = 20
"""Minimum number of requests to fit to."""


@dataclass(frozen=True)
class Scored:
    """A log, simulated with given constants."""

    server: ExternalServer
    served: Served
    scores: Mapping[str, Scores]
    """By which requests: "all", or "fitted" and "unseen", and these "before the fit"."""


def scored(config: Settings, log: Log, constants: Constants | None = None) -> Scored:
    """Serve a log as `config` describes its server, and score all of it.

    Without `constants` as `cost=` has them.
    """
    server = ExternalServer(config, log)
    served = serve(server, constants_of(server) if constants is None else constants)
    return Scored(server, served, {"all": score(log, served.latencies, np.arange(len(log)))})


def fitted_and_scored(config: Settings, log: Log, split: float = 0.5) -> tuple[Found, Scored]:
    """Fit to the first `split` of a log's requests, and score both parts."""
    known = _known(log, split)
    server = ExternalServer(config, log)
    found = fit_to_log(server, known)
    # The others are served by one whole simulation, so that they find the queue and the memory as
    # the fitted left them.
    after, before = (serve(server, of) for of in (found.constants, found.begin))
    parts: dict[str, Rows] = {
        "fitted": np.arange(found.cold.requests, known),
        "unseen": np.arange(known, len(log)),
    }
    scores = {name: score(log, after.latencies, rows) for name, rows in parts.items()} | {
        f"{name}, before the fit": score(log, before.latencies, rows)
        for name, rows in parts.items()
    }
    return found, Scored(server, after, scores)


def read_external(runs: Runs, requests: str, split: float) -> Analysis:
    """Fit to the first `split` of the log `requests`, and predict the rest."""
    log = read_log(requests)
    found, done = fitted_and_scored(runs.config, log, split)
    server, scores = done.server, done.scores
    path = runs.command.folder / "fit.json"
    largest = serve(server, found.constants, first=_known(log, split)).largest
    loose = [name for name, one in found.ranges.items() if not one.decided]
    fit = Fit(dict(found.constants), server.facts, largest, log.path.name, loose)
    fit.save(path)
    return Analysis(
        finding=[
            f"{scores['unseen'].count} requests whose times no fit has seen, predicted against "
            f"measured means: {report.off(scores['unseen'])}.",
            f"{log.path.name}: {len(log)} requests within {log.arrived[-1]:.1f} s, answered after "
            f"{(log.arrived + log.latencies.e2e).max():.1f} s; fitted by {found.simulations} "
            f"simulations, requests are {100 * found.distance:.1f} % off on average, and were "
            f"{100 * found.before:.1f} % off before.",
        ],
        listings=[
            report.constants(found),
            *(
                report.errors(part, scores[part])
                for part in ("fitted", "unseen", "unseen, before the fit")
            ),
        ],
        notes=[
            *signs(server, done.served, found.begin),
            *report.about_fit(found, scores),
            *report.about_log(
                log, found.cold, scores["unseen"], "unseen", done.served, server.guessed_blocks
            ),
        ],
        data=_data(split, found, done, fit),
        table=report.table(scores),
        used={
            "another log": f"experiment=predict fit={shown(path)} requests=...",
            "simulate": words(server, found.constants, list(found.ranges)),
        },
    )


def _known(log: Log, split: float) -> int:
    known = round(split * len(log))
    if known < NEEDED or known == len(log):
        raise ConfigError(
            f"{log.path}: study.split={split:g} fits to {known} of its {len(log)} "
            f"requests: must be at least {NEEDED}, and leave some to predict"
        )
    return known


def _data(split: float, found: Found, done: Scored, fit: Fit) -> dict[str, Any]:
    return {
        "requests": fit.source,
        "server": fit.server,
        "split": split,
        "constants": {
            name: {
                "meaning": Constant(name).meaning,
                "unit": Constant(name).unit,
                "value": value,
                "before": found.begin[name],
                "range": one._asdict() | {"decided": one.decided}
                if (one := found.ranges.get(name))
                else None,
            }
            for name, value in found.constants.items()
        },
        "words": words(done.server, found.constants, list(found.ranges)),
        "cold": found.cold._asdict(),
        "simulations": found.simulations,
        "distance": found.distance,
        "before": found.before,
        "scores": {part: one.content() for part, one in done.scores.items()},
        "simulated": {"steps": done.served.steps, "preemptions": done.served.preemptions},
    }
