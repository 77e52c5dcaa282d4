"""The life of a study: its folder, its rounds, and interruptions."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Task, TaskID

import pagedsim
from pagedsim.core import ConfigError
from pagedsim.experiments.studies.compare import Compare
from pagedsim.run import pool, store
from pagedsim.run.folder import claimed, keep_configuration
from pagedsim.run.job import Arm
from pagedsim.run.runner import Execution, check_arms
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.study import StudySpec
from pagedsim.user_error import UserError
from tests.run.studies import carried_out, command

# -- the life of a study: rounds, Ctrl-C at bad moments, and what is left of an earlier part -------

QUICK = ("experiment=single", "workload.requests=10", "workload.rate=20", "seeds=1", "jobs=1")


@dataclass(frozen=True, kw_only=True)
class Steps(Study):
    """One arm a round."""

    title: str = "Steps"
    question: str = "How many?"
    rounds: Sequence[Sequence[str]] = ((), ("server.max_seqs=4",), ("server.max_seqs=8",))
    whole = False

    def next_runs(self, runs: Runs) -> list[Arm]:
        known = {job.arm for job in runs.jobs if runs.settled(job.arm, job.number)}
        left = [n for n in range(len(self.rounds)) if f"round {n}" not in known]
        return [Arm(f"round {n}", self.rounds[n]) for n in left[:1]]

    def analyse(self, runs: Runs) -> Analysis:
        return Analysis(finding=[f"{len(runs.finished)} runs."])


def test_rounds_go_on_until_nothing_is_asked_for(tmp_path: Path) -> None:
    assert carried_out(tmp_path, *QUICK, study=Steps())["finding"] == ["3 runs."]


def test_arms_under_other_seeds_have_other_requests(tmp_path: Path) -> None:
    runs = Runs(StudySpec.of(QUICK, tmp_path), quiet=True)
    jobs = runs.jobs_of([Arm("a", seeds=[0]), Arm("b", seeds=[1])], str)
    assert not check_arms(Steps(), jobs, [], runs.built)
    lengths = [parts.workload.prompt_len.tolist() for parts in runs.built.values()]
    assert len(lengths) == 2 and lengths[0] != lengths[1]


LONG = """
import multiprocessing, sys
import pagedsim as ps

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    ps.simulate(workload=ps.synthetic(rate=20, requests=3_000_000), seeds=2, jobs=2)
"""


def working(process: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(done: Callable[[], bool]) -> None:
    """Wait until that is so."""
    end = monotonic() + 30.0
    while not done():
        assert monotonic() < end
        sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_workers_end_when_the_study_is_killed(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(LONG)
    command = [sys.executable, "script.py", way]
    study = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)

    def others() -> list[int]:
        """Its processes: of a session of their own."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                found += [int(stat.parent.name)] * (int(fields[3]) == study.pid)
        return [one for one in found if one != study.pid and working(one)]

    helpers = {"fork": 0, "spawn": 1, "forkserver": 2}[way]  # such as a tracker of resources
    try:
        until(lambda: len(others()) >= 2 + helpers)
        sleep(0.3)
        study.kill()
        study.wait()
        until(lambda: not others())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(study.pid, signal.SIGKILL)


def test_a_stop_at_the_end_of_a_round_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, served = pool.StopSignal.run, []

    def asked_late(self: pool.StopSignal, *args: Any) -> Any:
        outcome = run(self, *args)
        served.append(outcome)
        self.asked = len(served) == 2  # while the second is being written
        return outcome

    monkeypatch.setattr(pool.StopSignal, "run", asked_late)
    with pytest.raises(KeyboardInterrupt, match=r"2 of 2 runs are complete, .*goes on from there"):
        Execution(Steps(), command(tmp_path, *QUICK)).execute()
    assert len(served) == 2
    found = carried_out(tmp_path, *QUICK, study=Steps())
    assert found["finding"] == ["3 runs."] and len(served) == 3


def test_a_run_whose_marking_is_stopped_is_not_lost(tmp_path: Path) -> None:
    """In a pool the parent may be stopped between a run's end and its mark."""
    from pagedsim.run.store import Tables

    store = Tables.store
    stopped: list[object] = []

    def once(self: Tables, *args: Any) -> bool:
        if not stopped:
            stopped.append(args)
            raise KeyboardInterrupt
        return store(self, *args)

    arms = {name: [f"server.max_seqs={4 + n}"] for n, name in enumerate("abc")}
    words = (*QUICK[:-1], "jobs=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "store", once)
        try:
            carried_out(tmp_path, *words, study=Compare("t", "q", arms))
        except KeyboardInterrupt as error:
            assert "goes on from there" in str(error)
    found = carried_out(tmp_path, *words, study=Compare("t", "q", arms))
    assert set(found["data"]["means"]) == set("abc")


def test_an_arm_that_cannot_be_configured_later_leaves_the_others(tmp_path: Path) -> None:
    study = Steps(rounds=((), ("memory.blok=1",), ("server.max_seqs=8",)))
    with pytest.raises(UserError, match=r"round 1: .*memory\.blok: no such key"):
        carried_out(tmp_path, *QUICK, study=study)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["finding"] == ["2 runs."] and "round 1" in found["failed"]


def test_the_first_arms_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory\.blok: no such key"):
        carried_out(tmp_path, *QUICK, study=Steps(rounds=(("memory.blok=1",),)))
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_other_arms_is_left_when_a_study_goes_on(tmp_path: Path) -> None:
    two = Compare("t", "q", {"a": [], "b": ["server.max_seqs=4"]})
    carried_out(tmp_path, *QUICK, study=two)
    assert (tmp_path / "plots/effect.png").exists()
    carried_out(tmp_path, *QUICK, "report=false", study=Compare("t", "q", {"a": []}))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"runs", "config.yaml", "result.json", "comparison.csv", "plots"}
    assert list((tmp_path / "plots").iterdir()) == []
    assert "b" not in (tmp_path / "comparison.csv").read_text().replace("batch", "")[:60]


