"""All measurements of a GPU in slices: parts that fail, stop or are killed, and other machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedsim.experiments.benchmarks import gpu  # noqa: E402
from pagedsim.experiments.benchmarks.gpu import (  # noqa: E402
    BEGUN,
    CUT,
    DONE,
    FAILED,
    FOLDER,
    FRONT_DOOR,
    Ledger,
    Part,
    parts,
)
from pagedsim.experiments.benchmarks.harness import NAME  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from tests.run.studies import compose  # noqa: E402

TOLD = {"device": "Pretend", "driver": "1", "torch": "2", "date": "today"}
ROOT = Path(__file__).parents[3]
PARTS = [
    *("headlines", "calibrate", "validate", "launch", "step"),
    *("tiles, decode, 8 bits", "tiles, decode", "tiles, prefill", "tiles, prefill, 8 bits"),
    *("profile", "host", "swap", *gpu.TESTS, "kernels"),
    *("headlines, flashinfer", "headlines, fa", "engine"),
]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that parts run."""
    place = tmp_path / "modules"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(place))
    for name, text in {
        "fine": "print('fine')",
        "broken": "raise SystemExit('this is why')",
        "endless": "import time\nprint('begun', flush=True)\ntime.sleep(60)",
        "writes": "import sys\nopen(sys.argv[1] + '/written.json', 'w').write('{}')",
    }.items():
        (place / f"{name}.py").write_text(text)
    return place


def slice_of(wanted: Sequence[Part], place: Path, seconds: float = 60) -> Ledger:
    ledger = Ledger(place, TOLD)
    gpu.run(wanted, ledger, seconds)
    return ledger


def states(place: Path) -> dict[str, str]:
    kept = json.loads((place / "gpu.json").read_text())
    return {name: one["state"] for name, one in kept["parts"].items()}


# -- slices ----------------------------------------------------------------------------------------


