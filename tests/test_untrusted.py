"""Nothing that is read from a folder, a fit, a trace or a configuration of others is executed."""

from __future__ import annotations

import json
import pickle
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

import pagedsim as ps
from pagedsim.core import ConfigError, Policy
from pagedsim.spec.objects import make
from tests.conftest import Call

QUICK = ("seeds=1", "jobs=1", "report=false", "tracking=none")
MARK = Path("executed")
"""What planted code would leave."""
COMMAND = f"{sys.executable} -c \"open('{MARK}', 'w')\""


class Bomb:
    """Leaves the mark when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(MARK), "w")


PICKLED = pickle.dumps(Bomb())
TAGGED = f"!!python/object/apply:os.system [{json.dumps(COMMAND)}]"
"""What PyYAML's unsafe loaders execute."""


def called(target: str, **settings: object) -> dict[str, object]:
    return {"_target_": target, **settings}


CALLS = [
    called("os.system", command=COMMAND),
    called("subprocess.getoutput", cmd=COMMAND),
    called("subprocess.Popen", args=[sys.executable, "-c", f"open('{MARK}', 'w')"]),
    called("pickle.loads", data=PICKLED),
    called("builtins.exec", source=f"open('{MARK}', 'w')"),
    called(f"{__name__}.Bomb.__reduce__"),
    called(
        "pagedsim.spec.objects.unpickled", pickle=urlsafe_b64encode(PICKLED).decode(), classes=[]
    ),
]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of one arm in the folder `out`, with an object of a script among its settings."""
    monkeypatch.chdir(tmp_path)
    ps.simulate(policy=Ranked([1, 2]), workload=ps.synthetic(requests=3), seeds=1, folder="out")
    assert MARK.exists() is False
    return Path("out")


class Ranked(Policy):
    """Keeps something that its argument does not tell."""

    def __init__(self, weights: list[int]) -> None:
        self.weights = tuple(weights)


def test_a_results_folder_holds_no_pickle(study: Path) -> None:
    """Of the object there are the name of its class and a digest, in every file."""
    for path in study.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"\x80\x04" not in content and b"gASV" not in content, path
    assert "tests.test_untrusted.Ranked" in (study / "config.yaml").read_text()


@pytest.mark.parametrize("planted", [TAGGED, f"policy: {TAGGED}"])
def test_a_configuration_in_a_results_folder_is_data(study: Path, planted: str, call: Call) -> None:
    (study / "config.yaml").write_text(planted)
    (study / "runs/run/seed-0/run.json").write_text(json.dumps({"pickle": PICKLED.hex()}))
    (study / "runs/run/seed-0/summary.json").write_bytes(PICKLED)
    call("experiment=single", *QUICK, "workload.requests=3", f"hydra.run.dir={study}")
    assert not MARK.exists()


@pytest.mark.parametrize("experiment", ["calibrate", "replay"])
@pytest.mark.parametrize("planted", CALLS, ids=lambda planted: str(planted["_target_"]))
def test_a_recorded_study_calls_nothing_that_is_no_part(
    study: Path, planted: dict[str, object], experiment: str, call: Call
) -> None:
    """Studies that take up another read its configuration."""
    config = json.loads(json.dumps({"policy": planted, "cost": planted}, default=str))
    (study / "config.yaml").write_text(json.dumps(config))
    call(f"experiment={experiment}", f"run={study}", *QUICK, "hydra.run.dir=again")
    assert not MARK.exists()


@pytest.mark.parametrize("planted", CALLS, ids=lambda planted: str(planted["_target_"]))
def test_a_configuration_of_others_calls_nothing_that_is_no_part(
    planted: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = called("pagedsim.policies.ordering.FCFS", inner=planted)
    for settings in (planted, inside):
        with pytest.raises(ConfigError):
            make("policy", settings, Policy)
    assert not MARK.exists()


@pytest.mark.parametrize("text", [TAGGED, f"_target_: {TAGGED}"])
def test_a_folder_of_options_is_data(tmp_path: Path, text: str, call: Call) -> None:
    (tmp_path / "theirs/policy").mkdir(parents=True)
    (tmp_path / "theirs/policy/mine.yaml").write_text(text)
    words = ("experiment=single", *QUICK, "workload.requests=3", "policy=mine")
    code, _, errors = call("--config-dir", "theirs", *words)
    assert (code, MARK.exists()) == (1, False)
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.json", "trace.pkl"])
def test_a_trace_is_data(name: str, tmp_path: Path, call: Call) -> None:
    (tmp_path / name).write_bytes(PICKLED)
    code, _, errors = call("experiment=single", *QUICK, "workload=trace", f"workload.path={name}")
    assert (code, MARK.exists()) == (1, False)
    assert errors.count("\n") == 1 and name in errors


@pytest.mark.parametrize("content", [PICKLED, TAGGED.encode()])
def test_a_fit_is_data(content: bytes, tmp_path: Path, call: Call) -> None:
    (tmp_path / "cost.json").write_bytes(content)
    (tmp_path / "requests.csv").write_text("arrival\n0\n")
    words = ("experiment=single", *QUICK, "cost=fitted", "cost.path=cost.json")
    assert call(*words)[0] == 1
    fitted = ("experiment=predict", *QUICK, "fit=.", "requests=requests.csv")
    assert call(*fitted)[0] == 1
    assert not MARK.exists()
