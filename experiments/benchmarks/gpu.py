"""All measurements of a GPU, in slices: tests, tiles, studies, and every benchmark of a device.

    python -m pagedsim.experiments.benchmarks.gpu --minutes 8 --archive gpu.tar.gz
    python -m pagedsim.experiments.benchmarks.gpu --unpack --archive gpu.tar.gz  (without a GPU)
    python -m pagedsim.experiments.benchmarks.gpu --device cpu --quick --out FOLDER

The parts run one after another, each in a process of its own; a failed part does not stop the
others. Results are in a folder, by default experiments/results/<GPU>, and the states of parts in
its gpu.json. With --archive all of it is also in one small file, which is read at the start and
written again whenever a part ends: on another machine the same command continues from it.

A part is done for the GPU, its command, the sources that it runs and, for kernels, the tuned tiles.
If one of these differs the part runs again. Tiles go into the tables in kernels/ as soon as they
are known. Studies (python -m pagedsim) need simpy and hydra, and are left out without them.

The exit code is 0 when all is done, 3 when the time is over, and 1 if the rest has failed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch

from pagedsim.experiments.benchmarks.device import (
    OPTIONS,
    facts,
    folder_named,
    tiles,
    version_of,
)
from pagedsim.experiments.benchmarks.device import gpu as require_gpu
from pagedsim.experiments.benchmarks.harness import ROOT, digest, keep, main_of, parse, table
from pagedsim.experiments.benchmarks.shapes import BASE
from pagedsim.kernels import product_tuning, tuning
from pagedsim.metrics.files import read_json

NAME = "pagedsim.experiments.benchmarks.gpu"
GOES_ON = 3
"""The exit code of a slice with parts left."""
DONE, FAILED, CUT = "done", "failed", "out of time"
BEGUN, AHEAD = "begun", "not begun"
"""A part that was begun resumes where it was stopped."""
PATIENCE = 300.0
"""Seconds that slices give a part that does not end, before the others."""


def gpu(words: Sequence[str]) -> None:
    """Run the parts that are not done, and print the states of all."""
    options = {
        **{name: OPTIONS[name] for name in ("--device", "--quick", "--out")},
        "--minutes": 25.0,
        "--archive": {"type": Path, "help": "a .tar.gz to go on with, and to leave"},
        "--unpack": {"action": "store_true", "help": "the archive, and nothing else"},
        "--parts": {"nargs": "+", "metavar": "PART", "help": "these alone, in this order"},
    }
    asked = parse(__doc__, words, options)
    quick = asked.quick or asked.device == "cpu"
    if asked.unpack:
        if asked.archive is None:
            sys.exit("--unpack: there is nothing to unpack; give --archive")
        place = unpack(asked.archive, asked.out)
        take_over(place)
        kept = read_json(place / "gpu.json")
        print(f"{asked.archive}: {len(kept['parts'])} parts of {kept['device']}, in {place}")
        return
    if quick and asked.out is None:
        sys.exit("--out: what is quick is written nowhere by itself; give a folder")
    if asked.device == "cuda":
        require_gpu("; --device cpu --quick --out FOLDER goes the whole way at tiny sizes")
    told = facts(torch.device(asked.device), NAME, words)
    place = (asked.out or folder_named(told["device"])).resolve()
    if asked.archive is not None and asked.archive.exists():
        unpack(asked.archive, place, told["device"])
    take_over(place)
    ledger = Ledger(place, told, asked.archive)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted, skipped = able(chosen(parts(asked.device, quick), asked.parts))
    print(skipped, end="", flush=True)
    try:
        run(wanted, ledger, asked.minutes * 60)
    except KeyboardInterrupt:
        ledger.pack()
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    rows = [
        [part.name, ledger.state(part), str(ledger.parts.get(part.name, {}).get("seconds", ""))]
        for part in wanted
    ]
    text = table(["part", "", "seconds"], rows)
    print(f"{ledger.device}\n\n{text}\n{skipped}", end="", flush=True)
    sys.exit(verdict(ledger, wanted))


def chosen(found: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """The parts of these names, in their order; exits with a line if there is none of a name."""
    known = {part.name: part for part in found}
    for name in names or ():
        if name not in known:
            sys.exit(f"--parts {name!r}: is no part; there are {'; '.join(known)}")
    return [known[name] for name in names or known]


def able(wanted: Sequence[Part]) -> tuple[list[Part], str]:
    """The parts whose packages are installed, and a line about the others, if any."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    required = [one for one in content["project"]["dependencies"] if not one.startswith("wandb")]
    lacking = [one for one in required if version_of(re.split("[^a-z-]", one)[0]) is None]
    packages = " ".join(f"'{one}'" for one in lacking)
    others = [part.name for part in wanted if packages and part.words[0] == FRONT_DOOR]
    line = f"skipped: {', '.join(others)}; they need: pip install {packages}\n" if others else ""
    return [part for part in wanted if part.name not in others], line


