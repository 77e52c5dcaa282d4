"""The steps of a run: stored run-length encoded, and expanded in chunks.

With memory tiers, steps have a column of loaded and one of written blocks for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# 32 bits suffice for requests, blocks, and tokens of a request or step, but not for sums of context
# lengths over a batch.
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
    "shared_blocks": np.int32,
    "preempted": np.int32,
    "displaced": np.int32,
    "swap_out": np.int32,
    "swap_in": np.int32,
    "rejected": np.int32,
}
REPLICA = "replica"
"""Column of the replica that served a request or executed a step."""
CAME_FROM = "came_from"
"""Column of the replica that a migrated request came from."""
PART = 1 << 18
"""Steps per chunk, since a run may have millions."""

Column = NDArray[Any]


class Sliced(Protocol):
    """A column that supports slicing."""

    def __getitem__(self, part: slice, /) -> Column:
        """The rows from `part.start` up to `part.stop`."""


class Batches(Protocol):
    """Steps that can be iterated repeatedly: a `Steps` or a table."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @property
    def num_rows(self) -> int:
        """How many steps there were."""

    def to_batches(self) -> Iterable[pa.RecordBatch]:
        """All rows in order, in batches; for a fleet, replica by replica."""


@dataclass(frozen=True, eq=False)
class Since:
    """The steps that begin at a time or later."""

    whole: Batches
    begin: float

    @property
    def schema(self) -> pa.Schema:
        return self.whole.schema

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.to_batches())

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        for batch in self.whole.to_batches():
            if (later := batch.filter(pc.greater_equal(batch["start"], self.begin))).num_rows:
                yield later


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of one run.

    A run of uneventful steps, which differ by one token per sequence, is one row of `rows`; `first`
    has the number of its first step. Only `ends` and `used` have a value per step.
    """

    rows: Mapping[str, Sliced]
    first: NDArray[np.int32]
    ends: NDArray[np.float64]
    used: NDArray[np.int32]
    more: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.ends)

    @property
    def seconds(self) -> float:
        return sum(
            float((part["end"].to_numpy() - part["start"].to_numpy()).sum())
            for part in self.to_batches()
        )

    @property
    def schema(self) -> pa.Schema:
        types = {name: pa.from_numpy_dtype(kind) for name, kind in STEP_COLUMNS.items()}
        return pa.schema(types | {name: values.type for name, values in self.more.items()})

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.to_batches(), self.schema)

    def append_column(self, name: str, values: pa.Array) -> Steps:
        """A copy with another column, which has a value per step."""
        return replace(self, more={**self.more, name: values})

    def to_batches(self, max_chunksize: int = PART) -> Iterator[pa.RecordBatch]:
        """All rows in order, at most `max_chunksize` per batch."""
        for begin in range(0, self.num_rows, max_chunksize):
            part = slice(begin, min(begin + max_chunksize, self.num_rows))
            columns = self._unfolded(part)
            arrays = [columns[name] for name in STEP_COLUMNS]
            more = [values[part] for values in self.more.values()]
            yield pa.record_batch([*arrays, *more], schema=self.schema)

    def _unfolded(self, part: slice) -> dict[str, Column]:
        begin, end = part.start, part.stop
        rows = slice(
            int(np.searchsorted(self.first, begin, side="right")) - 1,
            int(np.searchsorted(self.first, end)),
        )
        first = self.first[rows]
        times = np.diff(
            np.maximum(first, begin), append=end
        )  # steps in the range that each row represents
        columns = {
            name: np.repeat(values[rows], times)
            for name, values in self.rows.items()
            if name != "start"
        }
        # The index of each step within its row.
        later = np.arange(begin, end, dtype=np.int32) - np.repeat(first, times)
        columns["step"] += later
        columns["decode_context"] += np.multiply(later, columns["decode_seqs"], dtype=np.int64)
        columns["end"], columns["used_blocks"] = self.ends[part], self.used[part]
        # An uneventful step starts at the end of the previous one.
        columns["start"] = np.empty(end - begin)
        columns["start"][1:] = columns["end"][:-1]
        columns["start"][0] = self.ends[begin - 1]
        new = first >= begin
        columns["start"][first[new] - begin] = self.rows["start"][rows][new]
        return columns


class FleetSteps:
    """The steps of several replicas, concatenated, with a replica column."""

    def __init__(self, replicas: Sequence[Steps]) -> None:
        self.replicas = replicas

    @property
    def num_rows(self) -> int:
        return sum(steps.num_rows for steps in self.replicas)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, including those that only some replicas have."""
        schema = pa.unify_schemas([steps.schema for steps in self.replicas])
        return schema.append(pa.field(REPLICA, pa.int32()))

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, at most `PART` of one replica at a time."""
        schema = self.schema
        for index, steps in enumerate(self.replicas):
            for batch in steps.to_batches():
                rows, has = batch.num_rows, set(batch.schema.names)
                whose = pa.array(np.full(rows, index, dtype=np.int32))
                nothing = pa.array(np.zeros(rows, dtype=np.int32))
                columns = [batch[name] if name in has else nothing for name in schema.names[:-1]]
                yield pa.record_batch([*columns, whose], schema=schema)


LOADED, WRITTEN = "loaded_", "written_"
"""Prefixes of the step columns, followed by the name of a tier."""
HOST = "host"
"""The name of the tier that `offload=` has below the GPU."""


class TierUse(NamedTuple):
    """Traffic of one tier."""

    loaded_tokens: int
    """Cached tokens that were loaded instead of computed."""
    written_blocks: int


def tiers_of(steps: Batches, sizes: Sequence[float]) -> dict[str, TierUse] | None:
    """Traffic of each tier; None without tiers. `sizes` are the block sizes of the replicas."""
    names = [name.removeprefix(LOADED) for name in steps.schema.names if name.startswith(LOADED)]
    if not names:
        return None
    use = {name: TierUse(0, 0) for name in names}
    for batch in steps.to_batches():
        size = sizes[batch[REPLICA][0].as_py() if len(sizes) > 1 else 0]
        for name, before in use.items():
            loaded, written = (
                int(batch[what + name].to_numpy().sum()) for what in (LOADED, WRITTEN)
            )
            use[name] = TierUse(
                before.loaded_tokens + int(loaded * size), before.written_blocks + written
            )
    return use