def test_a_failed_part_leaves_the_others_and_is_tried_again(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [Part("a", ("fine",)), Part("b", ("broken",))]
    slice_of(wanted, tmp_path)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert states(tmp_path) == {"a": DONE, "b": FAILED}
    assert kept["parts"]["b"]["said"] == ["this is why"]
    assert kept["parts"]["a"]["command"] == "python -m fine" and "said" not in kept["parts"]["a"]
    assert {name: kept[name] for name in TOLD} == TOLD
    capsys.readouterr()
    wanted.append(Part("c", ("fine", "--new")))
    (modules / "broken.py").write_text("print('mended')")
    slice_of(wanted, tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["c: python -m fine --new", "fine", "b: python -m broken", "mended"]
    slice_of([Part("a", ("fine", "--other"))], tmp_path)
    assert "a: python -m fine --other" in capsys.readouterr().out


def test_the_exit_code_says_what_is_left(
    modules: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def code(*wanted: Part) -> object:
        monkeypatch.setattr(gpu, "parts", lambda device: list(wanted))
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0.5"])
        return ended.value.code

    fine, broken, late = (
        Part("a", ("fine",)),
        Part("b", ("broken",)),
        Part("c", ("fine",), least=60),
    )
    assert [code(fine), code(fine, broken), code(fine, broken, late)] == [0, 1, gpu.GOES_ON]
    printed = capsys.readouterr().out
    assert "| a | done | " in printed and "| c | not begun |  |" in printed


def test_another_machine_goes_on_from_the_folder(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another name."""
    wanted = [Part("a", ("writes", "{out}")), Part("b", ("fine",), least=1e6)]
    slice_of(wanted, tmp_path / "here")
    assert states(tmp_path / "here") == {"a": DONE}
    capsys.readouterr()
    there = (tmp_path / "here").rename(tmp_path / "there")
    assert (there / "written.json").read_text() == "{}"
    wanted[1] = wanted[1]._replace(least=0.0)
    slice_of(wanted, there)
    assert capsys.readouterr().out.startswith("b: python -m fine")
    with pytest.raises(SystemExit, match=r"^--out [^\n]*: is of Pretend, and this is Another"):
        Ledger(there, {**TOLD, "device": "Another"})


def test_a_part_that_does_not_end_is_stopped(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that reaches its limit leaves time to the others and comes last in the next slice."""
    wanted = [Part("a", ("endless",), most=0.4, least=0), Part("b", ("fine",), least=0)]
    ledger = slice_of(wanted, tmp_path)
    assert states(tmp_path) == {"a": CUT, "b": DONE}
    assert 0.4 <= ledger.parts["a"]["seconds"] < 5 and ledger.parts["a"]["said"] == ["begun"]
    capsys.readouterr()
    slice_of([*wanted, Part("c", ("fine", "--c"), least=0)], tmp_path, seconds=0.6)
    assert capsys.readouterr().out.split("\n")[0] == "c: python -m fine --c"


KILLED = """
import sys
from pathlib import Path
from pagedsim.experiments.benchmarks import gpu
from pagedsim.experiments.benchmarks.gpu import Ledger
from pagedsim.experiments.benchmarks.gpu import Part
place = Path(sys.argv[1])
gpu.signal.signal(gpu.signal.SIGTERM, gpu.signal.default_int_handler)
wanted = [Part("a", ("fine",)), Part("b", ("leaves", "{out}")), Part("c", ("fine", "--c"))]
gpu.run(wanted, Ledger(place, {"device": "Pretend"}), 60)
"""
LEAVES = """
import os, sys, time
open(sys.argv[1] + "/pid.txt", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_killed_run_loses_the_part_under_way(
    number: signal.Signals, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "leaves.py").write_text(LEAVES)
    place = tmp_path / "out"
    words = [sys.executable, "-c", KILLED, str(place)]
    path = os.pathsep.join([str(modules), str(ROOT)])
    with subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE
    ) as run:
        pid = int(waited_for(lambda: (place / "pid.txt").exists(), place / "pid.txt"))
        run.send_signal(number)
        run.communicate()
    assert run.returncode != 0
    status = Path(f"/proc/{pid}/status")  # the part under way has ended, too
    waited_for(lambda: not status.exists() or "\nState:\tZ" in status.read_text())
    assert states(place) == {"a": DONE, "b": BEGUN}
    (modules / "leaves.py").write_text("print('mended')")
    wanted = [Part("a", ("fine",)), Part("b", ("leaves", "{out}")), Part("c", ("fine", "--c"))]
    slice_of(wanted, place)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["b: python -m leaves FOLDER", "mended", "c: python -m fine --c", "fine"]


def waited_for(known: Callable[[], bool], path: Path | None = None) -> str:
    """Wait until it is so; the text of a file that is then written."""
    for _ in range(600):
        if known() and (path is None or path.read_text()):
            return "" if path is None else path.read_text()
        time.sleep(0.1)
    raise AssertionError("it is not so within a minute")


def test_tuned_tiles_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they were written when a part was stopped."""
    entries = tuning.read()
    monkeypatch.setattr(tuning, "PATH", tmp_path / "kernels" / "tuned.json")
    tuning.PATH.parent.mkdir()
    read, write = tuning.read, tuning.write
    monkeypatch.setattr(tuning, "read", lambda path=tuning.PATH: read(path))
    monkeypatch.setattr(tuning, "write", lambda lines, path=tuning.PATH: write(lines, path))
    tuning.write(entries[:1])
    for text in ("[", "[{}]"):
        (tmp_path / "tuned.json").write_text(text)
        gpu.main(["--merge", str(tmp_path)])
        assert tuning.read() == entries[:1]
    tuning.write(entries, tmp_path / "tuned.json")
    gpu.main(["--merge", str(tmp_path)])
    assert tuning.read() == entries and len(entries) > 1


# -- the parts -------------------------------------------------------------------------------------


class Understood(Exception):
    """The words were parsed."""


def test_every_part_takes_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is accepted by its module, on a GPU and at tiny sizes."""
    parse = ArgumentParser.parse_args

    def parsed(self: ArgumentParser, words: Sequence[str]) -> None:
        parse(self, words)
        raise Understood

    whole = [part.name for part in parts("cuda")]
    assert whole == PARTS
    for device in ("cuda", "cpu"):
        found = parts(device)
        names = [part.name for part in found]
        assert names == [name for name in whole if device == "cuda" or "tiles" not in name]
        for part in found:
            if part.words[0] == FRONT_DOOR:
                composes(part, device)
            elif part.words[0] != "pytest":
                module: Any = __import__(part.words[0], fromlist=["main"])
                with monkeypatch.context() as patch, pytest.raises(Understood):
                    patch.setattr(ArgumentParser, "parse_args", parsed)
                    module.main(part.words[1:])


@pytest.mark.slow
def test_every_file_with_tests_for_a_gpu_is_a_part() -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "gpu", "tests/kernels"]
    ended = subprocess.run([*words, "tests/engine"], cwd=ROOT, capture_output=True, text=True)
    files = {
        line.partition(":")[0] for line in ended.stdout.splitlines() if line.startswith("test")
    }
    assert files == {*gpu.TESTS}


def composes(part: Part, device: str) -> None:
    own = [word for word in part.words[1:] if not word.startswith("hydra.")]
    assert part.words[-1] == f"hydra.run.dir={FOLDER}/{part.name}" and len(own) > 5
    config = compose("config", overrides=own)
    assert config.backend.device == device
    assert config.backend.cache_tokens in (256, 1024, 2048, 16384)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--out: a CPU's results are written nowhere by themselves; "),
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


# -- with only the packages of a GPU's machine -----------------------------------------------------

ABSENT = ("simpy", "hydra", "omegaconf", "wandb", "pandas", "matplotlib", "pyarrow")
SITECUSTOMIZE = f"""
import sys

ABSENT = {ABSENT!r}


class Bare:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.startswith(ABSENT) else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context):
        for found in self.finder.find_distributions(*context):
            if not found.metadata["Name"].lower().replace("_", "-").startswith(ABSENT):
                yield found


sys.meta_path[:] = [
    Bare(finder) if hasattr(finder, "find_distributions") else finder for finder in sys.meta_path
]
"""


@pytest.mark.slow
def test_every_module_of_a_part_imports(tmp_path: Path) -> None:
    every = {part.words[0] for part in (*parts("cuda"), *parts("cpu"))} - {"pytest"}
    names = sorted({*every, f"{NAME}.gpu", f"{NAME}.table"} - {FRONT_DOOR})
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    listed = "import importlib.util as u\n" + "\n".join(f"import {name}" for name in names)
    listed += f"\nprint([name for name in {ABSENT} if u.find_spec(name)])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", listed]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
