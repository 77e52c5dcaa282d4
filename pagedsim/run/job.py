"""One arm under one seed: its objects, its run, its tables, or the reason for its failure."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from pickle import dumps, loads
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import pagedsim
from pagedsim.backends.base import StoppableRecorder, Stopped
from pagedsim.core import PagedsimError, Policy
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import further_percentiles
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import TABLES
from pagedsim.metrics.result import Notice, as_records, notice_of
from pagedsim.metrics.stability import backlogs
from pagedsim.metrics.steps import Batches, Since, Steps
from pagedsim.metrics.summary import summarise
from pagedsim.metrics.tables import WORKING_SET, Requests
from pagedsim.run.folder import full_disk_named
from pagedsim.run.parts import Parts, build, remarks
from pagedsim.spec.objects import classes_in, load_plugins, locate
from pagedsim.spec.run import Settings
from pagedsim.user_error import UserError, shown, verbose
from pagedsim.workload import Sessions, Workload
from pagedsim.workload.working_set import working_set


@dataclass(frozen=True)
class Arm:
    """Something to run: a name, and what it changes in the configuration."""

    name: str
    overrides: Sequence[str] = ()
    """As one would type them."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys and values, put in after the overrides."""
    seeds: Sequence[int] | None = None
    """None: those of the study."""
    first: int | None = None
    """The seed that is served in any case; others are left out where they would change nothing.
    None: the first of its seeds."""
    repeats: Sequence[int] = (0,)
    """The same requests, served once for each number: what chance on a real machine does."""
    series: str | None = None
    """What is compared where arms run under several conditions; None: its settings tell."""


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


@dataclass(frozen=True)
class Failure:
    """A run that failed."""

    reason: str
    """The same for all that failed alike."""
    trace: str = ""
    expected: bool = True
    """Whether the reason is complete; if not, the traceback is offered."""
    when: str = ""
    error: BaseException | None = field(default=None, compare=False, repr=False)
    """That of a user's code, if it was one."""

    def __str__(self) -> str:
        return self.reason + self.when

    def sendable(self) -> Failure:
        """As another process can have it: its error without frames, or none."""
        try:
            loads(dumps(self.error))
        except Exception:  # whatever its class raises
            return replace(self, error=None)
        return self

    def cause(self) -> BaseException | None:
        """The error to raise the failure from; of another process with the trace as its text."""
        if self.expected and self.error is None:
            return None
        if self.error is None or self.error.__traceback__ is None:
            trace = RemoteTrace(self.trace)
            if self.error is None:
                return trace
            self.error.__cause__ = trace
        return self.error


class RemoteTrace(Exception):
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f"in another process:\n{self.args[0]}"


Outcome = Run | Failure | Interrupted | Repeated

BEAMS = "the tokens of all beams count as output, in tokens/s and in tokens per joule and per euro"
SPREAD = "answers have tokens whose times are not known: ITL percentiles and QoE are approximate"


def run_job(job: Job, recorder: StoppableRecorder, parts: Parts | None = None) -> Outcome:
    """The run, or why there is none. `recorder` may be stopped from a signal handler.

    `parts` are the objects of the run, if it was built to be checked.
    """
    try:
        load_plugins(job.config["plugins"])
        parts = parts or build(job.config, job.seed)
        if job.again and not parts.drawn:
            return Repeated()
        recorder.requests = len(parts.workload)
        before = _generators()
        parts.run.run(parts.workload, recorder)
        drawn = _drawn_from(before) if parts.scheduler else None
        return _finish(job, parts, recorder, drawn=drawn)
    except Stopped:
        assert parts is not None
        _finish(job, parts, recorder, partial=True)
        return Interrupted(job.folder)
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        now = recorder.time if parts is not None else None
        return failure_of(error, job.config, now)


