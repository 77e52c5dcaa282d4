"""The benchmark of the host's part goes its whole way, and times no step with wrong tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import host  # noqa: E402

FEW = ["--running", "1", "3", "--steps", "4", "--rounds", "2"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host.main([*FEW, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "host.json").read_text())
    assert result["driver"] is None
    assert result["command"] == f"python -m experiments.benchmarks.host {' '.join(FEW)}"
    assert [(one["requests"], one["async_scheduling"]) for one in result["steps"]] == [
        *((1, False), (1, True), (3, False), (3, True))
    ]
    for one in result["steps"]:
        assert one["right"]
        assert one["seconds"] == pytest.approx(sum(one[part] for part in host.PARTS))
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[1:]] == ["requests", "---", "1", "3"]
    assert not any("–" in row for row in rows)


def test_wrong_tokens_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = host.Nothing.forward

    def shifted(self: host.Nothing, ids: Any, *rest: Any) -> Any:
        return forward(self, ids, *rest).roll(int(len(rest[-1]) > 1), 1)

    monkeypatch.setattr(host.Nothing, "forward", shifted)
    with pytest.raises(SystemExit, match=r"^wrong tokens with so many requests, not timed: 3, 3$"):
        host.main(FEW)
    assert "| 3 | – | – | – | – | – | – |" in capsys.readouterr().out


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no CUDA device here[^\n]*$"):
        host.main(["--device", "cuda"])
