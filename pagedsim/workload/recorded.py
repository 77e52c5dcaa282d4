"""Workloads from trace files, at the recorded or another arrival rate."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, require_flag, require_number, require_whole, shown
from pagedsim.workload.arrivals import Arrivals, ClosedLoop, make_arrivals
from pagedsim.workload.draws import Labelled, Labels, stream
from pagedsim.workload.limits import LONGEST, clip, notice, refuse_late
from pagedsim.workload.replay import Replay, replayed
from pagedsim.workload.resample import resampled
from pagedsim.workload.tokens import BlockPrompts, GrowingPrompts, Prompts
from pagedsim.workload.traces import Options, Slice, Table, Tokenizer, read_table
from pagedsim.workload.traces.read import SESSIONS, Paths, read_sessions, session_files
from pagedsim.workload.traces.rows import COLUMNS
from pagedsim.workload.workload import Sessions, Workload

Floats = NDArray[np.float64]


def trace(
    *,
    path: Paths,
    format: str = "auto",
    replay: Mapping[str, Any] | None = None,
    start: float = 0.0,
    window: float | None = None,
    requests: int | None = None,
    max_len: int | None = None,
    rate_scale: float = 1.0,
    rate: float | None = None,
    arrivals: str = "trace",
    resample: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    where: Mapping[str, str] | None = None,
    columns: Mapping[str, Any] | None = None,
    in_turns: bool = True,
    drop_empty: bool = False,
    sort: bool = False,
    block_tokens: int = 512,
    tokenizer: str | Tokenizer | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    n: int = 1,
    beam: int | None = None,
    max_tokens: int | str | None = None,
    seed: int = 0,
) -> Workload:
    """A workload from a file; `format` is a key of `FORMATS` or `SESSIONS`, or auto to detect it.

    Formats of whole sessions take a file, several, or a folder, and are played as `replay` says,
    the settings of `Replay`. Sessions, not requests, begin by `arrivals` then, and labels are
    theirs; sessions with a call of more than `max_len` tokens are left out. The rest is of files
    with a row for each request.

    The workload is `window` seconds from second `start` on, at most `requests` rows. Prompts are
    truncated so that a request has at most `max_len` tokens. Time is scaled to `rate_scale` times
    the recorded rate, or to a mean of `rate` requests/s. With `arrivals` other than trace, lengths
    are kept and times are drawn as in `synthetic`. With `resample`, each seed serves windows of so
    many seconds drawn from the trace with replacement.

    CSV files can be filtered (`where`, column to value). `columns` says which column of a CSV file
    has the arrival, prompt and output (default: those of the format), the client, priority and
    session; its `extra` lists columns that requests carry, or maps names to them, as the field
    `extra` of JSON lines does. Clients and priorities without columns, and always deadlines, `n`,
    `beam` and `max_tokens`, are as in `synthetic`.
    Rows of a session (a column of a CSV file, or defined by the format) are its turns: unless
    `in_turns` is false, a turn is not sent before the previous one is answered.
    `drop_empty` drops rows without tokens, `sort` sorts rows by time, `block_tokens` is the block
    size of Mooncake's hashes.
    """
    process = _process(arrivals, rate_scale, rate, cv, users, think_time)
    if max_len is not None:
        require_whole("max_len", max_len, 2, LONGEST)
    played = Replay.of(replay, arrivals)
    files, kind = session_files(path, format)
    if kind is not None:
        named = any(columns.values()) or None if isinstance(columns, Mapping) else columns
        _refuse_rows(kind.name, {
            **{"start": start, "window": window, "requests": requests, "where": where or None},
            **{"columns": named, "drop_empty": drop_empty, "sort": sort, "n": n, "beam": beam},
            **{"tokenizer": tokenizer, "max_tokens": max_tokens, "resample": resample},
            **{"rate": None if process else rate},
        })  # fmt: skip
        block = require_whole("block_tokens", block_tokens, 1)
        return replayed(
            read_sessions(files, kind, block, played.markers),
            played,
            process,
            Labels(priority, client, deadline),
            in_turns=require_flag("in_turns", in_turns),
            max_len=max_len,
            rate_scale=rate_scale,
            seed=seed,
        )
    if played != Replay():
        raise ConfigError(f"replay: only formats of whole sessions take it: {', '.join(SESSIONS)}")
    options = Options(
        _where(where),
        _columns(columns or {}),
        _extra(columns or {}),
        require_whole("block_tokens", block_tokens, 1),
        tokenizer,
    )
    table = read_table(
        files[0],
        format,
        options,
        Slice(
            require_number("start", start, low=0),
            None if window is None else require_number("window", window, above=0),
            None if requests is None else require_whole("requests", requests, 1),
        ),
        timed=process is None,
        drop_empty=require_flag("drop_empty", drop_empty),
        sort=require_flag("sort", sort),
    )
    redrawn = list[str]()
    if resample is not None:
        require_number("resample", resample, above=0)
        if process is not None:
            raise ConfigError(f"resample={resample:g}: only with arrivals=trace")
        table, line = resampled(table, resample, stream(seed, "resample"))
        redrawn.append(line)
    rows = len(table.prompt_len)
    if require_flag("in_turns", in_turns) and table.links and process is not None:
        raise ConfigError(
            f"arrivals={arrivals}: must be trace for turns of sessions, which come at times of "
            "their own once they are answered; in_turns=false sends them without waiting"
        )
    labels = Labels(priority, client, deadline, n, beam, max_tokens)
    wanted = labels.cut(table.output_len)
    prompt_len, output_len, clipped = clip(table.prompt_len, wanted, max_len)
    if process is None:
        arrival = _scaled(files[0], table, rate_scale, rate)
    else:
        with np.errstate(over="ignore"):
            arrival = process.times(rows, stream(seed, "arrivals"))
        refuse_late(f"rate={rate}", arrival[-1])
    parents = _parents(table)
    labelled = _from_columns(labels.draw(arrival, partial(stream, seed)), table)
    sampling, asked = labelled.asked(output_len)
    return Workload.of(
        arrival,
        prompt_len,
        output_len,
        priority=labelled.priority,
        client=labelled.client,
        clients=labelled.clients,
        deadline=labelled.deadline,
        sampling=sampling,
        asked=asked,
        prompts=_prompts(table, parents, prompt_len, output_len),
        turns=_turns(parents, in_turns),
        extra=table.extra,
        mode="open" if process is None else process.mode,
        users=process.users if isinstance(process, ClosedLoop) else None,
        think_time=process.think_time if isinstance(process, ClosedLoop) else 0.0,
        drawn=(process is not None and process.drawn) or labels.drawn or resample is not None,
        clipped=clipped,
        dropped=table.dropped,
        notices=(
            *_changed(table, arrivals, rate_scale, rate, requests),
            *notice(clipped, rows, max_len),
            *_left_out(table),
            *redrawn,
        ),
    )


def _refuse_rows(format: str, settings: Mapping[str, object]) -> None:
    """Raise ConfigError for a setting of rows that is not as it is by default."""
    parameters = signature(trace).parameters
    for key, value in settings.items():
        if value == parameters[key].default:
            continue
        if key == "rate":
            raise ConfigError(f"{key}={shown(value)}: a trace has its own arrivals: set arrivals=")
        raise ConfigError(f"{key}={shown(value)}: format {format} holds sessions, not rows")


def _process(
    arrivals: str,
    rate_scale: float,
    rate: float | None,
    cv: float | None,
    users: int | None,
    think_time: float | None,
) -> Arrivals | None:
    """The process that times are drawn from; None to use the trace's times."""
    require_number("rate_scale", rate_scale, above=0)
    if arrivals != "trace":
        if rate_scale != 1:
            raise ConfigError(f"rate_scale={rate_scale}: only with arrivals=trace; set rate=")
        return make_arrivals(arrivals, rate=rate, cv=cv, users=users, think_time=think_time)
    for key, value in (("cv", cv), ("users", users), ("think_time", think_time)):
        if value is not None:
            raise ConfigError(f"{key}={value}: a trace has its own arrivals: set arrivals=")
    if rate is not None:
        require_number("rate", rate, above=0)
        if rate_scale != 1:
            raise ConfigError(f"rate={rate:g} and rate_scale={rate_scale:g}: set one of them")
    return None


