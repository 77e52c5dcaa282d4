"""The tuner of products takes the fastest, leaves out what cannot run, and writes its entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import tune_products as tuner  # noqa: E402
from experiments.benchmarks.cuts import DTYPE  # noqa: E402
from experiments.benchmarks.products import TINY, Layer  # noqa: E402
from experiments.benchmarks.tune_kernels import Gpu  # noqa: E402
from experiments.benchmarks.tune_products import Product, candidates, matrix_of, tuned  # noqa: E402
from pagedsim.kernels import product_tuning  # noqa: E402
from pagedsim.kernels.tiles import ProductTiles  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0))
CPU = torch.device("cpu")


@pytest.fixture
def layer() -> Layer:
    return Layer(TINY, 16, "int8", DTYPE, CPU)


def race(layer: Layer, name: str, tiles: Sequence[ProductTiles]) -> Mapping[ProductTiles, float]:
    """Wide and shallow is fast; 8 warps cannot do it."""
    able = [one for one in tiles if one.warps < 8]
    return {one: one.depth / one.columns for one in able}


def test_the_fastest_of_each_matrix_is_taken(layer: Layer) -> None:
    entries = list(tuned(layer, 16, GPU, {"date": "today"}, race))
    assert [entry.matrix for entry in entries] == [matrix_of(layer, name) for name in layer.weights]
    for entry in entries:
        assert (entry.gpu, entry.capability) == GPU and entry.measured["date"] == "today"
        assert entry.tiles.rows == 16 and entry.tiles.warps == 4
        assert entry.tiles.columns == 128 and entry.tiles.depth == 64
        assert 0 < entry.measured["of_default_seconds"] < 1


def test_where_nothing_is_faster_the_default_stays(layer: Layer) -> None:
    for entry in tuned(layer, 32, GPU, {}, lambda layer, name, tiles: dict.fromkeys(tiles, 1.0)):
        assert entry.tiles == product_tuning.usual(entry.matrix, 32, GPU.capability)
        assert entry.measured["of_default_seconds"] == 1.0


def test_a_wrong_default_ends_it_in_one_line(layer: Layer) -> None:
    with pytest.raises(SystemExit, match=r"^qkv, 16 tokens: wrong already with the default, "):
        next(tuned(layer, 16, GPU, {}, lambda *_: {}))


def test_candidates_are_neither_tiny_nor_huge(layer: Layer) -> None:
    for name in layer.weights:
        matrix = matrix_of(layer, name)
        some = list(candidates(matrix, 16))
        assert len(some) == len(set(some)) > 10
        width = matrix.itemsizes[1] * (2 if matrix.gated else 1)
        assert all(one.columns * one.depth * width >= 4096 for one in some)


def test_what_computes_something_else_is_out(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedsim.kernels import product as kernel
    from pagedsim.kernels import reference

    tiles = [ProductTiles(16, columns, 64, 4, 3) for columns in (16, 32)]

    def computed(x: Any, *values: Any, tiles: ProductTiles, **rest: Any) -> Any:
        return reference.product(x, *values, **rest) * (2 if tiles.columns == 32 else 1)

    def added(residual: Any, *values: Any, tiles: ProductTiles) -> Any:
        residual += 1 if tiles.columns == 32 else 0
        return reference.add_product(residual, *values)

    monkeypatch.setattr(kernel, "product", computed)
    monkeypatch.setattr(kernel, "add_product", added)
    for name in layer.weights:
        one = Product(layer, name)
        right = one.fresh(tiles[0])
        assert [one.can(cut, right) for cut in tiles] == [True, False]


def test_the_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a race that needs no GPU, in the place of the one that does."""
    code, raced = ["one"], list[str]()
    monkeypatch.setattr(tuner, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuner, "facts", lambda *_: {"device": "Pretend", "code": code[0]})
    monkeypatch.setattr("pagedsim.kernels.tuning.capability", lambda device: (8, 0))
    monkeypatch.setattr(tuner, "widths", lambda model: TINY)
    monkeypatch.setattr(tuner, "Layer", lambda *values: Layer(*values[:4], CPU))  # type: ignore[call-arg]

    def timed(layer: Layer, name: str, tiles: Sequence[ProductTiles], *_: object) -> object:
        raced.append(name)
        return race(layer, name, tiles)

    monkeypatch.setattr(tuner, "timed", timed)
    table = tmp_path / "table.json"
    for weights in ("auto", "int8"):
        tuner.main(["--table", str(table), "--weights", weights])
    entries = product_tuning.read(table)
    assert len(entries) == 2 * 2 * 4  # weights, rows, matrices
    assert {entry.gpu for entry in entries} == {"Pretend"} and len(raced) == len(entries)
    product_tuning.write(entries[:-3], table)  # as if it had been stopped
    for weights in ("auto", "int8"):
        tuner.main(["--table", str(table), "--weights", weights, "--resume"])
    assert product_tuning.read(table) == entries and len(raced) == len(entries) + 3
    code[0] = "other"
    tuner.main(["--table", str(table), "--resume"])
    assert len(raced) == len(entries) + 3 + 2 * 4


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        tuner.main([])
    assert str(refused.value) == "no CUDA device here, and this measures one"
