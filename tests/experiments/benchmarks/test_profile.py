"""The profile of a step: what ran, how often in each layer, and nothing of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C._autograd import DeviceType  # noqa: E402

from experiments.benchmarks import decoding, profile  # noqa: E402
from experiments.benchmarks.judge import Verdict  # noqa: E402

TINY = ["--device", "cpu", "--quick", "--rounds", "1"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU operations are in the place of kernels."""
    profile.main([*TINY, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "profile.json").read_text())
    kernels = {one["name"]: one for one in result["kernels"]}
    assert kernels["aten::mm"]["launches"] >= 4 * result["layers"]
    assert kernels["aten::mm"]["a_layer"] >= 4
    assert result["busy_seconds"] == pytest.approx(sum(k["seconds"] for k in kernels.values()))
    assert result["launches_a_layer"] == sum(k["a_layer"] for k in kernels.values())
    times = [one["seconds"] for one in result["kernels"]]
    assert times == sorted(times, reverse=True) and result["seconds"] > 0
    text = (tmp_path / "profile.md").read_text()
    assert "| `aten::mm` | " in text and text in capsys.readouterr().out


def test_what_is_wrong_is_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Verdict(error=0.5, allowed=0.1)
    monkeypatch.setattr(decoding.Bench, "verdict", lambda *given: wrong)
    with pytest.raises(SystemExit, match=r"off by 0\.5 of the norm, not profiled"):
        profile.main([*TINY, "--out", str(tmp_path)])
    assert "kernels" not in json.loads((tmp_path / "profile.json").read_text())


def test_a_profiler_that_sees_nothing_tells_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "by_name", lambda *given: {"Memcpy HtoD": (10, 1e-5)})
    with pytest.raises(SystemExit, match="has seen no kernel of a layer, not profiled"):
        profile.main([*TINY, "--out", str(tmp_path)])
    assert "busy" not in json.loads((tmp_path / "profile.json").read_text())


def event(name: str, micros: float, kind: DeviceType, said: bool = False) -> Any:
    """As torch's profiler tells of one."""
    elapsed = SimpleNamespace(elapsed_us=lambda: micros)
    return SimpleNamespace(name=name, time_range=elapsed, device_type=kind, is_user_annotation=said)


def test_on_a_gpu_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        event("cudaGraphLaunch", 9.0, DeviceType.CPU),
        event("decode", 2.0, DeviceType.CUDA),
        event("decode", 3.0, DeviceType.CUDA),
        event("Memcpy HtoD", 1.0, DeviceType.CUDA),
        event("a range", 50.0, DeviceType.CUDA, said=True),
    ]

    class Found:
        def __init__(self, activities: Any) -> None:
            assert [one.name for one in activities] == ["CUDA"]

        def __enter__(self) -> Any:
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *given: Any) -> None:
            pass

    monkeypatch.setattr(profile, "profile", Found)
    monkeypatch.setattr(profile, "wait", lambda device: None)
    found = profile.by_name(lambda: None, torch.device("cuda"))
    assert {name: launches for name, (launches, _) in found.items()} == {
        "decode": 2,
        "Memcpy HtoD": 1,
    }
    assert found["decode"][1] == pytest.approx(5e-6)
