"""Recorder of steps, requests and preemptions, as compact columns of up to millions of rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan, nan
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.plan import Chunk, PreemptionCause, prefill_left
from pagedsim.core.request import RequestId
from pagedsim.core.transfers import Direction
from pagedsim.metrics.service import service_of
from pagedsim.metrics.steps import (
    HOST,
    LOADED,
    REPLICA,
    STEP_COLUMNS,
    WRITTEN,
    Batches,
    FleetSteps,
    Sliced,
    Steps,
)

PACKED = 1 << 12
"""Number of buffered rows at which they are packed."""


class Numbers:
    """Rows of numbers, packed in batches into typed columns.

    Callers append to `rows` and call `pack` once it has `PACKED` rows. None becomes NaN.
    """

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._types = dict(types)
        # One growing array each: many small ones would fragment memory.
        self._columns = {name: array(np.dtype(kind).char) for name, kind in types.items()}
        self.rows: list[tuple[float | None, ...]] = []

    def pack(self) -> None:
        """Move the buffered rows into the columns."""
        if not self.rows:
            return
        values = zip(*self.rows, strict=True)
        for column, kind, more in zip(
            self._columns.values(), self._types.values(), values, strict=True
        ):
            try:
                column += array(column.typecode, more)  # the usual case
            except TypeError:  # there is a None
                column.frombytes(np.array(more, kind).tobytes())
        self.rows.clear()

    def take(self, name: str) -> NDArray[Any]:
        """Return a whole column and release it, so that a table needs no second copy."""
        self.pack()
        return np.frombuffer(self._columns.pop(name), self._types[name])


class Sparse(Numbers):
    """Columns that are mostly 0; only other rows are stored, led by their row number."""

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        super().__init__({_ROW: np.int32, **types})

    def drop(self, row: int) -> None:
        """Remove the last stored row if it has this number."""
        if self.rows and self.rows[-1][0] == row:
            self.rows.pop()

    def spread(self) -> dict[str, Spread]:
        """Return the columns with all rows, and release them."""
        which = self.take(_ROW)
        return {name: Spread(which, self.take(name)) for name in list(self._columns)}


class Spread:
    """A sparse column; slices are materialised on access."""

    def __init__(self, which: NDArray[np.int32], values: NDArray[Any]) -> None:
        """Rows `which`, in order, have these values; all others are 0."""
        self._which, self._values = which, values

    def __getitem__(self, part: slice) -> NDArray[Any]:
        values = np.zeros(part.stop - part.start, self._values.dtype)
        low, high = np.searchsorted(self._which, (part.start, part.stop))
        values[self._which[low:high] - part.start] = self._values[low:high]
        return values


_ROW = "row"


class Words:
    """Columns of strings with few distinct combinations."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers: dict[tuple[str, ...], int] = {}
        self._rows = array("i")

    def append(self, words: tuple[str, ...]) -> None:
        """Append a row with one string per column."""
        self._rows.append(self._numbers.setdefault(words, len(self._numbers)))

    def columns(self, order: NDArray[np.int64]) -> dict[str, pa.Array]:
        """The columns with their rows in this order."""
        numbers = np.frombuffer(self._rows, dtype=np.int32)[order]
        columns = {}
        for place, name in enumerate(self._names):
            words = pa.array([row[place] for row in self._numbers], pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(numbers, words).dictionary_decode()
        return columns


class PreemptionRecord:
    """A preemption of one request, until it decodes again."""

    __slots__ = ("back_at", "by", "decoding_at", "how", "request", "time", "wanted", "why")

    def __init__(self, cause: PreemptionCause, time: float) -> None:
        self.time = time
        self.request: RequestId = cause.request.id
        self.by: RequestId | None = None if cause.by is None else cause.by.id
        self.why = "displaced" if cause.displaced else "memory"
        self.wanted = cause.wanted
        self.how = "swap" if cause.swapped else "recompute"
        self.back_at = nan
        """Start of the step that readmits it; NaN if none does."""
        self.decoding_at = nan
        """When its KV cache is recomputed or swapped in; NaN if never."""


PREEMPTIONS = {
    **{"time": pa.float64(), "request": None, "by": None},
    **dict.fromkeys(("why", "wanted", "how"), pa.string()),
    **dict.fromkeys(("back_at", "decoding_at"), pa.float64()),
}
"""Columns of preemptions, with their types; ids of requests are numbers or strings."""
TRANSFERS = {
    **{"request": None, "source": pa.int32(), "target": pa.int32()},
    **{"start": pa.float64(), "end": pa.float64(), "bytes": pa.float64(), "arrived": pa.bool_()},
}
"""The same of transfers of KV cache between replicas."""


def _events(rows: Iterable[Sequence[Any]], columns: Mapping[str, Any]) -> pa.Table:
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    pairs = zip(columns.items(), values, strict=True)
    return pa.table({name: pa.array(column, kind) for (name, kind), column in pairs})


class TierMoves(Numbers):
    """Blocks that steps move between the GPU and a host tier, or below that; sparse."""

    def __init__(self) -> None:
        super().__init__(
            {"step": np.int64, "level": np.int64, "loads": np.int8, "blocks": np.int64}
        )
        self._tiers: Sequence[str] = ()

    def step(self, number: int, plan: StepPlan, lower: Sequence[str]) -> None:
        """Note the transfers that begin with a step, and what tiers below the host have moved."""
        self._tiers = (HOST, *lower)
        for transfer in plan._transfers:
            loads = transfer.direction is Direction.LOAD
            self.rows.append((number, 1, loads, len(transfer.blocks)))
        for level, loads, blocks in plan._lower_moves:
            self.rows.append((number, 1 + level, loads, blocks))

    def undo(self, number: int) -> None:
        while self.rows and self.rows[-1][0] == number:
            self.rows.pop()

    def columns(self, steps: int) -> dict[str, pa.Array]:
        """Blocks by tier for each of `steps` steps; empty without tiers."""
        which, levels, loads, blocks = (self.take(name) for name in list(self._columns))
        columns = {}
        for what, loaded in ((LOADED, 1), (WRITTEN, 0)):
            for level, tier in enumerate(self._tiers, 1):
                mine = (levels == level) & (loads == loaded)
                moved = np.bincount(which[mine], blocks[mine], minlength=steps).astype(np.int32)
                columns[what + tier] = pa.array(moved)
        return columns


Stretch = tuple[int, float, int]
"""Consecutive decode steps of a request: its tokens before them, when the first of their tokens
came, and their replica."""
STRETCHES: Mapping[str, type[np.generic]] = {
    "tokens_before": np.int32,
    "resumed": np.float64,
    "resumed_on": np.int32,
}
"""Columns of lists, only there if some request has one: a value for each stretch but that from its
first token on, which has one only if the request went on at another replica."""

_EACH_STEP = ("end", "used_blocks")
"""Columns with a value per step; the others have one row per run of uneventful steps."""
_PREFILLS = (
    *("prefill_tokens", "prefill_context", "prefill_attention", "prefill_pairs"),
    *("prefill_requests", "sampled_prefills"),
)
_EVENTS = (
    *("swapped", "shared_blocks", "preempted", "displaced", "swap_out", "swap_in", "rejected"),
)
"""Sparse columns, as are those above."""
_FIRST = "first"
"""Column of the first step of each row."""
_EACH_ROW = ("start", "step", "decode_seqs", "decode_context", "waiting", "running")
SOURCES = ("gpu_hit_tokens", "host_hit_tokens", "storage_hit_tokens", "prefill_tokens")
"""Columns of requests: where the tokens came from that they needed before they could decode."""
REQUEST_COLUMNS: Mapping[str, type[np.generic]] = {
    "priority": np.float64,
    "arrival": np.float64,
    "scheduled": np.float64,
    "first_token": np.float64,
    "finished": np.float64,
    "prompt_tokens": np.int32,
    "output_tokens": np.int32,
    "sequences": np.int32,
    "preemptions": np.int32,
    "recomputed_tokens": np.int64,
    "swapped_blocks": np.int64,
    "cached_tokens": np.int32,
    **dict.fromkeys(SOURCES, np.int64),
}


@mypyc_attr(allow_interpreted_subclasses=True)
class StepRecorder:
    """Records the steps of one server.

    Numbers are stored in arrays: no object per step, no load on the garbage collector. A run of
    uneventful steps, which differ by one token per sequence, is one row plus the differing values.
    Creating a table ends the recording, since the table takes over the data.
    """

    def __init__(self) -> None:
        self._rows = Numbers({_FIRST: np.int32, **{name: STEP_COLUMNS[name] for name in _EACH_ROW}})
        self._prefills = Sparse({name: STEP_COLUMNS[name] for name in _PREFILLS})
        self._events = Sparse({name: STEP_COLUMNS[name] for name in _EVENTS})
        self._packed_ends = array("d")  # for each step
        self._packed_used = array("i")  # for each step, blocks in use
        self._ends: list[float] = []  # not yet packed
        self._used: list[int] = []
        self._count = 0  # rows
        self._moved = TierMoves()
        self._preemptions: list[PreemptionRecord] = []
        self._preempted: dict[Request, PreemptionRecord] = {}  # preempted, and not decoding again
        self._preempted_in = -1  # the last step that preempted any request
        self._preemptions_before = 0  # how many preemptions there were before it
        self._stretches: dict[Request, list[Stretch]] = {}
        # Requests that have missed decode steps, and get a token in the next one that they are in.
        self._rejoining: dict[Request, None] = {}
        self._index = 0  # of the replica
        self._unfolded: Steps | None = None

    @property
    def last_end(self) -> float | None:
        """End of the last step; None if there was none."""
        ends = self._ends or self._packed_ends
        return ends[-1] if ends else None

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """Record an executed step; called before the step is committed or completed."""
        rows, ends = self._rows.rows, self._ends
        if len(rows) == PACKED:  # not earlier, since the last step may be undone
            self._pack()
        step = len(self._packed_ends) + len(ends)
        if scheduler.offloads:
            self._moved.step(step, plan, scheduler.memory.lower_tiers)
        ends.append(end)
        self._used.append(plan.used_blocks)
        self._count += 1
        rows.append(
            (
                step,
                start,
                plan.number,
                plan.decode_count,
                plan.decode_context,
                plan.waiting,
                plan.running,
            )
        )
        if plan.chunks:
            self._prefill(plan)
            if self._preempted:
                self._recompute(plan, start, end, scheduler)
            for chunk in plan.chunks:
                if chunk._request._first_token_at is not None:  # recomputed
                    self._recomputed(chunk, plan, end, scheduler)
        if plan.held:
            self._rejoining.update(dict.fromkeys(plan.held))
        if (
            plan.swapped
            or plan.shared_blocks
            or plan.preemptions
            or plan.swap_out
            or plan.swap_in
            or plan.rejected
        ):
            self._event(plan)
            if plan.preemptions:
                self._preempt(plan, step, start)
            if plan.resumed:
                self._resume(plan, start)
                self._rejoining.update(dict.fromkeys(plan.resumed))
        if self._rejoining and plan.decode_count:
            for request in plan.decodes:
                if request in self._rejoining and request not in plan.gone:
                    del self._rejoining[request]
                    self._begin_stretch(request, end, scheduler)

    def joined(self, request: Request) -> None:
        """A request goes on to decode here, with the KV cache of another replica."""
        self._rejoining[request] = None

    def _recomputed(self, chunk: Chunk, plan: StepPlan, end: float, scheduler: Scheduler) -> None:
        """A chunk of a request that had tokens before."""
        if not chunk.samples:
            if chunk.request.num_seqs > 1:  # a group samples in the first decode step after it
                self._rejoining[chunk.request] = None
        elif chunk.request not in plan.gone:
            self._begin_stretch(chunk.request, end, scheduler)

    def _begin_stretch(self, request: Request, time: float, scheduler: Scheduler) -> None:
        """A request has the token of a step that is not the decode step after its last one."""
        before = request.generated - scheduler.queues.tokens_in_flight(request)
        self._stretches.setdefault(request, []).append((before, time, self._index))

    def _prefill(self, plan: StepPlan) -> None:
        rows, chunks = self._prefills.rows, plan.chunks
        if len(rows) == PACKED:
            self._prefills.pack()
        alone = len(chunks) == 1
        rows.append(
            (
                self._count - 1,
                plan.prefill_tokens,
                plan.prefill_context,
                plan.prefill_attention,
                plan.prefill_pairs,
                1 if alone else len({chunk.request for chunk in chunks}),
                chunks[0].samples if alone else sum([chunk.samples for chunk in chunks]),
            )
        )

    def _event(self, plan: StepPlan) -> None:
        rows = self._events.rows
        if len(rows) == PACKED:
            self._events.pack()
        rows.append(
            (
                self._count - 1,
                plan.swapped,
                plan.shared_blocks,
                len(plan.preempted),
                len(plan.displaced),
                len(plan.swap_out),
                len(plan.swap_in),
                len(plan.rejected),
            )
        )

    def _preempt(self, plan: StepPlan, step: int, start: float) -> None:
        self._preempted_in, self._preemptions_before = step, len(self._preemptions)
        for cause in plan.preemptions:
            record = PreemptionRecord(cause, start)
            self._preemptions.append(record)
            self._preempted[cause.request] = record

    def _recompute(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """Update preempted requests that are in the batch again and recompute."""
        planned: dict[Request, int] = {}
        for chunk in plan.chunks:
            if chunk.request in self._preempted:
                planned[chunk.request] = planned.get(chunk.request, 0) + chunk.length
        launched = scheduler.pending is not plan  # if so, its tokens are already counted
        for request, tokens in planned.items():
            record = self._preempted[request]
            if isnan(record.back_at):
                record.back_at = start
            left = prefill_left(request, scheduler.memory)
            if request.decoding if launched else tokens >= left:
                record.decoding_at = end
                del self._preempted[request]

    def _resume(self, plan: StepPlan, start: float) -> None:
        """Update swapped requests that are on the GPU again; decoding ones have lost nothing."""
        chunked = {chunk.request for chunk in plan.chunks}
        for request in plan.resumed:
            if request not in chunked and (record := self._preempted.pop(request, None)):
                record.back_at = record.decoding_at = start

    def again(self, end: float, used_blocks: int) -> None:
        """Record a repetition of the last step, with one more token per sequence."""
        self._ends.append(end)
        self._used.append(used_blocks)

    def undo(self) -> None:
        """Remove the last step, which did not complete."""
        self._ends.pop()
        self._used.pop()
        step = len(self._packed_ends) + len(self._ends)
        self._moved.undo(step)
        if self._rows.rows[-1][0] == step:
            self._rows.rows.pop()
            if self._preempted_in == step:
                del self._preemptions[self._preemptions_before :]
            self._count -= 1
            for sparse in (self._prefills, self._events):
                sparse.drop(self._count)

    def _pack(self) -> None:
        self._rows.pack()
        self._moved.pack()
        self._packed_ends.extend(self._ends)
        self._packed_used.extend(self._used)
        self._ends.clear()
        self._used.clear()

    def own_steps(self) -> Steps:
        if self._unfolded is None:
            self._pack()
            rows: dict[str, Sliced] = {name: self._rows.take(name) for name in _EACH_ROW}
            rows |= self._prefills.spread() | self._events.spread()
            self._unfolded = Steps(
                {name: rows[name] for name in STEP_COLUMNS if name not in _EACH_STEP},
                self._rows.take(_FIRST),
                np.frombuffer(self._packed_ends, dtype=np.float64),
                np.frombuffer(self._packed_used, dtype=np.int32),
                self._moved.columns(len(self._packed_ends)),
            )
        return self._unfolded


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(StepRecorder):
    """Records steps and requests, and creates their tables.

    The steps of a fleet are in a recorder per replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replicas: list[ReplicaRecorder] = []
        self._requests = Numbers(REQUEST_COLUMNS)
        self._ids: array[int] | list[int | str] = array("q")  # a list if any is a string
        self._words = Words("client", "state", "reason")
        self._places = array("i")  # with replicas, the replica of each request; -1: none
        self._sessions: list[str | None] = []  # empty without sessions, as is `_turns`
        self._turns = array("i")
        self._resumed = Numbers({_ROW: np.int32, **STRETCHES})
        self._requests_table: pa.Table | None = None
        self.transfers: list[tuple[Any, ...]] = []  # rows of `TRANSFERS`, each added as it ends

    def add_replica(self) -> ReplicaRecorder:
        """Add a recorder for the steps of the next replica."""
        self.replicas.append(ReplicaRecorder(self, len(self.replicas)))
        return self.replicas[-1]

    def left(self, request: Request) -> None:
        """Record a request that finished, was aborted or rejected, or is alive at the run's end."""
        if request._session is not None or self._sessions:
            before = len(self._ids) - len(self._sessions)
            self._sessions += [*[None] * before, request._session]
            self._turns.extend([*[0] * before, request._turn])
        try:
            self._ids.append(request._id)  # type: ignore[arg-type]
        except TypeError:  # the first string id
            self._ids = [*self._ids, request._id]
        if self.replicas:
            self._places.append(-1)  # not at a replica, unless its recorder sets it
        state = "unfinished" if request.alive else request._state._value_  # faster than .value
        self._words.append((request._client, state, request._finish_reason or ""))
        if self._stretches and (stretches := self._stretches.pop(request, None)):
            row = len(self._ids) - 1
            self._resumed.rows += [(row, *stretch) for stretch in stretches]
            if len(self._resumed.rows) >= PACKED:
                self._resumed.pack()
        rows = self._requests.rows
        rows.append(
            (
                request._priority,
                request._arrival,
                request._scheduled_at,
                request._first_token_at,
                request._finished_at,
                request._prompt_len,
                request.generated,
                request._num_seqs,
                request._preemptions,
                request.recomputed_tokens,
                request._swapped_blocks,
                request._cached_tokens,
                *request.hits,
                request._prefill_tokens,
            )
        )
        if len(rows) == PACKED:
            self._requests.pack()

    def steps(self) -> Batches:
        """The steps in order; for a fleet, replica by replica."""
        if len(self.replicas) > 1:
            return FleetSteps([replica.own_steps() for replica in self.replicas])
        return self.replicas[0].own_steps() if self.replicas else self.own_steps()

    def steps_table(self) -> pa.Table:
        """One row per step, in order."""
        return pa.Table.from_batches(self.steps().to_batches(), self.steps().schema)

    def preemptions_table(self) -> pa.Table:
        """One row per preemption, by time."""
        replicas: Sequence[StepRecorder] = self.replicas or [self]
        rows = [
            (*[getattr(record, name) for name in PREEMPTIONS], index)
            for index, replica in enumerate(replicas)
            for record in replica._preemptions
        ]
        table = _events(sorted(rows, key=itemgetter(0)), {**PREEMPTIONS, REPLICA: pa.int32()})
        return table if len(replicas) > 1 else table.drop_columns(REPLICA)

    def transfers_table(self) -> pa.Table:
        """One row per transfer of KV cache between replicas, by its end."""
        return _events(self.transfers, TRANSFERS)

    def requests_table(self) -> pa.Table:
        """One row per request, by id."""
        if self._requests_table is None:
            ids = pa.array(self._ids if isinstance(self._ids, list) else np.array(self._ids))
            order = pc.sort_indices(ids).to_numpy()
            numbers = {name: self._requests.take(name)[order] for name in REQUEST_COLUMNS}
            tokens = numbers["output_tokens"] * numbers["sequences"].astype(np.int64)
            service = service_of(numbers["prompt_tokens"], tokens, numbers["first_token"])
            words = self._words.columns(order)
            columns = {"request": ids.take(order), "client": words.pop("client")}
            if len(self.replicas) > 1:
                columns[REPLICA] = np.frombuffer(self._places, dtype=np.int32)[order]
            if self._sessions:
                columns["session"] = pa.array(self._sessions, pa.string()).take(pa.array(order))
                columns["turn"] = np.array(self._turns)[order]
            columns |= numbers | {"service": service} | words | self._stretch_columns(order)
            self._requests_table = pa.table(columns)
        return self._requests_table

    def _stretch_columns(self, order: NDArray[np.int64]) -> dict[str, pa.Array]:
        whose = self._resumed.take(_ROW)
        if not len(whose):
            return {}
        place = np.empty(len(order), dtype=np.int64)  # in the table, of each recorded row
        place[order] = np.arange(len(order))
        sorted_ = np.argsort(place[whose], kind="stable")
        counts = np.bincount(place[whose], minlength=len(order))
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        names = STRETCHES if len(self.replicas) > 1 else list(STRETCHES)[:-1]
        return {
            name: pa.ListArray.from_arrays(offsets, pa.array(self._resumed.take(name)[sorted_]))
            for name in names
        }


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplicaRecorder(StepRecorder):
    """Records the steps of one replica of a fleet; its requests go to the fleet's table."""

    def __init__(self, whole: Recorder, index: int) -> None:
        super().__init__()
        # A preempted request may resume on another replica.
        self._preempted, self._stretches = whole._preempted, whole._stretches
        self._whole = whole
        self._index = index

    def detached(self, request: Request) -> None:
        """A request with tokens leaves for another replica."""
        stretches = self._stretches.setdefault(request, [])
        if not stretches or stretches[0][0]:
            assert request.first_token_at is not None
            stretches.insert(0, (0, request.first_token_at, self._index))

    def left(self, request: Request) -> None:
        """Record a request that left the fleet from this replica, or is alive on it at the end."""
        self._whole.left(request)
        self._whole._places[-1] = self._index


TABLES: Mapping[str, Callable[[Recorder], Batches]] = {
    "requests": Recorder.requests_table,
    "steps": Recorder.steps,
    "preemptions": Recorder.preemptions_table,
    "transfers": Recorder.transfers_table,
}
"""Every recorded table, by the name of its file and of the parameter of a metric that reads it."""
