"""A timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each arm is two processes: its requests, a track each with what it did when, and its server, with a
track of steps, marks where somebody was preempted, and counters. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of

REQUESTS = 500
STEPS = 6000
COUNTS = 2000
ARMS = 4

_STEP = (
    *("step", "start", "end", "prefill_tokens", "prefill_requests", "decode_seqs", "waiting"),
    *("used_blocks", "preempted", "swap_out", "swap_in"),
)
"""What is shown of a step."""

Events = Iterator[dict[str, Any]]


def write_timeline(
    study: Arms, path: Path, *, requests: int = REQUESTS, steps: int = STEPS, arms: int = ARMS
) -> Path:
    """Write the first seed of the first `arms` arms, as far as the caps allow; returns `path`."""
    events: list[dict[str, Any]] = []
    notes = []
    shown = study.arms[:arms]
    if len(shown) < len(study.arms):
        notes.append(f"{len(shown)} of {len(study.arms)} arms are shown")
    for i, arm in enumerate(shown):
        run = study.of(arm)[0]
        for what, rows, most in (
            ("requests", run.requests("arrival").num_rows, requests),
            ("steps", run.steps("end").num_rows, steps),
        ):
            if rows > most:
                notes.append(f"{arm}: the first {most:,} of {rows:,} {what} are shown")
        events += _server(run, 2 * i + 1, steps) if run.inside else ()
        events += _requests(run, 2 * i + 2, requests)
    if notes:
        events += _process(0, f"note: {'; '.join(notes)}")
    page = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": "; ".join(notes)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(page, separators=(",", ":")), encoding="utf-8")
    return path


def _server(run: Run, process: int, most: int) -> Events:
    yield from _process(process, f"{run.arm}: server")
    yield from _track(process, 1, "steps")
    table = run.steps(*_STEP).slice(0, most)
    begin = _micros(table["start"])
    length = np.round(_micros(table["end"]) - begin, 3)
    names = ("step", "prefill_tokens", "decode_seqs", "swap_out", "swap_in")
    rows = table.select((*names, "prefill_requests", "preempted")).to_pylist()
    for start, duration, row in zip(begin.tolist(), length.tolist(), rows, strict=True):
        if duration > 0:
            arguments = {name: row[name] for name in names if row[name] or name == "step"}
            name = _kind(row["prefill_requests"], row["decode_seqs"])
            yield _slice(process, 1, name, start, duration, arguments)
        if preempted := row["preempted"]:
            name = "preemption" if preempted == 1 else f"{preempted} preemptions"
            yield {"ph": "i", "s": "p", "pid": process, "tid": 1, "ts": start, "name": name}
    yield from _counters(run, process, table)


def _kind(chunks: int, decodes: int) -> str:
    if chunks and decodes:
        return "prefill + decode"
    return "prefill" if chunks else "decode" if decodes else "swap"


def _counters(run: Run, process: int, table: pa.Table) -> Events:
    """Counters at every step, or at every so many of a long run."""
    table = table.take(np.arange(table.num_rows)[:: -(-table.num_rows // COUNTS) or 1])
    total = value_of(run.summary, "total_blocks")
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
            yield {"ph": "C", "pid": process, "ts": time, "name": name, "args": {"value": value}}


def _requests(run: Run, process: int, most: int) -> Events:
    yield from _process(process, f"{run.arm}: requests")
    table = run.requests().slice(0, most)
    known = ("arrival", "scheduled" if run.inside else "first_token", "first_token", "finished")
    stages = [_micros(table[name], run.end).tolist() for name in known]
    facts = (
        *("request", "client", "state", "reason"),
        *("prompt_tokens", "output_tokens", "preemptions", "recomputed_tokens", "swapped_blocks"),
    )
    for i, row in enumerate(table.select(facts).to_pylist()):
        client = f" ({row['client']})" if row["client"] else ""
        yield from _track(process, i + 1, f"{row['request']}{client}")
        arguments = {
            n: value for n, value in row.items() if n == "request" or value not in ("", 0, None)
        }
        times = [stage[i] for stage in stages]
        if row["state"] == "rejected":
            yield _slice(process, i + 1, "rejected", times[0], times[3] - times[0], arguments)
            continue
        for name, begin, until in zip(
            ("queued", "prefill", "decode"), times[:3], times[1:], strict=True
        ):
            if until > begin:
                yield _slice(process, i + 1, name, begin, round(until - begin, 3), arguments)


def _slice(
    process: int, track: int, name: str, start: float, duration: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start,
        "dur": duration,
        "name": name,
        "args": arguments,
    }


def _process(process: int, name: str) -> Events:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {
        "ph": "M",
        "pid": process,
        "name": "process_sort_index",
        "args": {"sort_index": process},
    }


def _track(process: int, track: int, name: str) -> Events:
    for event, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": track})):
        yield {
            "ph": "M",
            "pid": process,
            "tid": track,
            "name": f"thread_{event}",
            "args": arguments,
        }


def _micros(column: Any, missing: float | None = None) -> Any:
    """Seconds as microseconds, to the nanosecond; what never happened at `missing`."""
    times = np.asarray(column.to_numpy())
    if missing is not None:
        times = np.where(np.isnan(times), missing, times)
    return np.round(times * 1e6, 3)
