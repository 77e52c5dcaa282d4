"""Tunes tile sizes of our kernels on the GPU of this machine, and writes them to kernels/.

    python -m pagedsim.experiments.benchmarks.tune attention [--models llama-3.1-8b ...]
    python -m pagedsim.experiments.benchmarks.tune products [--models NAME ...] [--weights int8]

`attention` writes tuned.json. For each model's head shape, candidates take turns with the defaults
over a grid of batches and contexts. The entry is the candidate with the least geometric mean of
times over the defaults': one for the whole grid, since with tiles that depend on the batch a
sequence would get another result in another batch. Decode is tuned twice: the parts of a context,
then tiles. All candidates are first compiled, on all cores; those that spill registers or do not
fit the GPU are left out. `products` writes tuned_products.json: for each matrix of a model's layer,
and as many tokens as each tile has rows, the fastest.

Candidates with wrong results are left out. An entry is written as soon as it is known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeVar

import torch

from pagedsim.experiments.benchmarks.device import CACHE, facts, gpu
from pagedsim.experiments.benchmarks.harness import main_of, parse
from pagedsim.experiments.benchmarks.products import WEIGHTS, Layer
from pagedsim.experiments.benchmarks.shapes import (
    BASE,
    LONG,
    SHAPES,
    Case,
    Problem,
    group_of,
    shape_of,
)
from pagedsim.experiments.benchmarks.timing import medians, norm_error
from pagedsim.kernels import product_tuning, tuning
from pagedsim.kernels.float8 import AUTO
from pagedsim.kernels.product_tuning import Matrix
from pagedsim.kernels.tiles import (
    MIN_ROWS,
    ProductTiles,
    Split,
    Tiles,
    power_of_two,
    prefill_tiles,
)
from pagedsim.kernels.tuning import DEFAULT, Cut, Heads

DTYPE = torch.bfloat16
C = TypeVar("C")
K = TypeVar("K")


class Gpu(NamedTuple):
    """The GPU of an entry."""

    name: str
    capability: tuple[int, int]


def measured_gpu(words: Sequence[str]) -> tuple[Gpu, dict[str, Any], torch.device]:
    """This machine's GPU, the facts of a measurement without its name, and its device."""
    device = gpu()
    told = facts(device, "pagedsim.experiments.benchmarks.tune", words)
    return Gpu(told.pop("device"), tuning.capability(device)), told, device


def add(entry: tuning.Entry | product_tuning.Entry, path: Path) -> None:
    """Write an entry to a table's file, and print it."""
    table: Any = tuning if isinstance(entry, tuning.Entry) else product_tuning
    table.write([*(table.read(path) if path.exists() else ()), entry], path)
    what = entry.heads if isinstance(entry, tuning.Entry) else entry.matrix
    split = f", {entry.split}" if isinstance(entry, tuning.Entry) else ""
    ratio = entry.measured["of_default_seconds"]
    print(f"{what}: {ratio:.3f} of the default's time with {entry.tiles}{split}", flush=True)


def best(
    candidates: Iterable[K], cases: Iterable[C], race: Callable[[Sequence[K], C], Mapping[K, float]]
) -> tuple[K, float]:
    """The fastest candidate over all cases, of those that can compute all, and its time over that
    of the first, the default, which always can."""
    left = list(dict.fromkeys(candidates))
    default = left[0]
    ratios: dict[K, list[float]] = {one: [] for one in left}
    for case in cases:
        seconds = race(left, case)
        if default not in seconds:
            sys.exit(f"{case}: wrong already with the default, {default}")
        left = [one for one in left if one in seconds]
        for one in left:
            ratios[one].append(seconds[one] / seconds[default])
    winner = min(left, key=lambda one: geometric_mean(ratios[one]))
    return winner, round(geometric_mean(ratios[winner]), 4)


def able(candidates: Sequence[K], right: Callable[[K], bool]) -> list[K]:
    """The candidates that fit the GPU and compute the right result."""
    from triton.runtime.errors import OutOfResources, PTXASError

    found = []
    for one in candidates:
        try:
            found += [one] if right(one) else []
        except (OutOfResources, PTXASError):
            continue
    return found


# -- attention -------------------------------------------------------------------------------------

DECODES = (
    *((1, 512, 0), (1, 4096, 0), (8, 4096, 0), (64, 512, 0), (64, 1024, 0), (64, 4096, 0)),
    *((256, 1024, 0), (8, 32768, 0), (1, LONG, 0), (63, 1024, LONG)),
)
"""Batch, context, and the context of one more sequence; 0: none."""
PREFILLS = ((1, 512, 512), (1, 4096, 4096), (2, 512, 8192))
"""Batch, query tokens, context."""
FULL_ROWS = 4096
"""Query tokens that fill the rows of a prefill's tile."""

Race = Callable[[Sequence[Cut], Case], Mapping[Cut, float]]
"""Seconds of a case by candidate, without those that cannot compute it."""
Screen = Callable[[Sequence[Cut], Case], Sequence[Cut]]
"""The candidates that can be launched."""


