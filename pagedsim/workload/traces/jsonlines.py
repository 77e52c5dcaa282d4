"""JSON traces: JSON Lines, one object per request with the fields of a format, and ShareGPT."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import not_installed
from pagedsim.core.request import NO_EXTRA
from pagedsim.workload.traces.csvfile import Cells, dates, is_date
from pagedsim.workload.traces.rows import (
    Chunk,
    Clock,
    Format,
    Options,
    Tokenizer,
    opened,
    unread_contents,
    wrong,
)

CHUNK = 1 << 14

Field = tuple[Callable[[Any], bool], str]
"""A predicate for valid values, and their description for error messages."""


# `type` instead of isinstance, since bool is a subclass of int.
def is_number(value: Any) -> bool:
    """Whether a value is a valid time."""
    return type(value) in (int, float) and abs(value) < 1e18  # false for NaN


def is_time(value: Any) -> bool:
    """Whether a value is a time, or a text that begins as a date."""
    return is_number(value) or (type(value) is str and is_date(value))


TOKENS: Field = (
    lambda value: type(value) is int and abs(value) < 2**62,
    "a whole number of tokens",
)


class JsonLines(Format):
    """A JSON Lines format: its fields by name, and the conversion of rows to columns."""

    time: str
    per_second: ClassVar[int] = 1  # time units per second
    first: ClassVar[Mapping[str, Field]] = {}
    """Fields in front of the time and the lengths."""
    last: ClassVar[Mapping[str, Field]] = {}
    """Fields behind them."""
    options: tuple[str, ...] = ()

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        unit = "seconds" if self.per_second == 1 else "milliseconds"
        time = {self.time: (is_time, f"a number of {unit}, or a date")}
        return {**self.first, **time, self.prompt: TOKENS, self.output: TOKENS, **self.last}

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.fields)

    def fits(self, head: str) -> float:
        """Share of fields in the first line."""
        first = head.partition("\n")[0]
        known = sum(f'"{name}"' in first for name in self.fields)
        return first.startswith("{") * known / len(self.fields)

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        with opened(path) as file:
            numbered = ((line, text) for line, text in enumerate(file, 1) if not text.isspace())
            while batch := list(islice(numbered, CHUNK)):
                lines = [line for line, _ in batch]
                rows = [self._object(path, line, text) for line, text in batch]
                for name in self.fields:
                    self._check(path, lines, rows, name)
                chunk = self.chunk(path, lines, rows, options)
                yield replace(chunk, extra=_extra(path, lines, rows))

    @abstractmethod
    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        """Convert objects, which have all fields, to columns; `lines` are their line numbers."""

    def columns(self, path: Path, lines: list[int], rows: list[Any], **more: Any) -> Chunk:
        """A chunk of times and lengths, and of the columns in `more`."""
        time, prompt, output = (
            [row[name] for row in rows] for name in (self.time, self.prompt, self.output)
        )
        if dated := str in map(type, time):
            seconds = dates(Cells(path, lines, self.time, list(map(str, time))))
        else:
            seconds = np.array(time, np.float64) / self.per_second
        clock = Clock(lines, seconds, dated)
        lengths = np.array(prompt, np.int64), np.array(output, np.int64)
        return Chunk(lines, clock, clock.seconds, *lengths, **more)

    def _check(
        self, path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]], name: str
    ) -> None:
        """Raise ConfigError for a missing or invalid field."""
        fits, wanted = self.fields[name]
        for line, row in zip(lines, rows, strict=True):
            if name not in row:
                stated = f"its fields are {', '.join(row) or 'none'}"
                raise wrong(path, line, f"no field {name!r} (format {self.name}): {stated:.200}")
            if not fits(row[name]):
                raise wrong(path, line, f"{name}={json.dumps(row[name]):.60}: must be {wanted}")

    def _object(self, path: Path, line: int, text: str) -> dict[str, Any]:
        row = parsed(path, line, text)
        if not isinstance(row, dict):
            fields = ", ".join(self.fields)
            raise wrong(path, line, f"{text.strip():.60}: must be an object of {fields}")
        return row


def parsed(path: Path, line: int | None, text: str) -> Any:
    """JSON on a line of a file; None: over all of its lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise wrong(path, line or error.lineno, what) from None
    except (ValueError, RecursionError):
        what = "not JSON: a number too long, or lists too deep"
        raise wrong(path, line or 1, what) from None


def _extra(
    path: Path, lines: Sequence[int], rows: Sequence[dict[str, Any]]
) -> list[Mapping[str, Any]] | None:
    """The field `extra` of each row; None if no row has it. Raises ConfigError if one is no
    object."""
    given = [row.get("extra") for row in rows]
    for line, value in zip(lines, given, strict=True):
        if value is not None and not isinstance(value, dict):
            what = f"extra={json.dumps(value):.60}: must be an object"
            raise wrong(path, line, what)
    return [MappingProxyType(row) if row else NO_EXTRA for row in given] if any(given) else None


class Log(JsonLines):
    """The plain layout as JSON Lines, which `experiment=calibrate requests=` reads."""

    name = "log"
    time = "arrived_at"
    prompt = "num_prefill_tokens"
    output = "num_decode_tokens"
    epoch = True

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        return self.columns(path, lines, rows, unread=unread_contents(rows[0]))


class VllmLog(Log):
    """The log with vLLM's field names."""

    name = "vllm"
    time = "arrival_time"
    prompt = "input_toks"
    output = "output_toks"


def names_blocks(value: Any) -> bool:
    """Whether a value is a list of block ids."""
    return type(value) is list and not set(map(type, value)) - {int}


