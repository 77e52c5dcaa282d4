"""Predict a log that was not fitted: other load, other limits, another model on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.fidelity.external import scored
from experiments.fidelity.predict_drawing import draw
from pagedsim.core import ConfigError
from pagedsim.fidelity import external_report as report
from pagedsim.fidelity.external_cold import cold_start
from pagedsim.fidelity.external_course import Course, course_of_steps, read_course
from pagedsim.fidelity.external_file import Fit
from pagedsim.fidelity.external_log import Log, read_log
from pagedsim.fidelity.external_score import score
from pagedsim.fidelity.external_server import ExternalServer, Served
from pagedsim.fidelity.external_signs import signs
from pagedsim.report.figures import FigureSpec
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study

WARM = "all but the cold"


@dataclass(frozen=True)
class Predict(Study):
    """The log of a server elsewhere, simulated with constants that were fitted to another."""

    asks = False
    backends = ("sim",)
    one_server = True
    why = "the log is of a server elsewhere"

    title: str
    question: str
    fit: str | None = None
    requests: str | None = None
    timeseries: str | None = None

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        if self.fit is None or self.requests is None:
            raise ConfigError(
                "fit, requests: both must be given: fit=<folder of an experiment=calibrate "
                "requests=>, requests=<the log to predict>"
            )
        Fit.load(self.fit)
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        assert self.fit is not None and self.requests is not None
        fit, log = Fit.load(self.fit), read_log(self.requests)
        measured = None if self.timeseries is None else read_course(self.timeseries)
        constants = fit.of(ExternalServer(runs.config, log))
        done = scored(runs.config, log, constants)
        server, served, scores = done.server, done.served, dict(done.scores)
        cold = cold_start(log, served.latencies)
        if cold.requests:
            rest = np.arange(cold.requests, len(log))
            scores[WARM] = score(log, served.latencies, rest)
        drawn = _drawn(server, served, measured)
        return Analysis(
            finding=[
                f"{len(log)} requests of {log.path.name}, predicted with what was fitted to "
                f"{fit.source}, against measured means: {report.off(scores['all'])}.",
            ],
            listings=[
                listing
                for part, one in scores.items()
                for listing in (report.spreads(part, one), report.errors(part, one))
            ],
            notes=[
                *fit.doubts(server, served),
                *signs(server, served, constants),
                *report.about_log(
                    log, cold, scores["all"], "requests", served, server.guessed_blocks
                ),
            ],
            data={
                "fit": fit.source,
                "requests": log.path.name,
                "fitted_for": fit.server,
                "server": server.facts,
                "constants": dict(fit.constants),
                "scores": {part: one.content() for part, one in scores.items()},
                "simulated": {"steps": served.steps, "preemptions": served.preemptions},
                "over_time": drawn,
            },
            drawings={
                "over_time": FigureSpec(
                    "Measured and simulated over time",
                    _CAPTION[measured is not None],
                    partial(draw, drawn),
                )
            },
            table=report.table(scores),
        )


_CAPTION = {
    True: "Lines are the server's own counts, dashes those of the simulated one. Latencies stand "
    "where their request came.",
    False: "Lines are what the log's requests say of their server, dashes the same of the "
    "simulated one: who is in memory, and by the lengths how much of it is taken. Latencies stand "
    "where their request came.",
}


def _drawn(server: ExternalServer, served: Served, given: Course | None) -> dict[str, Any]:
    """The lines and the dots of the picture."""
    log, scheduler, found = server.log, server.scheduler, served.latencies
    if given is not None:
        measured, simulated = given, course_of_steps(served, scheduler)
    else:
        # Both by what the log has of each request, so that they count alike.
        asked = found if log.latencies.queue is not None else found.without_queue
        measured = Course.of(log, log.latencies, scheduler)
        simulated = Course.of(log, asked, scheduler)
    return {
        "measured": measured.content() | _dots(log, log),
        "simulated": simulated.content() | _dots(log, served),
    }


def _dots(log: Log, of: Log | Served) -> dict[str, list[float]]:
    latencies = of.latencies
    return {
        "arrived": log.arrived.tolist(),
        "ttft": latencies.ttft.tolist(),
        "e2e": latencies.e2e.tolist(),
    }
