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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from experiments.benchmarks.device import digest, tiles
from experiments.benchmarks.harness import ROOT
from experiments.benchmarks.shapes import BASE

FOLDER = "{out}"
"""In the words of a part, the folder of results, whose place varies."""
EIGHT = ("--kv-cache-dtype", "fp8_e4m3")
PLUGIN = "experiments.benchmarks.gpu.plugin"
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
    """All parts, in order."""
    found = _tiny(device) if quick else _whole()
    if quick:  # however long they take
        return [part._replace(least=Part._field_defaults["least"]) for part in found]
    return found


def _whole() -> list[Part]:
    sizes = ("--rounds", "10")
    tune = ("--short", "--rounds", "5", "--models", BASE, "--table", f"{FOLDER}/tuned.json")
    base = (f"model={BASE}", "backend.model=null", "backend.device=cuda")
    bounded = ("server.max_seqs=64", "backend.cache_tokens=16384")
    return [
        _tests("smoke", "--one-case")._replace(most=180, least=60),
        _benchmark("headlines", "kernels", *sizes, "--resume", "--headlines", "--peers"),
        _study("calibrate", *base, *bounded),
        _study("validate", *base, *bounded, "scale=full", "backend.shrink=2", *_rounds(3, 5)),
        _benchmark("step", "step", *sizes, "--resume", "--headlines", least=90),
        _study("fcfs_vs_priority", *base, "backend.limit=200"),
        _study(
            *("parity", "model=qwen3-0.6b", *base[1:], "backend.cache_tokens=2048"),
            *('study.over=["policy=fcfs,priority","preemption=recompute,swap"]', *_rounds(1, 3)),
        ),
        _tuner("tiles, decode, 8 bits", *tune, "--kernels", "decode", *EIGHT),
        _tuner("tiles, decode", *tune, "--kernels", "decode"),
        _tuner("tiles, prefill", *tune, "--kernels", "prefill"),
        _tuner("tiles, prefill, 8 bits", *tune, "--kernels", "prefill", *EIGHT),
        _benchmark("profile", "profile", *sizes, least=60),
        _benchmark("host", "host", "--device", "cuda"),
        _benchmark("swap", "swap", *sizes, "--resume"),
        _benchmark("swap, 8 bits", "swap", *sizes, "--resume", *EIGHT),
        _tests("tests")._replace(least=120),
        _alone(),
        _products(),
        _benchmark("products", "products", *sizes, "--resume"),
        _benchmark("experts", "products", "experts", *sizes, "--resume"),
        _benchmark("kernels", "kernels", *sizes, "--resume", "--peers", "sdpa", "flashinfer"),
        _benchmark("step, all", "step", *sizes, "--resume", least=90),
        _benchmark("engine", "engine", "--device", "cuda", "--repeats", "1", least=120),
        _benchmark("servers", "servers", least=120),
        _benchmark("peers", "kernels", *sizes, "--resume", "--headlines", "--name", "peers"),
    ]


def _tiny(device: str) -> list[Part]:
    """The same but the tuner, which needs a GPU's clock."""
    sizes = ("--device", device, "--quick", "--rounds", "2", "--resume")
    few = ("--prompts", "8", "--tokens", "8", "--repeats", "1")
    short = ("--running", "1", "64", "--steps", "20", "--rounds", "2")
    clock = f"backend.clock={'cpu' if device == 'cpu' else 'wall'}"
    small = ("server.max_seqs=2", "backend.cache_tokens=256", "backend.shrink=40")
    own = (f"backend.device={device}", clock, *small)
    calibration = [
        f"study.calibration.{one}.workload.requests=20" for one in ("few", "some", "many")
    ]
    return [
        _tests("smoke", "--one-case"),
        _benchmark("headlines", "kernels", *sizes, "--headlines", "--peers"),
        _study("calibrate", *own),
        _study("validate", *own, *_rounds(1, 0.1)),
        _benchmark("step", "step", *sizes, "--headlines"),
        _study("fcfs_vs_priority", *own, "backend.limit=10", "seeds=1"),
        _study("parity", *own, *_rounds(1, 0.1), 'study.over=["preemption=swap"]', *calibration),
        _benchmark("profile", "profile", *sizes),
        _benchmark("host", "host", "--device", device, *short),
        _benchmark("swap", "swap", *sizes),
        _benchmark("swap, 8 bits", "swap", *sizes, *EIGHT),
        _tests("tests"),
        _alone(),
        _benchmark("products", "products", *sizes),
        _benchmark("experts", "products", "experts", *sizes),
        _benchmark("kernels", "kernels", *sizes, "--peers", "sdpa", "flashinfer"),
        _benchmark("step, all", "step", *sizes),
        _benchmark("engine", "engine", "--device", device, *few),
        _benchmark("servers", "servers", "--device", device, *few),
        _benchmark("peers", "kernels", *sizes, "--headlines", "--name", "peers"),
    ]


