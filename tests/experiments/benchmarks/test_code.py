"""The digest of code: of all that runs, of nothing else, and the same in every clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments.benchmarks import code
from experiments.benchmarks.code import digest, files

ROOT = Path(__file__).parents[3]
SMALL = {
    "experiments/a.py": "from pagedsim.one import f\n",
    "pagedsim/__init__.py": "",
    "pagedsim/one.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pagedsim.types\n"
        "def f():\n    from . import two\n    import numpy\n"
        "import importlib\nimportlib.import_module('pagedsim.three')\n"
    ),
    "pagedsim/two.py": "import pagedsim.report.plots\n",
    "pagedsim/three/__init__.py": "",
    "pagedsim/types.py": "",
    "pagedsim/report/plots.py": "",
    "pagedsim/other.py": "",
}
RUN = [
    "experiments/a.py",
    "pagedsim/__init__.py",
    "pagedsim/one.py",
    "pagedsim/three/__init__.py",
    "pagedsim/two.py",
]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree in the place of ours."""
    plant(tmp_path / "here")
    settle(monkeypatch, tmp_path / "here")
    return tmp_path


def plant(root: Path) -> None:
    for name, text in SMALL.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def settle(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(code, "ROOT", root)
    monkeypatch.setattr(code, "digest", digest.__wrapped__)
    code._imported.cache_clear()


def test_what_runs_is_found(small: Path) -> None:
    assert sorted(map(str, files(["experiments.a"]))) == RUN


@pytest.mark.parametrize("name", SMALL)
def test_it_changes_with_what_runs_alone(name: str, small: Path) -> None:
    before = code.digest("experiments.a")
    with (small / "here" / name).open("a") as file:
        file.write("\nmore = 1\n")
    code._imported.cache_clear()
    assert (code.digest("experiments.a") != before) == (name in RUN)


def test_it_is_the_same_elsewhere(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code.digest("experiments.a")
    shutil.move(small / "here", small / "there")
    settle(monkeypatch, small / "there")
    assert code.digest("experiments.a") == before


@pytest.mark.parametrize("name", ["kernels", "step", "swap", "engine", "host", "tune_kernels"])
def test_what_importing_loads_is_in_it(name: str) -> None:
    """The sources say all that Python loads."""
    module = f"experiments.benchmarks.{name}"
    listed = (
        f"import sys, {module}\n"
        "for one in list(sys.modules.values()):\n"
        "    print(getattr(one, '__file__', None) or '')\n"
    )
    child = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    loaded = {Path(line).resolve() for line in child.stdout.splitlines() if line}
    found = {(ROOT / path).resolve() for path in files([module])}
    installed = Path(sys.prefix).resolve()  # the environment may lie in the tree
    ours = {path for path in loaded if path.is_relative_to(ROOT) and path.exists()}
    ours = {path for path in ours if not path.is_relative_to(installed)}
    assert len(ours) > 3
    assert ours - found == set()
    assert (ROOT / "kernels" / "decode.py") in found or name in ("host", "swap")
    assert (ROOT / "conf" / "model" / "llama-3.1-8b.yaml") in found or name == "host"
    assert digest(module) == digest(module) != digest("experiments.benchmarks.code")