class Grid(NamedTuple):
    """The candidates: all combinations of these."""

    rows: tuple[int, ...] = (64, 128)
    keys: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (2, 3, 5, 7)
    parts: tuple[int, ...] = (128, 256, 512, 1024)
    most: tuple[int, ...] = (32, 64, 128)


FULL = Grid()
SHORT = Grid(keys=(64, 128), stages=(3, 5, 7), parts=(256, 512, 1024, 2048), most=(128,))
"""For a GPU lent for minutes: compiling a candidate takes longer than timing it."""


def attention(words: Sequence[str]) -> None:
    """Tune each model's head shape."""
    options = {
        "--models": {"nargs": "+", "choices": list(SHAPES), "default": list(SHAPES)},
        "--kernels": {"nargs": "+", "choices": tuning.KERNELS, "default": tuning.KERNELS},
        "--kv-cache-dtype": CACHE,
        "--short": {"action": "store_true", "help": "a third of the candidates"},
        "--rounds": 20,
        "--table": {"type": Path, "default": tuning.PATH, "help": "the file to write to"},
    }
    asked = parse(__doc__, words, options)
    here, told, device = measured_gpu(["attention", *words])
    for model, kernel in product(asked.models, asked.kernels):
        entry = tuned_attention(
            model,
            kernel,
            here,
            told,
            partial(attention_race, device=device, rounds=asked.rounds),
            partial(screened, capability=here.capability),
            asked.kv_cache_dtype,
            SHORT if asked.short else FULL,
        )
        add(entry, asked.table)


def tuned_attention(
    model: str,
    kernel: str,
    here: Gpu,
    told: Mapping[str, Any],
    race: Race,
    screen: Screen,
    cache: str = AUTO,
    grid: Grid = FULL,
) -> tuning.Entry:
    """The entry of a model's head shape: for decodes the parts first, which matter most."""
    heads = heads_of(model, cache)
    default = default_cut(kernel, heads, here.capability)
    rows = [default.tiles.rows]
    cases = [
        Case(model, batch, 1, context, cache=cache, beside=sum(beside))
        for batch, context, *beside in DECODES
    ]
    if kernel == "prefill":
        least = max(MIN_ROWS, power_of_two(heads.group))
        rows = [size for size in grid.rows if size >= least]
        cases = [Case(model, *numbers, cache=cache) for numbers in PREFILLS]
    start = default
    if kernel == "decode":
        splits = [
            default._replace(split=Split(part, most))
            for part, most in product(grid.parts, grid.most)
            if part % default.tiles.keys == 0
        ]
        start, _ = best([default, *screen(splits, cases[0])], cases, race)
    candidates = [
        start._replace(tiles=Tiles(*each))
        for each in product(rows, grid.keys, grid.warps, grid.stages)
        if kernel == "prefill" or start.split.part % each[1] == 0
    ]
    cut, ratio = best([default, start, *screen(candidates, cases[0])], cases, race)
    measured = {**told, "of_default_seconds": ratio}
    return tuning.Entry(*here, kernel, heads, cut.tiles, cut.split, measured)


def heads_of(model: str, cache: str) -> Heads:
    """A model's shape as kernels are tuned for it."""
    shape = shape_of(model)
    return Heads(shape.kv_heads, group_of(shape), shape.head_dim, DTYPE.itemsize, cache)


def default_cut(kernel: str, heads: Heads, capability: tuple[int, int]) -> Cut:
    """The default tiles, for a prefill of many query tokens."""
    if kernel == "decode":
        return tuning.usual(heads, capability)
    _, group, head_dim, itemsize, cache = heads
    tiles = prefill_tiles(head_dim, group, itemsize, capability, FULL_ROWS, cache != AUTO)
    return Cut(tiles, DEFAULT)


def attention_race(
    cuts: Sequence[Cut], case: Case, device: torch.device, rounds: int
) -> dict[Cut, float]:
    """A race on the GPU."""
    problem = Problem(case, DTYPE, device)
    there = able(cuts, partial(computes, problem))
    return medians({cut: partial(attend, problem, cut) for cut in there}, device, rounds)


def computes(problem: Problem, cut: Cut) -> bool:
    """Whether a candidate computes the right result."""
    return problem.error(attend(problem, cut)) <= problem.allowed


def attend(problem: Problem, cut: Cut) -> torch.Tensor:
    """The problem's kernel with these tiles."""
    from pagedsim.kernels import attention, decode

    case, batch = problem.case, problem.batch
    caches = problem.q, problem.k_cache, problem.v_cache, problem.tables
    how: dict[str, Any] = {"scale": problem.scale, "tiles": cut.tiles}
    if case.queries == 1:
        return decode.paged_decode(
            *caches, batch.context_lens, once=batch.once, split=cut.split, **how
        )
    lengths = batch.query_start, batch.context_lens
    return attention.paged_attention(*caches, *lengths, max_query_len=case.queries, **how)


