"""All measurements of a GPU: parts that fail, stop or are killed, other machines, and what came
back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedsim.experiments.benchmarks import device, gpu, merge, table  # noqa: E402
from pagedsim.experiments.benchmarks.gpu import (  # noqa: E402
    DONE,
    FAILED,
    FOLDER,
    STOPPED,
    Part,
    parts,
)
from pagedsim.experiments.benchmarks.harness import NAME  # noqa: E402
from pagedsim.kernels import tuning  # noqa: E402
from tests.run.studies import compose  # noqa: E402

ROOT = Path(__file__).parents[3]
PARTS = [
    *("headlines", "launch", "more headlines", "headlines, flashinfer", "headlines, fa"),
    *("profile", "step", "validate", "host", "swap", "calibrate"),
    *("tests of kernels", "tests of the engine", "engine"),
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


Run = Callable[..., int]


@pytest.fixture
def run(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs these parts, and returns the exit code."""

    def run(*wanted: Part, minutes: float = 1.0) -> int:
        monkeypatch.setattr(gpu, "parts", lambda device: list(wanted))
        words = ["--quick", "--out", str(tmp_path / "out"), "--minutes", str(minutes)]
        with pytest.raises(SystemExit) as ended:
            gpu.main(words)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run


def states(place: Path) -> dict[str, str]:
    kept = json.loads((place / "gpu.json").read_text())
    return {name: one["state"] for name, one in kept["parts"].items()}


def begun(text: str) -> list[str]:
    """The parts that were run."""
    return re.findall(r"^(\w+): python -m", text, re.MULTILINE)


# -- one after another -----------------------------------------------------------------------------


