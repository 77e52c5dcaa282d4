"""All that a GPU has to tell, in one command: tests, tuning, and every benchmark of a device.

    python -m experiments.benchmarks.gpu --out experiments/results/h200 --minutes 25
    python -m experiments.benchmarks.gpu --device cpu --quick --out FOLDER    (without a GPU)

The parts run one after another, each in a process of its own, and what fails leaves the others
alone. How far they came is in FOLDER/gpu.json, what they measured beside it. When the minutes are
over the part under way is ended; the same command goes on with what is not done yet. Tests run
without conftest.py, so that neither simpy nor hydra nor wandb need be there. Tiles that were tuned
are put into kernels/tuned.json at once: what follows is timed with them.

FlexAttention, which is compiled for each case, is left to the benchmark of kernels by itself.
No part but the last takes more than half of the time that is left, and when the command goes on,
what was not begun comes before what was cut off or failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.device import Plain, facts, folder_of, keep, require_gpu, table
from experiments.benchmarks.shapes import BASE
from pagedsim.kernels import tuning
from pagedsim.metrics.jsons import read_json

ROOT = Path(__file__).parents[2]
DONE, FAILED, CUT, AHEAD = "done", "failed", "out of time", "not begun"
EIGHT = ("--kv-cache-dtype", "fp8_e4m3")
TAIL = 30
"""Lines that are kept of what a part says that does not get done."""
LEAST = 5.0
"""Seconds: with fewer left, no part begins."""


class Part(NamedTuple):
    """A command, run by this Python."""

    name: str
    words: tuple[str, ...]


def main(words: Sequence[str] | None = None) -> None:
    """Run what is not done yet; say how each went."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; a cpu has no others")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it")
    parser.add_argument("--out", type=Path, help="a folder, for other than results/<GPU>")
    asked = parser.parse_args(words)
    quick = asked.quick or asked.device == "cpu"
    if asked.minutes <= 0:
        sys.exit(f"--minutes {asked.minutes:g}: must be above 0")
    if quick and asked.out is None:
        sys.exit("--out: what is quick is written nowhere by itself; give a folder")
    if asked.device == "cuda":
        require_gpu("; --device cpu --quick --out FOLDER goes the whole way at tiny sizes")
    device = torch.device(asked.device)
    place = (asked.out or folder_of(device)).resolve()
    if place.is_relative_to(ROOT):  # from where the parts run
        place = place.relative_to(ROOT)
    told = facts(device, "experiments.benchmarks.gpu", words)
    try:
        kept = run(parts(asked.device, quick, place), ROOT / place, told, asked.minutes * 60)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is not done", file=sys.stderr)
        sys.exit(130)
    print(written(kept))
    if any(one["state"] != DONE for one in kept["parts"].values()):
        sys.exit("the same command goes on with what is not done")


def parts(device: str, quick: bool, place: Path) -> list[Part]:
    """All of them, in the order in which they run."""
    out = ("--out", str(place))
    sizes = ("--device", device, *(("--quick", "--rounds", "2") if quick else ("--rounds", "10")))
    few = ("--prompts", "8", "--tokens", "8") if quick else ()
    short = ("--running", "1", "64", "--steps", "20", "--rounds", "2") if quick else ()
    tune = ("--short", "--rounds", "5", "--models", BASE, "--table", str(place / "tuned.json"))
    found = [Part("tests", ("pytest", "-q", "-m", "gpu", "--noconftest", *tests()))]
    if not quick:
        found.append(_benchmark("tune", "tune_kernels", *tune))
        found.append(_benchmark("tune, 8 bits", "tune_kernels", *tune, *EIGHT))
    return [
        *found,
        _benchmark("kernels", "kernels", *sizes, *out, "--peers", "sdpa", "flashinfer"),
        _benchmark("swap", "swap", *sizes, *out),
        _benchmark("swap, 8 bits", "swap", *sizes, *out, *EIGHT),
        _benchmark("step", "step", *sizes, *out),
        _benchmark("engine", "engine", "--device", device, *few, "--repeats", "1", *out),
        _benchmark("host", "host", "--device", device, *short, *out),
    ]


def _benchmark(name: str, module: str, *words: str) -> Part:
    return Part(name, (f"experiments.benchmarks.{module}", *words))


def tests() -> list[str]:
    """The files with tests for a GPU; others may need what is not installed."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT).as_posix() for path in marked]


def run(wanted: Sequence[Part], place: Path, told: dict[str, Any], budget: float) -> dict[str, Any]:
    """Run what is not done, for `budget` seconds; returns what gpu.json has in the end."""
    end = time.monotonic() + budget
    known = _known(place, told["device"])
    kept = {**told, "parts": {part.name: known[part.name] for part in wanted if part.name in known}}
    take_over(place / "tuned.json")
    left = [part for part in wanted if not _is_done(part, known)]
    for name in [part.name for part in wanted if part not in left]:
        print(f"{name}: done already", flush=True)
    left.sort(key=lambda part: known.get(part.name, {}).get("state", AHEAD) != AHEAD)
    for part in left:
        print(f"{part.name}: {_command(part)}", flush=True)
        seconds = end - time.monotonic()
        kept["parts"][part.name] = carried_out(part, seconds / (1 if part is left[-1] else 2))
        take_over(place / "tuned.json")
        keep(place, "gpu", kept)
    return kept


def _is_done(part: Part, known: Mapping[str, Any]) -> bool:
    before = known.get(part.name, {})
    return before.get("state") == DONE and before["command"] == _command(part)


def _known(place: Path, device: str) -> dict[str, Any]:
    path = place / "gpu.json"
    if not path.exists():
        return {}
    kept = read_json(path)
    if kept["device"] != device:
        sys.exit(f"--out {place}: is of {kept['device']}, and this is {device}; give another")
    parts_of: dict[str, Any] = kept["parts"]
    return parts_of


def carried_out(part: Part, seconds: float) -> dict[str, Any]:
    """How a part went in the time that it had."""
    found: dict[str, Any] = {"command": _command(part), "seconds": 0.0, "state": AHEAD}
    if seconds < LEAST:
        return found
    begun = time.monotonic()
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *part.words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
            found["state"] = FAILED if ended.returncode else DONE
        except subprocess.TimeoutExpired:
            found["state"] = CUT
        found["seconds"] = round(time.monotonic() - begun, 1)
        said.seek(0)
        text = said.read().replace(f"{ROOT}/", "")
    print(text, flush=True)
    if found["state"] != DONE:
        found["said"] = text.splitlines()[-TAIL:]
    return found


def _command(part: Part) -> str:
    return " ".join(["python", "-m", *part.words])


def take_over(tuned: Path) -> None:
    """Put what was tuned into the table that kernels read."""
    if tuned.exists():
        tuning.write([*tuning.read(), *tuning.read(tuned)])


def written(kept: dict[str, Any]) -> str:
    """How the parts went, as Markdown."""
    rows = [[name, one["state"], f"{one['seconds']:.0f}"] for name, one in kept["parts"].items()]
    title = f"{kept['device']}, driver {kept['driver']}, torch {kept['torch']}, {kept['date']}"
    return f"{title}\n\n{table(['part', '', 'seconds'], rows)}"


if __name__ == "__main__":
    main()
