"""A timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each arm is two processes: its requests, a track each with what it did when, and its server, with a
track of steps, marks where somebody was preempted, and counters. Each replica of a fleet is one,
with both. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import compress, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.steps import CAME_FROM, REPLICA

REQUESTS = 500
STEPS = 6000
COUNTS = 2000
ARMS = 4
REPLICAS = 16

_STEP = (
    *("step", "start", "end", "prefill_tokens", "prefill_requests", "decode_seqs", "waiting"),
    *("used_blocks", "preempted", "swap_out", "swap_in"),
)
"""What is shown of a step."""

Events = Iterator[str]
"""Each as JSON: there are tens of thousands, most of them a few numbers."""

_text = json.JSONEncoder(separators=(",", ":")).encode


def write_timeline(
    study: Arms, path: Path, *, requests: int = REQUESTS, steps: int = STEPS, arms: int = ARMS
) -> Path:
    """Write the first seed of the first `arms` arms, as far as the caps allow; returns `path`."""
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
            events += _steps(server, done.slice(0, steps), value_of(run.summary, "total_blocks"))
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
    """The first replicas, each with its part of `requests` and `steps`."""
    arm, replicas = run.arm, run.replicas
    shown = min(len(replicas), REPLICAS)
    if shown < len(replicas):
        notes.append(f"{arm}: the first {shown} of {len(replicas):,} replicas are shown")
    table, done = run.requests(), run.steps(*_STEP, REPLICA)
    for index, replica in enumerate(replicas[:shown]):
        name, process = f"{arm}: {replica['name']}", next(processes)
        own = table.filter(pc.equal(table[REPLICA], index))
        ran = done.filter(pc.equal(done[REPLICA], index))
        _note(notes, name, "requests", own.num_rows, requests // shown)
        _note(notes, name, "steps", ran.num_rows, steps // shown)
        yield from _process(process, name)
        yield from _steps(process, ran.slice(0, steps // shown), replica["total_blocks"])
        yield from _requests(run, process, own.slice(0, requests // shown), 2)
    refused = table.filter(pc.less(table[REPLICA], 0))
    if refused.num_rows:
        _note(notes, arm, "refused requests", refused.num_rows, requests // shown)
        process = next(processes)
        yield from _process(process, f"{arm}: refused at the door")
        yield from _requests(run, process, refused.slice(0, requests // shown), 1)


def _note(notes: list[str], whose: str, what: str, rows: int, most: int) -> None:
    if rows > most:
        notes.append(f"{whose}: the first {most:,} of {rows:,} {what} are shown")


def _steps(process: int, table: pa.Table, total: float) -> Events:
    """The track of steps, of a server that has so many blocks."""
    yield from _track(process, 1, "steps")
    begin = _micros(table["start"])
    length = np.round(_micros(table["end"]) - begin, 3)
    names = ("step", "prefill_tokens", "decode_seqs", "swap_out", "swap_in")
    columns = (table[name].to_numpy().tolist() for name in names)
    facts = (table[name].to_numpy().tolist() for name in ("prefill_requests", "preempted"))
    rows = zip(begin.tolist(), length.tolist(), *facts, zip(*columns, strict=True), strict=True)
    for start, duration, chunks, preempted, values in rows:
        if duration > 0:
            first, *others = map('"{}":{}'.format, names, values)
            told = ",".join([first, *compress(others, values[1:])])
            kind = _kind(chunks, values[2])
            yield _slice(process, 1, kind, start, duration, f"{{{told}}}")
        if preempted:
            name = "preemption" if preempted == 1 else f"{preempted} preemptions"
            yield f'{{"ph":"i","s":"p","pid":{process},"tid":1,"ts":{start},"name":"{name}"}}'
    yield from _counters(process, table, total)


def _kind(chunks: int, decodes: int) -> str:
    if chunks and decodes:
        return "prefill + decode"
    return "prefill" if chunks else "decode" if decodes else "swap"


def _counters(process: int, table: pa.Table, total: float) -> Events:
    """Counters at every step, or at every so many of a long run."""
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
    """A track each, the first with this number."""
    names, stages = _stages(run, table)
    facts = [
        *("request", "client", "state", "reason"),
        *("prompt_tokens", "output_tokens", "preemptions", "recomputed_tokens", "swapped_blocks"),
        *(name for name in (CAME_FROM,) if name in table.column_names),
    ]
    for i, row in enumerate(table.select(facts).to_pylist()):
        track = first + i
        client = f" ({row['client']})" if row["client"] else ""
        yield from _track(process, track, f"{row['request']}{client}")
        if row.get(CAME_FROM) is not None:
            row[CAME_FROM] = run.replicas[row[CAME_FROM]]["name"]
        told = {n: one for n, one in row.items() if n == "request" or one not in ("", 0, None)}
        arguments = _text(told)
        times = [stage[i] for stage in stages]
        if row["state"] == "rejected":
            yield _slice(process, track, "rejected", times[0], times[-1] - times[0], arguments)
            continue
        for name, begin, until in zip(names, times[:-1], times[1:], strict=True):
            if until > begin:
                yield _slice(process, track, name, begin, round(until - begin, 3), arguments)


def _stages(run: Run, table: pa.Table) -> tuple[list[str], list[list[float]]]:
    """What requests do one after the other, and when each of that begins, with the end of all."""
    known = ["arrival", "scheduled" if run.inside else "first_token", "first_token", "finished"]
    names = ["queued", "prefill", "decode"]
    end = run.end
    times = [_micros(table[name], end) for name in known]
    if "boarded" in table.column_names:  # replicas hand requests on
        moves = [_micros(table[name]) for name in ("left", "boarded")]
        times[3:3] = [np.where(np.isnan(move), times[2], move) for move in moves]
        names += ["on the way", "decode"]
    return names, [some.tolist() for some in times]


def _slice(
    process: int, track: int, name: str, start: float, duration: float, arguments: str
) -> str:
    place = f'"pid":{process},"tid":{track},"ts":{start},"dur":{duration}'
    return f'{{"ph":"X",{place},"name":"{name}","args":{arguments}}}'


def _process(process: int, name: str) -> Events:
    for event, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": process})):
        yield _text({"ph": "M", "pid": process, "name": f"process_{event}", "args": arguments})


def _track(process: int, track: int, name: str) -> Events:
    for event, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": track})):
        place = {"ph": "M", "pid": process, "tid": track}
        yield _text({**place, "name": f"thread_{event}", "args": arguments})


def _micros(column: Any, missing: float | None = None) -> Any:
    """Seconds as microseconds, to the nanosecond; what never happened at `missing`."""
    times = np.asarray(column.to_numpy())
    if missing is not None:
        times = np.where(np.isnan(times), missing, times)
    return np.round(times * 1e6, 3)
