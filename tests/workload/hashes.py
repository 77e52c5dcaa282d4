"""What the hashes of recorded sessions allow a cache to find: from the JSON itself, block by block.

Nothing of the package is used here, so that its reader can be held against it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def loaded(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert isinstance(trace, dict)
    return trace


def calls(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a session by time, sub-agents' from their markers on."""
    timed = sorted(_timed(trace["requests"], 0.0), key=lambda pair: pair[0])
    return [call for _, call in timed]


def _timed(entries: Sequence[dict[str, Any]], marker: float) -> Iterator[tuple[float, Any]]:
    for entry in entries:
        if entry["type"] == "subagent":
            yield from _timed(entry["requests"], marker + entry["t"])
        else:
            yield marker + entry["t"], entry


class Cache:
    """All prompts so far, in blocks of the server's size."""

    def __init__(self, block: int, named: int = 64) -> None:
        self.block, self.named = block, named
        self.nodes: dict[tuple[int, object], int] = {}
        self.seen: set[tuple[int, int]] = set()
        self.prompts = self.found = 0

    def ask(self, ids: Sequence[int], tokens: int, scope: object) -> int:
        """Tokens of a prompt that are found; ids of another scope are other blocks."""
        path = [-1]  # of each length in names, one number for these names and all before
        for name in ids:
            step = (path[-1], (scope, name))
            path.append(self.nodes.setdefault(step, len(self.nodes)))
        found, fresh = 0, False
        for number in range(1, tokens // self.block + 1):
            end = number * self.block
            if end > len(ids) * self.named:
                break  # a tail that has no name
            key = (number, path[-(-end // self.named)])
            fresh = fresh or key not in self.seen
            if not fresh and end < tokens:  # the last token is always computed
                found = end
            self.seen.add(key)
        self.prompts += tokens
        self.found += found
        return found
