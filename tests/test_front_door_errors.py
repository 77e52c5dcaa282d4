"""What the command says and leaves behind where something is wrong, or hardly meant.

The lines that single mistakes are answered with are listed in `tests/mistakes`.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from pagedsim.core import ConfigError
from pagedsim.run import job as of_job
from tests.conftest import Call

SHORT = (
    *("experiment=single", "workload=fixed", "workload.requests=3", "seeds=1"),
    *("report=false", "tracking=none"),
)
LOG = "arrived_at,num_prefill_tokens,num_decode_tokens,ttft,e2e"


def test_a_path_may_begin_at_home(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("home")
    home.mkdir()
    (home / "t.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n")
    monkeypatch.setenv("HOME", str(home.resolve()))
    code, _, errors = call(
        *SHORT[4:], "experiment=single", "workload=trace", "workload.path=~/t.csv"
    )
    assert (code, errors) == (0, "")


def test_what_was_hardly_meant_is_noted(call: Call) -> None:
    words = ("workload.client=a", "+slo.clients.a={ttft: 500}", "memory.swap_space_gib=64")
    code, told, _ = call(*SHORT, *words, "hydra.run.dir=out")
    assert code == 0
    assert "note: slo.clients.a.ttft=500 is 500 seconds, where " in told
    assert "note: memory.swap_space_gib=64 changes nothing: " in told


def test_a_log_in_milliseconds_since_1970(call: Call) -> None:
    rows = (f"{1.76e12 + 400 * row},100,20,60,700" for row in range(40))
    Path("log.csv").write_text("\n".join([LOG, *rows]))
    code, _, errors = call("experiment=calibrate", "requests=log.csv", "tracking=none")
    assert code == 1
    assert errors == (
        "pagedsim: log.csv: half of its answers take 33.7 s a token and more: times must be in "
        "seconds, and these look like milliseconds\n"
    )


def test_a_failed_study_binds_no_folder(call: Call) -> None:
    Path("log.csv").write_text("\n".join([LOG, *(f"{row},100,20,0.06,0.7" for row in range(40))]))
    there = "tracking=none", "report=false", "hydra.run.dir=out"
    code, _, errors = call("experiment=calibrate", "requests=nowhere.csv", *there)
    assert (code, errors) == (1, "pagedsim: requests=nowhere.csv: there is no such file\n")
    code, _, errors = call(*SHORT, *there[2:])
    assert (code, errors) == (0, "")
    code, _, errors = call(*SHORT, "server.max_seqs=7", *there[2:])
    assert "has a study with server.max_seqs=256, not 7" in errors


def test_a_full_disk_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(of_job, "write_run", full)
    code, _, errors = call(*SHORT, "jobs=1", "hydra.run.dir=out")
    assert (code, errors) == (
        1,
        "pagedsim: out/runs/run/seed-0: cannot be written: No space left on device\n",
    )


def test_a_degree_missing_from_a_fit_is_one(call: Call, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("pyarrow")
    Path("log.csv").write_text("\n".join([LOG, *(f"{row},100,20,0.06,0.7" for row in range(30))]))
    facts = {
        **{"model": "qwen3-30b-a3b", "hardware": "h100", "tensor_parallel": 1},
        **{"kv_cache_dtype": "auto", "quantization": "none", "stack": "vllm-0.33"},
        **{"batching": "Unified", "async_scheduling": False, "expert_parallel": 2},
    }
    fit = {"constants": {"front_ms": 1}, "server": facts, "largest": {}, "source": "a.csv"}
    Path("fit.json").write_text(json.dumps({**fit, "undecided": []}))
    code, told, errors = call(
        *("experiment=predict", "fit=fit.json", "requests=log.csv", "model=qwen3-30b-a3b"),
        *("hardware=h100", "batching=unified", "tracking=none", "report=false"),
    )
    assert (code, errors) == (0, "")
    assert "fitted for expert_parallel=2, but expert_parallel=1 is predicted" in told
    assert "None" not in told


def test_seeds_without_effect_on_an_arm_are_noted(call: Call) -> None:
    rows = (f"{0.2 * row},{50 + row},8" for row in range(20))
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    Path("t.csv").write_text("\n".join([header, *rows]))
    code, told, errors = call(
        *("experiment=compare", "workload=trace", "workload.path=t.csv", "seeds=3"),
        'study.arms={a: ["policy=fcfs"], b: ["policy=sjf", "predictor=noisy"]}',
        *SHORT[4:],
    )
    assert (code, errors) == (0, "")
    assert "missing:" not in told
    assert (
        "note: arms are compared under seed 0: without anything drawn at random, some were served "
        "under it alone, so 2 complete runs of the others are left out\n"
    ) in told


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ((), "an overload: latencies grow with the length of the run"),
        (
            ("fleet.failures=[{replica: 0, at: 1, for: 60}]",),
            "an overload, or the work that outages of replicas left (fleet.failures)",
        ),
    ],
)
def test_outages_are_named_beside_load(call: Call, words: tuple[str, ...], cause: str) -> None:
    code, told, _ = call(
        *("experiment=single", "workload.rate=60", "workload.requests=600", "fleet.replicas=2"),
        *("server.max_seqs=64", *words, *SHORT[3:]),
    )
    assert code == 0
    assert f"requests were not completed when the last one arrived, {cause}; " in told


@pytest.mark.slow
def test_a_sweep_prints_the_notes_of_its_jobs_once(call: Call) -> None:
    Path("t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n1,5,2\n2,5,2\n"
    )
    words = "experiment=single", "workload=trace", "workload.path=t.csv", *SHORT[3:]
    varied = "workload.rate=2,4", "memory.block_size=8,16"
    code, told, errors = call("-m", *words, *varied, "hydra.sweep.dir=out")
    assert (code, errors) == (0, "")
    notes = [line for line in told.splitlines() if line.startswith("note: ")]
    assert notes[:2] == [
        f"note: job {jobs}: the trace's 1 requests/s are served at {rate} (rate={rate})"
        for jobs, rate in (("0, 1", 2), ("2, 3", 4))
    ]
    assert notes[2].startswith("note: simulated kernels take the same time with any block size;")


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("server.max_model_len=20",),  # no request can be served
        ("experiment=compare", "study.arms={a: ['policy=fcfs'], b: ['workload.rate=-1']}"),
    ],
)
def test_what_cannot_run_leaves_nothing(call: Call, words: tuple[str, ...]) -> None:
    """And an arm that could run has not begun."""
    code, told, errors = call(*SHORT, *words)
    assert (code, told, errors.count("\n")) == (1, "", 1)
    assert not [path for path in Path().rglob("*") if path.is_file()]


def test_verbose_raises_the_error(call: Call) -> None:
    with pytest.raises(ConfigError, match="policy=lifo"):
        call("policy=lifo", "hydra.verbose=true")


def test_verbose_shows_the_traceback_of_a_run(call: Call) -> None:
    Path("faulty.py").write_text(
        "from pagedsim.core import Policy\n\nclass Faulty(Policy):\n"
        "    def rank(self, request, state):\n        return 1 / 0\n"
    )
    code, _, errors = call(*SHORT, "policy._target_=faulty.Faulty", "hydra.verbose=true")
    first, *lines, last = errors.splitlines()
    assert code == 1 and first == "Traceback (most recent call last):"
    assert "    return 1 / 0" in lines
    assert last.startswith("pagedsim: policy=faulty.Faulty failed")
