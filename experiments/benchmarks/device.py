"""Shared parts of the benchmarks of a device: options, facts about a measurement, files and timing.

Results of a GPU are in experiments/results/<GPU>, one JSON file a benchmark.
"""

from __future__ import annotations

import ast
import gc
import platform
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from experiments.benchmarks.harness import ROOT, keep, parse
from pagedsim.kernels import product_tuning, tuning
from pagedsim.kernels.float8 import AUTO, FORMATS
from pagedsim.metrics.files import read_json

K = TypeVar("K")

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

PACKAGES = ("pagedsim", "policies", "experiments", "tests")
READ = {"experiments.benchmarks.shapes": ("conf/model/llama-3.1-8b.yaml",)}
"""Data files that a module reads."""
NO_EFFECT = "pagedsim.report"
"""Drawing, which changes no number."""
LENGTH = 16
"""Hexadecimal digits of a digest."""


def facts(device: torch.device, module: str, words: Sequence[str]) -> dict[str, Any]:
    """The device, versions, command, code and tiles of a measurement."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    command = ArgumentParser(add_help=False, allow_abbrev=False)
    command.add_argument("--out")  # the place of the results changes none of them
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


@cache
def digest(*modules: str) -> str:
    """A digest of all files of this repository that modules run or read.

    It is of their contents and places in the tree, so it is the same in every clone, with git or
    without. Libraries are not in it; facts have their versions.
    """
    found = sha256()
    for path in sorted(files(modules), key=str):
        content = (ROOT / path).read_bytes()
        found.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:LENGTH]


def files(modules: Iterable[str]) -> set[Path]:
    """The files that these modules run or read, relative to the root, by following imports."""
    left, seen, found = list(modules), set[str](), set[Path]()
    while left:
        name = left.pop()
        if name in seen or name.partition(".")[0] not in PACKAGES or name.startswith(NO_EFFECT):
            continue
        seen.add(name)
        if "." in name:
            left.append(name.rpartition(".")[0])  # an import runs the packages of a module
        place = Path(*name.split("."))
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if (ROOT / path).exists():  # or it is a name in a module
                found.update((path, *map(Path, READ.get(name, ()))))
                left += _imported(path)
                break
    return found


@cache
def _imported(path: Path) -> list[str]:
    return list(_imports(ast.parse((ROOT / path).read_bytes())))


def _imports(tree: ast.AST) -> Iterator[str]:
    """All that a file imports, in functions, too."""
    left = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")):  # never runs
                left += node.orelse
                continue
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(base)):  # the tree has no relative imports
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name
        left += ast.iter_child_nodes(node)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output else None


def version_of(package: str) -> str | None:
    """The version that is installed, if any."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- files of results ------------------------------------------------------------------------------

RESULTS = Path(__file__).parent.parent / "results"
SAME = ("device", "code", "tiles", "dtype", "rounds", "quick")
"""Facts that must be equal for a line to be kept."""


def folder_named(gpu_name: str) -> Path:
    """The folder of a GPU's results."""
    name = gpu_name.lower()
    return RESULTS / "-".join(name.removeprefix("nvidia ").removeprefix("geforce ").split())


