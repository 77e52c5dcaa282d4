"""Columns that grow a row at a time and stay small: a run of a million requests is kept whole."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PACKED = 1 << 12
"""Rows that wait to be packed."""


class Numbers:
    """Rows of numbers, packed now and then into columns of the types that they need.

    Whoever adds a row appends it to `rows`, and calls `pack` when there are `PACKED` of them. A
    None becomes NaN.
    """

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._types = dict(types)
        # Each in one piece that grows where it is: many small ones would leave holes behind.
        self._columns = {name: array(np.dtype(kind).char) for name, kind in types.items()}
        self.rows: list[tuple[float | None, ...]] = []

    def pack(self) -> None:
        """Move what waits into the columns."""
        if not self.rows:
            return
        values = zip(*self.rows, strict=True)
        for column, kind, more in zip(
            self._columns.values(), self._types.values(), values, strict=True
        ):
            try:
                column += array(column.typecode, more)  # as it is in nearly all cases
            except TypeError:  # there is a None
                column.frombytes(np.array(more, kind).tobytes())
        self.rows.clear()

    def take(self, name: str) -> NDArray[Any]:
        """A whole column, which is let go of here: so a table can be made without a second copy."""
        self.pack()
        return np.frombuffer(self._columns.pop(name), self._types[name])


class Sparse(Numbers):
    """Columns in which most rows are 0: of the others each says first which it is."""

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        super().__init__({_ROW: np.int32, **types})

    def drop(self, row: int) -> None:
        """Take the last row back, if it is this one and more than 0."""
        if self.rows and self.rows[-1][0] == row:
            self.rows.pop()

    def spread(self) -> dict[str, Spread]:
        """The columns with all of their rows; they are let go of here."""
        which = self.take(_ROW)
        return {name: Spread(which, self.take(name)) for name in list(self._columns)}


class Spread:
    """A column of which most rows are 0, and lie nowhere: a part of it is made when asked for."""

    def __init__(self, which: NDArray[np.int32], values: NDArray[Any]) -> None:
        """`which` rows have these values, in order."""
        self._which, self._values = which, values

    def __getitem__(self, part: slice) -> NDArray[Any]:
        made = np.zeros(part.stop - part.start, self._values.dtype)
        low, high = np.searchsorted(self._which, (part.start, part.stop))
        made[self._which[low:high] - part.start] = self._values[low:high]
        return made


_ROW = "row"


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
