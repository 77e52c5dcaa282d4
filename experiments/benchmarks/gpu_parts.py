"""The parts of the measurement of a GPU, in the order of what they tell, and how one is run."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from experiments.benchmarks.device import digest, tiles, version_of
from experiments.benchmarks.harness import ROOT
from experiments.benchmarks.shapes import BASE

FOLDER = "{out}"
"""In the words of a part, the folder of results, whose place varies."""
EIGHT = ("--kv-cache-dtype", "fp8_e4m3")
PLUGIN = "experiments.benchmarks.gpu_plugin"
FRONT_DOOR = "pagedsim"
"""The first word of a study, which needs more packages."""
STUDIES = (
    "pagedsim.__main__",
    "pagedsim.run.serving",
    "experiments.fidelity.calibrate",
    "experiments.fidelity.validate",
    "experiments.studies.compare",
)
"""The modules that studies run."""
WORKERS = 8
ALONE = (
    "tests/engine/test_gpu.py::test_the_memory_of_graphs_is_foreseen",
    "tests/engine/test_gpu.py::test_no_kernel_reads_or_writes_beside_its_memory",
)
"""Tests that run alone: one reads the GPU's free memory, the other takes minutes."""
FOLDERS = ("tests/kernels", "tests/engine")
"""Folders of tests, the most informative first."""


class Part(NamedTuple):
    """A command, run by this Python in a process of its own."""

    name: str
    words: tuple[str, ...]
    modules: tuple[str, ...] = ()
    """The modules that it runs, where its first word is not the only one."""
    tiled: bool = False
    """Whether its results depend on tuned tiles."""
    most: float = 600.0
    """Seconds in one slice. A part stopped by them resumes in the next, until it may hang."""
    least: float = 5.0
    """Seconds that must be left to begin it."""

    @property
    def command(self) -> str:
        """The command in results."""
        return " ".join(["python", "-m", *self.words]).replace(FOLDER, "FOLDER")

    def identity(self, device: str) -> dict[str, str]:
        """What must be equal for earlier results to be valid."""
        known = {"command": self.command, "code": digest(*(self.modules or self.words[:1]))}
        return {**known, "tiles": tiles(device)} if self.tiled else known


def parts(device: str, quick: bool) -> list[Part]:
    """All parts, in order; tiny ones are begun however long they take, and none of them tunes,
    which takes a GPU's clock."""
    given = ("--device", device)
    sizes = (*given, "--quick", "--rounds", "2") if quick else ("--rounds", "10")
    sizes = (*sizes, "--resume")
    few = ("--prompts", "8", "--tokens", "8") if quick else ()
    steps = ("--running", "1", "64", "--steps", "20", "--rounds", "2") if quick else ()
    clock = f"backend.clock={'cpu' if device == 'cpu' else 'wall'}"
    small = ("server.max_seqs=2", "backend.cache_tokens=256", "backend.shrink=40")
    real = ("backend.model=null", "backend.device=cuda")
    base = own = (f"backend.device={device}", clock, *small) if quick else (f"model={BASE}", *real)
    if not quick:
        own = (*base, "server.max_seqs=64", "backend.cache_tokens=16384")
    rounds = ("study.repeats=1", "study.seconds=0.1")
    whole = ("scale=full", "backend.shrink=2", "study.repeats=3", "study.seconds=5")
    limit = ("backend.limit=10", "seeds=1") if quick else ("backend.limit=200",)
    parity = (
        *base,
        *rounds,
        'study.over=["preemption=swap"]',
        *(f"study.calibration.{one}.workload.requests=20" for one in ("few", "some", "many")),
    )
    if not quick:
        parity = (
            *("model=qwen3-0.6b", *real, "backend.cache_tokens=2048"),
            'study.over=["policy=fcfs,priority","preemption=recompute,swap"]',
            *("study.repeats=1", "study.seconds=3"),
        )
    tune = ("--short", "--rounds", "5", "--models", BASE, "--table", f"{FOLDER}/tuned.json")
    found = [
        _tests("smoke", "--one-case")._replace(most=180, least=60),
        _benchmark("headlines", "kernels", *sizes, "--headlines", "--peers"),
        _study("calibrate", *own),
        _study("validate", *own, *(rounds if quick else whole)),
        _benchmark("step", "step", *sizes, "--headlines", least=90),
        _study("fcfs_vs_priority", *base, *limit),
        _study("parity", *parity),
        _tuner("tiles, decode, 8 bits", "attention", *tune, "--kernels", "decode", *EIGHT),
        _tuner("tiles, decode", "attention", *tune, "--kernels", "decode"),
        _tuner("tiles, prefill", "attention", *tune, "--kernels", "prefill"),
        _tuner("tiles, prefill, 8 bits", "attention", *tune, "--kernels", "prefill", *EIGHT),
        _benchmark("profile", "profile", *sizes, least=60),
        _benchmark("host", "host", *given, *steps),
        _benchmark("swap", "swap", *sizes),
        _benchmark("swap, 8 bits", "swap", *sizes, *EIGHT),
        _tests("tests")._replace(least=120),
        _pytest("tests alone", [test.partition("::")[0] for test in ALONE], *ALONE)
        ._replace(least=120),
        # It takes longer than a slice, and resumes matrix by matrix.
        _tuner(
            *("tiles, products", "products", "--rounds", "5", "--resume"),
            *("--table", f"{FOLDER}/tuned_products.json"),
        ),
        _benchmark("products", "products", *sizes),
        _benchmark("experts", "products", "experts", *sizes),
        _benchmark("kernels", "kernels", *sizes, "--peers", "sdpa", "flashinfer"),
        _benchmark("step, all", "step", *sizes, least=90),
        _benchmark("engine", "engine", *given, *few, "--rounds", "1", least=120),
        _benchmark("servers", "servers", *given, *few, "--rounds", "1" if quick else "2",
                   least=120),
        _benchmark("peers", "kernels", *sizes, "--headlines", "--name", "peers"),
    ]  # fmt: skip
    if quick:
        least = Part._field_defaults["least"]
        return [part._replace(least=least) for part in found if "tiles" not in part.name]
    return found


