"""The lowest version of each library with which pagedsim works, found by bisecting its releases.

    python -m tests.bounds                     (every library of an extra that users install)
    python -m tests.bounds hydra-core optuna   (these)
    python -m tests.bounds uvicorn==0.30.0     (one version: whether it works, and how it fails)
    python -m tests.bounds --lower numpy       (below its bound as well)

A version is installed, with what it requires, in a folder that comes before this environment's
packages; other libraries that pyproject.toml names stay as they are here. It works if the trial of
the library passes: commands as a user types them, and tests. A command that fails is given a second
chance. The bound of pyproject.toml is tried first: one that fails is raised by bisection, one that
works is kept, unless --lower is given, and the release before it is tried for the table. Needs uv;
torch and Triton, of gigabytes, are left as they are. Rows go to experiments/results/bounds.md, too.
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
PAGE = ROOT / "experiments" / "results" / "bounds.md"
TITLE = """# Lower bounds of libraries
What `python -m tests.bounds` printed: each library's bound as it was promised, and what happens
there; the bound that holds; and what happens with the release before it, in the library's trial and
in a command. The other libraries are those of `constraints.txt`. A failure is one that came twice.
torch and Triton are left as they are, since a release is gigabytes.

| library | extra | promised | what happens there | bound | before it | the trial | a command |
|---|---|---|---|---|---|---|---|
"""

PYTEST = ("pytest", "-q", "-x", "-p", "no:cacheprovider")
RUN = ("pagedsim", "workload.requests=20", "seeds=1", "tracking.mode=offline")
FIRST = (*RUN, "experiment=fcfs_vs_priority", "hydra.run.dir=OUT")
SWEEP = (*RUN, "-m", "experiment=single", "policy=fcfs,vtc", "hydra.sweep.dir=OUT")
RECORD = (*RUN, "experiment=record", "backend=engine", "model=tiny", "hydra.run.dir=OUT")
TUNE = (*RUN, "experiment=tune", "study.trials=6", "hydra.run.dir=OUT")


def tests(folder: str, *names: str) -> Sequence[str]:
    """The command that runs the tests of a folder, or some of them."""
    paths = [f"tests/{folder}/test_{name}.py" for name in names] or [f"tests/{folder}"]
    return (*PYTEST, *paths)


API = tests("serve", "openai_client", "refusals", "tokens_over_http")
TRIALS: Mapping[str, Sequence[Sequence[str]]] = {
    "simpy": (FIRST, tests("sim", "driver", "disk"), tests("serve", "realtime_sim")),
    "hydra-core": (FIRST, SWEEP, tests("run", "compose", "sweeps")),
    "hydra-joblib-launcher": (SWEEP,),
    "numpy": (FIRST, tests("metrics"), tests("report"), tests("workload", "draws", "synthetic")),
    "pyarrow": (FIRST, tests("metrics"), tests("workload", "traces"), tests("run", "library")),
    "matplotlib": (FIRST, tests("report")),
    "rich": (FIRST, SWEEP, tests("report", "console", "page"), tests("run", "sweeps")),
    "wandb": (FIRST, SWEEP, (*PYTEST, "tests/test_tracking.py")),
    "transformers": (RECORD, tests("engine/models"), tests("engine", "tokenizer", "llm")),
    "safetensors": (RECORD, tests("engine/models", "load", "gguf")),
    "tqdm": (RECORD, tests("engine", "llm")),
    "gguf": (tests("engine/models", "gguf"),),
    "accelerate": (tests("engine/models", "gguf"),),
    "fastapi": (API, tests("serve", "live", "server_limits")),
    "pydantic": (API,),
    "uvicorn": (tests("serve", "listen", "server_limits"), API),
    "httptools": (tests("serve", "listen"),),
    "uvloop": (tests("serve", "listen"),),
    "prometheus-client": (tests("serve", "metrics", "live"),),
    "aiohttp": (tests("run/http"),),
    "optuna": (TUNE, tests("experiments/studies", "tune")),
    "hydra-submitit-launcher": ((*SWEEP, "hydra/launcher=submitit_local"),),
}
"""What uses a library: modules with their arguments, OUT is an empty folder."""
STARTS: Mapping[str, Sequence[str]] = {
    "": FIRST,
    "engine": RECORD,
    "gguf": ("pagedsim", "serve", "port=0", "backend=engine", "backend.model=absent.gguf"),
    "serve": ("pagedsim", "serve", "port=0"),
    "tune": TUNE,
    "cluster": (*SWEEP, "hydra/launcher=submitit_local"),
}
"""A command that needs an extra, and refuses a library that is too old."""
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
    """The releases up to the installed one, the oldest first."""
    _, told = output([sys.executable, "-m", "pip", "index", "versions", library.name])
    listed = re.search(r"Available versions: (.*)", told)
    if listed is None:
        sys.exit(f"{library.name}: its releases cannot be listed: {told.strip()[-300:]}")
    here = numbers(version(library.name))
    known = {one for one in listed[1].split(", ") if re.fullmatch(r"[\d.]+", one)}
    return sorted((one for one in known if numbers(one) <= here), key=numbers)


def failure(library: Library, release: str) -> str:
    """How the trial fails with a release, in one line; empty: it passes."""
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        if told := installed(library, release, packages):
            return told
        for command in TRIALS[library.name]:
            if tried(command, packages) and (told := tried(command, packages)):
                return told
    return ""


def refusal(library: Library, release: str, bound: str) -> str:
    """What a command says with a release below this bound."""
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        extra = f'; extra == "{library.extra}"' if library.extra else ""
        if installed(library, release, packages, f"{library.name}>={bound}{extra}"):
            return ""
        return tried(STARTS[library.extra], packages)


def tried(command: Sequence[str], packages: Path) -> str:
    """How a command fails with these packages; empty: it does not."""
    paths = os.pathsep.join((str(packages), str(ROOT)))
    with tempfile.TemporaryDirectory() as out:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *(word.replace("OUT", out) for word in command)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths, "CI": "true"},  # pytest tells more then
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return f"has not ended after {PATIENCE} s"
    return reason(ended.stdout + ended.stderr, packages) if ended.returncode else ""


def installed(library: Library, release: str, packages: Path, bound: str = "") -> str:
    """Install a release and what it requires; the reason where that cannot be.

    pagedsim, which comes from this checkout, states no bounds but the one that is given.
    """
    others = [one.name for one in libraries() if one.name != library.name]
    pins, left_out = packages.with_name("pins.txt"), packages.with_name("left_out.txt")
    pins.write_text("".join(f"{name}=={version(name)}\n" for name in others))
    left_out.write_text("".join(f"{name}; python_version < '3'\n" for name in AS_THEY_ARE))
    stated = packages / "pagedsim-0.dist-info" / "METADATA"
    stated.parent.mkdir(parents=True)
    requires = f"Requires-Dist: {bound}\n" if bound else ""
    stated.write_text(f"Metadata-Version: 2.1\nName: pagedsim\nVersion: 0\n{requires}")
    code, told = output(
        [
            *("uv", "pip", "install", "--quiet", "--python", sys.executable),
            *("--target", str(packages), "-c", str(pins), "--override", str(left_out)),
            *("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"),
            f"{library.name}=={release}",
        ]
    )
    if "no wheels" in told or "no usable wheels" in told:
        tag = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"has no wheel for Python {tag}, or requires what has none"
    return f"cannot be installed: {' '.join(told.split())[:200]}" if code else ""


def output(command: Sequence[str]) -> tuple[int, str]:
    """A command's exit code, and what it prints on both streams."""
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def reason(text: str, packages: Path) -> str:
    """The line that says most: pytest's summary with its error, an error, or the last one."""
    for folder in (packages, ROOT):
        text = text.replace(f"{folder}/", "")
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*/", "", text)
    lines = [line.strip() for line in text.splitlines()]
    for sign in ("FAILED ", "ERROR ", "pagedsim: ", "Error:", ""):
        if found := [line for line in lines if line and sign in line and "traceback" not in line]:
            raised = [line[1:].strip() for line in lines if line.startswith("E   ")]
            bare = sign in ("FAILED ", "ERROR ") and " - " not in found[-1]
            return " - ".join((found[-1], *(raised[-1:] if bare else ())))[:200]
    return "no output"