def _finish(
    job: Job,
    parts: Parts,
    recorder: StoppableRecorder,
    partial: bool = False,
    drawn: str | None = None,
) -> Run:
    """Write the tables; requests that are still alive are in them as unfinished. `drawn` is a note
    on numbers that hooks drew."""
    parts.run.leave_off(recorder)
    events: Settings = {name: table(recorder) for name, table in TABLES.items()}
    requests, steps = events.pop("requests"), events.pop("steps")
    if parts.scheduler:
        requests = _as_sent(requests, parts.workload)
        _refuse_early(requests, parts.scheduler.policy)
    for name in parts.run.unknown():
        place = requests.schema.get_field_index(name)
        nothing = pa.nulls(requests.num_rows, requests.schema.types[place])
        requests = requests.set_column(place, name, nothing)
    for name, values in parts.run.step_columns().items():
        assert isinstance(steps, Steps)  # a fleet has none
        steps = steps.append_column(name, values)
    for name, values in parts.run.request_columns(requests["request"].to_pylist()).items():
        requests = requests.append_column(name, values)
    if parts.scheduler and (touched := _working_set(requests, parts.workload)) is not None:
        requests = requests.append_column(WORKING_SET, touched)
    known: Settings = {"slo": parts.slo, "reader": parts.reader, "end": recorder.time}
    if (turns := parts.workload.turns) is not None:
        known["cut_sessions"] = _cut_sessions(requests, turns)
        if turns.warmup:
            requests, steps, events = _counted(turns.warmup, requests, steps, events)
    known |= {"percentiles": further_percentiles(job.config.get("study")), "events": events}
    known |= parts.run.sizes()
    if is_open := parts.workload.mode == "open":
        known["open_loop"] = True
    summary = summarise(requests, steps, **(known | dict(parts.run.work(steps))))
    judged = backlogs(Requests.of(requests), known.get("replicas", ())) if is_open else []
    summary["backlogs"] = list(map(asdict, judged))
    if parts.run.outages:
        summary["outages"] = True
    broken = map(notice_of, summary.get("broken_metrics", ()))
    noted = [*broken, *notices(parts, requests), *([Notice(drawn)] if drawn else [])]
    if spread := summary.get("spread_answers", 0):
        noted.append(Notice(SPREAD, spread, requests.num_rows))
    summary |= {"partial": partial, "notices": as_records(noted)}
    summary |= parts.run.extra_summary()
    if facts := parts.run.facts():
        summary["machine"] = facts
    with full_disk_named(job.folder):
        write_run(job.folder, requests, steps, summary, events)
        if not partial:
            parts.run.leave(job.folder, parts.workload, requests)
    return Run(job.arm, job.number, job.folder, job.config, summary)


def _counted(
    warmup: int, requests: pa.Table, steps: Batches, events: Settings
) -> tuple[pa.Table, Batches, Settings]:
    """The tables without what happened before the first request behind a warm-up of so many."""
    requests = requests.filter(pc.greater_equal(requests["request"], warmup))
    begin = pc.min(requests["arrival"]).as_py()
    steps = Since(steps, inf if begin is None else begin)
    for name, table in events.items():
        if "request" in table.column_names:
            events[name] = table.filter(pc.greater_equal(table["request"], warmup))
    return requests, steps, events


def _working_set(requests: pa.Table, workload: Workload) -> pa.Array | None:
    """The column `WORKING_SET`; None where requests are not known to share more than prefixes."""
    prompts = workload.prompts
    if prompts is None or (workload.turns is None and prompts.block is None):
        return None
    names = ("request", "scheduled", "finished", "output_tokens")
    rows, begin, end, output = (np.asarray(requests[name].to_numpy()) for name in names)
    end = np.where(np.isnan(end), np.inf, end)
    return pa.array(working_set(prompts, rows, begin, end, output))


def _cut_sessions(requests: pa.Table, turns: Sessions) -> frozenset[str]:
    """The sessions of which not all requests were sent."""
    unsent = np.delete(turns.session, np.asarray(requests["request"].to_numpy()))
    return frozenset(map(str, unsent.tolist()))