def lacking() -> list[str]:
    """The packages that studies need and that are missing, as pip names them, without tracking."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [one for one in content["project"]["dependencies"] if not one.startswith("wandb")]
    return [one for one in wanted if version_of(re.split("[^a-z-]", one)[0]) is None]


def _study(name: str, *words: str) -> Part:
    """An experiment on the engine by `python -m pagedsim`, in a folder of its name."""
    own = (f"experiment={name}", "backend=engine", "report=false", "tracking=none")
    place = f"hydra.run.dir={FOLDER}/{name}"
    return Part(name, (FRONT_DOOR, *own, *words, place), STUDIES, least=120)


def _benchmark(name: str, module: str, *words: str, least: float = 45.0) -> Part:
    full = f"experiments.benchmarks.{module}"
    tiled = module not in ("swap", "host", "products")
    return Part(name, (full, *words, "--out", FOLDER), tiled=tiled, least=least)


def _tuner(name: str, *words: str) -> Part:
    return Part(name, ("experiments.benchmarks.tune", *words), least=120)


def _tests(name: str, *words: str) -> Part:
    """Without conftest.py, which needs simpy, hydra and wandb; in parallel where there are cores,
    since most of their time they compile."""
    many = importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= WORKERS
    together = ("-n", str(WORKERS)) if many else ()
    return _pytest(
        name, marked(), *together, *words, *(f"--deselect={test}" for test in ALONE), *marked()
    )


def _pytest(name: str, files: Sequence[str], *words: str) -> Part:
    """Tests that passed in one part are left out of the others."""
    record = ("-p", PLUGIN, f"--record={FOLDER}/tests.json")
    modules = (path.removesuffix(".py").replace("/", ".") for path in files)
    command = ("pytest", "-q", "-m", "gpu", "--noconftest", *record, *words)
    return Part(name, command, (*modules, PLUGIN))


def marked() -> list[str]:
    """The files with tests for a GPU; others may need packages that are not installed."""
    files = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    signs = re.compile(r"pytest\.mark\.gpu|tests\.kernels\.harness")
    found = [path for path in files if signs.search(path.read_text(encoding="utf-8"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(names, key=lambda name: [not name.startswith(one) for one in FOLDERS])


# -- one part --------------------------------------------------------------------------------------

TAIL, WIDTH = 30, 300
"""The last lines of output kept of a part that fails, and their characters."""
TICK = 15.0
"""Seconds between two archives while a part runs."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """The end of a part."""

    code: int | None
    """The exit code; None: it was stopped."""
    seconds: float
    said: list[str]


def carried_out(part: Part, place: Path, seconds: float, meanwhile: Callable[[], Any]) -> Outcome:
    """Run a part for so long at most, in a process that ends with this one; `meanwhile` is called
    every `TICK` seconds."""
    words = [word.replace(FOLDER, str(place)) for word in part.words]
    begun, code = time.monotonic(), None
    with TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        try:
            while code is None and (left := begun + seconds - time.monotonic()) > 0:
                try:
                    code = child.wait(min(TICK, left))
                except subprocess.TimeoutExpired:
                    meanwhile()
        finally:  # after Ctrl-C, too, with all processes that it started
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            said.seek(0)
            text = said.read().decode(errors="replace").replace(f"{ROOT}/", "")
            print(text, flush=True)
    lines = [line[:WIDTH] for line in text.splitlines()[-TAIL:]]
    return Outcome(code, round(time.monotonic() - begun, 1), lines)


def _end_with_parent() -> None:
    """Have Linux kill it if this process is killed, so that no later measurement runs beside it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
