"""Swapping blocks out and in by block size and layout, against one copy of pinned memory.

    python -m experiments.benchmarks.swap [--kv-cache-dtype fp8_e4m3]
    python -m experiments.benchmarks.swap --device cpu --quick    (the same way, without a GPU)

The engine's mover copies blocks between random places of both pools, so that no two of them share a
copy, the worst case. It is timed by the host's clock, until all copies are done, in the same rounds
as one large copy each way, its limit. The moved bytes are compared before the timing. Results go to
experiments/results/<GPU>/swap.json, those of an 8-bit cache to a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from experiments.benchmarks.device import CACHE, OPTIONS, Results, parse_device
from experiments.benchmarks.harness import columns, main_of
from experiments.benchmarks.shapes import SHAPES, TINY, shape_of
from experiments.benchmarks.timing import TIMED, Line, medians, noise, wait
from pagedsim.core import StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.cache import LAYOUTS, Cache, CacheShape, Mover
from pagedsim.kernels.float8 import AUTO, FORMATS

SIZES, FEW_SIZES = (8, 16, 32, 64, 128), (8, 16)
"""Tokens a block."""
MOVED, LITTLE = 128 * 2**20, 64 * 2**10
"""Bytes of a swap and of the one large copy beside it; at tiny sizes."""
WAYS = ("out", "in")


class Swap(NamedTuple):
    """One line of the table."""

    model: str
    block_size: int
    layout: str

    def __str__(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, a copy a {self.layout}"


def swap(words: Sequence[str]) -> None:
    """Measure all swaps; print a table, and keep the results."""
    asked = parse_device(__doc__, words, {**OPTIONS, "--kv-cache-dtype": CACHE})
    cache = asked.kv_cache_dtype
    dtype = FORMATS.get(cache, torch.bfloat16)
    results = Results("swap" if cache == AUTO else f"swap-{cache}", "swap", words, asked, dtype)
    moved = LITTLE if asked.quick else MOVED
    results.sweep(
        {str(one): one for one in swaps(asked.quick)},
        lambda one: measure(one, dtype, asked.device, moved, asked.rounds),
    )
    cells: dict[str, Callable[[Line], str]] = {
        "model": lambda one: one["model"],
        "block": lambda one: str(one["block_size"]),
        "layout": lambda one: one["layout"],
        "KiB a copy": lambda one: f"{one['copy_bytes'] / 1024:,.4g}",
        "GB/s out, in": lambda one: ", ".join(f"{one[way]['gb_s']:,.3g}" for way in WAYS),
        "of a pinned copy, out, in": of_pinned,
    }
    results.close(f"{results.heading()}\n\n{columns(results.timed(), cells)}")


def of_pinned(line: Line) -> str:
    """The speed each way as a share of one large copy's."""
    return ", ".join(f"{line[way]['of_pinned']:.0%}" for way in WAYS)


def swaps(quick: bool) -> Iterator[Swap]:
    """Every model, block size and layout."""
    for model in (TINY.name,) if quick else SHAPES:
        for size in FEW_SIZES if quick else SIZES:
            for layout in LAYOUTS:
                yield Swap(model, size, layout)


def measure(swap: Swap, dtype: torch.dtype, device: torch.device, moved: int, rounds: int) -> Line:
    """Whether it moves the right bytes and, if so, its speed each way."""
    of = shape_of(swap.model)
    shape = CacheShape(of.layers, swap.block_size, of.kv_heads, of.head_dim, dtype)
    blocks = max(2, moved // shape.block_bytes)
    cache = Cache(shape, 2 * blocks, 2 * blocks, device)
    mover = Mover(cache, swap.layout)
    pairs = scattered(blocks)
    found: Line = {
        "blocks": blocks,
        "copy_bytes": shape.block_bytes // (2 * of.layers if swap.layout == "layer" else 1),
        "right": right(cache, mover, pairs),
    }
    if not found["right"]:
        return found
    size = blocks * shape.block_bytes
    host = noise(size, torch.device("cpu"), pinned=device.type == "cuda")
    there = noise(size, device)
    # Pools contain random bytes, not zeros, as those of a server.
    for pool in (cache.gpu, cache.cpu):
        pool.view(torch.uint8).random_()
    seconds = medians(
        {
            "swap out": lambda: mover.move(plan_of("out", pairs)),
            "swap in": lambda: mover.move(plan_of("in", pairs)),
            "copy out": lambda: host.copy_(there, non_blocking=True),
            "copy in": lambda: there.copy_(host, non_blocking=True),
        },
        device,
        rounds,
        wall=True,
    )
    for way in WAYS:
        own, pinned = seconds[f"swap {way}"], seconds[f"copy {way}"]
        found[way] = {"gb_s": size / own / 1e9, "of_pinned": pinned / own}
    return {**found, TIMED: seconds["swap out"] + seconds["swap in"]}


def scattered(blocks: int) -> Pairs:
    """(GPU block, CPU block); no two pairs are adjacent in both pools, of 2 × blocks each."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(2 * block, 2 * place + 1) for place, block in enumerate(order)]


def plan_of(way: str, pairs: Pairs) -> StepPlan:
    """A step that only swaps."""
    plan = StepPlan(number=0, now=0.0)
    if way == "out":
        plan.swap_out = pairs
    else:
        plan.swap_in = [(place, block) for block, place in pairs]
    return plan


def right(cache: Cache, mover: Mover, pairs: Pairs) -> bool:
    """Whether swapped blocks come back unchanged, and no other block changes."""
    gpu, cpu = cache.gpu.view(torch.uint8), cache.cpu.view(torch.uint8)
    gpu.random_()
    cpu.zero_()
    before = gpu.cpu().clone()  # on a CPU it is the pool itself
    blocks, places = (torch.tensor(side) for side in zip(*pairs, strict=True))
    expected = torch.zeros_like(cpu)
    expected[places] = before[blocks]
    mover.move(plan_of("out", pairs))
    wait(gpu.device)
    gone = torch.equal(cpu, expected)
    gpu.zero_()
    mover.move(plan_of("in", pairs))
    wait(gpu.device)
    expected = torch.zeros_like(before)
    expected[blocks] = before[blocks]
    return gone and torch.equal(gpu.cpu(), expected)


main = main_of(swap)

if __name__ == "__main__":
    main()
