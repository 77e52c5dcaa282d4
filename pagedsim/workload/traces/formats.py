"""Trace formats: Azure, BurstGPT, the plain layout of simulators, Mooncake, Bailian, turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.workload.traces.csvfile import CsvFormat, each, read_header
from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Options, wrong


class Azure(CsvFormat):
    """Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens.

    https://github.com/Azure/AzurePublicDataset, CC-BY-4.0. Times are dates, in 2023 as
    `2023-11-16 18:15:46.6805900`, in 2024 as `2024-05-10 00:00:00.009930+00:00`; the first row is
    time 0.
    """

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


# numpy parses 0 or 2023 as a year, and wraps around years out of the range of its nanoseconds.
_PLAIN = re.compile(r"(1[7-9]|2[01])[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9.]+")
_WANTED = "a date and time of the years 1700 to 2199, as in 2023-11-16 18:15:46.68"

# Close to the traces: seconds since 1970 would leave a float too few digits for their 0.1 µs.
_ORIGIN = np.datetime64("2023-01-01", "ns")


def _moment(text: str) -> datetime:
    if not _PLAIN.match(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


class BurstGPT(CsvFormat):
    """BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type.

    https://github.com/HPMLL/BurstGPT, CC-BY-4.0. Its third file adds Session ID and Elapsed time,
    and counts from the start of all three; the first row is time 0. A response of 0 tokens is a
    failed request.
    """

    epoch = True

    def __init__(self) -> None:
        super().__init__("burstgpt", "Timestamp", "Request tokens", "Response tokens")


CONTENTS = ("prefix_id", "hash_ids", "prompt_token_ids", "cached_tokens")
"""Columns of prompt contents in a log for `experiment=calibrate`."""


def _unread(names: Iterable[str]) -> tuple[str, ...]:
    there = set(names)
    return tuple(name for name in CONTENTS if name in there)


class Plain(CsvFormat):
    """The plain CSV layout of simulators: arrived_at (s), num_prefill_tokens, num_decode_tokens.

    Times are kept as they are.
    """

    def __init__(self) -> None:
        super().__init__("plain", "arrived_at", "num_prefill_tokens", "num_decode_tokens")

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        unread = _unread(read_header(path))
        return (replace(chunk, unread=unread) for chunk in super().chunks(path, options))


class Log(JsonLines):
    """The plain layout as JSON Lines, which `experiment=calibrate requests=` reads."""

    name = "log"
    time = "arrived_at"
    prompt = "num_prefill_tokens"
    output = "num_decode_tokens"
    options = ()
    epoch = True
    fields: ClassVar[Mapping[str, Field]] = {
        time: (is_number, "a number of seconds"),
        prompt: TOKENS,
        output: TOKENS,
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        return self.columns(lines, rows, unread=_unread(rows[0]))


class VllmLog(Log):
    """The log with vLLM's field names."""

    name = "vllm"
    time = "arrival_time"
    prompt = "input_toks"
    output = "output_toks"
    fields: ClassVar[Mapping[str, Field]] = {
        time: (is_number, "a number of seconds"),
        prompt: TOKENS,
        output: TOKENS,
    }


class LengthsOnly(CsvFormat):
    """The plain CSV layout without arrivals."""

    def __init__(
        self, prompt: str = "num_prefill_tokens", output: str = "num_decode_tokens"
    ) -> None:
        super().__init__("lengths", None, prompt, output)


def names_blocks(value: Any) -> bool:
    """Whether a value is a list of block ids."""
    return type(value) is list and not set(map(type, value)) - {int}


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
    blocks = "hash_ids"
    options = ("block_tokens",)
    fields: ClassVar[Mapping[str, Field]] = {
        time: (is_number, "a number of milliseconds"),
        prompt: TOKENS,
        output: TOKENS,
        blocks: (names_blocks, "a list of whole numbers"),
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        ids = [row[self.blocks] for row in rows]
        chunk = self.columns(lines, rows, blocks=ids, block_tokens=options.block_tokens)
        check_blocks(path, chunk)
        return chunk


def check_blocks(path: Path, chunk: Chunk) -> None:
    """Raise ConfigError if a prompt's number of blocks does not match its tokens."""
    block = chunk.block_tokens
    each = zip(chunk.lines, chunk.prompt_len.tolist(), chunk.blocks or (), strict=True)
    for line, length, names in each:
        if len(names) != -(-length // block) and length > 0:
            what = f"hash_ids has {len(names)} blocks, input_length={length} tokens"
            raise wrong(path, line, f"{what}: must be one for each {block} tokens begun")


BLOCK = 16


def _is_id(value: Any) -> bool:
    return type(value) is int


class Bailian(JsonLines):
    """Bailian (Qwen): JSON Lines of chat_id, parent_chat_id, timestamp (s), lengths, hash_ids.

    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. A request continues
    the one named by its parent_chat_id, or starts a session (-1). A hash id identifies a block of
    16 prompt tokens; outputs have none. Times are kept as they are.
    """

    name = "bailian"
    time = "timestamp"
    prompt = "input_length"
    output = "output_length"
    options = ()
    fields: ClassVar[Mapping[str, Field]] = {
        "chat_id": (_is_id, "a whole number"),
        "parent_chat_id": (_is_id, "a whole number"),
        time: (is_number, "a number of seconds"),
        prompt: TOKENS,
        output: TOKENS,
        "hash_ids": (names_blocks, "a list of whole numbers"),
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        links = [(row["chat_id"], row["parent_chat_id"]) for row in rows]
        chunk = self.columns(
            lines, rows, blocks=[row["hash_ids"] for row in rows], block_tokens=BLOCK, links=links
        )
        check_blocks(path, chunk)
        return chunk


def _is_name(value: Any) -> bool:
    return type(value) in (int, str)


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
    options = ()
    fields: ClassVar[Mapping[str, Field]] = {
        "session_id": (_is_name, "a name or a whole number"),
        time: (is_number, "a number of milliseconds"),
        prompt: TOKENS,
        output: TOKENS,
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        return self.columns(lines, rows, links=[(row["session_id"],) * 2 for row in rows])