def test_a_failed_part_leaves_the_others_and_is_tried_again(
    run: Run, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, fine, late = Part("a", ("broken",)), Part("b", ("fine",)), Part("c", ("fine", "--c"))
    assert run(broken, fine) == 1
    place = tmp_path / "out"
    assert states(place) == {"a": FAILED, "b": DONE}
    assert (place / "a.log").read_text() == "this is why\n"
    (modules / "broken.py").write_text("print('mended')")
    capsys.readouterr()
    assert run(broken, fine, late) == 0
    printed = capsys.readouterr().out
    assert begun(printed) == ["a", "c"] and "| c | done | " in printed
    run(Part("b", ("fine", "--other")))
    assert begun(capsys.readouterr().out) == ["b"]


def test_another_machine_goes_on_from_the_folder(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Part("a", ("writes", FOLDER)), Part("b", ("endless",), most=0.4)
    assert run(*wanted) == gpu.GOES_ON
    assert states(tmp_path / "out") == {"a": DONE, "b": STOPPED}
    (tmp_path / "out").rename(tmp_path / "there")
    (tmp_path / "there").rename(tmp_path / "out")
    capsys.readouterr()
    assert run(wanted[0], Part("b", ("fine",))) == 0
    assert begun(capsys.readouterr().out) == ["b"]
    path = tmp_path / "out" / "gpu.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "Another"}))
    with pytest.raises(SystemExit, match=r"^--out [^\n]*: is of Another, and this is "):
        gpu.main(["--quick", "--out", str(tmp_path / "out")])


def test_the_end_of_the_time_leaves_the_rest(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Part("a", ("endless",)), Part("b", ("fine",)), minutes=0.01) == gpu.GOES_ON
    assert states(tmp_path / "out") == {"a": STOPPED}
    assert "| b | not begun |  |" in capsys.readouterr().out
    assert (tmp_path / "out" / "a.log").read_text() == "begun\n"


def test_a_race_without_its_package_is_left_out(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Part("headlines, fa", ("broken",)), Part("b", ("fine",))) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("headlines, fa: left out, attention=fa: must be triton on device=cpu")
    assert begun(printed) == ["b"]


KILLED = """
import sys
from pagedsim.experiments.benchmarks import gpu
from pagedsim.experiments.benchmarks.gpu import Part
gpu.parts = lambda device: [Part("a", ("fine",)), Part("b", ("leaves", gpu.FOLDER))]
gpu.main(["--quick", "--out", sys.argv[1]])
"""
LEAVES = """
import os, sys, time
open(sys.argv[1] + "/pid.txt", "w").write(str(os.getpid()))
time.sleep(60)
"""


def test_a_killed_run_loses_the_part_under_way(modules: Path, tmp_path: Path) -> None:
    (modules / "leaves.py").write_text(LEAVES)
    place = tmp_path / "out"
    words = [sys.executable, "-c", KILLED, str(place)]
    path = os.pathsep.join([str(modules), str(ROOT)])
    with subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE
    ) as run:
        pid = int(waited_for(lambda: (place / "pid.txt").exists(), place / "pid.txt"))
        run.terminate()
        run.communicate()
    assert run.returncode != 0
    status = Path(f"/proc/{pid}/status")  # the part under way has ended, too
    waited_for(lambda: not status.exists() or "\nState:\tZ" in status.read_text())
    assert states(place) == {"a": DONE}


def waited_for(known: Callable[[], bool], path: Path | None = None) -> str:
    """Wait until it is so; the text of a file that is then written."""
    for _ in range(600):
        if known() and (path is None or path.read_text()):
            return "" if path is None else path.read_text()
        time.sleep(0.1)
    raise AssertionError("it is not so within a minute")


# -- what came back --------------------------------------------------------------------------------

RESULTS = ROOT / "experiments" / "results" / merge.SHOWN


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what a merge writes to, in which nothing was measured lately."""
    place = tmp_path / "clone"
    for path in ("README.md", merge.PERFORMANCE, merge.FIDELITY):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, place / path)
    results = place / "experiments" / "results"
    shutil.copytree(RESULTS, results / merge.SHOWN)
    monkeypatch.setattr(merge, "ROOT", place)
    monkeypatch.setattr(device, "RESULTS", results)
    monkeypatch.setattr(tuning, "add", lambda path: None)
    return place


@pytest.mark.parametrize("kind", ["folder", "gztar", "zip"])
def test_an_archive_becomes_committed_results(
    kind: str, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "archive" / "h100"
    shutil.copytree(RESULTS, source)
    changed(source / "kernels.json", '"of_copy": 0.9', '"of_copy": 0.7')
    changed(source / "validate" / "cost.json", '"constant": 0.00', '"constant": 0.10')
    (source / "headlines.log").write_text("of a machine")
    archive = source
    if kind != "folder":
        archive = Path(shutil.make_archive(str(tmp_path / "back"), kind, tmp_path / "archive"))
    gpu.main(["--merge", str(archive)])
    printed = capsys.readouterr().out
    assert "  decode.constant: 0.107, was 0.00696\n" in printed
    assert "README.md: new figures; " in printed and "performance.md: " in printed
    assert "fidelity.md" not in printed
    assert "| on an H100: decode attention, 64 × 4,096 | 72 % of a" in text(clone / "README.md")
    assert "copy's bandwidth | ≥ 75 % | 90 % | 72% | 101% |" in text(clone / merge.PERFORMANCE)
    committed = device.RESULTS / merge.SHOWN
    assert text(committed / "kernels.json") == text(source / "kernels.json")
    assert not (committed / "headlines.log").exists()


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def changed(path: Path, old: str, new: str) -> None:
    assert old in text(path)
    path.write_text(text(path).replace(old, new), encoding="utf-8")


def test_what_is_no_archive_gets_one_line(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "back.tar").write_text("no tar")
    about = {"device": "CPU", "capability": None}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "gpu.json").write_text(json.dumps(about))
    for name, said in {
        "empty": "must have one gpu.json, and has 0",
        "back.tar": "",
        "none.zip": "",
        "cpu": "is of a CPU at tiny sizes, and so no result",
    }.items():
        with pytest.raises(SystemExit, match=rf"^--merge [^\n]*{name}: [^\n]*{said}[^\n]*$"):
            gpu.main(["--merge", str(tmp_path / name)])


def test_pages_have_the_figures_of_the_files() -> None:
    """`python -m pagedsim.experiments.benchmarks.gpu --merge` of what is committed changes none."""
    for path, page in merge.pages().items():
        assert text(path) == page


def test_what_vllm_takes_is_of_the_installed_tables(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiconfigurator_core")
    monkeypatch.setattr(table, "RESULTS", device.RESULTS)
    path = device.RESULTS / merge.SHOWN / "peers.json"
    path.unlink()
    table.main(["peers"])
    assert text(path) == text(RESULTS / "peers.json")


@pytest.mark.slow
def test_all_parts_at_tiny_sizes(clone: Path, tmp_path: Path) -> None:
    """What they leave, as if of a GPU, can be merged, and the table shows it."""
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    for path in (tmp_path / "out").glob("*.json"):
        about = json.loads(text(path))
        path.write_text(json.dumps({**about, "device": "Pretend", "capability": [9, 0]}))
    gpu.main(["--merge", shutil.make_archive(str(tmp_path / "back"), "tar", tmp_path / "out")])
    head, *rows = [line.split(" | ") for line in table.written(device.RESULTS).splitlines()]
    column = head.index("Pretend |")
    assert {row[0]: row[column] for row in rows if row[column].strip(" |")}.keys() >= {
        "| first token, mean, at half load, at the knee, in overload",
        "| tokens a second: times transformers' `generate_batch`, a weak peer",
        "| host's part of a decode step, 64 requests",
    }


# -- the parts -------------------------------------------------------------------------------------


class Understood(Exception):
    """The words were parsed."""


def test_every_part_takes_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is accepted by its module, on a GPU and at tiny sizes."""
    parse = ArgumentParser.parse_args

    def parsed(self: ArgumentParser, words: Sequence[str]) -> None:
        parse(self, words)
        raise Understood

    assert [part.name for part in parts("cuda")] == PARTS
    for kind in ("cuda", "cpu"):
        for part in parts(kind):
            if part.words[0] == "pagedsim":
                composes(part, kind)
            elif part.words[0] != "pytest":
                module: Any = __import__(part.words[0], fromlist=["main"])
                with monkeypatch.context() as patch, pytest.raises(Understood):
                    patch.setattr(ArgumentParser, "parse_args", parsed)
                    module.main(part.words[1:])


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
    every = {part.words[0] for part in parts("cuda")} - {"pytest", "pagedsim"}
    names = sorted({*every, f"{NAME}.gpu", f"{NAME}.table"})
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    listed = "import importlib.util as u\n" + "\n".join(f"import {name}" for name in names)
    listed += f"\nprint([name for name in {ABSENT} if u.find_spec(name)])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", listed]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