def notices(parts: Parts, requests: pa.Table) -> list[Notice]:
    """What a reader must know of the requests: what was cut, left out or rejected."""
    workload, rows = parts.workload, len(parts.workload)
    scheduler = parts.scheduler
    more = remarks(scheduler.policy, workload) if scheduler else ()
    remarked = (*workload.notices, *more)
    noted = [notice_of(text) for text in (*remarked, *parts.run.notices())]
    noted += _cut(parts, requests)
    rejected = requests.filter(pc.equal(requests["state"], "rejected"))
    if rejected.num_rows:
        who, why = rejected["request"][0].as_py(), rejected["reason"][0].as_py()
        first = f"the first, {who}: {why}"
        noted.append(Notice("requests were rejected", rejected.num_rows, rows, first))
    beams = sorted(
        {
            request.num_seqs
            for request in workload.asked
            if request.beam_search and request.num_seqs > 1
        }
    )
    if beams:
        noted.append(Notice(f"{BEAMS}: one beam is 1 of {', '.join(map(str, beams))}"))
    return noted


def _cut(parts: Parts, requests: pa.Table) -> Iterator[Notice]:
    """Why answers are shorter than the workload says, by the limit that they have reached."""
    finished = requests.filter(pc.equal(requests["state"], "finished"))
    wanted = parts.workload.output_len[np.asarray(finished["request"].to_numpy())]
    output = np.asarray(finished["output_tokens"].to_numpy())
    short = output < wanted
    lengths = (output + np.asarray(finished["prompt_tokens"].to_numpy()))[short]
    limits = parts.run.limits
    if not limits:
        what = "answers were shorter than they were asked to be: the server may not take ignore_eos"
        counts = {what: len(lengths)}
    else:
        every = np.sort(np.asarray(list(limits)))
        reached = every[np.maximum(np.searchsorted(every, lengths, side="right") - 1, 0)]
        counts = {
            f"answers were cut at max_model_len={limit} tokens{whose}": int(
                np.sum(reached == limit)
            )
            for limit, whose in limits.items()
        }
    return (Notice(what, count, len(parts.workload)) for what, count in counts.items() if count)


# -- what hooks must leave alone -------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """The states of the generators that a process has for all its code."""
    _, words, place, *_ = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy.random": (place, np.asarray(words).tobytes())}


def _drawn_from(before: Mapping[str, Any]) -> str | None:
    """A note, if hooks have drawn from one of the `_generators` since."""
    moved = [name for name, state in _generators().items() if state != before[name]]
    if not moved:
        return None
    return (
        f"hooks drew numbers from {' and '.join(moved)}: another run of the same seed gives other "
        "results; a policy takes them from state.draw(request, seed), other classes from a "
        "generator of their own with a setting `seed`"
    )


def _as_sent(requests: pa.Table, workload: Workload) -> pa.Table:
    """The table with what the workload says of its requests, whatever was done to the objects."""
    rows = np.asarray(requests["request"].to_numpy())
    known: dict[str, NDArray[Any]] = {"prompt_tokens": workload.prompt_len}
    known["priority"] = workload.priority
    if workload.mode != "closed" and workload.turns is None:  # else they arrive after an answer
        known["arrival"] = workload.arrival
    for name, values in known.items():
        place = requests.schema.get_field_index(name)
        column = pa.array(values[rows], requests.schema.types[place])
        requests = requests.set_column(place, name, column)
    return requests


def _refuse_early(requests: pa.Table, policy: Policy) -> None:
    """Raise PagedsimError for a latency below zero."""
    arrival = np.asarray(requests["arrival"].to_numpy())
    for name, what in (("first_token", "got its first token"), ("finished", "ended")):
        times = np.asarray(requests[name].to_numpy())
        if (early := times < arrival).any():
            row = int(early.argmax())
            raise PagedsimError(
                f"{type(policy).__name__}: request {requests['request'][row]} {what} at "
                f"{times[row]:.6g} s, before its arrival at {arrival[row]:.6g} s: its hooks "
                "must write to no request"
            )


# -- why it failed ---------------------------------------------------------------------------------


def error_of(failures: Mapping[str, Failure]) -> UserError:
    """A line for each failure, after whose it is; `hydra.verbose=true` prints tracebacks, too."""
    if verbose():
        for failure in failures.values():
            print(failure.trace, end="", file=sys.stderr)
    lines = lines_of(failures)
    expected = all(failure.expected for failure in failures.values())
    error = UserError(lines, expected=expected)
    error.__cause__ = next(filter(None, (failure.cause() for failure in failures.values())), None)
    return error