class Results:
    """The file of a benchmark: facts, and lines written as soon as each is measured.

    Tiny sizes are written only where `--out` names a folder.
    """

    def __init__(
        self,
        name: str,
        module: str,
        words: Sequence[str],
        asked: Namespace,
        *,
        lines: str = "cases",
        timed: str = "seconds",
        dtype: torch.dtype | str = "",
        **more: Any,
    ) -> None:
        """`lines` is the key of the lines, `timed` that of each line with a time, `more` are
        further facts."""
        self.name, self.device, self._timed = name, asked.device, timed
        self._name: Callable[[dict[str, Any]], str] = str
        tiny = self.device.type != "cuda" or getattr(asked, "quick", False)
        named = None if tiny else folder_named(torch.cuda.get_device_name(self.device))
        self.place: Path | None = asked.out or named
        self.content: dict[str, Any] = {
            **facts(self.device, f"experiments.benchmarks.{module}", words),
            "rounds": asked.rounds,
            "quick": tiny,
            "dtype": str(dtype).removeprefix("torch."),
            **more,
        }
        self.lines: list[dict[str, Any]] = []
        if lines:
            self.content[lines] = self.lines
        self.known: list[dict[str, Any]] = []
        """With `--resume`, the lines in the file that were measured the same way."""
        path = None if self.place is None else self.place / f"{name}.json"
        if getattr(asked, "resume", False) and path is not None and path.exists():
            kept = read_json(path)
            if all(kept.get(key) == self.content.get(key) for key in SAME):
                self.known = kept[lines]

    def add(self, line: dict[str, Any]) -> None:
        """Add a line and write the file."""
        self.lines.append(line)
        self.keep()

    def keep(self) -> None:
        """Write the file as far as the measurement has come."""
        keep(self.place, self.name, self.content)

    def sweep(
        self,
        cases: Iterable[Any],
        measure: Callable[[Any], dict[str, Any] | None],
        name: Callable[[dict[str, Any]], str],
        progress: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        """Add the lines of all cases, of which `name` returns str(case); known ones that were
        timed are kept, and those that failed before are measured last. None adds nothing."""
        self._name = name
        self.lines += [one for one in self.known if self._timed in one]
        done = {name(one) for one in self.lines}
        failed = {name(one) for one in self.known} - done
        for case in sorted(cases, key=lambda case: str(case) in failed):
            if str(case) in done or (found := measure(case)) is None:
                continue
            self.add(found)
            if progress is not None:
                print(progress(found), file=sys.stderr, flush=True)
            if "failed" in found and lost(self.device):
                sys.exit("the GPU can be used no more in this process; --resume goes on")

    def timed(self) -> list[dict[str, Any]]:
        """The lines that were right, and so were timed."""
        return [one for one in self.lines if self._timed in one]

    def heading(self, *more: str) -> str:
        """The first line above a table, with further facts in front."""
        known = self.content
        what = [*more, known["device"]] if more else [known["device"], known["dtype"]]
        return ", ".join([*what, f"torch {known['torch']}", known["date"]])

    def close(self, text: str, wrong: str = "not timed", more: str = "") -> None:
        """Print the table and write the file; exits with a line if a case was not timed."""
        print(text)
        self.keep()
        if self.place is None:
            print("\nonly a GPU's results are written by themselves (--out FOLDER writes these)")
        else:
            print(f"\n{self.place / self.name}.json{more}")
        if names := [self._name(one) for one in self.lines if self._timed not in one]:
            sys.exit(f"{wrong}: {'; '.join(names)}")


def failure(problem: Exception) -> str:
    """An error in one line."""
    reason = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {reason}"[:200]


# -- timing ----------------------------------------------------------------------------------------

FLUSHED, READS = 2**30, 4
"""Bytes read before a call, so that none of its inputs is in the GPU's L2 cache, and how often: a
millisecond, in which the host queues the whole call, dozens of launches, before the GPU begins it.
They are read, not written: written lines would have to leave the cache during the call."""
COPIED, FEW_COPIED = 512 * 2**20, 4 * 2**20
"""Bytes that a `Copy` reads, and at tiny sizes."""
WARM_UP = 2
"""Rounds that do not count."""
AWAKE = 0.1
"""Seconds of work before them, since the clocks of an idle GPU are low."""


def medians(
    calls: Mapping[K, Callable[[], object]],
    device: torch.device,
    rounds: int,
    wall: bool = False,
) -> dict[K, float]:
    """Device seconds of a call, by name, or with `wall` the host's, from idle device to idle.

    All calls take turns in every round, so that a change of clocks is in all of them; this is what
    `triton.testing.do_bench`, which times one function after another, does not do.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    flushed = None
    if device.type == "cuda" and not wall:
        flushed = noise(FLUSHED, device).view(torch.int32)
        end = time.monotonic() + AWAKE
        while time.monotonic() < end:
            flushed.sum()
            wait(device)
    for number in range(rounds + WARM_UP):
        timed = {name: _timed(call, device, flushed) for name, call in calls.items()}
        if number >= WARM_UP:
            for name, read in timed.items():
                seconds[name].append(read())
    return {name: median(of) for name, of in seconds.items()}


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
