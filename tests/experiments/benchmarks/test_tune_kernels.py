"""The tuner finds the fastest of the grid, leaves out what cannot run, and writes its entry."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import tune_kernels as tuner  # noqa: E402
from experiments.benchmarks.cuts import screened  # noqa: E402
from experiments.benchmarks.shapes import BASE, SHAPES, Case  # noqa: E402
from experiments.benchmarks.tune_kernels import Gpu, Race, Screen, best, tuned  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from pagedsim.kernels.tiles import Split, Tiles, decode_tiles  # noqa: E402
from pagedsim.kernels.tuning import DEFAULT, KERNELS, Cut, Entry, Heads  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0))


def price(cut: Cut, case: Case) -> float:
    """Makes 128 keys, 8 warps and 7 stages the best tiles, and 32 parts of 512 the best split."""
    tiles, split = cut
    wrong = (tiles.keys != 128) + (tiles.warps != 8) + (tiles.stages != 7) + (tiles.rows == 128)
    return case.flop * (1 + wrong + 0.1 * (split.part != 512) + 0.1 * (split.most != 32))


def race(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
    """So many keys and stages as that do not fit."""
    return {cut: price(cut, case) for cut in cuts if cut.tiles.stages < 7 or cut.tiles.keys < 128}


def all_of_them(cuts: Sequence[Cut], case: Case) -> Sequence[Cut]:
    """A screen that nobody fails."""
    return cuts


def both(
    race: Race, screen: Screen = all_of_them, model: str = BASE, **rest: Any
) -> tuple[Entry, Entry]:
    """The entries of a model."""
    told = {"date": "today"}
    prefill, decode = (tuned(model, one, GPU, told, race, screen, **rest) for one in KERNELS)
    return prefill, decode


def test_the_fastest_is_found_in_two_turns() -> None:
    prefill, decode = both(lambda cuts, case: {cut: price(cut, case) for cut in cuts})
    assert prefill.kernel == "prefill" and prefill.tiles == Tiles(64, 128, 8, 7)
    assert decode.kernel == "decode" and decode.tiles == Tiles(16, 128, 8, 7)
    assert decode.split == Split(512, 32)
    assert prefill.split == Split()
    for entry in (prefill, decode):
        assert entry.gpu == "NVIDIA Pretend" and entry.heads == Heads(8, 4, 128, 2)
        assert entry.measured["date"] == "today"
    # One of three steps of the tiles' price, where the default has 64 keys, 4 warps, 5 stages.
    assert decode.measured["of_default_seconds"] == pytest.approx(1 / 4.2, abs=1e-4)


def test_who_fails_the_screen_does_not_race() -> None:
    raced: set[Cut] = set()

    def looked_at(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        raced.update(cuts)
        return {cut: price(cut, case) for cut in cuts}

    def few(cuts: Sequence[Cut], case: Case) -> Sequence[Cut]:
        return [cut for cut in cuts if cut.tiles.warps == 4 and cut.split.most != 64]

    prefill, decode = both(looked_at, few)
    assert {cut.tiles.warps for cut in raced} == {4, 8}  # the default of a prefill races always
    assert {cut.split.most for cut in raced} == {32, 128}
    assert prefill.tiles == Tiles(64, 128, 4, 7) and decode.tiles == Tiles(16, 128, 4, 7)


def test_what_does_not_fit_is_not_chosen() -> None:
    _, decode = both(race)
    tiles = decode.tiles
    assert tiles.warps == 8 and (tiles.keys, tiles.stages) in {(32, 7), (64, 7), (128, 5)}
    assert decode.split == Split(512, 32)


def test_where_nothing_is_faster_the_default_stays() -> None:
    usual = decode_tiles(128, 4, 2, (9, 0))
    _, decode = both(lambda cuts, _: dict.fromkeys(cuts, 1.0))
    assert (decode.tiles, decode.split) == (usual, Split())
    assert decode.measured["of_default_seconds"] == 1.0


def test_all_cases_count_alike_and_all_must_be_done() -> None:
    usual, one, other = (Cut(Tiles(16, keys, 4, 2), Split()) for keys in (16, 32, 64))
    times = {1: {usual: 1.0, one: 0.5, other: 0.1}, 8: {usual: 100.0, one: 150.0}}
    winner = best([usual, one, other], [Case(BASE, n, 1, 64) for n in times],
                  lambda cuts, case: {cut: times[case.batch][cut] for cut in cuts
                                      if cut in times[case.batch]})  # fmt: skip
    assert winner.cut == one and winner.ratio == pytest.approx((0.5 * 1.5) ** 0.5)


def test_a_cache_of_8_bits_has_entries_of_its_own() -> None:
    cases: set[str] = set()

    def looked_at(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        cases.add(case.cache)
        return dict.fromkeys(cuts, 1.0)

    for entry in both(looked_at, cache="fp8_e4m3"):
        assert entry.heads == Heads(8, 4, 128, 2, "fp8_e4m3")
    assert cases == {"fp8_e4m3"}


def test_wrong_defaults_end_it_in_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^prefill 1 × 512.*: wrong already with the defaults"):
        both(lambda cuts, case: {})


def test_every_candidate_can_be_launched() -> None:
    seen: set[Cut] = set()

    def looked_at(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        seen.update(cuts)
        assert all(cut.tiles.rows >= case.shape.group for cut in cuts)
        assert all(cut.split.part % cut.tiles.keys == 0 for cut in cuts)
        return dict.fromkeys(cuts, 1.0)

    for model in SHAPES:
        both(looked_at, model=model)
    assert {cut.tiles.stages for cut in seen} == {2, 3, 5, 7}
    whole, seen = seen, set()
    for model in SHAPES:
        both(looked_at, model=model, grid=tuner.SHORT)
    assert {cut.tiles.stages for cut in seen} == {3, 5} and seen < whole
    assert len(seen) < len(whole) / 2


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        tuner.main([])
    assert str(refused.value) == "no CUDA device here, and this measures one"


def test_the_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a race that needs no GPU, in the place of the one that does."""
    monkeypatch.setattr(tuner, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuner, "facts", lambda *_: {"device": "Pretend", "date": "today"})
    monkeypatch.setattr(tuning, "capability", lambda device: (8, 0))
    monkeypatch.setattr(tuner, "timed", lambda cuts, case, device, rounds: race(cuts, case))
    monkeypatch.setattr(tuner, "screened", lambda cuts, case, capability: cuts)
    table = tmp_path / "tuned.json"
    for _ in range(2):  # the second time in the place of the first
        tuner.main(["--models", BASE, "gpt2", "--table", str(table)])
    eight = ["--models", "gpt2", "--table", str(table), "--kv-cache-dtype", "fp8_e5m2"]
    for kernel in KERNELS:  # in slices
        tuner.main([*eight, "--kernels", kernel])
    *entries, one, other = sorted(tuning.read(table), key=lambda one: one.heads.cache)
    assert one.heads == other.heads == Heads(12, 1, 64, 2, "fp8_e5m2")
    assert [(one.kernel, one.heads.kv_heads) for one in entries] == [
        *(("decode", 8), ("decode", 12), ("prefill", 8), ("prefill", 12))
    ]
    assert {one.gpu for one in entries} == {"Pretend"}
    assert {one.capability for one in entries} == {(8, 0)}
    assert json.loads(table.read_text())[0]["measured"]["date"] == "today"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_what_spills_or_is_too_large_fails_the_screen() -> None:
    usual = Cut(Tiles(16, 64, 4, 5), Split())
    large = usual._replace(tiles=Tiles(16, 256, 8, 7))
    assert screened([large, usual], Case(BASE, 64, 1, 512, beside=9000), (9, 0), 1) == [usual]
    fit, spills = (Cut(Tiles(128, keys, warps, 2), Split()) for keys, warps in ((64, 8), (128, 4)))
    assert screened([fit, spills], Case(BASE, 1, 512, 4096), (9, 0), 1) == [fit]


DEEP = Cut(Tiles(128, 128, 8, 5), DEFAULT)
"""Keeps a tile in flight where the default of a Hopper, the same at depth 3, keeps none."""


def test_a_prefill_that_keeps_a_tile_in_flight_is_raced() -> None:
    raced: set[Cut] = set()

    def looked_at(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        raced.update(cuts)
        return dict.fromkeys(cuts, 1.0)

    for grid in (tuner.FULL, tuner.SHORT):
        raced.clear()
        both(looked_at, grid=grid)
        assert DEEP in raced


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_prefill_that_keeps_a_tile_in_flight_passes_the_screen() -> None:
    """It takes 230,400 of the 232,448 bytes of shared memory that a Hopper's program may have."""
    assert screened([DEEP], Case(BASE, 1, 512, 4096), (9, 0), 1) == [DEEP]