def lines_of(failures: Mapping[str, Failure]) -> list[str]:
    """A line for each, after whose it is."""
    return [f"{whose}: {failure}" if whose else str(failure) for whose, failure in failures.items()]


def failure_of(error: BaseException, config: Mapping[str, Any], now: float | None) -> Failure:
    """An error under a configuration as a failure; `now`: the simulated time at which it came, if
    any had passed."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, PagedsimError):
        return Failure(str(error), trace, error=_of_a_user(error))
    if isinstance(error, MemoryError):
        return Failure("there is not enough memory on this machine; simulate less", trace)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    when = "" if now is None else f" at {now:.6g} s of simulated time"
    places = list(_places(error))
    parts = list(_parts(config))
    for place in reversed(places):
        if part := _owner(parts, place[0]):
            text = f"{part.setting} failed: {what} ({_within(part, places, place)})"
            return Failure(text, trace, False, when, error)
    where = f" ({_at(*places[-1])})" if places else ""
    return Failure(what + where, trace, False, when, error)


def _of_a_user(error: BaseException) -> BaseException | None:
    """What a user's code raised, where one of our errors stands for it."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    places = list(_places(inner))
    if isinstance(inner, PagedsimError | ImportError) or not places:
        return None
    ours = Path(places[-1][0].co_filename).is_relative_to(Path(pagedsim.__file__).parent)
    return None if ours else inner


class _Part(NamedTuple):
    """A part of a run that users may write, and where its code is."""

    setting: str
    files: Mapping[str, str]
    """By the qualified names of its class and those that it derives from, ours left out."""


def _parts(config: Mapping[str, Any]) -> Iterator[_Part]:
    """The parts of a configuration whose code is not ours, and those of `policies`."""
    for setting, path in classes_in(config):
        if path.startswith("pagedsim.") and not path.startswith("pagedsim.policies."):
            continue
        try:
            maker = locate(path)
        except PagedsimError:
            continue  # it was never made
        bases = (
            kind
            for kind in getattr(maker, "__mro__", ())
            if kind.__module__.split(".")[0] not in ("pagedsim", "builtins", "abc")
        )
        names = {getattr(kind, "__qualname__", ""): _file(kind) for kind in (maker, *bases)}
        files = {name: file for name, file in names.items() if name and file}
        yield _Part(f"{setting}={path}", files)


def _file(kind: Any) -> str:
    """Where the code of a class or function is from, which in a notebook is no file."""
    module = sys.modules.get(str(getattr(kind, "__module__", "")))
    if file := getattr(module, "__file__", None):
        return str(file)
    functions = (kind, *vars(kind).values()) if isinstance(kind, type) else (kind,)
    codes = (getattr(function, "__code__", None) for function in functions)
    return next((code.co_filename for code in codes if code is not None), "")


def _owner(parts: Sequence[_Part], code: CodeType) -> _Part | None:
    """The part that a function is of: of several in one file, the one of its class."""
    candidates = [part for part in parts if code.co_filename in part.files.values()]
    kind = code.co_qualname.rpartition(".")[0]
    of_class = [part for part in candidates if part.files.get(kind) == code.co_filename]
    matching = of_class or candidates
    return matching[-1] if matching else None


def _within(
    part: _Part, places: Sequence[tuple[CodeType, int]], place: tuple[CodeType, int]
) -> str:
    """Where in a part an error was raised, and from which of its hooks."""
    outermost = next(code for code, _ in places if code.co_filename in part.files.values())
    through = "" if outermost is place[0] else f", called from {outermost.co_name}"
    return _at(*place) + through


def _places(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    """Where it came through, the innermost last; what it was raised from before itself."""
    if error.__traceback__ is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            yield frame.f_code, line
    if error.__cause__ is not None:
        yield from _places(error.__cause__)


def _at(code: CodeType, line: int) -> str:
    return f"{shown(Path(code.co_filename))}:{line}, in {code.co_name}"
