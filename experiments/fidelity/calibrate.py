"""Calibrate: fit step times in milliseconds to engine measurements, or constants to a server's log.

For a log, the simulator serves its requests with one set of constants after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is compared with times that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.experiments.fidelity.truth_data import ServerLog, in_processes, read_logs
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.logs import outlook, report
from pagedsim.fidelity.logs.consistency_checks import inconsistencies
from pagedsim.fidelity.logs.constants import Constant
from pagedsim.fidelity.logs.fit import LogFit, cold_start, fit_to_logs
from pagedsim.fidelity.logs.log import read_log
from pagedsim.fidelity.logs.score import Scores
from pagedsim.fidelity.logs.server import ExternalServer, Fit, merged
from pagedsim.fidelity.logs.trials import Part
from pagedsim.fidelity.recorded import log_of, recorded_runs
from pagedsim.fidelity.step_grid import profiled
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.run import RunSpec
from pagedsim.user_error import shown

NEEDED = 20
"""Minimum number of requests to fit to."""


@dataclass(frozen=True)
class Calibrate(Study):
    """Fit `cost=fitted` to recorded steps or to a profile, or `cost=roofline` to logs of servers
    elsewhere."""

    asks = False

    title: str
    question: str
    run: str | None = None
    requests: Any = None
    """A log, or a list of logs of servers with the settings of the run."""
    format: str = "auto"
    columns: Mapping[str, str] | None = None
    logs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Logs with a file `requests` and overrides `server` each."""
    split: float = 0.5

    def __post_init__(self) -> None:
        require_number("split", self.split, above=0, below=1)
        sources = {"run": self.run, "requests": self.requests, "study.logs": self.logs or None}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{', '.join(given)}: only one of them can be fitted to")
        paths = [self.requests] if isinstance(self.requests, str) else self.requests or []
        if not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"requests={self.requests}: must be a file, or a list of files")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        nothing = self.run is None and not self.requests and not self.logs
        if nothing and not RunSpec(runs.config).backend.alone:
            raise ConfigError(
                "run: must be given: run=<folder of an earlier study on the engine>, "
                "requests=<log of a server elsewhere>, or backend=engine to profile it"
            )
        return ()

    def _server_logs(self, runs: Runs) -> list[ServerLog]:
        """The logs `requests`, one or several of one server, or those with servers of their own."""
        if self.logs:
            return read_logs(self.logs, runs.spec)
        paths = [self.requests] if isinstance(self.requests, str) else list(self.requests)
        logs = [read_log(path, self.format, self.columns) for path in paths]
        return [ServerLog(log.path.stem, runs.config, log) for log in logs]

    def analyse(self, runs: Runs) -> Analysis:
        if self.requests or self.logs:
            logs = self._server_logs(runs)
            several = len(logs) > 1
            return read_several(runs, logs) if several else read_one(runs, logs[0], self.split)
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


# -- logs of servers elsewhere ---------------------------------------------------------------------


def read_one(runs: Runs, server_log: ServerLog, split: float) -> Analysis:
    """Fit to the first `split` of the log, and predict the rest."""
    log = server_log.log
    known = round(split * len(log))
    if known < NEEDED or known == len(log):
        raise ConfigError(
            f"{log.path}: study.split={split:g} fits to {known} of its {len(log)} "
            f"requests: must be at least {NEEDED}, and leave some to predict"
        )
    server = ExternalServer(server_log.config, log)
    log_fit = fit_to_logs([Part(server, np.arange(known))])
    # The others are served by one whole simulation, so that they find the queue and the memory as
    # the fitted left them.
    served, before = (server.serve_with(of) for of in (log_fit.constants, log_fit.begin))
    (cold,) = log_fit.cold
    parts = {"fitted": np.arange(cold.requests, known), "unseen": np.arange(known, len(log))}
    scores = {name: served.score(rows) for name, rows in parts.items()}
    scores |= {f"{name}, before the fit": before.score(rows) for name, rows in parts.items()}
    return _analysis(
        runs,
        log_fit,
        [server],
        first=known,
        finding=[
            f"{scores['unseen'].count} requests whose times no fit has seen, predicted against "
            f"measured means: {report.mean_errors(scores['unseen'])}.",
            f"{log.path.name}: {len(log)} requests within {log.arrived[-1]:.1f} s, answered after "
            f"{(log.arrived + log.latencies.e2e).max():.1f} s",
        ],
        listings=[
            report.errors(part, scores[part])
            for part in ("fitted", "unseen", "unseen, before the fit")
        ],
        notes=[
            *inconsistencies(server, served, log_fit.begin),
            *report.worse(scores),
            *report.about_log(server, served, cold, scores["unseen"], "unseen"),
        ],
        data={"split": split, "cold": cold._asdict(), **report.data(served, scores)},
        table=report.table(scores),
    )


