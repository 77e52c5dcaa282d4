"""The tuners choose the fastest candidate, leave out what cannot run, and write their entries."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import tune  # noqa: E402
from experiments.benchmarks.products import TINY, Layer  # noqa: E402
from experiments.benchmarks.shapes import BASE, SHAPES, Case  # noqa: E402
from experiments.benchmarks.tune import (  # noqa: E402
    DTYPE,
    Gpu,
    Race,
    best,
    matrix_of,
    screened,
    tuned_attention,
    tuned_products,
)
from pagedsim.kernels import product as kernel  # noqa: E402
from pagedsim.kernels import product_tuning, reference, tuning  # noqa: E402
from pagedsim.kernels.tiles import ProductTiles, Split, Tiles  # noqa: E402
from pagedsim.kernels.tuning import DEFAULT, KERNELS, Cut, Entry, Heads  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0))
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def price(cut: Cut, case: Case) -> float:
    """Makes 128 keys, 8 warps and 7 stages the best tiles, and 32 parts of 512 the best split."""
    tiles, split = cut
    wrong = (tiles.keys != 128) + (tiles.warps != 8) + (tiles.stages != 7) + (tiles.rows == 128)
    return case.flop * (1 + wrong + 0.1 * (split.part != 512) + 0.1 * (split.most != 32))


def both(race: Race, model: str = BASE, screen: Any = None, **rest: Any) -> tuple[Entry, Entry]:
    """The entries of a model's prefill and decode."""
    screen = screen or (lambda cuts, case: cuts)
    prefill, decode = (
        tuned_attention(model, one, GPU, {"date": "today"}, race, screen, **rest) for one in KERNELS
    )
    return prefill, decode


def test_the_fastest_that_fits_is_chosen() -> None:
    prefill, decode = both(lambda cuts, case: {cut: price(cut, case) for cut in cuts})
    assert (prefill.tiles, prefill.split) == (Tiles(64, 128, 8, 7), Split())
    assert (decode.tiles, decode.split) == (Tiles(16, 128, 8, 7), Split(512, 32))
    assert decode.heads == Heads(8, 4, 128, 2) and decode.measured["date"] == "today"
    # One of three steps of the tiles' price, where the default has 64 keys, 4 warps, 5 stages.
    assert decode.measured["of_default_seconds"] == pytest.approx(1 / 4.2, abs=1e-4)
    _, decode = both(lambda cuts, case: {
        cut: price(cut, case) for cut in cuts if cut.tiles.stages < 7 or cut.tiles.keys < 128
    })  # fmt: skip
    assert (decode.tiles.keys, decode.tiles.stages) in {(32, 7), (64, 7), (128, 5)}
    few = both(
        lambda cuts, case: {cut: price(cut, case) for cut in cuts},
        screen=lambda cuts, case: [cut for cut in cuts if cut.tiles.warps == 4],
    )
    assert [entry.tiles.warps for entry in few] == [4, 4]
    prefill, decode = both(lambda cuts, case: dict.fromkeys(cuts, 1.0), cache="fp8_e4m3")
    assert decode.heads == Heads(8, 4, 128, 2, "fp8_e4m3")
    assert decode.measured["of_default_seconds"] == 1.0 and decode.split == Split()
    with pytest.raises(SystemExit, match=r"^prefill 1 × 512.*: wrong already with the defaults"):
        both(lambda cuts, case: {})


def test_all_cases_have_equal_weight_and_all_must_be_computed() -> None:
    usual, one, other = (Cut(Tiles(16, keys, 4, 2), Split()) for keys in (16, 32, 64))
    times = {1: {usual: 1.0, one: 0.5, other: 0.1}, 8: {usual: 100.0, one: 150.0}}
    winner = best([usual, one, other], [Case(BASE, n, 1, 64) for n in times],
                  lambda cuts, case: {cut: times[case.batch][cut] for cut in cuts
                                      if cut in times[case.batch]})  # fmt: skip
    assert winner.cut == one and winner.ratio == pytest.approx((0.5 * 1.5) ** 0.5)


DEEP = Cut(Tiles(128, 128, 8, 5), DEFAULT)
"""Keeps a tile in flight where the default of a Hopper, the same at depth 3, keeps none."""


