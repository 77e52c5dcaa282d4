"""Trace files of JSON lines: an object a request, with fields that a format names."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pagedsim.workload.traces.opened import opened
from pagedsim.workload.traces.rows import Chunk, Clock, Format, Options, wrong

CHUNK = 1 << 14

Field = tuple[Callable[[Any], bool], str]
"""Whether a value can be what the field says, and what it must be, for the error."""


# The type is asked for itself, since JSON's true is an int in Python.
def is_number(value: Any) -> bool:
    """Whether it is a number that a time may be."""
    return type(value) in (int, float) and abs(value) < 1e18  # not so if it is no number


def _is_count(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


TOKENS: Field = (_is_count, "a whole number of tokens")


class JsonLines(Format):
    """A format of JSON lines: its `fields` by name, and how some rows of them become columns."""

    fields: ClassVar[Mapping[str, Field]]
    time: str
    per_second: ClassVar[int] = 1  # so many of its times make a second

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.fields)

    def fits(self, head: str) -> float:
        """Any object does a little, so that reading it names the field that is missing."""
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
        """Objects, each with all fields, as columns; `lines` are theirs in the file."""

    def columns(self, lines: list[int], rows: list[Any], **more: Any) -> Chunk:
        """Times and lengths of objects as columns, and what `more` a chunk has of them."""
        time, prompt, output = (
            [row[name] for row in rows] for name in (self.time, self.prompt, self.output)
        )
        clock = Clock(lines, np.array(time, np.float64) / self.per_second)
        lengths = np.array(prompt, np.int64), np.array(output, np.int64)
        return Chunk(lines, clock, clock.seconds, *lengths, **more)

    def _check(
        self, path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]], name: str
    ) -> None:
        """Raise ConfigError where the field of that name cannot be what it says."""
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