def _where(where: Mapping[str, str] | None) -> dict[str, str]:
    if not isinstance(where or {}, Mapping):
        raise ConfigError(f"where={where!r}: must be a mapping of columns to texts")
    return {str(key): str(value) for key, value in (where or {}).items()}


def _columns(columns: Mapping[str, Any]) -> dict[str, str]:
    known = (*COLUMNS, "extra")
    if not isinstance(columns, Mapping):
        raise ConfigError(
            f"columns={columns!r}: must be a mapping of {', '.join(known)} to columns"
        )
    for key in columns:
        if key not in known:
            raise ConfigError(f"columns.{key}: no such setting; {choices(str(key), known)}")
    return {key: str(columns[key]) for key in COLUMNS if columns.get(key) is not None}


def _extra(columns: Mapping[str, Any]) -> dict[str, str]:
    given = columns.get("extra") or {}
    if isinstance(given, Mapping):
        return {str(name): str(column) for name, column in given.items()}
    if not isinstance(given, list | tuple):
        what = "must be a list of columns, or a mapping of names to them"
        raise ConfigError(f"columns.extra={given!r}: {what}")
    return {str(column): str(column) for column in given}


def _scaled(path: Path, table: Table, rate_scale: float, rate: float | None) -> Floats:
    arrival = table.arrival
    assert arrival is not None
    if rate is None:
        refuse_late(f"rate_scale={rate_scale:g}", float(arrival[-1]) / rate_scale)
        return arrival / rate_scale
    span = float(arrival[-1] - arrival[0])
    if not span:
        raise ConfigError(f"rate={rate:g}: all requests of {path} come at once: set arrivals=")
    factor = (len(arrival) - 1) / span / rate
    refuse_late(f"rate={rate:g}", float(arrival[-1]) * factor)
    return arrival * factor


