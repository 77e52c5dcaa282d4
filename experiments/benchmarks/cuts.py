"""How attention's kernels may be cut up: the defaults, who can be compiled, and a launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch

from experiments.benchmarks.shapes import SHAPES, Case, Problem
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import AUTO
from pagedsim.kernels.tiles import prefill_tiles
from pagedsim.kernels.tuning import DEFAULT, Cut, Heads

DTYPE = torch.bfloat16
MANY = 4096
"""Query tokens that fill a prefill's rows whatever they are."""


def heads_of(model: str, cache: str) -> Heads:
    """A model's shape as kernels are tuned for it."""
    shape = SHAPES[model]
    return Heads(shape.kv_heads, shape.group, shape.head_dim, DTYPE.itemsize, cache)


def usual(kernel: str, heads: Heads, capability: tuple[int, int]) -> Cut:
    """The defaults, where there are query tokens enough to fill a prefill's rows."""
    if kernel == "decode":
        return tuning.usual(heads, capability)
    _, group, head_dim, itemsize, cache = heads
    tiles = prefill_tiles(head_dim, group, itemsize, capability, MANY, cache != AUTO)
    return Cut(tiles, DEFAULT)


def screened(
    cuts: Sequence[Cut], case: Case, capability: tuple[int, int], processes: int | None = None
) -> list[Cut]:
    """Those that spill nothing and fit the GPU; compiled on all cores, as for any length."""
    target, few = 10 * capability[0] + capability[1], replace(case, batch=1, context=case.queries)
    spawning = get_context("spawn")  # a process that uses the GPU cannot fork
    workers = min(len(cuts), processes or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, spawning) as pool:
        fit = pool.map(partial(fits, replace(few, beside=0), target), cuts)
        return [cut for cut, does in zip(cuts, fit, strict=True) if does]


def fits(case: Case, target: int, cut: Cut) -> bool:
    """Whether what a cut launches spills nothing and fits; in a process of its own."""
    from triton.runtime.errors import PTXASError

    from experiments.benchmarks.ahead import LEAST, SHARED, launched, stand_in, taken

    stand_in(target)
    problem = Problem(case, DTYPE, torch.device("cpu"))
    try:
        found = [taken(kernel) for kernel in launched(partial(run, problem, cut))]
    except PTXASError:
        return False
    return all(one.spilled == 0 and one.shared <= SHARED.get(target, LEAST) for one in found)


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
            once=batch.once,
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
