"""The benchmark of a step goes its whole way at a tiny size, and times nothing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import step  # noqa: E402
from experiments.benchmarks.judge import Judge  # noqa: E402
from experiments.benchmarks.shapes import BASE, shape_of  # noqa: E402
from experiments.benchmarks.step import Arm, Bench, arms  # noqa: E402
from pagedsim.engine import graphs, inputs, runner  # noqa: E402
from pagedsim.engine.models import load_model  # noqa: E402
from pagedsim.engine.models.native import Native  # noqa: E402

TINY = ["--device", "cpu", "--quick", "--rounds", "1"]
CPU = torch.device("cpu")


class Repeats:
    """Does recorded work again, where no GPU does."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (graphs, runner):
        monkeypatch.setattr(module, "recorder_of", lambda device: Repeats())


def kept(place: Path, *words: str) -> dict[str, Any]:
    step.main([*TINY, "--out", str(place), *words])
    found: dict[str, Any] = json.loads((place / "step.json").read_text())
    return found


@pytest.mark.usefixtures("with_graphs")
def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = kept(tmp_path)
    assert {"device", "driver", "cuda", "torch", "date", "command"} <= set(result)
    assert [one["arm"] for one in result["arms"]] == [str(arm) for arm in arms(graphs=True)]
    assert len(result["arms"]) == 16
    for one in result["arms"]:
        assert one["to_limit"] == pytest.approx(one["seconds"] / one["limit_seconds"])
        assert ("forward_to_limit" in one) == (not one["ahead"])
        assert sum(one["host"].values()) > 0
    sizes = {(one["cache"], one["kv_bytes"]) for one in result["arms"]}
    (full, whole), (eight, half) = sorted(sizes)
    assert (full, eight) == ("auto", "fp8_e4m3") and whole == 2 * half
    # 3 requests of 60 tokens, in 2 layers of 2 heads of 16, keys and values, bf16.
    assert whole == pytest.approx(3 * 60 * 2 * 2 * 16 * 2 * 2, rel=0.05)
    assert capsys.readouterr().out.count("\n| ") == 2 + 16


def test_the_first_arms_are_those_with_bars() -> None:
    first, second, *others = arms(graphs=True)
    assert first == Arm("auto", "native", graphs=True)
    assert second == first._replace(ahead=True)
    assert first._replace(cache="fp8_e4m3") in others
    assert not any(arm.graphs for arm in arms(graphs=False))


def test_weights_are_counted_without_the_embeddings() -> None:
    shape = shape_of(BASE)
    assert (shape.layers, shape.kv_heads, shape.vocab) == (32, 8, 128256)
    result = Bench(step.TINY, CPU, 1, True)
    little = step.TINY.shape
    wanted = 2 * little.hidden * (little.vocab + 1)  # the head and the last norm
    one = 2 * little.hidden**2 + 2 * little.hidden * 32 + 3 * little.hidden * little.intermediate
    wanted += 2 * little.layers * (one + 2 * little.hidden)
    engine = result._engine(Arm("auto", "native", graphs=False))
    assert result._bytes(engine, 0)["weight_bytes"] == wanted


@pytest.mark.usefixtures("with_graphs")
def test_wrong_logits_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own pass, once the model is loaded, forgets to rotate by the right angles."""
    load = load_model

    def loaded(*given: Any, **settings: Any) -> Any:
        model = load(*given, **settings)
        rotation = Native._rotation
        monkeypatch.setattr(
            Native, "_rotation", lambda self, like, positions: rotation(self, like, positions // 2)
        )
        return model

    monkeypatch.setattr(step, "load_model", loaded)
    some = [
        Arm("auto", impl, True, ahead) for impl in step.IMPLEMENTATIONS for ahead in (False, True)
    ]
    monkeypatch.setattr(step, "arms", lambda graphs: some)
    with pytest.raises(SystemExit, match=r"^not timed: native, graphs; native, graphs, async"):
        kept(tmp_path)
    for one in json.loads((tmp_path / "step.json").read_text())["arms"]:
        assert ("seconds" in one) == (one["model_impl"] == "transformers")
    said = capsys.readouterr().err
    assert "native, graphs: off by" in said
    assert "native, graphs, async_scheduling: RuntimeError: there is nothing to compare" in said


def test_other_tokens_with_async_scheduling_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = inputs.feed

    def wrong(ids: Any, told: Any, picked: Any) -> None:
        right(ids, told, None if picked is None else picked.flip(0))

    monkeypatch.setattr(inputs, "feed", wrong)
    some = [Arm("fp8_e4m3", "native", False, ahead) for ahead in (False, True)]
    monkeypatch.setattr(step, "arms", lambda graphs: some)
    with pytest.raises(SystemExit, match=r"^not timed: .*async_scheduling"):
        kept(tmp_path)
    arms_of = json.loads((tmp_path / "step.json").read_text())["arms"]
    assert all(("seconds" in one) == (not one["ahead"]) for one in arms_of)
    assert "other tokens" in arms_of[1]["failed"]


def test_the_judge_sees_one_wrong_token() -> None:
    model = load_model("tiny", dtype="bfloat16")
    judge = Judge(model)
    tokens = [3 + 7 * i % 200 for i in range(40)]
    for cache in step.CACHES:
        judge.verdict(tokens, cache, torch.zeros(model.vocab_size))
        exact, usual = judge._known[cache, tuple(tokens)]
        assert judge.verdict(tokens, cache, exact).error == 0
        assert 0 < usual < 0.05
        other = judge.verdict([*tokens[:20], 9, *tokens[21:]], cache, exact)
        assert not other.right
        assert not judge.verdict(tokens, cache, exact * torch.nan).right
    full, eight = (judge._known[cache, tuple(tokens)][0] for cache in step.CACHES)
    assert not torch.equal(full, eight)
