"""The tuners' choices and entries, and what is read from compiled kernels."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedsim.experiments.benchmarks import tune  # noqa: E402
from pagedsim.experiments.benchmarks.products import Layer  # noqa: E402
from pagedsim.experiments.benchmarks.shapes import BASE, TINY, Case  # noqa: E402
from pagedsim.experiments.benchmarks.tune import (  # noqa: E402
    Gpu,
    Race,
    screened,
    tuned_attention,
)
from pagedsim.kernels import product_tuning, tuning  # noqa: E402
from pagedsim.kernels.tiles import ProductTiles, Split, Tiles  # noqa: E402
from pagedsim.kernels.tuning import DEFAULT, KERNELS, Cut, Entry, Heads  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0))
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


# -- attention -------------------------------------------------------------------------------------


def price(cut: Cut, case: Case) -> float:
    """Makes 128 keys, 8 warps and 7 stages the best tiles, and 32 parts of 512 the best split."""
    tiles, split = cut
    wrong = (tiles.keys != 128) + (tiles.warps != 8) + (tiles.stages != 7) + (tiles.rows == 128)
    return case.flop * (1 + wrong + 0.1 * (split.part != 512) + 0.1 * (split.most != 32))


def both(race: Race, **rest: Any) -> tuple[Entry, Entry]:
    """The entries of a model's prefill and decode."""

    def screen(cuts: Any, case: Case) -> Any:
        return [cut for cut in cuts if cut.tiles.keys != 32]

    told = {"date": "today"}
    prefill, decode = (
        tuned_attention(BASE, one, GPU, told, race, screen, **rest) for one in KERNELS
    )
    return prefill, decode


def test_the_fastest_that_fits_is_chosen() -> None:
    prefill, decode = both(lambda cuts, case: {cut: price(cut, case) for cut in cuts})
    assert (prefill.tiles, prefill.split) == (Tiles(64, 128, 8, 7), Split())
    assert (decode.tiles, decode.split) == (Tiles(16, 128, 8, 7), Split(512, 32))
    assert decode.heads == Heads(8, 4, 128, 2) and decode.measured["date"] == "today"
    # One of three steps of the tiles' price, where the default has 64 keys, 4 warps, 5 stages.
    assert decode.measured["of_default_seconds"] == pytest.approx(1 / 4.2, abs=1e-4)
    _, decode = both(lambda cuts, case: dict.fromkeys(cuts, 1.0), cache="fp8_e4m3")
    assert decode.heads == Heads(8, 4, 128, 2, "fp8_e4m3")
    assert decode.measured["of_default_seconds"] == 1.0 and decode.split == Split(1024, 128)
    with pytest.raises(SystemExit, match=r"^prefill 1 × 512.*: wrong already with the default, "):
        both(lambda cuts, case: {})


DEEP = Cut(Tiles(128, 128, 8, 5), DEFAULT)
"""Keeps a tile in flight where the default of a Hopper, the same at depth 3, keeps none."""


@pytest.mark.slow
@needs_triton
def test_what_spills_or_is_too_large_is_left_out() -> None:
    usual = Cut(Tiles(16, 64, 4, 5), Split())
    large = usual._replace(tiles=Tiles(16, 256, 8, 7))
    assert screened([large, usual], Case(BASE, 64, 1, 512, beside=9000), (9, 0), 1) == [usual]
    fit, spills = (Cut(Tiles(128, keys, warps, 2), Split()) for keys, warps in ((64, 8), (128, 4)))
    # DEEP takes 230,400 of the 232,448 bytes of shared memory of a program on a Hopper.
    assert screened([fit, spills, DEEP], Case(BASE, 1, 512, 4096), (9, 0), 1) == [fit, DEEP]


# -- products --------------------------------------------------------------------------------------


def product_race(
    tiles: Sequence[ProductTiles], name: str, layer: Layer, **rest: Any
) -> Mapping[ProductTiles, float]:
    """Wide and shallow tiles are fast; 8 warps fail."""
    return {one: one.depth / one.columns for one in tiles if one.warps < 8}