# -- a study's folder belongs to one study ---------------------------------------------------------


BASE = {"seeds": 3, "workload": {"rate": 2}, "study": {"arms": {"a": ["policy=fcfs"]}}}


def test_two_studies_of_one_name_get_a_folder_each(tmp_path: Path) -> None:
    wanted = tmp_path / "10-00-00-single"
    found = []
    for _ in range(3):
        with claimed(wanted, chosen=False) as folder:
            keep_configuration(BASE, folder)
            found.append(folder.name)
    assert found == ["10-00-00-single", "10-00-00-single-2", "10-00-00-single-3"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"workload": {"rate": 4}}, "workload.rate=2, not 4"),
        (
            {"study": {"arms": {"a": ["policy=priority"]}}},
            "study.arms.a=['policy=fcfs'], not ['policy=priority']",
        ),
        ({"study": {"arms": {"b": []}}}, "the arms a, not b"),
    ],
)
def test_the_folder_of_another_study_is_refused(
    changes: dict[str, object], difference: str, tmp_path: Path
) -> None:
    keep_configuration(BASE, tmp_path)
    (tmp_path / "runs").mkdir()
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError) as error:
        keep_configuration({**BASE, **changes}, tmp_path)
    assert str(error.value) == (
        f"hydra.run.dir={tmp_path}: has a study with {difference}; "
        "choose another folder, or the same settings to go on with that study"
    )
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    keep_configuration(BASE, tmp_path)
    (tmp_path / "runs").mkdir()
    path = tmp_path / "config.yaml"
    before = path.read_text().replace(f"# pagedsim {pagedsim.__version__}", "# pagedsim 0.0.9", 1)
    path.write_text(before)
    with pytest.raises(ConfigError, match=r"has runs of pagedsim 0\.0\.9, and this is .*folder"):
        keep_configuration(BASE, tmp_path)
    assert path.read_text() == before


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "out", chosen=True) as folder:
        with (
            pytest.raises(ConfigError, match=r"run.dir=.*out: another run is at work there"),
            claimed(folder, chosen=True),
        ):
            raise AssertionError("unreachable")
        (folder / "kept").touch()
    with claimed(folder, chosen=True):  # free again
        pass
    assert (folder / "kept").exists()


# -- digests of code: whose files they are of, and that they follow what a policy imports ----------


ROOT = Path(store.__file__).parents[2]


def test_the_digest_covers_what_decides_a_run() -> None:
    files = {str(path.relative_to(ROOT)) for path in store._our_files()}
    assert files >= {
        *("pagedsim/core/scheduler.py", "pagedsim/sim/cost/roofline.py", "pagedsim/build.py"),
        *("pagedsim/workload/generated.py", "pagedsim/metrics/summary.py", "kernels/decode.py"),
        *("pagedsim/engine/runner.py", "pagedsim/spec/run.py", "policies/ordering.py"),
    }
    assert not [name for name in files if "report" in name or "tracking" in name]


def test_the_digest_does_not_depend_on_where_files_lie(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "z"
    for folder, names in zip(folders, ("ab", "ba"), strict=True):
        folder.mkdir()
        for name, text in zip(names, ("first", "second"), strict=True):
            (folder / name).write_text(text)
    digests = {store._digest(folder.iterdir()) for folder in folders}
    assert len(digests) == 1
    (folders[0] / "a").write_text("third")
    assert store._digest(folders[0].iterdir()) not in digests


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


def test_imports_of_a_policy_are_followed(lab: Path) -> None:
    before = store.of_target("lab.Mine")
    (lab / "lab/unused.py").write_text("# another\n")
    assert store.of_target("lab.Mine") == before
    for name in ("lab/impl.py", "lab/tools/__init__.py", "lab/tools/deep.py", "lab_weights.py"):
        file = lab / name
        file.write_text(file.read_text() + "# another\n")
        after = store.of_target("lab.Mine")
        assert after != before, name
        before = after


def test_a_file_is_parsed_once_however_many_runs_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lab_once.py").write_text("import json\nMine = 1\n")
    parsed, parse = list[bytes](), ast.parse

    def counted(text: bytes) -> ast.Module:
        parsed.append(text)
        return parse(text)

    with monkeypatch.context() as patched:
        patched.setattr("ast.parse", counted)
        for _ in range(2):
            store.of_target("lab_once.Mine")
    assert len(parsed) == 1


# -- what a terminal shows -------------------------------------------------------------------------


def test_a_terminal_shows_arms_as_they_are_built_and_runs_that_were_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    terminal = partial(Console, file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(pool, "Console", lambda stderr: terminal())
    monkeypatch.setattr(pool, "on_terminal", lambda: True)
    words = ["experiment=fcfs_vs_priority", "workload.requests=20", "jobs=1"]
    carried_out(tmp_path, *words, "seeds=1")
    assert "preparing 2/2 arms: priority" in shown.getvalue()
    assert "2/2 runs" in shown.getvalue()
    shown.truncate(0)
    carried_out(tmp_path, *words, "seeds=2")
    assert "4/4 runs" in shown.getvalue()
    board = pool.Board(2, kept=6)
    task = Task(TaskID(0), "", 1.0, 0.0, lambda: 0.0)
    assert pool._Bar(board).render(task).completed == 0.75


def test_code_that_cannot_be_read_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lab_unclosed.py").write_text("def broken(\n")
    assert store.of_target("lab_unclosed.Mine") is not None
