"""Experiments from a session without a file, such as a notebook, and from scripts without a guard.

Processes that start anew, as on macOS and Windows, are asked for with `set_start_method`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagedsim as ps
from pagedsim.core import ConfigError, PagedsimError, Request, ServerState
from pagedsim.run import pool

SMALL: dict[str, Any] = {"workload": ps.synthetic(rate=9, requests=40), "seeds": 2, "jobs": 1}
CLASSES = """
import multiprocessing
import pagedsim as ps

multiprocessing.set_start_method("WAY")
small = {"workload": ps.synthetic(rate=9, requests=40), "seeds": 2, "jobs": 2}

class Mine(ps.Policy):
    rank_changes = "never"

    def __init__(self, of=len, fails=False):
        self.of, self.fails = of, fails

    def rank(self, request, state):
        if self.fails:
            raise LookupError("no such rank")
        return request.prompt_len
"""
ARMS = """
arms = {"class": Mine, "object": Mine(), "lambda": Mine(lambda: 1)}
result = ps.compare({"server.max_seqs": 2}, policy=arms, **small)
print(len(result.runs), [note for note in result.notes if "process" in note])
try:
    ps.simulate(policy=Mine(fails=True), **small)
except Exception as error:
    print(error, "|", repr(error.__cause__), error.__cause__.__cause__)
"""
UNGUARDED = """
ps.compare(policy={"a": Mine, "b": "fcfs"}, **small)
"""
FAILED = (
    "policy=__main__.Mine failed: LookupError: no such rank (<stdin>:16, in rank) at 0 s of "
    "simulated time | LookupError('no such rank') "
)


def typed(way: str, code: str, folder: Path) -> str:
    """What a session prints into which this is typed."""
    text = CLASSES.replace("WAY", way) + code
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout


def test_classes_that_are_typed_in_run_where_processes_start_anew(tmp_path: Path) -> None:
    runs, failed = typed("spawn", ARMS, tmp_path).splitlines()
    assert runs == (
        "6 ['runs took turns in one process: __main__.Mine is defined in a notebook; from a file, "
        "processes can import it']"
    )
    assert failed == FAILED + "None"


def test_classes_that_are_typed_in_run_in_forks(tmp_path: Path) -> None:
    runs, failed, *trace = typed("fork", ARMS, tmp_path).splitlines()
    assert runs == "6 []"
    assert failed == FAILED + "in another process:"
    assert "line 16, in rank\nLookupError: no such rank" in "\n".join(trace)


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_without_a_guard_ends_in_one_line(tmp_path: Path, guarded: bool) -> None:
    code = UNGUARDED.strip().replace("ps.", 'if __name__ == "__main__": ps.' if guarded else "ps.")
    begin = CLASSES.replace("WAY", "spawn").replace(")\nsmall", ", force=True)\nsmall")
    (tmp_path / "script.py").write_text(begin + code)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.strip().rpartition("\n")[2]
    if guarded:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert last == f"pagedsim.user_error.UserError: {pool._UNGUARDED}"
        assert done.stderr.count("Traceback") == 1  # the script's own


class Scaled(ps.Policy):
    """With a setting that may be a function."""

    rank_changes = "never"

    def __init__(self, of: Any = float) -> None:
        self.of = of

    def rank(self, request: Request, state: ServerState) -> float:
        return float(self.of(request.prompt_len))


class Picky(Exception):
    """Cannot be made again from its text."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("picky")


def raises(tokens: int) -> float:
    raise Picky(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_object_need_not_be_pickled(jobs: int) -> None:
    load = {**SMALL, "jobs": jobs, "server": {"max_seqs": 2}}
    plain, unpicklable, opposite = (
        ps.simulate(policy=policy, **load).requests["finished"].to_pylist()
        for policy in (Scaled(), Scaled(lambda tokens: tokens), Scaled(lambda tokens: -tokens))
    )
    assert plain == unpicklable != opposite


def test_an_unpicklable_object_has_no_folder_to_go_on_in(tmp_path: Path) -> None:
    policy = Scaled(lambda tokens: 1)
    line = f"folder={tmp_path}: no later call could go on there: policy is an object that cannot be"
    for run in (
        lambda: ps.simulate(folder=tmp_path, policy=policy, **SMALL),
        lambda: ps.compare(folder=tmp_path, policy={"a": "fcfs", "b": policy}, **SMALL),
    ):
        with pytest.raises(ConfigError) as error:
            run()
        assert str(error.value).startswith(line)
    ps.simulate(policy=policy, **SMALL).report(tmp_path / "out")
    assert (tmp_path / "out/report.html").is_file()


@pytest.mark.parametrize("factor", [lambda tokens: 1, round])
def test_an_object_of_another_kind_is_refused(factor: Any) -> None:
    with pytest.raises(PagedsimError, match=r"^memory: is a Scaled, must be a Memory$"):
        ps.simulate(memory=Scaled(factor), **SMALL)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_that_cannot_be_sent_leaves_its_trace(jobs: int) -> None:
    with pytest.raises(Exception, match=r"Picky: picky \(.*, in raises") as error:
        ps.simulate(policy=Scaled(raises), **{**SMALL, "jobs": jobs})
    cause = error.value.__cause__
    assert type(cause).__name__ == ("Picky" if jobs == 1 else "RemoteTrace")
    assert jobs == 1 or re.search(r"in raises\n.*\n.*Picky: picky", str(cause))


class Unmade(ps.Policy):
    def __init__(self) -> None:
        raise ValueError("not so")


def test_an_error_of_a_class_is_the_cause_of_the_line() -> None:
    with pytest.raises(Exception, match=r"Unmade: ValueError: not so") as error:
        ps.simulate(policy=Unmade, **SMALL)
    assert repr(error.value.__cause__) == "ValueError('not so')"


def test_a_notebook_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "in_notebook", lambda: True)
    monkeypatch.setattr(pool, "_PERIOD", 0.001)
    ps.simulate(**SMALL)
    told = capsys.readouterr().out
    assert re.search(r"\r[012]/2 runs, ", told)
    assert told.endswith("\r" + " " * pool._WIDTH + "\r")


@pytest.mark.parametrize("kind", ["stdout", "stderr"])
def test_a_pipe_that_closes_ends_nothing(kind: str, tmp_path: Path) -> None:
    """As that of `| head`: results are there, and nothing is said of it."""
    read, write = os.pipe()
    os.close(read)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, kind: write}
    words = ["experiment=single", "slo.tpot=50", "workload.requests=10", "seeds=1"]
    words += ["report=false", "tracking=none", "hydra.run.dir=out"]
    command = [sys.executable, "-m", "pagedsim", *words]
    done = subprocess.run(command, cwd=tmp_path, text=True, check=False, **streams)
    os.close(write)
    assert (done.returncode, done.stderr or "") == (0, "")
    assert (tmp_path / "out" / "result.json").exists()
