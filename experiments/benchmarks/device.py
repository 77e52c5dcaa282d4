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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from pagedsim.experiments.benchmarks.harness import (
    LENGTH,
    NAME,
    ROOT,
    columns,
    digest,
    in_turns,
    keep,
    parse,
)
from pagedsim.kernels import tuning
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
"""Bytes that a `Copy` reads, and at tiny sizes."""


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

    def timed(call: Callable[[], object]) -> Callable[[], Callable[[], float]]:
        return lambda: _timed(call, device, flushed)

    turns = in_turns({name: timed(call) for name, call in calls.items()}, rounds + WARM_UP)
    return {name: median(read() for read in own[WARM_UP:]) for name, own in turns.items()}


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


def lost(device: torch.device) -> bool:
    """Whether an error, such as an illegal address, made the device unusable in this process."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False


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

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self._source = noise(FEW_COPIED if tiny else COPIED, device)
        self._target = torch.empty_like(self._source)
        self.moved = 2 * self._source.nbytes
        """Bytes, read and written."""

    def __call__(self) -> None:
        self._target.copy_(self._source)


def norm_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact|."""
    return float((found.double() - exact).norm() / exact.norm())


def failure(problem: Exception) -> str:
    """An error in one line."""
    reason = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {reason}"[:200]


# -- facts about a measurement ---------------------------------------------------------------------

PLACES = ("--out", "--table", "--merge")
"""Options that change no result."""


def gpu(otherwise: str = "") -> torch.device:
    """The current GPU; exits with a line if there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device here, and this measures one{otherwise}")
    return torch.device("cuda", torch.cuda.current_device())


def facts(device: torch.device, command: str, words: Sequence[str]) -> dict[str, Any]:
    """The device, versions, command, code and tiles of a measurement; `command` is a benchmark's
    module, and the name of its command where it has several."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
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
        "tiles": tiles(name),
    }


def tiles(gpu_name: str) -> str:
    """A digest of the tiles that were tuned for a GPU; "default" where none were."""
    tuned = sorted((one.key, one.tiles, one.split) for one in tuning.read() if one.gpu == gpu_name)
    return sha256(repr(tuned).encode()).hexdigest()[:LENGTH] if tuned else "default"


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
SAME = ("device", "code", "tiles", "rounds", "quick")
"""Facts that must be equal for a line to be kept."""
OPTIONS: Mapping[str, Any] = {
    "--device": ("cuda", "cpu"),
    "--quick": {"action": "store_true", "help": "tiny sizes: does it work? A cpu has no others"},
    "--rounds": 20,
    "--out": {"type": Path, "help": "a folder, for other than results/<GPU>"},
    "--resume": {"action": "store_true", "help": "keep lines that were measured the same way"},
}
"""The options of the benchmarks of a device; a time is the median of `--rounds`."""


def folder_named(gpu_name: str) -> Path:
    """The folder of a GPU's results."""
    name = gpu_name.lower()
    return RESULTS / "-".join(name.removeprefix("nvidia ").removeprefix("geforce ").split())


class Run:
    """One run of a benchmark: its options, its device, and the file of its results, with facts and
    the lines of its cases.

    Tiny sizes are written only where `--out` names a folder.
    """

    def __init__(
        self, command: str, doc: str | None, words: Sequence[str], more: Mapping[str, Any] = {}
    ) -> None:
        """`command` is a module, and the name of its command where it has several; the file has the
        name of the last. `more` are further options. Exits with a line if there is no GPU."""
        self.asked = asked = parse(doc, words, {**OPTIONS, **more})
        cuda = asked.device == "cuda"
        otherwise = "; --device cpu goes the whole way at tiny sizes"
        self.device = gpu(otherwise) if cuda else torch.device("cpu")
        self.quick: bool = asked.quick or not cuda
        self.content: dict[str, Any] = {
            **facts(self.device, command, words),
            "rounds": asked.rounds,
            "quick": self.quick,
        }
        self.name = command.split()[-1]
        self.place: Path | None = asked.out
        if self.place is None and not self.quick:
            self.place = folder_named(self.content["device"])
        self.lines: list[Line] = []
        self._known: list[Line] = []
        """With `--resume`, the lines in the file that were measured the same way."""
        path = None if self.place is None else self.place / f"{self.name}.json"
        if asked.resume and path is not None and path.exists():
            before = read_json(path)
            if all(before.get(key) == self.content[key] for key in SAME):
                self._known = before["cases"]

    def keep(self) -> None:
        """Write the file as far as the measurement has come."""
        if self.place is not None:
            keep(self.place, self.name, {**self.content, "cases": self.lines})

    def sweep(self, cases: Mapping[str, C], measure: Callable[[C], Line]) -> None:
        """Add the lines of all cases, with the fields of those that are named tuples. Known ones
        that were timed are kept, and those that failed before are measured last. After an error
        the others are measured."""
        self.lines += [one for one in self._known if TIMED in one]
        done = {one["case"] for one in self.lines}
        failed = {one["case"] for one in self._known} - done
        for case in sorted(cases, key=lambda case: case in failed):
            if case not in done:
                self._add(case, measure, cases[case])

    def _add(self, case: str, measure: Callable[[C], Line], what: C) -> None:
        free_memory()
        fields = what._asdict() if isinstance(what, tuple) and hasattr(what, "_asdict") else {}
        line = {"case": case, **fields}
        try:
            line |= measure(what)
        except Exception as problem:
            line["failed"] = failure(problem)
        self.lines.append(line)
        self.keep()
        print(f"{case}: {_progress(line)}", file=sys.stderr, flush=True)
        if "failed" in line and lost(self.device):
            sys.exit("the GPU can be used no more in this process; --resume goes on")

    def close(
        self, cells: Mapping[str, Callable[[Line], str]], *more: str, lines: Sequence[Line] = ()
    ) -> None:
        """Print the table of the lines that were right, and so were timed, or of others, under the
        facts and more; write the file. Exits with a line if a case was not timed."""
        timed = [one for one in self.lines if TIMED in one]
        known = self.content
        print(", ".join([known["device"], f"torch {known['torch']}", known["date"], *more]))
        print(f"\n{columns(lines or timed, cells)}\n")
        self.keep()
        if self.place is None:
            print("only a GPU's results are written by themselves (--out FOLDER writes these)")
        else:
            print(self.place / f"{self.name}.json")
        if names := [one["case"] for one in self.lines if TIMED not in one]:
            sys.exit(f"not timed: {'; '.join(names)}")


def _progress(line: Line) -> str:
    """The result of a case, printed while others are measured."""
    if TIMED in line:
        ratio = f", {line['of_limit']:.0%} of the limit" if "of_limit" in line else ""
        return f"{line[TIMED] * 1e6:,.1f} µs{ratio}"
    off = f"off by {line['error']:.2g} of the norm" if line.get("error") else "wrong"
    return f"{line.get('failed', off)}, not timed"
