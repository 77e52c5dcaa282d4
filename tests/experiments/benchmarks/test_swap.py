"""The benchmark of swapping goes its whole way at tiny sizes, and times nothing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import swap  # noqa: E402
from experiments.benchmarks.shapes import SHAPES  # noqa: E402
from experiments.benchmarks.swap import Swap, plan_of, right, scattered, swaps  # noqa: E402
from pagedsim.core.memory import Pairs  # noqa: E402
from pagedsim.engine.cache import Cache  # noqa: E402
from pagedsim.engine.mover import LAYOUTS, Mover, copy_runs, runs  # noqa: E402

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--quick", "--rounds", "1"]


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_the_whole_way(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap.main([*TINY, "--out", str(tmp_path), "--kv-cache-dtype", cache])
    name = "swap" if cache == "auto" else f"swap-{cache}"
    result = json.loads((tmp_path / f"{name}.json").read_text())
    tokens = 2 * 2 * 2 * 16 * (2 if cache == "auto" else 1)  # bytes of one, over all layers
    assert {one["block_bytes"] // one["block_size"] for one in result["swaps"]} == {tokens}
    assert {"device", "driver", "cuda", "torch", "date", "command"} <= set(result)
    assert [one["swap"] for one in result["swaps"]] == [str(one) for one in swaps(quick=True)]
    for one in result["swaps"]:
        assert one["right"] and one["blocks"] * one["block_bytes"] <= swap.LITTLE
        for way in swap.WAYS:
            ratio = one[way]["gb_s"] / one[way]["pinned_gb_s"]
            assert one[way]["of_pinned"] == pytest.approx(ratio) and ratio > 0
    assert (tmp_path / f"{name}.png").stat().st_size > 0
    assert capsys.readouterr().out.count("\n| ") == 2 + len(result["swaps"])


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        swap.main([])
    assert str(refused.value).startswith("no CUDA device here")
    assert "\n" not in str(refused.value)


def test_what_is_quick_is_written_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    swap.main(TINY)
    assert "nothing is written" in capsys.readouterr().out


def one_too_far(source: Any, target: Any, pairs: Pairs) -> None:
    copy_runs(source, target, pairs)
    (origin, place) = pairs[0]
    target[(place + 1) % len(target)] = source[origin]


def one_left_out(source: Any, target: Any, pairs: Pairs) -> None:
    copy_runs(source, target, pairs[:-1])


@pytest.mark.parametrize("broken", [one_too_far, one_left_out])
def test_what_moves_wrongly_is_not_timed(
    broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, "block", broken)
    with pytest.raises(SystemExit, match=r"^wrong: tiny, blocks of 8, a copy a block; [^;]*block$"):
        swap.main([*TINY, "--out", str(tmp_path)])
    for one in json.loads((tmp_path / "swap.json").read_text())["swaps"]:
        assert ("out" in one) == (one["layout"] == "layer")


def test_moving_one_way_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(Swap("tiny", 8, "block").cache(torch.bfloat16), 8, 8, CPU)
    mover, pairs = Mover(cache), scattered(4)
    assert right(cache, mover, pairs)
    for way in swap.WAYS:
        with monkeypatch.context() as patch:
            there = mover.move
            patch.setattr(
                mover,
                "move",
                lambda plan, way=way, go=there: getattr(plan, f"swap_{way}") or go(plan),
            )
            assert not right(cache, mover, pairs)


def test_no_two_blocks_go_in_one_copy() -> None:
    pairs = scattered(50)
    assert len(runs(pairs)) == 50
    assert len({block for block, _ in pairs}) == len({place for _, place in pairs}) == 50
    assert plan_of("out", pairs).swap_out == pairs
    assert plan_of("in", pairs).swap_in == [(place, block) for block, place in pairs]


def test_copies_are_as_large_as_the_layout_makes_them() -> None:
    assert {one.model for one in swaps(quick=False)} == set(SHAPES)
    whole, pieces = (Swap("llama-3.1-8b", 16, layout) for layout in ("block", "layer"))
    size = whole.cache(torch.bfloat16).block_bytes
    assert size == 2 * 2**20
    assert (whole.copies(), pieces.copies()) == (1, 64)
