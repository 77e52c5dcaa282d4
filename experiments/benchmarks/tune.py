"""Tunes tile sizes of attention on the GPU of this machine, and writes them to kernels/tuned.json.

    python -m pagedsim.experiments.benchmarks.tune [--models llama-3.1-8b ...]

For each model's head shape, candidates take turns with the defaults over a grid of batches and
contexts. The entry is the candidate with the least geometric mean of times over the defaults': one
for the whole grid, since with tiles that depend on the batch a sequence would get another result in
another batch. Decode is tuned twice: the parts of a context, then tiles. All candidates are first
compiled, on all cores; those that spill registers or do not fit the GPU are left out, and so are
those with wrong results. An entry is written as soon as it is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from pagedsim.core import PagedsimError
from pagedsim.experiments.benchmarks.device import facts, gpu, medians
from pagedsim.experiments.benchmarks.harness import main_of, parse
from pagedsim.experiments.benchmarks.shapes import LONG, SHAPES, Case, Problem, shape_of
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import AUTO, FORMATS
from pagedsim.kernels.tiles import MIN_ROWS, Split, Tiles, power_of_two, prefill_tiles
from pagedsim.kernels.tuning import DEFAULT, Cut, Heads

DTYPE = torch.bfloat16
DECODES = (
    *((64, 4096, 0), (64, 1024, 0), (1, LONG, 0), (63, 1024, LONG)),
    *((1, 512, 0), (8, 4096, 0), (256, 1024, 0)),
)
"""Batch, context, and the context of one more sequence; 0: none. First those of the headlines."""
PREFILLS = ((1, 512, 512), (1, 8192, 8192), (1, 2048, 2048), (2, 512, 8192))
"""Batch, query tokens, context."""
FULL_ROWS = 4096
"""Query tokens that fill the rows of a prefill's tile."""
ROWS, KEYS, WARPS, STAGES = (64, 128), (64, 128), (4, 8), (3, 5)
"""Of tiles: few, since compiling a candidate takes longer than timing it."""
PARTS, MOST = (256, 512, 1024, 2048), 128
"""Of a decode's contexts: keys of each, and how many at most."""


class Gpu(NamedTuple):
    """The GPU of this machine, and the facts of a measurement without its name."""

    name: str
    capability: tuple[int, int]
    facts: Mapping[str, Any]
    device: torch.device


def this_gpu(words: Sequence[str]) -> Gpu:
    """This machine's GPU; exits with a line if there is none."""
    device = gpu()
    about = facts(device, "tune", words)
    return Gpu(about.pop("device"), tuning.capability(device), about, device)


def best(cuts: Iterable[Cut], cases: Iterable[Case], gpu: Gpu, rounds: int) -> tuple[Cut, float]:
    """The fastest candidate over all cases, of those that can compute all, and its time over that
    of the first, the default, which always can."""
    left = list(dict.fromkeys(cuts))
    default = left[0]
    ratios: dict[Cut, list[float]] = {cut: [] for cut in left}
    for case in cases:
        seconds = race(left, case, gpu.device, rounds)
        if default not in seconds:
            raise PagedsimError(f"{case}: wrong already with the default, {default}")
        left = [cut for cut in left if cut in seconds]
        for cut in left:
            ratios[cut].append(seconds[cut] / seconds[default])
    winner = min(left, key=lambda cut: geometric_mean(ratios[cut]))
    return winner, round(geometric_mean(ratios[winner]), 4)


def tune(words: Sequence[str]) -> None:
    """Tune each model's head shape."""
    options = {
        "--models": {"nargs": "+", "choices": SHAPES, "default": SHAPES},
        "--kernels": {"nargs": "+", "choices": tuning.KERNELS, "default": tuning.KERNELS},
        "--kv-cache-dtype": (AUTO, *FORMATS),
        "--rounds": 20,
        "--table": {"type": Path, "default": tuning.PATH, "help": "the file to write to"},
    }
    asked = parse(__doc__, words, options)
    gpu = this_gpu(words)
    for model, kernel in product(asked.models, asked.kernels):
        add(tuned_attention(model, kernel, asked.kv_cache_dtype, gpu, asked.rounds), asked.table)


def add(entry: tuning.Entry, path: Path) -> None:
    """Add an entry to a table's file, and say what it gains."""
    tuning.write([*(tuning.read(path) if path.exists() else []), entry], path)
    times = f"{entry.measured['of_default_seconds']:.3f} of the default's time"
    print(f"{entry.heads}: {times} with {entry.tiles}, {entry.split}", flush=True)


