"""A workload: columns with one row per request, in order of arrival, and their sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedsim.core import ConfigError, Request, SamplingParams
from pagedsim.core.request import GREEDY
from pagedsim.workload.arrivals import Mode
from pagedsim.workload.limits import LATEST
from pagedsim.workload.tokens import Prompts


class Sessions:
    """Session structure of a workload's rows: conversations or agent programs.

    `session` is the session number from 0 (-1: none), `turn` the position in it from 1. A row is
    sent `pause` seconds after the last of the rows in `after`, all earlier ones, is answered.
    """

    def __init__(
        self,
        session: ArrayLike,
        turn: ArrayLike,
        after: Sequence[Sequence[int]],
        pause: ArrayLike,
        *,
        warmup: int = 0,
        max_idle: float | None = None,
        duration: float | None = None,
    ) -> None:
        """`after` lists the rows that each row depends on. The first `warmup` rows are in no
        metric; those that depend on none are sent their `pause` after the start. In a closed loop,
        what is pending comes sooner once nothing was at the server for `max_idle` seconds, and
        nothing is sent `duration` seconds after the warm-up."""
        self.warmup, self.max_idle, self.duration = warmup, max_idle, duration
        self.session = np.asarray(session, np.int32)
        self.turn = np.asarray(turn, np.int32)
        self.pauses = np.asarray(pause, np.float64)
        sizes = [len(self.session), len(self.turn), len(after), len(self.pauses)]
        if len(set(sizes)) > 1:
            raise ConfigError(f"sessions: columns of {sizes} rows: must be as many each")
        if not ((self.pauses >= 0) & np.isfinite(self.pauses)).all():
            raise ConfigError("sessions: pause: must be seconds of at least 0")
        self._waits = np.fromiter(chain.from_iterable(after), np.int64)
        counts = np.fromiter(map(len, after), np.int64, len(after))
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(np.arange(len(after)), counts)
        if (wrong := np.flatnonzero((self._waits >= rows) | (self._waits < 0))).size:
            row, other = rows[wrong[0]], self._waits[wrong[0]]
            raise ConfigError(f"sessions: row {row} waits for row {other}: must be one before it")
        order = np.argsort(self._waits, kind="stable")
        self._followers = rows[order]
        self._begins = np.searchsorted(self._waits[order], np.arange(len(after) + 1))

    def __len__(self) -> int:
        return len(self.session)

    @property
    def count(self) -> int:
        return int(self.session.max(initial=-1)) + 1

    def name(self, row: int) -> str | None:
        """The session name of a request; None for none."""
        number: int = self.session.item(row)
        return str(number) if number >= 0 else None

    def after(self, row: int) -> list[int]:
        """Rows that must finish before this one is sent."""
        return _between(self._waits, self._starts, row)

    def followers(self, row: int) -> list[int]:
        """Rows that depend on this one."""
        return _between(self._followers, self._begins, row)

    def pause(self, row: int) -> float:
        """Seconds between the last answer it depends on and its arrival."""
        return float(self.pauses.item(row))


def _between(rows: NDArray[np.int64], starts: NDArray[np.int64], row: int) -> list[int]:
    """The slice of `rows` that belongs to a row."""
    start, end = starts.item(row), starts.item(row + 1)
    return rows[start:end].tolist() if start < end else []


T = TypeVar("T", bound=np.generic)

CHUNK = 4096
"""Rows converted to Python objects at a time, so that a million requests never exist at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """The requests of a run; every arm of a comparison serves the same rows.

    For rows that `turns` makes depend on others, `arrival` is the earliest possible arrival.

    Build one with `Workload.of`, which validates, or with `synthetic`, `mix` or `trace`.
    """

    arrival: NDArray[np.float64]  # seconds, never decreasing
    prompt_len: NDArray[np.int32]  # tokens
    output_len: NDArray[np.int32]  # tokens; the true length, hidden from policies
    priority: NDArray[np.float64]  # smaller is more urgent
    client: NDArray[np.int32]  # index into `clients`
    clients: tuple[str, ...]
    predicted_len: NDArray[np.float64]  # tokens; NaN without a prediction
    deadline: NDArray[np.float64]  # seconds; NaN where there is none
    sampling: NDArray[np.int32]  # index into `asked`
    asked: tuple[SamplingParams, ...]  # distinct sampling parameters
    prompts: Prompts | None = None  # prompt contents, where they matter
    turns: Sessions | None = None  # dependencies between the requests of sessions
    extra: Sequence[Mapping[str, Any]] | None = None  # `Request.extra` of each row
    mode: Mode = "open"
    users: int | None = None  # closed loop: number of users
    think_time: float = 0.0  # closed loop: seconds between an answer and the next request
    drawn: bool = True  # whether it is random; if not, every seed gives the same rows
    clipped: int = 0  # requests clipped to fit max_len
    dropped: int = 0  # empty rows of a trace dropped with drop_empty
    notices: tuple[str, ...] = ()  # lines for the notes of a report
    whole: bool = False  # whether max_len leaves out sessions with longer calls

    @classmethod
    def of(
        cls,
        arrival: ArrayLike,
        prompt_len: ArrayLike,
        output_len: ArrayLike,
        *,
        priority: ArrayLike = 0.0,
        client: ArrayLike = 0,
        clients: Sequence[str] = ("",),
        predicted_len: ArrayLike = np.nan,
        deadline: ArrayLike = np.nan,
        sampling: ArrayLike = 0,
        asked: Sequence[SamplingParams] = (GREEDY,),
        extra: Sequence[Mapping[str, Any]] | None = None,
        notices: Sequence[str] = (),
        **fields: Any,
    ) -> Workload:
        """A workload from array-likes; a scalar is the value of a whole column. `fields` are the
        others, as they are.

        >>> Workload.of([0.0, 0.5], [100, 200], [10, 20], priority=1)
        Workload(2 requests over 0.5 s, 150 tokens in and 15 out on average)
        """
        times = _column("arrival", arrival, np.float64, np.size(arrival))
        rows = len(times)
        if not rows:
            raise ConfigError("workload: needs at least one request")
        fine = (times >= 0) & (times <= LATEST)
        if not fine.all():
            raise ConfigError(f"arrival={times[fine.argmin()]:g}: must be from 0 to {LATEST:g} s")
        if (np.diff(times) < 0).any():
            raise ConfigError("arrival: times must not decrease")
        workload = cls(
            arrival=times,
            prompt_len=_column("prompt_len", prompt_len, np.int32, rows),
            output_len=_column("output_len", output_len, np.int32, rows),
            priority=_column("priority", priority, np.float64, rows),
            client=_column("client", client, np.int32, rows),
            clients=tuple(clients),
            predicted_len=_column("predicted_len", predicted_len, np.float64, rows),
            deadline=_column("deadline", deadline, np.float64, rows),
            sampling=_column("sampling", sampling, np.int32, rows),
            asked=tuple(asked),
            extra=None if extra is None else list(map(_frozen, extra)),
            notices=tuple(notices),
            **fields,
        )
        for name in ("prompt_len", "output_len"):
            tokens: NDArray[np.int32] = getattr(workload, name)
            if tokens.min() < 1:
                row = int(tokens.argmin())
                raise ConfigError(f"{name}={tokens[row]} in row {row}: must be at least 1")
        if not np.isfinite(workload.priority).all():
            row = int(np.isfinite(workload.priority).argmin())
            raise ConfigError(f"priority={workload.priority[row]} in row {row}: must be finite")
        if workload.client.min() < 0 or workload.client.max() >= len(workload.clients):
            raise ConfigError(f"client: must be an index into {len(workload.clients)} names")
        if workload.sampling.min() < 0 or workload.sampling.max() >= len(workload.asked):
            raise ConfigError(f"sampling: must be an index into {len(workload.asked)} settings")
        if workload.turns is not None and len(workload.turns) != rows:
            raise ConfigError(f"turns: {len(workload.turns)} for {rows} requests")
        if extra is not None and len(extra) != rows:
            raise ConfigError(f"extra: {len(extra)} for {rows} requests")
        return workload

    def __len__(self) -> int:
        return len(self.arrival)

    def requests(self) -> Iterator[tuple[Request, int]]:
        """Generate each request with its true output length.

        A request's id is its row. In a closed loop its arrival is set when it is sent.
        """
        clients, prompts, asked, turns = self.clients, self.prompts, self.asked, self.turns
        closed, extra = self.mode == "closed", self.extra
        for start in range(0, len(self), CHUNK):
            rows = slice(start, start + CHUNK)
            columns = zip(
                self.arrival[rows].tolist(),
                self.prompt_len[rows].tolist(),
                self.output_len[rows].tolist(),
                self.priority[rows].tolist(),
                self.client[rows].tolist(),
                self.predicted_len[rows].tolist(),
                self.deadline[rows].tolist(),
                self.sampling[rows].tolist(),
                strict=True,
            )
            for row, (at, prompt, output, priority, client, guess, due, how) in enumerate(
                columns, start
            ):
                if prompts is None:
                    request = Request(row, prompt, asked[how])
                else:
                    request = Request(row, prompts[row], asked[how], answer=prompts.answer(row))
                # Separate assignments are faster than a call with that many keyword arguments.
                if not closed:
                    request._arrival = at
                request._priority = priority
                request._client = clients[client]
                if guess == guess:  # NaN is not itself
                    request._predicted_len = guess
                if due == due:
                    request._deadline = due
                if turns is not None:
                    request._session, request._turn = turns.name(row), int(turns.turn[row])
                if extra is not None:
                    request._extra = extra[row]
                yield request, output

    def request(self, row: int) -> Request:
        """The request of a row, without the attributes that only policies see."""
        prompt = int(self.prompt_len[row]) if self.prompts is None else self.prompts[row]
        return Request(row, prompt, self.asked[int(self.sampling[row])])

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return int(np.add(self.prompt_len, self.output_len, dtype=np.int64).max())

    @property
    def duration(self) -> float:
        """Seconds from 0 to the last arrival."""
        return float(self.arrival[-1])

    @property
    def rate(self) -> float:
        """Requests a second between the first arrival and the last; infinite if all are at once."""
        span = float(self.arrival[-1] - self.arrival[0])
        return (len(self) - 1) / span if span else float("inf")

    def __repr__(self) -> str:
        when = {
            "open": f"over {self.duration:.6g} s",
            "burst": "at once",
            "closed": f"from {self.users} users",
        }
        of = "" if self.turns is None else f"of {self.turns.count} sessions "
        requests = f"{len(self)} requests {of}{when[self.mode]}"
        return (
            f"Workload({requests}, {self.prompt_len.mean():.6g} tokens "
            f"in and {self.output_len.mean():.6g} out on average)"
        )


def _frozen(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    return extra if isinstance(extra, MappingProxyType) else MappingProxyType(dict(extra))


def _column(name: str, values: ArrayLike, dtype: type[T], rows: int) -> NDArray[T]:
    """A read-only column; a scalar is broadcast without copies."""
    column = _exactly(name, values, dtype)
    if column.ndim == 0:
        return np.broadcast_to(column, (rows,))
    if column.shape != (rows,):
        raise ConfigError(f"{name}: {column.size} values for {rows} requests")
    column = column.view()
    column.flags.writeable = False
    return column


def _exactly(name: str, values: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Convert to `dtype`; raises ConfigError for values it cannot represent."""
    given = np.asarray(values)
    if given.dtype.kind not in "iuf":
        raise ConfigError(f"{name}: must be numbers")
    if given.dtype == dtype:
        return given
    with np.errstate(invalid="ignore"):  # what does not fit is found below
        column = given.astype(dtype)
    if issubclass(dtype, np.integer) and (bad := np.flatnonzero(column != given)).size:
        value = given.ravel()[bad[0]]
        raise ConfigError(f"{name}={value} in row {bad[0]}: must be a whole number of 32 bits")
    return column
