"""Calibrate: fit step times in milliseconds to engine measurements, or constants to a server's log.

For a log, the simulator serves its requests with one set of constants after another, until its
latencies are nearest to those of the log. Only the first part of the requests is fitted; what the
simulator then says of the others is compared with times that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.experiments.fidelity.calibrate_logs import logs_of, read_one, read_several
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.recorded import log_of, recorded_runs
from pagedsim.fidelity.step_grid import profiled
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.run import RunSpec
from pagedsim.user_error import shown


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

    def analyse(self, runs: Runs) -> Analysis:
        if self.requests or self.logs:
            logs = logs_of(runs, self.requests, self.logs)
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
