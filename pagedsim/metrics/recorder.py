"""What happened, in columns: one row a step, one row a request, no object kept."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.metrics.columns import Numbers, Words, column_of

# 32 bits hold what is counted in requests, blocks, or tokens of one request or step; not sums over
# a batch of what each attends to.
STEP_COLUMNS: Mapping[str, type[np.generic]] = {
    "start": np.float64,
    "end": np.float64,
    "step": np.int32,
    "prefill_tokens": np.int32,
    "prefill_context": np.int64,
    "prefill_attention": np.int64,
    "prefill_pairs": np.int64,
    "prefill_requests": np.int32,
    "sampled_prefills": np.int32,
    "decode_seqs": np.int32,
    "decode_context": np.int64,
    "waiting": np.int32,
    "running": np.int32,
    "swapped": np.int32,
    "used_blocks": np.int32,
    "preempted": np.int32,
    "displaced": np.int32,
    "swap_out": np.int32,
    "swap_in": np.int32,
    "rejected": np.int32,
}
_EACH_STEP = ("end", "used_blocks")
"""Kept for every step; of the other columns a run of quiet steps has one row."""
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
_NAN = float("nan")


class Recorder:
    """Collects steps and requests as they go by, and makes tables of them.

    Numbers lie in arrays: no object a step, nothing for the garbage collector. A run of quiet
    steps, which differ by one token a sequence, is one row and what differs in it. Making a table
    ends the recording, since it takes over what was recorded.
    """

    def __init__(self) -> None:
        self._steps = Numbers({k: t for k, t in STEP_COLUMNS.items() if k not in _EACH_STEP})
        self._first = array("q")  # for each row of these, its first step among all
        self._ends = array("d")  # for each step
        self._used = array("i")  # for each step, blocks in use
        self._requests = Numbers(REQUEST_COLUMNS)
        self._ids: array[int] | list[int | str] = array("q")  # a list where they are words
        self._words = Words("client", "state", "reason")
        self._steps_table: pa.Table | None = None
        self._requests_table: pa.Table | None = None

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed."""
        chunks = plan.chunks
        self._first.append(len(self._ends))
        self._ends.append(end)
        self._used.append(scheduler.memory.used)
        steps = self._steps
        steps.rows.extend(
            (
                start,
                plan.number,
                plan.prefill_tokens,
                plan.prefill_context,
                plan.prefill_attention,
                plan.prefill_pairs,
                len({chunk.request for chunk in chunks}) if chunks else 0,
                sum([chunk.samples for chunk in chunks]) if chunks else 0,
                plan.decode_count,
                plan.decode_context,
                len(scheduler.waiting),
                len(scheduler.running),
                len(scheduler.swapped),
                len(plan.preempted),
                len(plan.displaced),
                len(plan.swap_out),
                len(plan.swap_in),
                len(plan.rejected),
            )
        )
        if len(steps.rows) == steps.full:
            steps.pack()

    def again(self, end: float, used_blocks: int) -> None:
        """The same step once more, right after it, each sequence a token longer."""
        self._ends.append(end)
        self._used.append(used_blocks)

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected; or the run ends while it is alive."""
        if isinstance(request.id, str) and not isinstance(self._ids, list):
            self._ids = list(self._ids)
        self._ids.append(request.id)  # type: ignore[arg-type]
        state = "unfinished" if request.alive else request.state.value
        self._words.append((request.client, state, request.finish_reason or ""))
        requests = self._requests
        requests.rows.extend(
            (
                request.priority,
                _time(request.arrival),
                _time(request.scheduled_at),
                _time(request.first_token_at),
                _time(request.finished_at),
                request.prompt_len,
                request.generated,
                request.width,
                request.preemptions,
                request.recomputed_tokens,
                request.swapped_blocks,
                request.cached_tokens,
            )
        )
        if len(requests.rows) == requests.full:
            requests.pack()

    def steps_table(self) -> pa.Table:
        """One row a step, in order."""
        if self._steps_table is None:
            made = self._step_columns()
            self._steps_table = pa.table({name: made[name] for name in STEP_COLUMNS})
        return self._steps_table

    def _step_columns(self) -> dict[str, pa.ChunkedArray]:
        """The columns of that table, one after the other, so that each needs only its own room."""
        ends = np.frombuffer(self._ends, dtype=np.float64)
        first = np.frombuffer(self._first, dtype=np.int64)
        times = np.diff(first, append=len(ends))  # steps that a row stands for
        take = self._steps.take
        made = {
            "end": column_of(ends),
            "used_blocks": column_of(np.frombuffer(self._used, dtype=np.int32)),
            "start": column_of(_starts(take("start"), first, ends)),
        }
        # Which of the steps of its row each one is.
        later = np.arange(len(ends), dtype=np.int32) - np.repeat(first.astype(np.int32), times)
        sequences = np.repeat(take("decode_seqs"), times)
        made["decode_seqs"] = column_of(sequences)
        growth = np.multiply(later, sequences, dtype=np.int64)
        growth += np.repeat(take("decode_context"), times)
        made["decode_context"] = column_of(growth)
        later += np.repeat(take("step"), times)
        made["step"] = column_of(later)
        for name in STEP_COLUMNS:
            if name not in made:
                made[name] = column_of(np.repeat(take(name), times))
        return made

    def requests_table(self) -> pa.Table:
        """One row a request, in the order of their ids."""
        if self._requests_table is None:
            ids = pa.array(self._ids if isinstance(self._ids, list) else np.array(self._ids))
            order = pc.sort_indices(ids).to_numpy()
            numbers = {name: self._requests.take(name)[order] for name in REQUEST_COLUMNS}
            words = self._words.columns(order)
            columns = {"request": ids.take(order), "client": words.pop("client")}
            self._requests_table = pa.table(columns | numbers | words)
        return self._requests_table


def _starts(
    values: NDArray[np.float64], first: NDArray[np.int64], ends: NDArray[np.float64]
) -> NDArray[np.float64]:
    """When steps start: a quiet one where the one before it ended."""
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]
    starts[first] = values
    return starts


def _time(time: float | None) -> float:
    return _NAN if time is None else time