def lacking() -> list[str]:
    """The packages that studies need and that are missing, as pip names them, without tracking."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [one for one in content["project"]["dependencies"] if not one.startswith("wandb")]
    return [one for one in wanted if not _there(re.split("[^a-z-]", one)[0])]


def _there(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _study(name: str, *words: str) -> Part:
    """An experiment on the engine by `python -m pagedsim`, in a folder of its name."""
    own = (f"experiment={name}", "backend=engine", "report=false", "tracking=none")
    place = f"hydra.run.dir={FOLDER}/{name}"
    return Part(name, (FRONT_DOOR, *own, *words, place), STUDIES, least=120)


def _rounds(repeats: int, seconds: float) -> tuple[str, str]:
    """The repeats of each load of a validation, and their seconds."""
    return f"study.repeats={repeats}", f"study.seconds={seconds:g}"


def _benchmark(name: str, module: str, *words: str, least: float = 45.0) -> Part:
    full = f"experiments.benchmarks.{module}"
    tiled = module not in ("swap", "host", "products")
    return Part(name, (full, *words, "--out", FOLDER), tiled=tiled, least=least)


def _tuner(name: str, *words: str) -> Part:
    return Part(name, ("experiments.benchmarks.tune", "attention", *words), least=120)


def _products() -> Part:
    """It takes longer than a slice, and resumes matrix by matrix."""
    table = ("--resume", "--table", f"{FOLDER}/tuned_products.json")
    words = ("experiments.benchmarks.tune", "products", "--rounds", "5", *table)
    return Part("tiles, products", words, least=120)


def _tests(name: str, *words: str) -> Part:
    """Without conftest.py, which needs simpy, hydra and wandb."""
    files = marked()
    together = ("-n", str(WORKERS)) if _many() else ()
    others = [f"--deselect={test}" for test in ALONE]
    return Part(name, (*_pytest(), *together, *words, *others, *files), _modules(files))


def _alone() -> Part:
    """The tests that others would disturb."""
    files = [test.partition("::")[0] for test in ALONE]
    return Part("tests alone", (*_pytest(), *ALONE), _modules(files), least=120)


def _pytest() -> tuple[str, ...]:
    """Tests that passed in one part are left out of the others."""
    record = ("-p", PLUGIN, f"--record={FOLDER}/tests.json")
    return "pytest", "-q", "-m", "gpu", "--noconftest", *record


def _modules(files: Sequence[str]) -> tuple[str, ...]:
    return (*(path.removesuffix(".py").replace("/", ".") for path in files), PLUGIN)


def _many() -> bool:
    """Whether tests run in parallel: most of their time they compile."""
    return importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= WORKERS


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
    begun = time.monotonic()
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
            code = _ended(child, begun + seconds, meanwhile)
        finally:  # after Ctrl-C, too, with all processes that it started
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            lines = _shown(said)
    return Outcome(code, round(time.monotonic() - begun, 1), lines)


def _ended(child: subprocess.Popen[bytes], end: float, meanwhile: Callable[[], Any]) -> int | None:
    """Its exit code; None if it has not ended in time."""
    while (left := end - time.monotonic()) > 0:
        try:
            return child.wait(min(TICK, left))
        except subprocess.TimeoutExpired:
            meanwhile()
    return None


def _shown(said: IO[bytes]) -> list[str]:
    """Print the output; returns its last lines."""
    said.seek(0)
    text = said.read().decode(errors="replace").replace(f"{ROOT}/", "")
    print(text, flush=True)
    return [line[:WIDTH] for line in text.splitlines()[-TAIL:]]


def _end_with_parent() -> None:
    """Have Linux kill it if this process is killed, so that no later measurement runs beside it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
