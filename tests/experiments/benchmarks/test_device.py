"""Benchmarks of a device: wrong outputs are not timed, and what results are valid for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedsim.engine import graphs, runner  # noqa: E402
from pagedsim.engine.cache import LAYOUTS, copy_runs  # noqa: E402
from pagedsim.engine.models import load_model  # noqa: E402
from pagedsim.engine.models.native.decoder import Rotation  # noqa: E402
from pagedsim.experiments.benchmarks import (  # noqa: E402
    device,
    engine,
    harness,
    host,
    kernels,
    step,
)
from pagedsim.experiments.benchmarks.shapes import TINY_CASES, Problem  # noqa: E402
from pagedsim.experiments.benchmarks.step import Arm  # noqa: E402

QUICK = ["--device", "cpu", "--rounds", "1"]


def lines(place: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((place / f"{name}.json").read_text())["cases"]
    return found


# -- attention -------------------------------------------------------------------------------------


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = map(str, TINY_CASES)
    words = [*QUICK, "--out", str(tmp_path)]
    right = Problem.attend

    def fails(problem: Problem) -> Any:
        if str(problem.case) == first:
            raise RuntimeError("out of resource\nand more")
        return right(problem) * (1 + 1e-3 * (problem.case.kind == "chunk"))

    monkeypatch.setattr(Problem, "attend", fails)
    with pytest.raises(SystemExit, match=rf"^not timed: {re.escape(first)}; "):
        kernels.main(words)
    failed = lines(tmp_path, "kernels")[0]
    assert (failed["case"], failed["failed"]) == (first, "RuntimeError: out of resource")
    cases = {one["case"]: one for one in lines(tmp_path, "kernels")}
    assert cases.keys() == {first, *others} and "seconds" not in cases[first]
    assert all(("seconds" in cases[one]) == ("chunk" not in one) for one in others)
    monkeypatch.setattr(Problem, "attend", right)
    kernels.main(words)
    assert all("seconds" in one for one in lines(tmp_path, "kernels"))
    error = capsys.readouterr().err
    assert f"{first}: RuntimeError: out of resource, not timed" in error
    assert "of the norm, not timed" in error


def test_tiles_are_tuned_of_our_own_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "require", lambda name, device: None)
    with pytest.raises(SystemExit, match=r"^--tune: is for --attention triton alone, not fa$"):
        kernels.main([*QUICK, "--tune", "--attention", "fa"])


# -- swapping --------------------------------------------------------------------------------------


def one_too_far(source: Any, target: Any, pairs: Any) -> None:
    copy_runs(source, target, pairs)
    (origin, place) = pairs[0]
    target[(place + 1) % len(target)] = source[origin]


def test_wrong_swaps_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "block", one_too_far)
    with pytest.raises(
        SystemExit, match=r"^not timed: little, blocks of 8, a copy a block; [^;]*block$"
    ):
        kernels.main(["swap", *QUICK, "--out", str(tmp_path)])
    for one in lines(tmp_path, "swap"):
        assert ("seconds" in one) == (one["layout"] == "layer")


# -- steps -----------------------------------------------------------------------------------------


class Repeats:
    """Repeats recorded work, where no GPU does."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def steps(
    place: Path, monkeypatch: pytest.MonkeyPatch, some: list[Arm], *words: str
) -> list[dict[str, Any]]:
    """The lines of these arms."""
    for module in (graphs, runner, step):
        monkeypatch.setattr(module, "recorder_of", lambda device: Repeats())
    monkeypatch.setattr(step, "arms", lambda graphs: some)
    step.main([*QUICK, "--out", str(place), *words])
    return lines(place, "step")