def run(wanted: Sequence[Part], ledger: Ledger, budget: float) -> None:
    """Run the parts that are not done, each once, for `budget` seconds."""
    end = time.monotonic() + budget
    if others := ledger.of_other_code(wanted):
        print(f"measured by other code, so measured again: {', '.join(others)}", flush=True)
    for part in wanted:
        if ledger.state(part) == DONE:
            print(f"{part.name}: done already", flush=True)
    tried: list[tuple[str, dict[str, str]]] = []
    while True:
        seconds = end - time.monotonic()
        for part in ledger.left(wanted):
            own = (part.name, part.identity(ledger.device))
            if part.least <= seconds and own not in tried:
                break
        else:
            return
        tried.append(own)
        print(f"{part.name}: {part.command}", flush=True)
        spent = ledger.spent(part)
        ledger.put(part, BEGUN, spent=spent)
        found = carried_out(part, ledger.place, min(seconds, part.most), ledger.pack)
        if found.code == 0:
            ledger.put(part, DONE, seconds=found.seconds)
        elif found.code is not None:
            ledger.put(part, FAILED, seconds=found.seconds, said=found.said)
        else:  # stopped by the end of the slice, or it may hang
            spent = round(spent + found.seconds, 1)
            state = CUT if seconds >= part.most and spent > PATIENCE else BEGUN
            ledger.put(part, state, seconds=found.seconds, said=found.said, spent=spent)
        take_over(ledger.place)


def take_over(place: Path) -> None:
    """Merge tuned tiles into the tables that kernels read."""
    for table_of in (tuning, product_tuning):
        tuned = place / table_of.PATH.name
        if not tuned.exists():
            continue
        try:
            found: list[Any] = list(table_of.read(tuned))
        except (ValueError, KeyError, TypeError):  # killed as it was written
            print(f"{tuned}: is not whole, so its tiles are left out", file=sys.stderr)
            continue
        table_of.write([*table_of.read(), *found])


def verdict(ledger: Ledger, wanted: Sequence[Part]) -> int:
    """The exit code; prints what is left."""
    states = {part.name: ledger.state(part) for part in wanted}
    if goes_on := [name for name, state in states.items() if state in (AHEAD, BEGUN)]:
        done = sum(state == DONE for state in states.values())
        print(
            f"{done} of {len(wanted)} parts are done; the same command goes on with: "
            f"{', '.join(goes_on)}",
            file=sys.stderr,
        )
        return GOES_ON
    if wrong := [f"{name} ({state})" for name, state in states.items() if state != DONE]:
        print(f"not done: {', '.join(wrong)}; the same command tries again", file=sys.stderr)
        return 1
    print(f"all {len(wanted)} parts are done")
    return 0


# -- the states of parts ---------------------------------------------------------------------------


