"""Every command of every benchmark at its smallest size, bad words, and the table of GPUs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # used by some of them

from experiments import benchmarks
from experiments.benchmarks import device, engine, harness, servers, table
from experiments.benchmarks.layers import PLACES, TREE, Place, layer_of, place
from experiments.benchmarks.shapes import BASE, DECODE, HEADLINES
from experiments.benchmarks.simulator import run_vidur, vidur_words
from pagedsim.metrics.files import read_json, write_json

ROOT = Path(__file__).parents[3]
FOLDER = Path(benchmarks.__path__[0])
QUICK = "--device cpu --quick --rounds 1 --resume"
SMALLEST = {
    "scheduler steps": "--running 2 --steps 3 --rounds 1",
    "scheduler policies": "--running 4 --waiting 8 --steps 3 --rounds 1",
    "scheduler policy_runs": "--requests 5 --rounds 1 --only fcfs continuum mlfq",
    "simulator loop": "--requests 5 --rounds 1",
    "table": "",
    "swap": QUICK,
    "products products": QUICK,
    "products experts": QUICK,
}
"""The smallest settings of each command."""
SLOW = {
    "simulator scale": "--load calm --requests 5",
    "simulator fleet": "--replicas 2 --requests 10 --routers round_robin",
    "layers layers": "--only 'short requests' --requests 300 --rounds 1 --functions 2",
    "layers commands": "--rounds 1 --only study --with "
    "seeds=1 workload.requests=5 tracking=none report=false",
    "serving rates": "--only sim --streams 4 --repeats 1",
    "serving soak": "--minutes 0.05",
    "serving greedy": "--requests 2 --tokens 100 --seconds 0.5",
    "clients": "--requests 4 --rate 4 --prompt 64 --output 8",
    "host step": "--running 1 3 --steps 4 --rounds 2",
    "host tables": "--running 1 3 --blocks 400 --steps 32 --rounds 1",
    "engine engine": "--prompts 5 --tokens 6 --repeats 1",
    "engine cpu": "--model tiny --batches 1,2 --rounds 1",
    "servers": "--device cpu --prompts 3 --tokens 4 --repeats 1",
    "kernels": QUICK,
    "profile": QUICK,
}
ELSEWHERE = {
    "simulator vidur": "test_commands.py",
    "compiled kernels": "test_tuning.py",
    "compiled sampling": "test_tuning.py",
    "gpu": "test_gpu_hour.py",
    "step": "test_wrong.py",
    "tune attention": "test_tuning.py",
    "tune products": "test_tuning.py",
}
"""Commands that another test runs."""
NUMBERS = {
    harness.positive_int: ("a whole number of at least 1", ("0", "1.5", "nan", "few", "")),
    harness.positive_ints: ("a whole number of at least 1", ("0", "8,0", "few", "")),
    harness.non_negative_int: ("a whole number of at least 0", ("-1", "1.5", "few", "")),
    harness.positive_float: ("a number above 0", ("0", "-1", "nan", "inf", "few", "")),
    harness.existing_file: ("there is no such file", ("not/there.csv",)),
}
"""What an option accepts, by its type, and words that it refuses."""


def commands() -> list[str]:
    """The benchmarks in the tree: modules with a `main`, by command where there are several."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^(def main\(|main = )", text, re.MULTILINE):
            several = re.search(r"^COMMANDS = \{(.*?)\}", text, re.MULTILINE | re.DOTALL)
            names = re.findall(r'"(\w+)":', several[1]) if several else []
            found += [f"{path.stem} {one}" for one in names] or [path.stem]
    return found


def run(line: str, *more: str) -> None:
    name, *words = re.findall(r"'.*?'|\S+", line)
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    module.main([*(word.strip("'") for word in words), *more])


