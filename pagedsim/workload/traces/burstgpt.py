"""BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type.

https://github.com/HPMLL/BurstGPT, CC-BY-4.0. Its third file adds Session ID and Elapsed time, and
counts from the beginning of all three. A response of 0 tokens is a failed request.
"""

from __future__ import annotations

from pagedsim.workload.traces.csvfile import CsvFormat


class BurstGPT(CsvFormat):
    """BurstGPT's columns; the first row is time 0."""

    epoch = True

    def __init__(self) -> None:
        super().__init__("burstgpt", "Timestamp", "Request tokens", "Response tokens")
