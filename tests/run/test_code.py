"""Digests of code: whose files they are of, and that they follow what a policy imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedsim.run import store

ROOT = Path(store.__file__).parents[2]


def test_all_that_decides_a_run_is_ours() -> None:
    files = {str(path.relative_to(ROOT)) for path in store._our_files()}
    assert files >= {
        *("pagedsim/core/scheduler.py", "pagedsim/sim/server.py", "pagedsim/sim/cost/roofline.py"),
        *("pagedsim/build.py", "pagedsim/workload/generated.py", "pagedsim/metrics/summary.py"),
        *("pagedsim/engine/runner.py", "pagedsim/kernels/decode.py", "pagedsim/run/serving.py"),
        *("policies/ordering.py", "pagedsim/run/job.py", "pagedsim/run/parts.py"),
    }
    assert not [name for name in files if "report" in name or "tracking" in name]


def test_every_file_counts(tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("1\n")
    before = store._digest(files)
    assert store._digest(reversed(files)) == before
    files[1].write_text("2\n")
    assert store._digest(files) != before


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package, in which a policy leans on several files."""
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "__init__.py": "from .impl import Mine\n",
        "impl.py": "import json\nfrom lab_weights import WEIGHT\nfrom . import tools\nMine = 1\n",
        "tools/__init__.py": "def late():\n    from lab.tools.deep import x\n",
        "tools/deep.py": "",
        "unused.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "lab_weights.py").write_text("WEIGHT = 1\n")
    return tmp_path


def test_what_a_policy_imports_is_followed(lab: Path) -> None:
    before = store.of_target("lab.Mine")
    (lab / "lab/unused.py").write_text("# another\n")
    assert store.of_target("lab.Mine") == before
    for name in ("lab/impl.py", "lab/tools/__init__.py", "lab/tools/deep.py", "lab_weights.py"):
        file = lab / name
        file.write_text(file.read_text() + "# another\n")
        after = store.of_target("lab.Mine")
        assert after != before, name
        before = after


def test_own_and_unknown_modules_have_no_digest() -> None:
    assert store.of_target("policies.ordering.FCFS") is None
    assert store.of_target("there.is.none") is None
    assert store.of_target("Mine") is None


def test_code_that_cannot_be_read_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lab_unclosed.py").write_text("def broken(\n")
    assert store.of_target("lab_unclosed.Mine") is not None


def test_what_a_policy_stands_around_is_code_too() -> None:
    inner = {"_target_": "lab.Inner", "of": "sjf"}
    config = {"policy": {"_target_": "lab.Mine", "of": "lab.Other"}, "more": {"of": inner}}
    assert sorted(store._paths(config)) == ["lab.Inner", "lab.Mine", "lab.Other"]
