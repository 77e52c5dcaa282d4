"""All measurements of a GPU in slices: parts that fail, stop or are killed, and other machines."""

from __future__ import annotations

import json
import os
import re
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
from pagedsim.kernels.tiles import Tiles  # noqa: E402
from pagedsim.kernels.tuning import Entry, Heads  # noqa: E402

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


def test_other_code_is_measured_again_and_other_tiles_after_what_is_new(
    modules: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [Part("a", ("fine",), tiled=True), Part("b", ("fine", "--b")), Part("c", ("fine",))]
    ledger = slice_of(wanted[:2], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "tiles", lambda gpu: "tuned")
        assert [part.name for part in ledger.left(wanted)] == ["c", "a"]
        assert ledger.of_other_code(wanted) == []
    capsys.readouterr()
    monkeypatch.setattr(gpu, "digest", lambda *modules: "other")
    slice_of(wanted[:1], tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["measured by other code, so measured again: a", "a: python -m fine"]
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["a"]["code"] == "other"


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


def test_a_part_that_ends_in_no_slice_makes_room_for_the_others(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a part that hangs takes the whole of every slice."""
    wanted = [Part("a", ("endless",), least=0.0), Part("b", ("fine",), least=1e6)]
    monkeypatch.setattr(gpu, "TICK", 0.05)
    seen: list[int] = []
    monkeypatch.setattr(Ledger, "pack", lambda ledger: seen.append(1))
    slice_of(wanted, tmp_path, 0.5)
    assert len(seen) >= 3, "the archive has the lines that are done while a part runs"
    ledger = Ledger(tmp_path, TOLD)
    assert [part.name for part in ledger.left(wanted)] == ["a", "b"]
    monkeypatch.setattr(gpu, "PATIENCE", 0.4)
    assert states(tmp_path) == {"a": BEGUN}
    assert [part.name for part in ledger.left(wanted)] == ["b", "a"]


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


# -- the archive, and tuned tiles ------------------------------------------------------------------


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


def test_tiles_that_were_tuned_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, new = (
        Entry("Pretend", (9, 0), kernel, Heads(8, 4, 128, 2), Tiles(16, 64, 4, 3))
        for kernel in ("decode", "prefill")
    )
    table = tmp_path / "there.json"
    tuning.write([there], table)
    tuning.write([new], tmp_path / "tuned.json")
    monkeypatch.setattr(tuning, "read", lambda path=table: entries(path))
    monkeypatch.setattr(tuning, "write", lambda all_of, path=table: write(all_of, path))
    before = parts("cuda", False)[1].identity("Pretend")
    gpu.take_over(tmp_path)
    assert entries(table) == [there, new]
    after = parts("cuda", False)[1].identity("Pretend")
    (tmp_path / "tuned.json").write_text('[{"gpu": "Pre')  # killed as it was written
    gpu.take_over(tmp_path)
    assert entries(table) == [there, new]
    assert before.pop("tiles") != after.pop("tiles") and before == after


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


def test_studies_are_skipped_where_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line that names what to install; the other parts go on."""
    found = parts("cuda", quick=False)
    assert gpu.able(found) == (found, "")

    monkeypatch.setattr(gpu, "version_of", lambda name: None if name == "simpy" else "1")
    able, line = gpu.able(found)
    assert line == (
        "skipped: calibrate, validate, fcfs_vs_priority, parity; they need: pip install "
        "'simpy>=4.1'\n"
    )
    assert [part for part in found if part.words[0] != FRONT_DOOR] == able


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


def pytest_of(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What pytest says of the tests in a folder with our plugin, and with no other, for speed."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-v", "-p", PLUGIN, "-p", "no:cacheprovider"),
            *(*words, str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_smoke_is_one_case_of_each(tmp_path: Path) -> None:
    tmp_path = tmp_path / "parallel"  # as the folder of a clone may be called
    tmp_path.mkdir()
    mark = "@pytest.mark" + ".gpu"  # this file has no such test
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n  slow\n")
    (tmp_path / "test_some.py").write_text(
        f"import pytest\n{mark}\n"
        "@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_a(x): assert x == 2\n"
        f"{mark}\n@pytest.mark.slow\ndef test_b(): pass\n"
        f"{mark}\ndef test_c(): pass\n"
        "def test_d(): pass\n"
    )
    (tmp_path / "experiments").mkdir()
    more = f"import pytest\n{mark}\ndef test_e(): pass\n"
    (tmp_path / "experiments" / "test_more.py").write_text(more)
    smoke = ["-m", "gpu", "--one-case"]
    for workers in ([], ["-p", "xdist", "-n", "2"]):
        found = pytest_of(tmp_path, *smoke, *workers)
        assert "2 passed" in found.stdout and found.returncode == 0, found.stdout
        assert "test_a[2]" in found.stdout and "test_c" in found.stdout


TESTS = """
import os
from pathlib import Path

def test_a(): pass
def test_b(): Path(__file__).with_name("stopped").exists() or os._exit(9)
def test_c(): assert Path(__file__).with_name("stopped").exists()
"""


@pytest.mark.slow
def test_tests_that_passed_are_left_out_of_the_next_slice(tmp_path: Path) -> None:
    """Whatever stops pytest: what was under way comes after what has not begun."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(TESTS)

    def found() -> tuple[int, list[str]]:
        run = pytest_of(tmp_path, f"--record={tmp_path / 'tests.json'}")
        return run.returncode, re.findall(r"::test_(\w) (?:PASSED|FAILED)", run.stdout)

    assert found()[0] == 9
    kept = json.loads((tmp_path / "tests.json").read_text())
    assert {name[-1]: one["outcome"] for name, one in kept.items()} == {"a": "passed", "b": "begun"}
    (tmp_path / "stopped").touch()
    assert found() == (0, ["c", "b"])
    assert found() == (0, [])
