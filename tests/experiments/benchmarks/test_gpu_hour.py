"""All measurements of a GPU in slices: parts that fail, stop or are killed, and other machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

torch = pytest.importorskip("torch")

from pagedsim.experiments.benchmarks import gpu  # noqa: E402
from pagedsim.experiments.benchmarks.gpu import (  # noqa: E402
    BEGUN,
    CUT,
    DONE,
    FAILED,
    FOLDER,
    FRONT_DOOR,
    PLUGIN,
    Ledger,
    Part,
    parts,
    unpack,
)
from pagedsim.kernels import tuning  # noqa: E402

TOLD = {"device": "Pretend", "driver": "1", "torch": "2", "date": "today"}
ROOT = Path(__file__).parents[3]
PARTS = [
    *("smoke", "headlines", "calibrate", "validate", "step", "fcfs_vs_priority", "parity"),
    *("tiles, decode, 8 bits", "tiles, decode", "tiles, prefill", "tiles, prefill, 8 bits"),
    *("profile", "host", "swap", "swap, 8 bits", "tests", "tests alone", "tiles, products"),
    *("products", "experts", "kernels", "step, all", "engine", "servers", "peers"),
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


def slice_of(
    wanted: Sequence[Part], place: Path, seconds: float = 60, packed: Path | None = None
) -> Ledger:
    ledger = Ledger(place, TOLD, packed)
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
    ledger = slice_of(wanted, tmp_path)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert states(tmp_path) == {"a": DONE, "b": FAILED}
    assert kept["parts"]["b"]["said"] == ["this is why"]
    assert kept["parts"]["a"]["command"] == "python -m fine" and "said" not in kept["parts"]["a"]
    assert {name: kept[name] for name in TOLD} == TOLD
    assert gpu.verdict(ledger, wanted) == 1
    assert "not done: b (failed); the same command tries again" in capsys.readouterr().err
    wanted.append(Part("c", ("fine", "--new")))
    (modules / "broken.py").write_text("print('mended')")
    ledger = slice_of(wanted, tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["a: done already", "c: python -m fine --new", "fine",
                    "b: python -m broken", "mended"]  # fmt: skip
    assert gpu.verdict(ledger, wanted) == 0
    slice_of([Part("a", ("fine", "--other"))], tmp_path)
    assert "done already" not in capsys.readouterr().out


def test_another_machine_goes_on_from_the_archive(
    modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With other names of folders; its results go to their place with --unpack."""
    wanted = [Part("a", ("writes", "{out}")), Part("b", ("fine",), least=1e6)]
    ledger = slice_of(wanted, tmp_path / "here", packed=tmp_path / "one.tar.gz")
    assert gpu.verdict(ledger, wanted) == gpu.GOES_ON
    assert "1 of 2 parts are done; the same command goes on with: b" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "here")
    there = tmp_path / "there" / "deep"
    unpack(tmp_path / "one.tar.gz", there, "Pretend")
    assert (there / "written.json").read_text() == "{}"
    wanted[1] = wanted[1]._replace(least=0.0)
    ledger = slice_of(wanted, there, packed=tmp_path / "two.tar.gz")
    assert "a: done already\nb: python -m fine" in capsys.readouterr().out
    assert gpu.verdict(ledger, wanted) == 0
    with pytest.raises(SystemExit, match=r"^--out [^\n]*: is of Pretend, and this is Another"):
        Ledger(there, {**TOLD, "device": "Another"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedsim.experiments.benchmarks.device.RESULTS", tmp_path / "results")
        gpu.main(["--unpack", "--archive", str(tmp_path / "two.tar.gz")])
    assert states(tmp_path / "results" / "pretend") == {"a": DONE, "b": DONE}


def test_a_part_that_does_not_end_is_stopped(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that reaches its limit leaves time to the others and goes on in the next slice in its
    place; once it may hang, it comes last."""
    monkeypatch.setattr(gpu, "PATIENCE", 0.6)
    wanted = [Part("a", ("endless",), most=0.4, least=0), Part("b", ("fine",), least=0)]
    ledger = slice_of(wanted, tmp_path)
    assert states(tmp_path) == {"a": BEGUN, "b": DONE}
    assert 0.4 <= ledger.parts["a"]["seconds"] < 5
    ledger = slice_of(wanted, tmp_path)
    assert states(tmp_path) == {"a": CUT, "b": DONE} and ledger.spent(wanted[0]) >= 0.8
    assert [part.name for part in ledger.left([*wanted, Part("c", ("fine",))])] == ["c", "a"]


KILLED = """
import sys
from pathlib import Path
from pagedsim.experiments.benchmarks import gpu
from pagedsim.experiments.benchmarks.gpu import Ledger
from pagedsim.experiments.benchmarks.gpu import Part
place, packed = map(Path, sys.argv[1:])
gpu.signal.signal(gpu.signal.SIGTERM, gpu.signal.default_int_handler)
wanted = [Part("a", ("fine",)), Part("b", ("leaves", "{out}")), Part("c", ("fine", "--c"))]
gpu.run(wanted, Ledger(place, {"device": "Pretend"}, packed), 60)
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
    place, packed = tmp_path / "out", tmp_path / "gpu.tar.gz"
    words = [sys.executable, "-c", KILLED, str(place), str(packed)]
    path = os.pathsep.join([str(modules), str(ROOT)])
    with subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE
    ) as run:
        pid = int(waited_for(lambda: (place / "pid.txt").exists(), place / "pid.txt"))
        run.send_signal(number)
        run.communicate()
    assert run.returncode != 0
    shutil.rmtree(place)
    status = Path(f"/proc/{pid}/status")  # the part under way has ended, too
    waited_for(lambda: not status.exists() or "\nState:\tZ" in status.read_text())
    unpack(packed, place, "Pretend")
    assert states(place) == {"a": DONE, "b": BEGUN}
    (modules / "leaves.py").write_text("print('mended')")
    wanted = [Part("a", ("fine",)), Part("b", ("leaves", "{out}")), Part("c", ("fine", "--c"))]
    slice_of(wanted, place, packed=packed)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["a: done already", "b: python -m leaves FOLDER", "mended",
                    "c: python -m fine --c", "fine"]  # fmt: skip


def waited_for(known: Callable[[], bool], path: Path | None = None) -> str:
    """Wait until it is so; the text of a file that is then written."""
    for _ in range(600):
        if known() and (path is None or path.read_text()):
            return "" if path is None else path.read_text()
        time.sleep(0.1)
    raise AssertionError("it is not so within a minute")


def test_an_archive_is_small_and_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out"
    (place / "validate" / "runs").mkdir(parents=True)
    study = ("validate/result.json", "validate/config.yaml", "validate/runs/run.json")
    for name in ("gpu.json", "a.png", "c.md", "trace.gz", ".d.json", *study):
        (place / name).write_text('{"device": "Pretend"}')
    (place / "large.json").write_bytes(bytes(gpu.LARGEST + 1))
    (place / "random.json").write_bytes(os.urandom(10**5))
    monkeypatch.setattr(gpu, "MOST", 50_000)
    gpu.pack(place, tmp_path / "a.tar.gz")
    assert (tmp_path / "a.tar.gz").stat().st_size < 50_000
    unpack(tmp_path / "a.tar.gz", tmp_path / "new", "Pretend")
    new = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path / "new").as_posix() for path in new}
    assert names == {"gpu.json", "a.png", "c.md", "validate/result.json"}
    with pytest.raises(SystemExit, match=r"^--archive [^\n]*: is of Pretend, and this is Another"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "new", "Another")
    for content in (b"", b"no archive"):
        (tmp_path / "a.tar.gz").write_bytes(content)
        with pytest.raises(SystemExit, match=r"^--archive [^\n]*: is none that this [^\n]*$"):
            unpack(tmp_path / "a.tar.gz", tmp_path / "new")


