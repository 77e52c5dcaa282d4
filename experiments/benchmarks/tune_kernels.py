"""Tile sizes of the attention kernels, tried on the GPU that is there; writes kernels/tuned.json.

    python -m experiments.benchmarks.tune_kernels [--models llama-3.1-8b ...]
    python -m experiments.benchmarks.tune_kernels --kv-cache-dtype fp8_e4m3

For each model's head shape, candidates take turns with the defaults over a grid of batches and
contexts. The entry is the candidate whose time over the defaults' has the least geometric mean:
one for the whole grid, since a kernel that changed with the batch would give a sequence another
result in other company. Decode is tuned in two turns: tiles, then the parts of a context.

First all candidates are compiled, on all cores; those that spill registers or do not fit the GPU
are out, and the others need not be compiled again. Who computes something else is out, too. An
entry is written as soon as it is known, so `--models` and `--kernels` do it in slices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.cuts import DTYPE, heads_of, run, screened, usual
from experiments.benchmarks.device import Plain, add_cache, facts, medians, require_gpu
from experiments.benchmarks.shapes import LONG, SHAPES, Case, Problem
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import AUTO
from pagedsim.kernels.tiles import MIN_ROWS, Split, Tiles, power_of_two
from pagedsim.kernels.tuning import DEFAULT, Cut, Entry

DECODES = (
    *((1, 512), (1, 4096), (8, 4096), (64, 512), (64, 1024), (64, 4096), (256, 1024)),
    *((8, 32768), (1, LONG), (63, 1024, LONG)),
)
"""(batch, context), and the context of one more sequence beside them"""
PREFILLS = ((1, 512, 512), (1, 4096, 4096), (2, 512, 8192))
"""(batch, query tokens, context)"""

Race = Callable[[Sequence[Cut], Case], Mapping[Cut, float]]
"""Seconds of a case by candidate; those that cannot do it are left out."""
Screen = Callable[[Sequence[Cut], Case], Sequence[Cut]]
"""Those candidates that are worth a race."""


class Grid(NamedTuple):
    """What is tried, each with each."""

    rows: tuple[int, ...] = (64, 128)
    keys: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (2, 3, 5, 7)
    parts: tuple[int, ...] = (128, 256, 512, 1024)
    most: tuple[int, ...] = (32, 64, 128)


FULL = Grid()
SHORT = Grid(keys=(64, 128), stages=(3, 5), parts=(256, 512), most=(128,))
"""Where minutes count: each candidate is compiled, which takes longer than its race."""


class Winner(NamedTuple):
    """The best candidate and its time over the first candidate's, over all cases."""

    cut: Cut
    ratio: float


def main(words: Sequence[str] | None = None) -> None:
    """Tune each model's shape, and write its entries as soon as they are known."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=tuning.KERNELS, default=tuning.KERNELS)
    add_cache(parser)
    parser.add_argument("--short", action="store_true", help="a third of the candidates")
    parser.add_argument(
        "--rounds", type=at_least_one, default=20, help="a time is the median of so many"
    )
    parser.add_argument("--table", type=Path, default=tuning.PATH, help="the file to write to")
    asked = parser.parse_args(words)
    require_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    told = facts(device, "experiments.benchmarks.tune_kernels", words)
    gpu = Gpu(told.pop("device"), tuning.capability(device))
    for model, kernel in product(asked.models, asked.kernels):
        entry = tuned(
            model,
            kernel,
            gpu,
            told,
            lambda cuts, case: timed(cuts, case, device, asked.rounds),
            lambda cuts, case: screened(cuts, case, gpu.capability),
            asked.kv_cache_dtype,
            SHORT if asked.short else FULL,
        )
        known = tuning.read(asked.table) if asked.table.exists() else []
        tuning.write([*known, entry], asked.table)


class Gpu(NamedTuple):
    """What entries are for."""

    name: str
    capability: tuple[int, int]


def tuned(
    model: str,
    kernel: str,
    gpu: Gpu,
    told: Mapping[str, Any],
    race: Race,
    screen: Screen,
    cache: str = AUTO,
    grid: Grid = FULL,
) -> Entry:
    """The entry of a model's shape; says what it found."""
    heads = heads_of(model, cache)
    first = usual(kernel, heads, gpu.capability)
    work = best_prefill if kernel == "prefill" else best_decode
    cut, ratio = work(model, first, race, screen, cache, grid)
    what = model if cache == AUTO else f"{model}, {cache}"
    print(f"{what}, {kernel}: {ratio:.3f} of the defaults' time with {cut.tiles}", end="")
    print(f", {cut.split}" if kernel == "decode" else "", flush=True)
    measured = {**told, "of_default_seconds": round(ratio, 4)}
    return Entry(*gpu, kernel, heads, cut.tiles, cut.split, measured)


def best_prefill(
    model: str, default: Cut, race: Race, screen: Screen, cache: str, grid: Grid
) -> Winner:
    """Tiles of prefills and chunks."""
    candidates = [
        Cut(Tiles(rows, keys, warps, stages), DEFAULT)
        for rows, keys, warps, stages in product(*grid[:4])
        if rows >= max(MIN_ROWS, power_of_two(SHAPES[model].group))
    ]
    cases = [Case(model, *numbers, cache=cache) for numbers in PREFILLS]
    return best([default, *screen(candidates, cases[0])], cases, race)


def best_decode(
    model: str, default: Cut, race: Race, screen: Screen, cache: str, grid: Grid
) -> Winner:
    """Tiles of decodes, then the parts that these tiles do best in."""
    cases = [
        Case(model, batch, 1, context, cache=cache, beside=sum(beside))
        for batch, context, *beside in DECODES
    ]
    candidates = [
        default._replace(tiles=replace(default.tiles, keys=keys, warps=warps, stages=stages))
        for keys, warps, stages in product(*grid[1:4])
    ]
    first = best([default, *screen(candidates, cases[0])], cases, race)
    splits = [
        first.cut._replace(split=Split(part, most))
        for part, most in product(*grid[4:])
        if part % first.cut.tiles.keys == 0
    ]
    return best([default, first.cut, *screen(splits, cases[0])], cases, race)


def best(candidates: Iterable[Cut], cases: Iterable[Case], race: Race) -> Winner:
    """Who is fastest over all cases, of those who can do all of them; the first always can."""
    left = list(dict.fromkeys(candidates))
    default = left[0]
    ratios: dict[Cut, list[float]] = {cut: [] for cut in left}
    for case in cases:
        seconds = race(left, case)
        if default not in seconds:
            sys.exit(f"{case}: wrong already with the defaults, {default.tiles}")
        left = [cut for cut in left if cut in seconds]
        for cut in left:
            ratios[cut].append(seconds[cut] / seconds[default])
    cut = min(left, key=lambda one: geometric_mean(ratios[one]))
    return Winner(cut, geometric_mean(ratios[cut]))


def timed(cuts: Sequence[Cut], case: Case, device: torch.device, rounds: int) -> dict[Cut, float]:
    """A race on the GPU."""
    problem = Problem(case, DTYPE, device)
    able = {str(number): cut for number, cut in enumerate(cuts) if can(problem, cut)}
    calls = {number: lambda cut=cut: run(problem, cut) for number, cut in able.items()}
    seconds = medians(calls, device, rounds)
    return {able[number]: of for number, of in seconds.items()}


def can(problem: Problem, cut: Cut) -> bool:
    """Does it fit, and compute the right thing?"""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return problem.error(run(problem, cut)) <= problem.allowed
    except (OutOfResources, PTXASError):
        return False


if __name__ == "__main__":
    main()
