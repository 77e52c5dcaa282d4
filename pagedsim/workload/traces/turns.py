"""Turns of sessions: JSON lines of session_id, timestamp (ms), input_length and output_length.

As load generators write conversations down (NVIDIA's AIPerf among them). A turn's prompt is taken
to begin with all that was said before it, as far as it is that long.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Clock, Options


def _is_name(value: Any) -> bool:
    return type(value) in (int, str)


class Turns(JsonLines):
    """The fields of a turn; times are kept as they are, in seconds."""

    name = "turns"
    time = "timestamp"
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
        session, time, prompt, output = ([row[name] for row in rows] for name in self.fields)
        clock = Clock(lines, np.array(time, np.float64) / 1000)
        return Chunk(
            lines,
            clock,
            clock.seconds,
            np.array(prompt, np.int64),
            np.array(output, np.int64),
            links=[(one, one) for one in session],
        )
