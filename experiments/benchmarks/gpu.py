"""All measurements of a GPU, in slices: tests, tiles, studies, and every benchmark of a device.

    python -m experiments.benchmarks.gpu --minutes 8 --archive gpu.tar.gz
    python -m experiments.benchmarks.gpu --unpack --archive gpu.tar.gz    (where there is no GPU)
    python -m experiments.benchmarks.gpu --device cpu --quick --out FOLDER

The parts run one after another, each in a process of its own; a failed part does not stop the
others. Their results are in a folder, by default experiments/results/<GPU>, and their states in its
gpu.json. With --archive all of it is also in one small file, which is read at the start and written
again whenever a part ends: on another machine the same command continues from it, in any clone. A
run that is killed loses at most the part that was running, and of most parts only one line.

A part is done for the GPU, its command, the sources that it runs and, for kernels, the tuned tiles.
If one of these differs the part runs again. Tiles go into the tables in kernels/ as soon as they
are known, and later parts use them.

Studies (python -m pagedsim) need simpy and hydra; without them they are left out, with a line that
says what to install. Tests that passed are not run again.

The exit code is 0 when all is done, 3 when the time is over, and 1 if the remaining parts have
failed.
"""

from __future__ import annotations

import json
import signal
import sys
import tarfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.device import facts, folder_named
from experiments.benchmarks.device import gpu as require_gpu
from experiments.benchmarks.gpu_parts import FRONT_DOOR, Part, carried_out, lacking, parts
from experiments.benchmarks.harness import keep, main_of, parse, table
from pagedsim.kernels import product_tuning, tuning
from pagedsim.metrics.files import read_json

NAME = "experiments.benchmarks.gpu"
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
        "--device": ("cuda", "cpu"),
        "--quick": {"action": "store_true", "help": "tiny sizes; a cpu has no others"},
        "--minutes": 25.0,
        "--out": {"type": Path, "help": "a folder, for other than results/<GPU>"},
        "--archive": {"type": Path, "help": "a .tar.gz to go on with, and to leave"},
        "--unpack": {"action": "store_true", "help": "the archive, and nothing else"},
    }
    asked = parse(__doc__, words, options)
    quick = asked.quick or asked.device == "cpu"
    if asked.unpack:
        if asked.archive is None:
            sys.exit("--unpack: there is nothing to unpack; give --archive")
        place = unpack(asked.archive, asked.out)
        take_over(place)
        ledger = read_json(place / "gpu.json")
        count = len(ledger["parts"])
        print(f"{asked.archive}: {count} parts of {ledger['device']}, in {place}")
        return
    if quick and asked.out is None:
        sys.exit("--out: what is quick is written nowhere by itself; give a folder")
    if asked.device == "cuda":
        require_gpu("; --device cpu --quick --out FOLDER goes the whole way at tiny sizes")
    told = facts(torch.device(asked.device), NAME, words)
    told["command"] = " ".join(["python", "-m", NAME, *words])
    place = (asked.out or folder_named(told["device"])).resolve()
    if asked.archive is not None and asked.archive.exists():
        unpack(asked.archive, place, told["device"])
    take_over(place)
    ledger = Ledger(place, told, asked.archive)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted, skipped = able(parts(asked.device, quick))
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


def able(wanted: Sequence[Part]) -> tuple[list[Part], str]:
    """The parts whose packages are installed, and a line about the others, if any."""
    packages = " ".join(f"'{one}'" for one in lacking())
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
        """Write the archive, if there is to be one."""
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
            archive.extractall(place, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
        reason = "it has no gpu.json" if isinstance(error, KeyError) else error
        sys.exit(f"--archive {path}: is none that this command has written: {reason}")
    return place


main = main_of(gpu)

if __name__ == "__main__":
    main()
