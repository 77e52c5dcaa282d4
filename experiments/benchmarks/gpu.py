"""All measurements of a GPU, in slices: tests, tiles, studies, and every benchmark of a device.

    python -m pagedsim.experiments.benchmarks.gpu --minutes 8
    python -m pagedsim.experiments.benchmarks.gpu --device cpu --out FOLDER
    python -m pagedsim.experiments.benchmarks.gpu --merge FOLDER  (without a GPU)

The parts run one after another, each in a process of its own; a failed part does not stop the
others. Results are in a folder, by default experiments/results/<GPU>, which is all that the same
command needs to continue on another machine; its gpu.json has the states of parts. A part runs
again if its command, the code of the engine and the kernels or, for kernels, the tuned tiles have
changed. Tiles go into kernels/tuned.json as soon as they are known; `--merge` puts those of a
folder there. Studies need simpy and hydra, and are left out without them.

The exit code is 0 when all is done, 3 when the time is over, and 1 if the rest has failed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.attention import PACKAGES, require
from pagedsim.experiments.benchmarks.device import OPTIONS, facts, folder_named, tiles
from pagedsim.experiments.benchmarks.device import gpu as require_gpu
from pagedsim.experiments.benchmarks.harness import NAME, ROOT, digest, keep, main_of, parse, table
from pagedsim.experiments.benchmarks.shapes import BASE
from pagedsim.kernels import tuning
from pagedsim.metrics.files import read_json

GOES_ON = 3
"""The exit code of a slice with parts left."""
DONE, FAILED, CUT, BEGUN, AHEAD = "done", "failed", "out of time", "begun", "not begun"
"""States of a part: the third was stopped by its own limit, and may hang; the fourth by the end of
the slice."""


def gpu(words: Sequence[str]) -> None:
    """Run the parts that are not done, and print the states of all."""
    names = [part.name for part in parts("cuda")]
    options = {
        **{name: OPTIONS[name] for name in ("--device", "--out")},
        "--minutes": 25.0,
        "--merge": {"type": Path, "metavar": "FOLDER", "help": "merge its tiles, nothing else"},
        "--parts": {"nargs": "+", "choices": names, "help": "these alone, in this order"},
    }
    asked = parse(__doc__, words, options)
    if asked.merge is not None:
        merge(asked.merge)
        return
    if asked.device == "cuda":
        require_gpu("; --device cpu --out FOLDER goes the whole way at tiny sizes")
    elif asked.out is None:
        sys.exit("--out: a CPU's results are written nowhere by themselves; give a folder")
    about = facts(torch.device(asked.device), "gpu", words)
    place = (asked.out or folder_named(about["device"])).resolve()
    merge(place)
    ledger = Ledger(place, about)
    wanted = chosen(parts(asked.device), asked.parts or names, torch.device(asked.device))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(wanted, ledger, asked.minutes * 60)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    rows = [
        [part.name, ledger.state(part), str(ledger.parts.get(part.name, {}).get("seconds", ""))]
        for part in wanted
    ]
    print(f"{ledger.device}\n\n{table(['part', '', 'seconds'], rows)}", flush=True)
    states = {ledger.state(part) for part in wanted}
    if states - {DONE}:
        print("the same command goes on with what is not done", file=sys.stderr)
    sys.exit(GOES_ON if states - {DONE, FAILED} else int(FAILED in states))


def chosen(every: Sequence[Part], names: Sequence[str], device: torch.device) -> list[Part]:
    """The parts of these names, in their order; without studies, and attention by other packages,
    where those are not installed."""
    known = {part.name: part for part in every}
    wanted = [known[name] for name in names if name in known]
    for name in PACKAGES:
        part = known.get(f"headlines, {name}")
        try:
            require(name, device)
        except ConfigError as error:
            if part is not None and part in wanted:
                wanted.remove(part)
                print(f"{part.name}: left out, {error}", flush=True)
    if all(importlib.util.find_spec(name) for name in ("simpy", "hydra")):
        return wanted
    print("studies are left out: they need simpy and hydra-core", flush=True)
    return [part for part in wanted if part.words[0] != FRONT_DOOR]


def run(wanted: Sequence[Part], ledger: Ledger, budget: float) -> None:
    """Run the parts that are not done, each once, for `budget` seconds. Those that failed before,
    or may hang, come last."""
    end = time.monotonic() + budget
    tried: list[tuple[str, dict[str, str]]] = []
    while True:
        seconds = end - time.monotonic()
        for part in sorted(wanted, key=lambda part: ledger.state(part) in (FAILED, CUT)):
            attempt = part.name, part.identity(ledger.device)
            if ledger.state(part) != DONE and part.least <= seconds and attempt not in tried:
                break
        else:
            return
        tried.append(attempt)
        print(f"{part.name}: {part.command}", flush=True)
        ledger.put(part, BEGUN)
        code, taken, said = carried_out(part, ledger.place, min(seconds, part.most))
        if code == 0:
            ledger.put(part, DONE, seconds=taken)
        else:
            stopped = CUT if seconds >= part.most else BEGUN
            ledger.put(part, stopped if code is None else FAILED, seconds=taken, said=said)
        merge(ledger.place)


def merge(place: Path) -> None:
    """Merge the tuned tiles of a folder into the table that kernels read."""
    path = place / tuning.PATH.name
    try:
        tuned = tuning.read(path) if path.exists() else []
    except (ValueError, KeyError, TypeError):  # killed as it was written
        print(f"{path}: is not whole, so its tiles are left out", file=sys.stderr)
        return
    if tuned:
        tuning.write([*tuning.read(), *tuned])


class Ledger:
    """The states of parts in one folder, on one GPU."""

    def __init__(self, place: Path, about: Mapping[str, Any]) -> None:
        """`about` are the facts of this run; exits with a line if the folder is of another GPU."""
        self.place, self.device, self._about = place, str(about["device"]), about
        path = place / "gpu.json"
        before: Any = read_json(path) if path.exists() else {"device": self.device}
        if before["device"] != self.device:
            sys.exit(
                f"--out {place}: is of {before['device']}, and this is {self.device}; give another"
            )
        self.parts: dict[str, dict[str, Any]] = before.get("parts", {})

    def state(self, part: Part) -> str:
        """Its state, with this code and these tiles."""
        known = self.parts.get(part.name, {})
        same = all(known.get(key) == value for key, value in part.identity(self.device).items())
        return str(known["state"]) if same else AHEAD

    def put(self, part: Part, state: str, **more: Any) -> None:
        """Set the state of a part; gpu.json is complete at any moment."""
        self.parts[part.name] = {**part.identity(self.device), "state": state, **more}
        keep(self.place, "gpu", {**self._about, "parts": self.parts})


# -- parts, in the order of what they tell ---------------------------------------------------------

FOLDER = "{out}"
"""In the words of a part, the folder of results, whose place varies."""
FRONT_DOOR = "pagedsim"
"""The first word of a study, which needs more packages."""
WORKERS = 8
KERNELS, ENGINE = "tests/kernels/test_", "tests/engine/test_"
"""Tests of kernels run in parallel, since most of their time they compile. Of the others some read
the GPU's free memory."""
TESTS = (
    *(
        f"{KERNELS}{name}.py"
        for name in ("gpu", "attention", "cache", "draw", "fused", "products", "others")
    ),
    *(f"{KERNELS}latents.py", f"{KERNELS}mixtures.py", f"{ENGINE}gpu.py"),
)


