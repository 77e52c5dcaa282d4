"""What there is to run on a GPU, in the order in which it is worth most."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.code import ROOT, digest
from experiments.benchmarks.device import tiles
from experiments.benchmarks.shapes import BASE

FOLDER = "{out}"
"""Stands in the words of a part for the folder of results, which is another one everywhere."""
EIGHT = ("--kv-cache-dtype", "fp8_e4m3")
SMOKE = "experiments.benchmarks.gpu.smoke"
WORKERS = 8
ALONE = (
    "tests/engine/test_graphs.py::test_the_memory_of_graphs_is_foreseen",
    "tests/engine/test_devices.py::test_no_kernel_reads_or_writes_beside_its_memory",
)
"""Tests that nothing else may run beside: one looks at all of the GPU's free memory, the other
takes minutes."""
KERNELS = ("decode", "prefill")
"""Of attention, the one first that bars are about first."""


class Part(NamedTuple):
    """A command, run by this Python in a process of its own."""

    name: str
    words: tuple[str, ...]
    modules: tuple[str, ...] = ()
    """Whose code it runs, where that is not its first word alone."""
    tiled: bool = False
    """Whether what it measures depends on the tiles that were tuned."""
    most: float = 600.0
    """Seconds after which something must be wrong."""
    least: float = 5.0
    """Seconds: with fewer left it is not begun."""

    @property
    def command(self) -> str:
        """As results name it."""
        return " ".join(["python", "-m", *self.words]).replace(FOLDER, "FOLDER")

    def identity(self, device: str) -> dict[str, str]:
        """What must be the same for what was measured before to hold."""
        known = {"command": self.command, "code": digest(*(self.modules or self.words[:1]))}
        return {**known, "tiles": tiles(device)} if self.tiled else known


def parts(device: str, quick: bool) -> list[Part]:
    """All of them, in their order."""
    found = _tiny(device) if quick else _whole()
    if quick:  # whatever they take
        return [part._replace(least=Part._field_defaults["least"]) for part in found]
    return found


def _whole() -> list[Part]:
    sizes = ("--rounds", "10")
    tune = ("--short", "--rounds", "5", "--models", BASE, "--table", f"{FOLDER}/tuned.json")
    return [
        _tests("smoke", "-p", SMOKE)._replace(most=180, least=60),
        _benchmark("headlines", "kernels", *sizes, "--resume", "--headlines", "--peers"),
        _benchmark("step", "step", *sizes, "--resume", "--headlines", least=90),
        _benchmark("profile", "profile", *sizes, least=60),
        *(_tuner(f"tiles, {kernel}", *tune, "--kernels", kernel) for kernel in KERNELS),
        *(
            _tuner(f"tiles, {kernel}, 8 bits", *tune, "--kernels", kernel, *EIGHT)
            for kernel in KERNELS
        ),
        _benchmark("swap", "swap", *sizes, "--resume"),
        _benchmark("swap, 8 bits", "swap", *sizes, "--resume", *EIGHT),
        _benchmark("host", "host", "--device", "cuda"),
        _tests("tests")._replace(least=120),
        _alone(),
        _products(),
        _benchmark("products", "products", *sizes, "--resume"),
        _benchmark("experts", "experts", *sizes, "--resume"),
        _benchmark("kernels", "kernels", *sizes, "--resume", "--peers", "sdpa", "flashinfer"),
        _benchmark("step, all", "step", *sizes, "--resume", least=90),
        _benchmark("engine", "engine", "--device", "cuda", "--repeats", "1", least=120),
        _benchmark("servers", "servers", least=120),
        _benchmark("peers", "kernels", *sizes, "--resume", "--headlines", "--name", "peers"),
    ]


def _tiny(device: str) -> list[Part]:
    """The same ones but the tuner's, which needs a GPU's clock."""
    sizes = ("--device", device, "--quick", "--rounds", "2", "--resume")
    few = ("--prompts", "8", "--tokens", "8", "--repeats", "1")
    short = ("--running", "1", "64", "--steps", "20", "--rounds", "2")
    return [
        _tests("smoke", "-p", SMOKE),
        _benchmark("headlines", "kernels", *sizes, "--headlines", "--peers"),
        _benchmark("step", "step", *sizes, "--headlines"),
        _benchmark("profile", "profile", *sizes),
        _benchmark("swap", "swap", *sizes),
        _benchmark("swap, 8 bits", "swap", *sizes, *EIGHT),
        _benchmark("host", "host", "--device", device, *short),
        _tests("tests"),
        _alone(),
        _benchmark("products", "products", *sizes),
        _benchmark("experts", "experts", *sizes),
        _benchmark("kernels", "kernels", *sizes, "--peers", "sdpa", "flashinfer"),
        _benchmark("step, all", "step", *sizes),
        _benchmark("engine", "engine", "--device", device, *few),
        _benchmark("servers", "servers", "--device", device, *few),
        _benchmark("peers", "kernels", *sizes, "--headlines", "--name", "peers"),
    ]


def _benchmark(name: str, module: str, *words: str, least: float = 45.0) -> Part:
    full = f"experiments.benchmarks.{module}"
    tiled = module not in ("swap", "host", "products", "experts")
    return Part(name, (full, *words, "--out", FOLDER), tiled=tiled, least=least)


def _tuner(name: str, *words: str) -> Part:
    return Part(name, ("experiments.benchmarks.tune_kernels", *words), least=120)


def _products() -> Part:
    """It takes longer than a slice, and goes on matrix by matrix."""
    table = ("--resume", "--table", f"{FOLDER}/tuned_products.json")
    words = ("experiments.benchmarks.tune_products", "--rounds", "5", *table)
    return Part("tiles, products", words, least=120)


def _tests(name: str, *words: str) -> Part:
    """Without conftest.py, so that neither simpy nor hydra nor wandb need be there."""
    files = marked()
    together = ("-n", str(WORKERS)) if _many() else ()
    others = [f"--deselect={test}" for test in ALONE]
    return Part(name, (*_pytest(name), *together, *words, *others, *files), _modules(files))


def _alone() -> Part:
    """Those that the others would disturb."""
    name, files = "tests alone", [test.partition("::")[0] for test in ALONE]
    return Part(name, (*_pytest(name), *ALONE), _modules(files), least=120)


def _pytest(name: str) -> tuple[str, ...]:
    report = f"--junitxml={FOLDER}/{name}.xml"
    return "pytest", "-q", "-m", "gpu", "--noconftest", report


def _modules(files: Sequence[str]) -> tuple[str, ...]:
    return (*(path.removesuffix(".py").replace("/", ".") for path in files), SMOKE)


def _many() -> bool:
    """Whether tests can run side by side: most of their time they compile."""
    return importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= WORKERS


def marked() -> list[str]:
    """The files with tests for a GPU; others may need what is not installed."""
    files = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    found = [path for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT).as_posix() for path in found]
