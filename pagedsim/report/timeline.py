"""A timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each arm has two processes: its requests, with a track of stages each, and its server, with a track
of steps, preemption marks and counters. Each replica of a fleet is one process with both. Times are
in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, count, pairwise
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.steps import CAME_FROM, REPLICA

REJECTED = "rejected"
WAITS_AGAIN, SWAPPED_OUT, AGAIN = "preempted", "swapped out", "prefill again"
"""Waiting for memory; waiting with swapped-out blocks; recomputing."""

Preemption = Mapping[str, Any]
"""A row of preemptions.parquet."""


class Stage(NamedTuple):
    """A stage of a request, in seconds."""

    name: str
    begin: float
    end: float
    preemption: Preemption | None = None
    """The preemption that caused it, if any."""


class Life(NamedTuple):
    """The stages and preemptions of one request."""

    stages: Sequence[Stage]
    preemptions: Sequence[Preemption]


def lives_of(run: Run, requests: pa.Table) -> list[Life]:
    """The stages of the given rows of a run's requests."""
    preemptions: dict[Any, list[Preemption]] = {}
    for row in run.events().to_pylist():
        preemptions.setdefault(row["request"], []).append(row)
    names, times = _known(run, requests)
    lives = []
    words = (requests[name].to_pylist() for name in ("request", "state"))
    for request, state, *moments in zip(*words, *times, strict=True):
        if state == REJECTED:
            lives.append(Life([Stage(REJECTED, moments[0], moments[-1])], ()))
            continue
        stages = [
            Stage(name, begin, end)
            for name, (begin, end) in zip(names, pairwise(moments), strict=True)
            if end > begin
        ]
        # Preemptions before a restart on another replica are dropped.
        mine = [event for event in preemptions.get(request, ()) if event["time"] >= moments[1]]
        lives.append(Life(_interrupted(stages, mine, moments[-1]), mine))
    return lives


def _known(run: Run, table: pa.Table) -> tuple[list[str], list[list[float]]]:
    """Names of the stages without preemptions, and their start times followed by the end."""
    known = ["arrival", "scheduled" if run.inside else "first_token", "first_token", "finished"]
    names = ["queued", "prefill", "decode"]
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64) for name in known}
    over = columns["finished"]
    over = np.where(np.isnan(over), run.end, over)
    times = [np.where(np.isnan(columns[name]), over, columns[name]) for name in known]
    if "boarded" in table.column_names:  # with migration between replicas
        moves = [np.asarray(table[name].to_numpy()) for name in ("left", "boarded")]
        times[3:3] = [np.where(np.isnan(move), times[2], move) for move in moves]
        names += ["on the way", "decode"]
    return names, [some.tolist() for some in times]


def _interrupted(
    stages: Sequence[Stage], preemptions: Sequence[Preemption], over: float
) -> Sequence[Stage]:
    """Insert preemptions into the stages of a request that ends at `over`."""
    next_times = [*(preemption["time"] for preemption in preemptions), over][1:]
    for preemption, until in zip(preemptions, next_times, strict=True):
        back, decoding = (
            until if isnan(time) else time
            for time in (preemption["back_at"], preemption["decoding_at"])
        )
        swapped = preemption["how"] == "swap"
        wait = Stage(SWAPPED_OUT if swapped else WAITS_AGAIN, preemption["time"], back, preemption)
        work = Stage("prefill" if swapped else AGAIN, back, decoding, preemption)
        stages = _overlaid(_overlaid(stages, wait), work)
    return stages


def _overlaid(stages: Sequence[Stage], over: Stage) -> Sequence[Stage]:
    """Replace the part of the stages that overlaps another stage."""
    if over.end <= over.begin:
        return list(stages)
    before = [stage._replace(end=min(stage.end, over.begin)) for stage in stages]
    after = [stage._replace(begin=max(stage.begin, over.end)) for stage in stages]
    return [
        *(stage for stage in before if stage.end > stage.begin),
        over,
        *(stage for stage in after if stage.end > stage.begin),
    ]


def cause_of(preemption: Preemption) -> str:
    """The cause of a preemption as text."""
    by = preemption["by"]
    if preemption["why"] == "displaced":
        return f"displaced by {by}, which is more urgent"
    room = "next block" if preemption["wanted"] == "block" else "prompt"
    if by is None:
        return f"memory: no room for its own {room}"
    return f"memory: room for the {room} of {by}"