def read_several(runs: Runs, logs: Sequence[ServerLog]) -> Analysis:
    """Fit to all requests of all logs, and predict each log by a fit to the others."""
    for name, _, log in logs:
        if len(log) < NEEDED:
            raise ConfigError(f"{name}: {log.path} has {len(log)} requests: must have {NEEDED}")
    log_fit = _fitted(logs, ranges=True)
    servers = [ExternalServer(config, log) for _, config, log in logs]
    others = [[log for log in logs if log is not left] for left in logs]
    runs.say(f"fitted to {len(logs)} logs; each is left out in turn")
    scores: dict[str, Scores] = {}
    fits = in_processes(_fitted, others, runs.config["jobs"])
    for (name, *_), server, other, fit in zip(logs, servers, others, fits, strict=True):
        scores[f"{name}, fitted"] = _score(server, _fit_of(log_fit, servers))
        rest = [ExternalServer(config, log) for _, config, log in other]
        scores[f"{name}, left out"] = _score(server, _fit_of(fit, rest))
    left = {name: score for name, score in scores.items() if name.endswith("left out")}
    return _analysis(
        runs,
        log_fit,
        servers,
        finding=[
            *(
                f"{name}, predicted by the fit to the others, against measured means: "
                f"{report.mean_errors(score)}."
                for name, score in left.items()
            ),
            f"{sum(len(log) for *_, log in logs):,} requests of {len(logs)} logs",
        ],
        listings=[
            report.logs(
                "Each log by the fit to the others, and by the fit to all",
                scores,
                "means of all requests but those of a server just started",
            )
        ],
        notes=list(_contradictions(logs, servers, log_fit)),
        data={"scores": {part: score.content() for part, score in scores.items()}},
        table=report.table(scores),
    )


def _fitted(logs: Sequence[ServerLog], ranges: bool = False) -> LogFit:
    parts = [Part(ExternalServer(config, log), np.arange(len(log))) for _, config, log in logs]
    return fit_to_logs(parts, ranges)


def _score(server: ExternalServer, fit: Fit) -> Scores:
    """Errors of all requests but those of a cold server."""
    served = server.serve_with(fit.of(server))
    cold = cold_start(server.log, served.latencies)
    return served.score(np.arange(cold.requests, len(server.log)))


def _contradictions(
    logs: Sequence[ServerLog], servers: Sequence[ExternalServer], log_fit: LogFit
) -> Iterator[str]:
    for (name, *_), server in zip(logs, servers, strict=True):
        for line in inconsistencies(server, server.serve_with(log_fit.constants), log_fit.begin):
            yield f"{name}: {line}"


def _fit_of(log_fit: LogFit, servers: Sequence[ExternalServer], first: int | None = None) -> Fit:
    """What a fit tells of other servers; of each log `first` requests were fitted, None: all."""
    largest: dict[str, int] = {}
    for server in servers:
        for name, size in server.serve_with(log_fit.constants, first).largest.items():
            largest[name] = max(size, largest.get(name, 0))
    loose = [name for name, interval in log_fit.evidence.ranges.items() if not interval.decided]
    source = ", ".join(server.log.path.name for server in servers)
    facts = merged([server.facts for server in servers])
    return Fit(dict(log_fit.constants), facts, largest, source, loose)


def _analysis(
    runs: Runs,
    log_fit: LogFit,
    servers: Sequence[ExternalServer],
    *,
    finding: Sequence[str],
    listings: Collection[Any],
    notes: Sequence[str],
    data: Mapping[str, Any],
    table: list[dict[str, Any]],
    first: int | None = None,
) -> Analysis:
    """What is told of any fit, around what is told of one log or of several."""
    path = runs.spec.folder / "fit.json"
    fit = _fit_of(log_fit, servers, first)
    fit.save(path)
    told, server = log_fit.evidence, servers[0]
    words = server.words(log_fit.constants, list(told.ranges))
    left_open = outlook.outlooks(server, log_fit.constants, told.ends)
    return Analysis(
        finding=[
            *finding[:-1],
            f"{finding[-1]}; fitted by {log_fit.simulations} simulations, requests are "
            f"{100 * log_fit.distance:.1f} % off on average, and were {100 * log_fit.before:.1f} % "
            "off before.",
        ],
        listings=[
            *([report.constants(log_fit)] if told.ranges else []),
            *outlook.listing(left_open),
            *listings,
        ],
        notes=[*report.about_fit(log_fit), *notes],
        data={
            "requests": fit.source,
            "server": fit.server,
            "constants": {name: _constant(log_fit, name) for name in log_fit.constants},
            "pairs": [pair._asdict() for pair in told.pairs],
            "left_open": [step._asdict() for step in left_open],
            "words": words,
            "simulations": log_fit.simulations,
            "distance": log_fit.distance,
            "before": log_fit.before,
            **data,
        },
        table=table,
        used={
            "another log": f"experiment=predict fit={shown(path)} requests=...",
            "simulate": words,
        },
    )


def _constant(fit: LogFit, name: str) -> dict[str, Any]:
    interval = fit.evidence.ranges.get(name)
    return {
        "meaning": Constant(name).meaning,
        "unit": Constant(name).unit,
        "value": fit.constants[name],
        "before": fit.begin[name],
        "range": interval and interval._asdict() | {"decided": interval.decided},
    }
