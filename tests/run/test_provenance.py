"""The version and commit that results name: those of the code that made them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import pagedsim
from pagedsim.metrics.files import RESULT
from pagedsim.run import provenance, store
from pagedsim.run.provenance import answered, asked
from tests.run.studies import carried_out

ME = ("-c", "user.name=a", "-c", "user.email=a@b.c")


def git(folder: Path, *words: str) -> str:
    command = ["git", *ME, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout with one commit."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    root = tmp_path / "checkout"
    for name in ("pagedsim", "experiments/results", "docs"):
        (root / name).mkdir(parents=True)
        (root / name / "file.py").write_text("")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert answered(asked(checkout)) == head
    (checkout / "experiments/results/file.py").write_text("2")
    (checkout / "docs/file.py").write_text("2")
    assert answered(asked(checkout)) == head  # what is not code changes no result


@pytest.mark.parametrize("name", ["pagedsim/file.py", "pagedsim/new.py", "experiments/new.py"])
def test_changed_and_new_code_is_no_commit_s(checkout: Path, name: str) -> None:
    (checkout / name).write_text("1")
    assert answered(asked(checkout)) == git(checkout, "rev-parse", "HEAD") + "+changes"


def test_a_worktree_has_a_commit_of_its_own(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "-q", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "second")
    there = answered(asked(tmp_path / "other"))
    assert there == git(tmp_path / "other", "rev-parse", "HEAD") != answered(asked(checkout))


def test_another_repository_s_commit_is_not_taken(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one around an installation, nor one that a hook of git is about."""
    assert asked(checkout / "pagedsim") is None
    (checkout / "docs/.git").mkdir()  # no repository
    assert answered(asked(checkout / "docs")) is None
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    assert answered(asked(other)) is None  # it has no commit yet
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert answered(asked(checkout)) == head


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert answered(asked(checkout)) is None


def test_a_wheel_says_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    provenance.begin.cache_clear()
    provenance.commit.cache_clear()
    try:
        assert provenance.made_by() == {"version": pagedsim.__version__}
        assert provenance.in_words() == pagedsim.__version__
        provenance.commit.cache_clear()
        (tmp_path / "pagedsim").mkdir()
        (tmp_path / "pagedsim/commit.txt").write_text("abc\n")
        assert provenance.in_words() == f"{pagedsim.__version__}, commit abc"
    finally:
        provenance.begin.cache_clear()
        provenance.commit.cache_clear()


WORDS = ("experiment=single", "workload.requests=10", "seeds=1", "jobs=1", "report=true")


def test_a_study_s_files_name_it_and_runs_of_another_commit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = pagedsim.__version__
    for commit in ("a" * 40, "b" * 40):
        made_by = {"version": version, "commit": commit}
        for module in (provenance, store, pagedsim.run.publish):
            monkeypatch.setattr(module, "made_by", lambda made_by=made_by: made_by)
        carried_out(tmp_path, *WORDS)
        assert json.loads((tmp_path / RESULT).read_text())["pagedsim"] == made_by
        head = (tmp_path / "config.yaml").read_text().splitlines()[0]
        assert head == f"# pagedsim {version}, commit {commit}"
        page = (tmp_path / "report.html").read_text()
        assert f"Made by pagedsim {version}, commit <code>{commit}</code>." in page
        (record,) = tmp_path.glob("runs/*/seed-0/run.json")
        assert json.loads(record.read_text())["commit"] == "a" * 40  # it was not made again
