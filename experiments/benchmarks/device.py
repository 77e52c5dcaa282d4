"""What the benchmarks of a device share: what they are asked, where they run and how they time."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.benchmarks.code import LENGTH, digest
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.kernels import product_tuning, tuning
from pagedsim.kernels.float8 import AUTO, FORMATS

SPOILT, READS = 2**30, 4
"""Bytes read before a call, so that none of its inputs is in the GPU's cache, and how often: a
millisecond, in which the host queues the whole call before the GPU begins it, dozens of launches
of a draw or of a layer's experts. They are read, not written: what was written would have to leave
the cache while the call is timed."""
COPIED, FEW_COPIED = 512 * 2**20, 4 * 2**20
"""Bytes that a `Copy` reads, and where sizes are tiny."""
WARM = 2
"""Rounds that do not count."""
AWAKE = 0.1
"""Seconds of work in front of them: the clocks of an idle GPU are low, and it has been idle while a
CPU computed what is right."""


class Plain(argparse.RawDescriptionHelpFormatter):
    """Help as it was written."""


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what all of them take."""
    parser = Parser(description=doc, formatter_class=Plain)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: does it work? The cpu has no others"
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=20, help="a time is the median of so many"
    )
    parser.add_argument("--out", type=Path, help="a folder, for other than results/<GPU>")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what was measured there the same way"
    )
    return parser


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The option that says what caches hold."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=(AUTO, *FORMATS),
        default=AUTO,
        help="what the cache holds; auto: the same as computation",
    )


def device_of(asked: argparse.Namespace) -> torch.device:
    """The device asked for; a line and the end where there is none."""
    if asked.rounds < 1:
        sys.exit(f"--rounds {asked.rounds}: must be 1 or more")
    if asked.device == "cpu":
        asked.quick = True
        return torch.device("cpu")
    require_gpu("; --device cpu --quick goes the whole way at tiny sizes")
    return torch.device("cuda", torch.cuda.current_device())


def require_gpu(otherwise: str = "") -> None:
    """A line and the end where there is none."""
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device here, and this measures one{otherwise}")


def facts(device: torch.device, module: str, words: Sequence[str]) -> dict[str, Any]:
    """What a number means nothing without."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    command = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    command.add_argument("--out")  # where it went says nothing of it
    words = command.parse_known_args(list(words))[1]
    return {
        "device": name,
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "driver": _driver(device) if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "-m", module, *words]),
        "code": digest(module),
        "tiles": tiles(name),
    }


def tiles(gpu: str) -> str:
    """A digest of the tiles that were tuned for a GPU; "default" where none were."""
    attention = {one.key: (one.tiles, one.split) for one in tuning.read() if one.gpu == gpu}
    products = {one.key: one.tiles for one in product_tuning.read() if one.gpu == gpu}
    tuned = repr((sorted(attention.items()), sorted(products.items(), key=str)))
    return sha256(tuned.encode()).hexdigest()[:LENGTH] if attention or products else "default"


def noise(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Bytes of all kinds. A GPU may pack zeros, and takes less power for them."""
    room = torch.empty(size // 8, dtype=torch.int64, device=device, pin_memory=pinned)
    generator = torch.Generator(device).manual_seed(0)
    return room.random_(-(2**63), None, generator=generator).view(torch.uint8)


class Copy:
    """One large copy within the device: what its memory does at best."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self._here = noise(FEW_COPIED if tiny else COPIED, device)
        self._there = torch.empty_like(self._here)
        self.moved = 2 * self._here.nbytes
        """Bytes, read and written."""

    def __call__(self) -> None:
        self._there.copy_(self._here)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def medians(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Seconds that the device takes for a call, by name; all take turns in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spoil = noise(SPOILT, device).view(torch.int32) if device.type == "cuda" else None
    if spoil is not None:
        _wake(spoil, device)
    for number in range(rounds + WARM):
        timed = {name: _timed(call, spoil) for name, call in calls.items()}
        if number >= WARM:
            for name, read in timed.items():
                seconds[name].append(read())
    return {name: median(of) for name, of in seconds.items()}


def wall_medians(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """The same by the host's clock, from an idle device to an idle device."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + WARM):
        for name, call in calls.items():
            wait(device)
            begun = time.perf_counter()
            call()
            wait(device)
            if number >= WARM:
                seconds[name].append(time.perf_counter() - begun)
    return {name: median(of) for name, of in seconds.items()}


def _wake(spoil: torch.Tensor, device: torch.device) -> None:
    """Have the device work until its clocks are up."""
    end = time.monotonic() + AWAKE
    while time.monotonic() < end:
        spoil.sum()
        wait(device)


def lost(device: torch.device) -> bool:
    """Whether an error has left the device of no use to this process, as a wrong address does."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False


def wait(device: torch.device) -> None:
    """Until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], object], spoil: torch.Tensor | None) -> Callable[[], float]:
    """Call it; what is returned waits for its end and says how long it took."""
    if spoil is None:
        begun = time.perf_counter()
        call()
        taken = time.perf_counter() - begun
        return lambda: taken
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(READS):
        spoil.sum()
    start.record()
    call()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def _driver(device: torch.device) -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.splitlines()[0].strip() if told else None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
