"""Numbers of a page in base64, for typed arrays of its scripts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Arrays:
    """Arrays in base64, little-endian; equal ones are kept once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bytes], int] = {}

    @property
    def size(self) -> int:
        """Bytes of all together."""
        return sum(len(values) for _, values in self._numbers)

    def add(self, values: NDArray[Any] | Sequence[float], kind: str) -> int:
        """Keep values as "d" (float64), "f" (float32), "i" (int32) or "b" (uint8); their number
        among the arrays is returned."""
        packed = np.asarray(values).astype({"d": "<f8", "f": "<f4", "i": "<i4", "b": "u1"}[kind])
        return self._numbers.setdefault((kind, packed.tobytes()), len(self._numbers))

    def texts(self) -> list[tuple[str, str]]:
        """The kind and the base64 of each."""
        return [(kind, b64encode(values).decode()) for kind, values in self._numbers]
