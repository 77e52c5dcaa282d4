"""Mooncake: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

https://github.com/kvcache-ai/Mooncake (FAST25-release), Apache-2.0. A hash id names a block of 512
prompt tokens together with all before it, so equal ids at the beginning are a shared prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.workload.traces.opened import opened
from pagedsim.workload.traces.rows import Chunk, Clock, Format, Options, wrong

CHUNK = 1 << 14


class Mooncake(Format):
    """Mooncake's fields; times are kept as they are, in seconds."""

    name = "mooncake"
    time = "timestamp"
    prompt = "input_length"
    output = "output_length"
    blocks = "hash_ids"
    options = ("block_tokens",)

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, self.blocks)

    def fits(self, head: str) -> float:
        return float(head.startswith("{"))

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with opened(path) as file:
            numbered = ((line, text) for line, text in enumerate(file, 1) if not text.isspace())
            while batch := list(islice(numbered, CHUNK)):
                lines = [line for line, _ in batch]
                rows = [_object(path, line, text) for line, text in batch]
                yield self._chunk(path, lines, rows, options.block_tokens)

    def _chunk(self, path: Path, lines: list[int], rows: list[dict[str, Any]], block: int) -> Chunk:
        time, prompt, output, ids = (_column(path, lines, rows, name) for name in self.needs)
        for line, length, names in zip(lines, prompt, ids, strict=True):
            if len(names) != -(-length // block) and length > 0:
                what = f"hash_ids has {len(names)} blocks, input_length={length} tokens"
                raise wrong(path, line, f"{what}: must be one for each {block} tokens begun")
        clock = Clock(lines, np.array(time, np.float64) / 1000)
        return Chunk(
            lines,
            clock,
            clock.seconds,
            np.array(prompt, np.int64),
            np.array(output, np.int64),
            blocks=ids,
        )


def _column(
    path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]], name: str
) -> list[Any]:
    """The field of that name of all rows; raises ConfigError where it cannot be what it says."""
    fits, wanted = _FIELDS[name]
    for line, row in zip(lines, rows, strict=True):
        if name not in row:
            fields = f"its fields are {', '.join(row) or 'none'}"
            raise wrong(path, line, f"no field {name!r} (format mooncake): {fields:.200}")
        if not fits(row[name]):
            raise wrong(path, line, f"{name}={json.dumps(row[name]):.60}: must be {wanted}")
    return [row[name] for row in rows]


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(
            path, line, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError):
        raise wrong(path, line, "not JSON: a number too long, or lists too deep") from None
    if not isinstance(row, dict):
        raise wrong(path, line, f"{text.strip():.60}: must be an object of {', '.join(_FIELDS)}")
    return row


# The type is asked for itself, since JSON's true is an int in Python.
def _milliseconds(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18  # not so if it is no number


def _tokens(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def _names(value: Any) -> bool:
    return type(value) is list and not set(map(type, value)) - {int}


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "timestamp": (_milliseconds, "a number of milliseconds"),
    "input_length": (_tokens, "a whole number of tokens"),
    "output_length": (_tokens, "a whole number of tokens"),
    "hash_ids": (_names, "a list of whole numbers"),
}