def test_wrong_logits_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The native forward pass rotates by wrong angles, once the model is loaded."""
    right = Rotation.of

    def loaded(*given: Any, **settings: Any) -> Any:
        model = load_model(*given, **settings)
        monkeypatch.setattr(Rotation, "of", lambda self, positions: right(self, positions // 2))
        return model

    monkeypatch.setattr(step, "load_model", loaded)
    some = [Arm("auto", True), Arm("auto", True, ahead=True)]
    with pytest.raises(SystemExit, match=r"^not timed: native, graphs; native, graphs, async"):
        steps(tmp_path, monkeypatch, some)
    monkeypatch.setattr(Rotation, "of", right)  # until it is loaded again
    with pytest.raises(SystemExit, match=r"^native, graphs: off by .*, not profiled$"):
        step.main(["profile", *QUICK])
    error = capsys.readouterr().err
    assert "native, graphs: off by" in error and "there is nothing to compare" in error


# -- engines ---------------------------------------------------------------------------------------


def test_other_tokens_of_an_engine_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = engine.agreement

    def wrong(answers: engine.Answers, wanted: engine.Answers, exact: bool) -> float:
        *others, last = answers
        return agreement([*others, [*last[:-1], last[-1] + 1]], wanted, exact)

    monkeypatch.setattr(engine, "agreement", wrong)
    few = ["--prompts", "5", "--tokens", "6", "--rounds", "1"]
    with pytest.raises(SystemExit, match=r"^not timed: pagedsim; pagedsim, async_sch"):
        engine.main([*few, "--out", str(tmp_path)])
    for line in lines(tmp_path, "engine"):
        assert line["alike"] == 0.8 and "rate" not in line


def test_wrong_tokens_of_the_host_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = host.Nothing.forward

    def shifted(self: host.Nothing, ids: Any, *rest: Any) -> Any:
        return forward(self, ids, *rest).roll(int(len(rest[-1]) > 1), 1)

    monkeypatch.setattr(host.Nothing, "forward", shifted)
    with pytest.raises(SystemExit, match=r"^not timed: 3; 3, ahead$"):
        host.main(["--running", "1", "3", "--steps", "4", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "| 1, ahead |" in printed and "| 3 |" not in printed


# -- what results are valid for --------------------------------------------------------------------


def test_a_digest_is_of_the_code_and_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(changed: str = "", root: Path = tmp_path / "here") -> str:
        for name in ("kernels/a.py", "pagedsim/core/b/c.py", "pagedsim/report/d.py", "conf/e.yaml"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("changed" * (name == changed))
        monkeypatch.setattr(harness, "ROOT", root)
        return harness.digest.__wrapped__()

    assert digest() == digest(root=tmp_path / "there")
    changes = [digest(name) for name in ("", "kernels/a.py", "pagedsim/core/b/c.py")]
    assert len({*changes}) == 3
    assert digest("pagedsim/report/d.py") == digest("conf/e.yaml") == digest()


def test_lines_of_other_cases_are_kept_if_measured_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*requests: int, rounds: int = 1) -> list[tuple[str, int]]:
        """Cases and seconds in the file afterwards."""
        words = ("--device", "cpu", "--rounds", str(rounds), "--out", str(tmp_path))
        run = device.Run("kernels swap", None, words)
        cases = (host.Batch(number, False) for number in requests)
        run.sweep(cases, lambda case: {"seconds": len(requests)})
        return [(one["case"], one["seconds"]) for one in lines(tmp_path, "swap")]

    assert measured(1) == [("1", 1)]
    assert measured(2, 3) == [("1", 1), ("2", 2), ("3", 2)]
    assert measured(2) == [("1", 1), ("2", 1), ("3", 2)]
    assert measured(5, rounds=2) == [("5", 1)]
    kept = json.loads((tmp_path / "swap.json").read_text())
    assert kept["command"].endswith("benchmarks.kernels swap --device cpu --rounds 2")
    assert {"driver", "torch", "triton", "date", *device.SAME} <= set(kept)
    monkeypatch.setattr(device, "digest", lambda: "others")
    assert measured(6, rounds=2) == [("6", 1)]
