"""Sessions: which requests belong together, and which are sent once others are answered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedsim.core import ConfigError


class Sessions:
    """What a workload's rows are of conversations, or of agents' programs.

    `session` numbers them from 0 on (-1: of none), `turn` is each row's place in it from 1 on.
    A row waits for those in `after`, all of them before it, and comes `pause` seconds after the
    last of them is answered.
    """

    def __init__(
        self,
        session: ArrayLike,
        turn: ArrayLike,
        after: Sequence[Sequence[int]],
        pause: ArrayLike,
    ) -> None:
        """`after` has the rows that each row waits for, an empty list for those who do not."""
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
        """How many sessions there are."""
        return int(self.session.max(initial=-1)) + 1

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold."""
        held = (self.session, self.turn, self.pauses, self._waits, self._starts)
        return sum(column.nbytes for column in (*held, self._followers, self._begins))

    def name(self, row: int) -> str | None:
        """What the session of a request is called."""
        number: int = self.session.item(row)
        return str(number) if number >= 0 else None

    def after(self, row: int) -> list[int]:
        """Those that must have left before it is sent."""
        return _between(self._waits, self._starts, row)

    def followers(self, row: int) -> list[int]:
        """Those that wait for it."""
        return _between(self._followers, self._begins, row)

    def pause(self, row: int) -> float:
        """Seconds between the last answer that it waits for and its arrival."""
        return float(self.pauses.item(row))


def _between(rows: NDArray[np.int64], starts: NDArray[np.int64], row: int) -> list[int]:
    """Those that a row has of `rows`."""
    start, end = starts.item(row), starts.item(row + 1)
    return rows[start:end].tolist() if start < end else []
