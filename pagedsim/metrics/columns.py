"""Compact append-only columns, for recording millions of rows in memory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PACKED = 1 << 12
"""Number of buffered rows at which they are packed."""


class Numbers:
    """Rows of numbers, packed in batches into typed columns.

    Callers append to `rows` and call `pack` once it has `PACKED` rows. None becomes NaN.
    """

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._types = dict(types)
        # One growing array each: many small ones would fragment memory.
        self._columns = {name: array(np.dtype(kind).char) for name, kind in types.items()}
        self.rows: list[tuple[float | None, ...]] = []

    def pack(self) -> None:
        """Move the buffered rows into the columns."""
        if not self.rows:
            return
        values = zip(*self.rows, strict=True)
        for column, kind, more in zip(
            self._columns.values(), self._types.values(), values, strict=True
        ):
            try:
                column += array(column.typecode, more)  # the usual case
            except TypeError:  # there is a None
                column.frombytes(np.array(more, kind).tobytes())
        self.rows.clear()

    def take(self, name: str) -> NDArray[Any]:
        """Return a whole column and release it, so that a table needs no second copy."""
        self.pack()
        return np.frombuffer(self._columns.pop(name), self._types[name])


class Sparse(Numbers):
    """Columns that are mostly 0; only other rows are stored, led by their row number."""

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        super().__init__({_ROW: np.int32, **types})

    def drop(self, row: int) -> None:
        """Remove the last stored row if it has this number."""
        if self.rows and self.rows[-1][0] == row:
            self.rows.pop()

    def spread(self) -> dict[str, Spread]:
        """Return the columns with all rows, and release them."""
        which = self.take(_ROW)
        return {name: Spread(which, self.take(name)) for name in list(self._columns)}


class Spread:
    """A sparse column; slices are materialised on access."""

    def __init__(self, which: NDArray[np.int32], values: NDArray[Any]) -> None:
        """Rows `which`, in order, have these values; all others are 0."""
        self._which, self._values = which, values

    def __getitem__(self, part: slice) -> NDArray[Any]:
        made = np.zeros(part.stop - part.start, self._values.dtype)
        low, high = np.searchsorted(self._which, (part.start, part.stop))
        made[self._which[low:high] - part.start] = self._values[low:high]
        return made


_ROW = "row"


class Words:
    """Columns of strings with few distinct combinations."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._numbers: dict[tuple[str, ...], int] = {}
        self._rows = array("i")

    def append(self, words: tuple[str, ...]) -> None:
        """Append a row with one string per column."""
        self._rows.append(self._numbers.setdefault(words, len(self._numbers)))

    def columns(self, order: NDArray[np.int64]) -> dict[str, pa.Array]:
        """The columns with their rows in this order."""
        numbers = np.frombuffer(self._rows, dtype=np.int32)[order]
        made = {}
        for place, name in enumerate(self._names):
            words = pa.array([row[place] for row in self._numbers], pa.string())
            made[name] = pa.DictionaryArray.from_arrays(numbers, words).dictionary_decode()
        return made