class Found(NamedTuple):
    """A library's lowest release that works, and what others do."""

    library: Library
    promised: str
    works: str
    before: str
    fails: str
    told: str

    def __str__(self) -> str:
        promised = self.promised or "works"
        cells = (*self.library, promised, self.works, self.before, self.fails, self.told)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def lowest(library: Library, lower: bool) -> Found:
    """By bisection: above the bound if that fails, with `lower` also below it if it works."""
    known = releases(library)
    start = next(n for n, one in enumerate(known) if numbers(one) >= numbers(library.bound))
    told: dict[int, str] = {}

    def works(number: int) -> bool:
        told[number] = failure(library, known[number])
        line = f"  {library.name} {known[number]}: {told[number] or 'works'}"
        print(line, file=sys.stderr, flush=True)
        return not told[number]

    low, high = -1, start
    if not works(start):
        low, high = start, len(known) - 1
        if not works(high):
            sys.exit(f"{library.name} {known[high]}, which is installed: {told[high]}")
    elif start:
        low, high = (-1, start - 1) if works(start - 1) and lower else (start - 1, start)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    if low < 0:
        return Found(library, told[start], known[high], "", "it is the oldest one", "")
    refused = refusal(library, known[low], known[high])
    fails = told[low] or "works, too"
    return Found(library, told[start], known[high], known[low], fails, refused)


def write(found: Found) -> None:
    """Put the row in the page, in the place of the library's last one."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    rows = {line.split()[1]: line for line in old.splitlines() if line.startswith("| ")}
    rows[found.library.name] = str(found)
    ordered = [rows[one.name] for one in libraries() if one.name in rows]
    PAGE.write_text(TITLE + "".join(f"{row}\n" for row in ordered), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME[==VERSION]")
    parser.add_argument("--lower", action="store_true", help="search below bounds that work")
    given = parser.parse_args(words)
    asked = given.names
    known = {one.name: one for one in libraries()}
    for name in asked:
        if name.partition("==")[0] not in known:
            parser.error(f"{name}: must be one of {', '.join(known)}")
    # Also where this environment is not the shell's.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if which("uv") is None:
        sys.exit("uv is not installed: pip install uv")
    for name in asked or known:
        library, release = known[name.partition("==")[0]], name.partition("==")[2]
        if release:
            print(f"{name}: {failure(library, release) or 'works'}", flush=True)
            continue
        found = lowest(library, given.lower)
        write(found)
        print(found, flush=True)


if __name__ == "__main__":
    main()
