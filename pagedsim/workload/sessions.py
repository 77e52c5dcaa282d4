"""Sessions: groups of requests, and which requests depend on others' answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedsim.core import ConfigError


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
    ) -> None:
        """`after` lists the rows that each row depends on."""
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
        """Number of sessions."""
        return int(self.session.max(initial=-1)) + 1

    @property
    def nbytes(self) -> int:
        """Memory of the columns in bytes."""
        held = (self.session, self.turn, self.pauses, self._waits, self._starts)
        return sum(column.nbytes for column in (*held, self._followers, self._begins))

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
