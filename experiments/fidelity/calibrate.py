"""Calibrate: fit step times in milliseconds to engine measurements or server logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.fidelity.external import read_external
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.recorded import recorded_runs
from pagedsim.fidelity.step_grid import profiled
from pagedsim.fidelity.steplog import StepLog, log_of
from pagedsim.run.backend import RunConfig
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
        log = self._log(runs)
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

    def _log(self, runs: Runs) -> StepLog:
        if self.run is not None:
            recorded = recorded_runs(self.run)
            some = "1 run" if len(recorded) == 1 else f"{len(recorded)} runs"
            return log_of(recorded, f"{some} under {shown(Path(self.run).absolute())}")
        return profiled(runs.config, runs.config["seed"])