REQUESTS = 500
STEPS = 6000
COUNTS = 2000
ARMS = 4
REPLICAS = 16

_STEP = (
    *("step", "start", "end", "prefill_tokens", "prefill_requests", "decode_seqs", "waiting"),
    *("used_blocks", "swap_out", "swap_in"),
)
"""Columns of a step in the timeline."""
_CAUSE = ("request", "by", "why", "wanted", "how")
"""Columns of a preemption in the timeline."""

Events = Iterator[str]
"""Events serialised as JSON."""

_text = json.JSONEncoder(separators=(",", ":")).encode


def write_timeline(
    study: Arms, path: Path, *, requests: int = REQUESTS, steps: int = STEPS, arms: int = ARMS
) -> Path:
    """Write the first seed of the first `arms` arms up to the caps; returns `path`."""
    events: list[str] = []
    notes = []
    shown = study.arms[:arms]
    if len(shown) < len(study.arms):
        notes.append(f"{len(shown)} of {len(study.arms)} arms are shown")
    processes = count(1)
    for arm in shown:
        run = study.of(arm)[0]
        if run.replicas:
            events += _fleet(run, processes, requests, steps, notes)
            continue
        table, done = run.requests(), run.steps(*_STEP)
        _note(notes, arm, "requests", table.num_rows, requests)
        _note(notes, arm, "steps", done.num_rows, steps)
        server, clients = next(processes), next(processes)
        if run.inside:
            events += _process(server, f"{arm}: server")
            total = value_of(run.summary, "total_blocks")
            events += _steps(server, done.slice(0, steps), total, run.events().to_pylist())
        events += _process(clients, f"{arm}: requests")
        events += _requests(run, clients, table.slice(0, requests), 1)
    if notes:
        events += _process(0, f"note: {'; '.join(notes)}")
    more = {"displayTimeUnit": "ms", "otherData": {"note": "; ".join(notes)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"traceEvents":[{",".join(events)}],{_text(more)[1:]}', encoding="utf-8")
    return path


def _fleet(
    run: Run, processes: Iterator[int], requests: int, steps: int, notes: list[str]
) -> Events:
    """The first replicas, each with an equal share of `requests` and `steps`."""
    arm, replicas = run.arm, run.replicas
    shown = min(len(replicas), REPLICAS)
    if shown < len(replicas):
        notes.append(f"{arm}: the first {shown} of {len(replicas):,} replicas are shown")
    table, done, lost = run.requests(), run.steps(*_STEP, REPLICA), run.events().to_pylist()
    for index, replica in enumerate(replicas[:shown]):
        name, process = f"{arm}: {replica['name']}", next(processes)
        rows = table.filter(pc.equal(table[REPLICA], index))
        ran = done.filter(pc.equal(done[REPLICA], index))
        _note(notes, name, "requests", rows.num_rows, requests // shown)
        _note(notes, name, "steps", ran.num_rows, steps // shown)
        yield from _process(process, name)
        own_lost = [preemption for preemption in lost if preemption[REPLICA] == index]
        ran = ran.slice(0, steps // shown)
        yield from _steps(process, ran, replica["total_blocks"], own_lost)
        yield from _requests(run, process, rows.slice(0, requests // shown), 2)
    refused = table.filter(pc.less(table[REPLICA], 0))
    if refused.num_rows:
        _note(notes, arm, "refused requests", refused.num_rows, requests // shown)
        process = next(processes)
        yield from _process(process, f"{arm}: refused at the door")
        yield from _requests(run, process, refused.slice(0, requests // shown), 1)


def _note(notes: list[str], whose: str, what: str, rows: int, most: int) -> None:
    if rows > most:
        notes.append(f"{whose}: the first {most:,} of {rows:,} {what} are shown")


def _steps(
    process: int, table: pa.Table, total: float, preemptions: Sequence[Preemption]
) -> Events:
    """The track of steps of a server with `total` blocks."""
    yield from _process(process, "steps", 1)
    begin = _micros(table["start"])
    length = np.round(_micros(table["end"]) - begin, 3)
    names = ("step", "prefill_tokens", "decode_seqs", "swap_out", "swap_in")
    columns = (table[name].to_numpy().tolist() for name in names)
    chunked = table["prefill_requests"].to_numpy().tolist()
    rows = zip(begin.tolist(), length.tolist(), chunked, zip(*columns, strict=True), strict=True)
    for start, duration, chunks, values in rows:
        if duration > 0:
            first, *others = map('"{}":{}'.format, names, values)
            counters = ",".join([first, *compress(others, values[1:])])
            kind = _kind(chunks, values[2])
            yield _slice(process, 1, kind, start, duration, f"{{{counters}}}")
    over = table["end"][-1].as_py() if table.num_rows else 0.0
    yield from (_mark(process, 1, "p", event) for event in preemptions if event["time"] < over)
    yield from _counters(process, table, total)


def _kind(chunks: int, decodes: int) -> str:
    if chunks and decodes:
        return "prefill + decode"
    return "prefill" if chunks else "decode" if decodes else "swap"


def _counters(process: int, table: pa.Table, total: float) -> Events:
    """Counters at every step, subsampled for a long run."""
    table = table.take(np.arange(table.num_rows)[:: -(-table.num_rows // COUNTS) or 1])
    columns = ("used_blocks", "decode_seqs", "prefill_requests", "waiting")
    used, decodes, prefills, waiting = (np.asarray(table[name].to_numpy()) for name in columns)
    series = {
        "batch size": decodes + prefills,
        "waiting": waiting,
        **({"KV use (%)": np.round(100 * used / total, 2)} if total > 0 else {"KV blocks": used}),
    }
    times = _micros(table["start"]).tolist()
    for name, values in series.items():
        for time, value in zip(times, values.tolist(), strict=True):
            value = f'{{"value":{value}}}'
            yield f'{{"ph":"C","pid":{process},"ts":{time},"name":"{name}","args":{value}}}'


def _requests(run: Run, process: int, table: pa.Table, first: int) -> Events:
    """A track per request, numbered from `first`."""
    facts = [
        *("request", "client", "state", "reason"),
        *("prompt_tokens", "output_tokens", "preemptions", "recomputed_tokens", "swapped_blocks"),
        *(name for name in (CAME_FROM,) if name in table.column_names),
    ]
    rows = zip(table.select(facts).to_pylist(), lives_of(run, table), strict=True)
    for track, (row, life) in enumerate(rows, first):
        client = f" ({row['client']})" if row["client"] else ""
        yield from _process(process, f"{row['request']}{client}", track)
        if row.get(CAME_FROM) is not None:
            row[CAME_FROM] = run.replicas[row[CAME_FROM]]["name"]
        known = {n: v for n, v in row.items() if n == "request" or v not in ("", 0, None)}
        arguments = _text(known)
        for name, begin, until, cause in life.stages:
            start = round(begin * 1e6, 3)
            length = round(round(until * 1e6, 3) - start, 3)
            why = arguments if cause is None else _text(known | {"cause": cause_of(cause)})
            yield _slice(process, track, name, start, length, why)
        for preemption in life.preemptions:
            yield _mark(process, track, "t", preemption)


def _mark(process: int, track: int, scope: str, preemption: Preemption) -> str:
    """An instant event of a preemption, with scope track (t) or process (p)."""
    arguments = {n: value for n, value in preemption.items() if n in _CAUSE and value is not None}
    event = {
        **{"ph": "i", "s": scope, "pid": process, "tid": track},
        "ts": round(preemption["time"] * 1e6, 3),
        "name": f"preemption of {preemption['request']}",
        "args": arguments | {"cause": cause_of(preemption)},
    }
    return _text(event)


def _slice(
    process: int, track: int, name: str, start: float, duration: float, arguments: str
) -> str:
    place = f'"pid":{process},"tid":{track},"ts":{start},"dur":{duration}'
    return f'{{"ph":"X",{place},"name":"{name}","args":{arguments}}}'


def _process(process: int, name: str, track: int | None = None) -> Events:
    """The name and the place of a process, or of a track in it."""
    kind, place = ("process", process) if track is None else ("thread", track)
    tid = {} if track is None else {"tid": track}
    for event, value in (("name", name), ("sort_index", place)):
        head = {"ph": "M", "pid": process, **tid, "name": f"{kind}_{event}"}
        yield _text({**head, "args": {event: value}})


def _micros(column: pa.ChunkedArray) -> Any:
    """Seconds as microseconds, to the nanosecond."""
    return np.round(np.asarray(column.to_numpy()) * 1e6, 3)
