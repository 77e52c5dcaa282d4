"""Results of a device: the digest of their code, the lines kept by --resume, and what is moved."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import device, swap  # noqa: E402
from experiments.benchmarks.device import Copy, Results, files, noise  # noqa: E402
from pagedsim.engine.cache import Mover  # noqa: E402

CPU = torch.device("cpu")
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
RUN = {name for name in SMALL if not name.endswith(("types.py", "plots.py", "other.py"))}


def digest(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of the small tree, read anew."""
    monkeypatch.setattr(device, "ROOT", root)
    device._imported.cache_clear()
    found = device.digest.__wrapped__("experiments.a")
    assert set(map(str, files(["experiments.a"]))) == RUN
    return found


def test_a_digest_is_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    for name, text in SMALL.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    before = digest(here, monkeypatch)
    shutil.copytree(here, tmp_path / "there")
    assert digest(tmp_path / "there", monkeypatch) == before
    for name, text in SMALL.items():
        (here / name).write_text(f"{text}\nmore = 1\n")
        assert (digest(here, monkeypatch) != before) == (name in RUN)
        (here / name).write_text(text)
    device._imported.cache_clear()


@pytest.mark.parametrize("name", ["kernels", "step", "host", "tune"])
def test_a_digest_contains_all_that_an_import_loads(name: str) -> None:
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
    assert len(ours) > 3 and ours <= found
    assert ROOT / "kernels" / "decode.py" in found or name == "host"
    assert ROOT / "conf" / "model" / "llama-3.1-8b.yaml" in found or name == "host"


def results(place: Path | None, **settings: Any) -> Results:
    asked = Namespace(**{"out": place, "quick": True, "resume": True, "rounds": 3} | settings)
    return Results("a", "lines", "swap", ["--out", "/some/where", "--quick"], asked, CPU, dtype="x")


def test_lines_measured_the_same_way_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = results(tmp_path)
    assert first.known == []
    first.add({"case": 1})
    assert results(tmp_path).known == [{"case": 1}]
    assert results(tmp_path, resume=False).known == results(tmp_path, rounds=4).known == []
    assert first.content["command"] == "python -m experiments.benchmarks.swap --quick"
    assert {"driver", "torch", "triton", "date", *device.SAME} <= set(first.content)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with monkeypatch.context() as patched:
        patched.setattr(device, "tiles", lambda name: "others")
        assert results(tmp_path).known == []
    results(None).close()
    assert "nothing is written" in capsys.readouterr().out


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no CUDA device here[^\n]*$"):
        swap.main([])


def compressible(content: Any) -> bool:
    """Whether half of the bytes are equal, as zeros are."""
    return int(content.flatten().view(torch.uint8).bincount().max()) > content.nbytes // 2


def test_moved_bytes_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(noise(2**16, CPU).unique()) == 256
    assert not compressible(Copy(CPU, tiny=True)._source) and compressible(torch.zeros(2**16))
    seen: list[bool] = []
    move = Mover.move

    def checked(self: Mover, *given: Any) -> None:
        seen[:] = [compressible(self.cache.gpu), compressible(self.cache.cpu)]
        move(self, *given)

    monkeypatch.setattr(Mover, "move", checked)
    one = next(iter(swap.swaps(quick=True)))
    assert swap.measure(one, torch.bfloat16, CPU, swap.LITTLE, 1)["right"]
    assert seen == [False, False]
