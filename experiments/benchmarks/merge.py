"""What came back from a GPU, as committed results; see `gpu.py`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path
from tarfile import TarError
from tempfile import TemporaryDirectory
from typing import Any

from pagedsim.experiments.benchmarks import device
from pagedsim.experiments.benchmarks.harness import ROOT
from pagedsim.experiments.benchmarks.shapes import DECODE
from pagedsim.experiments.benchmarks.step import Arm
from pagedsim.experiments.benchmarks.table import LIMIT, OF_COPY, cell, written
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import AUTO
from pagedsim.metrics.files import read_json
from pagedsim.report.numbers import signed

SHOWN = "h100-80gb-hbm3"
"""The folder of the GPU that pages name."""
PERFORMANCE, FIDELITY = "experiments/results/performance.md", "experiments/results/fidelity.md"
COMMITTED = ("*.json", "*/result.json", "*/cost.json")


def merge(archive: Path) -> None:
    """Commit a folder of results, or an archive of one: its files, tiles and figures on pages."""
    with TemporaryDirectory() as place:
        if not archive.is_dir():
            safe: Any = {} if archive.suffix == ".zip" else {"filter": "data"}
            try:
                shutil.unpack_archive(archive, place, **safe)
            except (OSError, ValueError, TarError) as problem:
                sys.exit(f"--merge {archive}: {problem}")
        files = sorted((archive if archive.is_dir() else Path(place)).rglob("gpu.json"))
        if len(files) != 1:
            sys.exit(f"--merge {archive}: must have one gpu.json, and has {len(files)}")
        about, source = read_json(files[0]), files[0].parent
        if not isinstance(about["capability"], list):
            sys.exit(f"--merge {archive}: is of a CPU at tiny sizes, and so no result")
        target = device.folder_named(about["device"])
        for pattern in COMMITTED:
            for path in sorted(source.glob(pattern)):
                commit(path, target / path.relative_to(source))
    tuning.add(target / tuning.PATH.name)
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: new figures; the text beside them is as it was")


def commit(path: Path, to: Path) -> None:
    """Copy a file, and say which constants of step times it changes."""
    content, before = read_json(path), read_json(to) if to.exists() else {}
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(path.read_bytes())
    print("/".join(to.parts[-2:]))
    if path.name == "cost.json":
        old = dict(numbers(before))
        for name, value in numbers(content):
            if old.get(name) != value:
                print(f"  {name}: {value:.3g}, was {old.get(name, nan):.3g}")


def numbers(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a file, by their path."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{path}{key}.")
        elif isinstance(value, (int, float)):
            yield f"{path}{key}", value


# -- pages -----------------------------------------------------------------------------------------


JUDGED = ("ttft_mean", "tpot_mean", "output_tokens_per_s")


def pages() -> dict[Path, str]:
    """The pages that show results of GPUs, with those of the files."""
    folder = device.RESULTS / SHOWN
    decode = cell(read_json(folder / "kernels.json"), OF_COPY, [DECODE]).replace("%", " %")
    step = cell(read_json(folder / "step.json"), LIMIT, [Arm(AUTO, True, ahead=True)])
    loads = read_json(folder / "validate" / "result.json")["data"]["regimes"]
    ttft, tpot, tokens = (loads["overload"]["metrics"][name] for name in JUDGED)
    spread = f"(± {ttft['spread'] * 100:.0f} % between the engine's runs)"
    error = f"TTFT mean {signed(ttft['error'])} {spread}, TPOT mean {signed(tpot['error'])}"
    # By page: what comes before, what is replaced, and by what.
    figures = [
        ("README.md", r"\n\| on an H100: [^|]*\| ", ".* %", decode),
        ("README.md", r"\n\| a decode step of [^|]*\| ", ".* ×", step),
        (
            "README.md",
            r"\n\| latency, [^|]* on an H100 [^|]*\| ",
            ".* %",
            f"{error}, tokens/s {signed(tokens['error'])}",
        ),
        (PERFORMANCE, "<!-- benchmarks:gpu -->\n", r"(?:\|.*\n)+", written(device.RESULTS) + "\n"),
        (
            FIDELITY,
            r"<!-- validate:h100 -->\n(?:\|.*\n){2}",
            r"(?:\|.*\n)+",
            "".join(f"| {' | '.join(row(*load))} |\n" for load in loads.items()),
        ),
    ]
    texts: dict[Path, str] = {}
    for page, before, old, new in figures:
        text = texts.get(path := ROOT / page) or path.read_text(encoding="utf-8")
        texts[path], count = re.subn(f"({before}){old}", f"\\g<1>{new}", text)
        assert count == 1, (page, before)
    return texts


def row(name: str, load: Mapping[str, Any]) -> list[str]:
    """How near the simulator is to the engine under a load."""
    known = load["metrics"]
    ttft, tpot, tokens = judged = [known[name] for name in JUDGED]
    engine = [f"{of['engine'] * 1e3:.3g} ms" for of in (ttft, tpot)]
    values = zip([*engine, f"{tokens['engine']:,.0f} /s"], judged, strict=True)
    return [
        *(name, str(load["requests"])),
        *(f"{text}, {signed(of['error'])} (± {of['spread'] * 100:.0f} %)" for text, of in values),
        " / ".join(signed(of["at_pace"]) for of in judged),
        ", ".join(f"{known['preemptions'][of]:.0f}" for of in ("engine", "simulator")),
        f"{load['by_request']['e2e']['pearson']:.3f}",
    ]