def screened(
    cuts: Sequence[Cut], case: Case, capability: tuple[int, int], processes: int | None = None
) -> list[Cut]:
    """The candidates that spill nothing and fit the GPU; compiled on all cores, for any length."""
    target, few = 10 * capability[0] + capability[1], replace(case, batch=1, context=case.queries)
    spawning = get_context("spawn")  # a process that uses the GPU cannot fork
    workers = min(len(cuts), processes or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, spawning) as pool:
        fit = pool.map(partial(fits, replace(few, beside=0), target), cuts)
        return [cut for cut, does in zip(cuts, fit, strict=True) if does]


def fits(case: Case, target: int, cut: Cut) -> bool:
    """Whether a candidate's kernels spill nothing and fit; in a process of its own."""
    from triton.runtime.errors import PTXASError

    from pagedsim.experiments.benchmarks import fake_gpu

    fake_gpu.use_target(target)
    problem = Problem(case, DTYPE, torch.device("cpu"))
    try:
        kernels = fake_gpu.compiled_kernels(partial(attend, problem, cut))
        found = [fake_gpu.usage(kernel) for kernel in kernels]
    except PTXASError:
        return False
    room = fake_gpu.SHARED.get(target, fake_gpu.LEAST_SHARED)
    return all(one.spilled == 0 and one.shared <= room for one in found)


# -- products --------------------------------------------------------------------------------------

MODELS = ("llama-3.1-8b", "qwen3-0.6b", "llama-2-7b", "llama-3.1-70b")
ROWS = (16, 32)
COLUMNS = (16, 32, 64, 128)
DEPTHS = (64, 128, 256, 512)
WARPS = (4, 8)
STAGES = (3, 4, 6)
STAGE_BYTES = (4 * 1024, 48 * 1024)
"""Limits of a stage of the pipeline; whether all stages fit a GPU is checked by Triton."""


def products(words: Sequence[str]) -> None:
    """Tune each model's layer."""
    options = {
        "--models": {"nargs": "+", "choices": MODELS, "default": [BASE]},
        "--weights": tuple(WEIGHTS),
        "--rounds": 20,
        "--table": {"type": Path, "default": product_tuning.PATH, "help": "where to write"},
        "--resume": {"action": "store_true", "help": "skip what this code has tuned"},
    }
    asked = parse(__doc__, words, options)
    here, told, device = measured_gpu(["products", *words])
    known = product_tuning.read(asked.table) if asked.resume and asked.table.exists() else []
    done = {
        (one.matrix, one.tiles.rows)
        for one in known
        if one.gpu == here.name and one.measured.get("code") == told["code"]
    }
    for model, rows in product(asked.models, ROWS):
        layer = Layer(shape_of(model), rows, asked.weights, DTYPE, device)
        for name in layer.weights:
            matrix = matrix_of(layer, name)
            if (matrix, rows) in done:
                continue
            default = product_tuning.usual(matrix, rows, here.capability)
            race = partial(product_race, layer=layer, device=device, rounds=asked.rounds)
            tiles, ratio = best([default, *product_candidates(matrix, rows)], [name], race)
            measured = {**told, "of_default_seconds": ratio}
            add(product_tuning.Entry(*here, matrix, tiles, measured), asked.table)


def matrix_of(layer: Layer, name: str) -> Matrix:
    """The key of a product's tiles."""
    values, gated = layer.weights[name].values, name == "gate_up"
    outputs, inputs = values.shape
    itemsizes = DTYPE.itemsize, values.itemsize
    return Matrix(outputs // 2 if gated else outputs, inputs, itemsizes, gated)


def product_candidates(matrix: Matrix, rows: int) -> Iterator[ProductTiles]:
    """Tiles that are neither tiny nor huge."""
    item, weight_item = matrix.itemsizes
    for columns, depth, warps, stages in product(COLUMNS, DEPTHS, WARPS, STAGES):
        weights = columns * (2 if matrix.gated else 1) * weight_item
        if STAGE_BYTES[0] <= depth * weights and depth * (weights + rows * item) <= STAGE_BYTES[1]:
            yield ProductTiles(rows, columns, depth, warps, stages)


def product_race(
    tiles: Sequence[ProductTiles], name: str, layer: Layer, device: torch.device, rounds: int
) -> dict[ProductTiles, float]:
    """A race on the GPU of one product of a layer, with its norm, gate or residual sum; results
    are compared with those of the first tiles."""
    from pagedsim.kernels import product

    values, scale = layer.weights[name]
    kind: Any = {"dtype": layer.tokens.dtype, "device": values.device}
    x = layer.tokens
    if added := name in ("out", "down"):
        x = torch.randn(len(layer.tokens), values.shape[1], **kind)

    def run(own: ProductTiles) -> torch.Tensor:
        if added:
            product.add_product(layer.residual, x, values, None, scale, tiles=own)
            return layer.residual
        gated = name == "gate_up"
        return product.product(x, values, None, scale, norm=layer.known, gated=gated, tiles=own)

    def fresh(own: ProductTiles) -> torch.Tensor:
        """The result for the layer's original input."""
        layer.reset()
        return run(own).double()

    right = fresh(tiles[0])
    allowed = torch.finfo(x.dtype).eps
    there = able(tiles, lambda own: norm_error(fresh(own), right) <= allowed)
    return medians({own: partial(run, own) for own in there}, device, rounds)


main = main_of(__name__, attention, products)
