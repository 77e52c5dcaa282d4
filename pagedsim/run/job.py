"""One arm under one seed: configuration → objects → a run → tables on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pagedsim.core import Scheduler
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import further_percentiles
from pagedsim.metrics.files import write_run
from pagedsim.metrics.notice import Notice, as_records, notice_of
from pagedsim.metrics.steps import Batches, Steps
from pagedsim.metrics.summary import summarise
from pagedsim.run.backend import Settings
from pagedsim.run.failure import Failure, failure_of
from pagedsim.run.folder import full_disk_named
from pagedsim.run.needs import remarks
from pagedsim.run.parts import Parts, build
from pagedsim.run.stoppable import StoppableRecorder, Stopped


@dataclass(frozen=True)
class Job:
    """What a process needs to know to run one arm under one seed."""

    arm: str
    seed: int
    config: Settings
    folder: Path
    again: bool = False
    """Whether this is not the first seed of its arm."""
    repeat: int = 0
    """How often the same was served before."""

    @property
    def number(self) -> int:
        """Its seed; of what is served again, counted on from it."""
        return self.seed + self.repeat


@dataclass(frozen=True)
class Interrupted:
    """A run that was stopped; `folder` has what there was of it, None: it had not begun."""

    folder: Path | None = None


@dataclass(frozen=True)
class Repeated:
    """A run that was left out, since nothing in it depends on the seed."""


OVERLOAD = 0.05
"""The share of all requests that may be queued when the last one arrives, and nothing is said."""
FEW = 10
"""So many may be queued in any case."""

Outcome = Run | Failure | Interrupted | Repeated


def run_job(job: Job, recorder: StoppableRecorder) -> Outcome:
    """The run, or why there is none. `recorder` may be stopped from a signal handler."""
    parts = None
    try:
        parts = build(job.config, job.seed)
        if job.again and not parts.drawn:
            return Repeated()
        recorder.requests = len(parts.workload)
        parts.stage.run(parts.workload, recorder)
        with full_disk_named(job.folder):
            return _finish(job, parts, recorder)
    except Stopped:
        assert parts is not None
        _finish(job, parts, recorder, partial=True)
        return Interrupted(job.folder)
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        now = recorder.time if parts is not None else None
        return failure_of(error, job.config, now)


def _finish(job: Job, parts: Parts, recorder: StoppableRecorder, partial: bool = False) -> Run:
    """Make the tables and write them; who is still alive is in them as unfinished."""
    parts.stage.leave_off(recorder)
    requests, steps = recorder.requests_table(), recorder.steps()
    for name in parts.stage.unknown():
        place = requests.schema.get_field_index(name)
        nothing = pa.nulls(requests.num_rows, requests.schema.types[place])
        requests = requests.set_column(place, name, nothing)
    for name, values in parts.stage.step_columns().items():
        assert isinstance(steps, Steps)  # a fleet has none
        steps = steps.append_column(name, values)
    for name, values in parts.stage.request_columns(requests["request"].to_pylist()).items():
        requests = requests.append_column(name, values)
    summary = _summary(parts, job.config.get("study"), requests, steps, recorder.time)
    summary |= {"partial": partial, "notices": as_records(notices(parts, requests))}
    summary |= parts.stage.told()
    if facts := parts.stage.facts():
        summary["machine"] = facts
    write_run(job.folder, requests, steps, summary, recorder.preemptions_table())
    if not partial:
        parts.stage.leave(job.folder, parts.workload, requests)
    return Run(job.arm, job.number, job.folder, job.config, summary)


def _summary(
    parts: Parts, study: object, requests: pa.Table, steps: Batches, end: float
) -> Settings:
    """The summary, with all percentiles that the settings of the study name."""
    stage = parts.stage
    known: Settings = {"end": end, "slo": parts.slo, "reader": parts.reader}
    known["percentiles"] = further_percentiles(study)
    return summarise(requests, steps, **(known | stage.sizes() | dict(stage.work(steps))))


def notices(parts: Parts, requests: pa.Table) -> list[Notice]:
    """What a reader must know of the requests: what was cut, left out or rejected."""
    workload, rows = parts.workload, len(parts.workload)
    scheduler = parts.scheduler
    more = remarks(scheduler.policy, workload) if scheduler else ()
    told = (*workload.notices, *more)
    found = [notice_of(text) for text in (*told, *parts.stage.notices())]
    finished = requests.filter(pc.equal(requests["state"], "finished"))
    wanted = workload.output_len[np.asarray(finished["request"].to_numpy())]
    short = int(np.count_nonzero(np.asarray(finished["output_tokens"].to_numpy()) < wanted))
    if short:
        found.append(Notice(_cut(scheduler), short, rows))
    rejected = requests.filter(pc.equal(requests["state"], "rejected"))
    if rejected.num_rows:
        who, why = rejected["request"][0].as_py(), rejected["reason"][0].as_py()
        first = f"the first, {who}: {why}"
        found.append(Notice("requests were rejected", rejected.num_rows, rows, first))
    queued = _queued_at_the_end(requests) if workload.mode == "open" and scheduler else 0
    if queued > max(OVERLOAD * rows, FEW):
        cause = "an overload: latencies grow with the length of the run"
        if parts.stage.outages:
            cause = "an overload, or the work that outages of replicas left (fleet.failures)"
        what = f"requests had not begun when the last one arrived, {cause}"
        found.append(Notice(what, queued, rows))
    return found


def _cut(scheduler: Scheduler | None) -> str:
    """Why an answer is shorter than the workload says."""
    if scheduler is None:
        return "answers were shorter than they were asked to be: the server may not take ignore_eos"
    return f"answers were cut at max_model_len={scheduler.max_model_len} tokens"


def _queued_at_the_end(requests: pa.Table) -> int:
    """Requests that had not begun when the last one arrived."""
    arrival = np.asarray(requests["arrival"].to_numpy())
    scheduled = np.asarray(requests["scheduled"].to_numpy())
    served = np.asarray(pc.not_equal(requests["state"], "rejected"))
    return int(np.count_nonzero(served & ~(scheduled <= arrival.max(initial=-np.inf))))
