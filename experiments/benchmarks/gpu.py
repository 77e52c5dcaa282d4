"""All measurements of a GPU, in the order of what they tell, for a machine that lasts minutes.

    python -m pagedsim.experiments.benchmarks.gpu --minutes 8
    python -m pagedsim.experiments.benchmarks.gpu --quick --out FOLDER  (without a GPU)
    python -m pagedsim.experiments.benchmarks.gpu --merge ARCHIVE  (at home)

The parts run one after another, each in a process of its own; a failed part does not stop the
others. Results are in a folder, by default experiments/results/<GPU>, which is all that the same
command needs to continue on another machine: its gpu.json has the states of parts, a log is beside
it for each. A part runs again unless it was done by the same command and the same code of engine
and kernels. Tuned tiles are written to the folder and to kernels/tuned.json as soon as they are
known. Studies need simpy and hydra; races of other packages' attention need those, and are left
out without.

`--merge` makes committed results of that folder, or of a .tar or .zip of it: its JSON files in
experiments/results/<GPU>, tiles in kernels/tuned.json, tables and figures on the pages that show
them; and it says which constants differ from those before.

The exit code is 0 when all is done, 3 when the time is over, and 1 if the rest has failed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.attention import PACKAGES, require
from pagedsim.experiments.benchmarks.device import OPTIONS, facts, folder_named
from pagedsim.experiments.benchmarks.device import gpu as require_gpu
from pagedsim.experiments.benchmarks.harness import NAME, ROOT, digest, keep, main_of, parse, table
from pagedsim.experiments.benchmarks.shapes import BASE
from pagedsim.kernels import tuning
from pagedsim.metrics.files import read_json

GOES_ON = 3
"""The exit code where parts are left."""
DONE, FAILED, STOPPED, LEFT = "done", "failed", "stopped", "not begun"
"""States of a part: the third by its own limit or by the end of the time."""


def gpu(words: Sequence[str]) -> None:
    """Run the parts that are not done, and print the states of all."""
    names = [part.name for part in parts("cuda")]
    options = {
        **{name: OPTIONS[name] for name in ("--device", "--out")},
        "--quick": {"action": "store_true", "help": "tiny sizes without a GPU: --device cpu"},
        "--minutes": 25.0,
        "--parts": {"nargs": "+", "choices": names, "help": "these alone, in this order"},
        "--merge": {"type": Path, "metavar": "ARCHIVE", "help": "commit its results, nothing else"},
    }
    asked = parse(__doc__, words, options)
    if asked.merge is not None:
        from pagedsim.experiments.benchmarks.merge import merge  # imports what all parts do

        merge(asked.merge)
        return
    device = "cpu" if asked.quick else asked.device
    if device == "cuda":
        require_gpu("; --quick --out FOLDER goes the whole way at tiny sizes")
    elif asked.out is None:
        sys.exit("--out: a CPU's results are written nowhere by themselves; give a folder")
    about = facts(torch.device(device), "gpu", words)
    place = (asked.out or folder_named(about["device"])).resolve()
    path = place / "gpu.json"
    before = read_json(path) if path.exists() else {"device": about["device"], "parts": {}}
    if before["device"] != about["device"]:
        sys.exit(f"--out {place}: is of {before['device']}, and this is {about['device']}")
    states: dict[str, dict[str, Any]] = before["parts"]
    tuning.add(place / tuning.PATH.name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a part ends with this process
    end = time.monotonic() + asked.minutes * 60
    wanted = chosen(parts(device), asked.parts or names, torch.device(device))
    for part in wanted:
        seconds = min(part.most, end - time.monotonic())
        if seconds > 0 and state(part, states) != DONE:
            print(f"{part.name}: {part.command}", flush=True)
            states[part.name] = {**part.identity, **carried_out(part, place, seconds)}
            keep(place, "gpu", {**about, "parts": states})
    rows = [
        [part.name, state(part, states), str(states.get(part.name, {}).get("seconds", ""))]
        for part in wanted
    ]
    print(f"{about['device']}\n\n{table(['part', '', 'seconds'], rows)}", flush=True)
    ended = {state(part, states) for part in wanted}
    if ended - {DONE}:
        print("the same command goes on with what is not done", file=sys.stderr)
    sys.exit(GOES_ON if ended - {DONE, FAILED} else int(FAILED in ended))


def chosen(every: Sequence[Part], names: Sequence[str], device: torch.device) -> list[Part]:
    """The parts of these names, in their order, without the races of packages that are not
    installed."""
    known = {part.name: part for part in every}
    wanted = [known[name] for name in names if name in known]
    for name in PACKAGES:
        part = known.get(f"headlines, {name}")
        if part in wanted:
            try:
                require(name, device)
            except ConfigError as error:
                wanted.remove(part)
                print(f"{part.name}: left out, {error}", flush=True)
    return wanted


def state(part: Part, states: Mapping[str, Mapping[str, Any]]) -> str:
    """The state of a part, with its command and code of today."""
    known = states.get(part.name, {})
    same = all(known.get(key) == value for key, value in part.identity.items())
    return str(known["state"]) if same else LEFT


# -- parts, in the order of what they tell ---------------------------------------------------------

FOLDER = "{out}"
"""In the words of a part, the folder of results, whose place varies."""
WORKERS = 8


class Part(NamedTuple):
    """A command, run by this Python in a process of its own."""

    name: str
    words: tuple[str, ...]
    most: float = 300.0
    """Seconds, after which it is stopped, so that it does not take those of the others."""

    @property
    def command(self) -> str:
        """The command in results."""
        return " ".join(["python", "-m", *self.words]).replace(FOLDER, "FOLDER")

    @property
    def identity(self) -> dict[str, str]:
        """What must be equal for earlier results to be valid."""
        return {"command": self.command, "code": digest()}


def parts(device: str) -> list[Part]:
    """All parts, in order; on a CPU tiny ones, and no tests, which need a GPU."""
    tiny = device == "cpu"
    sizes = "--device cpu --rounds 1" if tiny else "--rounds 10"
    server = f"model={BASE} backend.model=null backend.device=cuda server.max_seqs=64"
    server += " backend.cache_tokens=16384"
    validate = "scale=full backend.shrink=2 study.repeats=3 study.seconds=5"
    few = layer = ""
    if tiny:
        server = (
            "backend.device=cpu backend.clock=cpu server.max_seqs=2 backend.cache_tokens=256 "
            "backend.shrink=40"
        )
        validate, few = "study.repeats=1 study.seconds=0.1", "--prompts 3 --tokens 3"
        layer = "--layers 1 --prompts 16"
    tests = _tests("kernels", "tests/kernels"), _tests("the engine", "tests/engine/test_gpu.py")
    raced = f"kernels {sizes} --attention"
    races = (
        _benchmark("headlines, flashinfer", f"{raced} flashinfer"),
        _benchmark("headlines, fa", f"{raced} fa --block-size 256"),
    )
    return [
        _benchmark("headlines", f"kernels {sizes} --tune --headlines eight prefill"),
        _benchmark("launch", f"launch {sizes} {layer}"),
        _benchmark("more headlines", f"kernels {sizes} --tune --headlines prefills mixed decode"),
        *(() if tiny else races),
        _benchmark("profile", f"step profile {sizes}"),
        _benchmark("step", f"step {sizes}"),
        _study("validate", f"{server} {validate}"),
        _benchmark("host", f"host --device {device} --rounds 1 --running 64"),
        _benchmark("swap", f"kernels swap {sizes}"),
        _study("calibrate", server),
        *(() if tiny else tests),
        _benchmark("engine", f"engine --device {device} {few} --rounds 1"),
    ]


def _study(name: str, words: str) -> Part:
    """An experiment on the engine by `python -m pagedsim`, in a folder of its name."""
    settings = f"experiment={name} backend=engine report=false tracking=none {words}"
    return Part(name, ("pagedsim", *settings.split(), f"hydra.run.dir={FOLDER}/{name}"))


def _benchmark(name: str, command: str) -> Part:
    return Part(name, (*f"{NAME}.{command}".split(), "--out", FOLDER))


def _tests(of: str, path: str) -> Part:
    """Tests without conftest.py, which needs simpy, hydra and wandb. Those of kernels run in
    parallel, since most of their time they compile; of the others some read the GPU's free
    memory."""
    many = importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= WORKERS
    parallel = ("-n", str(WORKERS)) if many and of == "kernels" else ()
    return Part(f"tests of {of}", ("pytest", "-q", "-m", "gpu", "--noconftest", *parallel, path))


# -- one part --------------------------------------------------------------------------------------


def carried_out(part: Part, place: Path, seconds: float) -> dict[str, Any]:
    """Run a part for so long at most, in a process that ends with this one: its state and seconds.
    What it says goes to a file beside its results."""
    place.mkdir(parents=True, exist_ok=True)
    words = [word.replace(FOLDER, str(place)) for word in part.words]
    begun, path = time.monotonic(), place / f"{part.name}.log"
    with path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = FAILED if child.wait(seconds) else DONE
        except subprocess.TimeoutExpired:
            ended = STOPPED
        finally:  # after Ctrl-C, too, with all processes that it started
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            print(path.read_text(encoding="utf-8", errors="replace"), flush=True)
    return {"state": ended, "seconds": round(time.monotonic() - begun, 1)}


main = main_of(__name__, gpu)
