"""Inputs of metrics: a run's tables by column, and properties of its server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core.errors import ConfigError, choices
from pagedsim.metrics.replica_columns import ReplicaSums
from pagedsim.metrics.service import ServiceOverTime, service_of
from pagedsim.metrics.slo import Reader, Slo
from pagedsim.metrics.steps import REPLICA, Batches, TierUse
from pagedsim.metrics.token_times import Resumptions, Stretches

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Column = Callable[[str], pa.ChunkedArray]
EachRequest = Callable[["Requests"], Floats]
"""One value per request; NaN for none."""

NAN = float("nan")


WORKING_SET = "working_set"
"""Column of requests of sessions and of traces that name blocks."""
TOKEN_TIMES = "token_times"
"""Column of the arrival times of output chunks, as measured by a client."""


class TokenTimes(NamedTuple):
    """Arrival times of output chunks, concatenated over requests."""

    offsets: NDArray[np.int64]
    """Start of the times of each request, and the end."""
    times: Floats

    def of(self, row: int) -> Floats:
        return self.times[self.offsets[row] : self.offsets[row + 1]]

    def gaps(self, rows: Mask) -> Floats:
        """All gaps between consecutive chunks of the masked requests."""
        counts = np.diff(self.offsets)
        whose = np.repeat(np.arange(len(counts)), counts)
        same = (whose[1:] == whose[:-1]) & rows[whose[1:]]
        first = int(self.offsets[0])
        return np.diff(self.times[first : first + len(whose)])[same]


class Table:
    """A recorded table, with lazily read columns."""

    def __init__(self, column: Column, columns: Sequence[str], name: str = "requests") -> None:
        """`column` raises KeyError for all but `columns`."""
        self._column, self._columns, self._name = column, columns, name
        self._cache: dict[object, NDArray[Any]] = {}

    @classmethod
    def of(cls, rows: Batches, name: str = "requests") -> Self:
        """The columns of a table in memory, or of steps."""

        def column(name: str) -> pa.ChunkedArray:
            kind = rows.schema.field(name).type
            return pa.chunked_array([batch[name] for batch in rows.to_batches()], kind)

        return cls(column, rows.schema.names, name)

    def only(self, rows: Mask) -> Self:
        mask = pa.array(rows)
        return type(self)(lambda name: self._column(name).filter(mask), self._columns, self._name)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if (column := self.optional(name)) is None:
            raise KeyError(f"{self._name} have no column {name!r}; {choices(name, self._columns)}")
        return column

    def __len__(self) -> int:
        return len(self[self._columns[0]])

    def optional(self, name: str) -> NDArray[Any] | None:
        """A column; None if it does not exist."""
        if name not in self._cache:
            try:
                self._cache[name] = np.asarray(self._column(name).to_numpy())
            except KeyError:
                return None
        return self._cache[name]

    def where(self, name: str, word: str) -> Mask:
        """Mask of the rows with this value in a string column."""
        column = self._column(name)
        if not len(column):
            return np.zeros(0, dtype=bool)
        return np.asarray(pc.equal(column, word).to_numpy())

    def lists(self, name: str) -> tuple[NDArray[np.int64], Floats] | None:
        """A list column as offsets and concatenated values; None if it does not exist."""
        try:
            column = self._column(name).combine_chunks()
        except KeyError:
            return None
        return np.asarray(column.offsets, dtype=np.int64), np.asarray(column.values)

    def encoded(self, name: str) -> tuple[list[str], NDArray[np.int64]]:
        """Dictionary encoding of a string column: distinct values, and an index per row, -1 for
        null; raises KeyError if it does not exist."""
        coded = pc.dictionary_encode(self._column(name).combine_chunks())
        indices = pc.fill_null(coded.indices, -1).to_numpy()
        return coded.dictionary.to_pylist(), np.asarray(indices, dtype=np.int64)


class Requests(Table):
    """The table of requests."""

    @cached_property
    def generated(self) -> NDArray[np.int64]:
        """Output tokens of each request, over all its sequences."""
        return np.asarray(self["output_tokens"] * self["sequences"].astype(np.int64))

    def in_state(self, state: str) -> Mask:
        """Mask of the requests in a state: finished, rejected, aborted or unfinished."""
        key = ("state", state)
        if key not in self._cache:
            self._cache[key] = self.where(*key)
        return self._cache[key]

    def per_request(self, of: EachRequest) -> Floats:
        """One value per request, cached; NaN for unfinished requests."""
        if of not in self._cache:
            values, finished = np.asarray(of(self)), self.in_state("finished")
            if values.shape != finished.shape or values.dtype.kind not in "iuf":
                raise ConfigError(
                    f"metric {of.__name__}: answered {values.dtype} of shape {values.shape}: must "
                    f"be numbers of shape {finished.shape}, one a request"
                )
            self._cache[of] = np.where(finished, values, NAN)
        return self._cache[of]


class StepPart:
    """A chunk of steps, by column."""

    def __init__(self, batch: pa.RecordBatch, block_size: float) -> None:
        self._batch = batch
        self.block_size = block_size

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.asarray(self._batch[name].to_numpy())

    @cached_property
    def seconds(self) -> Floats:
        return np.asarray(self["end"] - self["start"])


def stretches_of(requests: Requests, decode_ends: Sequence[Floats]) -> Stretches:
    """The tokens of all requests; `decode_ends` has the ends of decode steps of each replica."""
    resumed = None
    if (before := requests.lists("tokens_before")) is not None:
        offsets, values = before
        starts, replicas = (requests.lists(name) for name in ("resumed", "resumed_on"))
        assert starts is not None
        whose = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        on = np.zeros_like(whose) if replicas is None else replicas[1].astype(np.int64)
        resumed = Resumptions(whose, values.astype(np.int64), starts[1], on)
    first, finished = requests["first_token"], requests["finished"]
    last = np.where(requests.in_state("finished"), finished, NAN)
    replica = requests.optional(REPLICA) if len(decode_ends) > 1 else None
    return Stretches.of(first, last, requests["output_tokens"], decode_ends, replica, resumed)


def service_over_time(
    requests: Requests,
    clients: NDArray[np.int64],
    stretches: Stretches | None,
    alone: bool = True,
) -> ServiceOverTime:
    """Service of clients over time; `clients` has the client number of each request.

    Without `stretches`, or where no request was scheduled as far as is known, tokens are spread
    evenly over time, and requests wait until their first tokens. `alone`: the steps are those of
    one replica.
    """
    known = stretches is not None and not np.isnan(requests["scheduled"].astype(float)).all()
    return ServiceOverTime(
        clients,
        requests["arrival"],
        requests["first_token"],
        requests["finished"],
        requests["prompt_tokens"],
        requests["output_tokens"],
        scheduled=requests["scheduled"] if known else None,
        sequences=requests["sequences"],
        stretches=stretches if known else None,
        alone=alone,
    )


class Span(NamedTuple):
    """A period in which a replica was up, or down after a failure."""

    begin: float
    end: float
    there: bool
    """Whether it was up; otherwise it had failed and was to be restarted."""
    idle_watts: float | None = None
    """Power between steps."""
    euros_per_hour: float | None = None


@dataclass(frozen=True)
class RunTables:
    """The tables and properties of a whole run."""

    requests: Requests
    decode_ends: Sequence[Floats]
    """Ends of the steps with decodes, of each replica."""
    last_end: float
    """End of the last step, or of the run if steps are not known."""
    slots: float
    """Token slots of all blocks."""
    max_seqs: float
    reader: Reader
    slo: Slo | None = None
    flops: float | None = None
    bytes: float | None = None
    """Bytes of all steps."""
    peak_flops: float | None = None
    """FLOP/s of the hardware."""
    peak_bandwidth: float | None = None
    """Bytes/s of the hardware."""
    swapped_peak: int | None = None
    """Peak number of blocks swapped to the CPU; None without swap space."""
    tiers: Mapping[str, TierUse] | None = None
    """Traffic of each tier below the GPU; None without tiers."""
    joules: float | None = None
    """Energy of all GPUs during steps."""
    idle_watts: float | None = None
    """Total power of all GPUs between steps."""
    euros_per_hour: float | None = None
    """Total price of all GPUs, busy or idle."""
    replica_sums: ReplicaSums | None = None
    spans: Sequence[Span] | None = None
    """Periods of up and down time of a dynamic fleet; None: all were up all the time."""
    open_loop: bool = False
    """Whether requests came at a rate of their own, not once others were answered."""
    cut_sessions: Collection[str] = ()
    """Sessions of which not all requests were sent when the run ended."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """The recorded tables by name; without those that the backend cannot record."""

    @property
    def servers(self) -> int:
        return len(self.replica_sums.facts) if self.replica_sums is not None else 1

    def of_spans(self, value: Callable[[Span], float | None]) -> float | None:
        """The integral of a value over all spans within the makespan; None if it is not known for
        one of them."""
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
        """Total uptime of all replicas."""
        if self.spans is None:
            return self.makespan * self.servers
        return self.of_spans(lambda span: span.there) or 0.0

    @cached_property
    def stretches(self) -> Stretches:
        """When each token came, by the steps."""
        return stretches_of(self.requests, self.decode_ends)

    @property
    def spread_answers(self) -> int:
        """Number of finished requests with several tokens whose times are not all known."""
        if (times := self.token_times) is not None:
            spread = np.diff(times.offsets) < self.requests["output_tokens"]
        else:
            spread = self.stretches.spread
        return int(np.sum(spread & self.requests.in_state("finished")))

    @cached_property
    def makespan(self) -> float:
        """From the first arrival to the last finish, or to the last step's end if any request is
        unfinished."""
        arrived, finished = self.requests["arrival"], self.requests.in_state("finished")
        if not len(arrived):
            return NAN
        over = float(self.requests["finished"][finished].max()) if finished.any() else NAN
        if self.requests.in_state("unfinished").any():
            over = self.last_end
        return over - float(arrived.min())

    def per_second_of_arrivals(self, count: int) -> float:
        """The rate at which so many of the requests arrived, which a longer run does not change;
        over the makespan if they did not come at a rate."""
        arrival = self.requests["arrival"]
        if not self.open_loop or not (window := float(np.ptp(arrival))):
            return ratio(count, self.makespan)
        # So many intervals lie between them.
        return count / len(arrival) * (len(arrival) - 1) / window

    @cached_property
    def clients(self) -> list[str]:
        """Names of the clients, in the order of the table."""
        return self._numbered[0]

    @cached_property
    def _numbered(self) -> tuple[list[str], NDArray[np.int64]]:
        return self.requests.encoded("client")

    @cached_property
    def session(self) -> NDArray[np.int64] | None:
        """The session number of each request, -1 for none and for one that was cut; None if there
        are no sessions."""
        try:
            names, session = self.requests.encoded("session")
        except KeyError:
            return None
        cut = np.array([name in self.cut_sessions for name in names] + [False])  # that of none
        return np.where(cut[session], -1, session)

    @cached_property
    def service(self) -> Floats:
        requests = self.requests
        return service_of(requests["prompt_tokens"], requests.generated, requests["first_token"])

    @cached_property
    def service_over_time(self) -> ServiceOverTime:
        """Service of `clients` over time."""
        alone = len(self.decode_ends) == 1
        return service_over_time(self.requests, self._numbered[1], self.stretches, alone)

    @cached_property
    def qoe(self) -> Floats:
        """One value per request; NaN for unfinished requests."""
        finished = self.requests.in_state("finished")
        rows = np.flatnonzero(finished)
        arrival, tokens = (self.requests[name][rows] for name in ("arrival", "output_tokens"))
        values = np.full(len(finished), NAN)
        if (times := self.token_times) is not None:
            values[rows] = self.reader.qoe_of_times(
                arrival, tokens, list(map(times.of, rows.tolist()))
            )
        else:
            values[rows] = self.reader.qoe(arrival, tokens, self.stretches, rows)
        return values

    @cached_property
    def token_times(self) -> TokenTimes | None:
        """Measured arrival times of tokens; None if they follow from the steps."""
        lists = self.requests.lists(TOKEN_TIMES)
        return None if lists is None else TokenTimes(*lists)


@dataclass(frozen=True)
class RequestGroup:
    """A group of requests of a run: all, or those of one client."""

    run: RunTables
    mask: Mask

    @property
    def requests(self) -> Requests:
        """All requests of the run."""
        return self.run.requests

    @cached_property
    def finished(self) -> Mask:
        """Mask of the finished requests of the group."""
        return self.mask & self.requests.in_state("finished")

    def read(self, name: str) -> Any:
        """What a metric gets for a parameter of this name: a table's rows, those of these requests
        if its rows belong to requests; None if the run lacks it."""
        if name in ("group", "run"):
            return self if name == "group" else self.run
        table = self.run.tables.get(name)
        if table is None or (ids := table.optional("request")) is None or self.mask.all():
            return table
        rows = self.requests["request"][self.mask]
        return table.only(self.mask if name == "requests" else np.isin(ids, rows))

    def count(self, state: str) -> int:
        return int(np.sum(self.mask & self.requests.in_state(state)))

    def total(self, name: str) -> float:
        """The sum of a column of counts; NaN if not known."""
        total = self.requests[name][self.mask].sum()
        return NAN if np.isnan(total) else int(total)

    def per_second(self, count: int) -> float:
        """A count over the makespan of the whole run, so that the clients' rates add up."""
        return ratio(count, self.run.makespan)


def ratio(some: float, of: float) -> float:
    """`some / of`; NaN if `of` is 0."""
    return some / of if of else NAN