def test_every_command_is_run() -> None:
    every = {*SMALLEST, *SLOW, *ELSEWHERE}
    assert set(commands()) == every, "add the smallest settings of a new command"
    assert all(Path(__file__).with_name(name).exists() for name in ELSEWHERE.values())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *SMALLEST.items(),
        *(pytest.param(*one, marks=pytest.mark.slow, id=one[0]) for one in SLOW.items()),
    ],
)
def test_a_command_ends_with_its_table(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command == "clients":
        pytest.importorskip("tokenizers")
    monkeypatch.setattr(harness, "TIMEOUTS", 10)  # they take longer than the rest
    out = ["--out", str(tmp_path)] if "device" in words or command == "host step" else []
    run(f"{command} {words}", *out)
    printed = capsys.readouterr().out
    assert printed.count("\n") > 0 and "nan" not in printed
    for path in tmp_path.glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "driver", "torch", "triton", "date", "code", "tiles"} <= set(kept)
        assert str(tmp_path) not in kept["command"]
    if words == QUICK and command != "profile":  # nothing is measured again
        (path,) = tmp_path.glob("*.json")
        run(f"{command} {words}", *out)
        assert json.loads(path.read_text(encoding="utf-8")) == kept
    if command == "engine cpu":
        for form in ("float32", "bfloat16", "int8"):
            assert f"tiny, {form}, threads=1" in printed
    if command == "host tables":  # one long context adds no bytes
        sent = [line.split("|")[3] for line in printed.splitlines()[3:]]
        assert len(sent) == 4 and sent[0] == sent[1] and sent[2] == sent[3]
    if command == "clients":
        rows = re.findall(r"^\| bench \| (\S+)", printed, re.MULTILINE)
        assert rows == ["TTFT", "ITL", "E2E", "tokens/s"]


# -- bad words -------------------------------------------------------------------------------------


class Parsed(Exception):
    """A command has made its parser."""