def test_every_candidate_can_be_launched() -> None:
    seen: set[Cut] = set()

    def race(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        seen.update(cuts)
        assert all(cut.tiles.rows >= case.shape.group for cut in cuts)
        assert all(cut.split.part % cut.tiles.keys == 0 for cut in cuts)
        return dict.fromkeys(cuts, 1.0)

    counts = []
    for grid in (tune.FULL, tune.SHORT):
        seen.clear()
        for model in SHAPES:
            both(race, model=model, grid=grid)
        assert DEEP in seen
        counts.append(len(seen))
    assert counts[1] < counts[0] / 2


@pytest.mark.slow
@needs_triton
def test_what_spills_or_is_too_large_is_left_out() -> None:
    usual = Cut(Tiles(16, 64, 4, 5), Split())
    large = usual._replace(tiles=Tiles(16, 256, 8, 7))
    assert screened([large, usual], Case(BASE, 64, 1, 512, beside=9000), (9, 0), 1) == [usual]
    fit, spills = (Cut(Tiles(128, keys, warps, 2), Split()) for keys, warps in ((64, 8), (128, 4)))
    # DEEP takes 230,400 of the 232,448 bytes of shared memory of a program on a Hopper.
    assert screened([fit, spills, DEEP], Case(BASE, 1, 512, 4096), (9, 0), 1) == [fit, DEEP]


def product_race(
    layer: Layer, name: str, tiles: Sequence[ProductTiles], *rest: Any
) -> Mapping[ProductTiles, float]:
    """Wide and shallow tiles are fast; 8 warps fail."""
    return {one: one.depth / one.columns for one in tiles if one.warps < 8}


def test_the_fastest_tiles_of_each_matrix_are_chosen() -> None:
    layer = Layer(TINY, 16, "int8", DTYPE, CPU)
    entries = list(tuned_products(layer, 16, GPU, {"date": "today"}, product_race))
    assert [entry.matrix for entry in entries] == [matrix_of(layer, name) for name in layer.weights]
    for entry in entries:
        tiles = entry.tiles
        assert (tiles.rows, tiles.columns, tiles.depth, tiles.warps) == (16, 128, 64, 4)
        assert 0 < entry.measured["of_default_seconds"] < 1
    with pytest.raises(SystemExit, match=r"^qkv, 16 tokens: wrong already with the default, "):
        next(tuned_products(layer, 16, GPU, {}, lambda *_: {}))


def test_tiles_with_wrong_results_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [ProductTiles(16, columns, 64, 4, 3) for columns in (16, 32)]

    def computed(x: Any, *values: Any, tiles: ProductTiles, **rest: Any) -> Any:
        return reference.product(x, *values, **rest) * (2 if tiles.columns == 32 else 1)

    def added(residual: Any, *values: Any, tiles: ProductTiles) -> Any:
        residual += 1 if tiles.columns == 32 else 0
        return reference.add_product(residual, *values)

    monkeypatch.setattr(kernel, "product", computed)
    monkeypatch.setattr(kernel, "add_product", added)
    layer = Layer(TINY, 16, "int8", DTYPE, CPU)
    for name in layer.weights:
        one = tune.Product(layer, name)
        right = one.fresh(tiles[0])
        assert [one.computes(some, right) for some in tiles] == [True, False]


def test_commands_write_and_resume_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a race that needs no GPU."""
    code, raced, table = ["one"], list[str](), tmp_path / "table.json"
    here = Gpu("Pretend", (8, 0))
    monkeypatch.setattr(tune, "measured_gpu", lambda words: (here, {"code": code[0]}, CPU))
    monkeypatch.setattr(tune, "attention_race", lambda cuts, *_: dict.fromkeys(cuts, 1.0))
    monkeypatch.setattr(tune, "screened", lambda cuts, *_: cuts)
    for words in (["--models", BASE, "gpt2"], ["--models", "gpt2", "--kernels", "decode"]):
        tune.main(["attention", *words, "--table", str(table)])
    found = [(one.kernel, one.heads.kv_heads) for one in tuning.read(table)]
    assert sorted(found) == [("decode", 8), ("decode", 12), ("prefill", 8), ("prefill", 12)]

    def race(layer: Layer, name: str, *rest: Any) -> Mapping[ProductTiles, float]:
        raced.append(name)
        return product_race(layer, name, *rest)

    monkeypatch.setattr(tune, "product_race", race)
    monkeypatch.setattr(tune, "widths", lambda model: TINY)
    table.unlink()
    words = ["products", "--table", str(table), "--weights", "int8"]
    tune.main(words)
    entries = product_tuning.read(table)
    assert len(entries) == len(raced) == 2 * 4  # rows, matrices
    product_tuning.write(entries[:-3], table)  # as if stopped
    tune.main([*words, "--resume"])
    assert product_tuning.read(table) == entries and len(raced) == 8 + 3
    code[0] = "other"
    tune.main([*words, "--resume"])
    assert len(raced) == 8 + 3 + 8
