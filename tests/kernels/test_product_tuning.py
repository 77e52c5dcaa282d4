"""The tuning table of products: what is looked up, and that it is read as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedsim.kernels import product_tuning
from pagedsim.kernels.product_tuning import Entry, Matrix, tiles_of
from pagedsim.kernels.tiles import ProductTiles, product_tiles

CPU = torch.device("cpu")
DOWN = Matrix(4096, 14336, (2, 2))
ENTRY = Entry("", (9, 0), DOWN, ProductTiles(16, 64, 128, 8, 3), {"date": "today"})


def test_where_nothing_was_measured_defaults_are_taken() -> None:
    assert tiles_of(CPU, DOWN, 3) == product_tiles(3, 4096, 14336, (2, 2), (9, 0))


def test_what_was_measured_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_tuning, "_table", lambda: {ENTRY.key: ENTRY})
    assert {tiles_of(CPU, DOWN, tokens) for tokens in (1, 9, 16)} == {ENTRY.tiles}
    assert tiles_of(CPU, DOWN, 17).rows == 32  # another tile, of which nothing is known
    assert tiles_of(CPU, DOWN._replace(itemsizes=(2, 1)), 3) != ENTRY.tiles


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    gate = Matrix(14336, 4096, (2, 1), gated=True)
    other = Entry("Pretend", (8, 0), gate, ProductTiles(32, 64, 64, 4, 4))
    product_tuning.write([Entry("", (9, 0), DOWN, other.tiles), ENTRY, other, ENTRY], file)
    held = product_tuning.read(file)
    assert sorted(entry.key for entry in held) == sorted(
        [ENTRY.key, other.key, ("", DOWN, other.tiles.rows)]
    )
    assert ENTRY in held and other in held
    product_tuning.write(held, file)
    assert product_tuning.read(file) == held


def test_the_committed_table_can_be_read() -> None:
    for entry in product_tuning.read():
        assert entry.gpu and entry.tiles.rows >= 16


@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33, 100, 4096])
@pytest.mark.parametrize("outputs", [1, 40, 2048, 6144, 128256])
@pytest.mark.parametrize("itemsizes", [(2, 2), (2, 1), (4, 4)])
def test_defaults_are_powers_of_two(tokens: int, outputs: int, itemsizes: tuple[int, int]) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        for gated in (False, True):
            one = product_tiles(tokens, outputs, 4096, itemsizes, capability, gated)
            sizes = (one.rows, one.columns, one.depth, one.warps)
            assert all(size & (size - 1) == 0 for size in sizes)
            assert min(sizes[:3]) >= 16 and 2 <= one.stages <= 7
