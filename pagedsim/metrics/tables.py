"""What metrics are worked out of: a run's tables, by column, and what is known of its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.metrics.qoe import Reader, decoded
from pagedsim.metrics.replica_columns import Lanes
from pagedsim.metrics.service import ServiceOverTime, service_of
from pagedsim.metrics.slo import Slo
from pagedsim.metrics.steps import REPLICA
from pagedsim.metrics.tiers import TierUse

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]
"""Numbers of requests, as they stand in their table."""
EachRequest = Callable[["Requests"], Floats]
"""One value a request; NaN for one that has none."""

NAN = float("nan")


TOKEN_TIMES = "token_times"
"""The column of requests that has when each part of an answer came, where a client saw it come."""


class TokenTimes(NamedTuple):
    """When parts of answers came, of all requests after each other."""

    offsets: NDArray[np.int64]
    """Where the times of each request begin, and at last where all end."""
    times: Floats

    def of(self, row: int) -> Floats:
        """Those of one request."""
        return self.times[self.offsets[row] : self.offsets[row + 1]]

    def gaps(self, rows: Mask) -> Floats:
        """Every gap between two parts of one answer, of some requests."""
        counts = np.diff(self.offsets)
        whose = np.repeat(np.arange(len(counts)), counts)
        same = (whose[1:] == whose[:-1]) & rows[whose[1:]]
        first = int(self.offsets[0])
        return np.diff(self.times[first : first + len(whose)])[same]


class Requests:
    """The table of requests, of which a column is read when it is first asked for."""

    def __init__(self, column: Callable[[str], pa.ChunkedArray]) -> None:
        self._column = column
        self._columns: dict[str, NDArray[Any]] = {}
        self._values: dict[EachRequest, Floats] = {}
        self._states: dict[str, Mask] = {}

    @classmethod
    def of(cls, table: pa.Table) -> Requests:
        """Those of a table in memory."""
        return cls(table.column)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._columns:
            self._columns[name] = np.asarray(self._column(name).to_numpy())
        return self._columns[name]

    def has(self, name: str) -> bool:
        """Whether there is such a column."""
        try:
            self[name]
        except KeyError:
            return False
        return True

    @cached_property
    def generated(self) -> NDArray[np.int64]:
        """The output tokens of all sequences of each."""
        return np.asarray(self["output_tokens"] * self["sequences"].astype(np.int64))

    def are(self, state: str) -> Mask:
        """Which are finished, rejected, aborted or unfinished."""
        if state not in self._states:
            self._states[state] = self.where("state", state)
        return self._states[state]

    def where(self, name: str, word: str) -> Mask:
        """Which have this word in a column of words."""
        column = self._column(name)
        if not len(column):
            return np.zeros(0, dtype=bool)
        return np.asarray(pc.equal(column, word).to_numpy())

    def lists(self, name: str) -> tuple[NDArray[np.int64], Floats] | None:
        """A column of lists, as where each begins and ends and what is in all of them; None where
        there is no such column."""
        try:
            column = self._column(name).combine_chunks()
        except KeyError:
            return None
        return np.asarray(column.offsets, dtype=np.int64), np.asarray(column.values)

    def optional(self, name: str) -> NDArray[Any] | None:
        """A column that there may be or not."""
        try:
            return self[name]
        except KeyError:
            return None

    def numbered(self, name: str) -> tuple[list[str], NDArray[np.int64]]:
        """The words of a column, each once as they come, and which one each request has."""
        coded = pc.dictionary_encode(self._column(name).combine_chunks())
        return coded.dictionary.to_pylist(), np.asarray(coded.indices.to_numpy(), dtype=np.int64)

    @cached_property
    def session(self) -> NDArray[np.int64] | None:
        """The number of each request's session, -1 for one of none; None where there are none."""
        try:
            coded = pc.dictionary_encode(self._column("session").combine_chunks())
        except KeyError:
            return None
        return np.asarray(pc.fill_null(coded.indices, -1).to_numpy(), dtype=np.int64)

    def each(self, of: EachRequest) -> Floats:
        """One value a request, worked out once; NaN for who did not finish."""
        if of not in self._values:
            self._values[of] = np.where(self.are("finished"), of(self), NAN)
        return self._values[of]