class Part(NamedTuple):
    """A command, run by this Python in a process of its own."""

    name: str
    words: tuple[str, ...]
    tiled: bool = False
    """Whether its results depend on tuned tiles."""
    least: float = 5.0
    """Seconds that must be left to begin it."""
    most: float = 600.0
    """Seconds in one slice."""

    @property
    def command(self) -> str:
        """The command in results."""
        return " ".join(["python", "-m", *self.words]).replace(FOLDER, "FOLDER")

    def identity(self, device: str) -> dict[str, str]:
        """What must be equal for earlier results to be valid."""
        known = {"command": self.command, "code": digest()}
        return {**known, "tiles": tiles(device)} if self.tiled else known


def parts(device: str) -> list[Part]:
    """All parts, in order; on a CPU tiny ones, begun however long they take, and none that tunes,
    which takes a GPU's clock."""
    tune = f"--rounds 5 --models {BASE} --table {FOLDER}/tuned.json"
    eight = "--kv-cache-dtype fp8_e4m3"
    if device == "cpu":
        sizes, steps = "--device cpu --rounds 2 --resume", "--running 1 64 --steps 20"
        few = "--prompts 8 --tokens 8"
        server = (
            "backend.device=cpu backend.clock=cpu server.max_seqs=2 backend.cache_tokens=256 "
            "backend.shrink=40"
        )
        validate = "study.repeats=1 study.seconds=0.1"
    else:
        sizes, steps, few = "--rounds 10 --resume", "", ""
        server = f"model={BASE} backend.model=null backend.device=cuda server.max_seqs=64"
        server += " backend.cache_tokens=16384"
        validate = "scale=full backend.shrink=2 study.repeats=3 study.seconds=5"
    raced = f"kernels {sizes} --headlines --attention"
    every = [
        _benchmark("headlines", f"kernels {sizes} --headlines", 45),
        _study("calibrate", server),
        _study("validate", f"{server} {validate}"),
        _benchmark("launch", f"launch {sizes}", 90),
        _benchmark("step", f"step {sizes}", 90),
        _tuner("tiles, decode, 8 bits", f"{tune} --kernels decode {eight}"),
        _tuner("tiles, decode", f"{tune} --kernels decode"),
        _tuner("tiles, prefill", f"{tune} --kernels prefill"),
        _tuner("tiles, prefill, 8 bits", f"{tune} --kernels prefill {eight}"),
        _benchmark("profile", f"step profile {sizes}", 60),
        _benchmark("host", f"host --device {device} {steps}", 45, tiled=False),
        _benchmark("swap", f"kernels swap {sizes}", 45, tiled=False),
        *map(_tests, TESTS),
        _benchmark("kernels", f"kernels {sizes}", 45),
        _benchmark("headlines, flashinfer", f"{raced} flashinfer", 45, tiled=False),
        _benchmark("headlines, fa", f"{raced} fa --block-size 256", 45, tiled=False),
        _benchmark("engine", f"engine --device {device} {few} --rounds 1", 120),
    ]
    if device == "cpu":
        return [part._replace(least=5.0) for part in every if "tiles" not in part.name]
    return every


