"""The plain layout that simulators exchange: arrived_at (s), num_prefill_tokens, num_decode_tokens.

Times are kept as they are. Without `arrived_at` it is a file of lengths alone.
"""

from __future__ import annotations

from pagedsim.workload.traces.csvfile import CsvFormat


class Plain(CsvFormat):
    """A row a request, with its arrival."""

    def __init__(self) -> None:
        super().__init__("plain", "arrived_at", "num_prefill_tokens", "num_decode_tokens")


class LengthsOnly(CsvFormat):
    """A row a request, with no arrival."""

    def __init__(
        self, prompt: str = "num_prefill_tokens", output: str = "num_decode_tokens"
    ) -> None:
        super().__init__("lengths", None, prompt, output)