BLOCKS: Field = (names_blocks, "a list of whole numbers")


class Mooncake(JsonLines):
    """Mooncake: JSON Lines of timestamp (ms), input_length, output_length and hash_ids.

    https://github.com/kvcache-ai/Mooncake (FAST25-release), Apache-2.0. A hash id identifies a
    block of 512 prompt tokens and everything before it, so equal leading ids are a shared prefix.
    Times are kept as they are, in seconds.
    """

    name = "mooncake"
    time = "timestamp"
    per_second = 1000
    prompt = "input_length"
    output = "output_length"
    options: tuple[str, ...] = ("block_tokens",)
    last: ClassVar[Mapping[str, Field]] = {"hash_ids": BLOCKS}

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        return self.with_blocks(path, lines, rows, options.block_tokens)

    def with_blocks(
        self, path: Path, lines: list[int], rows: list[Any], block: int, **more: Any
    ) -> Chunk:
        """A chunk with block ids; raises ConfigError if their number does not match the tokens."""
        for line, row in zip(lines, rows, strict=True):
            blocks, length = len(row["hash_ids"]), row[self.prompt]
            if blocks != -(-length // block) and length > 0:
                named = f"{blocks} block{'s' * (blocks != 1)}"
                what = f"hash_ids has {named}, input_length={length} tokens"
                raise wrong(path, line, f"{what}: must be one for each {block} tokens begun")
        ids = [row["hash_ids"] for row in rows]
        return self.columns(path, lines, rows, blocks=ids, block_tokens=block, **more)


BLOCK = 16
ID: Field = (lambda value: type(value) is int, "a whole number")


class Bailian(Mooncake):
    """Bailian (Qwen): JSON Lines of chat_id, parent_chat_id, timestamp (s), lengths, hash_ids.

    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. A request continues
    the one named by its parent_chat_id, or starts a session (-1). A hash id identifies a block of
    16 prompt tokens; outputs have none. Times are kept as they are.
    """

    name = "bailian"
    per_second = 1
    options = ()
    first: ClassVar[Mapping[str, Field]] = {"chat_id": ID, "parent_chat_id": ID}

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        links = [(row["chat_id"], row["parent_chat_id"]) for row in rows]
        return self.with_blocks(path, lines, rows, BLOCK, links=links)


NAME: Field = (lambda value: type(value) in (int, str), "a name or a whole number")


class Turns(JsonLines):
    """Turns: JSON Lines of session_id, timestamp (ms), input_length and output_length.

    The format of load generators such as NVIDIA's AIPerf. A turn's prompt is assumed to start with
    the conversation so far, up to its own length. Times are kept as they are, in seconds.
    """

    name = "turns"
    time = "timestamp"
    per_second = 1000
    prompt = "input_length"
    output = "output_length"
    first: ClassVar[Mapping[str, Field]] = {"session_id": NAME}

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        links = [(row["session_id"],) * 2 for row in rows]
        return self.columns(path, lines, rows, links=links)


class ShareGPT(Format):
    """Conversations, without times."""

    name = "sharegpt"
    time = None
    prompt = "tokens of the first turn"
    output = "tokens of the second turn"
    options = ("tokenizer",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("conversations",)

    def fits(self, head: str) -> float:
        return float(head.startswith("["))

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        count = _counter(options.tokenizer)
        with opened(path) as file:
            entries = parsed(path, None, file.read())
        if not isinstance(entries, list):
            raise wrong(path, 1, "must be a list of objects with conversations")
        pairs = [self._pair(path, number, entry) for number, entry in enumerate(entries, 1)]
        kept = [(number, pair) for number, pair in enumerate(pairs, 1) if pair is not None]
        yield Chunk(
            [number for number, _ in kept],
            None,
            None,
            np.array([count(first) for _, (first, _) in kept], np.int64),
            np.array([count(second) for _, (_, second) in kept], np.int64),
        )

    def wrong(self, path: Path, line: int, what: str) -> ConfigError:
        """Errors refer to list entries, since those have no line numbers."""
        return ConfigError(f"{path}: entry {line}: {what}")

    def _pair(self, path: Path, number: int, entry: Any) -> tuple[str, str] | None:
        """The first two turns; None if there are fewer."""
        turns = None
        if isinstance(entry, dict):
            turns = entry.get("conversations", entry.get("conversation"))
        if not isinstance(turns, list):
            raise self.wrong(path, number, "must be an object with a list conversations")
        if len(turns) < 2:
            return None
        first, second = (
            turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]
        )
        if not (isinstance(first, str) and isinstance(second, str)):
            raise self.wrong(path, number, "each turn must have a text as its value")
        return first, second


def _counter(tokenizer: str | Tokenizer | None) -> Callable[[str], int]:
    if tokenizer is None:
        raise ConfigError(
            "tokenizer: format sharegpt holds text, so it needs one: a model's name on the "
            "Hugging Face Hub, a tokenizer.json, or a function"
        )
    if not isinstance(tokenizer, str):
        return lambda text: tokens if isinstance(tokens := tokenizer(text), int) else len(tokens)
    try:
        # Imported by name: an optional dependency, installed with transformers.
        library = import_module("tokenizers")
    except ImportError:
        raise not_installed(f"tokenizer={tokenizer}", "engine", "tokenizers") from None
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_file():
            loaded = library.Tokenizer.from_file(str(path))
        else:
            loaded = library.Tokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the library raises bare Exception for every error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"tokenizer={tokenizer}: cannot be loaded: {reason}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
