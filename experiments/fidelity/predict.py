"""Predict a log by a fit to another, of other load, limits, model or GPU, or by no fit at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.panels import Panel, Points, draw_panels
from pagedsim.fidelity.logs import report
from pagedsim.fidelity.logs.consistency_checks import inconsistencies, load_over_time
from pagedsim.fidelity.logs.fit import cold_start
from pagedsim.fidelity.logs.log import read_log
from pagedsim.fidelity.logs.server import ExternalServer, Fit, Served
from pagedsim.report.figures import FigureSpec
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study

QUANTITIES = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "kv": "KV memory, %",
    "ttft": "TTFT, s",
    "e2e": "E2E, s",
}
UNFITTED = "none"
"""`fit=` for the constants of `cost=` as they are."""
DRAWN = 80
"""Measured values that are drawn of each."""


def panels(series: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """One panel per quantity."""

    def line(kind: str, name: str, every: int = 1) -> Points:
        latency = name in ("ttft", "e2e")
        times = series[kind]["arrived" if latency else "times"]
        return times[::every], series[kind][name][::every]

    drawn = []
    for name, y in QUANTITIES.items():
        every = max(len(series["measured"][name]) // DRAWN, 1)
        lines = {"simulated": line("simulated", name)}
        dots = {"simulated": line("measured", name, every)}
        drawn.append(Panel(lines=lines, published=dots, x="seconds", y=y))
    return drawn


@dataclass(frozen=True)
class Predict(Study):
    """A server log, simulated with constants fitted to another log, or with those of `cost=`."""

    asks = False
    backends = ("sim",)
    one_server = True
    why = "the log is of a server elsewhere"

    title: str
    question: str
    fit: str | None = None
    requests: Any = None
    format: str = "auto"
    columns: Mapping[str, str] | None = None

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        if self.fit is None or not isinstance(self.requests, str):
            raise ConfigError(
                "fit, requests: both must be given: fit=<folder of an experiment=calibrate "
                f"requests=> or fit={UNFITTED}, requests=<the log to predict>"
            )
        if self.fit != UNFITTED:
            Fit.load(self.fit)
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        assert self.fit is not None and self.requests is not None
        fit = None if self.fit == UNFITTED else Fit.load(self.fit)
        log = read_log(self.requests, self.format, self.columns)
        server = ExternalServer(runs.config, log)
        constants = {} if fit is None else fit.of(server)
        by = "no fit" if fit is None else f"what was fitted to {fit.source}"
        served = server.serve_with(constants)
        scores, cold = {"all": served.score()}, cold_start(log, served.latencies)
        if cold.requests:
            scores["all but the cold"] = served.score(np.arange(cold.requests, len(log)))
        drawn = drawn_over_time(server, served)
        return Analysis(
            finding=[
                f"{len(log)} requests of {log.path.name}, predicted with {by}, against measured "
                f"means: {report.mean_errors(scores['all'])}.",
            ],
            listings=[
                listing
                for part, score in scores.items()
                for listing in (report.spreads(part, score), report.errors(part, score))
            ],
            notes=[
                *(fit.doubts(server, served) if fit else server.built.cost.notices),
                *inconsistencies(server, served, constants),
                *report.about_log(server, served, cold, scores["all"], "requests"),
            ],
            data={
                "fit": fit and fit.source,
                "requests": log.path.name,
                "fitted_for": fit and fit.server,
                "server": server.facts,
                "constants": constants,
                **report.data(served, scores),
                "over_time": drawn,
            },
            drawings={
                "over_time": FigureSpec(
                    "Measured and simulated over time",
                    "Circles are what the log's requests say of their server, lines the same of "
                    "the simulated one: requests in memory, and by their lengths its utilisation. "
                    "Latencies stand where their request came.",
                    partial(draw_panels, panels(drawn), 2),
                )
            },
            table=report.table(scores),
        )


def drawn_over_time(server: ExternalServer, served: Served) -> dict[str, Any]:
    """Measured and simulated load and latencies over time, both computed from requests."""
    log, latencies = server.log, served.latencies
    if log.latencies.queue is None:
        latencies = replace(latencies, queue=None)  # to be told as the measured ones are
    return {
        name: {
            key: values.tolist()
            for key, values in {
                **load_over_time(log, of, server.built.scheduler),
                "arrived": log.arrived,
                "ttft": of.ttft,
                "e2e": of.e2e,
            }.items()
        }
        for name, of in (("measured", log.latencies), ("simulated", latencies))
    }