@pytest.mark.parametrize("command", commands())
def test_bad_words_end_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(parser: ArgumentParser, *given: Any) -> None:
        raise Parsed(parser)

    with monkeypatch.context() as patched, pytest.raises(Parsed) as made:
        patched.setattr(ArgumentParser, "parse_known_args", parse)
        run(command)
    parser = made.value.args[0]
    for action in parser._actions:
        assert action.type not in (int, float), action.option_strings
        allowed, bad = NUMBERS.get(action.type, ("", ()))
        for text in bad:
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([action.option_strings[0], text])
            assert ended.value.code == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert f"argument {action.option_strings[0]}: {text.rpartition(',')[2]}: " in error
            assert allowed in error


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("engine cpu --forms int4", "--forms=int4: must be of float32, bfloat16, int8"),
        ("engine cpu --model none.gguf --forms float32", "model=none.gguf: no such file"),
        ("scheduler polices", "unrecognized arguments: polices; --help lists what there is"),
        (f"simulator vidur --vidur nowhere --python no --trace {__file__}",
         "--vidur nowhere: no checkout of Vidur, it has no vidur/main.py"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_ends_in_one_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    said = str(ended.value) if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert line in said and said.strip().count("\n") == 0


# -- Vidur, and where time goes --------------------------------------------------------------------


def test_a_simulation_of_vidur_is_timed(tmp_path: Path) -> None:
    """By a stand-in for Vidur."""
    for name, text in {
        "vidur/main.py": "",
        "vidur/config/__init__.py": "class SimulationConfig:\n"
        "    seed = 1\n    create_from_cli_args = classmethod(lambda cls: cls())",
        "vidur/utils/random.py": "def set_seeds(seed): pass",
        "vidur/entities/__init__.py": "class Batch:\n    _id = 6",
        "vidur/simulator.py": "class Simulator:\n    _time = 2.5\n"
        "    def __init__(self, config): pass\n    def run(self): print('runs')",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = vidur_words(Path("trace.csv"), ["--seed", "2"])
    assert words[-2:] == ["--seed", "2"] and "--no-metrics_config_store_plots" in words
    took, run = run_vidur(tmp_path, Path(sys.executable), words)
    assert took >= run.seconds >= 0 and run[1:] == (7, 2.5)


def test_a_sample_of_a_stack_counts_for_one_layer() -> None:
    assert all(Path(TREE, name).exists() for name in PLACES)
    core = f"{TREE}pagedsim/core/scheduler.py"
    plan = Place("scheduler", "pagedsim/core/scheduler.py: plan")
    assert place([("/usr/lib/numpy/core.py", "sum"), (core, "<listcomp>"), (core, "plan")]) == plan
    assert place([(f"{TREE}.venv/lib/numpy/core.py", "sum"), (core, "plan")]) == plan
    imported = place([(core, "<module>"), ("<frozen importlib._bootstrap>", "_load")])
    assert imported == Place("imports", "pagedsim/core/scheduler.py")
    assert layer_of("pagedsim/sim/cost/work.py", "total_work") == "summary"
    assert layer_of("pagedsim/metrics/recorder.py", "step") == "recorder"
    assert layer_of("pagedsim/metrics/recorder.py", "requests_table") == "tables"


# -- the table of results on GPUs ------------------------------------------------------------------


def cells(text: str) -> dict[str, list[str]]:
    """The columns of a table, by their head."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    head, _, *rows = lines
    return {name: [row[at] for row in rows] for at, name in enumerate(head)}


def test_the_page_has_the_table() -> None:
    page = (ROOT / "experiments" / "results" / "performance.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- benchmarks:gpu -->\n((?:\|.*\n)+)", page)
    assert marked, "the page has the table after the marker benchmarks:gpu"
    assert marked[1].rstrip("\n") == table.written(table.measured(device.RESULTS))


def as_if(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Give tiny cases the names of the headlines, and a CPU that of a GPU."""
    content |= {"device": "NVIDIA H200", "capability": [9, 0]}
    if name in ("kernels", "peers"):
        content["cases"] = [
            {**content["cases"][0], "case": str(case), "seconds": 1.0 + 0.05 * (case == DECODE)}
            for case in HEADLINES
        ]
    if name == "servers":
        content |= {"absent": {"sglang": "not installed"}}
        content |= {"rates": {servers.AHEAD: 300.0, "vllm": 200.0}}
    for one in content.get("swaps", ()):
        one["model"] = BASE
    for one in content.get("arms", ()):
        one["graphs"] = True
    return content


@pytest.mark.slow
def test_every_cell_is_filled_from_what_the_benchmarks_write(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    out, quick = f"--out {folder}", "--device cpu --quick --rounds 1"
    for line in (
        *(f"kernels {quick} {out} --peers", f"kernels {quick} --name peers {out} --peers sdpa"),
        *(f"swap {quick} {out}", f"swap {quick} {out} --kv-cache-dtype fp8_e4m3"),
        *(f"step {quick} {out}", f"profile {quick} {out}", f"servers --device cpu {out}"),
        f"engine --prompts 3 --tokens 3 --repeats 1 {out}",
        f"host --running 64 --steps 2 --rounds 1 {out}",
    ):
        run(line)
    for name in table.FILES:
        write_json(folder / f"{name}.json", as_if(name, read_json(folder / f"{name}.json")))
    kept = table.measured(tmp_path)
    columns = cells(table.written(kept))
    assert all(columns["H200"]) and "failed" not in columns["H200"]
    assert set(columns["H100"]) == {""}
    told = dict(zip(columns[""], columns["H200"], strict=True))
    assert told["the same, blocks of 16 instead of 128: time"] == "+5.0%"
    times = kept["H200"]["step"]["arms"][0]["to_limit"]
    assert told[next(what for what in told if what.startswith("decode step"))] == f"{times:.2f} ×"
    rates = kept["H200"]["engine"]["rates"]
    peer = told["tokens a second: times transformers' `generate_batch`, a weak peer"]
    assert peer == f"{rates['pagedsim'] / rates[engine.PEER]:.1f} ×"
    assert told["the same, `async_scheduling`: times vLLM's"] == "1.50 ×"
    assert told["the same, `async_scheduling`: times SGLang's"] == "not installed"
    fastest = "decode attention, 64 × 4,096: the fastest peer's time over ours"
    assert told[fastest].endswith(" × (sdpa)")
    # Cells of wrong results are not empty.
    wrong: dict[str, Any] = {name: dict(content) for name, content in kept["H200"].items()}
    wrong["servers"] = {"absent": {}, "rates": {}}
    for content in wrong.values():
        for key in ("cases", "swaps", "arms", "steps"):
            content[key] = [
                {name: value for name, value in one.items() if name not in ("seconds", "out", "in")}
                for one in content.get(key, ())
            ]
    del wrong["engine"]["rates"], wrong["profile"]["seconds"]
    assert set(cells(table.written({"H200": wrong}))["H200"]) == {"failed"}
    columns = cells(table.written({"A100-SXM4-80GB": wrong, "H100 80GB HBM3": wrong}))
    assert list(columns)[3:] == ["H200", "H100 80GB HBM3", "A100-SXM4-80GB"]