def test_commands_write_and_resume_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a race that needs no GPU."""
    code, raced, table = ["one"], list[str](), tmp_path / "table.json"
    here = Gpu("Pretend", (8, 0))
    monkeypatch.setattr(tune, "measured_gpu", lambda words: (here, {"code": code[0]}, CPU))
    monkeypatch.setattr(tune, "attention_race", lambda cuts, *_, **__: dict.fromkeys(cuts, 1.0))
    monkeypatch.setattr(tune, "screened", lambda cuts, *_, **__: cuts)
    for words in (["--models", BASE, "gpt2"], ["--models", "gpt2", "--kernels", "decode"]):
        tune.main(["attention", *words, "--table", str(table)])
    found = [(one.kernel, one.heads.kv_heads) for one in tuning.read(table)]
    assert sorted(found) == [("decode", 8), ("decode", 12), ("prefill", 8), ("prefill", 12)]

    def race(tiles: Any, name: str, **rest: Any) -> Mapping[ProductTiles, float]:
        raced.append(name)
        return product_race(tiles, name, **rest)

    monkeypatch.setattr(tune, "product_race", race)
    monkeypatch.setattr(tune, "shape_of", lambda model: TINY)
    table.unlink()
    words = ["products", "--table", str(table), "--weights", "int8"]
    tune.main(words)
    entries = product_tuning.read(table)
    assert len(entries) == len(raced) == 2 * 4  # rows, matrices
    for one in entries:
        assert (one.tiles.columns, one.tiles.depth, one.tiles.warps) == (128, 64, 4)
        assert 0 < one.measured["of_default_seconds"] < 1
    product_tuning.write(entries[:-3], table)  # as if stopped
    tune.main([*words, "--resume"])
    assert product_tuning.read(table) == entries and len(raced) == 8 + 3
    code[0] = "other"
    tune.main([*words, "--resume"])
    assert len(raced) == 8 + 3 + 8


# -- compiled kernels ------------------------------------------------------------------------------


def printed(*words: str) -> str:
    """The output of a process of its own, since it replaces Triton's driver."""
    command = [sys.executable, *words]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.slow
@needs_triton
def test_no_kernel_spills_and_decodes_keep_copies_in_flight() -> None:
    text = printed("-m", "pagedsim.experiments.benchmarks.compiled", "--capabilities", "90")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 9.0")]
    assert [row[1] for row in rows] == [
        *(["prefill"] * 3 + ["decode"] * 3),
        *["qkv", "out", "gate_up", "down"] * 3,
    ]
    for row in rows:
        *_, instructions, products, loads, wide, in_flight, registers, spilled, shared = row
        assert 0 < int(products) < int(instructions) and 0 < int(wide) <= int(loads)
        assert int(registers) <= 255 and spilled == "0" and float(shared.rstrip(" |")) <= 227
        # A prefill's deeper pipeline leaves little room for anything else: it has to win a race.
        assert float(in_flight) >= (0 if row[1] == "prefill" else 1), row


@needs_triton
def test_launches_and_bytes_of_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("pagedsim.experiments.benchmarks.compiled").main(
        ["sampling", "--rows", "16", "--vocab", "50257"]
    )
    lines = capsys.readouterr().out.splitlines()[2:]
    found = {name: rest for name, *rest in (line.strip("| ").split(" | ") for line in lines)}
    assert found["greedy"][0] == "1" and found["random"][0] == "2"
    assert found["random"][2] == "1.1 ×"
    assert float(found["random, torch"][1]) > 30 * float(found["random"][1])


ROUNDED = """
import json, re
import torch
from pagedsim.experiments.benchmarks.fake_gpu import compiled_kernels, usage, use_target
from pagedsim.engine.sampler import words_of
from pagedsim.kernels import draw
from pagedsim.kernels.batch import SamplingTensors
use_target(90)

def sample(filtered):
    floats = torch.ones(2)
    asked = SamplingTensors(floats, floats.int(), floats.double(), floats, *[filtered] * 3)
    return draw.pick(torch.zeros(2, 50257), asked, words_of([1, 2], [0, 0]))

kernels = [one for cut in (False, True) for one in compiled_kernels(lambda: sample(cut))]
assert not any(usage(one).spilled for one in kernels)
code = [one.asm["ptx"] for one in kernels]
found = re.findall(r"\\b([a-z]\\w*[.][.a-z0-9]*f(?:32|64)[.a-z0-9]*)", "".join(code))
print(json.dumps(sorted({one for one in found if not re.match("ld|st|mov|selp|shfl|param", one)})))
"""
ALIKE = re.compile(r"(add|sub|mul|max|neg|setp|div[.]rn|cvt[.]rn|cvt[.]rzi|cvt[.]rpi|cvt[.]rmi)[.]")
"""Operations that IEEE 754 defines. Here `floor` may flush a subnormal number to 0, but it only
gets sums with ½."""


@pytest.mark.slow
@needs_triton
def test_every_gpu_rounds_alike() -> None:
    """No product is fused with a sum, nothing is approximate, and nothing spills."""
    found = json.loads(printed("-c", ROUNDED))
    assert {"div.rn.f32", "div.rn.f64"} <= {*found}
    assert [one for one in found if not ALIKE.match(one)] == []
