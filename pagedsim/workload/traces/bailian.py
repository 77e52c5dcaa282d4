"""Qwen on Bailian: JSON lines of chat_id, parent_chat_id, timestamp (s), lengths and hash_ids.

https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0. A request goes on from the
one that its parent_chat_id names, or begins a session (-1). A hash id names a block of 16 prompt
tokens; there are none of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.mooncake import check_blocks, names_blocks
from pagedsim.workload.traces.rows import Chunk, Options

BLOCK = 16


def _is_id(value: Any) -> bool:
    return type(value) is int


class Bailian(JsonLines):
    """Bailian's fields; times are kept as they are."""

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
