"""The benchmarks of a GPU's machine, with only the packages that such a machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments.benchmarks.gpu.parts import PLUGIN, parts
from tests.experiments.benchmarks import bare

ROOT = Path(__file__).parents[3]
MODULES = sorted(
    {part.words[0] for part in (*parts("cuda", False), *parts("cpu", True))} - {"pytest"}
)
OTHERS = [f"experiments.benchmarks.{name}" for name in ("gpu.__main__", "children", "table")]


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([bare.path(place), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_absent_packages_are_hidden(tmp_path: Path) -> None:
    """Otherwise the other tests check nothing."""
    asked = "import importlib.util as u, importlib.metadata as m\n" + (
        f"print([name for name in {bare.ABSENT!r} if u.find_spec(name)])\n"
        "print([d.name for d in m.distributions() if d.name.startswith(('hydra', 'simpy'))])"
    )
    found = run(tmp_path, "-c", asked)
    assert found.stdout == "[]\n[]\n", found.stderr


def test_every_module_of_a_part_imports(tmp_path: Path) -> None:
    assert "experiments.benchmarks.profile" in MODULES and len(MODULES) >= 8
    imports = "\n".join(f"import {module}" for module in [*MODULES, *OTHERS, PLUGIN])
    found = run(tmp_path, "-c", imports)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_a_benchmark_without_matplotlib_has_no_picture(tmp_path: Path) -> None:
    words = ["-m", "experiments.benchmarks.swap", "--device", "cpu", "--quick", "--rounds", "1"]
    found = run(tmp_path / "bare", *words, "--out", str(tmp_path / "out"))
    assert found.returncode == 0 and "there is no matplotlib for a picture" in found.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["swap.json"]
