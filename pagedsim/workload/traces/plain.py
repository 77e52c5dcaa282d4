"""The plain layout that simulators exchange: arrived_at (s), num_prefill_tokens, num_decode_tokens.

Times are kept as they are. Without `arrived_at` it is a file of lengths alone. In JSON lines it is
`log`, and with vLLM's names `vllm`: what `experiment=calibrate requests=` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pagedsim.workload.traces.csvfile import CsvFormat, read_header
from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Options

CONTENTS = ("prefix_id", "hash_ids", "prompt_token_ids", "cached_tokens")
"""Columns by which a log for `experiment=calibrate` says which prompts begin alike."""


def _unread(names: Iterable[str]) -> tuple[str, ...]:
    there = set(names)
    return tuple(name for name in CONTENTS if name in there)


class Plain(CsvFormat):
    """A row a request, with its arrival."""

    def __init__(self) -> None:
        super().__init__("plain", "arrived_at", "num_prefill_tokens", "num_decode_tokens")

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        unread = _unread(read_header(path))
        return (replace(chunk, unread=unread) for chunk in super().chunks(path, options))


class Log(JsonLines):
    """An object a request, with its arrival."""

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
    """What vLLM keeps of each request."""

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
    """A row a request, with no arrival."""

    def __init__(
        self, prompt: str = "num_prefill_tokens", output: str = "num_decode_tokens"
    ) -> None:
        super().__init__("lengths", None, prompt, output)
