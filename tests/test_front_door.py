"""The command as a whole: what it prints and leaves, that it can be stopped and goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from pagedsim.run.provenance import built, in_words
from tests.conftest import Call

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("requests.parquet", "steps.parquet", "summary.json")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
QUICK = ("tracking=none", "report=false", "workload.requests=40", "workload.rate=20")


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pagedsim", *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


# -- the manual page, and what else Hydra shows ----------------------------------------------------


def test_help_is_a_manual_page(call: Call) -> None:
    code, page, errors = call("--help")
    assert (code, errors) == (0, "")
    assert max(map(len, page.splitlines())) <= 96
    for word in ("USAGE", "GROUPS", "SETTINGS", "EXAMPLES", "RESULTS"):
        assert f"\n{word}" in page
    words = set(re.split(r"[\s,*]+", page))
    for option in ROOT.glob("conf/*/*.yaml"):
        assert {option.parent.name, option.stem} <= words
    assert "fcfs_vs_priority*" in page
    assert "$" not in page


@pytest.mark.parametrize(
    ("command", "least"), [pytest.param((), 7, marks=pytest.mark.slow), (("serve",), 5)]
)
def test_every_example_of_a_manual_page_composes(
    call: Call, command: tuple[str, ...], least: int
) -> None:
    _, page, _ = call(*command, "--help")
    begin = " ".join(("  python -m pagedsim", *command))
    lines = [line for line in page.replace("\\\n", " ").splitlines() if line.startswith(begin)]
    examples = [shlex.split(line)[3 + len(command) :] for line in lines]
    left_out = {"-m", "...", "--cfg", "--config-dir", "policies", "cite", "figures"}
    examples = [words for words in examples if not left_out & set(words)]
    assert len(examples) >= least
    for words in examples:
        code, _, errors = call(*command, "--cfg", "job", *words)
        assert (code, errors) == (0, ""), words


@pytest.mark.parametrize("command", [("experiment=single",), ("serve",)], ids=["study", "serve"])
def test_the_settings_of_a_manual_page_are_the_configuration_s(
    call: Call, command: tuple[str, ...]
) -> None:
    _, page, _ = call(*command, "--help")
    config = OmegaConf.create(call(*command, "--cfg", "job")[1])
    shown = re.findall(r"^    ([a-z_.]+)=(\S+)  ", page, re.MULTILINE)
    assert len(shown) > 15
    for key, value in shown:
        there = OmegaConf.select(config, key)
        assert value == ("null" if there is None else str(there).lower()), key


# -- a run -----------------------------------------------------------------------------------------


def test_the_default_ends_with_a_table_a_report_and_plots(call: Call) -> None:
    load = ("workload.requests=300", "server.max_seqs=16")
    code, text, errors = call("seeds=2", *load, "hydra.run.dir=out")
    assert (code, errors) == (0, "")
    assert "Against fcfs, priority" in text
    assert "results   out\nreport    out/report.html\ntimeline  out/timeline.json" in text
    assert "tracking  out/wandb  (5 runs; `wandb sync` uploads them)" in text
    out = Path("out")
    assert {path.name for path in out.iterdir()} == {
        *("comparison.csv", "config.yaml", "plots", "report.html", "result.json"),
        *("runs", "table.tex", "timeline.json", "wandb"),
    }
    assert {path.stem for path in (out / "plots").iterdir()} >= {"latency", "load", "requests"}
    for arm in ("fcfs", "priority"):
        for seed in (0, 1):
            run = out / "runs" / arm / f"seed-{seed}"
            preempted = json.loads((run / "summary.json").read_text())["preemptions"] > 0
            extra = ["preemptions.parquet"] if preempted else []
            assert {path.name for path in run.iterdir()} == {*TABLES, "run.json", *extra}


def test_results_lie_in_a_folder_named_after_time_and_experiment(call: Call) -> None:
    code, text, _ = call("experiment=single", "jobs=1", "seeds=1", *QUICK)
    assert code == 0
    [folder] = re.findall(r"^results   (\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-single", folder)
    assert Path(folder, "runs/run/seed-0/steps.parquet").is_file()


def test_cut_and_rejected_requests_are_noted_once_and_recorded(call: Call) -> None:
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    rows += ["0,100,100", "1,900,50", "2,100,700", "3,100,10"]
    Path("trace.csv").write_text("\n".join(rows) + "\n")
    code, text, _ = call(
        *("experiment=single", "workload=trace", "workload.path=trace.csv", "jobs=1"),
        *("server.max_model_len=512", "workload.max_len=800", "hydra.run.dir=out"),
        *("tracking=none", "report=false", "seeds=2"),
    )
    assert code == 0
    notes = [
        "1 of 4 requests were cut to max_len=800 tokens in all",
        "1 of 4 answers were cut at max_model_len=512 tokens",
        "1 of 4 requests were rejected; the first, 1: prompt of 750 tokens: max_model_len is 512",
    ]
    assert [line for line in text.splitlines() if line.startswith("note: ")] == [
        "note: under every seed the workload is the same, so each arm is run once; "
        "workload.resample=SECONDS draws windows of the trace for each",
        *(f"note: {note}" for note in notes),
    ]
    recorded = json.loads(Path("out/runs/run/seed-0/summary.json").read_text())["notices"]
    assert recorded[1] == {
        "what": "answers were cut at max_model_len=512 tokens",
        **{"count": 1, "of": 4, "more": ""},
    }


# -- the same bytes --------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in TABLES
        for path in sorted(folder.rglob(name))
    }


def test_the_same_seed_gives_the_same_bytes(call: Call, tmp_path: Path) -> None:
    """Whatever the process, how many there are, and whether quiet steps are planned in one go."""
    words = (
        *("experiment=preemption", "seeds=2", "tracking=none", "report=false"),
        *("workload.requests=80", "workload.rate=20", "memory.blocks=400"),
    )
    done = command(tmp_path, *words, "jobs=2", "hydra.run.dir=one")
    assert (done.returncode, done.stderr) == (0, "")
    for name, more in {"here": "jobs=1", "slow": "backend.fast_forward=false"}.items():
        assert call(*words, "jobs=1", more, f"hydra.run.dir={name}")[0] == 0
    one = tables(tmp_path / "one")
    assert len(one) == 4 * 2 * len(TABLES)
    assert tables(tmp_path / "here") == one
    assert tables(tmp_path / "slow") == one
    steps = pq.read_table(tmp_path / "one/runs/swap/seed-0/steps.parquet")
    assert sum(steps["preempted"].to_pylist()) > 0


# -- stopping and going on -------------------------------------------------------------------------

LONG = (
    "experiment=compare",
    "study.arms={short: ['workload.requests=20'], long: ['workload.requests=400000']}",
    *("workload.rate=20", "seeds=1", "tracking=none", "jobs=2", "hydra.run.dir=out"),
)


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command as the head of a process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "pagedsim", *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("signal_to", "number"),
    [
        ("group", signal.SIGINT),  # a Ctrl-C
        pytest.param("parent", signal.SIGTERM, marks=pytest.mark.slow),  # `kill`
    ],
)
def test_a_stopped_study_leaves_its_complete_runs(
    tmp_path: Path, signal_to: str, number: signal.Signals
) -> None:
    process = begin(tmp_path, *LONG)
    out = tmp_path / "out"
    wait_for(out / "runs/short/seed-0/run.json")
    time.sleep(0.3)  # the long one is under way
    (os.killpg if signal_to == "group" else os.kill)(process.pid, number)
    text, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == (
        "pagedsim: interrupted: 1 of 2 runs is complete, and in the report; 1 more left the tables "
        "of what they had so far; the same command with hydra.run.dir=out goes on from there\n"
    )
    assert "report    out/report.html" in text
    assert "1 of 2 runs is complete" in (out / "report.html").read_text()
    partial = out / "runs/long/seed-0"
    assert json.loads((partial / "summary.json").read_text())["partial"] is True
    assert not (partial / "run.json").exists()
    states = pq.read_table(partial / "requests.parquet")["state"].to_pylist()
    assert {"finished", "unfinished"} <= set(states)
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_a_single_process_stops(tmp_path: Path) -> None:
    process = begin(tmp_path, *LONG, "jobs=1", "report=false")
    wait_for(tmp_path / "out/runs/short/seed-0/run.json")
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("pagedsim: interrupted: 1 of 2 runs is complete")
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    process = begin(tmp_path, *LONG, "seeds=2")
    wait_for(tmp_path / "out/runs/short/seed-0/run.json")
    time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "a process died, perhaps for want of memory; fewer jobs= take less" in errors
    assert "Traceback" not in errors


# -- sweeps ----------------------------------------------------------------------------------------


def test_a_sweep_ends_with_a_table_and_names_what_failed(call: Call) -> None:
    code, text, errors = call(
        *("-m", "experiment=single", "memory.block_size=8,16", "workload.rate=5,-1", "seeds=1"),
        *("tracking=none", "report=false", "hydra.sweep.dir=out", "workload.requests=20"),
        "hydra/launcher=basic",
    )
    assert code == 1
    assert errors.splitlines() == [
        f"pagedsim: job {job} (memory.block_size={size}, workload.rate=-1): "
        "workload.rate=-1: must be a number above 0"
        for job, size in ((1, 8), (3, 16))
    ]
    assert re.search(r"^job +block_size +rate ", text, re.MULTILINE)
    assert re.search(r"^0 +8 +5 ", text, re.MULTILINE)
    assert re.search(r"^2 +16 +5 ", text, re.MULTILINE)
    assert text.splitlines()[-2:] == ["results   out", "table     out/sweep.csv"]
    assert Path("out/2/runs/run/seed-0/steps.parquet").is_file()
    header, *rows = Path("out/sweep.csv").read_text().splitlines()
    assert header.startswith("job,memory.block_size,workload.rate,ttft_mean,ttft_p99,")
    assert len(rows) == 2


def test_options_may_stand_anywhere(call: Call) -> None:
    code, text, _ = call("experiment=single", "--help", "seeds=1")
    assert code == 0
    assert "USAGE" in text
    code, text, _ = call("experiment=single", "--cfg", "job", "seeds=7", "--resolve")
    assert code == 0
    assert OmegaConf.create(text).seeds == 7


def test_the_version_is_ours(call: Call) -> None:
    assert call("--version")[1] == f"pagedsim {in_words()}, {built()}\n"


def test_settings_that_a_replay_does_not_read_are_noted(call: Call) -> None:
    words = ("run=nowhere", "batching=static", "server.max_seqs=3", "hydra.run.dir=here")
    _, said, _ = call("experiment=replay", *words)
    assert said.splitlines() == [
        f"note: {word} changes nothing: the settings are those of run=nowhere"
        for word in words[1:3]
    ]


def test_the_workload_suggested_for_an_unreachable_mean_composes(call: Call) -> None:
    words = ("experiment=single", "workload.max_len=301", "workload.requests=20", "seeds=1")
    quiet = ("tracking=none", "report=false", "hydra.run.dir=out")
    code, _, errors = call(*words, *quiet)
    assert code == 1 and "raise max_len, or take workload=fixed" in errors
    instead = errors.rpartition("or take ")[2].split()
    assert call(*words, *instead, *quiet)[0] == 0
