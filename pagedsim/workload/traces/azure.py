"""Azure's LLM inference traces of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens.

https://github.com/Azure/AzurePublicDataset, CC-BY-4.0. Times are of the day: 2023 as
`2023-11-16 18:15:46.6805900`, 2024 as `2024-05-10 00:00:00.009930+00:00`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedsim.workload.traces.csvfile import CsvFormat, each


class Azure(CsvFormat):
    """Azure's columns; the first row is time 0."""

    epoch = True

    def __init__(self) -> None:
        super().__init__("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def seconds(
        self, path: Path, lines: Sequence[int], texts: Sequence[str]
    ) -> NDArray[np.float64]:
        plain = [text.removesuffix("+00:00") for text in texts]
        try:
            if not all(map(_PLAIN.fullmatch, plain)):
                raise ValueError("a time zone, or no time at all")
            moments = np.array(plain, "datetime64[ns]")
        except ValueError:
            assert self.time is not None
            found = each(path, lines, self.time, texts, _moment, _WANTED)
            moments = np.array(found, "datetime64[ns]")
        seconds: NDArray[np.float64] = (moments - _ORIGIN) / np.timedelta64(1, "s")
        return seconds


# numpy reads 0, or 2023, as a year, and what is beyond its nanoseconds as some other year.
_PLAIN = re.compile(r"(1[7-9]|2[01])[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9.]+")
_WANTED = "a date and time of the years 1700 to 2199, as in 2023-11-16 18:15:46.68"

# Near the traces: seconds since 1970 would leave a float too few digits for their 0.1 µs.
_ORIGIN = np.datetime64("2023-01-01", "ns")


def _moment(text: str) -> datetime:
    if not _PLAIN.match(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
