"""Mooncake: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

https://github.com/kvcache-ai/Mooncake (FAST25-release), Apache-2.0. A hash id names a block of 512
prompt tokens together with all before it, so equal ids at the beginning are a shared prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Options, wrong


def names_blocks(value: Any) -> bool:
    """Whether it is a list of names of blocks."""
    return type(value) is list and not set(map(type, value)) - {int}


class Mooncake(JsonLines):
    """Mooncake's fields; times are kept as they are, in seconds."""

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
    """Raise ConfigError where a prompt has more or fewer blocks than its tokens take."""
    block = chunk.block_tokens
    each = zip(chunk.lines, chunk.prompt_len.tolist(), chunk.blocks or (), strict=True)
    for line, length, names in each:
        if len(names) != -(-length // block) and length > 0:
            what = f"hash_ids has {len(names)} blocks, input_length={length} tokens"
            raise wrong(path, line, f"{what}: must be one for each {block} tokens begun")