def _study(name: str, words: str) -> Part:
    """An experiment on the engine by `python -m pagedsim`, in a folder of its name."""
    settings = f"experiment={name} backend=engine report=false tracking=none {words}"
    place = f"hydra.run.dir={FOLDER}/{name}"
    return Part(name, (FRONT_DOOR, *settings.split(), place), least=120)


def _benchmark(name: str, command: str, least: float, tiled: bool = True) -> Part:
    words = (*f"{NAME}.{command}".split(), "--out", FOLDER)
    return Part(name, words, tiled=tiled, least=least)


def _tuner(name: str, words: str) -> Part:
    return Part(name, (f"{NAME}.tune", *words.split()), least=120)


def _tests(path: str) -> Part:
    """A file of tests, without conftest.py, which needs simpy, hydra and wandb."""
    many = importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= WORKERS
    parallel = ("-n", str(WORKERS)) if many and path.startswith(KERNELS) else ()
    words = ("pytest", "-q", "-m", "gpu", "--noconftest", *parallel, path)
    return Part(path, words, least=120)


# -- one part --------------------------------------------------------------------------------------

TAIL, WIDTH = 30, 300
"""The last lines of output kept of a part that fails, and their characters."""
PR_SET_PDEATHSIG = 1
"""Has Linux kill a part if this process is killed, so that no later measurement runs beside it."""


def carried_out(part: Part, place: Path, seconds: float) -> tuple[int | None, float, list[str]]:
    """Run a part for so long at most, in a process that ends with this one: its exit code, None if
    it was stopped, its seconds, and its last lines."""
    words = [word.replace(FOLDER, str(place)) for word in part.words]
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    ended = partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL) if libc else None
    begun, code = time.monotonic(), None
    with TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=ended,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(seconds)
        finally:  # after Ctrl-C, too, with all processes that it started
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.seek(0)
            text = output.read().decode(errors="replace").replace(f"{ROOT}/", "")
            print(text, flush=True)
    lines = [line[:WIDTH] for line in text.splitlines()[-TAIL:]]
    return code, round(time.monotonic() - begun, 1), lines


main = main_of(__name__, gpu)
