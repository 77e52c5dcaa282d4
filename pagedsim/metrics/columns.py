"""Columns that grow a row at a time and stay small: a run of a million requests is kept whole."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PACKED = 1 << 14
"""Rows that wait to be packed."""


class Numbers:
    """Rows of numbers, packed now and then into columns of the types that they need.

    Whoever adds rows extends `rows`, which is one flat array and so costs no object a row, and
    calls `pack` when `full`.
    """

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._types = dict(types)
        # Each in one piece that grows where it is: many small ones would leave holes behind.
        self._columns = {name: array(np.dtype(kind).char) for name, kind in types.items()}
        self.rows = array("d")
        self.full = PACKED * len(types)

    def pack(self) -> None:
        """Move what waits into the columns."""
        waiting = np.frombuffer(self.rows, dtype=np.float64).reshape(-1, len(self._types))
        for place, (name, kind) in enumerate(self._types.items()):
            self._columns[name].frombytes(waiting[:, place].astype(kind).tobytes())
        self.rows = array("d")

    def drop_last(self) -> None:
        """Take the last row back, which is not packed yet."""
        del self.rows[-len(self._types) :]

    def take(self, name: str) -> NDArray[Any]:
        """A whole column, which is let go of here: so a table can be made without a second copy."""
        if len(self.rows):
            self.pack()
        return np.frombuffer(self._columns.pop(name), self._types[name])


class Words:
    """Columns of words, of which few combinations occur."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers: dict[tuple[str, ...], int] = {}
        self._rows = array("i")

    def append(self, words: tuple[str, ...]) -> None:
        """Add a row: a word for each name."""
        self._rows.append(self._numbers.setdefault(words, len(self._numbers)))

    def columns(self, order: NDArray[np.int64]) -> dict[str, pa.Array]:
        """The columns, their rows in this order."""
        numbers = np.frombuffer(self._rows, dtype=np.int32)[order]
        made = {}
        for place, name in enumerate(self._names):
            words = pa.array([row[place] for row in self._numbers], pa.string())
            made[name] = pa.DictionaryArray.from_arrays(numbers, words).dictionary_decode()
        return made
