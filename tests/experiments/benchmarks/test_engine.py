"""The benchmark against transformers' generate_batch goes its whole way, and compares tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import engine  # noqa: E402
from experiments.benchmarks.engine import Load, Peer, agreement, load_of  # noqa: E402

FEW = ["--prompts", "5", "--tokens", "6", "--repeats", "1"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.main([*FEW, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "engine.json").read_text())
    assert result["right"] and set(result["alike"].values()) == {1.0}
    assert list(result["rates"]) == sorted([*engine.OURS, engine.PEER])
    assert min(result["rates"].values()) > 0
    assert (result["prompts"], result["tokens"], result["clock"]) == (5, 6, "processor")
    out = capsys.readouterr().out
    assert f"| {engine.PEER} | " in out
    assert result["attention"] == "sdpa" and engine.WEAK in out, "there is no FlashAttention here"


@pytest.mark.parametrize("named", ["sdpa", "paged|sdpa"])
def test_attention_is_named_alike_by_all_versions(named: str) -> None:
    peer = object.__new__(Peer)
    peer._config = SimpleNamespace(_attn_implementation=named)
    assert peer.attention == "sdpa"


def test_other_tokens_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Peer.answers

    def wrong(self: Peer, load: Load) -> list[list[int]]:
        *found, last = answers(self, load)
        return [*found, [*last[:-1], last[-1] + 1]]

    monkeypatch.setattr(Peer, "answers", wrong)
    with pytest.raises(SystemExit, match="not give the same tokens"):
        engine.main([*FEW, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "engine.json").read_text())
    assert not result["right"] and "rates" not in result
    assert "| pagedsim | 80% |" in capsys.readouterr().out


def test_half_precision_is_held_to_first_tokens() -> None:
    wanted = [[1, 2], [3, 4], [5, 6], [7, 8]]
    found = [[1, 9], [3, 4], [9, 6], [7, 8]]
    assert agreement(found, wanted, torch.float32) == 0.5
    assert agreement(found, wanted, torch.bfloat16) == 0.75
    assert agreement([one[:1] for one in found], wanted, torch.bfloat16) == 0


def test_blocks_hold_all_at_once() -> None:
    load = load_of(10, range(30, 34), 8, 250)
    assert load.longest <= 41
    assert load.blocks(16) == 30 and load.blocks(256) == 10


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no CUDA device here[^\n]*$"):
        engine.main(["--device", "cuda"])
