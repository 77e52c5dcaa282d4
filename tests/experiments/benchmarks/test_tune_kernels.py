"""The tuner finds the fastest of the grid, leaves out what cannot run, and writes its entry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import tune_kernels as tuner  # noqa: E402
from experiments.benchmarks.shapes import BASE, SHAPES, Case  # noqa: E402
from experiments.benchmarks.tune_kernels import Gpu, best, tuned  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from pagedsim.kernels.tiles import Split, Tiles, decode_tiles  # noqa: E402
from pagedsim.kernels.tuning import Cut, Heads  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0))


def price(cut: Cut, case: Case) -> float:
    """Makes 128 keys, 8 warps and 7 stages the best tiles, and 32 segments of 2 the best split."""
    tiles, split = cut
    wrong = (tiles.keys != 128) + (tiles.warps != 8) + (tiles.stages != 7) + (tiles.rows == 128)
    return case.flop * (1 + wrong + 0.1 * (split.segments != 32) + 0.1 * (split.least != 2))


def race(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
    """So many keys and stages as that do not fit."""
    return {cut: price(cut, case) for cut in cuts if cut.tiles.stages < 7 or cut.tiles.keys < 128}


def test_the_fastest_is_found_in_two_turns() -> None:
    prefill, decode = tuned(
        BASE, GPU, {"date": "today"}, lambda cuts, case: {cut: price(cut, case) for cut in cuts}
    )
    assert prefill.kernel == "prefill" and prefill.tiles == Tiles(64, 128, 8, 7)
    assert decode.kernel == "decode" and decode.tiles == Tiles(16, 128, 8, 7)
    assert decode.split == Split(32, 2)
    assert prefill.split == Split()
    for entry in (prefill, decode):
        assert entry.gpu == "NVIDIA Pretend" and entry.heads == Heads(8, 4, 128, 2)
        assert entry.measured["date"] == "today"
    # One of three steps of the tiles' price, where the default has 64 keys, 4 warps, 5 stages.
    assert decode.measured["of_default_seconds"] == pytest.approx(1 / 4.2, abs=1e-4)


def test_what_does_not_fit_is_not_chosen() -> None:
    _, decode = tuned(BASE, GPU, {}, race)
    tiles = decode.tiles
    assert tiles.warps == 8 and (tiles.keys, tiles.stages) in {(32, 7), (64, 7), (128, 5)}
    assert decode.split == Split(32, 2)


def test_where_nothing_is_faster_the_default_stays() -> None:
    usual = decode_tiles(128, 4, 2, (9, 0))
    _, decode = tuned(BASE, GPU, {}, lambda cuts, _: dict.fromkeys(cuts, 1.0))
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

    for entry in tuned(BASE, GPU, {}, looked_at, "fp8_e4m3"):
        assert entry.heads == Heads(8, 4, 128, 2, "fp8_e4m3")
    assert cases == {"fp8_e4m3"}


def test_wrong_defaults_end_it_in_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^prefill 1 × 512.*: wrong already with the defaults"):
        tuned(BASE, GPU, {}, lambda cuts, case: {})


def test_every_candidate_can_be_launched() -> None:
    seen: set[Cut] = set()

    def looked_at(cuts: Sequence[Cut], case: Case) -> Mapping[Cut, float]:
        seen.update(cuts)
        assert all(cut.tiles.rows >= case.shape.group for cut in cuts)
        return dict.fromkeys(cuts, 1.0)

    for model in SHAPES:
        tuned(model, GPU, {}, looked_at)
    assert {cut.tiles.stages for cut in seen} == {2, 3, 5, 7}
    whole, seen = seen, set()
    for model in SHAPES:
        tuned(model, GPU, {}, looked_at, grid=tuner.SHORT)
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
    table = tmp_path / "tuned.json"
    for _ in range(2):  # the second time in the place of the first
        tuner.main(["--models", BASE, "gpt2", "--table", str(table)])
    eight = ["--models", "gpt2", "--table", str(table), "--kv-cache-dtype", "fp8_e5m2"]
    tuner.main(eight)
    *entries, one, other = sorted(tuning.read(table), key=lambda one: one.heads.cache)
    assert one.heads == other.heads == Heads(12, 1, 64, 2, "fp8_e5m2")
    assert [(one.kernel, one.heads.kv_heads) for one in entries] == [
        *(("decode", 8), ("decode", 12), ("prefill", 8), ("prefill", 12))
    ]
    assert {one.gpu for one in entries} == {"Pretend"}
    assert {one.capability for one in entries} == {(8, 0)}
    assert json.loads(table.read_text())[0]["measured"]["date"] == "today"
