"""JSON Lines traces: one object per request, with the fields of a format."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pagedsim.workload.traces.rows import Chunk, Clock, Format, Options, opened, wrong

CHUNK = 1 << 14

Field = tuple[Callable[[Any], bool], str]
"""A predicate for valid values, and their description for error messages."""


# `type` instead of isinstance, since bool is a subclass of int.
def is_number(value: Any) -> bool:
    """Whether a value is a valid time."""
    return type(value) in (int, float) and abs(value) < 1e18  # false for NaN


def _is_count(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


TOKENS: Field = (_is_count, "a whole number of tokens")


class JsonLines(Format):
    """A JSON Lines format: its `fields` by name, and the conversion of rows to columns."""

    fields: ClassVar[Mapping[str, Field]]
    time: str
    per_second: ClassVar[int] = 1  # time units per second

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.fields)

    def fits(self, head: str) -> float:
        """Share of fields in the first line; above 0 for any object, so that reading it reports
        the missing field."""
        first = head.partition("\n")[0]
        there = sum(f'"{name}"' in first for name in self.fields)
        return first.startswith("{") * (1 + there) / (1 + len(self.fields))

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with opened(path) as file:
            numbered = ((line, text) for line, text in enumerate(file, 1) if not text.isspace())
            while batch := list(islice(numbered, CHUNK)):
                lines = [line for line, _ in batch]
                rows = [self._object(path, line, text) for line, text in batch]
                for name in self.fields:
                    self._check(path, lines, rows, name)
                yield self.chunk(path, lines, rows, options)

    @abstractmethod
    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        """Convert objects, which have all fields, to columns; `lines` are their line numbers."""

    def columns(self, lines: list[int], rows: list[Any], **more: Any) -> Chunk:
        """A chunk of times and lengths, and of the columns in `more`."""
        time, prompt, output = (
            [row[name] for row in rows] for name in (self.time, self.prompt, self.output)
        )
        clock = Clock(lines, np.array(time, np.float64) / self.per_second)
        lengths = np.array(prompt, np.int64), np.array(output, np.int64)
        return Chunk(lines, clock, clock.seconds, *lengths, **more)

    def _check(
        self, path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]], name: str
    ) -> None:
        """Raise ConfigError for a missing or invalid field."""
        fits, wanted = self.fields[name]
        for line, row in zip(lines, rows, strict=True):
            if name not in row:
                there = f"its fields are {', '.join(row) or 'none'}"
                raise wrong(path, line, f"no field {name!r} (format {self.name}): {there:.200}")
            if not fits(row[name]):
                raise wrong(path, line, f"{name}={json.dumps(row[name]):.60}: must be {wanted}")

    def _object(self, path: Path, line: int, text: str) -> dict[str, Any]:
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise wrong(
                path, line, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            ) from None
        except (ValueError, RecursionError):
            raise wrong(path, line, "not JSON: a number too long, or lists too deep") from None
        if not isinstance(row, dict):
            fields = ", ".join(self.fields)
            raise wrong(path, line, f"{text.strip():.60}: must be an object of {fields}")
        return row