# -- the archive, and tuned tiles ------------------------------------------------------------------


entries, write = tuning.read, tuning.write


# -- the parts -------------------------------------------------------------------------------------


class Understood(Exception):
    """The words were parsed."""


def test_every_part_takes_its_words(monkeypatch: pytest.MonkeyPatch, hydra: None) -> None:
    """Each command is accepted by its module, on a GPU and at tiny sizes."""
    parse = ArgumentParser.parse_args

    def parsed(self: ArgumentParser, words: Sequence[str]) -> None:
        parse(self, words)
        raise Understood

    whole = [part.name for part in parts("cuda", False)]
    assert whole == PARTS
    for device, quick in (("cuda", False), ("cuda", True), ("cpu", True)):
        found = parts(device, quick)
        names = [part.name for part in found]
        assert names == [name for name in whole if not quick or "tiles" not in name]
        for part in found:
            if part.words[0] == FRONT_DOOR:
                composes(part, device)
            elif part.words[0] != "pytest":
                module: Any = __import__(part.words[0], fromlist=["main"])
                with monkeypatch.context() as patch, pytest.raises(Understood):
                    patch.setattr(ArgumentParser, "parse_args", parsed)
                    module.main(part.words[1:])


def composes(part: Part, device: str) -> None:
    own = [word for word in part.words[1:] if not word.startswith("hydra.")]
    assert part.words[-1] == f"hydra.run.dir={FOLDER}/{part.name}" and len(own) > 5
    config = compose("config", overrides=own)
    OmegaConf.to_container(config.study, resolve=True)
    assert config.backend.device == device
    assert config.backend.cache_tokens in (256, 1024, 2048, 16384)


def test_tests_that_others_would_disturb_run_alone() -> None:
    """Beside other processes the free memory of a GPU says nothing."""
    assert {"tests/kernels/test_gpu.py", "tests/engine/test_gpu.py"} <= set(gpu.marked())
    words = {part.name: part.words for part in parts("cuda", quick=False)}
    for test in gpu.ALONE:
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text() and path in gpu.marked()
        assert test in words["tests alone"] and "-n" not in words["tests alone"]
        assert all(f"--deselect={test}" in words[part] for part in ("smoke", "tests"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--out: what is quick is written nowhere by itself; give a folder"),
        (["--out", "x"], "no CUDA device here, and this measures one; "),
        (["--unpack"], "--unpack: there is nothing to unpack; give --archive"),
        (["--unpack", "--archive", "nowhere.gz"], "--archive nowhere.gz: is none that this "),
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
    every = {part.words[0] for part in (*parts("cuda", False), *parts("cpu", True))} - {"pytest"}
    names = sorted(
        {*every, gpu.NAME, "pagedsim.experiments.benchmarks.table", PLUGIN} - {FRONT_DOOR}
    )
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    listed = "import importlib.util as u\n" + "\n".join(f"import {name}" for name in names)
    listed += f"\nprint([name for name in {ABSENT} if u.find_spec(name)])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", listed]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