def tuned_attention(model: str, kernel: str, cache: str, gpu: Gpu, rounds: int) -> tuning.Entry:
    """The entry of a model's head shape: for decodes the parts first, which matter most."""
    heads = heads_of(model, cache)
    start = default = default_cut(kernel, heads, gpu.capability)
    keys: tuple[int, ...] = KEYS
    warps: tuple[int, ...] = WARPS
    if kernel == "decode":
        keys, warps = (32, *KEYS), (1, 2, *WARPS)
        rows: tuple[int, ...] = (default.tiles.rows,)
        cases = [
            Case(model, batch, 1, context, cache=cache, beside=beside)
            for batch, context, beside in DECODES
        ]
        splits = [
            default._replace(split=Split(part, MOST))
            for part in PARTS
            if part % default.tiles.keys == 0
        ]
        fit = screened(splits, cases[0], gpu.capability)
        start, _ = best([default, *fit], cases, gpu, rounds)
    else:
        least = max(MIN_ROWS, power_of_two(heads.group))
        rows = tuple(size for size in ROWS if size >= least)
        cases = [Case(model, *numbers, cache=cache) for numbers in PREFILLS]
    by_warp = (False, True) if kernel == "decode" else (False,)
    tiles = [Tiles(*fields) for fields in product(rows, keys, warps, STAGES, by_warp)]
    candidates = [
        start._replace(tiles=size)
        for size in tiles
        if kernel == "prefill" or start.split.part % size.keys == 0
        if (size.keys >= 16 * size.warps if size.by_warp else size.warps in WARPS)
    ]
    fit = screened(candidates, cases[0], gpu.capability)
    cut, ratio = best([default, start, *fit], cases, gpu, rounds)
    measured = {**gpu.facts, "of_default_seconds": ratio}
    return tuning.Entry(gpu.name, gpu.capability, kernel, heads, cut.tiles, cut.split, measured)


def heads_of(model: str, cache: str) -> Heads:
    """A model's shape as kernels are tuned for it."""
    shape = shape_of(model)
    group = shape.heads // shape.kv_heads
    return Heads(shape.kv_heads, group, shape.head_dim, DTYPE.itemsize, cache)


def default_cut(kernel: str, heads: Heads, capability: tuple[int, int]) -> Cut:
    """The default tiles, for a prefill of many query tokens."""
    if kernel == "decode":
        return tuning.usual(heads, capability)
    _, group, head_dim, itemsize, cache = heads
    tiles = prefill_tiles(head_dim, group, itemsize, capability, FULL_ROWS, cache != AUTO)
    return Cut(tiles, DEFAULT)


def race(cuts: Sequence[Cut], case: Case, device: torch.device, rounds: int) -> dict[Cut, float]:
    """Seconds of a case by candidate, without those that do not fit or are wrong."""
    from triton.runtime.errors import OutOfResources, PTXASError

    problem, calls = Problem(case, DTYPE, device), dict[Cut, Callable[[], torch.Tensor]]()
    for cut in cuts:
        with suppress(OutOfResources, PTXASError):
            if problem.error(attend(problem, cut)) <= problem.allowed:
                calls[cut] = partial(attend, problem, cut)
    return medians(calls, device, rounds)


def attend(problem: Problem, cut: Cut) -> torch.Tensor:
    """The problem's kernel with these tiles."""
    from pagedsim.kernels import attention, decode

    case, batch = problem.case, problem.batch
    caches = problem.q, problem.k_cache, problem.v_cache, problem.tables
    settings: dict[str, Any] = {"scale": problem.scale, "tiles": cut.tiles}
    if case.queries == 1:
        return decode.paged_decode(
            *caches, batch.context_lens, once=batch.once, split=cut.split, **settings
        )
    lengths = batch.query_start, batch.context_lens
    return attention.paged_attention(*caches, *lengths, max_query_len=case.queries, **settings)


def screened(
    cuts: Sequence[Cut], case: Case, capability: tuple[int, int], processes: int | None = None
) -> list[Cut]:
    """The candidates that spill nothing and fit the GPU; compiled on all cores, for any length."""
    target = 10 * capability[0] + capability[1]
    few = case._replace(batch=1, context=case.queries, beside=0)
    spawning = get_context("spawn")  # a process that uses the GPU cannot fork
    workers = min(len(cuts), processes or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, spawning) as pool:
        fit = pool.map(partial(fits, few, target), cuts)
        return [cut for cut, does in zip(cuts, fit, strict=True) if does]


def fits(case: Case, target: int, cut: Cut) -> bool:
    """Whether a candidate's kernels spill nothing and fit; in a process of its own."""
    from triton.runtime.errors import PTXASError

    from pagedsim.experiments.benchmarks import fake_gpu

    fake_gpu.use_target(target)
    problem = Problem(case, DTYPE, torch.device("cpu"))
    try:
        kernels = fake_gpu.compiled_kernels(partial(attend, problem, cut))
        used = [fake_gpu.usage(kernel) for kernel in kernels]
    except PTXASError:
        return False
    room = fake_gpu.SHARED.get(target, min(fake_gpu.SHARED.values()))
    return all(kernel.spilled == 0 and kernel.shared <= room for kernel in used)


main = main_of(__name__, tune)
