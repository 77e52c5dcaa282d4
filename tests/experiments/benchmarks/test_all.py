"""One command for all that a GPU has to tell: what fails leaves the others, and it can go on."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import gpu  # noqa: E402
from experiments.benchmarks.gpu import AHEAD, CUT, DONE, FAILED, Part, parts, run  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from pagedsim.kernels.tiles import Tiles  # noqa: E402
from pagedsim.kernels.tuning import Entry, Heads  # noqa: E402

TOLD = {"device": "Pretend", "driver": "1", "torch": "2", "date": "today"}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where parts find their modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in {
        "fine": "print('fine')",
        "broken": "raise SystemExit('this is why')",
        "endless": "import time\nprint('begun', flush=True)\ntime.sleep(60)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def states(place: Path) -> dict[str, str]:
    kept = json.loads((place / "gpu.json").read_text())
    return {name: one["state"] for name, one in kept["parts"].items()}


def test_what_fails_leaves_the_others(modules: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    run([Part("a", ("broken",)), Part("b", ("fine",))], place, dict(TOLD), 60)
    kept = json.loads((place / "gpu.json").read_text())
    assert states(place) == {"a": FAILED, "b": DONE}
    assert kept["parts"]["a"]["said"] == ["this is why"]
    assert kept["parts"]["b"]["command"] == "python -m fine" and "said" not in kept["parts"]["b"]
    assert {name: kept[name] for name in TOLD} == TOLD


def test_the_same_command_goes_on(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, wanted = tmp_path / "out", [Part("a", ("fine",)), Part("b", ("broken",))]
    run(wanted, place, dict(TOLD), 60)
    wanted.append(Part("c", ("fine", "--new")))
    (modules / "broken.py").write_text("print('mended')")
    capsys.readouterr()
    run(wanted, place, dict(TOLD), 60)
    assert states(place) == {"a": DONE, "b": DONE, "c": DONE}
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["a: done already", "c: python -m fine --new", "fine",
                    "b: python -m broken", "mended"]  # fmt: skip
    run([Part("a", ("fine", "--other"))], place, dict(TOLD), 60)
    assert "done already" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_that_does_not_end_takes_half(modules: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    run([Part("a", ("endless",)), Part("b", ("fine",))], place, dict(TOLD), 12.0)
    assert states(place) == {"a": CUT, "b": DONE}
    kept = json.loads((place / "gpu.json").read_text())["parts"]
    assert kept["a"]["said"] == ["begun"] and 6 <= kept["a"]["seconds"] < 12


def test_when_the_time_is_over_nothing_begins(modules: Path, tmp_path: Path) -> None:
    run([Part("a", ("fine",))], tmp_path, dict(TOLD), gpu.LEAST / 2)
    kept = json.loads((tmp_path / "gpu.json").read_text())["parts"]["a"]
    assert (kept["state"], kept["seconds"]) == (AHEAD, 0)


def test_results_of_another_gpu_are_left_alone(modules: Path, tmp_path: Path) -> None:
    run([Part("a", ("fine",))], tmp_path, dict(TOLD), 60)
    with pytest.raises(SystemExit, match=r"^--out [^\n]*: is of Pretend, and this is Another"):
        run([Part("a", ("fine",))], tmp_path, {**TOLD, "device": "Another"}, 60)


def test_tiles_that_were_tuned_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, new = (
        Entry("Pretend", (9, 0), kernel, Heads(8, 4, 128, 2), Tiles(16, 64, 4, 3))
        for kernel in ("decode", "prefill")
    )
    tuning.write([there], tmp_path / "there.json")
    tuning.write([new], tmp_path / "tuned.json")
    monkeypatch.setattr(tuning, "read", lambda path=tmp_path / "there.json": entries(path))
    monkeypatch.setattr(
        tuning, "write", lambda all_of, path=tmp_path / "there.json": write(all_of, path)
    )
    gpu.take_over(tmp_path / "nothing.json")
    assert entries(tmp_path / "there.json") == [there]
    gpu.take_over(tmp_path / "tuned.json")
    assert entries(tmp_path / "there.json") == [there, new]


entries, write = tuning.read, tuning.write


def test_every_part_takes_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is one that its module understands; on a GPU, and quick."""
    for device, quick in (("cuda", False), ("cuda", True), ("cpu", True)):
        found = parts(device, quick, Path("somewhere"))
        names = [part.name for part in found]
        assert len(set(names)) == len(names)
        assert [name for name in names if "tune" not in name] == [
            *("tests", "kernels", "swap", "swap, 8 bits", "step", "engine", "host")
        ]
        assert ("tune" in names) == (not quick)
        for part in found[1:]:
            understands(part, monkeypatch)


class Understood(Exception):
    """The words were parsed."""


def understands(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = ArgumentParser.parse_args

    def parsed(self: ArgumentParser, words: Sequence[str]) -> None:
        parse(self, words)
        raise Understood

    module: Any = __import__(part.words[0], fromlist=["main"])
    with monkeypatch.context() as patch, pytest.raises(Understood):
        patch.setattr(ArgumentParser, "parse_args", parsed)
        module.main(part.words[1:])


def test_gpu_tests_are_found() -> None:
    found = gpu.tests()
    assert "tests/kernels/test_gpu.py" in found and "tests/engine/test_gpu.py" in found
    assert "tests/run/test_runner.py" not in found
    assert all((ROOT / path).exists() for path in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--out: what is quick is written nowhere by itself; give a folder"),
        (["--device", "cpu", "--out", "x", "--minutes", "0"], "--minutes 0: must be above 0"),
        (["--out", "x"], "no CUDA device here, and this measures one; "),
    ],
)
def test_bad_words_get_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        gpu.main(words)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_whole_way(tmp_path: Path) -> None:
    """All parts that need no GPU, at tiny sizes."""
    gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--minutes", "10"])
    assert set(states(tmp_path).values()) == {DONE}
    for name in ("kernels", "swap", "swap-fp8_e4m3", "step", "engine", "host"):
        assert (tmp_path / f"{name}.json").exists()
