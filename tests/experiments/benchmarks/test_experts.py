"""The benchmark of experts and latents goes its whole way, and times nothing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import experts  # noqa: E402
from experiments.benchmarks.shapes import shape_of  # noqa: E402
from pagedsim.kernels import ops  # noqa: E402

TINY = ["--device", "cpu", "--quick", "--rounds", "1"]
KIND: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--out", str(tmp_path)]
    experts.main(words)
    cases = json.loads((tmp_path / "experts.json").read_text())["cases"]
    assert [one["case"] for one in cases] == list(experts.works(True, KIND))
    for one in cases:
        assert one["error"] <= one["error_allowed"] and one["seconds"] > 0
        assert one["of_limit"] == pytest.approx(one["limit_seconds"] / one["seconds"])
    assert capsys.readouterr().out.count("\n| ") == 2 + len(cases)  # a head, a rule
    experts.main([*words, "--resume"])
    assert json.loads((tmp_path / "experts.json").read_text())["cases"] == cases


def test_what_is_read_and_computed() -> None:
    shape = shape_of("deepseek-v3")
    assert shape.mla is not None
    decode = experts.latent(shape.mla, 4, 2, 1, 64, KIND)
    assert decode.moved == 2 * 64 * 576 * 4
    assert decode.flop == 2 * 2 * 64 * 4 * (512 + 576)
    chunk = experts.latent(shape.mla, 4, 1, 3, 5, KIND)
    assert chunk.flop == 2 * (3 + 4 + 5) * 4 * (512 + 576)
    one = experts.Layer("mixtral-8x7b", True, KIND).work(1)
    assert one.moved == 2 * 3 * 64 * 48 * 4  # of two experts
    assert one.flop == 6 * 2 * 64 * 48


def test_what_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ops.attend_latent
    monkeypatch.setattr(ops, "attend_latent", lambda *args, **kwargs: right(*args, **kwargs) * 1.1)
    with pytest.raises(SystemExit, match=r"^wrong: latents, 1 × 1 of 64; latents, 2"):
        experts.main(TINY)
    assert "experts, mixtral" in capsys.readouterr().out
