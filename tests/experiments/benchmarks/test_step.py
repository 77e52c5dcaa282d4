"""The benchmark of a step goes its whole way at a tiny size, and times nothing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import arms as ways  # noqa: E402
from experiments.benchmarks import decoding, step  # noqa: E402
from experiments.benchmarks.arms import Arm, arms  # noqa: E402
from experiments.benchmarks.decoding import Bench  # noqa: E402
from experiments.benchmarks.judge import Judge, same_draws  # noqa: E402
from experiments.benchmarks.shapes import BASE, shape_of  # noqa: E402
from pagedsim.engine import graphs, inputs, runner  # noqa: E402
from pagedsim.engine.models import load_model  # noqa: E402
from pagedsim.engine.models.native.rotation import Rotation  # noqa: E402
from pagedsim.engine.sampler import Row  # noqa: E402

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
    assert len(result["arms"]) == 18
    for one in result["arms"]:
        assert one["to_limit"] == pytest.approx(one["seconds"] / one["limit_seconds"])
        assert ("forward_to_limit" in one) == (not one["ahead"] and not one["sampled"])
        assert 0 < one.get("nucleus", 1) <= 512
        assert ("sample_seconds" in one) == (not one["ahead"] and one["sampled"])
        assert sum(one["host"].values()) > 0
    sizes = {(one["cache"], one["kv_bytes"]) for one in result["arms"] if not one["sampled"]}
    (full, whole), (eight, half) = sorted(sizes)
    assert (full, eight) == ("auto", "fp8_e4m3") and whole == 2 * half
    # 3 requests of 60 tokens, in 2 layers of 2 heads of 16, keys and values, bf16.
    assert whole == pytest.approx(3 * 60 * 2 * 2 * 16 * 2 * 2, rel=0.05)
    assert capsys.readouterr().out.count("\n| ") == 2 + 18


def test_the_first_arms_are_those_with_bars() -> None:
    first, second, *others = arms(graphs=True)
    assert first == Arm("auto", "native", graphs=True)
    assert second == first._replace(ahead=True)
    assert first._replace(cache="fp8_e4m3") in others
    assert not any(arm.graphs for arm in arms(graphs=False))


@pytest.mark.slow
@pytest.mark.usefixtures("with_graphs")
def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, if it was measured the same way; what is compared is measured together."""
    before = kept(tmp_path, "--resume", "--headlines")
    assert [one["arm"] for one in before["arms"]] == [
        str(arm) for arm in arms(graphs=True) if arm.model_impl == "native" and arm.graphs
    ]
    del before["arms"][1]  # with async_scheduling, so that its tokens are needed again
    (tmp_path / "step.json").write_text(json.dumps(before))
    monkeypatch.setattr(step, "arms", lambda graphs: [*arms(graphs)][:6])
    after = kept(tmp_path, "--resume")
    lines = {one["arm"]: one for one in after["arms"]}
    assert set(lines) == {str(arm) for arm in [*arms(graphs=True)][:6]} | {
        one["arm"] for one in before["arms"]
    }
    assert [one for one in before["arms"] if lines[one["arm"]] == one] == before["arms"][1:]
    with monkeypatch.context() as patch:
        patch.setattr(step, "Bench", None)  # where nothing is left no model is loaded
        assert kept(tmp_path, "--resume")["arms"] == after["arms"]
    (tmp_path / "step.json").write_text(json.dumps({**after, "code": "other"}))
    assert not [one for one in kept(tmp_path, "--resume")["arms"] if one == lines[one["arm"]]]


@pytest.mark.usefixtures("with_graphs")
def test_other_draws_than_a_cpu_makes_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoding, "same_draws", lambda logits, rows: False)
    drawing = [arm for arm in arms(graphs=True) if arm.sampled and not arm.ahead]
    monkeypatch.setattr(step, "arms", lambda graphs: drawing)
    with pytest.raises(SystemExit, match=r"^not timed: native, graphs, sampled$"):
        kept(tmp_path)
    assert "sampled: draws other tokens than a CPU, not timed" in capsys.readouterr().err
    (found,) = json.loads((tmp_path / "step.json").read_text())["arms"]
    assert "seconds" not in found and "sample_seconds" not in found


def test_the_judge_sees_one_wrong_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    rows = [Row(ways.DRAWN, key, 7, [], []) for key in range(4)]
    assert same_draws(logits, rows)

    class Elsewhere(torch.Tensor):  # type: ignore[misc, name-defined]
        """Logits whose copy on the CPU differs in one row."""

        def cpu(self) -> Any:
            other = self.as_subclass(torch.Tensor).clone()
            other[2, 5] += 100
            return other

    assert not same_draws(logits.as_subclass(Elsewhere), rows)


def test_weights_are_counted_without_the_embeddings() -> None:
    shape = shape_of(BASE)
    assert (shape.layers, shape.kv_heads, shape.vocab) == (32, 8, 128256)
    result = Bench(ways.TINY, CPU, 1, True)
    little = ways.TINY.shape
    wanted = 2 * little.hidden * (little.vocab + 1)  # the head and the last norm
    one = 2 * little.hidden**2 + 2 * little.hidden * 32 + 3 * little.hidden * little.intermediate
    wanted += 2 * little.layers * (one + 2 * little.hidden)
    engine = result.engine(Arm("auto", "native", graphs=False))
    assert result._bytes(engine, 0)["weight_bytes"] == wanted


@pytest.mark.usefixtures("with_graphs")
def test_wrong_logits_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own pass, once the model is loaded, forgets to rotate by the right angles."""
    load = load_model

    def loaded(*given: Any, **settings: Any) -> Any:
        model = load(*given, **settings)
        right = Rotation.of
        monkeypatch.setattr(Rotation, "of", lambda self, positions: right(self, positions // 2))
        return model

    monkeypatch.setattr(decoding, "load_model", loaded)
    some = [
        Arm("auto", impl, True, ahead) for impl in ways.IMPLEMENTATIONS for ahead in (False, True)
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
    for cache in ways.CACHES:
        judge.verdict(tokens, cache, torch.zeros(model.vocab_size))
        exact, usual = judge._known[cache, tuple(tokens)]
        assert judge.verdict(tokens, cache, exact).error == 0
        assert 0 < usual < 0.05
        other = judge.verdict([*tokens[:20], 9, *tokens[21:]], cache, exact)
        assert not other.right
        assert not judge.verdict(tokens, cache, exact * torch.nan).right
    full, eight = (judge._known[cache, tuple(tokens)][0] for cache in ways.CACHES)
    assert not torch.equal(full, eight)
