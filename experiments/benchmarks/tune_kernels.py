"""Tile sizes of the attention kernels, tried on the GPU that is there; writes kernels/tuned.json.

    python -m experiments.benchmarks.tune_kernels [--models llama-3.1-8b ...]
    python -m experiments.benchmarks.tune_kernels --kv-cache-dtype fp8_e4m3

For each model's head shape, candidates take turns with the defaults over a grid of batches and
contexts. The entry is the candidate whose time over the defaults' has the least geometric mean:
one for the whole grid, since a kernel that changed with the batch would give a sequence another
result in other company. Decode is tuned in two turns: tiles, then the parts of a context. A
candidate that does not fit the GPU, or computes something else, is out. What spills registers
`pytest -m slow tests/kernels/test_tuning.py` finds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.device import Plain, add_cache, facts, medians, require_gpu
from experiments.benchmarks.shapes import SHAPES, Case, Problem
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import AUTO
from pagedsim.kernels.tiles import MIN_ROWS, Split, Tiles, decode_tiles, power_of_two, prefill_tiles
from pagedsim.kernels.tuning import DEFAULT, Cut, Entry, Heads

DTYPE = torch.bfloat16
DECODES = ((1, 512), (1, 4096), (8, 4096), (64, 512), (64, 4096), (256, 1024))
"""(batch, context)"""
PREFILLS = ((1, 512, 512), (1, 4096, 4096), (2, 512, 8192))
"""(batch, query tokens, context)"""

Race = Callable[[Sequence[Cut], Case], Mapping[Cut, float]]
"""Seconds of a case by candidate; those that cannot do it are left out."""


class Grid(NamedTuple):
    """What is tried, each with each."""

    rows: tuple[int, ...] = (64, 128)
    keys: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (2, 3, 5, 7)
    segments: tuple[int, ...] = (8, 16, 32, 64)
    least: tuple[int, ...] = (1, 2, 4)


FULL = Grid()
SHORT = Grid(keys=(64, 128), stages=(3, 5), segments=(16, 32), least=(1, 2))
"""Where minutes count: each candidate is compiled, which takes longer than its race."""


class Winner(NamedTuple):
    """The best candidate and its time over the first candidate's, over all cases."""

    cut: Cut
    ratio: float


def main(words: Sequence[str] | None = None) -> None:
    """Tune each model's shape, and write its entries as soon as they are known."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    add_cache(parser)
    parser.add_argument("--short", action="store_true", help="a third of the candidates")
    parser.add_argument("--rounds", type=int, default=20, help="a time is the median of so many")
    parser.add_argument("--table", type=Path, default=tuning.PATH, help="the file to write to")
    asked = parser.parse_args(words)
    require_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    told = facts(device, "experiments.benchmarks.tune_kernels", words)
    gpu = Gpu(told.pop("device"), tuning.capability(device))
    for model in asked.models:
        entries = tuned(
            model,
            gpu,
            told,
            lambda cuts, case: timed(cuts, case, device, asked.rounds),
            asked.kv_cache_dtype,
            SHORT if asked.short else FULL,
        )
        known = tuning.read(asked.table) if asked.table.exists() else []
        tuning.write([*known, *entries], asked.table)


class Gpu(NamedTuple):
    """What entries are for."""

    name: str
    capability: tuple[int, int]


def tuned(
    model: str,
    gpu: Gpu,
    told: Mapping[str, Any],
    race: Race,
    cache: str = AUTO,
    grid: Grid = FULL,
) -> list[Entry]:
    """The entries of a model's shape; says what it found."""
    heads = heads_of(model, cache)
    what = model if cache == AUTO else f"{model}, {cache}"
    entries = []
    for kernel, work in (("prefill", best_prefill), ("decode", best_decode)):
        cut, ratio = work(model, gpu.capability, race, cache, grid)
        print(f"{what}, {kernel}: {ratio:.3f} of the defaults' time with {cut.tiles}", end="")
        print(f", {cut.split}" if kernel == "decode" else "", flush=True)
        measured = {**told, "of_default_seconds": round(ratio, 4)}
        entries.append(Entry(*gpu, kernel, heads, cut.tiles, cut.split, measured))
    return entries


def heads_of(model: str, cache: str) -> Heads:
    """A model's shape as kernels are tuned for it."""
    shape = SHAPES[model]
    return Heads(shape.kv_heads, shape.group, shape.head_dim, DTYPE.itemsize, cache)


def usual(kernel: str, heads: Heads, capability: tuple[int, int]) -> Cut:
    """The defaults, where there are query tokens enough to fill a prefill's rows."""
    _, group, head_dim, itemsize, cache = heads
    if kernel == "decode":
        return Cut(decode_tiles(head_dim, group, itemsize, capability, cache != AUTO), DEFAULT)
    longest = max(queries for _, queries, _ in PREFILLS)
    tiles = prefill_tiles(head_dim, group, itemsize, capability, longest, cache != AUTO)
    return Cut(tiles, DEFAULT)


def best_prefill(
    model: str, capability: tuple[int, int], race: Race, cache: str, grid: Grid
) -> Winner:
    """Tiles of prefills and chunks."""
    candidates = [
        Cut(Tiles(rows, keys, warps, stages), DEFAULT)
        for rows, keys, warps, stages in product(*grid[:4])
        if rows >= max(MIN_ROWS, power_of_two(SHAPES[model].group))
    ]
    cases = [Case(model, *numbers, cache=cache) for numbers in PREFILLS]
    return best([usual("prefill", heads_of(model, cache), capability), *candidates], cases, race)


def best_decode(
    model: str, capability: tuple[int, int], race: Race, cache: str, grid: Grid
) -> Winner:
    """Tiles of decodes, then the parts that these tiles do best in."""
    default = usual("decode", heads_of(model, cache), capability)
    cases = [Case(model, batch, 1, context, cache=cache) for batch, context in DECODES]
    candidates = [
        default._replace(tiles=replace(default.tiles, keys=keys, warps=warps, stages=stages))
        for keys, warps, stages in product(*grid[1:4])
    ]
    first = best([default, *candidates], cases, race)
    splits = [
        first.cut._replace(split=Split(segments, least)) for segments, least in product(*grid[4:])
    ]
    return best([default, first.cut, *splits], cases, race)


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


def run(problem: Problem, cut: Cut) -> torch.Tensor:
    """The problem's kernel, cut up so."""
    from pagedsim.kernels import attention, decode

    case, batch = problem.case, problem.batch
    if case.queries == 1:
        return decode.paged_decode(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.tables,
            batch.context_lens,
            scale=problem.scale,
            tiles=cut.tiles,
            split=cut.split,
        )
    return attention.paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.tables,
        batch.query_start,
        batch.context_lens,
        scale=problem.scale,
        max_query_len=case.queries,
        tiles=cut.tiles,
    )


if __name__ == "__main__":
    main()
