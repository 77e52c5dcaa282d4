"""Whole logs of servers, simulated with step times that nobody has fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.fidelity.external_log import Log, read_log
from pagedsim.fidelity.external_score import Scores, score
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed
from pagedsim.run.backend import Settings
from pagedsim.run.compose import Command

ROOT = Path(__file__).parents[2]


class ServerLog(NamedTuple):
    """A log, and the configuration of its server."""

    name: str
    config: Settings
    log: Log

    def scores(self) -> Scores:
        """All of its requests, simulated."""
        served = ExternalServer(self.config, self.log).serve()
        return score(self.log, served.latencies, np.arange(len(self.log)))


def read_logs(logs: Mapping[str, Mapping[str, Any]], command: Command) -> list[ServerLog]:
    """Those that a study lists: each with the file `requests` and the overrides `server`."""
    found = []
    for name, of in logs.items():
        where = f"study.logs.{name}"
        if set(of) != {"requests", "server"}:
            raise ConfigError(f"{where}: has {', '.join(of)}: must have requests, server")
        config = command.configured(where, list(of["server"]))
        path = Path(str(of["requests"])).expanduser()
        found.append(ServerLog(name, config, read_log(path if path.exists() else ROOT / path)))
    return found


def logs_listing(scores: Mapping[str, Scores]) -> Listing:
    """How far the means of each log are off."""
    rows = [
        [
            f"{name}: {metric.upper()}",
            f"{one.count:,}",
            f"{error.measured.mean:.4g} s",
            f"{error.predicted.mean:.4g} s",
            signed(error.off.mean),
            percent(error.half),
        ]
        for name, one in scores.items()
        for metric, error in one.errors.items()
    ]
    head = ["log", "requests", "measured mean", "predicted", "off", "half within"]
    note = "the server's limits and blocks are known, its step times are as cost=roofline has them"
    return Listing("Whole logs, before any fit", head, rows, note)
