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

from pagedsim.core import PagedsimError, SamplingParams  # noqa: E402
from pagedsim.engine.sampler import Row, Rows, Sampler, stream_key  # noqa: E402
from pagedsim.experiments.benchmarks import tune  # noqa: E402
from pagedsim.experiments.benchmarks.shapes import BASE, Case  # noqa: E402
from pagedsim.experiments.benchmarks.tune import Gpu, screened, tuned_attention  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from pagedsim.kernels.tiles import Split, Tiles  # noqa: E402
from pagedsim.kernels.tuning import DEFAULT, KERNELS, Cut, Heads  # noqa: E402

GPU = Gpu("NVIDIA Pretend", (9, 0), {"date": "today"}, torch.device("cpu"))
ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


# -- attention -------------------------------------------------------------------------------------


def price(cut: Cut, case: Case) -> float:
    """Makes 128 keys, 8 warps and 3 stages the best tiles, and parts of 512 the best split."""
    tiles, split = cut
    wrong = (tiles.keys != 128) + (tiles.warps != 8) + (tiles.stages != 3) + (tiles.rows == 128)
    return case.flop * (1 + wrong + 0.1 * (split.part != 512))


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A race that needs no GPU: seconds are its `price` of a candidate."""
    how: dict[str, Any] = {"price": price}

    def run(cuts: Sequence[Cut], case: Case, *rest: Any) -> Mapping[Cut, float]:
        return {cut: how["price"](cut, case) for cut in cuts} if how["price"] else {}

    monkeypatch.setattr(tune, "race", run)
    monkeypatch.setattr(
        tune, "screened", lambda cuts, *_: [one for one in cuts if one.tiles.keys != 32]
    )
    return how


def test_the_fastest_that_fits_is_chosen(race: dict[str, Any]) -> None:
    prefill, decode = (tuned_attention(BASE, one, "auto", GPU, 1) for one in KERNELS)
    assert (prefill.tiles, prefill.split) == (Tiles(64, 128, 8, 3), Split())
    assert (decode.tiles, decode.split) == (Tiles(16, 128, 8, 3), Split(512, 128))
    assert decode.heads == Heads(8, 4, 128, 2) and decode.measured["date"] == "today"
    # One of three steps of the tiles' price, where the default has 64 keys, 4 warps, 5 stages.
    assert decode.measured["of_default_seconds"] == pytest.approx(1 / 4.1, abs=1e-4)
    race["price"] = lambda cut, case: 1.0
    decode = tuned_attention(BASE, "decode", "fp8_e4m3", GPU, 1)
    assert decode.heads == Heads(8, 4, 128, 2, "fp8_e4m3")
    assert decode.measured["of_default_seconds"] == 1.0 and decode.split == Split(1024, 128)
    race["price"] = None
    with pytest.raises(
        PagedsimError, match=r"^prefill 1 × 512.*: wrong already with the default, "
    ):
        tuned_attention(BASE, "prefill", "auto", GPU, 1)


def test_the_command_adds_to_its_table(
    race: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "this_gpu", lambda words: GPU)
    path = tmp_path / "table.json"
    for words in (["--models", BASE, "llama-2-7b"], ["--models", BASE, "--kernels", "decode"]):
        tune.main([*words, "--table", str(path)])
    entries = [(one.kernel, one.heads.kv_heads) for one in tuning.read(path)]
    assert sorted(entries) == [("decode", 8), ("decode", 32), ("prefill", 8), ("prefill", 32)]


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
    assert [row[1] for row in rows] == ["prefill"] * 3 + ["decode"] * 3
    for row in rows:
        *_, instructions, products, in_flight, registers, spilled, shared = row
        assert 0 < int(products) < int(instructions)
        assert int(registers) <= 255 and spilled == "0" and float(shared.rstrip(" |")) <= 227
        # A prefill's deeper pipeline leaves little room for anything else: it has to win a race.
        assert float(in_flight) >= (0 if row[1] == "prefill" else 1), row


@needs_triton
@pytest.mark.parametrize(("temperature", "launches"), [(0.0, 1), (1.0, 2)])
def test_launches_of_a_sample(temperature: float, launches: int) -> None:
    from tests.engine.launches import FAKE, FakeGPU

    sampler = Sampler()
    params = SamplingParams(temperature=temperature)
    rows = Rows.of(Row(params, stream_key(at), 9, [1, 2], [3]) for at in range(16))
    with FakeGPU() as gpu:
        logits = torch.empty(16, 50257, device=FAKE)
        sampler.draw(logits, rows)  # sends the settings of new rows
        gpu.launches.clear()
        sampler.draw(logits, rows)
    assert len(gpu.launches) == launches


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
