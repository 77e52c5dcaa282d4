"""Bench: generate load on an external server, and record a log for `calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.fidelity.log_file import check_log, write_log
from pagedsim.run.http.backend import VLLM_BENCH
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName
from pagedsim.user_error import shown


@dataclass(frozen=True)
class Bench(Compare):
    """One workload against one server; `record` is where a log of its requests goes."""

    backends: ClassVar[Sequence[BackendName]] = ("http",)
    why: ClassVar[str] = "it is load on a server elsewhere"

    record: str | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        if self.record is None:
            return
        if len(jobs) > 1 or (seeds := jobs[0].config["seeds"]) > 1:
            which = f"{len(jobs)} arms" if len(jobs) > 1 else f"seeds={seeds}"
            raise ConfigError(f"record={self.record}: must be of one run, not of {which}")
        check_log(Path(self.record).expanduser())

    def analyse(self, runs: Runs) -> Analysis | None:
        reading = super().analyse(runs)
        if reading is None:
            return None
        (first, *_) = runs.in_order
        used = {"as vLLM's": shown(first.folder / VLLM_BENCH)}
        if self.record is not None:
            path = Path(self.record).expanduser()
            count = write_log(path, first.requests())
            used |= {
                "recorded": f"{count:,} requests: {shown(path)}",
                "fit to it": f"experiment=calibrate requests={shown(path)}, with the server's own "
                "model= and hardware=",
            }
        return replace(reading, used=used)
