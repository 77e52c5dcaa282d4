"""Tile sizes by GPU and head shape: what was measured, else the defaults of `tiles.py`.

The measurements stand in tuned.json beside this file; `experiments/benchmarks/tune.py`
makes them. A key of the table is what never changes while a model is served: neither the batch nor
a length is in it, so that a decode's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagedsim.kernels.float8 import AUTO, name_of
from pagedsim.kernels.tiles import Split, Tiles, decode_split, decode_tiles, fitted, prefill_tiles

PATH = Path(__file__).with_name("tuned.json")
KERNELS = ("prefill", "decode")


DEFAULT = Split()


class Heads(NamedTuple):
    """The shape that a kernel is tuned for."""

    kv_heads: int
    group: int
    """Query heads that share a KV head."""
    head_dim: int
    itemsize: int
    """Bytes of an element of the queries."""
    cache: str = AUTO
    """What the cache holds: elements like these, or one of `float8.FORMATS`."""


class Cut(NamedTuple):
    """How a decode is cut up."""

    tiles: Tiles
    split: Split


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    gpu: str
    """As torch calls it."""
    capability: tuple[int, int]
    kernel: str
    """One of KERNELS."""
    heads: Heads
    tiles: Tiles
    """Of a prefill: where there are query tokens enough to fill the rows."""
    split: Split = DEFAULT
    """Of a decode alone."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """When, with what and how well; nothing reads it."""

    @property
    def key(self) -> tuple[str, str, Heads]:
        """What an entry is looked up by."""
        return self.gpu, self.kernel, self.heads


def heads(q: torch.Tensor, k_cache: torch.Tensor) -> Heads:
    """Those of a call."""
    kv_heads, head_dim = k_cache.shape[2:]
    return Heads(
        kv_heads, q.shape[1] // kv_heads, head_dim, q.element_size(), name_of(k_cache.dtype)
    )


def prefill(device: torch.device, heads: Heads, max_query_len: int) -> Tiles:
    """Tiles of `attention` where the longest run of query tokens is `max_query_len`."""
    entry = _table().get((gpu(device), "prefill", heads))
    _, group, head_dim, itemsize, cache = heads
    eight = cache != AUTO
    if entry is not None:
        return fitted(entry.tiles, head_dim, group, max_query_len, eight)
    return prefill_tiles(head_dim, group, itemsize, capability(device), max_query_len, eight)


@cache
def decode(device: torch.device, heads: Heads) -> Cut:
    """How `decode` is cut up."""
    entry = _table().get((gpu(device), "decode", heads))
    if entry is not None:
        return Cut(entry.tiles, entry.split)
    return usual(heads, capability(device))


def usual(heads: Heads, capability: tuple[int, int]) -> Cut:
    """How `decode` is cut up where nothing was measured."""
    kv_heads, group, head_dim, itemsize, cache = heads
    tiles = decode_tiles(head_dim, group, itemsize, capability, cache != AUTO)
    return Cut(tiles, decode_split(kv_heads))


def read(path: Path = PATH) -> list[Entry]:
    """The entries of a table's file, in its order."""
    return [_entry(line) for line in json.loads(path.read_text(encoding="utf-8"))]


def write(entries: Iterable[Entry], path: Path = PATH) -> None:
    """Make a table's file of them; of two with the same key the later one stays. This process uses
    new entries of the table beside this file from here on."""
    latest = {entry.key: entry for entry in entries}
    lines = [_line(latest[key]) for key in sorted(latest)]
    path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    _table.cache_clear()
    decode.cache_clear()


def add(path: Path, to: Path = PATH) -> None:
    """Add the entries of another file, if it exists."""
    if path.exists():
        write([*read(to), *read(path)], to)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability that tiles are chosen for; a Hopper's where there is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; 1 where there is none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def gpu(device: torch.device) -> str:
    """The GPU as torch calls it; nothing where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def _table() -> dict[tuple[str, str, Heads], Entry]:
    return {entry.key: entry for entry in read()}


def _entry(line: Mapping[str, Any]) -> Entry:
    major, minor = line["capability"]
    return Entry(
        gpu=line["gpu"],
        capability=(major, minor),
        kernel=line["kernel"],
        heads=Heads(**line["heads"]),
        tiles=Tiles(**line["tiles"]),
        split=Split(**line.get("split", {})),
        measured=line["measured"],
    )


def _line(entry: Entry) -> dict[str, Any]:
    line = {
        "gpu": entry.gpu,
        "capability": entry.capability,
        "kernel": entry.kernel,
        "heads": entry.heads._asdict(),
        "tiles": asdict(entry.tiles),
    }
    if entry.kernel == "decode":
        line["split"] = entry.split._asdict()
    return {**line, "measured": entry.measured}
