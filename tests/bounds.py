"""The lowest version of each library with which pagedsim works, found by bisecting its releases.

    python -m tests.bounds                     (every library of an extra that users install)
    python -m tests.bounds hydra-core optuna   (these)
    python -m tests.bounds uvicorn==0.30.0     (one version: whether it works, and how it fails)

A version is installed, with what it requires, in a folder that comes before this environment's
packages; other libraries that pyproject.toml names stay as they are here. It works if the trial of
its extra passes: commands as a user types them, and tests. Releases below the bound in
pyproject.toml are not tried. Needs uv; torch and Triton, of gigabytes, are left as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import NamedTuple

from pagedsim.requirements import numbers

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
AS_THEY_ARE = ("torch", "triton")
EXTRAS = ("", "engine", "gguf", "serve", "tune", "cluster")
"""Those that users install; the empty one is the light package."""
PYTEST = ("pytest", "-q", "-x", "-p", "no:cacheprovider")
RUN = ("pagedsim", "workload.requests=20", "seeds=1", "tracking.mode=offline")
SWEEP = (*RUN, "-m", "experiment=single", "policy=fcfs,vtc", "hydra.sweep.dir=OUT")
TRIALS: Mapping[str, Sequence[Sequence[str]]] = {
    "": (
        (*RUN, "experiment=fcfs_vs_priority", "hydra.run.dir=OUT"),
        SWEEP,
        (*PYTEST, "tests/run/test_compose.py", "tests/test_tracking.py", "tests/metrics"),
        (*PYTEST, "tests/report", "tests/sim/test_driver.py"),
    ),
    "engine": (
        (*RUN, "experiment=record", "backend=engine", "model=tiny", "hydra.run.dir=OUT"),
        (*PYTEST, "tests/engine/test_llm.py", "tests/engine/models"),
    ),
    "gguf": ((*PYTEST, "tests/engine/models"),),
    "serve": ((*PYTEST, "tests/serve", "tests/run/http"),),
    "tune": (
        (*RUN, "experiment=tune", "study.trials=6", "hydra.run.dir=OUT"),
        (*PYTEST, "tests/experiments/studies/test_tune.py"),
    ),
    "cluster": ((*SWEEP, "hydra/launcher=submitit_local"),),
}
"""The trial of each extra: modules with their arguments, OUT is an empty folder."""
PATIENCE = 900
"""Seconds of one command."""


class Library(NamedTuple):
    """A library that pyproject.toml names."""

    name: str
    extra: str
    bound: str


def libraries() -> Iterator[Library]:
    """Those of the extras that users install, with their bounds."""
    named = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for extra in EXTRAS:
        for text in named[extra]:
            found = re.match(r"([\w-]+)>=([\d.]+)", text)
            assert found is not None, f"{text}: has no lower bound"
            if found[1] not in AS_THEY_ARE:
                yield Library(found[1], extra, found[2])


def releases(library: Library) -> list[str]:
    """The releases from the bound to the installed one, the oldest first."""
    told = output([sys.executable, "-m", "pip", "index", "versions", library.name])
    listed = re.search(r"Available versions: (.*)", told)
    if listed is None:
        sys.exit(f"{library.name}: its releases cannot be listed: {told.strip()[-300:]}")
    installed = numbers(version(library.name))
    known = {one for one in listed[1].split(", ") if re.fullmatch(r"[\d.]+", one)}
    return sorted(
        (one for one in known if numbers(library.bound) <= numbers(one) <= installed), key=numbers
    )


def failure(library: Library, release: str) -> str:
    """How the trial fails with a release, in one line; empty: it passes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if told := installed(library, release, place / "packages"):
            return told
        paths = [str(place / "packages"), str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "offline"}
        for number, (module, *words) in enumerate(TRIALS[library.extra]):
            out = place / f"out{number}"
            command = [sys.executable, "-m", module, *(w.replace("OUT", str(out)) for w in words)]
            try:
                ended = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
            except subprocess.TimeoutExpired:
                return f"{module} {words[-1]}: has not ended after {PATIENCE} s"
            if ended.returncode:
                return f"{' '.join((module, *words))[:80]}: {reason(ended.stdout + ended.stderr)}"
    return ""


def installed(library: Library, release: str, place: Path) -> str:
    """Install a release and what it requires; the reason where that cannot be."""
    others = [one.name for one in libraries() if one.name != library.name]
    pins, left_out = place.with_name("pins.txt"), place.with_name("left_out.txt")
    pins.write_text("".join(f"{name}=={version(name)}\n" for name in others))
    left_out.write_text("".join(f"{name}; python_version < '3'\n" for name in AS_THEY_ARE))
    told = output(
        [
            *("uv", "pip", "install", "--quiet", "--python", sys.executable),
            *("--target", str(place), "-c", str(pins), "--override", str(left_out)),
            *("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"),
            f"{library.name}=={release}",
        ]
    )
    there = place.is_dir() and any(place.iterdir())
    return "" if there else f"cannot be installed: {' '.join(told.split())[-200:]}"


def output(command: Sequence[str]) -> str:
    """What a command prints, of both streams."""
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def reason(text: str) -> str:
    """The line that says most: pytest's summary, an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for sign in ("FAILED ", "ERROR ", "pagedsim: ", "Error:"):
        if found := [line for line in lines if sign in line and "for the traceback" not in line]:
            return found[-1][:200]
    return lines[-1][:200] if lines else "no output"


def lowest(library: Library) -> tuple[str, str, str]:
    """The lowest release that works, the one before it, and how that fails."""
    found = releases(library)
    if told := failure(library, found[-1]):
        sys.exit(f"{library.name} {found[-1]}, which is installed: {told}")
    low, high, why = -1, len(found) - 1, ""
    here = 0  # the bound itself, which mostly works
    while low + 1 < high:
        told = failure(library, found[here])
        print(f"  {library.name} {found[here]}: {told or 'works'}", file=sys.stderr, flush=True)
        low, high, why = (here, high, told) if told else (low, here, why)
        here = (low + high) // 2
    return found[high], found[low] if why else "", why


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME[==VERSION]")
    asked = parser.parse_args(words).names
    known = {one.name: one for one in libraries()}
    for name in asked:
        if name.partition("==")[0] not in known:
            parser.error(f"{name}: must be one of {', '.join(known)}")
    if which("uv") is None:
        sys.exit("uv is not installed: pip install uv")
    print("| library | extra | promised | works from | the release before fails with |")
    print("|---|---|---|---|---|")
    for name in asked or known:
        library, release = known[name.partition("==")[0]], name.partition("==")[2]
        if release:
            print(f"{name}: {failure(library, release) or 'works'}", flush=True)
            continue
        works, before, why = lowest(library)
        told = f"{before}: {why}".replace("|", "\\|") if before else ""
        cells = (library.name, library.extra, library.bound, works, told)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
