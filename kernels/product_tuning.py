"""Tiles of `product` by GPU and matrix: what was measured, else the defaults of `tiles.py`.

The measurements stand in tuned_products.json beside this file; `experiments/benchmarks/
tune.py` makes them. An entry is for so many rows of tokens, padded to a power of two, so
that the launch follows from the shapes alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagedsim.kernels import tuning
from pagedsim.kernels.tiles import ProductTiles, product_rows, product_tiles

PATH = Path(__file__).with_name("tuned_products.json")


class Matrix(NamedTuple):
    """What a product is tuned for."""

    outputs: int
    """With a gate, outputs of the gate; the product has as many again, which it multiplies."""
    inputs: int
    itemsizes: tuple[int, int]
    """Bytes of an element of the tokens, and of the weights."""
    gated: bool = False


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    gpu: str
    """As torch calls it."""
    capability: tuple[int, int]
    matrix: Matrix
    tiles: ProductTiles
    """For at most `tiles.rows` tokens."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """When, with what and how well; nothing reads it."""

    @property
    def key(self) -> tuple[str, Matrix, int]:
        """What an entry is looked up by."""
        return self.gpu, self.matrix, self.tiles.rows


def tiles_of(device: torch.device, matrix: Matrix, tokens: int) -> ProductTiles:
    """Tiles for a product of so many tokens."""
    entry = _table().get((tuning.gpu(device), matrix, product_rows(tokens)))
    return usual(matrix, tokens, tuning.capability(device)) if entry is None else entry.tiles


def usual(matrix: Matrix, tokens: int, capability: tuple[int, int]) -> ProductTiles:
    """Tiles where nothing was measured."""
    outputs, inputs, itemsizes, gated = matrix
    return product_tiles(tokens, outputs, inputs, itemsizes, capability, gated)


def read(path: Path = PATH) -> list[Entry]:
    """The entries of a table's file, in its order."""
    return [_entry(line) for line in json.loads(path.read_text(encoding="utf-8"))]


def write(entries: Iterable[Entry], path: Path = PATH) -> None:
    """Write a table's file; of two entries with the same key the later stays."""
    latest = {entry.key: entry for entry in entries}
    lines = [
        {
            "gpu": entry.gpu,
            "capability": entry.capability,
            "matrix": entry.matrix._asdict(),
            "tiles": asdict(entry.tiles),
            "measured": entry.measured,
        }
        for _, entry in sorted(latest.items())
    ]
    path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


@cache
def _table() -> dict[tuple[str, Matrix, int], Entry]:
    return {entry.key: entry for entry in read()}


def _entry(line: Mapping[str, Any]) -> Entry:
    (major, minor), matrix = line["capability"], line["matrix"]
    item, weight_item = matrix["itemsizes"]
    return Entry(
        gpu=line["gpu"],
        capability=(major, minor),
        matrix=Matrix(**{**matrix, "itemsizes": (item, weight_item)}),
        tiles=ProductTiles(**line["tiles"]),
        measured=line["measured"],
    )
