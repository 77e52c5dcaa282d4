"""What happened, in columns: one row a step, one row a request, no object kept."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.core import Request, Scheduler, StepPlan

STEP_COLUMNS = (
    "start",
    "end",
    "step",
    "prefill_tokens",
    "prefill_context",
    "prefill_attention",
    "prefill_pairs",
    "prefill_requests",
    "sampled_prefills",
    "decode_seqs",
    "decode_context",
    "waiting",
    "running",
    "swapped",
    "used_blocks",
    "preempted",
    "displaced",
    "swap_out",
    "swap_in",
    "rejected",
)
ROW_COLUMNS = tuple(name for name in STEP_COLUMNS if name not in ("end", "used_blocks"))
_DECODES = ROW_COLUMNS.index("decode_seqs")
REQUEST_COLUMNS = (
    "priority",
    "arrival",
    "scheduled",
    "first_token",
    "finished",
    "prompt_tokens",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "swapped_blocks",
    "cached_tokens",
)
_FLOATS = frozenset(("priority", "arrival", "scheduled", "first_token", "finished"))
_NAN = float("nan")


class Recorder:
    """Collects steps and requests as they go by, and makes tables of them.

    Rows lie flat in arrays of numbers: no object a step, nothing for the garbage collector. A run
    of quiet steps, which differ by one token a sequence, is one row and what differs in it.
    """

    def __init__(self) -> None:
        self._rows = array("d")
        self._first = array("q")  # for each row, its first step among all
        self._ends = array("d")  # for each step
        self._used = array("q")  # for each step, blocks in use
        self._requests = array("d")
        self._ids: list[int | str] = []
        self._words: list[tuple[str, str, str]] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed."""
        chunks = plan.chunks
        self._first.append(len(self._ends))
        self._ends.append(end)
        self._used.append(scheduler.memory.used)
        self._rows.extend(
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

    def again(self, end: float, used_blocks: int) -> None:
        """The same step once more, right after it, each sequence a token longer."""
        self._ends.append(end)
        self._used.append(used_blocks)

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected; or the run ends while it is alive."""
        self._ids.append(request.id)
        state = "unfinished" if request.alive else request.state.value
        self._words.append((request.client, state, request.finish_reason or ""))
        self._requests.extend(
            (
                request.priority,
                _time(request.arrival),
                _time(request.scheduled_at),
                _time(request.first_token_at),
                _time(request.finished_at),
                request.prompt_len,
                request.generated * request.width,
                request.preemptions,
                request.recomputed_tokens,
                request.swapped_blocks,
                request.cached_tokens,
            )
        )

    def steps_table(self) -> pa.Table:
        """One row a step, in order."""
        rows = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, len(ROW_COLUMNS))
        ends, used = np.array(self._ends), np.array(self._used)
        first = np.array(self._first)
        times = np.diff(first, append=len(ends))  # steps that a row stands for
        later = np.arange(len(ends)) - np.repeat(first, times)  # which of them this one is

        def column(name: str) -> NDArray[Any]:
            if name == "end":
                return ends
            if name == "used_blocks":
                return used
            values = rows[:, ROW_COLUMNS.index(name)]
            if name == "start":
                # A quiet step starts where the one before it ended.
                starts = np.concatenate((values[:1], ends[:-1]))
                starts[first] = values
                return starts
            column = np.repeat(values.astype(np.int64), times)
            if name == "step":
                column += later
            elif name == "decode_context":
                column += later * np.repeat(rows[:, _DECODES].astype(np.int64), times)
            return column

        return pa.table({name: column(name) for name in STEP_COLUMNS})

    def requests_table(self) -> pa.Table:
        """One row a request, in the order of their ids."""
        clients, states, reasons = zip(*self._words, strict=True) if self._words else ((), (), ())
        columns: dict[str, Any] = {"request": self._ids, "client": clients}
        columns |= _columns(self._requests, REQUEST_COLUMNS)
        columns |= {"state": states, "reason": reasons}
        return pa.table(columns).sort_by("request")


def _time(time: float | None) -> float:
    return _NAN if time is None else time


def _columns(flat: array[float], names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    rows = np.frombuffer(flat, dtype=np.float64).reshape(-1, len(names))
    return {
        name: rows[:, i].copy() if name in _FLOATS else rows[:, i].astype(np.int64)
        for i, name in enumerate(names)
    }