class Ledger:
    """The states of parts in one folder, on one GPU."""

    def __init__(self, place: Path, told: Mapping[str, Any], archive: Path | None = None) -> None:
        """`told` are the facts of this run; exits with a line if the folder is of another GPU."""
        self.place, self.device, self._told = place, str(told["device"]), told
        self._archive = archive
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

    def left(self, wanted: Iterable[Part]) -> list[Part]:
        """The parts that are not done. Those that failed or may hang come last, after those whose
        tiles have changed."""

        def place(part: Part) -> int:
            if self.state(part) in (FAILED, CUT) or self.spent(part) > PATIENCE:
                return 2
            known, now = self.parts.get(part.name, {}), part.identity(self.device)
            same = all(known.get(key) == now[key] for key in ("code", "command"))
            return int(same and known.get("state") == DONE)

        return sorted((part for part in wanted if self.state(part) != DONE), key=place)

    def spent(self, part: Part) -> float:
        """Seconds that it ran in slices that stopped it, with this code and these tiles."""
        if self.state(part) not in (BEGUN, CUT):
            return 0.0
        return float(self.parts[part.name].get("spent", 0.0))

    def of_other_code(self, wanted: Iterable[Part]) -> list[str]:
        """Names of the parts that were measured with other code."""
        return [
            part.name
            for part in wanted
            if part.name in self.parts
            and self.parts[part.name]["code"] != part.identity(self.device)["code"]
        ]

    def put(self, part: Part, state: str, **found: Any) -> None:
        """Set the state of a part; gpu.json and the archive are complete at any moment."""
        self.parts[part.name] = {**part.identity(self.device), "state": state, **found}
        keep(self.place, "gpu", {**self._told, "parts": self.parts})
        self.pack()

    def pack(self) -> None:
        if self._archive is not None:
            pack(self.place, self._archive)


# -- the archive -----------------------------------------------------------------------------------

KINDS = (".json", ".md", ".png")
LARGEST = 4 * 2**20
"""Bytes of a packed file, at most."""
MOST = 15 * 2**20
"""Bytes of all of them, at most."""


def pack(place: Path, path: Path) -> None:
    """Write the results of a folder, the smallest files first and no large ones.

    Folders in it, which studies make, are packed with their files, but not what is deeper.
    """
    there = [*place.glob("*"), *place.glob("*/*")]
    files = [one for one in there if one.suffix in KINDS and one.name[0] != "."]
    path.parent.mkdir(parents=True, exist_ok=True)
    part, room = path.with_name(f".{path.name}.part"), MOST
    with tarfile.open(part, "w:gz") as archive:
        for one in sorted(files, key=lambda one: one.stat().st_size):
            room -= one.stat().st_size
            if room >= 0 and one.stat().st_size <= LARGEST:
                archive.add(one, one.relative_to(place))
    part.replace(path)  # a process killed before leaves the previous file


