"""Mooncake: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

https://github.com/kvcache-ai/Mooncake (FAST25-release), Apache-2.0. A hash id names a block of 512
prompt tokens together with all before it, so equal ids at the beginning are a shared prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.workload.traces.rows import Chunk, Format, Options, wrong

CHUNK = 1 << 14


class Mooncake(Format):
    """Mooncake's fields; times are kept as they are, in seconds."""

    name = "mooncake"
    time = "timestamp"
    prompt = "input_length"
    output = "output_length"
    blocks = "hash_ids"

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, self.blocks)

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with path.open(encoding="utf-8") as file:
            numbered = ((line, text) for line, text in enumerate(file, 1) if not text.isspace())
            while batch := list(islice(numbered, CHUNK)):
                lines = [line for line, _ in batch]
                rows = [_object(path, line, text) for line, text in batch]
                yield self._chunk(path, lines, rows, options.block_tokens)

    def _chunk(self, path: Path, lines: list[int], rows: list[dict[str, Any]], block: int) -> Chunk:
        time, prompt, output, ids = (self._column(path, lines, rows, n) for n in self.needs)
        for line, length, names in zip(lines, prompt, ids, strict=True):
            if len(names) != -(-length // block) and length > 0:
                what = f"hash_ids has {len(names)} blocks, input_length={length} tokens"
                raise wrong(path, line, f"{what}: must be one for each {block} tokens begun")
        return Chunk(
            lines,
            np.array(time, np.float64) / 1000,
            np.array(prompt, np.int64),
            np.array(output, np.int64),
            blocks=ids,
        )

    def _column(
        self, path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]], name: str
    ) -> list[Any]:
        try:
            values = [row[name] for row in rows]
        except KeyError:
            line, row = next(p for p in zip(lines, rows, strict=True) if name not in p[1])
            what = f"no field {name!r} (format mooncake): its fields are {', '.join(row) or 'none'}"
            raise wrong(path, line, what) from None
        allowed, wanted = _TYPES[name]
        if set(map(type, values)) - allowed or (
            name == self.blocks and not all(map(_ints, values))
        ):
            line, value = next(
                (line, value)
                for line, value in zip(lines, values, strict=True)
                if type(value) not in allowed or (name == self.blocks and not _ints(value))
            )
            raise wrong(path, line, f"{name}={json.dumps(value):.60}: must be {wanted}")
        return values


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(path, line, f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise wrong(path, line, f"{text.strip():.60}: must be an object of {', '.join(_TYPES)}")
    return row


def _ints(value: list[Any]) -> bool:
    return not set(map(type, value)) - {int}


# bool is no int here: JSON's true is not a length.
_TYPES: dict[str, tuple[set[type], str]] = {
    "timestamp": ({int, float}, "a number of milliseconds"),
    "input_length": ({int}, "a whole number of tokens"),
    "output_length": ({int}, "a whole number of tokens"),
    "hash_ids": ({list}, "a list of whole numbers"),
}
