"""Turns of sessions: JSON lines of session_id, timestamp (ms), input_length and output_length.

As load generators write conversations down (NVIDIA's AIPerf among them). A turn's prompt is taken
to begin with all that was said before it, as far as it is that long.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Options


def _is_name(value: Any) -> bool:
    return type(value) in (int, str)


class Turns(JsonLines):
    """The fields of a turn; times are kept as they are, in seconds."""

    name = "turns"
    time = "timestamp"
    per_second = 1000
    prompt = "input_length"
    output = "output_length"
    options = ()
    fields: ClassVar[Mapping[str, Field]] = {
        "session_id": (_is_name, "a name or a whole number"),
        time: (is_number, "a number of milliseconds"),
        prompt: TOKENS,
        output: TOKENS,
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        return self.columns(lines, rows, links=[(row["session_id"],) * 2 for row in rows])
