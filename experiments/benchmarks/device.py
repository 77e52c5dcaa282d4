"""Shared parts of the benchmarks of a device: options, facts about a measurement, files and timing.

A benchmark is a set of named cases and a function that measures one. It returns a line: an error
or whether it is right and, where that is so, its `seconds`. Results of a GPU are in
experiments/results/<GPU>, one JSON file a benchmark, written as soon as each line is known.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from pagedsim.experiments.benchmarks.harness import LENGTH, ROOT, digest, keep, parse
from pagedsim.experiments.benchmarks.timing import TIMED, Line, failure, free_memory, lost
from pagedsim.kernels import product_tuning, tuning
from pagedsim.kernels.float8 import AUTO, FORMATS
from pagedsim.metrics.files import read_json

C = TypeVar("C")

# -- options ---------------------------------------------------------------------------------------

OPTIONS: Mapping[str, Any] = {
    "--device": ("cuda", "cpu"),
    "--quick": {"action": "store_true", "help": "tiny sizes: does it work? A cpu has no others"},
    "--rounds": 20,
    "--out": {"type": Path, "help": "a folder, for other than results/<GPU>"},
    "--resume": {"action": "store_true", "help": "keep lines that were measured the same way"},
}
"""The options of the benchmarks of a device; a time is the median of `--rounds`."""
CACHE = (AUTO, *FORMATS)
"""What `--kv-cache-dtype` takes; auto is the dtype of the computation."""


def parse_device(
    doc: str | None, words: Sequence[str], options: Mapping[str, Any] = OPTIONS
) -> Namespace:
    """The options of a command line, with a torch device that is there; a CPU runs tiny sizes."""
    asked = parse(doc, words, options)
    if asked.device == "cpu":
        asked.quick, asked.device = True, torch.device("cpu")
    else:
        asked.device = gpu("; --device cpu goes the whole way at tiny sizes")
    return asked


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype of kernels' inputs on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def gpu(otherwise: str = "") -> torch.device:
    """The current GPU; exits with a line if there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device here, and this measures one{otherwise}")
    return torch.device("cuda", torch.cuda.current_device())


# -- facts about a measurement ---------------------------------------------------------------------


def facts(device: torch.device, module: str, words: Sequence[str]) -> dict[str, Any]:
    """The device, versions, command, code and tiles of a measurement."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    command = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--out", "--table", "--archive"):  # places of files change no result
        command.add_argument(option)
    words = command.parse_known_args(list(words))[1]
    return {
        "device": name,
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "-m", module, *words]),
        "code": digest(module),
        "tiles": tiles(name),
    }


def tiles(gpu_name: str) -> str:
    """A digest of the tiles that were tuned for a GPU; "default" where none were."""
    attention = {one.key: (one.tiles, one.split) for one in tuning.read() if one.gpu == gpu_name}
    products = {one.key: one.tiles for one in product_tuning.read() if one.gpu == gpu_name}
    tuned = repr((sorted(attention.items()), sorted(products.items(), key=str)))
    return sha256(tuned.encode()).hexdigest()[:LENGTH] if attention or products else "default"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, text=True).partition("\n")[0].strip() or None
    return None


def version_of(package: str) -> str | None:
    """The version that is installed, if any."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- results ---------------------------------------------------------------------------------------

RESULTS = ROOT / "experiments" / "results"
SAME = ("device", "code", "tiles", "dtype", "rounds", "quick")
"""Facts that must be equal for a line to be kept."""


def folder_named(gpu_name: str) -> Path:
    """The folder of a GPU's results."""
    name = gpu_name.lower()
    return RESULTS / "-".join(name.removeprefix("nvidia ").removeprefix("geforce ").split())


class Results:
    """The file of a benchmark: facts, and the lines of its cases.

    Tiny sizes are written only where `--out` names a folder.
    """

    def __init__(
        self,
        name: str,
        module: str,
        words: Sequence[str],
        asked: Namespace,
        dtype: torch.dtype | str = "",
        **more: Any,
    ) -> None:
        """`words` are those of the command line of `module`, `more` are further facts."""
        self.name, self.device = name, asked.device
        tiny = self.device.type != "cuda" or getattr(asked, "quick", False)
        named = None if tiny else folder_named(torch.cuda.get_device_name(self.device))
        self.place: Path | None = asked.out or named
        self.content: dict[str, Any] = {
            **facts(self.device, f"pagedsim.experiments.benchmarks.{module}", words),
            "rounds": asked.rounds,
            "quick": tiny,
            "dtype": str(dtype).removeprefix("torch."),
            **more,
        }
        self.lines: list[Line] = []
        self.known: list[Line] = []
        """With `--resume`, the lines in the file that were measured the same way."""
        path = None if self.place is None else self.place / f"{name}.json"
        if getattr(asked, "resume", False) and path is not None and path.exists():
            kept = read_json(path)
            if all(kept.get(key) == self.content.get(key) for key in SAME):
                self.known = kept["cases"]

    def keep(self) -> None:
        """Write the file as far as the measurement has come."""
        keep(self.place, self.name, self.content)

    def sweep(self, cases: Mapping[str, C], measure: Callable[[C], Line]) -> None:
        """Add the lines of all cases, with the fields of those that are named tuples. Known ones
        that were timed are kept, and those that failed before are measured last. After an error
        the others are measured."""
        self.content["cases"] = self.lines
        self.lines += [one for one in self.known if TIMED in one]
        done = {one["case"] for one in self.lines}
        failed = {one["case"] for one in self.known} - done
        for case in sorted(cases, key=lambda case: case in failed):
            if case not in done:
                self._add(case, measure, cases[case])

    def _add(self, case: str, measure: Callable[[C], Line], what: C) -> None:
        free_memory()
        fields = what._asdict() if isinstance(what, tuple) and hasattr(what, "_asdict") else {}
        found = {"case": case, **fields}
        try:
            found |= measure(what)
        except Exception as problem:
            found["failed"] = failure(problem)
        self.lines.append(found)
        self.keep()
        print(f"{case}: {_said(found)}", file=sys.stderr, flush=True)
        if "failed" in found and lost(self.device):
            sys.exit("the GPU can be used no more in this process; --resume goes on")

    def timed(self) -> list[Line]:
        """The lines that were right, and so were timed."""
        return [one for one in self.lines if TIMED in one]

    def heading(self, *more: str) -> str:
        """The first line above a table, with further facts in front."""
        known = self.content
        what = [*more, known["device"]] if more else [known["device"], known["dtype"]]
        return ", ".join([*what, f"torch {known['torch']}", known["date"]])

    def close(self, text: str) -> None:
        """Print the table and write the file; exits with a line if a case was not timed."""
        print(text)
        self.keep()
        if self.place is None:
            print("\nonly a GPU's results are written by themselves (--out FOLDER writes these)")
        else:
            print(f"\n{self.place / self.name}.json")
        if names := [one["case"] for one in self.lines if TIMED not in one]:
            sys.exit(f"not timed: {'; '.join(names)}")


def _said(line: Line) -> str:
    """The result of a case, printed while others are measured."""
    if TIMED in line:
        ratio = [f"{line['of_limit']:.0%} of the limit"] if "of_limit" in line else []
        for name, peer in line.get("peers", {}).items():
            times = f"{peer['to_ours']:.2f} ×" if "to_ours" in peer else peer["failed"]
            ratio.append(f"{name}: {times}")
        return ", ".join([f"{line[TIMED] * 1e6:,.1f} µs", *ratio])
    off = f"off by {line['error']:.2g} of the norm" if line.get("error") else "wrong"
    return f"{line.get('failed', off)}, not timed"
