"""Recorder of steps, requests and preemptions, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import isnan

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.plan import prefill_left
from pagedsim.metrics.columns import PACKED, Numbers, Sparse, Words
from pagedsim.metrics.preemptions import Absence, preemptions_table
from pagedsim.metrics.service import service_of
from pagedsim.metrics.steps import (
    REPLICA,
    STEP_COLUMNS,
    Batches,
    FleetSteps,
    Sliced,
    Steps,
)
from pagedsim.metrics.tiers import Moved

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
        self._moved = Moved()
        self._absences: list[Absence] = []
        self._absent: dict[Request, Absence] = {}  # preempted, and not decoding again
        self._preempted_in = -1  # the last step that preempted any request
        self._absences_before = 0  # how many preemptions there were before it
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
        if tiers := scheduler.memory.tiers:
            self._moved.of(tiers)
            self._moved.step(step, plan)
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
            if self._absent:
                self._recompute(plan, start, end, scheduler)
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
        self._preempted_in, self._absences_before = step, len(self._absences)
        for cause in plan.preemptions:
            absence = Absence(cause, start)
            self._absences.append(absence)
            self._absent[cause.request] = absence

    def _recompute(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """Update preempted requests that are in the batch again and recompute."""
        planned: dict[Request, int] = {}
        for chunk in plan.chunks:
            if chunk.request in self._absent:
                planned[chunk.request] = planned.get(chunk.request, 0) + chunk.length
        launched = scheduler.pending is not plan  # if so, its tokens are already counted
        for request, tokens in planned.items():
            absence = self._absent[request]
            if isnan(absence.back_at):
                absence.back_at = start
            left = prefill_left(request, scheduler.memory)
            if request.decoding if launched else tokens >= left:
                absence.decoding_at = end
                del self._absent[request]

    def _resume(self, plan: StepPlan, start: float) -> None:
        """Update swapped requests that are on the GPU again; decoding ones have lost nothing."""
        chunked = {chunk.request for chunk in plan.chunks}
        for request in plan.resumed:
            if request not in chunked and (absence := self._absent.pop(request, None)):
                absence.back_at = absence.decoding_at = start

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
                del self._absences[self._absences_before :]
            self._count -= 1
            for sparse in (self._prefills, self._events):
                sparse.drop(self._count)

    def _pack(self) -> None:
        self._rows.pack()
        self._packed_ends.extend(self._ends)
        self._packed_used.extend(self._used)
        self._ends.clear()
        self._used.clear()

    def own_steps(self) -> Steps:
        """The steps, in order."""
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

    A fleet has a lane of steps per replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[Lane] = []
        self._requests = Numbers(REQUEST_COLUMNS)
        self._ids: array[int] | list[int | str] = array("q")  # a list if any is a string
        self._words = Words("client", "state", "reason")
        self._places = array("i")  # with replicas, the replica of each request; -1: none
        self._sessions: list[str | None] = []  # empty without sessions, as is `_turns`
        self._turns = array("i")
        self._requests_table: pa.Table | None = None

    def lane(self) -> Lane:
        """Add a lane for the next replica."""
        self.lanes.append(Lane(self, len(self.lanes)))
        return self.lanes[-1]

    def left(self, request: Request) -> None:
        """Record a request that finished, was aborted or rejected, or is alive at the run's end."""
        if request.session is not None or self._sessions:
            before = len(self._ids) - len(self._sessions)
            self._sessions += [*[None] * before, request.session]
            self._turns.extend([*[0] * before, request.turn])
        try:
            self._ids.append(request.id)  # type: ignore[arg-type]
        except TypeError:  # the first string id
            self._ids = [*self._ids, request.id]
        if self.lanes:
            self._places.append(-1)  # not at a replica, unless its lane sets it
        state = "unfinished" if request.alive else request.state._value_  # faster than .value
        self._words.append((request.client, state, request.finish_reason or ""))
        rows = self._requests.rows
        rows.append(
            (
                request.priority,
                request.arrival,
                request.scheduled_at,
                request.first_token_at,
                request.finished_at,
                request.prompt_len,
                request.generated,
                request.width,
                request.preemptions,
                request.recomputed_tokens,
                request.swapped_blocks,
                request.cached_tokens,
            )
        )
        if len(rows) == PACKED:
            self._requests.pack()

    def steps(self) -> Batches:
        """The steps in order; for a fleet, replica by replica."""
        if len(self.lanes) > 1:
            return FleetSteps([lane.own_steps() for lane in self.lanes])
        return self.lanes[0].own_steps() if self.lanes else self.own_steps()

    def steps_table(self) -> pa.Table:
        """One row per step, in order."""
        return pa.Table.from_batches(self.steps().to_batches(), self.steps().schema)

    def preemptions_table(self) -> pa.Table:
        """One row per preemption, by time."""
        lanes: Sequence[StepRecorder] = self.lanes or [self]
        return preemptions_table([lane._absences for lane in lanes])

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
            if len(self.lanes) > 1:
                columns[REPLICA] = np.frombuffer(self._places, dtype=np.int32)[order]
            if self._sessions:
                columns["session"] = pa.array(self._sessions, pa.string()).take(pa.array(order))
                columns["turn"] = np.array(self._turns)[order]
            self._requests_table = pa.table(columns | numbers | {"service": service} | words)
        return self._requests_table


@mypyc_attr(allow_interpreted_subclasses=True)
class Lane(StepRecorder):
    """Records the steps of one replica of a fleet; its requests go to the fleet's table."""

    def __init__(self, whole: Recorder, index: int) -> None:
        super().__init__()
        self._absent = whole._absent  # a preempted request may resume on another replica
        self._whole = whole
        self._index = index

    def left(self, request: Request) -> None:
        """Record a request that left the fleet from this replica, or is alive on it at the end."""
        self._whole.left(request)
        self._whole._places[-1] = self._index