class StepPart:
    """Some of the steps, by column."""

    def __init__(self, batch: pa.RecordBatch, block_size: float) -> None:
        self._batch = batch
        self.block_size = block_size

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.asarray(self._batch[name].to_numpy())

    @cached_property
    def seconds(self) -> Floats:
        """How long each took."""
        return np.asarray(self["end"] - self["start"])


def service_over_time(
    requests: Requests, clients: NDArray[np.int64], decode_ends: Floats
) -> ServiceOverTime:
    """What clients got over time; `clients` has the number of each request's.

    Where no step is known, tokens come evenly over time, and all waited for their first ones.
    """
    known = len(decode_ends) > 0
    return ServiceOverTime(
        clients,
        requests["arrival"],
        requests["first_token"],
        requests["finished"],
        requests["prompt_tokens"],
        requests["output_tokens"],
        scheduled=requests["scheduled"] if known else None,
        sequences=requests["sequences"],
        ends=decode_ends if known else None,
    )


class Span(NamedTuple):
    """Some time in which a replica was there, or was dead."""

    begin: float
    end: float
    there: bool
    """Whether it was; else it had died, and was to come back."""
    idle_watts: float | None = None
    """What it draws between steps."""
    euros_per_hour: float | None = None


@dataclass(frozen=True)
class RunTables:
    """A whole run."""

    requests: Requests
    decode_ends: Sequence[Floats]
    """When steps in which somebody decoded ended, of each replica."""
    last_end: float
    """When the last of all steps did, or the run where none is known."""
    slots: float
    """Of all blocks."""
    max_seqs: float
    slo: Slo | None
    flops: float | None
    bytes: float | None
    peak_flops: float | None
    peak_bandwidth: float | None
    reader: Reader
    swapped_peak: int | None
    """The most blocks that were on the CPU at once; None where none can be."""
    tiers: Mapping[str, TierUse] | None
    """What was loaded from and written to each tier below the GPU; None where there is none."""
    joules: float | None
    """What all GPUs took in its steps."""
    idle_watts: float | None
    """What they draw between them."""
    euros_per_hour: float | None
    """What they cost, at work or not."""
    lanes: Lanes | None = None
    """What each replica did, where there are several."""
    spans: Sequence[Span] | None = None
    """When each was there, where they come and go; None: all were, all the time."""

    @property
    def servers(self) -> int:
        """How many replicas there were."""
        return len(self.lanes.facts) if self.lanes is not None else 1

    def of_spans(self, value: Callable[[Span], float | None]) -> float | None:
        """The sum of a value over the seconds of all spans, as far as they lie in the makespan;
        None where it is not known of one."""
        begin = float(self.requests["arrival"].min(initial=inf))
        end, total = begin + self.makespan, 0.0
        for span in self.spans or ():
            if (seconds := min(span.end, end) - max(span.begin, begin)) > 0:
                if (worth := value(span)) is None:
                    return None
                total += worth * seconds
        return total

    @property
    def server_seconds(self) -> float:
        """For how long all replicas were there, together."""
        if self.spans is None:
            return self.makespan * self.servers
        return self.of_spans(lambda span: span.there) or 0.0

    def by_replica(self) -> Iterator[tuple[Rows, Floats]]:
        """Of each replica the requests that left it, and `decode_ends`."""
        if len(self.decode_ends) == 1:
            yield np.arange(len(self.requests["arrival"])), self.decode_ends[0]
            return
        order, bounds = self._grouped
        for index, ends in enumerate(self.decode_ends):
            yield order[bounds[index] : bounds[index + 1]], ends

    @cached_property
    def _grouped(self) -> tuple[Rows, Rows]:
        """The requests replica by replica, and where those of each begin."""
        where = self.requests[REPLICA]
        order = np.argsort(where, kind="stable")
        return order, np.searchsorted(where[order], np.arange(len(self.decode_ends) + 1))

    @cached_property
    def begun(self) -> Floats:
        """When each request began to decode where it left: with its first token, or later if that
        came from elsewhere."""
        first = self.requests["first_token"]
        try:
            left, boarded = self.requests["left"], self.requests["boarded"]
        except KeyError:
            return first
        return np.where(left == first, boarded, first)

    @cached_property
    def makespan(self) -> float:
        """First arrival to last finish; to the last step's end, if anybody is unfinished."""
        arrived, finished = self.requests["arrival"], self.requests.are("finished")
        if not len(arrived):
            return NAN
        over = float(self.requests["finished"][finished].max()) if finished.any() else NAN
        if self.requests.are("unfinished").any():
            over = self.last_end
        return over - float(arrived.min())

    @cached_property
    def clients(self) -> list[str]:
        """Who sent requests, in the order of the table."""
        return self._numbered[0]

    @cached_property
    def _numbered(self) -> tuple[list[str], NDArray[np.int64]]:
        return self.requests.numbered("client")

    @cached_property
    def service(self) -> Floats:
        """What each request got."""
        each = self.requests
        return service_of(each["prompt_tokens"], each.generated, each["first_token"])

    @cached_property
    def service_over_time(self) -> ServiceOverTime:
        """What each of `clients` got over time."""
        # Whose steps a fleet's request was served in is not asked: its tokens come evenly.
        ends = self.decode_ends[0] if len(self.decode_ends) == 1 else np.empty(0)
        return service_over_time(self.requests, self._numbered[1], ends)

    @cached_property
    def qoe(self) -> Floats:
        """One value a request; NaN for who did not finish."""
        finished = self.requests.are("finished")
        names = ("arrival", "output_tokens", "first_token", "finished")
        found = np.full(len(finished), NAN)
        if (times := self.token_times) is not None:
            came = [times.of(row) for row in np.flatnonzero(finished).tolist()]
            arrival, tokens = (self.requests[name][finished] for name in names[:2])
            found[finished] = self.reader.qoe_of_times(arrival, tokens, came)
            return found
        begin, steps = (some[finished] for some in self._decoded)
        arrival, tokens, first, last = (self.requests[name][finished] for name in names)
        several = len(self.decode_ends) > 1
        ends = np.concatenate(self.decode_ends) if several else self.decode_ends[0]
        found[finished] = self.reader.qoe(arrival, first, last, tokens, begin, steps, ends)
        return found

    @cached_property
    def _decoded(self) -> tuple[Rows, Rows]:
        """What `decoded` says of each request, in all `decode_ends` one after the other."""
        begin = np.zeros(len(self.requests["arrival"]), dtype=np.int64)
        steps, before = np.zeros_like(begin), 0
        for rows, ends in self.by_replica():
            first, last = (self.requests[name][rows] for name in ("first_token", "finished"))
            begin[rows], steps[rows] = decoded(ends, first, last)
            begin[rows] += before
            before += len(ends)
        return begin, steps

    @cached_property
    def token_times(self) -> TokenTimes | None:
        """When each request's tokens came, where that was seen; None where steps tell."""
        lists = self.requests.lists(TOKEN_TIMES)
        return None if lists is None else TokenTimes(*lists)


@dataclass(frozen=True)
class Served:
    """Requests of a run that are summed up together: all, or those of one client."""

    run: RunTables
    mask: Mask
    """Which of the run's requests they are."""

    @property
    def requests(self) -> Requests:
        """All of the run."""
        return self.run.requests

    @cached_property
    def finished(self) -> Mask:
        """Which of all are among them and were served to their end."""
        return self.mask & self.requests.are("finished")

    def count(self, state: str) -> int:
        """How many of them are in a state."""
        return int(np.sum(self.mask & self.requests.are(state)))

    def total(self, name: str) -> float:
        """The sum of a column of counts; NaN where they are not known."""
        total = self.requests[name][self.mask].sum()
        return NAN if np.isnan(total) else int(total)

    def per_second(self, count: int) -> float:
        """A count over the makespan of the whole run, so that the rates of clients add up."""
        return ratio(count, self.run.makespan)


def ratio(some: float, of: float) -> float:
    """`some / of`; NaN where there is nothing to divide by."""
    return some / of if of else NAN
