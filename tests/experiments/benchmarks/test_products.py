"""The benchmark of a layer's products goes its whole way at tiny sizes, and times nothing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import products  # noqa: E402
from pagedsim.kernels import ops  # noqa: E402

TINY = ["--device", "cpu", "--quick", "--rounds", "1"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    products.main([*TINY, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "products.json").read_text())
    cases = result["cases"]
    assert [(one["weights"], one["tokens"]) for one in cases] == [
        (weights, tokens) for weights in products.WEIGHTS for tokens in products.TOKENS
    ]
    for one in cases:
        assert one["error"] <= one["error_allowed"] and one["seconds"] > 0
        assert one["of_limit"] == pytest.approx(one["limit_seconds"] / one["seconds"])
    assert cases[0]["bytes"] == 4 * cases[-1]["bytes"]  # float32, and 8 bits
    assert capsys.readouterr().out.count("\n| ") == 2 + len(cases)  # a head, a rule


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TINY, "--out", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(products, "WEIGHTS", {"auto": None})
        products.main(words)
    first = json.loads((tmp_path / "products.json").read_text())["cases"]
    products.main([*words, "--resume"])
    every = json.loads((tmp_path / "products.json").read_text())["cases"]
    assert every[: len(first)] == first and len(every) == 3 * len(first)


def test_both_ways_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    class Recorder:
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            recorded.append(work)
            return work

    monkeypatch.setattr(products, "WEIGHTS", {"auto": None})
    monkeypatch.setattr(products, "TOKENS", (4,))
    monkeypatch.setattr(products, "recorder_of", lambda device: Recorder())
    products.main(TINY)
    assert len(recorded) == 2


def test_what_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ops.product

    def without_a_norm(*args: object, **settings: object) -> object:
        return right(*args, **{**settings, "norm": None})  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "product", without_a_norm)
    with pytest.raises(SystemExit, match=r"^wrong: auto, 1; auto, 8; "):
        products.main(TINY)
    assert "| auto |" not in capsys.readouterr().out


def test_torch_computes_the_same() -> None:
    layer = products.Layer(products.TINY, 8, "auto", torch.float32, torch.device("cpu"))
    exact = layer.exact()
    layer.unpack()
    theirs = layer.theirs() + layer.residual  # which the next norm would add
    torch.testing.assert_close(theirs.double(), exact, rtol=1e-4, atol=1e-4)