def _from_columns(labelled: Labelled, table: Table) -> Labelled:
    """Override clients and priorities by columns of the file, where configured."""
    if table.client is not None:
        names = sorted(set(table.client))
        index = {name: i for i, name in enumerate(names)}
        client = np.array([index[name] for name in table.client], np.int32)
        labelled = replace(labelled, client=client, clients=tuple(names))
    if table.priority is not None:
        labelled = replace(labelled, priority=table.priority)
    return labelled


def _parents(table: Table) -> list[int] | None:
    """The row that each row continues, -1 for the start of a session; None without sessions."""
    if table.links is None:
        return None
    last: dict[Hashable, int] = {}
    parents = []
    for row, (name, before) in enumerate(table.links):
        parents.append(last.get(before, -1))
        last[name] = row
    return parents


def _turns(parents: Sequence[int] | None, in_turns: bool) -> Sessions | None:
    """Sessions in order of their start."""
    if parents is None:
        return None
    session, turn = list[int](), list[int]()
    sessions = 0
    for parent in parents:
        session.append(sessions if parent < 0 else session[parent])
        turn.append(1 if parent < 0 else turn[parent] + 1)
        sessions += parent < 0
    after = [[parent] if in_turns and parent >= 0 else [] for parent in parents]
    return Sessions(session, turn, after, np.zeros(len(parents)))


def _prompts(
    table: Table,
    parents: Sequence[int] | None,
    prompt_len: NDArray[np.int32],
    output_len: NDArray[np.int32],
) -> Prompts | None:
    if table.block_ids is not None and table.block_starts is not None:
        return BlockPrompts(table.block_ids, table.block_starts, prompt_len, table.block_tokens)
    if parents is None:
        return None
    base = np.array(parents)
    fits = prompt_len >= prompt_len[base] + output_len[base]  # else the history was truncated
    nothing = np.full(len(base), -1, np.int32)
    return GrowingPrompts(
        np.where((base >= 0) & fits, base, -1),
        np.arange(len(base)),
        nothing,
        np.zeros(len(base), np.int32),
        prompt_len,
        output_len,
    )


def _left_out(table: Table) -> Iterator[str]:
    """Notices on rows without tokens, and on columns of prompt contents that are not read."""
    if table.dropped:
        yield f"{table.dropped:,} rows without tokens were left out"
    if table.unread:
        yield (
            f"{' and '.join(table.unread)} of the trace are not read, so that all its prompts are "
            "unlike each other: formats mooncake and bailian have hash_ids, turns sessions"
        )


def _changed(
    table: Table, arrivals: str, rate_scale: float, rate: float | None, requests: int | None
) -> Iterator[str]:
    """Notices on how the requests differ from the file."""
    arrival = table.arrival
    if table.cut:
        yield f"only the first {requests:,} requests of the trace are served (requests={requests})"
    if arrival is None:
        return
    if arrivals != "trace":
        yield f"the trace's own times are not kept: they are drawn (arrivals={arrivals})"
    elif rate is not None:
        usual = (len(arrival) - 1) / float(arrival[-1] - arrival[0])
        yield f"the trace's {usual:.4g} requests/s are served at {rate:g} (rate={rate:g})"
    elif rate_scale != 1:
        yield f"the trace is served at {rate_scale:g} times its rate (rate_scale={rate_scale:g})"
