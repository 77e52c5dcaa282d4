"""Benchmarks of a device: wrong outputs are not timed, and what results are valid for."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
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
    products,
    step,
)
from pagedsim.experiments.benchmarks.shapes import Problem, grid  # noqa: E402
from pagedsim.experiments.benchmarks.step import Arm  # noqa: E402
from pagedsim.kernels import ops  # noqa: E402

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--quick", "--rounds", "1"]


def lines(place: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((place / f"{name}.json").read_text())["cases"]
    return found


# -- attention -------------------------------------------------------------------------------------


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is tried again after the others; a GPU that is lost ends the run at once."""
    first, *others = map(str, grid(quick=True))
    words = [*QUICK, "--resume", "--peers", "--out", str(tmp_path)]
    right = Problem.ours

    def fails(problem: Problem) -> Any:
        if str(problem.case) == first:
            raise RuntimeError("out of resource\nand more")
        return right(problem) * (1 + 1e-3 * (problem.case.kind == "chunk"))

    monkeypatch.setattr(Problem, "ours", fails)
    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="used no more"):
        patched.setattr(device, "lost", lambda device: True)
        kernels.main(words)
    failed = {"case": first, "failed": "RuntimeError: out of resource"}
    assert lines(tmp_path, "kernels") == [failed]
    with pytest.raises(SystemExit, match=rf"^not timed: .*{re.escape(first)}$"):
        kernels.main(words)
    cases = lines(tmp_path, "kernels")
    assert [one["case"] for one in cases] == [*others, first]
    assert all(("seconds" in one) == (one["kind"] != "chunk") for one in cases[:-1])
    monkeypatch.setattr(Problem, "ours", right)
    kernels.main(words)
    assert all("seconds" in one for one in lines(tmp_path, "kernels"))
    error = capsys.readouterr().err
    assert f"{first}: RuntimeError: out of resource, not timed" in error
    assert "of the norm, not timed" in error


# -- products, experts and swapping ----------------------------------------------------------------


def test_wrong_products_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    product, latent = ops.product, ops.attend_latent

    def without_norm(*args: Any, **settings: Any) -> Any:
        return product(*args, **{**settings, "norm": None})

    monkeypatch.setattr(ops, "product", without_norm)
    monkeypatch.setattr(products, "WEIGHTS", {"auto": None})
    with pytest.raises(SystemExit, match=r"^not timed: auto, 1; auto, 8; "):
        products.main(QUICK)
    assert "| auto |" not in capsys.readouterr().out
    monkeypatch.setattr(ops, "attend_latent", lambda *some, **more: latent(*some, **more) * 1.1)
    with pytest.raises(SystemExit, match=r"^not timed: latents, 1 × 1 of 64; latents, 2"):
        products.main(["experts", *QUICK])
    assert "experts, mixtral" in capsys.readouterr().out


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
    for module in (graphs, runner):
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
    some = [Arm("auto", impl, True, bool(a)) for impl in step.IMPLEMENTATIONS for a in (0, 1)]
    with pytest.raises(SystemExit, match=r"^not timed: native, graphs; native, graphs, async"):
        steps(tmp_path, monkeypatch, some)
    for one in lines(tmp_path, "step"):
        assert ("seconds" in one) == (one["model_impl"] == "transformers")
    error = capsys.readouterr().err
    assert "native, graphs: off by" in error and "there is nothing to compare" in error


# -- engines ---------------------------------------------------------------------------------------


def test_other_tokens_of_an_engine_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreement = engine.agreement

    def wrong(found: engine.Answers, wanted: engine.Answers, dtype: Any) -> float:
        *others, last = found
        return agreement([*others, [*last[:-1], last[-1] + 1]], wanted, dtype)

    monkeypatch.setattr(engine, "agreement", wrong)
    few = ["--prompts", "5", "--tokens", "6", "--rounds", "1"]
    with pytest.raises(SystemExit, match="not give the same tokens"):
        engine.main([*few, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "engine.json").read_text())
    assert not result["right"] and "rates" not in result
    assert "| pagedsim | 80% |" in capsys.readouterr().out


def test_wrong_tokens_of_the_host_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = host.Nothing.forward

    def shifted(self: host.Nothing, ids: Any, *rest: Any) -> Any:
        return forward(self, ids, *rest).roll(int(len(rest[-1]) > 1), 1)

    monkeypatch.setattr(host.Nothing, "forward", shifted)
    with pytest.raises(SystemExit, match=r"^not timed: 3; 3, ahead$"):
        host.main(["--running", "1", "3", "--steps", "4", "--rounds", "1"])
    assert "| 3 | – | – | – | – | – | – |" in capsys.readouterr().out


# -- what results are valid for --------------------------------------------------------------------

SMALL = {
    "experiments/a.py": "from pagedsim.one import f\n",
    "pagedsim/__init__.py": "",
    "pagedsim/one.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pagedsim.types\n"
        "def f():\n    from pagedsim import two\n    import numpy\n"
        "import pagedsim.three\n"
    ),
    "pagedsim/two.py": "import pagedsim.report.plots\n",
    "pagedsim/three/__init__.py": "",
    "pagedsim/types.py": "",
    "pagedsim/report/plots.py": "",
    "pagedsim/other.py": "",
}


def test_a_digest_is_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(root: Path) -> str:
        monkeypatch.setattr(harness, "ROOT", root)
        harness._imported.cache_clear()
        return harness.digest.__wrapped__("pagedsim.experiments.a")

    here, run = tmp_path / "here", 0
    for name, text in SMALL.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    before = digest(here)
    shutil.copytree(here, tmp_path / "there")
    assert digest(tmp_path / "there") == before
    for name, text in SMALL.items():
        (here / name).write_text(f"{text}\nmore = 1\n")
        changed = digest(here) != before
        assert changed != name.endswith(("types.py", "plots.py", "other.py")), name
        run += changed
        (here / name).write_text(text)
    assert run == 5
    harness._imported.cache_clear()


def test_lines_measured_the_same_way_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(place: Path | None, **settings: Any) -> device.Results:
        asked = Namespace(
            **{"device": CPU, "out": place, "quick": True, "resume": True, "rounds": 3} | settings
        )
        words = ["--out", "/some/where", "--table=/a.json", "--quick", "--archive", "/b.tar.gz"]
        return device.Results("a", "table", words, asked, "x")

    first = results(tmp_path)
    assert first.known == []
    first.sweep({"1": 1}, lambda case: {"seconds": case})
    assert results(tmp_path).known == [{"case": "1", "seconds": 1}]
    assert results(tmp_path, resume=False).known == results(tmp_path, rounds=4).known == []
    assert first.content["command"] == "python -m pagedsim.experiments.benchmarks.table --quick"
    assert {"driver", "torch", "triton", "date", *device.SAME} <= set(first.content)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    monkeypatch.setattr(device, "tiles", lambda name: "others")
    assert results(tmp_path).known == []
