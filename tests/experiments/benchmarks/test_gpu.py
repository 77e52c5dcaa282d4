"""The benchmarks of a device on a real GPU, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from experiments.benchmarks import (  # noqa: E402
    engine,
    host,
    kernels,
    profile,
    step,
    swap,
    tune,
)
from experiments.benchmarks.shapes import BASE, Case  # noqa: E402
from pagedsim.engine.models import load_model  # noqa: E402
from pagedsim.kernels.tiles import Split, Tiles, power_of_two  # noqa: E402
from pagedsim.kernels.tuning import Cut  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
QUICK = ["--quick", "--rounds", "2"]


def test_kernels(tmp_path: Path) -> None:
    kernels.main([*QUICK, "--peers", "sdpa", "flex", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["device"] == torch.cuda.get_device_name() and result["driver"]
    for one in result["cases"]:
        assert one["of_limit"] > 0
        assert not [name for name, peer in one["peers"].items() if "failed" in peer], one


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_swap(cache: str, tmp_path: Path) -> None:
    swap.main([*QUICK, "--out", str(tmp_path), "--kv-cache-dtype", cache])
    (written,) = tmp_path.glob("*.json")
    result = json.loads(written.read_text())
    assert all(one["in"]["of_pinned"] > 0 for one in result["swaps"])


def test_step(tmp_path: Path) -> None:
    step.main([*QUICK, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "step.json").read_text())
    assert [one["arm"] for one in result["arms"]] == [str(arm) for arm in step.arms(graphs=True)]
    assert all(one["to_limit"] > 0 for one in result["arms"])


def test_profile(tmp_path: Path) -> None:
    profile.main([*QUICK, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "profile.json").read_text())
    assert result["arm"] == "native, graphs" and result["busy_seconds"] > 0
    assert 4 <= result["launches_a_layer"] <= 40
    assert any("paged" in one["name"] or "decode" in one["name"] for one in result["kernels"])


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine, "loaded", lambda device: load_model("tiny", dtype="bfloat16", device=device)
    )
    few = ["--prompts", "8", "--tokens", "4", "--repeats", "1"]
    engine.main(["--device", "cuda", *few, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "engine.json").read_text())
    assert result["clock"] == "wall" and min(result["rates"].values()) > 0


def test_host(tmp_path: Path) -> None:
    few = ["--running", "3", "--steps", "4", "--rounds", "1"]
    host.main(["--device", "cuda", *few, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "host.json").read_text())
    assert result["capability"] and all(one["seconds"] > 0 for one in result["steps"])


@pytest.mark.parametrize(
    "case",
    [
        Case(BASE, 2, 1, 300),
        Case(BASE, 2, 40, 300),
        Case(BASE, 2, 1, 300, cache="fp8_e4m3"),
    ],
    ids=str,
)
def test_a_race(case: Case) -> None:
    """One of them is too large for this GPU: it keeps three tiles of keys and values in flight."""
    place = torch.device("cuda", torch.cuda.current_device())
    fits, another = Cut(Tiles(16, 32, 4, 2), Split()), Cut(Tiles(64, 32, 4, 3), Split(128, 2))
    limit = triton.runtime.driver.active.utils.get_device_properties(place.index)["max_shared_mem"]
    tile = 2 * case.shape.head_dim * case.held(tune.DTYPE).itemsize
    large = Cut(Tiles(16, power_of_two(limit // (3 * tile) + 1), 8, 7), Split())
    seconds = tune.attention_race([fits, another, large], case, place, rounds=2)
    assert set(seconds) == {fits, another} and min(seconds.values()) > 0
