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

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.device import facts, folder_named
from experiments.benchmarks.device import gpu as require_gpu
from experiments.benchmarks.gpu.ledger import (
    AHEAD,
    BEGUN,
    CUT,
    DONE,
    FAILED,
    Archive,
    Ledger,
    in_vain,
)
from experiments.benchmarks.gpu.parts import FRONT_DOOR, Part, carried_out, lacking, parts
from experiments.benchmarks.harness import Parser, positive_float, table
from pagedsim.kernels import product_tuning, tuning

NAME = "experiments.benchmarks.gpu"
GOES_ON = 3
"""The exit code of a slice with parts left."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts that are not done, and print the states of all."""
    words = sys.argv[1:] if words is None else words
    asked = _options().parse_args(words)
    _check(asked)
    if asked.unpack:
        print(unpacked(asked.archive, asked.out))
        return
    if asked.device == "cuda":
        require_gpu("; --device cpu --quick --out FOLDER goes the whole way at tiny sizes")
    told = facts(torch.device(asked.device), f"{NAME}.__main__", words)
    told["command"] = " ".join(["python", "-m", NAME, *words])
    place = (asked.out or folder_named(told["device"])).resolve()
    if asked.archive is not None and asked.archive.exists():
        Archive(asked.archive).unpack(place, told["device"])
    take_over(place)
    ledger = Ledger(place, told, asked.archive)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted, skipped = able(parts(asked.device, asked.quick or asked.device == "cpu"))
    print(skipped, end="", flush=True)
    try:
        run(wanted, ledger, asked.minutes * 60)
    except KeyboardInterrupt:
        ledger.pack()
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    print(f"{written(ledger, wanted)}\n{skipped}", end="", flush=True)
    sys.exit(verdict(ledger, wanted))


def _options() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; a cpu has no others")
    parser.add_argument("--minutes", type=positive_float, default=25.0, help="for this slice")
    parser.add_argument("--out", type=Path, help="a folder, for other than results/<GPU>")
    parser.add_argument("--archive", type=Path, help="a .tar.gz to go on with, and to leave")
    parser.add_argument("--unpack", action="store_true", help="the archive, and nothing else")
    return parser


def _check(asked: argparse.Namespace) -> None:
    if asked.minutes <= 0:
        sys.exit(f"--minutes {asked.minutes:g}: must be above 0")
    if asked.unpack and asked.archive is None:
        sys.exit("--unpack: there is nothing to unpack; give --archive")
    if not asked.unpack and (asked.quick or asked.device == "cpu") and asked.out is None:
        sys.exit("--out: what is quick is written nowhere by itself; give a folder")


def unpacked(path: Path, out: Path | None) -> str:
    """Write the results and tiles of an archive to their places in the repository."""
    archive = Archive(path)
    device = archive.ledger["device"]
    place = out or folder_named(device)
    archive.unpack(place, device)
    take_over(place)
    return f"{path}: {len(archive.ledger['parts'])} parts of {device}, in {place}"


def able(wanted: Sequence[Part]) -> tuple[list[Part], str]:
    """The parts whose packages are installed, and a line about the others, if any."""
    packages = " ".join(f"'{one}'" for one in lacking())
    others = [part.name for part in wanted if packages and part.words[0] == FRONT_DOOR]
    line = f"skipped: {', '.join(others)}; they need: pip install {packages}\n" if others else ""
    return [part for part in wanted if part.name not in others], line


def run(wanted: Sequence[Part], ledger: Ledger, budget: float) -> None:
    """Run the parts that are not done, for `budget` seconds."""
    end = time.monotonic() + budget
    if others := ledger.of_other_code(wanted):
        print(f"measured by other code, so measured again: {', '.join(others)}", flush=True)
    for part in wanted:
        if ledger.state(part) == DONE:
            print(f"{part.name}: done already", flush=True)
    tried: list[tuple[str, dict[str, str]]] = []
    while True:
        seconds = end - time.monotonic()
        able = [
            part
            for part in ledger.left(wanted)
            if part.least <= seconds and (part.name, part.identity(ledger.device)) not in tried
        ]
        if not able:
            return
        tried.append((able[0].name, able[0].identity(ledger.device)))
        _carry_out(able[0], ledger, seconds)
        take_over(ledger.place)


def _carry_out(part: Part, ledger: Ledger, seconds: float) -> None:
    print(f"{part.name}: {part.command}", flush=True)
    spent = ledger.spent(part)
    ledger.put(part, BEGUN, spent=spent)
    found = carried_out(part, ledger.place, min(seconds, part.most), ledger.pack)
    if found.code is not None:
        state = FAILED if found.code else DONE
    else:  # stopped by the end of the slice, or it may hang
        spent = round(spent + found.seconds, 1)
        state = BEGUN if seconds < part.most or not in_vain(spent) else CUT
    said: dict[str, Any] = {} if state == DONE else {"said": found.said}
    if found.code is None:
        said["spent"] = spent
    ledger.put(part, state, seconds=found.seconds, **said)


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


def written(ledger: Ledger, wanted: Sequence[Part]) -> str:
    """The states of parts, as Markdown."""
    rows = []
    for part in wanted:
        seconds = ledger.parts.get(part.name, {}).get("seconds")
        rows.append([part.name, ledger.state(part), "" if seconds is None else f"{seconds:.0f}"])
    return f"{ledger.device}\n\n{table(['part', '', 'seconds'], rows)}"


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


if __name__ == "__main__":
    main()
