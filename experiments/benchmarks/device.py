"""Shared parts of the benchmarks of a device: times of calls, facts, and files of results.

A benchmark is a set of named cases and a function that measures one. It returns a line: an error
or whether it is right and, where that is so, its `seconds`. Results of a GPU are in
experiments/results/<GPU>, one JSON file a benchmark, written as soon as each line is known.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.attention import ATTENTIONS, TRITON, require
from pagedsim.experiments.benchmarks.harness import (
    NAME,
    ROOT,
    columns,
    digest,
    in_turns,
    keep,
    parse,
)
from pagedsim.metrics.files import read_json

C = TypeVar("C")
K = TypeVar("K")
Line = dict[str, Any]
"""A case and its measurement."""
TIMED = "seconds"
"""The key of the time of a call, in the lines of calls that were right."""

# -- times of calls --------------------------------------------------------------------------------

FLUSHED, READS = 2**30, 4
"""Bytes read before a call, so that none of its inputs is in the GPU's L2 cache, and how often: a
millisecond, in which the host queues the whole call, dozens of launches, before the GPU begins it.
They are read, not written: written lines would have to leave the cache during the call."""
WARM_UP = 2
"""Rounds that do not count."""
AWAKE = 0.1
"""Seconds of work before them, since the clocks of an idle GPU are low."""
COPIED, FEW_COPIED = 512 * 2**20, 4 * 2**20
"""Bytes that a `Copy` reads, and on a CPU."""


def medians(
    calls: Mapping[K, Callable[[], object]],
    device: torch.device,
    rounds: int,
    wall: bool = False,
) -> dict[K, float]:
    """Device seconds of a call, by name, or with `wall` the host's, from idle device to idle.

    All calls take turns in every round, which `triton.testing.do_bench` does not do.
    """
    flushed = None
    if device.type == "cuda" and not wall:
        flushed = noise(FLUSHED, device).view(torch.int32)
        end = time.monotonic() + AWAKE
        while time.monotonic() < end:
            flushed.sum()
            wait(device)

    timed = {name: partial(_timed, call, device, flushed) for name, call in calls.items()}
    turns = in_turns(timed, rounds + WARM_UP)
    return {name: median(read() for read in reads[WARM_UP:]) for name, reads in turns.items()}


def _timed(
    call: Callable[[], object], device: torch.device, flushed: torch.Tensor | None
) -> Callable[[], float]:
    """Make the call; the returned function waits for its end and returns its seconds."""
    if flushed is None:
        wait(device)
        begun = time.perf_counter()
        call()
        wait(device)
        taken = time.perf_counter() - begun
        return lambda: taken
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(READS):
        flushed.sum()
    start.record()
    call()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Return a deleted engine's memory to the GPU; its model is in reference cycles."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def noise(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Random bytes: a GPU may compress zeros, and draws less power for them."""
    room = torch.empty(size // 8, dtype=torch.int64, device=device, pin_memory=pinned)
    generator = torch.Generator(device).manual_seed(0)
    return room.random_(-(2**63), None, generator=generator).view(torch.uint8)


class Copy:
    """One large copy within the device: the limit of its memory."""

    def __init__(self, device: torch.device) -> None:
        self._source = noise(COPIED if device.type == "cuda" else FEW_COPIED, device)
        self._target = torch.empty_like(self._source)
        self.moved = 2 * self._source.nbytes
        """Bytes, read and written."""

    def __call__(self) -> None:
        self._target.copy_(self._source)


def norm_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """|output - exact| / |exact|."""
    return float((output.double() - exact).norm() / exact.norm())


# -- facts about a measurement ---------------------------------------------------------------------

PLACES = ("--out", "--table", "--merge")
"""Options that change no result."""


def gpu(otherwise: str = "") -> torch.device:
    """The current GPU; exits with a line if there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device here, and this measures one{otherwise}")
    return torch.device("cuda", torch.cuda.current_device())


def facts(device: torch.device, command: str, words: Sequence[str]) -> dict[str, Any]:
    """The device, versions, command and code of a measurement; `command` is a benchmark's module,
    and the name of its command where it has several."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _processor()
    pairs = zip(["", *words], words, strict=False)
    shown = [word for before, word in pairs if not {before, word} & {*PLACES}]
    return {
        "device": name,
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join([f"python -m {NAME}.{command}", *shown]),
        "code": digest(),
    }


def _processor() -> str:
    """The processor's name, which Linux alone tells in full."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, text=True).partition("\n")[0].strip() or None
    return None


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


# -- results ---------------------------------------------------------------------------------------

RESULTS = ROOT / "experiments" / "results"
SAME = ("device", "code", "rounds")
"""Facts that must be equal for the lines of other cases to stay in a file."""
OPTIONS: Mapping[str, Any] = {
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda", "help": "a cpu has tiny sizes"},
    "--rounds": 20,
    "--out": {"type": Path, "help": "a folder, for other than results/<GPU>"},
}
"""The options of the benchmarks of a device; a time is the median of `--rounds`."""
BY_ATTENTION: Mapping[str, Any] = {
    "--attention": {"choices": ATTENTIONS, "default": TRITON, "help": "whose kernels attend"},
    "--block-size": {"type": int, "help": "in place of a case's own; fa may need 256"},
}
"""Those of benchmarks in which attention is not only ours."""


def folder_named(gpu_name: str) -> Path:
    """The folder of a GPU's results."""
    name = gpu_name.lower()
    return RESULTS / "-".join(name.removeprefix("nvidia ").removeprefix("geforce ").split())


class Run:
    """One run of a benchmark: its options, its device, and the file of its results, with facts and
    the lines of its cases. Lines of other cases stay there if they were measured the same way.

    Results of a CPU are written only where `--out` names a folder.
    """

    def __init__(
        self, command: str, doc: str | None, words: Sequence[str], more: Mapping[str, Any] = {}
    ) -> None:
        """`command` is a module, and the name of its command where it has several; the file has the
        name of the last. `more` are further options. Exits with a line if there is no GPU."""
        self.asked = asked = parse(doc, words, {**OPTIONS, **more})
        self.tiny = asked.device == "cpu"
        otherwise = "; --device cpu goes the whole way at tiny sizes"
        self.device = torch.device("cpu") if self.tiny else gpu(otherwise)
        self.content: dict[str, Any] = facts(self.device, command, words)
        self.content["rounds"] = asked.rounds
        self.name = command.split()[-1]
        if (attention := getattr(asked, "attention", TRITON)) != TRITON:
            self.name += f"-{attention}"
            try:
                require(attention, self.device)
            except ConfigError as error:
                sys.exit(f"--{error}")
        self.place: Path | None = asked.out
        if self.place is None and not self.tiny:
            self.place = folder_named(self.content["device"])
        self.lines: dict[str, Line] = {}
        """By case."""
        self._before: dict[str, Line] = {}
        self._path = None if self.place is None else self.place / f"{self.name}.json"
        if self._path is not None and self._path.exists():
            before = read_json(self._path)
            if all(before.get(key) == self.content[key] for key in SAME):
                self._before = {line["case"]: line for line in before["cases"]}

    def keep(self) -> None:
        """Write the file as far as the measurement has come."""
        if self.place is not None:
            lines = {**self._before, **self.lines}
            keep(self.place, self.name, {**self.content, "cases": [*lines.values()]})

    def sweep(self, cases: Iterable[C], measure: Callable[[C], Line]) -> None:
        """Add the lines of all cases, which are named tuples; each is written at once. After an
        error the others are measured."""
        for case in cases:
            free_memory()
            fields: Any = case
            line = {"case": str(case), **fields._asdict()}
            try:
                line |= measure(case)
            except Exception as problem:
                reason = (str(problem).strip().splitlines() or [""])[0]
                line["failed"] = f"{type(problem).__name__}: {reason}"[:200]
            self.lines[line["case"]] = line
            self.keep()
            why = line.get("failed", f"off by {line.get('error', inf):.2g} of the norm")
            said = f"{line[TIMED] * 1e6:,.1f} µs" if TIMED in line else f"{why}, not timed"
            print(f"{case}: {said}", file=sys.stderr, flush=True)

    def close(
        self, cells: Mapping[str, Callable[[Line], str]], *more: str, lines: Sequence[Line] = ()
    ) -> None:
        """Print the table of the lines that were right, and so were timed, or of others, under the
        facts and more; write the file. Exits with a line if a case was not timed."""
        timed = [line for line in self.lines.values() if TIMED in line]
        known = self.content
        print(", ".join([known["device"], f"torch {known['torch']}", known["date"], *more]))
        print(f"\n{columns(lines or timed, cells)}\n")
        self.keep()
        print(
            self._path
            or "only a GPU's results are written by themselves; --out FOLDER writes these"
        )
        if names := [name for name, line in self.lines.items() if TIMED not in line]:
            sys.exit(f"not timed: {'; '.join(names)}")