def unpack(path: Path, place: Path | None, device: str | None = None) -> Path:
    """Write the files of an archive to a folder, by default that of its GPU, over those that are
    there; exits with a line if it is no archive, or of another device."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            content = archive.extractfile("gpu.json")
            own = str(json.load(content)["device"]) if content else ""
            if device not in (None, own):
                sys.exit(f"--archive {path}: is of {own}, and this is {device}; give another")
            place = place or folder_named(own)
            for one in archive:
                if not one.isfile() or {"", ".", ".."} & {*one.name.split("/")}:
                    raise ValueError(f"{one.name!r} is no plain file")
                archive.extract(one, place)
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
        reason = "it has no gpu.json" if isinstance(error, KeyError) else error
        sys.exit(f"--archive {path}: is none that this command has written: {reason}")
    return place


# -- parts, in the order of what they tell ---------------------------------------------------------

FOLDER = "{out}"
"""In the words of a part, the folder of results, whose place varies."""
PLUGIN = "pagedsim.experiments.benchmarks.gpu_plugin"
FRONT_DOOR = "pagedsim"
"""The first word of a study, which needs more packages."""
STUDIES = (
    "pagedsim.__main__",
    "pagedsim.run.serving",
    "pagedsim.experiments.fidelity.calibrate",
    "pagedsim.experiments.fidelity.validate",
    "pagedsim.experiments.studies.compare",
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
    given, tune = f"--device {device}", f"--short --rounds 5 --models {BASE} --table {FOLDER}"
    eight = "--kv-cache-dtype fp8_e4m3"
    if quick:
        sizes = f"{given} --quick --rounds 2 --resume"
        few, rounds = "--prompts 8 --tokens 8", 1
        steps = "--running 1 64 --steps 20 --rounds 2"
        own = base = (
            f"backend.device={device} backend.clock={'cpu' if device == 'cpu' else 'wall'} "
            "server.max_seqs=2 backend.cache_tokens=256 backend.shrink=40"
        )
        validate = "study.repeats=1 study.seconds=0.1"
        limit = "backend.limit=10 seeds=1"
        loads = (f"study.calibration.{one}.workload.requests=20" for one in ("few", "some", "many"))
        parity = f'{base} {validate} study.over=["preemption=swap"] {" ".join(loads)}'
    else:
        sizes, few, rounds, steps = "--rounds 10 --resume", "", 2, ""
        real = "backend.model=null backend.device=cuda"
        base = f"model={BASE} {real}"
        own = f"{base} server.max_seqs=64 backend.cache_tokens=16384"
        validate = "scale=full backend.shrink=2 study.repeats=3 study.seconds=5"
        limit = "backend.limit=200"
        parity = (
            f"model=qwen3-0.6b {real} backend.cache_tokens=2048 study.repeats=1 study.seconds=3 "
            'study.over=["policy=fcfs,priority","preemption=recompute,swap"]'
        )
    found = [
        _tests("smoke", "--one-case")._replace(most=180, least=60),
        _benchmark("headlines", f"kernels {sizes} --headlines --peers"),
        _study("calibrate", own),
        _study("validate", f"{own} {validate}"),
        _benchmark("step", f"step {sizes} --headlines", least=90),
        _study("fcfs_vs_priority", f"{base} {limit}"),
        _study("parity", parity),
        _tuner("tiles, decode, 8 bits", f"attention {tune}/tuned.json --kernels decode {eight}"),
        _tuner("tiles, decode", f"attention {tune}/tuned.json --kernels decode"),
        _tuner("tiles, prefill", f"attention {tune}/tuned.json --kernels prefill"),
        _tuner("tiles, prefill, 8 bits", f"attention {tune}/tuned.json --kernels prefill {eight}"),
        _benchmark("profile", f"step profile {sizes}", least=60),
        _benchmark("host", f"host {given} {steps}"),
        _benchmark("swap", f"kernels swap {sizes}"),
        _benchmark("swap, 8 bits", f"kernels swap {sizes} {eight}"),
        _tests("tests"),
        _pytest("tests alone", [test.partition("::")[0] for test in ALONE], *ALONE),
        # It takes longer than a slice, and resumes matrix by matrix.
        _tuner(
            "tiles, products",
            f"products --rounds 5 --resume --table {FOLDER}/tuned_products.json",
        ),
        _benchmark("products", f"products {sizes}"),
        _benchmark("experts", f"products experts {sizes}"),
        _benchmark("kernels", f"kernels {sizes} --peers sdpa flashinfer"),
        _benchmark("step, all", f"step {sizes}", least=90),
        _benchmark("engine", f"engine {given} {few} --rounds 1", least=120),
        _benchmark("servers", f"servers {given} {few} --rounds {rounds}", least=120),
        _benchmark("peers", f"kernels {sizes} --headlines --name peers"),
    ]
    if quick:
        least = Part._field_defaults["least"]
        return [part._replace(least=least) for part in found if "tiles" not in part.name]
    return found


def _study(name: str, words: str) -> Part:
    """An experiment on the engine by `python -m pagedsim`, in a folder of its name."""
    own = f"experiment={name} backend=engine report=false tracking=none {words}"
    place = f"hydra.run.dir={FOLDER}/{name}"
    return Part(name, (FRONT_DOOR, *own.split(), place), STUDIES, least=120)


def _benchmark(name: str, command: str, least: float = 45.0) -> Part:
    module, *words = command.split()
    tiled = module not in ("host", "products") and "swap" not in words
    full = f"pagedsim.experiments.benchmarks.{module}"
    return Part(name, (full, *words, "--out", FOLDER), tiled=tiled, least=least)


def _tuner(name: str, words: str) -> Part:
    return Part(name, ("pagedsim.experiments.benchmarks.tune", *words.split()), least=120)


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
    return Part(name, command, (*modules, PLUGIN), least=120)


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
PR_SET_PDEATHSIG = 1
"""Has Linux kill a part if this process is killed, so that no later measurement runs beside it."""


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
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    ended = partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL) if libc else None
    begun, code = time.monotonic(), None
    with TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=ended,
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


main = main_of(__name__, gpu)
